"""A reward function that was written for another library, called as that library calls it.

- type: function
  path: my_rewards.py
  function: compute_score
  interface: verl
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from roll_like import Completion, Outcome, Reward, RewardConfig, register_reward
from roll_like.builtin.rewards.child_pool import ChildPool
from roll_like.builtin.rewards.function_child import load_function
from roll_like.builtin.rewards.interfaces import INTERFACES
from roll_like.errors import DataError, RewardError
from roll_like.rewards.base import given_completion
from roll_like.types import Task


class ForeignFunctionConfig(RewardConfig):
    """Settings of the `function` reward."""

    type: Literal["function"] = "function"
    path: str = Field(description="A Python file, or the name of a module, that has the function.")
    function: str = Field(
        description="Its name. A class is instantiated without arguments, and the instance is called."
    )
    interface: Literal["verl", "trl", "trl_text", "openrlhf", "slime", "areal"] = Field(
        description="Whose arguments it takes (docs/rewards.md#a-function-of-another-library)."
    )
    arguments: dict[str, JsonValue] = Field(
        default_factory=dict, description="Further named arguments; of slime, what `args` has."
    )
    processes: int = Field(default=1, ge=1, description="Processes in which one reward worker calls it.")
    timeout_seconds: float = Field(
        default=30.0, gt=0, description="Limit of one call; its process is killed and the samples are lost. Seconds."
    )


@register_reward("function")
class ForeignFunction(Reward):
    """What a function of another library says of an answer.

    It runs in the main thread of a process of its own, as in most of those libraries: time-outs by signals work in it,
    and one that hangs is ended.
    """

    Config: ClassVar[type[RewardConfig]] = ForeignFunctionConfig
    per_sample: ClassVar[bool] = True

    config: ForeignFunctionConfig

    def __init__(self, config: ForeignFunctionConfig) -> None:
        super().__init__(config)
        function = load_function(config.path, config.function)
        self._interface = INTERFACES[config.interface](function, config.arguments)
        # answers that a function waits for are waited for together
        self._one_by_one = not self._interface.whole_groups and not _is_async(function)
        self._pool = ChildPool(
            Path(__file__).with_name("function_child.py"),
            size=config.processes,
            timeout_seconds=config.timeout_seconds,
            # through the pipe: `ps` shows command lines to everyone
            setup=(list(sys.path), config.path, config.function, config.interface, config.arguments),
        )

    def start(self) -> None:
        """Start a process.

        Raises:
            RewardError: It cannot load the function.
        """
        (answer,) = self._pool.run([[]])
        if isinstance(answer, Exception):
            raise self._lost(answer)

    def check_row(self, task: Task) -> None:
        """Raise for a row that lacks an argument of the function, or that the interface cannot read."""
        completion = given_completion("", messages=task.messages, answer=task.answer, metadata=task.metadata)
        try:
            call = self._interface.call([completion])
        except RewardError as error:
            raise DataError(f"{task.origin}: {error.message}", fix=error.fix) from error
        signature = inspect.signature(self._interface.function)
        try:
            signature.bind(*call.arguments, **call.keywords)
        except TypeError as error:
            raise DataError(
                f"{task.origin}: {self.config.function}{signature} cannot be called as {self.config.interface} does: "
                f"{error}; the row has the fields {', '.join(task.metadata)}",
                fix="correct `interface`, add the field to the rows, or set it in `arguments`",
            ) from error

    def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        """Return one result for each completion, or a `RewardError` where the function raised."""
        groups = [[completion] for completion in completions] if self._one_by_one else [list(completions)]
        answers = self._pool.run(groups)
        return [
            outcome
            for group, answer in zip(groups, answers, strict=True)
            for outcome in (answer if isinstance(answer, list) else [self._lost(answer)] * len(group))
        ]

    def _lost(self, error: Exception) -> RewardError:
        late = isinstance(error, TimeoutError)
        return RewardError(
            f"{self.config.function}: {error}", fix="raise the reward's timeout_seconds" if late else None
        )

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
