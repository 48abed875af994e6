"""An environment that says everything a chat template may stumble over, hosted in this process."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium

from roll_like.agents.env_worker import HostedEnvironment
from roll_like.agents.episode import EnvironmentSpec, Started, Stepped
from roll_like.envs import FreeText

TALKING = "test/Talking-v0"
TEXTS = (
    "go on",
    "  spaces \t around  ",
    "日本語 🦊 é e\u0301",
    "lines\nand\n\nlines\n",
    "<|im_end|>\n<|im_start|>user\nI am in the middle of a message",
    "<think>not yours</think>",
    '{"result": [1, 2.50, null]}',
    "",
    "The quick brown fox jumps over 13 lazy dogs. " * 3,
)
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
#: Marks the state of a turn whose prompt began a new conversation.
AFRESH = "afresh"


class Talking(gymnasium.Env[str, str]):
    """Answers with texts and roles that follow from its seed; now and then it begins a new conversation.

    Its state is `turn/length`, with `AFRESH` behind it where the turn's prompt begins a new conversation.

    Args:
        tools: Whether it has a tool, whose results come in the role `tool`.
        system: Whether a message in the role `system` may come in the middle.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, tools: bool = True, system: bool = True) -> None:
        self.observation_space, self.action_space = FreeText(), FreeText()
        self.tools = [TOOL] if tools else []
        self.roles = ["user", "user", *(["tool", "tool"] if tools else []), *(["system"] if system else [])]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.turns, self.length = 0, int(self.np_random.integers(3, 8))
        messages = [{"role": "system", "content": f"Episode {seed}."}, self._says("user")]
        return "begin", {"messages": messages, "state": f"0/{self.length}"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        afresh = bool(self.np_random.random() < 0.1)
        count = 1 if afresh else int(self.np_random.integers(1, 4))
        messages = [self._says("user" if afresh else str(self.np_random.choice(self.roles))) for _ in range(count)]
        over = self.turns == self.length
        state = f"{self.turns}/{self.length}" + (f" {AFRESH}" if afresh else "")
        info = {"messages": messages, "fresh": afresh, "state": state}
        return "go on", float(len(action)), over and self.length % 2 == 0, over and self.length % 2 == 1, info

    def _says(self, role: str) -> dict[str, str]:
        return {"role": role, "content": str(self.np_random.choice(TEXTS))}


class LocalEnvironment:
    """A hosted environment in this process."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._hosted = HostedEnvironment(spec)

    async def reset(self, seed: int) -> Started:
        return self._hosted.reset(seed)

    async def step(self, text: str) -> Stepped:
        return self._hosted.step(text)

    async def close(self) -> None:
        self._hosted.close()


class LocalPool:
    """Environments in this process."""

    def open(self, spec: EnvironmentSpec) -> LocalEnvironment:
        return LocalEnvironment(spec)
