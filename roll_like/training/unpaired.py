"""The driver's handle on the ranks of a model that learns from single answers, each liked or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from roll_like.algorithms.preference import PreferenceLoss, UnpairedInputs, preference_objective
from roll_like.algorithms.preference.base import without_reference
from roll_like.cluster import Cluster
from roll_like.config.base import PluginConfig
from roll_like.config.sections import TrainingConfig
from roll_like.registry import PREFERENCE_LOSSES
from roll_like.training.engine import with_padding_fraction
from roll_like.training.layout import micro_batches
from roll_like.training.preference import AnswersEngine
from roll_like.training.unpaired_worker import (
    MismatchedSums,
    UnpairedShare,
    UnpairedWorker,
    of_step,
    unpaired_batch,
)
from roll_like.types import BoolArray, FloatArray, IntArray, TrainingSample
from roll_like.values import Last, Mean, Metric, Sum, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSample(TrainingSample):
    """An answer with its verdict.

    Attributes:
        desirable: Whether it is one to make likelier.
    """

    desirable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchedSample(TrainingSample):
    """An answer after another answer's prompt: not trained on, only scored for the baseline of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A batch taken apart: answers, and what their baseline follows from."""

    answers: Sequence[VerdictSample]
    desirable: BoolArray
    reference: FloatArray | None
    mismatched: Sequence[TrainingSample]
    mismatched_reference: FloatArray | None


class UnpairedEngine(AnswersEngine[UnpairedWorker]):
    """Learns from single answers.

    A batch is a list of `VerdictSample`s and, for a loss with a baseline, the `MismatchedSample`s of the same step.

    Args:
        cluster: Started ranks.
        training: The `training` section.
        loss: A loss on single answers.
        timer: Times a named part of a step.
    """

    def __init__(
        self,
        cluster: Cluster[UnpairedWorker],
        training: TrainingConfig,
        loss: PluginConfig,
        *,
        timer: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        super().__init__(cluster, training, timer=timer)
        self._loss: PreferenceLoss = PREFERENCE_LOSSES.get(loss.type)(loss)

    def train_step(self, samples: Sequence[TrainingSample], reference_sums: FloatArray | None) -> Mapping[str, Metric]:
        """Take one optimizer step over answers; its baseline is of the weights before it, and one for all ranks.

        Args:
            samples: A batch, as described above.
            reference_sums: Log-probability of each under the reference model; None where the loss has none.

        Raises:
            EngineError: There are mismatched answers and no reference.
        """
        step = _apart(samples, reference_sums)
        policy = self.sums(step.mismatched) if step.mismatched else np.zeros(0, np.float32)
        shards = micro_batches(
            step.answers,
            ranks=len(self.cluster),
            max_tokens=self._training.max_tokens_per_micro_batch,
            share_prompts=True,
            packing=True,
        )
        shares = [
            UnpairedShare(
                batches=[unpaired_batch(rows, step.desirable, step.reference) for rows in batches],
                samples=len(step.answers),
                mismatched=_mismatched(step, policy),
            )
            for batches in shards
        ]
        parts = self.cluster.scatter(UnpairedWorker.train, shares)
        return _with_margin(with_padding_fraction(merge([{"train/updates": Sum(1.0)}, *parts])))

    def measure(self, samples: Sequence[TrainingSample], reference_sums: FloatArray | None) -> dict[str, Metric]:
        """Return the figures of answers under the current weights, without a step.

        Where the answers are those of pairs, a liked and another one to each prompt in turn, they include
        `preference/pair_accuracy`, the share of pairs whose liked answer has the higher reward.

        Args:
            samples: A batch, as described above.
            reference_sums: Log-probability of each under the reference model; None where the loss has none.
        """
        step = _apart(samples, reference_sums)
        sums = self.sums([*step.answers, *step.mismatched])
        count = len(step.answers)
        loss = of_step(self._loss, _mismatched(step, sums[count:]), torch.device("cpu"))
        inputs = UnpairedInputs(
            logprobs_S=torch.from_numpy(sums[:count]),
            tokens_S=torch.from_numpy(_tokens(step.answers)),
            desirable_S=torch.from_numpy(step.desirable),
            weights_S=torch.full((count,), 1 / count),
            reference_logprobs_S=None if step.reference is None else torch.from_numpy(step.reference),
        )
        metrics = _with_margin(preference_objective(inputs, loss)[1])
        if _are_pairs(step.answers):
            rewards_S = loss(inputs).rewards_S.double()
            liked_P, other_P = rewards_S[::2], rewards_S[1::2]
            right_P = (liked_P > other_P).double() + 0.5 * (liked_P == other_P).double()
            metrics["preference/pair_accuracy"] = Mean(float(right_P.mean()), len(right_P))
        return metrics


def _apart(samples: Sequence[TrainingSample], reference_sums: FloatArray | None) -> _Step:
    answers = [sample for sample in samples if isinstance(sample, VerdictSample)]
    is_answer = np.array([isinstance(sample, VerdictSample) for sample in samples])
    return _Step(
        answers=answers,
        desirable=np.array([sample.desirable for sample in answers]),
        reference=None if reference_sums is None else reference_sums[is_answer],
        mismatched=[sample for sample in samples if not isinstance(sample, VerdictSample)],
        mismatched_reference=None if reference_sums is None else reference_sums[~is_answer],
    )


def _are_pairs(answers: Sequence[VerdictSample]) -> bool:
    return len(answers) % 2 == 0 and all(
        liked.desirable and not other.desirable and liked.group_id == other.group_id
        for liked, other in zip(answers[::2], answers[1::2], strict=True)
    )


def _mismatched(step: _Step, policy: FloatArray) -> MismatchedSums | None:
    if not step.mismatched:
        return None
    if step.mismatched_reference is None:
        raise without_reference("mismatched samples")
    return MismatchedSums(logprobs=policy, reference=step.mismatched_reference, tokens=_tokens(step.mismatched))


def _tokens(samples: Sequence[TrainingSample]) -> IntArray:
    """Return how many tokens of each sample the loss applies to, shape [len(samples)]."""
    return np.array([int(sample.sampled.sum()) for sample in samples], np.int32)


def _with_margin(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Add the difference of the mean rewards of liked and other answers, where there are both."""
    liked, other = (metrics.get(f"preference/reward_{side}") for side in ("chosen", "rejected"))
    if liked is None or other is None:
        return {**metrics}
    return {**metrics, "preference/reward_margin": Last(liked.value - other.value)}
