"""Metric values that carry their own reduction, so that averages of averages cannot happen.

>>> reduce(merge([{"loss": Mean(2.0, weight=3)}, {"loss": Mean(6.0, weight=1)}]))
{'loss': 3.0}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self, TypeAlias


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
        return type(self)(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Min:
    """A smallest value."""

    value: float

    def __add__(self, other: Self) -> Self:
        return type(self)(min(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Last:
    """A value that the next one replaces."""

    value: float

    def __add__(self, other: Self) -> Self:
        return other


Metric: TypeAlias = Mean | Sum | Max | Min | Last
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
    """Return plain numbers; a mean over nothing is left out."""
    return {
        name: float(metric.value)
        for name, metric in metrics.items()
        if not (isinstance(metric, Mean) and metric.weight == 0)
    }
