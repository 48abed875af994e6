"""An environment of your own: find the hidden word of a list with the help of hints.

A run uses it with `import: [my_envs]` and `environments: [{id: mine/HiddenWord-v0}]` in its YAML file.
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium

from roll_like.envs import FewShot, FreeText, TaskRows, read_task_rows

#: Shown before each episode, as turns of its conversation: a small model imitates examples better than a description.
SOLVED = [
    ("Words: lamp, river, tiger, bread. Which word is hidden?", "lamp"),
    ("No. The hidden word begins with t.", "tiger"),
    ("Words: stone, piano, cloud, honey. Which word is hidden?", "piano"),
    ("No. The hidden word begins with c.", "cloud"),
]


class HiddenWord(gymnasium.Env[str, str]):
    """`mine/HiddenWord-v0`: one word of a list is hidden; a wrong guess is answered with its first letter.

    The reward is 1 for the hidden word, and -0.1 for an answer that does not name exactly one word of the list.

    Args:
        path: Rows of `words` (a list) and `hidden` (one of them); a file is relative to where the run is started.
        max_turns: Guesses of an episode.
    """

    observation_space = action_space = FreeText()
    metadata = {"render_modes": []}
    system_prompt = "One of the listed words is hidden. Guess it. Answer with one word of the list and nothing else."

    def __init__(self, path: str = "train.jsonl", max_turns: int = 3) -> None:
        self.rows = TaskRows(read_task_rows(path, ("words", "hidden")))
        self.max_turns = max_turns

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Hide the word of the seed's row: all episodes of a group have the same seed, and so the same word."""
        super().reset(seed=seed)
        row = self.rows.row(seed, self.np_random)
        self.words: list[str] = row["words"]
        self.hidden: str = row["hidden"]
        self.turn, self.found, self.hint = 0, False, ""
        return f"Words: {', '.join(self.words)}. Which word is hidden?", self.info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a guess. Any text is an answer: a policy may write anything."""
        self.turn += 1
        named = set(re.findall(r"\w+", action.lower())) & set(self.words)
        self.found = self.found or named == {self.hidden}
        if self.found:
            text, reward = "Right.", 1.0
        elif len(named) == 1:
            self.hint = self.hidden[0]
            text, reward = f"No. The hidden word begins with {self.hint}.", 0.0
        else:
            text, reward = f"Answer with one of these words: {', '.join(self.words)}.", -0.1
        truncated = not self.found and self.turn >= self.max_turns
        return text, reward, self.found, truncated, self.info() | {"invalid_action": len(named) != 1}

    def info(self) -> dict[str, Any]:
        """Return what the run reads beside the observation: docs/environments.md lists the keys."""
        return {"state": f"{self.words} {self.hidden} {self.hint}", "success": self.found}

    def scripted_action(self) -> str:
        """Return the answer of a player that solves every episode; `check_env` plays with it."""
        return next(word for word in self.words if word.startswith(self.hint))


def hidden_word(path: str = "train.jsonl", max_turns: int = 3) -> gymnasium.Env[str, str]:
    """Return `mine/HiddenWord-v0`: the environment, with examples in front."""
    return FewShot(HiddenWord(path, max_turns), SOLVED)


gymnasium.register("mine/HiddenWord-v0", entry_point=f"{__name__}:hidden_word")
