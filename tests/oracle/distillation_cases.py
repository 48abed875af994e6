"""Random students and teachers, some of whose tokens do not count, and our side of the comparison."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from distillation_samples import Pair, distillation_loss, make_pair
from hypothesis import strategies as st
from torch import Tensor

from roll_like.algorithms.distillation.objective import distillation_losses, distillation_objective
from roll_like.algorithms.distillation.teacher import TeacherTopK

VOCABULARY = 11


@dataclass(frozen=True)
class DistillationCase:
    """A pair of models, the tokens that count, at least one, and settings.

    Attributes:
        k: Size of a top-k, below the vocabulary.
        all_k: Whether the top-k is the whole vocabulary instead.
    """

    pair: Pair
    mask_N: Tensor
    temperature: float
    k: int
    all_k: bool = False

    @cached_property
    def teacher_NV(self) -> Tensor:
        return self.pair.teacher_logits_NV

    @property
    def teacher_top_k(self) -> TeacherTopK:
        return self.pair.top_k(VOCABULARY if self.all_k else self.k, self.temperature)

    @property
    def student_top_k(self) -> TeacherTopK:
        """What the teacher says of the student's top-k."""
        ids_NK = self.pair.logits_NV.detach().topk(self.k).indices
        logprobs_NV = (self.teacher_NV / self.temperature).log_softmax(-1)
        return TeacherTopK(ids_NK=ids_NK, logprobs_NK=logprobs_NV.gather(1, ids_NK), temperature=self.temperature)


def ours(case: DistillationCase, name: str, teacher: str = "head", **settings: Any) -> tuple[Tensor, ...]:
    """Our objective with weights of a mean, and its gradients for hidden states, projection and bias."""
    pair = case.pair
    teachers = {
        "head": lambda: pair.head,
        "top_k": lambda: case.teacher_top_k,
        "student_top_k": lambda: case.student_top_k,
    }
    options = {"temperature": case.temperature, "scale_by_temperature": False, **settings}
    weights_N = case.mask_N.double() / case.mask_N.sum()
    losses = distillation_losses(
        pair.hidden_ND,
        pair.weight_VD,
        teachers[teacher](),
        distillation_loss(name, **options),
        chunk_tokens=3,
        chunk_vocab=4,
        bias=pair.bias,
        targets_N=pair.targets_N,
        weights_N=weights_N,
    )
    objective, _ = distillation_objective(losses, weights_N)
    return objective, *torch.autograd.grad(objective, pair.learned)


@st.composite
def distillation_cases(
    draw: st.DrawFn, *, temperatures: tuple[float, ...] = (1.0, 0.7, 2.0), all_k: bool = False
) -> DistillationCase:
    """One to six tokens."""
    tokens = draw(st.integers(1, 6))
    mask = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    mask[draw(st.integers(0, tokens - 1))] = True
    return DistillationCase(
        pair=make_pair(tokens, VOCABULARY, seed=draw(st.integers(0, 10**6))),
        mask_N=torch.tensor(mask),
        temperature=draw(st.sampled_from(temperatures)),
        k=draw(st.integers(1, VOCABULARY - 1)),
        all_k=all_k,
    )
