"""Students and teachers of a few tokens, for tests of distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roll_like.algorithms.distillation.base import DistillationLoss, Outcomes
from roll_like.algorithms.distillation.teacher import TeacherHead, TeacherTopK
from roll_like.registry import DISTILLATION_LOSSES


def distillation_loss(name: str, **settings: Any) -> DistillationLoss:
    plugin = DISTILLATION_LOSSES.get(name)
    made: DistillationLoss = plugin(plugin.Config(**settings))
    return made


@dataclass(frozen=True)
class Pair:
    """Student and teacher of different widths, one vocabulary, and what is needed around them."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias: Tensor
    teacher_hidden_NE: Tensor
    teacher_weight_VE: Tensor
    teacher_bias: Tensor
    targets_N: Tensor
    upstream_N: Tensor

    @property
    def learned(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden_ND, self.weight_VD, self.bias

    @property
    def logits_NV(self) -> Tensor:
        return self.hidden_ND @ self.weight_VD.t() + self.bias

    @property
    def teacher_logits_NV(self) -> Tensor:
        return self.teacher_hidden_NE @ self.teacher_weight_VE.t() + self.teacher_bias

    @property
    def head(self) -> TeacherHead:
        return TeacherHead(hidden_NE=self.teacher_hidden_NE, weight_VE=self.teacher_weight_VE, bias=self.teacher_bias)

    def top_k(self, k: int, temperature: float = 1.0) -> TeacherTopK:
        """The teacher's top-k, from all of its logits."""
        logprobs_NK, ids_NK = (self.teacher_logits_NV / temperature).log_softmax(-1).topk(k)
        return TeacherTopK(ids_NK=ids_NK, logprobs_NK=logprobs_NK, temperature=temperature)


def teacher_of(logits_NV: Tensor) -> TeacherHead:
    """A teacher of these logits, finite ones or NaN."""
    return TeacherHead(hidden_NE=logits_NV, weight_VE=torch.eye(logits_NV.shape[1], dtype=logits_NV.dtype))


def make_pair(tokens: int, vocabulary: int = 11, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Pair:
    """Random ones: widths 4 and 3, logits of a few nats."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Pair(
        hidden_ND=draw(tokens, 4).requires_grad_(),
        weight_VD=draw(vocabulary, 4).requires_grad_(),
        bias=draw(vocabulary).requires_grad_(),
        teacher_hidden_NE=draw(tokens, 3),
        teacher_weight_VE=draw(vocabulary, 3),
        teacher_bias=draw(vocabulary),
        targets_N=torch.randint(0, vocabulary, (tokens,), generator=generator),
        upstream_N=draw(tokens),
    )


def plain_losses(
    loss: DistillationLoss, student_NV: Tensor, teacher_NV: Tensor, targets_N: Tensor | None = None
) -> Tensor:
    """The plain way, from all logits at once: (1 − c)·T²·D + c·CE of each token."""
    temperature = loss.config.temperature
    outcomes = Outcomes((student_NV / temperature).log_softmax(-1), (teacher_NV / temperature).log_softmax(-1))
    losses_N = loss.divergence_factor * loss.divergence(outcomes)
    if targets_N is None:
        return losses_N
    return losses_N + loss.config.ce_weight * torch.nn.functional.cross_entropy(student_NV, targets_N, reduction="none")
