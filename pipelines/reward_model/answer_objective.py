"""What a reward model learns from single answers: the score of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roll_like.algorithms.reward_model import (
    ScoredAnswers,
    area_under_curve,
    rank_correlation,
    scored_answers_objective,
)
from roll_like.builtin.pipelines.reward_model.objective import ScoreObjective, answer_targets
from roll_like.builtin.pipelines.reward_model.scored_answers import ScoredAnswer
from roll_like.training.interface import Engine, RankModel, Update, computed
from roll_like.training.layout import MicroBatch, micro_batches
from roll_like.types import FloatArray
from roll_like.values import Last, Metric, Metrics, merge


@dataclass(frozen=True, kw_only=True)
class ScoredAnswerObjective(ScoreObjective[Sequence[ScoredAnswer], MicroBatch]):
    """Makes a model's scores those that answers were given: by cross-entropy, or by squared error."""

    def updates(self, step: Sequence[ScoredAnswer], engine: Engine) -> Iterator[Update[MicroBatch]]:
        """Yield one optimizer step.

        Raises:
            EngineError: A conversation is nothing but padding.
        """
        yield Update(shards=self._shards(step, engine), shared=_labels(step))

    def loss(self, model: RankModel, batch: MicroBatch, shared: FloatArray) -> tuple[Tensor, Metrics]:
        """Return a micro-batch's share of the loss; `shared` has the given score of each answer of the step."""
        ids_R, _, counted_R = batch.sequences()
        answers = ScoredAnswers(
            scores_S=self.scores(model, batch),
            labels_S=model.tensor(shared[ids_R]),
            weights_S=model.tensor(counted_R / np.float32(len(shared))),
        )
        objective, metrics = scored_answers_objective(answers, loss=self.algorithm.loss)
        return objective, merge([metrics, computed(batch, model)])

    def measure(self, step: Sequence[ScoredAnswer], engine: Engine) -> dict[str, Metric]:
        """Return the metrics of answers under the current weights, with how well the scores order them."""
        shards = self._shards(step, engine)
        scores, labels = np.zeros(len(step), np.float32), _labels(step)
        for batches, results in zip(shards, engine.forward(shards), strict=True):
            for batch, found in zip(batches, results, strict=True):
                scores[batch.sequences()[0]] = found
        answers = ScoredAnswers(
            scores_S=torch.from_numpy(scores),
            labels_S=torch.from_numpy(labels),
            weights_S=torch.full((len(step),), 1 / len(step)),
        )
        _, metrics = scored_answers_objective(answers, loss=self.algorithm.loss)
        name, order = (
            ("auc", area_under_curve) if self.algorithm.loss == "bce" else ("rank_correlation", rank_correlation)
        )
        ordered = order(scores, labels)
        return metrics if ordered is None else {**metrics, f"preference/{name}": Last(ordered)}

    def _shards(self, step: Sequence[ScoredAnswer], engine: Engine) -> list[list[MicroBatch]]:
        return micro_batches(answer_targets(step, self.pad_token_id), **engine.layout)


def _labels(step: Sequence[ScoredAnswer]) -> FloatArray:
    return np.array([answer.score for answer in step], np.float32)
