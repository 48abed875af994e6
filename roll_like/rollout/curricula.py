"""Curricula: which tasks are worth attempting, by how often they were solved so far.

The order of tasks stays that of `data`: shuffled passes, weighted sources. A curriculum lets some tasks pass by: when a
task's turn comes it is attempted with a chance that follows from what is known of it. So no task comes twice in a pass,
none is lost for good, and a run that continues from a checkpoint goes on with the same tasks. What is known is how
often the answers of each task's groups were right, as groups end, whatever the schedule. One of your own:

    @CURRICULA.register("unsolved")
    class Unsolved(Curriculum):
        class Config(CurriculumConfig):
            type: Literal["unsolved"] = "unsolved"

        def chance(self, task: Task, rate: float | None) -> float:
            return 1.0 if rate is None or rate < 1 else 0.05
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from roll_like.algorithms.base import Algorithm
from roll_like.config.base import Fraction, PluginConfig, PositiveInt
from roll_like.data.tasks import TaskOrder
from roll_like.errors import CheckpointError, ConfigError, DataError
from roll_like.registry import CURRICULA
from roll_like.types import Group, Scored, Task
from roll_like.values import Last, Mean, Metric, Metrics, Sum, at_least

#: Passes over all tasks that may pass by, and tasks beside them, before a curriculum is taken for one that refuses all.
MAX_PASSES, MORE_TASKS = 20, 1000


class CurriculumConfig(PluginConfig):
    """What curricula have in common: how a task's solve rate is measured."""

    solved_at: float = Field(default=1.0, description="An answer is solved if its reward is at least this.")
    memory: Fraction = Field(
        default=0.5,
        description="How much of a task's earlier solve rate stays when its next group has ended; 0: the last group's "
        "alone counts.",
    )


class Curriculum(Algorithm, ABC):
    """Base of curricula.

    Args:
        config: An instance of `Config`.
    """

    @abstractmethod
    def chance(self, task: Task, rate: float | None) -> float:
        """Return how likely a task is attempted when its turn comes, in [0, 1].

        Args:
            task: The task.
            rate: Its solve rate so far; None if no group of it has ended.
        """

    def ended(self, task: Task, rate: float) -> None:
        """Take note of the solve rate of a group that has ended; by default nothing beside the task's own rate."""

    def figures(self) -> Metrics:
        """Return what is to be logged beside what every curriculum logs."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the tasks' rates; plain JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""


@CURRICULA.register("solve_rate")
class SolveRate(Curriculum):
    """`solve_rate`: tasks whose solve rate lies in a band, and a share of the others, which may come back into it."""

    class Config(CurriculumConfig):
        type: Literal["solve_rate"] = "solve_rate"
        low: Fraction = Field(default=0.05, description="Lowest solve rate of the band.")
        high: Fraction = Field(default=0.95, description="Highest solve rate of the band.")
        keep: Fraction = Field(
            default=0.1, description="How likely a task outside of the band is attempted when its turn comes."
        )

        @model_validator(mode="after")
        def _band_is_ordered(self) -> Self:
            if self.low > self.high:
                raise ValueError(f"the band is empty: low is {self.low:g}, high is {self.high:g}; set low below high")
            if self.keep == 0:
                raise ValueError("with keep: 0 a task that once left the band never comes back; set it above 0")
            return self

    def chance(self, task: Task, rate: float | None) -> float:  # noqa: ARG002
        """Return 1 within the band and for tasks that nothing is known of, else `keep`."""
        fits = rate is None or (at_least(rate, self.config.low) and at_least(self.config.high, rate))
        return 1.0 if fits else float(self.config.keep)


@CURRICULA.register("difficulty")
class Difficulty(Curriculum):
    """`difficulty`: the more a task's answers differ, the likelier it is attempted: 4·p·(1 − p) of its solve rate p.

    That is the variance of a reward of 0 or 1 over its largest, and about the chance that two answers differ.
    """

    class Config(CurriculumConfig):
        type: Literal["difficulty"] = "difficulty"
        keep: Fraction = Field(
            default=0.1, gt=0, description="Least chance of a task, also of those that are hopeless."
        )

    def chance(self, task: Task, rate: float | None) -> float:  # noqa: ARG002
        """Return 4·p·(1 − p), at least `keep`; 1 for tasks that nothing is known of."""
        return 1.0 if rate is None else max(4 * rate * (1 - rate), float(self.config.keep))


@CURRICULA.register("stages")
class Stages(Curriculum):
    """`stages`: easy tasks first, by a number in each row; harder ones when the last groups were mostly solved."""

    class Config(CurriculumConfig):
        type: Literal["stages"] = "stages"
        field: str = Field(description="Field of a row that holds its difficulty, a number.")
        limits: tuple[float, ...] = Field(
            min_length=1, description="Highest difficulty of each stage, ascending; after the last one all tasks come."
        )
        advance_at: Fraction = Field(default=0.7, description="Mean solve rate at which the next stage begins.")
        groups: PositiveInt = Field(default=64, description="Groups that this is the mean of, of the stage's own.")

        @model_validator(mode="after")
        def _limits_ascend(self) -> Self:
            if list(self.limits) != sorted(set(self.limits)):
                raise ValueError(f"limits ascend from stage to stage; found {list(self.limits)}")
            return self

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.stage = 0
        self._rates: deque[float] = deque(maxlen=config.groups)

    def chance(self, task: Task, rate: float | None) -> float:  # noqa: ARG002
        """Return 1 for tasks of the stages so far, else 0.

        Raises:
            DataError: The row has no number in `field`.
        """
        difficulty = task.metadata.get(self.config.field)
        if isinstance(difficulty, bool) or not isinstance(difficulty, int | float) or not math.isfinite(difficulty):
            raise DataError(
                f"{task.origin}: expected a number in {self.config.field!r}, the difficulty, found {difficulty!r}",
                fix="correct the row, or data.curriculum.field",
            )
        limits = self.config.limits
        return 1.0 if self.stage >= len(limits) or difficulty <= limits[self.stage] else 0.0

    def ended(self, task: Task, rate: float) -> None:  # noqa: ARG002
        """Begin the next stage if the last groups were mostly solved."""
        if self.stage >= len(self.config.limits):
            return
        self._rates.append(rate)
        if len(self._rates) == self.config.groups and at_least(fmean(self._rates), self.config.advance_at):
            self.stage += 1
            self._rates.clear()

    def figures(self) -> Metrics:
        """Return the stage, from 0."""
        return {"curriculum/stage": Last(float(self.stage))}

    def state(self) -> dict[str, Any]:
        """Return the stage and the rates of its last groups."""
        return {"stage": self.stage, "rates": list(self._rates)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue in that stage."""
        self.stage = int(state["stage"])
        self._rates = deque(map(float, state["rates"]), maxlen=self.config.groups)


class CurriculumOrder:
    """A `TaskOrder` of which a curriculum lets some tasks pass by.

    Args:
        curriculum: Says which are attempted.
        seed: Of the draws, which depend on it and on the place in the order only.
    """

    def __init__(self, order: TaskOrder, curriculum: Curriculum, *, tasks: int, seed: int) -> None:
        self._order = order
        self._curriculum = curriculum
        self._tasks = tasks
        self._seed = seed
        self._rates: dict[str, float] = {}
        self._seen = self._attempted = self._known = 0
        self._known_rates = 0.0

    def next(self) -> Task:
        """Return the next task that is attempted.

        Raises:
            ConfigError: The curriculum lets all tasks pass by.
        """
        for _ in range(MAX_PASSES * self._tasks + MORE_TASKS):
            place = self._order.drawn
            task = self._order.next()
            rate = self._rates.get(task.task_id)
            self._seen += 1
            if self._draw(place) < self._curriculum.chance(task, rate):
                self._attempted += 1
                if rate is not None:
                    self._known, self._known_rates = self._known + 1, self._known_rates + rate
                return task
        raise ConfigError(
            f"data.curriculum lets all {self._tasks} tasks pass by",
            fix="widen its band or its limits, or leave data.curriculum out",
        )

    def ended(self, group: Group[Scored]) -> None:
        """Take note of a group that was scored; what its answers lost to failures says nothing."""
        if not group.samples:
            return
        config = self._curriculum.config
        found = fmean(at_least(sample.reward, config.solved_at) for sample in group.samples)
        identity = group.task.task_id
        before = self._rates.get(identity, found)
        self._rates[identity] = config.memory * before + (1 - config.memory) * found
        self._curriculum.ended(group.task, found)

    def figures(self) -> Metrics:
        """Return what was drawn since the last call."""
        figures: dict[str, Metric] = {
            "curriculum/attempted": Sum(float(self._attempted)),
            "curriculum/measured": Last(len(self._rates) / self._tasks),
            **self._curriculum.figures(),
        }
        if self._seen:
            figures["curriculum/passed_by"] = Mean(1 - self._attempted / self._seen, self._seen)
        if self._known:
            figures["curriculum/solve_rate"] = Mean(self._known_rates / self._known, self._known)
        self._seen = self._attempted = self._known = 0
        self._known_rates = 0.0
        return figures

    def find(self, task_id: str) -> Task:
        """Return a task by its id."""
        return self._order.find(task_id)

    def state(self) -> dict[str, Any]:
        """Return where the sequence stands, and what is known of the tasks."""
        return {
            **self._order.state(),
            "curriculum": {
                "rates": dict(self._rates),
                "own": self._curriculum.state(),
                "since": [self._seen, self._attempted, self._known, self._known_rates],
            },
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; that of a run without a curriculum knows nothing of the tasks.

        Raises:
            CheckpointError: The state is of other data or of another curriculum, or is damaged.
        """
        self._order.load_state(state)
        kept = state.get("curriculum", {})
        try:
            self._rates = {str(task_id): float(rate) for task_id, rate in kept.get("rates", {}).items()}
            if kept:
                self._curriculum.load_state(kept["own"])
            *counts, rates = kept.get("since", (0, 0, 0, 0.0))  # not in older checkpoints
            self._seen, self._attempted, self._known = map(int, counts)
            self._known_rates = float(rates)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's curriculum is another one, or damaged: {error!r}",
                fix="restore data.curriculum as it was, or start a new run",
            ) from error

    def _draw(self, place: int) -> float:
        """Return a number in [0, 1) of a place in the order."""
        digest = hashlib.blake2b(f"{self._seed}/curriculum/{place}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64
