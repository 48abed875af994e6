"""From given data to what a step trains on, and the metrics of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roll_like.types import TrainingSample
from roll_like.values import Max, Mean, Metric, Sum


def numbered(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Return the samples of a step, each a group for itself."""
    return [replace(each, group_id=str(index)) for index, each in enumerate(samples)]


def samples_metrics(samples: Sequence[TrainingSample]) -> dict[str, Metric]:
    """Return how many samples a step has, how many of their tokens are trained, and how long they are."""
    return length_metrics([len(sample) for sample in samples], trained=sum(each.trained_tokens for each in samples))


def length_metrics(lengths: Sequence[int], *, trained: int) -> dict[str, Metric]:
    """Return the same for samples of these lengths, of which `trained` tokens are trained in all."""
    return {
        "train/samples": Sum(float(len(lengths))),
        "train/tokens": Sum(float(trained)),
        "train/sample_length/mean": Mean(sum(lengths) / len(lengths), len(lengths)),
        "train/sample_length/max": Max(float(max(lengths))),
    }
