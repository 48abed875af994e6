"""Scores of single answers: whether there is something to learn from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.check.findings import Finding
from roll_like.data.samples import SampleSet


def score_findings(config: RewardModelRunConfig, loaded: Mapping[str, SampleSet[Any]]) -> Iterator[Finding]:
    """Yield what is odd about the scores of a run that learns from single answers, and how they are spread.

    Args:
        loaded: What could be read of `data` and `evaluation`.
    """
    if config.data.type == "pairs" or "data" not in loaded:
        return
    scores = np.array([answer.score for source in loaded["data"].sources for answer in source.items])
    if scores.min() == scores.max():
        yield Finding(
            "error",
            "data.sources",
            f"all {len(scores)} answers have the score {scores[0]:g}, so that a model that reads nothing is right; add "
            "answers with other scores, or correct score_field",
        )
        return
    if config.algorithm.loss == "bce":
        right, wrong = int((scores > 0.5).sum()), int((scores < 0.5).sum())
        spread = f"{right} answers have a score above 0.5 and {wrong} one below"
    else:
        spread = (
            f"scores are from {scores.min():g} to {scores.max():g}, with a mean of {scores.mean():.3g} and a standard "
            f"deviation of {scores.std():.3g}"
        )
    yield Finding("note", "data.sources", spread)
