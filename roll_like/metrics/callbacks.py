"""Callbacks that a configuration names: what a run does with the figures of a step or an evaluation.

    @CALLBACKS.register("tell")
    class Tell(Callback):
        class Config(PluginConfig):
            type: Literal["tell"] = "tell"
            reward: float

        def on_step(self, step: int, figures: Mapping[str, float]) -> None:
            if figures["rollout/reward/mean"] >= self.config.reward:
                raise StopRun(f"the reward is {figures['rollout/reward/mean']:.3g}")

`callbacks: [{type: tell, reward: 0.9}]` uses it. Those of notebooks and scripts are plain functions: `Callbacks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from roll_like.algorithms.base import Algorithm
from roll_like.config.base import PluginConfig, PositiveInt
from roll_like.errors import FOREIGN_ERRORS, ConfigError, PluginError, RollLikeError, describe_error
from roll_like.metrics.names import is_listed
from roll_like.registry import CALLBACKS, did_you_mean
from roll_like.types import Callbacks, StopRun

RecordedFigures = Sequence[tuple[int, Mapping[str, float]]]


class Callback(Algorithm):
    """Base of callbacks: what happens after a step, and after an evaluation; nothing, unless it is overridden.

    It runs in the driver, between steps. A resumed run makes a new one, which is told of what was before.

    Args:
        config: An instance of its `Config`.
    """

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a training step; steps count from 1.

        Raises:
            StopRun: The step is the run's last one.
        """

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of an evaluation after so many steps.

        Raises:
            StopRun: The run ends after this evaluation.
        """

    def on_resume(self, steps: RecordedFigures, evaluations: RecordedFigures) -> None:
        """Take the figures of the steps and evaluations before a resumption, in order, with their numbers of steps."""


@CALLBACKS.register("stop_when")
class StopWhen(Callback):
    """`stop_when`: ends the run when a metric is beyond a bound for some steps, or evaluations, in a row."""

    class Config(PluginConfig):
        type: Literal["stop_when"] = "stop_when"
        metric: str = Field(description="Name of a metric. Those that begin with `eval/` are of evaluations.")
        above: float | None = Field(default=None, description="It ends the run if it is above this.")
        below: float | None = Field(default=None, description="It ends the run if it is below this.")
        patience: PositiveInt = Field(
            default=1, description="Steps, or evaluations, in a row. Steps without the metric are not counted."
        )

        @model_validator(mode="after")
        def _bounded(self) -> Self:
            if self.above is None and self.below is None:
                raise ValueError("nothing can end the run: set above, below, or both")
            return self

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._beyond = 0

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Look at a metric of training."""
        if not self.config.metric.startswith("eval/"):
            self._look(f"step {step}", figures)

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """Look at a metric of evaluations."""
        if self.config.metric.startswith("eval/"):
            self._look(f"the evaluation after {step} steps", figures)

    def on_resume(self, steps: RecordedFigures, evaluations: RecordedFigures) -> None:
        """Count what was beyond the bound in a row."""
        before = evaluations if self.config.metric.startswith("eval/") else steps
        for _, figures in before:
            if self.config.metric in figures:
                self._count(figures[self.config.metric])

    def _count(self, value: float) -> None:
        above, below = self.config.above, self.config.below
        beyond = (above is not None and value > above) or (below is not None and value < below)
        self._beyond = self._beyond + 1 if beyond else 0

    def _look(self, when: str, figures: Mapping[str, float]) -> None:
        name, above, below = self.config.metric, self.config.above, self.config.below
        if name not in figures:
            if is_listed(name):
                return  # not every step has every metric
            raise ConfigError(
                f"there is no metric {name!r} in {when}; {did_you_mean(name, list(figures), 'see metrics.jsonl')}",
                fix="correct `metric` of the callback stop_when",
            )
        value = figures[name]
        self._count(value)
        if self._beyond >= self.config.patience:
            bounds = {"above": above, "below": below}
            said = " or ".join(f"{side} {bound:g}" for side, bound in bounds.items() if bound is not None)
            raise StopRun(f"{name} is {value:.4g}, {said}")


class CallbackList:
    """All callbacks of a run: those of its configuration, then those of its caller.

    Args:
        configs: The section `callbacks`.
        given: What the caller wants to be called.
    """

    def __init__(self, configs: Sequence[PluginConfig], given: Callbacks | None) -> None:
        made = [(config.type, CALLBACKS.get(config.type)(config)) for config in configs]
        self._made = [one for _, one in made]
        given = given or Callbacks()
        self._on_step = [*((name, one.on_step) for name, one in made), (None, given.on_step)]
        self._on_evaluation = [*((name, one.on_evaluation) for name, one in made), (None, given.on_evaluation)]

    def __bool__(self) -> bool:
        """Whether there is one."""
        return any(function is not None for _, function in (*self._on_step, *self._on_evaluation))

    def on_resume(self, steps: RecordedFigures, evaluations: RecordedFigures) -> None:
        """Tell those of the configuration what was before."""
        for one in self._made:
            one.on_resume(steps, evaluations)

    def on_step(self, step: int, figures: Mapping[str, float]) -> str | None:
        """Call all; return why the run is to end, or None.

        Raises:
            PluginError: One of the configuration's failed. An error of the caller's own function is raised as it is.
        """
        return _called(self._on_step, step, figures)

    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> str | None:
        """Call all after an evaluation, as `on_step` does."""
        return _called(self._on_evaluation, step, figures)


def _called(
    functions: Sequence[tuple[str | None, Callable[[int, Mapping[str, float]], object] | None]],
    step: int,
    figures: Mapping[str, float],
) -> str | None:
    why = None
    for name, function in functions:
        if function is None:
            continue
        try:
            function(step, figures)
        except StopRun as stop:
            why = why or str(stop) or "a callback raised StopRun"
        except RollLikeError:
            raise
        except FOREIGN_ERRORS as error:
            if name is None:
                raise
            raise PluginError(
                f"the callback {name!r} failed after step {step}: {describe_error(error)}",
                fix="correct it, or remove it from `callbacks`",
            ) from error
    return why
