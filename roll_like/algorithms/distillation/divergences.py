"""The divergences: q is the teacher's distribution over a token's outcomes, p the student's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from roll_like.algorithms.distillation.base import DistillationConfig, DistillationLoss, Outcomes
from roll_like.algorithms.lazy import no_grad, torch
from roll_like.config.base import Fraction
from roll_like.registry import DISTILLATION_LOSSES

if TYPE_CHECKING:
    from torch import Tensor

#: So many of the teacher's most likely tokens usually contain the whole head; sorting the vocabulary takes longer.
LIKELY = 256


def kl(first_NM: Tensor, second_NM: Tensor) -> Tensor:
    """Return KL(first‖second) of each row in nats, shape [N], from log-probabilities.

    Outcomes that the first excludes (−∞) add 0, whatever the second says; what only the second excludes makes it ∞.
    """
    excluded_NM = first_NM == -torch.inf
    # 0·∞ would be NaN, in the value or in the gradient
    ratio_NM = first_NM.masked_fill(excluded_NM, 0.0) - second_NM.masked_fill(excluded_NM, 0.0)
    return (first_NM.exp() * ratio_NM).sum(-1)


def mixture(first_NM: Tensor, second_NM: Tensor, share: float) -> Tensor:
    """Return log(share·exp(first) + (1 − share)·exp(second)), shape [N, M], for 0 ≤ share ≤ 1."""
    if share in {0.0, 1.0}:
        return second_NM if share == 0.0 else first_NM
    return torch.logaddexp(first_NM + math.log(share), second_NM + math.log1p(-share))


@DISTILLATION_LOSSES.register("forward_kl")
class ForwardKL(DistillationLoss):
    """`forward_kl`: KL(q‖p) = Σ q·(log q − log p) (Hinton, Vinyals, Dean 2015, arXiv:1503.02531).

    Its gradient for the student's logits is p − q: the student covers everything that the teacher considers likely.
    """

    class Config(DistillationConfig):
        type: Literal["forward_kl"] = "forward_kl"

    def divergence(self, outcomes: Outcomes) -> Tensor:
        return kl(outcomes.teacher_NM, outcomes.student_NM)


@DISTILLATION_LOSSES.register("reverse_kl")
class ReverseKL(DistillationLoss):
    """`reverse_kl`: KL(p‖q) = Σ p·(log p − log q) (MiniLLM, Gu et al. 2023, arXiv:2306.08543, per token).

    The student avoids what the teacher considers unlikely. It is infinite where the teacher excludes a token.
    """

    class Config(DistillationConfig):
        type: Literal["reverse_kl"] = "reverse_kl"

    def divergence(self, outcomes: Outcomes) -> Tensor:
        return kl(outcomes.student_NM, outcomes.teacher_NM)


@DISTILLATION_LOSSES.register("skewed_forward_kl")
class SkewedForwardKL(DistillationLoss):
    """`skewed_forward_kl`: KL(q‖λ·q + (1 − λ)·p) (DistiLLM, Ko et al. 2024, arXiv:2402.03898, equation 4).

    λ = 0 is `forward_kl`. The divergence is at most −log λ, so that no single token dominates a batch.
    """

    class Config(DistillationConfig):
        type: Literal["skewed_forward_kl"] = "skewed_forward_kl"
        skew: float = Field(default=0.1, ge=0, lt=1, description="λ, the teacher's share of the mixture; 0 is plain.")

    def divergence(self, outcomes: Outcomes) -> Tensor:
        teacher_NM = outcomes.teacher_NM
        return kl(teacher_NM, mixture(teacher_NM, outcomes.student_NM, self.config.skew))


@DISTILLATION_LOSSES.register("skewed_reverse_kl")
class SkewedReverseKL(DistillationLoss):
    """`skewed_reverse_kl`: KL(p‖λ·p + (1 − λ)·q) (DistiLLM, Ko et al. 2024, arXiv:2402.03898).

    λ = 0 is `reverse_kl`. The divergence is at most −log λ, also where the teacher excludes tokens.
    """

    class Config(DistillationConfig):
        type: Literal["skewed_reverse_kl"] = "skewed_reverse_kl"
        skew: float = Field(default=0.1, ge=0, lt=1, description="λ, the student's share of the mixture; 0 is plain.")

    def divergence(self, outcomes: Outcomes) -> Tensor:
        student_NM = outcomes.student_NM
        return kl(student_NM, mixture(student_NM, outcomes.teacher_NM, self.config.skew))


@DISTILLATION_LOSSES.register("js")
class JensenShannon(DistillationLoss):
    """`js`: generalised Jensen-Shannon divergence (GKD, Agarwal et al. 2023, arXiv:2306.13649, equation 1).

    JSD_β = β·KL(q‖m) + (1 − β)·KL(p‖m) with m = β·q + (1 − β)·p. JSD_β/β tends to the forward KL as β → 0, and
    JSD_β/(1 − β) to the reverse KL as β → 1.
    """

    class Config(DistillationConfig):
        type: Literal["js"] = "js"
        beta: float = Field(
            default=0.5,
            gt=0,
            lt=1,
            description="β, the teacher's share of the mixture; at the ends it vanishes: use forward_kl or reverse_kl.",
        )

    def divergence(self, outcomes: Outcomes) -> Tensor:
        beta: float = self.config.beta
        middle_NM = mixture(outcomes.teacher_NM, outcomes.student_NM, beta)
        return beta * kl(outcomes.teacher_NM, middle_NM) + (1 - beta) * kl(outcomes.student_NM, middle_NM)


@DISTILLATION_LOSSES.register("adaptive_kl")
class AdaptiveKL(DistillationLoss):
    """`adaptive_kl`: forward and reverse KL, weighted at each token (AKL, Wu et al. 2024, arXiv:2404.02657).

    a·KL(q‖p) + (1 − a)·KL(p‖q) with a = g_head/(g_head + g_tail), without gradient; g is Σ|q − p| over the head or over
    the tail. The head is the teacher's most likely tokens, as many as have a total mass of at most `head_mass`, and at
    least one. Forward KL first fits the head, reverse KL the tail.
    """

    class Config(DistillationConfig):
        type: Literal["adaptive_kl"] = "adaptive_kl"
        head_mass: Fraction = Field(
            default=0.5, description="The head is the teacher's most likely tokens of together at most this mass."
        )

    def divergence(self, outcomes: Outcomes) -> Tensor:
        forward_N = kl(outcomes.teacher_NM, outcomes.student_NM)
        reverse_N = kl(outcomes.student_NM, outcomes.teacher_NM)
        share_N = self.head_share(outcomes)
        return share_N * forward_N + (1 - share_N) * reverse_N

    @no_grad
    def head_share(self, outcomes: Outcomes) -> Tensor:
        """Return the head's share of Σ|q − p|, shape [N]; ½ where the two are equal.

        The outcome "any other token" belongs to the tail.
        """
        teacher_NM = outcomes.teacher_NM.exp()
        gap_NM = (teacher_NM - outcomes.student_NM.exp()).abs()
        tokens_NT = teacher_NM[:, :-1] if outcomes.rest else teacher_NM
        likely_NK, order_NK = tokens_NT.topk(min(LIKELY, tokens_NT.shape[-1]))
        if bool((likely_NK.sum(-1) <= self.config.head_mass).any()):  # the head may go on
            likely_NK, order_NK = tokens_NT.sort(-1, descending=True)
        head_NK = likely_NK.cumsum(-1) <= self.config.head_mass
        head_NK[:, :1] = True
        head_N = (gap_NM.gather(-1, order_NK) * head_NK).sum(-1)
        total_N = gap_NM.sum(-1)
        half = torch.full_like(total_N, 0.5)
        return torch.where(total_N > 0, head_N / total_N.clamp(min=torch.finfo(total_N.dtype).tiny), half)
