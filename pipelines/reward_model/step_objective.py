"""What a process reward model learns from answers in steps: the label of each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from roll_like.algorithms.reward_model import (
    ScoredAnswers,
    area_under_curve,
    first_wrong_shares,
    harmonic_mean,
    scored_answers_objective,
)
from roll_like.builtin.pipelines.reward_model.objective import ScoreObjective
from roll_like.builtin.pipelines.reward_model.steps import StepAnswer
from roll_like.config.model import ModelTask
from roll_like.training.interface import Engine, RankModel, RankSpec, Update, computed
from roll_like.training.layout import MicroBatch, PerToken, micro_batches, per_sample
from roll_like.types import FloatArray, TrainingSample
from roll_like.values import Last, Metric, Metrics, merge


@dataclass(frozen=True, kw_only=True)
class StepObjective(ScoreObjective[Sequence[StepAnswer], MicroBatch]):
    """Makes a model's scores at the ends of steps their labels: by cross-entropy, or by squared error.

    Attributes:
        stated: What the exported model's config.json states of it.
    """

    stated: Mapping[str, Any]

    task: ClassVar[ModelTask] = "token-classification"

    def load(self, spec: RankSpec[Any]) -> nn.Module:
        """Return a token classifier with one output."""
        module = super().load(spec)
        self.hf_model(module).config.update(dict(self.stated))
        return module

    def scores(self, model: RankModel, batch: MicroBatch) -> Tensor:
        """Return the score of every step, in the order of the batch's targets, shape [N]."""
        scores_N: Tensor = model(batch)
        return scores_N

    def updates(self, step: Sequence[StepAnswer], engine: Engine) -> Iterator[Update[MicroBatch]]:
        """Yield one optimizer step."""
        samples, labels = step_targets(step)
        yield Update(shards=micro_batches(samples, **engine.layout), shared=labels)

    def loss(self, model: RankModel, batch: MicroBatch, shared: Sequence[FloatArray]) -> tuple[Tensor, Metrics]:
        """Return a micro-batch's share of the loss; `shared` has the labels of the whole step, by token."""
        steps = sum(int(np.isfinite(labels_T).sum()) for labels_T in shared)
        counted_N = (batch.weights != 0).astype(np.float32)
        answers = ScoredAnswers(
            scores_S=self.scores(model, batch),
            labels_S=model.tensor(PerToken(shared).of(batch)),
            weights_S=model.tensor(counted_N / np.float32(steps)),
        )
        objective, metrics = scored_answers_objective(answers, loss=self.algorithm.loss, counted="steps")
        return objective, merge([metrics, computed(batch, model)])

    def measure(self, step: Sequence[StepAnswer], engine: Engine) -> dict[str, Metric]:
        """Return the metrics of steps under the current weights, with how often the first wrong step is found."""
        samples, labels = step_targets(step)
        shards = micro_batches(samples, **engine.layout)
        found = per_sample(samples, shards, engine.forward(shards))
        scores = [scores_T[sample.loss_mask] for sample, scores_T in zip(samples, found, strict=True)]
        given = [labels_T[sample.loss_mask] for sample, labels_T in zip(samples, labels, strict=True)]
        scores_S, labels_S = np.concatenate(scores), np.concatenate(given)
        answers = ScoredAnswers(
            scores_S=torch.from_numpy(scores_S),
            labels_S=torch.from_numpy(labels_S),
            weights_S=torch.full((len(scores_S),), 1 / len(scores_S)),
        )
        _, metrics = scored_answers_objective(answers, loss=self.algorithm.loss, counted="steps")
        wrong, right = first_wrong_shares(scores, given, 0.0 if self.algorithm.loss == "bce" else 0.5)
        both = None if wrong is None or right is None else harmonic_mean(wrong, right)
        further = {
            "auc": area_under_curve(scores_S, labels_S),
            "first_wrong": wrong,
            "none_wrong": right,
            "first_wrong_f1": both,
        }
        return metrics | {f"preference/{name}": Last(value) for name, value in further.items() if value is not None}


def step_targets(answers: Sequence[StepAnswer]) -> tuple[list[TrainingSample], list[FloatArray]]:
    """Return answers with a target behind each trained token, and the labels at these targets, NaN elsewhere.

    A score is read where the next token would be predicted: at the trained token itself. One more token stands for the
    place after the last one and is not computed.
    """
    samples, labels = [], []
    for index, answer in enumerate(answers):
        mask_T = np.append(False, answer.loss_mask)
        labels_T = np.full(len(mask_T), np.nan, np.float32)
        labels_T[mask_T] = answer.labels
        tokens = np.append(answer.token_ids, answer.token_ids[-1])
        samples.append(TrainingSample(group_id=str(index), token_ids=tokens, loss_mask=mask_T))
        labels.append(labels_T)
    return samples, labels
