"""Metric values that carry their own reduction, so that averages of averages cannot happen.

>>> reduce(merge([{"loss": Mean(2.0, weight=3)}, {"loss": Mean(6.0, weight=1)}]))
{'loss': 3.0}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over `weight` observations."""

    value: float
    weight: float = 1.0

    def __add__(self, other: Self) -> Self:
        weight = self.weight + other.weight
        if weight == 0:
            return type(self)(math.nan, 0.0)
        # a mean over nothing may be NaN; it must not poison the other side
        total = sum(part.value * part.weight for part in (self, other) if part.weight)
        return type(self)(total / weight, weight)


@dataclass(frozen=True, slots=True)
class Sum:
    """A total."""

    value: float

    def __add__(self, other: Self) -> Self:
        return type(self)(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """A largest value."""

    value: float

    def __add__(self, other: Self) -> Self:
        return type(self)(float(np.maximum(self.value, other.value)))  # NaN stays, where Python's depends on the order


@dataclass(frozen=True, slots=True)
class Min:
    """A smallest value."""

    value: float

    def __add__(self, other: Self) -> Self:
        return type(self)(float(np.minimum(self.value, other.value)))


@dataclass(frozen=True, slots=True)
class Last:
    """A value that the next one replaces."""

    value: float

    def __add__(self, other: Self) -> Self:
        return other


@dataclass(frozen=True, slots=True)
class EffectiveShare:
    """Effective sample size of importance weights as a share of their number: (Σw)²/(n·Σw²) (Kong 1992).

    1 where all weights are equal, 0 where all are 0.
    """

    count: float
    total: float
    squares: float

    def __add__(self, other: Self) -> Self:
        return type(self)(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def value(self) -> float:
        """The share, in [0, 1]; NaN of nothing."""
        if self.count == 0:
            return math.nan
        return self.total**2 / (self.count * self.squares) if self.squares else 0.0


@dataclass(frozen=True, slots=True)
class Correlation:
    """Pearson's correlation of pairs, from moments that merge exactly (Chan, Golub, LeVeque 1979).

    Attributes:
        count: Number of pairs.
        mean_x, mean_y: Their means.
        square_x, square_y: Sums of squared deviations from the means.
        product: Sum of products of both deviations.
    """

    count: float
    mean_x: float
    mean_y: float
    square_x: float
    square_y: float
    product: float

    def __add__(self, other: Self) -> Self:
        count = self.count + other.count
        if count == 0:
            return self
        dx, dy, both = other.mean_x - self.mean_x, other.mean_y - self.mean_y, self.count * other.count / count
        return type(self)(
            count,
            self.mean_x + dx * other.count / count,
            self.mean_y + dy * other.count / count,
            self.square_x + other.square_x + dx * dx * both,
            self.square_y + other.square_y + dy * dy * both,
            self.product + other.product + dx * dy * both,
        )

    @property
    def value(self) -> float:
        """The correlation, in [−1, 1]; NaN where one side does not vary."""
        spread = math.sqrt(self.square_x * self.square_y)
        return self.product / spread if spread else math.nan


#: Bins of `LogQuantile`: 0.01 wide, from −5 to 5, what lies beyond in the outermost.
LOG_BINS, LOG_BIN_WIDTH = 1001, 0.01


@dataclass(frozen=True, slots=True, eq=False)
class LogQuantile:
    """A quantile of positive numbers, from a histogram of their logarithms; exact to 0.5 %.

    Attributes:
        quantile: Which, in [0, 1].
        counts: How many logarithms fell into each of `LOG_BINS` bins centred at 0.
    """

    quantile: float
    counts: npt.NDArray[np.float64]

    def __add__(self, other: Self) -> Self:
        return type(self)(self.quantile, self.counts + other.counts)

    @property
    def value(self) -> float:
        """The quantile; NaN of nothing."""
        total = self.counts.sum()
        if total == 0:
            return math.nan
        at = int(np.searchsorted(np.cumsum(self.counts), self.quantile * total, side="left"))
        return math.exp((min(at, LOG_BINS - 1) - LOG_BINS // 2) * LOG_BIN_WIDTH)


Metric: TypeAlias = Mean | Sum | Max | Min | Last | EffectiveShare | Correlation | LogQuantile
Metrics: TypeAlias = Mapping[str, Metric]


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Combine metrics of several roles or micro-batches, each by its own rule.

    Raises:
        TypeError: One name is used with two different reductions.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            known = merged.get(name)
            if known is not None and type(known) is not type(metric):
                raise TypeError(f"metric {name!r} is a {type(known).__name__} and a {type(metric).__name__}")
            merged[name] = metric if known is None else known + metric  # type: ignore[operator]
    return merged


def reduce(metrics: Metrics) -> dict[str, float]:
    """Return plain numbers; what was taken over nothing is left out."""
    return {name: float(metric.value) for name, metric in metrics.items() if not _is_empty(metric)}


def _is_empty(metric: Metric) -> bool:
    if isinstance(metric, Mean):
        return metric.weight == 0
    return isinstance(metric, EffectiveShare | Correlation | LogQuantile) and math.isnan(metric.value)


#: Largest difference of rewards that count as equal, relative to the largest of them. A reward is a sum of weighted
#: figures, and a reward model computes in single precision: their last digits depend on order and batch.
RELATIVE_NOISE = 1e-6
#: The same, where rewards cancel to nearly nothing.
ABSOLUTE_NOISE = 1e-9


def reward_noise(rewards: npt.ArrayLike) -> float:
    """Return the largest difference of rewards that says nothing: rewards no further apart are equal.

    The one definition of equal rewards: of groups that are replaced or counted, of advantages, of pairs, and of rewards
    that reach a bound.
    """
    values = np.asarray(rewards, np.float64)
    return max(RELATIVE_NOISE * float(np.abs(values).max(initial=0.0)), ABSOLUTE_NOISE)


def at_least(value: float, bound: float) -> bool:
    """Return whether a figure of rewards is a bound or more, or differs from it by noise alone.

    Nothing of 0 is a positive bound, however small: `low: 1e-9` leaves out groups that earned nothing.

    >>> 0.7 + 0.2 + 0.1 >= 1, at_least(0.7 + 0.2 + 0.1, 1)
    (False, True)
    """
    return value >= bound - (reward_noise([value, bound]) if value else 0)


def has_signal(rewards: npt.ArrayLike) -> bool:
    """Return whether rewards of one group differ by more than noise, so that the group can be learned from.

    >>> has_signal([0.1 + 0.2, 0.3]), has_signal([0.0, 1.0]), has_signal([1.0])
    (False, True, False)
    """
    values = np.asarray(rewards, np.float64)
    return values.size > 1 and bool(np.ptp(values) > reward_noise(values))
