"""TextWorld: text adventures with rooms, objects and a quest, generated and compiled once, then played.

Making a game takes seconds, playing it milliseconds. Games are kept in a folder and shared by every
process that uses it.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import gymnasium
from filelock import FileLock
from gymnasium.error import ResetNeeded

from roll_like.builtin.envs.extras import need
from roll_like.envs import FreeText, read_action, write_action
from roll_like.envs.actions import STYLES, Style
from roll_like.errors import EnvError

ENV_ID = "roll_like/TextWorld-v0"
PACKAGE = "textworld==1.7.0"
_ASKED = (
    "feedback", "objective", "description", "inventory", "admissible_commands", "policy_commands",
    "won", "lost", "max_score",
)  # fmt: skip


class TextWorld(gymnasium.Env[str, str]):
    """`roll_like/TextWorld-v0`.

    Seed n plays game n modulo the number of games. Rewards are the game's points as a share of all its points.

    Args:
        rooms: Rooms of a generated game.
        objects: Objects in them.
        quest_length: Commands that the quest takes.
        games: How many different games there are.
        folder: Where they are kept; default: `roll_like/textworld` in the user's cache folder.
        path: Games to play instead of generated ones: a `.z8` file (with its `.json`), or a folder of such.
        show_commands: Say which commands are possible, in each observation.
        style: How an answer holds the command; `word` takes the whole answer.
        invalid_penalty: What an answer without a command costs; ≥ 0.
        max_turns: Commands in an episode.

    Raises:
        EnvError: TextWorld is not installed, a game cannot be made, or `path` holds none.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(
        self,
        *,
        rooms: int = 2,
        objects: int = 4,
        quest_length: int = 2,
        games: int = 8,
        folder: str | None = None,
        path: str | None = None,
        show_commands: bool = True,
        style: Style = "tag",
        invalid_penalty: float = 0.1,
        max_turns: int = 20,
    ) -> None:
        need("textworld", PACKAGE, ENV_ID)
        if style not in STYLES:
            raise EnvError(f"unknown action style {style!r}", fix=f"style is one of {', '.join(STYLES)}")
        if min(rooms, objects, quest_length, games, max_turns) < 1 or invalid_penalty < 0:
            raise EnvError("rooms, objects, quest_length, games and max_turns are at least 1, invalid_penalty 0")
        self.observation_space = FreeText()
        self.action_space = FreeText()
        self.system_prompt = f"Play the game. Answer {write_action('one command', style)}."
        self._make = (rooms, objects, quest_length)
        self._games = games
        self._folder = _cache() if folder is None else Path(folder).expanduser()
        self._files = None if path is None else _found(Path(path).expanduser())
        self._show_commands, self._style = show_commands, style
        self._penalty, self._max_turns = invalid_penalty, max_turns
        self._play: Any = None
        self._file: Path | None = None
        self._commands: list[str] = []  # of this episode, so that it can be saved
        self._turns, self._open = 0, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start a game."""
        super().reset(seed=seed, options=options)
        number = int(self.np_random.integers(2**31)) if seed is None else seed
        if self._files is not None:
            self._file = self._files[number % len(self._files)]
        else:
            self._file = make_game(self._folder, *self._make, number % self._games)
        self._turns, self._open = 0, True
        self._start()
        return self._shown(self._state.objective), {"state": self._key()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Give one command.

        Raises:
            ResetNeeded: The episode is over.
        """
        if not self._open:
            raise ResetNeeded("the game is over; call reset() first")
        self._turns += 1
        command = _one_line(read_action(action, self._style) or "")
        reward, done = -self._penalty, False
        if command:
            before = self._score
            self._give(command)
            reward = float(self._score - before) / (self._state.max_score or 1)
            done = bool(self._state.won or self._state.lost)
        truncated = not done and self._turns >= self._max_turns
        self._open = not (done or truncated)
        info: dict[str, Any] = {"state": self._key(), "invalid_action": not command}
        if not self._open:
            info["success"] = bool(self._state.won)
        text = self._shown(self._state.feedback) if command else f"That names no command. {self.system_prompt}"
        return text, reward, done, truncated, info

    def scripted_action(self) -> str | None:
        """Return the next command of a way that wins; None where none is known."""
        known = self._state.policy_commands if self._open else None
        return write_action(known[0], self._style) if known else None

    def close(self) -> None:
        """Stop the game's interpreter."""
        if self._play is not None:
            self._play.close()
            self._play = None
        self._open = False

    def __getstate__(self) -> dict[str, Any]:
        """The interpreter cannot be saved; the commands that led here can."""
        return {**self.__dict__, "_play": None, "_state": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._file is not None:
            commands = self._commands
            self._start()
            for command in commands:
                self._give(command)

    def _start(self) -> None:
        textworld = need("textworld", PACKAGE, ENV_ID)
        # its interpreter says so of every generated game; what it calls not supported is not used
        warnings.filterwarnings("ignore", message="Game .* is not fully supported")
        if self._play is not None:
            self._play.close()
        self._play = textworld.start(str(self._file), textworld.EnvInfos(**dict.fromkeys(_ASKED, True)))
        self._state = self._play.reset()
        self._score, self._commands = 0, []

    def _give(self, command: str) -> None:
        self._state, self._score, _ = self._play.step(command)
        self._commands.append(command)

    def _key(self) -> str:
        return f"{self._file and self._file.name}\n{self._state.description}\n{self._state.inventory}"

    def _shown(self, text: str) -> str:
        lines = [_cleaned(text)]
        if not self._commands:
            lines.append(_cleaned(self._state.description))
        if self._show_commands and self._open:
            lines.append(f"Commands: {', '.join(self._state.admissible_commands)}.")
        return "\n".join(lines)


def make_game(folder: Path, rooms: int, objects: int, quest_length: int, number: int) -> Path:
    """Return a compiled game, made where it is not there yet.

    Raises:
        EnvError: TextWorld could not make it.
    """
    file = folder / f"rooms{rooms}-objects{objects}-quest{quest_length}-{number}.z8"
    if file.is_file():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    textworld = need("textworld", PACKAGE, ENV_ID)
    # one process makes it, in a folder of its own, and puts the finished files in place
    with FileLock(f"{file}.lock"):
        if file.is_file():
            return file
        with tempfile.TemporaryDirectory(dir=folder) as made:
            options = textworld.GameOptions()
            options.nb_rooms, options.nb_objects, options.quest_length = rooms, objects, quest_length
            options.seeds = number
            options.path = str(Path(made) / file.name)
            try:
                textworld.generator.compile_game(textworld.generator.make_game(options), options)
            except Exception as error:
                raise EnvError(
                    f"TextWorld could not make a game of {rooms} rooms, {objects} objects and a quest of "
                    f"{quest_length} commands: {type(error).__name__}: {error}",
                    fix="choose other numbers, or give games by `path`",
                ) from error
            shutil.move(Path(made) / f"{file.stem}.json", file.with_suffix(".json"))
            shutil.move(Path(made) / file.name, file)
    return file


def _found(path: Path) -> list[Path]:
    files = sorted(path.glob("*.z8")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise EnvError(f"no TextWorld game at {path}", fix="give a .z8 file or a folder of such as `path`")
    return files


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roll_like" / "textworld"


def _one_line(command: str) -> str:
    return " ".join(command.split())


def _cleaned(text: str) -> str:
    """Return a game's text without prompt, status line and empty lines."""
    lines = [re.sub(r"^>.*", "", line).strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line)
