"""The policy gradient: a policy moves by the advantages of what it sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from roll_like.algorithms.aggregation import observation_weights, token_weights, trajectory_numbers
from roll_like.algorithms.demonstrations import (
    off_policy_objective,
    sft_coefficient,
    supervised_objective,
    supervised_weights,
)
from roll_like.algorithms.kl import KLController
from roll_like.algorithms.losses import BatchTokens, LossInputs, PolicyLoss, policy_objective
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.demonstrations import DemonstrationsConfig, SFTTermConfig
from roll_like.registry import LOSSES
from roll_like.training.draws import sample_seeds, uniform_draws
from roll_like.training.engine import Reference
from roll_like.training.interface import Engine, RankModel, Update, computed
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.layout import Layout, MicroBatch, PerToken, spread, update_parts
from roll_like.types import BoolArray, FloatArray, IntArray, Origin, PolicySample, ReferencedSample
from roll_like.values import Last, Mean, Metric, Metrics, Sum, merge

#: Codes in `PolicyBatch.origins`; 0 is the policy.
REPLAYED, DEMONSTRATED = 1.0, 2.0
_CODES = {Origin.SAMPLED: 0.0, Origin.REPLAYED: REPLAYED, Origin.DEMONSTRATION: DEMONSTRATED}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBatch(MicroBatch):
    """What a policy is trained on, beside the rows: figures of each target, shape [N].

    Attributes:
        advantages: From the advantage estimator.
        behaviour_logprobs: What the inference engine reported.
        reference_logprobs: Of the reference model; empty where there is none.
        old_logprobs: Of the policy that ratios compare with; empty for the policy as it is.
        draws: A number in [0, 1) that depends on the sample's tokens and the target's place only.
        turns: Index of the turn that sampled each target, within its sample; −1 for a token of an observation, and for
            one that is supervised alone.
        likelihood_weights: Weight of each target whose likelihood is maximised: a token of an observation, or a
            supervised one; empty where these are no targets.
        origins: Who wrote each target: 0 the policy, `REPLAYED` or `DEMONSTRATED`; empty where all are the policy's.
    """

    advantages: FloatArray
    behaviour_logprobs: FloatArray
    reference_logprobs: FloatArray
    old_logprobs: FloatArray
    draws: FloatArray
    turns: IntArray
    likelihood_weights: FloatArray
    origins: FloatArray

    def of_turns(self) -> tuple[PolicyBatch, IntArray]:
        """Return the batch with the targets that the policy sampled alone, and which these are."""
        return self.where(self.turns >= 0)

    def where(self, chosen: BoolArray) -> tuple[PolicyBatch, IntArray]:
        """Return the batch with some targets alone, and which these are."""
        kept, count = np.flatnonzero(chosen).astype(np.int32), len(self.targets)
        arrays: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        per_target: dict[str, Any] = {
            name: array[kept]
            for name, array in arrays.items()
            if isinstance(array, np.ndarray) and array.shape == (count,)
        }
        return replace(self, **per_target), kept


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyUpdate:
    """What one optimizer step has in common.

    Attributes:
        kl_coefficient: Weight of a KL penalty in the loss.
        tokens: The tokens of all ranks under the weights before the step, for a loss that needs statistics of them.
        loss: The loss, with those statistics; only on ranks.
        sft_coefficient: Weight of the supervised loss on demonstrations.
    """

    kl_coefficient: float
    tokens: BatchTokens | None
    loss: PolicyLoss | None = None
    sft_coefficient: float = 0.0


@dataclass(slots=True)
class SFTWeight:
    """The weight of the supervised loss on demonstrations in the step at hand; the driver's."""

    config: SFTTermConfig
    coefficient: float = 0.0

    def begin_step(self, step: int) -> None:
        """Take that of a step, counted from 0."""
        self.coefficient = sft_coefficient(self.config, step)


@dataclass(frozen=True, kw_only=True)
class PolicyObjective(LanguageModelObjective[Sequence[PolicySample], PolicyBatch]):
    """Takes `updates_per_step` optimizer steps over a step's samples.

    Samples that the loss turns down are left out. Samples whose gradient is zero whatever the policy (advantage 0, no
    KL or entropy term) count in the denominators and are not computed.

    Attributes:
        algorithm: Loss, aggregation, KL and correction. `temperature` is that of sampling.
        max_response_tokens: Constant length of the `token_sum_norm` aggregation.
        kl: Sets the weight of a KL penalty in the loss, and follows what a step measured; the driver's.
        demonstrations: How answers that rows give are learned from; None without.
        sft: The weight of a supervised loss on them; None without.
    """

    algorithm: AlgorithmConfig
    max_response_tokens: int
    kl: KLController
    demonstrations: DemonstrationsConfig | None = None
    sft: SFTWeight | None = None

    losses: ClassVar[frozenset[str]] = frozenset(
        {
            *("train/loss", "train/policy_loss", "train/kl_loss", "train/observation_loss"),
            *("train/off_policy_loss", "train/sft_loss"),
        }
    )

    def updates(self, step: Sequence[PolicySample], engine: Engine) -> Iterator[Update[PolicyBatch]]:
        """Yield the step's optimizer steps; old log-probabilities are those before the first."""
        loss, coefficient = self._loss(), self.kl.coefficient
        selected = self._selected(step)
        parts = update_parts(selected, self.algorithm.updates_per_step)
        layouts = [self._laid_out([selected[index] for index in part], engine.layout) for part in parts]
        for shards in self._with_old([shards for shards in layouts if shards[0]], engine):
            tokens = whole_batch(shards, engine.forward(shards)) if loss.needs_batch else None
            supervised = 0.0 if self.sft is None else self.sft.coefficient
            shared = PolicyUpdate(kl_coefficient=coefficient, tokens=tokens, sft_coefficient=supervised)
            yield Update(shards=shards, shared=shared)

    def bind(self, shared: PolicyUpdate, device: torch.device) -> PolicyUpdate:
        """Return what is shared with the loss of this optimizer step."""
        loss = self._loss()
        if shared.tokens is not None:
            arrays = {each.name: getattr(shared.tokens, each.name).to(device) for each in fields(BatchTokens)}
            loss = loss.of_batch(BatchTokens(**arrays))
        return replace(shared, loss=loss)

    def loss(self, model: RankModel, batch: PolicyBatch, shared: PolicyUpdate) -> tuple[Tensor, Metrics]:
        """Return a micro-batch's share of the loss."""
        return self.policy_loss(model, batch, shared, *self.logprobs(model, batch))

    def policy_loss(
        self, model: RankModel, batch: PolicyBatch, shared: PolicyUpdate, logprobs_N: Tensor, entropy_N: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Return the same, from log-probabilities and entropies of its targets."""
        assert shared.loss is not None, "`bind` has set it"
        algorithm, kl = self.algorithm, self.algorithm.kl
        referenced, likelihood, off_policy = bool(batch.reference_logprobs.size), None, None
        if batch.likelihood_weights.size:
            likelihood = self._likelihood(logprobs_N, model.tensor(batch.likelihood_weights))
            batch, (logprobs_N, entropy_N) = _chosen(model, batch, batch.turns >= 0, logprobs_N, entropy_N)
        if (given := batch.origins == DEMONSTRATED).any():
            off_policy = self._off_policy(model, *_chosen(model, batch, given, logprobs_N))
            batch, (logprobs_N, entropy_N) = _chosen(model, batch, ~given, logprobs_N, entropy_N)
        sequence_ids, sequence_N, _ = batch.sequences()
        turns, turn_N = np.unique(_turn_keys(batch), return_inverse=True)
        inputs = LossInputs(
            logprobs_N=logprobs_N,
            old_logprobs_N=model.tensor(batch.old_logprobs) if batch.old_logprobs.size else logprobs_N.detach(),
            behaviour_logprobs_N=model.tensor(batch.behaviour_logprobs),
            reference_logprobs_N=model.tensor(batch.reference_logprobs) if referenced else None,
            entropy_N=entropy_N,
            advantages_N=model.tensor(batch.advantages),
            weights_N=model.tensor(batch.weights),
            sequence_N=torch.from_numpy(sequence_N).to(model.device),
            sequences=len(sequence_ids),
            turn_N=torch.from_numpy(turn_N).to(model.device),
            turns=len(turns),
            draws_N=model.tensor(batch.draws),
            replayed_N=model.tensor(batch.origins) == REPLAYED if batch.origins.size else None,
        )
        penalty = kl.model_copy(update={"coefficient": shared.kl_coefficient}) if kl.use == "loss" else None
        loss, metrics = policy_objective(
            inputs, shared.loss, penalty, algorithm.entropy_coefficient, algorithm.correction
        )
        if off_policy is not None:
            loss, metrics = loss + off_policy[0], {**metrics, **off_policy[1]}
        if likelihood is not None:
            policy, supervised = self._shares(shared)
            loss, metrics = policy * loss + supervised * likelihood[0], {**metrics, **likelihood[1]}
        if off_policy is not None or likelihood is not None:
            metrics = {**metrics, "train/loss": Sum(loss.item())}
        replayed = self._replayed(model) if self.replays_routes else {}
        return loss, merge([metrics, computed(batch, model), replayed])

    def report(self, step: Sequence[PolicySample], metrics: Mapping[str, Metric], updates: int) -> dict[str, Metric]:
        """Return a step's metrics; the weight of the KL penalty in the next step follows from its divergence."""
        completed = super().report(step, metrics, updates)
        if updates and self.algorithm.kl.use == "loss":
            completed["train/kl_coefficient"] = Last(self.kl.coefficient)
            if "train/kl" in metrics:
                penalised = [sample for sample in self._selected(step) if _is_penalised(sample)]
                self.kl.update(float(metrics["train/kl"].value), len(set(trajectory_numbers(penalised))))
        if updates and self.sft is not None:
            completed["train/sft_coefficient"] = Last(self.sft.coefficient)
        return completed

    @property
    def zero_advantage_moves(self) -> bool:
        """Whether tokens of advantage 0 change the gradient, or statistics."""
        regularised = self.algorithm.kl.use == "loss" or self.algorithm.entropy_coefficient != 0
        return regularised or self._loss().zero_advantage_moves

    def _replayed(self, model: RankModel) -> Metrics:
        """Return how many of the engine's experts the trainer's router would not have chosen."""
        fraction, count = model.module.router.disagreement(model.module.sharing)
        return {"train/router_disagreement": Mean(fraction, float(count))}

    def _likelihood(self, logprobs_N: Tensor, weights_N: Tensor) -> tuple[Tensor, Metrics]:
        """Return the cross-entropy of supervised tokens, or of observations, and its figures."""
        if self.sft is None:
            return _observation_loss(logprobs_N, weights_N)
        return supervised_objective(logprobs_N, weights_N, phi=self.sft.config.token_weight == "phi")

    def _shares(self, shared: PolicyUpdate) -> tuple[float, float]:
        """Return the weights of the policy's loss and of the cross-entropy."""
        if self.sft is None:
            return 1.0, 1.0  # a coefficient of observations is among their weights
        coefficient = shared.sft_coefficient
        return (1 - coefficient if self.sft.config.combine == "interpolate" else 1.0), coefficient

    def _off_policy(self, model: RankModel, batch: PolicyBatch, logprobs: Sequence[Tensor]) -> tuple[Tensor, Metrics]:
        """Return the loss of demonstrations that are samples of their groups, and its figures."""
        settings = None if self.demonstrations is None else self.demonstrations.off_policy
        assert settings is not None, "no other run has demonstrations in its groups"
        advantages_N, weights_N = model.tensor(batch.advantages), model.tensor(batch.weights)
        return off_policy_objective(logprobs[0], advantages_N, weights_N, settings.gamma)

    def _loss(self) -> PolicyLoss:
        loss: PolicyLoss = LOSSES.get(self.algorithm.loss.type)(self.algorithm.loss)
        return loss

    def _selected(self, samples: Sequence[PolicySample]) -> list[PolicySample]:
        loss = self._loss()
        return [sample for sample in samples if sample.supervised is not None or loss.selects(sample)]

    def _laid_out(self, samples: Sequence[PolicySample], layout: Layout) -> list[list[PolicyBatch]]:
        algorithm = self.algorithm
        weights = token_weights(samples, algorithm.aggregation, max_response_tokens=self.max_response_tokens)
        if self.sft is None:
            likelihood = observation_weights(samples, algorithm.observation_coefficient)
        else:
            likelihood = supervised_weights(samples)
        if not self.zero_advantage_moves:
            moving = [i for i, sample in enumerate(samples) if np.any(sample.advantages) or np.any(likelihood[i])]
            samples, weights = [samples[i] for i in moving], [weights[i] for i in moving]
            likelihood = [likelihood[i] for i in moving]
        reads = self.sft is not None or algorithm.observation_coefficient > 0
        return policy_batches(samples, weights, likelihood if reads else None, **layout)

    def _with_old(self, updates: list[list[list[PolicyBatch]]], engine: Engine) -> list[list[list[PolicyBatch]]]:
        """Return the batches with the log-probabilities that ratios compare with."""
        how = self.algorithm.old_logprobs
        if how == "recompute" or (how == "auto" and len(updates) > 1):
            with engine.timer("old_logprobs"):
                found = [engine.forward(shards) for shards in updates]
        elif how == "behaviour":
            found = [[[batch.behaviour_logprobs for batch in shard] for shard in shards] for shards in updates]
        else:
            return updates
        return [
            [
                [replace(batch, old_logprobs=old) for batch, old in zip(*of_rank, strict=True)]
                for of_rank in zip(shards, results, strict=True)
            ]
            for shards, results in zip(updates, found, strict=True)
        ]


def policy_batches(
    samples: Sequence[PolicySample],
    weights: Sequence[FloatArray],
    likelihood: Sequence[FloatArray] | None = None,
    **layout: Unpack[Layout],
) -> list[list[PolicyBatch]]:
    """Return each rank's micro-batches of one optimizer step of a policy, as `micro_batches` does.

    Args:
        weights: Of sampled tokens in the policy's loss, one array [T] a sample.
        likelihood: Of tokens of observations (`observation_weights`), or of supervised ones (`supervised_weights`),
            which then are targets too.
    """
    if likelihood is not None:
        # one array for both: a batch that only fills up a rank's work has weights 0
        weights = [ours + read for ours, read in zip(weights, likelihood, strict=True)]
    nothing = np.zeros(0, np.float32)
    advantages = PerToken([sample.advantages for sample in samples])
    behaviour = PerToken([sample.behaviour_logprobs for sample in samples])
    referenced = [sample.reference_logprobs for sample in samples if isinstance(sample, ReferencedSample)]
    reference = PerToken(referenced) if len(referenced) == len(samples) else None
    turns = PerToken([sample.turns for sample in samples])
    seeds = sample_seeds([sample.token_ids for sample in samples])
    codes = np.array([_CODES[sample.origin] for sample in samples], np.float32)

    def make(batch: MicroBatch) -> PolicyBatch:
        turns_N = turns.of(batch).astype(np.int32)  # float32 holds indices up to 2²⁴ exactly
        own, read = np.where(turns_N >= 0, batch.weights, 0), np.where(turns_N < 0, batch.weights, 0)
        return PolicyBatch(
            **{**batch.shared_fields, "weights": own},
            likelihood_weights=nothing if likelihood is None else read,
            origins=codes[batch.sample_ids] if codes.any() else nothing,
            advantages=advantages.of(batch),
            behaviour_logprobs=behaviour.of(batch),
            reference_logprobs=nothing if reference is None else reference.of(batch),
            old_logprobs=nothing,
            draws=uniform_draws(seeds[batch.sample_ids], batch.target_ids),
            turns=turns_N,
        )

    targets = samples
    if likelihood is not None:
        targets = [
            replace(sample, loss_mask=sample.loss_mask | (read != 0))
            for sample, read in zip(samples, likelihood, strict=True)
        ]
    return spread(targets, weights, make, **layout)


def whole_batch(shards: Sequence[Sequence[PolicyBatch]], logprobs: Sequence[Sequence[FloatArray]]) -> BatchTokens:
    """Return every token with a weight of one optimizer step, by rank; without demonstrations.

    Args:
        logprobs: Of the policy being trained, shape [N] for each micro-batch.
    """
    columns = [
        np.stack([current, batch.old_logprobs if batch.old_logprobs.size else current, batch.advantages, batch.draws])[
            :, (batch.weights != 0) & (batch.origins != DEMONSTRATED if batch.origins.size else True)
        ]
        for batches, found in zip(shards, logprobs, strict=True)
        for batch, current in zip(batches, found, strict=True)
    ]
    logprobs_N, old_N, advantages_N, draws_N = torch.from_numpy(np.concatenate(columns, axis=1))
    return BatchTokens(logprobs_N=logprobs_N, old_logprobs_N=old_N, advantages_N=advantages_N, draws_N=draws_N)


def with_reference(
    samples: Sequence[PolicySample], reference: Reference[PolicySample] | None
) -> Sequence[PolicySample]:
    """Return the samples with the reference model's log-probabilities, or as they are without one."""
    return samples if reference is None else with_logprobs(samples, reference.logprobs(samples))


def with_logprobs(samples: Sequence[PolicySample], reference_logprobs: Sequence[FloatArray]) -> list[ReferencedSample]:
    """Return the samples with log-probabilities to compare with, one array [T] each."""
    return [
        ReferencedSample(
            **{each.name: getattr(sample, each.name) for each in fields(PolicySample)}, reference_logprobs=logprobs
        )
        for sample, logprobs in zip(samples, reference_logprobs, strict=True)
    ]


def _is_penalised(sample: PolicySample) -> bool:
    """Return whether a KL penalty looks at a sample: at no demonstration, in a group or supervised."""
    return sample.supervised is None and sample.origin is not Origin.DEMONSTRATION


def _chosen(
    model: RankModel, batch: PolicyBatch, chosen: BoolArray, *tensors_N: Tensor
) -> tuple[PolicyBatch, list[Tensor]]:
    """Return the batch with some of its targets alone, and the same of what was computed of them."""
    part, kept = batch.where(chosen)
    kept_N = torch.from_numpy(kept).to(model.device)
    return part, [tensor_N[kept_N] for tensor_N in tensors_N]


def _observation_loss(logprobs_N: Tensor, weights_N: Tensor) -> tuple[Tensor, Metrics]:
    """Return Σ w·(−log π) over tokens of observations, and its figures."""
    counted_N = weights_N != 0
    term = -(weights_N * logprobs_N).sum()
    count = int(counted_N.sum())
    mean = float(-logprobs_N.detach()[counted_N].mean()) if count else 0.0
    figures: Metrics = {
        "train/observation_loss": Sum(term.item()),
        "train/observation_cross_entropy": Mean(mean, float(count)),
    }
    return term, figures


def _turn_keys(batch: PolicyBatch) -> npt.NDArray[np.int64]:
    """Return a number of each target that those of the same sample and turn share, shape [N]."""
    stride = int(batch.turns.max(initial=0)) + 1
    return batch.sample_ids.astype(np.int64) * stride + batch.turns
