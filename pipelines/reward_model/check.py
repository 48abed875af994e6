"""Scores of single answers and labels of steps: whether there is something to learn from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.builtin.pipelines.reward_model.scored_answers import ScoredAnswer
from roll_like.builtin.pipelines.reward_model.steps import StepAnswer
from roll_like.check.findings import Finding
from roll_like.data.samples import SampleSet


def score_findings(config: RewardModelRunConfig, loaded: Mapping[str, SampleSet[Any]]) -> Iterator[Finding]:
    """Yield what is odd about the scores of a run that learns from single answers or steps, and how they are spread.

    Args:
        loaded: What could be read of `data` and `evaluation`.
    """
    if config.data.type == "pairs" or "data" not in loaded:
        return
    steps = config.data.type == "steps"
    items, field = ("steps", "labels_field") if steps else ("answers", "score_field")
    sources = loaded["data"].sources
    scores = np.array([value for source in sources for item in source.items for value in _scores(item)])
    if scores.min() == scores.max():
        yield Finding(
            "error",
            "data.sources",
            f"all {len(scores)} {items} have the score {scores[0]:g}, so that a model that reads nothing is right; add "
            f"{items} with other scores, or correct {field}",
        )
        return
    if config.algorithm.loss == "bce":
        right, wrong = int((scores > 0.5).sum()), int((scores < 0.5).sum())
        spread = f"{right} {items} have a score above 0.5 and {wrong} one below"
    else:
        spread = (
            f"scores are from {scores.min():g} to {scores.max():g}, with a mean of {scores.mean():.3g} and a standard "
            f"deviation of {scores.std():.3g}"
        )
    yield Finding("note", "data.sources", spread)


def _scores(item: ScoredAnswer | StepAnswer) -> Sequence[float]:
    return item.labels if isinstance(item, StepAnswer) else (item.score,)
