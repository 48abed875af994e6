"""What a reward is, and how one is registered.

    @register_reward("short")
    def short(completion: Completion) -> float:
        return float(len(completion.text.split()) < 20)

A class sees a whole group, takes settings and may be asynchronous:

    @register_reward("judge")
    class Judge(Reward):
        class Config(RewardConfig):
            url: str

        async def score(self, completions: Sequence[Completion]) -> Sequence[Verdict]: ...
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from roll_like.config.base import PluginConfig
from roll_like.registry import REWARDS
from roll_like.types import Message, StopReason


class RewardConfig(PluginConfig):
    """Settings that every reward has."""

    name: str | None = Field(default=None, description="Name in metrics; default: its `type`.")
    weight: float = Field(default=1.0, description="Factor in the sum of all rewards.")
    sources: tuple[str, ...] | None = Field(default=None, description="Data sources it judges; default: all.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, as a reward sees it.

    Attributes:
        text: The response, special tokens removed.
        messages: The prompt.
        answer: Reference answer, where the dataset has one.
        metadata: The other fields of the row.
        stop_reason: Why the response ended.
        response_tokens: Its length in tokens.
    """

    text: str
    messages: tuple[Message, ...]
    answer: str | None
    metadata: Mapping[str, Any]
    stop_reason: StopReason
    response_tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward's value and figures to report beside it."""

    value: float
    details: Mapping[str, float] = field(default_factory=dict)


class Reward:
    """Base of rewards: judges one group at a time. Raise for a failure; never return 0 for one."""

    Config: ClassVar[type[RewardConfig]] = RewardConfig
    #: Row fields that must be there; checked for every row before a run starts.
    required_fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    def score(
        self, completions: Sequence[Completion]
    ) -> Sequence[Verdict | float] | Awaitable[Sequence[Verdict | float]]:
        """Return one verdict for each completion of a group, in order."""
        raise TypeError(f"{type(self).__name__} defines no `score`")


RewardFunction = Callable[[Completion], float]


def register_reward(name: str) -> Callable[[Any], Any]:
    """Register a `Reward` class, or a function `Completion -> float`, under `name`."""

    def add(plugin: Any) -> Any:
        REWARDS.register(name)(plugin if isinstance(plugin, type) else _from_function(plugin))
        return plugin

    return add


def _from_function(function: RewardFunction) -> type[Reward]:
    def score(self: Reward, completions: Sequence[Completion]) -> Sequence[Verdict | float]:
        return [function(completion) for completion in completions]

    namespace = {
        "score": score,
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
    }
    return type(function.__name__, (Reward,), namespace)


__all__ = ["Completion", "Reward", "RewardConfig", "Verdict", "register_reward"]
