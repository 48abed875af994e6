"""Benchmarks measured on a policy: their figures, with intervals, and the differences between models.

Intervals are at 95 %. Tasks are the sample: answers to one task are not independent, so what is averaged is one value a
task (Miller 2024, arXiv:2411.00640, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from roll_like.config.benchmarks import PREFIX, BenchmarkUse
from roll_like.config.evaluation import EvaluationConfig
from roll_like.inference.interface import Sampling
from roll_like.rollout.collection import Collected
from roll_like.rollout.evaluate import Evaluator
from roll_like.rollout.metrics import task_values
from roll_like.types import StopReason
from roll_like.values import Last, Metric, reduce

_Z = 1.959964


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean over tasks with its 95 % interval."""

    value: float
    low: float
    high: float
    tasks: int

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON; what is not known is null."""
        return _without_nan(asdict(self))


def interval(values: Sequence[float]) -> MeanInterval:
    """Return the mean of values, one a task; of values in [0, 1] with Wilson's interval for its effective sample size.

    The effective size is p(1 − p) over the variance of the mean: the number of tasks where each value is 0 or 1, and
    more where values are means of several answers. Unlike the normal interval it holds for few tasks, and is not empty
    where all values are equal (Wilson 1927; for few tasks Bowyer et al. 2025, arXiv:2503.01747). Other scores have no
    bounds that are known, so theirs is the normal interval.

    >>> round(interval([1.0] * 9 + [0.0]).low, 4)
    0.5958
    """
    count = len(values)
    if not count:
        return MeanInterval(math.nan, math.nan, math.nan, 0)
    if not _within_bounds(values):
        return _normal_interval(values)
    mean = float(np.mean(values))
    variance = float(np.var(values)) / count  # of 0 and 1 this is p(1 - p)/n
    size = max(mean * (1 - mean) / variance, count) if variance > 0 else count
    middle = (mean + _Z**2 / (2 * size)) / (1 + _Z**2 / size)
    half = _Z * math.sqrt(mean * (1 - mean) / size + _Z**2 / (4 * size**2)) / (1 + _Z**2 / size)
    return MeanInterval(mean, max(middle - half, 0.0), min(middle + half, 1.0), count)


def _within_bounds(values: Iterable[float]) -> bool:
    return all(0 <= value <= 1 for value in values)


def _normal_interval(values: Sequence[float]) -> MeanInterval:
    """Return the mean with the interval of its standard error; one value has none."""
    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return MeanInterval(mean, math.nan, math.nan, count)
    half = _Z * float(np.std(values, ddof=1)) / math.sqrt(count)
    return MeanInterval(mean, mean - half, mean + half, count)


def paired_difference(first: Mapping[str, float], second: Mapping[str, float]) -> MeanInterval:
    """Return the mean of second − first over the tasks that both have, with its interval.

    Two pairs are added for the interval: a half with +1, a half with −1, two halves with 0 (Agresti and Min 2005).
    Without them models that agree on 30 tasks would be equal for certain. Where scores leave [0, 1], it is the normal
    interval of the differences.

    >>> paired_difference({"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0, "c": 0.0}).value
    0.5
    """
    shared = [task for task in first if task in second]
    if not shared:
        return MeanInterval(math.nan, math.nan, math.nan, 0)
    differences = np.array([second[task] - first[task] for task in shared])
    if not _within_bounds(scores[task] for scores in (first, second) for task in shared):
        return _normal_interval(list(differences))
    values, weights = np.append(differences, [1.0, -1.0, 0.0]), np.append(np.ones(len(shared)), [0.5, 0.5, 1.0])
    centre = float(np.average(values, weights=weights))
    error = math.sqrt(float(np.average((values - centre) ** 2, weights=weights)) / (len(shared) + 2))
    return MeanInterval(
        float(differences.mean()), max(centre - _Z * error, -1.0), min(centre + _Z * error, 1.0), len(shared)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """What a model reached in a benchmark.

    Attributes:
        name: The benchmark.
        samples_per_prompt: k.
        figures: `avg@k`, `pass@j`, `maj@k` and each grader's mean, by name.
        tasks: The mean score of each task.
        truncated: Share of answers that the token limit cut.
        response_tokens: Mean length of an answer.
        failures: Answers that infrastructure lost.
    """

    name: str
    samples_per_prompt: int
    figures: Mapping[str, MeanInterval]
    tasks: Mapping[str, float] = field(repr=False)
    truncated: float
    response_tokens: float
    failures: int

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON; a figure over no task is null."""
        figures = {name: one.as_json() for name, one in self.figures.items()}
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("name", "figures")}
        return {"benchmark": self.name, "figures": figures, **_without_nan(values)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> BenchmarkResult:
        """Return what `as_json` has written.

        Raises:
            KeyError: A field is missing.
            TypeError: One holds something else.
        """
        figures = {name: MeanInterval(**_with_nan(one)) for name, one in found["figures"].items()}
        others = {item.name: found[item.name] for item in fields(cls) if item.name not in ("name", "figures")}
        return cls(name=found["benchmark"], figures=figures, **_with_nan(others))


def _without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(one, float) and math.isnan(one) else one for key, one in values.items()}


def _with_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: math.nan if one is None else one for key, one in values.items()}


def benchmark_results(collected: Collected, uses: Iterable[BenchmarkUse]) -> list[BenchmarkResult]:
    """Return the results of benchmarks out of the answers of an evaluation."""
    return [_result(collected, use) for use in uses]


def _result(collected: Collected, use: BenchmarkUse) -> BenchmarkResult:
    groups = [group for group in collected.groups if group.task.source == use.domain]
    lost = [group for group in collected.rejected if group.task.source == use.domain]
    samples = [sample for group in groups for sample in group.samples]
    k = use.sampling.samples_per_prompt
    tasks = {group.task.task_id: float(np.mean([one.reward for one in group.samples])) for group in groups}
    figures = {f"avg@{k}": interval(list(tasks.values()))}
    if k > 1:
        voting = {use.domain} if any(sample.answer is not None for sample in samples) else ()
        figures |= {name: interval(values) for name, values in task_values(groups, k, voting).items()}
    names = dict.fromkeys(name for sample in samples for name in sample.rewards)
    for name in names:
        of_tasks = [float(np.mean([one.rewards[name] for one in group.samples])) for group in groups]
        figures[name.removeprefix(f"{use.domain}/")] = interval(of_tasks)
    return BenchmarkResult(
        name=use.label,
        samples_per_prompt=k,
        figures=figures,
        tasks=tasks,
        truncated=_mean([float(one.trajectory.stop_reason is StopReason.LENGTH) for one in samples]),
        response_tokens=_mean([float(one.trajectory.response_length) for one in samples]),
        failures=sum(len(group.failures) for group in (*groups, *lost)),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def benchmark_sampling(use: BenchmarkUse) -> Sampling:
    """Return how the answers of a benchmark are drawn."""
    sampling = use.sampling
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_response_tokens,
        stop=sampling.stop,
    )


class BenchmarkEvaluator:
    """Measures a run's own evaluation tasks, where it has some, and each benchmark.

    Args:
        evaluators: By the benchmark's name; that of the run's own tasks has none.
        schedule: The `evaluation` section.
        warn: Told of benchmarks without a figure.
    """

    def __init__(
        self, evaluators: Mapping[str, Evaluator], schedule: EvaluationConfig, warn: Callable[[str], None]
    ) -> None:
        self.evaluators = dict(evaluators)
        self._schedule = schedule
        self._warn = warn

    def due(self, finished: int, total: int) -> bool:
        """Return whether to evaluate after `finished` of `total` steps."""
        return self._schedule.due(finished, total)

    def evaluate(self) -> tuple[Mapping[str, Metric], Collected]:
        """Return `eval/…`, `eval/benchmark/NAME/…`, and the mean of the benchmarks' scores; and all scored answers.

        Without tasks of the run's own, `eval/avg` is that mean. There is none if a benchmark has lost all answers: the
        mean of the others would be another curve.
        """
        metrics: dict[str, Metric] = {}
        parts = []
        for name, evaluator in self.evaluators.items():
            found, collected = evaluator.evaluate()
            parts.append(collected)
            prefix = f"eval/{PREFIX}{name}/" if name else "eval/"
            metrics |= {_named(key, prefix, name): metric for key, metric in found.items()}
        figures = reduce(metrics)
        names = [name for name in self.evaluators if name]
        scores = {name: figures[key] for name in names if (key := f"eval/{PREFIX}{name}/avg") in figures}
        if missing := [name for name in names if name not in scores]:
            self._warn(f"no mean of the benchmarks: all answers to {', '.join(missing)} were lost to failures")
        elif names:
            metrics["eval/benchmarks"] = Last(float(np.mean(list(scores.values()))))
            if "" not in self.evaluators:
                metrics["eval/avg"] = metrics["eval/benchmarks"]
        return metrics, _joined(parts)

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of: avg@k of the run's own tasks, or the benchmarks' mean.

        The mean counts where a run has no tasks of its own. Where it has some, and all of their answers were lost,
        there is no score: the mean is no measure of those.
        """
        return values.get("eval/avg")


def _named(key: str, prefix: str, name: str) -> str:
    """Return a figure's name; graders are named after their benchmark, which its name has already."""
    return f"{prefix}{key.removeprefix('eval/')}".replace(f"/reward/{PREFIX}{name}/", "/reward/") if name else key


def _joined(parts: Sequence[Collected]) -> Collected:
    return Collected(
        groups=tuple(group for part in parts for group in part.groups),
        rejected=tuple(group for part in parts for group in part.rejected),
        failures=tuple(failure for part in parts for failure in part.failures),
        started=sum(part.started for part in parts),
        tokens=sum(part.tokens for part in parts),
        unfinished=tuple(task for part in parts for task in part.unfinished),
        wait_reward_seconds=sum(part.wait_reward_seconds for part in parts),
    )
