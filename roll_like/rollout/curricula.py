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

One that chooses freely among all tasks, as often as it likes, writes `next` instead. What it keeps of its own goes
through `state` and `load_state`; numbers of `turns.random()` follow from the run's seed and continue with it:

    @CURRICULA.register("hardest")
    class Hardest(Curriculum):
        class Config(CurriculumConfig):
            type: Literal["hardest"] = "hardest"

        def next(self, turns: Turns) -> Task:
            if turns.random() < 0.5:
                return turns.next()
            return min(turns.tasks, key=lambda task: 1.0 if (rate := turns.rate(task)) is None else rate)
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, Protocol, Self

from pydantic import Field, model_validator

from roll_like.algorithms.base import Algorithm
from roll_like.config.base import Fraction, PluginConfig, PositiveInt
from roll_like.data.fields import as_number, named_field
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
    rate_field: str | None = Field(
        default=None,
        description="Field of rows with a solve rate that was measured before, from 0 to 1: what is known of a task "
        "until its first group has ended; null: nothing.",
    )


class Turns(Protocol):
    """What a curriculum chooses from."""

    @property
    def tasks(self) -> Sequence[Task]:
        """All tasks; of a streamed source the first ones."""

    def next(self) -> Task:
        """Return the next task in the order of `data`, which then has had its turn."""

    def rate(self, task: Task) -> float | None:
        """Return a task's solve rate so far; None if nothing is known of it."""

    def random(self) -> float:
        """Return a number in [0, 1), another one at each call."""


class Curriculum(Algorithm):
    """Base of curricula; one has `chance` or `next`.

    Attributes:
        band: Rates below and above it are those of hard and easy tasks, in metrics.

    Args:
        config: An instance of `Config`.
    """

    band: tuple[float, float] = (0.05, 0.95)

    def chance(self, task: Task, rate: float | None) -> float:
        """Return how likely a task is attempted when its turn comes, in [0, 1].

        Args:
            task: The task.
            rate: Its solve rate so far; None if nothing is known of it.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither `chance` nor `next`")

    def next(self, turns: Turns) -> Task:
        """Return the task that is attempted next; by default the first that has the luck of its chance.

        Raises:
            ConfigError: The curriculum lets all tasks pass by.
        """
        tasks = len(turns.tasks)
        for _ in range(MAX_PASSES * tasks + MORE_TASKS):
            task = turns.next()
            if turns.random() < self.chance(task, turns.rate(task)):
                return task
        raise ConfigError(
            f"data.curriculum lets all {tasks} tasks pass by",
            fix="widen its band or its limits, or leave data.curriculum out",
        )

    def check_row(self, task: Task) -> None:
        """Check that a row has what the curriculum reads, before a run starts.

        Raises:
            DataError: It has not.
        """
        self.measured_before(task)

    def measured_before(self, task: Task) -> float | None:
        """Return the solve rate that a task's row holds; None where it is null, or no `rate_field` is set.

        Raises:
            DataError: The field holds no rate.
        """
        field = self.config.rate_field
        if field is None:
            return None
        try:
            if named_field(task.metadata, field) is None:
                return None
        except LookupError:
            pass  # named below
        rate = _number(task, field, "the solve rate", "rate_field")
        if not 0 <= rate <= 1:
            raise DataError(
                f"{task.origin}: expected a solve rate from 0 to 1 in {field!r}, found {rate:g}",
                fix="correct the row, or data.curriculum.rate_field",
            )
        return rate

    def begin_step(self, step: int) -> None:
        """Take note that the groups of a step are collected now, counted from 0; by default nothing.

        Asynchronous rollouts have drawn some of its tasks before.
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
        after: PositiveInt = Field(
            default=1,
            description="Groups outside of the band, one after another, before this holds for a task; if more than 1, "
            "also for one that was measured before.",
        )

        @model_validator(mode="after")
        def _band_is_ordered(self) -> Self:
            if self.low > self.high:
                raise ValueError(f"the band is empty: low is {self.low:g}, high is {self.high:g}; set low below high")
            if self.keep == 0:
                raise ValueError("with keep: 0 a task that once left the band never comes back; set it above 0")
            return self

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.band = (config.low, config.high)
        self._outside: dict[str, int] = {}

    def chance(self, task: Task, rate: float | None) -> float:
        """Return 1 within the band, for tasks that nothing is known of and while a task may be outside; else `keep`."""
        waits = self.config.after > 1 and self._outside.get(task.task_id, 0) < self.config.after
        return 1.0 if rate is None or waits or self._fits(rate) else float(self.config.keep)

    def ended(self, task: Task, rate: float) -> None:
        """Count a task's groups outside of the band."""
        if self.config.after > 1:
            self._outside[task.task_id] = 0 if self._fits(rate) else self._outside.get(task.task_id, 0) + 1

    def state(self) -> dict[str, Any]:
        """Return the tasks' last groups outside of the band, counted."""
        return {"outside": {task_id: count for task_id, count in self._outside.items() if count}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Count on from there; older checkpoints have no counts."""
        self._outside = {str(task_id): int(count) for task_id, count in state.get("outside", {}).items()}

    def _fits(self, rate: float) -> bool:
        return at_least(rate, self.config.low) and at_least(self.config.high, rate)


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
        after_steps: tuple[PositiveInt, ...] | None = Field(
            default=None,
            description="In place of `advance_at`: after how many steps of the run each next stage begins, one number "
            "for each limit.",
        )

        @model_validator(mode="after")
        def _limits_ascend(self) -> Self:
            if list(self.limits) != sorted(set(self.limits)):
                raise ValueError(f"limits ascend from stage to stage; found {list(self.limits)}")
            steps = self.after_steps
            if steps is None:
                return self
            if list(steps) != sorted(set(steps)) or len(steps) != len(self.limits):
                raise ValueError(
                    f"after_steps ascend, one for each of {len(self.limits)} limits; found {list(steps)}: with limits: "
                    "[1, 3] and after_steps: [100, 300] all tasks come after 300 steps"
                )
            if useless := self.changed("advance_at", "groups"):
                raise ValueError(f"with after_steps, stages follow the run's steps, so {useless[0]} has no effect")
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
        difficulty, limits = self._difficulty(task), self.config.limits
        return 1.0 if self.stage >= len(limits) or difficulty <= limits[self.stage] else 0.0

    def check_row(self, task: Task) -> None:
        """Check a row's difficulty, too."""
        super().check_row(task)
        self._difficulty(task)

    def ended(self, task: Task, rate: float) -> None:  # noqa: ARG002
        """Begin the next stage if the last groups were mostly solved."""
        if self.config.after_steps is not None or self.stage >= len(self.config.limits):
            return
        self._rates.append(rate)
        if len(self._rates) == self.config.groups and at_least(fmean(self._rates), self.config.advance_at):
            self.stage += 1
            self._rates.clear()

    def begin_step(self, step: int) -> None:
        """Begin the stage of a step."""
        if self.config.after_steps is not None:
            self.stage = sum(step >= first for first in self.config.after_steps)

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

    def _difficulty(self, task: Task) -> float:
        return _number(task, self.config.field, "the difficulty", "field")


def _number(task: Task, field: str, what: str, key: str) -> float:
    """Return a number of a task's row.

    Raises:
        DataError: There is none.
    """
    try:
        value = named_field(task.metadata, field)
    except LookupError:
        value = None
    number = as_number(value)
    if number is None:
        raise DataError(
            f"{task.origin}: expected a number in {field!r}, {what}, found {value!r}",
            fix=f"correct the row, or data.curriculum.{key}",
        )
    return number


class CurriculumOrder:
    """A `TaskOrder` of which a curriculum lets some tasks pass by.

    Args:
        curriculum: Says which are attempted.
        tasks: All of them; of a streamed source the first ones.
        seed: Of the draws, which depend on it and on how many there were only.

    Raises:
        DataError: A row's `rate_field` holds no rate.
    """

    def __init__(self, order: TaskOrder, curriculum: Curriculum, *, tasks: Sequence[Task], seed: int) -> None:
        self.tasks = tasks
        self._order = order
        self._curriculum = curriculum
        self._seed = seed
        self._before = {task.task_id: curriculum.measured_before(task) for task in tasks}
        self._rates: dict[str, float] = {}
        self._pools = self._counted()
        self._draws = 0
        self._seen = self._attempted = self._known = 0
        self._known_rates = 0.0

    def next(self) -> Task:
        """Return the next task that is attempted.

        Raises:
            ConfigError: The curriculum lets all tasks pass by.
        """
        seen = self._order.drawn
        task = self._curriculum.next(_View(self._order, self))
        self._seen += max(self._order.drawn - seen, 1)  # one that was chosen beside the order has had a turn too
        self._attempted += 1
        rate = self.rate(task)
        if rate is not None:
            self._known, self._known_rates = self._known + 1, self._known_rates + rate
        return task

    def rate(self, task: Task) -> float | None:
        """Return a task's solve rate so far; None if nothing is known of it."""
        identity = task.task_id
        if identity in self._rates:
            return self._rates[identity]
        # of a streamed source there are more tasks than the first ones
        return self._before[identity] if identity in self._before else self._curriculum.measured_before(task)

    def random(self) -> float:
        """Return a number in [0, 1), another one at each call."""
        self._draws += 1
        digest = hashlib.blake2b(f"{self._seed}/curriculum/{self._draws - 1}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64

    def begin_step(self, step: int) -> None:
        """Tell the curriculum that the groups of a step are collected now."""
        self._curriculum.begin_step(step)

    def ended(self, group: Group[Scored]) -> None:
        """Take note of a group that was scored; what its answers lost to failures says nothing."""
        if not group.samples:
            return
        config = self._curriculum.config
        found = fmean(at_least(sample.reward, config.solved_at) for sample in group.samples)
        identity = group.task.task_id
        known = self.rate(group.task)
        before = found if known is None else known
        rate = self._rates[identity] = config.memory * before + (1 - config.memory) * found
        if identity in self._before:
            self._pools[self._pool(known)] -= 1
            self._pools[self._pool(rate)] += 1
        self._curriculum.ended(group.task, found)

    def figures(self) -> Metrics:
        """Return what was drawn since the last call."""
        figures: dict[str, Metric] = {
            "curriculum/attempted": Sum(float(self._attempted)),
            "curriculum/measured": Last(len(self._rates) / len(self.tasks)),
            "curriculum/hard": Last(self._pools["hard"] / len(self.tasks)),
            "curriculum/easy": Last(self._pools["easy"] / len(self.tasks)),
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
                "draws": self._draws,
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
            self._pools = self._counted()
            if kept:
                self._curriculum.load_state(kept["own"])
            self._draws = int(kept.get("draws", self._order.drawn))  # not in older checkpoints, nor is what follows
            *counts, rates = kept.get("since", (0, 0, 0, 0.0))
            self._seen, self._attempted, self._known = map(int, counts)
            self._known_rates = float(rates)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's curriculum is another one, or damaged: {error!r}",
                fix="restore data.curriculum as it was, or start a new run",
            ) from error

    def _counted(self) -> Counter[str]:
        """Return how many tasks are in each pool, as far as is known."""
        return Counter(self._pool(self._rates.get(task_id, rate)) for task_id, rate in self._before.items())

    def _pool(self, rate: float | None) -> str:
        """Return whether a task with this rate is too hard or too easy to learn much from."""
        low, high = self._curriculum.band
        if rate is None:
            return "unknown"
        return "hard" if not at_least(rate, low) else "other" if at_least(high, rate) else "easy"


class _View:
    """The `Turns` of an order."""

    def __init__(self, order: TaskOrder, of: CurriculumOrder) -> None:
        self.tasks = of.tasks
        self.next = order.next
        self.rate = of.rate
        self.random = of.random
