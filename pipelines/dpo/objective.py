"""Preference training: a policy moves by the log-probabilities of whole answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roll_like.algorithms.preference.base import PairInputs, PreferenceLoss, sequence_logprobs
from roll_like.algorithms.preference.objective import preference_objective
from roll_like.config.base import PluginConfig
from roll_like.registry import PREFERENCE_LOSSES
from roll_like.training.engine import Reference
from roll_like.training.interface import BatchT, Engine, RankModel, StepT, Update, computed
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.layout import MicroBatch
from roll_like.training.pairs import PairBatch, pair_batches, sequences_of
from roll_like.types import FloatArray, Pair, TrainingSample
from roll_like.values import Metrics, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStep:
    """Pairs of answers.

    Attributes:
        pairs: The pairs.
        reference: Log-probability of each of `sequences` under the reference model; None where the loss has none.
    """

    pairs: Sequence[Pair]
    reference: FloatArray | None = None

    @property
    def sequences(self) -> list[TrainingSample]:
        """What the reference model computes log-probabilities of."""
        return sequences_of(self.pairs)

    @property
    def trained(self) -> list[TrainingSample]:
        """The answers that are trained on."""
        return self.sequences


@dataclass(frozen=True, kw_only=True)
class AnswersObjective(LanguageModelObjective[StepT, BatchT]):
    """A loss on the log-probabilities of whole answers.

    Attributes:
        loss_config: The preference loss and its settings.
    """

    loss_config: PluginConfig
    packing: bool = True

    @property
    def preference_loss(self) -> PreferenceLoss:
        """The preference loss."""
        loss: PreferenceLoss = PREFERENCE_LOSSES.get(self.loss_config.type)(self.loss_config)
        return loss

    def answer_logprobs(self, model: RankModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probability and number of tokens of each answer of a micro-batch, shape [R] each."""
        ids_R, answer_N, _ = batch.sequences()
        logprobs_N, _ = self.logprobs(model, batch)
        return sequence_logprobs(logprobs_N, torch.from_numpy(answer_N).to(model.device), len(ids_R))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsUpdate:
    """What one optimizer step over pairs has in common.

    Attributes:
        pairs: Their number, on all ranks.
        chosen_tokens: Tokens of their chosen answers.
        reference_P2: Log-probabilities of chosen and rejected answers under the reference model; None without.
    """

    pairs: int
    chosen_tokens: int
    reference_P2: FloatArray | None


@dataclass(frozen=True, kw_only=True)
class PairedObjective(AnswersObjective[PairStep, PairBatch]):
    """Makes chosen answers likelier than rejected ones."""

    def updates(self, step: PairStep, engine: Engine) -> Iterator[Update[PairBatch]]:
        shared = PairsUpdate(
            pairs=len(step.pairs),
            chosen_tokens=sum(int(pair.chosen.loss_mask.sum()) for pair in step.pairs),
            reference_P2=None if step.reference is None else step.reference.reshape(-1, 2),
        )
        yield Update(shards=pair_batches(step.pairs, **engine.layout), shared=shared)

    def loss(self, model: RankModel, batch: PairBatch, shared: PairsUpdate) -> tuple[Tensor, Metrics]:
        logprobs_R, tokens_R = self.answer_logprobs(model, batch)
        chosen, rejected = (torch.from_numpy(side).long().to(model.device) for side in (batch.chosen, batch.rejected))
        counted_P = model.tensor(batch.counted)
        reference_P2 = None if shared.reference_P2 is None else model.tensor(shared.reference_P2[batch.pair_ids])
        inputs = PairInputs(
            chosen_logprobs_P=logprobs_R[chosen],
            rejected_logprobs_P=logprobs_R[rejected],
            chosen_tokens_P=tokens_R[chosen],
            rejected_tokens_P=tokens_R[rejected],
            weights_P=counted_P / shared.pairs,
            token_weights_P=counted_P / shared.chosen_tokens,
            reference_chosen_logprobs_P=None if reference_P2 is None else reference_P2[:, 0],
            reference_rejected_logprobs_P=None if reference_P2 is None else reference_P2[:, 1],
        )
        objective, metrics = preference_objective(inputs, self.preference_loss)
        return objective, merge([metrics, computed(batch, model)])


def whole_logprobs(model: Reference[TrainingSample], samples: Sequence[TrainingSample]) -> FloatArray:
    """Return a model's log-probability of each sample's trained tokens, shape [len(samples)].

    Args:
        model: An engine, or a policy without its adapters.
    """
    return np.array([float(each.sum(dtype=np.float64)) for each in model.logprobs(samples)], np.float32)
