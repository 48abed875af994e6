"""A policy that is moved to the distributions of its teachers at the tokens that it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from roll_like.algorithms.distillation.base import DistillationLoss
from roll_like.algorithms.distillation.objective import distillation_objective
from roll_like.algorithms.kept import KeptIds
from roll_like.algorithms.logprobs import EveryToken
from roll_like.algorithms.losses.base import TokenLosses
from roll_like.builtin.pipelines.distill.answers import Targets, chosen, joined_answers
from roll_like.builtin.pipelines.distill.objective import (
    DistillationTarget,
    TopKHead,
    TopKObjective,
    TopKRequest,
    compared,
    top_k_teacher,
)
from roll_like.config.base import PluginConfig
from roll_like.policy_gradient.objective import PolicyBatch, PolicyObjective, PolicyUpdate
from roll_like.registry import DISTILLATION_LOSSES
from roll_like.training.interface import RankModel
from roll_like.training.layout import Layout
from roll_like.training.policy import TokenLogprobHead, kept_ids
from roll_like.types import PolicySample, TopKAnswers
from roll_like.values import Metrics, Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtPolicyBatch(PolicyBatch):
    """A policy's micro-batch with what a teacher says of its targets."""

    answers: TopKAnswers


@dataclass(frozen=True, slots=True)
class TaughtTarget:
    """What the head of a policy computes in one pass.

    Attributes:
        target: What it is compared with.
        kept: What log-probabilities of targets are normalised over; None for the whole vocabulary.
        policy_moves: Whether these have gradients.
    """

    target: DistillationTarget
    kept: KeptIds | None
    policy_moves: bool

    def select(self, rows_N: Tensor) -> TaughtTarget:
        """Return the rows where `rows_N` is true."""
        kept = None if self.kept is None else self.kept.select(rows_N)
        return replace(self, target=self.target.select(rows_N), kept=kept)


class TaughtHead(TopKHead):
    """The head of a policy: also its divergence from a teacher, and what it says as one."""

    def forward(
        self,
        hidden_ND: Tensor,
        targets_N: Tensor,
        temperature: float,
        more: KeptIds | EveryToken | TopKRequest | TaughtTarget | None = None,
    ) -> tuple[Any, ...]:
        """Return log-probabilities, entropies, losses and figures of each target; or what a `TopKHead` does."""
        if not isinstance(more, TaughtTarget):
            return super().forward(hidden_ND, targets_N, temperature, more)
        with nullcontext() if more.policy_moves else torch.no_grad():
            logprobs_N, entropy_N = super().forward(hidden_ND, targets_N, temperature, more.kept)
        losses = compared(self, hidden_ND, more.target)
        return logprobs_N, entropy_N, losses.losses_N, dict(losses.metrics)


@dataclass(frozen=True, kw_only=True)
class TaughtPolicyObjective(PolicyObjective, TopKObjective[Sequence[PolicySample], PolicyBatch]):
    """The policy gradient of rewards, if any, and Σ_t w_t·c·D(π_teacher, π) at the sampled tokens t.

    D is a divergence over the teacher's most likely tokens, and c its weight; w_t are the weights of
    `algorithm.aggregation`. Its gradient is exact at the given answers: as in GKD (Agarwal et al. 2023,
    arXiv:2306.13649) it does not pass through the sampling, so that answers may be of older policies.

    Attributes:
        loss_config: The divergence and its settings.
        weight: c.
        rewarded: Whether advantages are of rewards; else they are 0.
    """

    loss_config: PluginConfig
    weight: float
    rewarded: bool
    tells_own: bool = True

    losses: ClassVar[frozenset[str]] = PolicyObjective.losses | {"train/distillation_loss"}

    def head(self) -> type[TokenLogprobHead]:
        return TaughtHead

    @property
    def zero_advantage_moves(self) -> bool:
        """Whether tokens of advantage 0 change the gradient: by their divergence."""
        return True

    def loss(self, model: RankModel, batch: PolicyBatch, shared: PolicyUpdate) -> tuple[Tensor, Metrics]:
        assert isinstance(batch, TaughtPolicyBatch)
        loss: DistillationLoss = DISTILLATION_LOSSES.get(self.loss_config.type)(self.loss_config)
        weights_N = model.tensor(batch.weights)
        target = TaughtTarget(
            DistillationTarget(top_k_teacher(model, batch.answers, loss), loss, weights_N),
            kept=None if batch.kept is None else kept_ids(batch.kept, model.device),
            policy_moves=self.rewarded or super().zero_advantage_moves,
        )
        logprobs_N, entropy_N, losses_N, figures = model(batch, self.temperature, target)
        objective, metrics = self.policy_loss(model, batch, shared, logprobs_N, entropy_N)
        divergence, taught = distillation_objective(TokenLosses(losses_N, figures), self.weight * weights_N)
        objective = objective + divergence
        sums = {"train/distillation_loss": Sum(divergence.item()), "train/loss": Sum(objective.item())}
        return objective, {**metrics, **taught, **sums}

    def _laid_out(self, samples: Sequence[PolicySample], layout: Layout) -> list[list[PolicyBatch]]:
        shards = super()._laid_out(samples, layout)
        targets = Targets(samples)
        answers = joined_answers([sample.taught for sample in samples if sample.taught is not None])

        def taught(batch: PolicyBatch) -> PolicyBatch:
            arrays = {each.name: getattr(batch, each.name) for each in fields(PolicyBatch)}
            return TaughtPolicyBatch(**arrays, answers=chosen(answers, targets.of(batch)))

        return [[taught(batch) for batch in batches] for batches in shards]
