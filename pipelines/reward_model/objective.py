"""What a reward model learns: which of two conversations should score higher, or the score of each, or of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from roll_like.algorithms.reward_model import ScoredPairs, reward_model_objective
from roll_like.builtin.pipelines.reward_model.config import RewardModelAlgorithmConfig
from roll_like.config.model import ModelTask
from roll_like.config.training import TrainingConfig
from roll_like.errors import EngineError
from roll_like.models.classifier import HEAD, load_classifier
from roll_like.training.interface import BatchT, Engine, Objective, RankModel, RankSpec, StepT, Update, computed
from roll_like.training.language_model import loads_late, prepared
from roll_like.training.layout import MicroBatch
from roll_like.training.pairs import PairBatch, pair_batches
from roll_like.training.policy import RowModule
from roll_like.types import FloatArray, IntArray, Pair, TrainingSample
from roll_like.values import Metrics, merge


@dataclass(frozen=True, kw_only=True)
class ScoreObjective(Objective[StepT, BatchT]):
    """A loss on the scores of whole conversations, or of the steps of answers.

    Attributes:
        settings: The `training` section.
        algorithm: The `algorithm` section.
        pad_token_id: The token that the model, once exported, takes for padding.
    """

    settings: TrainingConfig
    algorithm: RewardModelAlgorithmConfig
    pad_token_id: int
    packing: bool = True

    task: ClassVar[ModelTask] = "text-classification"

    def load(self, spec: RankSpec[Any]) -> nn.Module:
        """Return a classifier with one output."""
        loaded = load_classifier(
            Path(spec.model_path),
            spec.dtype,
            seed=spec.seed,
            task=self.task,
            trust_remote_code=spec.trust_remote_code,
            late=loads_late(spec, self.settings),
        )
        return ScoreModule(prepared(loaded, spec, self.settings))

    def hf_model(self, module: nn.Module) -> Any:
        """Return the Hugging Face model."""
        return module.classifier

    def forward(self, model: RankModel, batch: BatchT) -> FloatArray:
        """Return the scores of a batch, in the order of `scores`."""
        scores_R: FloatArray = self.scores(model, batch).cpu().numpy()
        return scores_R

    def scores(self, model: RankModel, batch: MicroBatch) -> Tensor:
        """Return the score of every conversation, in the order of the batch's sequences, shape [R]."""
        scores_N: Tensor = model(batch)
        # one target a conversation
        return scores_N[torch.from_numpy(np.argsort(batch.sample_ids)).to(model.device)]


@dataclass(frozen=True, kw_only=True)
class RewardModelObjective(ScoreObjective[Sequence[Pair], PairBatch]):
    """Scores the preferred conversation of a pair higher: the Bradley-Terry loss."""

    def updates(self, step: Sequence[Pair], engine: Engine) -> Iterator[Update[PairBatch]]:
        """Yield one optimizer step.

        Raises:
            EngineError: A pair is longer than a row may be, or a conversation is nothing but padding.
        """
        margins = np.array([pair.margin for pair in step], np.float32)
        pairs = score_targets(step, self.pad_token_id)
        yield Update(shards=pair_batches(pairs, **engine.layout), shared=margins)

    def loss(self, model: RankModel, batch: PairBatch, shared: FloatArray) -> tuple[Tensor, Metrics]:
        """Return a micro-batch's share of the loss; `shared` has the margin of each pair of the step."""
        scores_R = self.scores(model, batch)
        chosen, rejected = (torch.from_numpy(side).long().to(model.device) for side in (batch.chosen, batch.rejected))
        pairs = ScoredPairs(
            chosen_P=scores_R[chosen],
            rejected_P=scores_R[rejected],
            margins_P=model.tensor(shared[batch.pair_ids]),
            weights_P=model.tensor(batch.counted / np.float32(len(shared))),
        )
        objective, metrics = reward_model_objective(
            pairs,
            label_smoothing=self.algorithm.label_smoothing,
            center_coefficient=self.algorithm.center_coefficient,
        )
        return objective, merge([metrics, computed(batch, model)])


class ScoreHead(nn.Module):
    """A classifier's linear output, computed in float32: scores of a pair differ by little.

    It is no `nn.Linear`, so that what is done to a model's linear layers (adapters) leaves it as it is.

    Args:
        linear: The output, [1, D], with or without a bias.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Return scores, shape [N], float32."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden_ND.float(), self.weight.float(), bias).squeeze(1)


class ScoreModule(RowModule):
    """A Hugging Face classifier with one output, whose forward pass takes one micro-batch.

    Args:
        classifier: The model. Its output is trained, whatever else of it is frozen.
    """

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        self.classifier = classifier
        setattr(classifier, HEAD, ScoreHead(getattr(classifier, HEAD)))
        self.head.requires_grad_(True)

    @property
    def head(self) -> ScoreHead:
        """The output; its weight keeps the name that transformers gives it."""
        head: ScoreHead = getattr(self.classifier, HEAD)
        return head

    def forward(
        self, token_ids_BL: Tensor, positions_BL: Tensor, segment_ids_BL: Tensor, sources_N: Tensor, *_: Tensor
    ) -> Tensor:
        """Return the score at each flat index `sources_N` of [B·L], shape [N], float32."""
        rows = (token_ids_BL, positions_BL, segment_ids_BL, sources_N)
        hidden_ND, own = self.states_before(self.classifier.base_model, *rows)
        scores_N: Tensor = own.whole(self.head(hidden_ND))
        return scores_N


def score_targets(pairs: Sequence[Pair], pad_token_id: int) -> list[Pair]:
    """Return pairs of conversations with a target at the place after their end.

    A score is read where the next token would be predicted: at the last token that is not padding, which is where
    transformers' sequence classifiers read it, also where a conversation itself ends with that token. What follows it
    changes nothing and is left out; one more token stands for the place after it and is not computed.

    Args:
        pad_token_id: The token that the exported model takes for padding.

    Raises:
        EngineError: A conversation is nothing but padding.
    """
    read = []
    for index, pair in enumerate(pairs):
        chosen, rejected = (_until_padding(each, pad_token_id) for each in pair.sequences)
        shortest = min(len(chosen), len(rejected))
        differ = np.flatnonzero(chosen[:shortest] != rejected[:shortest])
        shared = int(differ[0]) if len(differ) else shortest
        read.append(Pair(chosen=_read(chosen, str(index), shared), rejected=_read(rejected, str(index), shared)))
    return read


def answer_targets(answers: Sequence[TrainingSample], pad_token_id: int) -> list[TrainingSample]:
    """Return single conversations as `score_targets` returns those of pairs; arguments and errors are the same."""
    return [_read(_until_padding(each, pad_token_id), str(index), 0) for index, each in enumerate(answers)]


def _read(tokens: IntArray, group_id: str, shared: int) -> TrainingSample:
    return TrainingSample(
        group_id=group_id,
        token_ids=np.append(tokens, tokens[-1]),
        prompt_length=shared,
        loss_mask=np.arange(len(tokens) + 1) == len(tokens),
    )


def _until_padding(conversation: TrainingSample, pad_token_id: int) -> IntArray:
    token_ids = conversation.token_ids
    places = np.flatnonzero(token_ids != pad_token_id)
    if not len(places):
        raise EngineError(
            f"{conversation.origin}: a conversation holds nothing but the padding token {pad_token_id}",
            fix="correct the row",
        )
    return token_ids[: places[-1] + 1]
