"""From given data to what a step trains on, and the metrics of that."""

from __future__ import annotations

from collections.abc import Sequence

from roll_like.data.samples import ConversationSample
from roll_like.types import TrainingSample
from roll_like.values import Max, Mean, Metric, Sum


def training_samples(conversations: Sequence[ConversationSample]) -> list[TrainingSample]:
    """Return conversations as the trainer takes them: each for itself."""
    return [
        TrainingSample(
            group_id=str(index), token_ids=each.token_ids, prompt_length=0, loss_mask=each.loss_mask, images=each.images
        )
        for index, each in enumerate(conversations)
    ]


def samples_metrics(samples: Sequence[TrainingSample]) -> dict[str, Metric]:
    """Return how many samples a step has, how many of their tokens are trained, and how long they are."""
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    return length_metrics([len(sample.token_ids) for sample in samples], trained=trained)


def length_metrics(lengths: Sequence[int], *, trained: int) -> dict[str, Metric]:
    """Return the same for samples of these lengths, of which `trained` tokens are trained in all."""
    return {
        "train/samples": Sum(float(len(lengths))),
        "train/tokens": Sum(float(trained)),
        "train/sample_length/mean": Mean(sum(lengths) / len(lengths), len(lengths)),
        "train/sample_length/max": Max(float(max(lengths))),
    }
