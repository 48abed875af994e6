"""Distillation losses against other libraries, from hidden states and from top-k: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import distillation_reference as reference
import numpy as np
import pytest
import torch
import verl_reference as verl
from algorithm_samples import make_policy_sample, same_cases
from conformance import Row
from distillation_cases import DistillationCase, distillation_cases, ours
from hypothesis import given
from hypothesis import strategies as st

from roll_like.algorithms.distillation.on_policy import teacher_advantages
from roll_like.algorithms.kl import divergence

any_case = distillation_cases()
whole_top_k = distillation_cases(all_k=True)
at_temperature_1 = distillation_cases(temperatures=(1.0,))
advantage_cases = st.tuples(*[st.lists(st.floats(-12, 0, width=32), min_size=4, max_size=4)] * 2)


def row(
    name: str,
    label: str,
    theirs: Callable[[DistillationCase], Any],
    teacher: str = "head",
    cases: Any = any_case,
    **settings: Any,
) -> Row:
    return Row(
        "distillation", name, label, partial(ours, name=name, teacher=teacher, **settings), theirs, cases, gradient=True
    )


def sampled(case: DistillationCase) -> tuple[torch.Tensor, ...]:
    """Ours, from log-probabilities of the tokens; the value is another, as is the surrogate."""
    pair = case.pair
    student_N, teacher_N = (
        logits_NV.log_softmax(-1).gather(1, pair.targets_N[:, None]).squeeze(1)
        for logits_NV in (pair.logits_NV, case.teacher_NV)
    )
    losses_N = divergence(student_N, teacher_N, "k1", straight_through=True)
    return without_value(reference.mean_and_gradients(case, losses_N))


def without_value(found: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return torch.zeros(()), *found[1:]


def our_advantages(case: tuple[list[float], list[float]], estimator: str) -> np.ndarray:
    student, teacher = case
    sample = make_policy_sample([1] * len(student), student)
    return teacher_advantages([sample], [np.array(teacher, np.float32)], estimator=estimator)[0]


def verl_advantages(case: tuple[list[float], list[float]], estimator: str) -> torch.Tensor:
    """verl's negative divergence of each token, which its policy gradient takes for the advantage."""
    student, teacher = (torch.tensor(row, dtype=torch.float64) for row in case)
    return -verl.core_algos.kl_penalty(student, teacher, estimator)


ROWS = [
    row("forward_kl", "torch kl_div", partial(reference.torch_kl, order="forward"), "head"),
    row("forward_kl", "TRL GKDTrainer, β = 0", partial(reference.trl_gkd, beta=0)),
    row("forward_kl", "TRL DistillationTrainer, β = 0", partial(reference.trl_chunked, beta=0.0)),
    row("forward_kl", "liger-kernel jsd, β = 0", partial(reference.liger_jsd, beta=0.0)),
    row(
        "forward_kl",
        "liger-kernel jsd, β = 0, with cross-entropy",
        partial(reference.liger_jsd, beta=0.0, hard=0.3),
        ce_weight=0.3,
    ),
    row("forward_kl", "TRL ServerDistillationTrainer, top-k", partial(reference.trl_server_top_k, tail=True), "top_k"),
    row(
        "forward_kl",
        "TRL ServerDistillationTrainer, top-k renormalised",
        partial(reference.trl_server_top_k, tail=False),
        "top_k",
        tail="renormalise",
    ),
    row(
        "forward_kl", "verl forward_kl_topk, K = V", partial(reference.verl_top_k, chunked=False), "top_k", whole_top_k
    ),
    row("reverse_kl", "torch kl_div", partial(reference.torch_kl, order="reverse"), "head"),
    row("reverse_kl", "TRL GKDTrainer, β = 1", partial(reference.trl_gkd, beta=1)),
    row("reverse_kl", "TRL DistillationTrainer, β = 1", partial(reference.trl_chunked, beta=1.0)),
    row("reverse_kl", "liger-kernel jsd, β = 1", partial(reference.liger_jsd, beta=1.0)),
    row(
        "reverse_kl",
        "TRL SDPO, top-k of the student",
        partial(reference.trl_sdpo_top_k, alpha=1.0, tail=True),
        "student_top_k",
    ),
    row(
        "reverse_kl",
        "TRL SDPO, top-k renormalised",
        partial(reference.trl_sdpo_top_k, alpha=1.0, tail=False),
        "student_top_k",
        tail="renormalise",
    ),
    row("js", "TRL GKDTrainer", partial(reference.trl_gkd, beta=0.3), beta=0.3),
    row("js", "TRL DistillationTrainer", partial(reference.trl_chunked, beta=0.3), beta=0.3),
    row("js", "liger-kernel jsd", partial(reference.liger_jsd, beta=0.3), beta=0.3),
    row(
        "js",
        "liger-kernel jsd with cross-entropy",
        partial(reference.liger_jsd, beta=0.7, hard=0.5),
        beta=0.7,
        ce_weight=0.5,
    ),
    row(
        "js",
        "TRL SDPO, top-k of the student",
        partial(reference.trl_sdpo_top_k, alpha=0.3, tail=True),
        "student_top_k",
        beta=0.3,
    ),
    row(
        "skewed_forward_kl",
        "torch kl_div from a mixture",
        partial(reference.torch_kl, order="forward", skew=0.1),
        skew=0.1,
    ),
    row(
        "skewed_reverse_kl",
        "torch kl_div from a mixture",
        partial(reference.torch_kl, order="reverse", skew=0.1),
        skew=0.1,
    ),
    Row(
        "distillation",
        "on_policy",
        "TRL SDPO, sampled tokens",
        sampled,
        lambda case: without_value(reference.trl_sdpo_sampled(case)),
        at_temperature_1,
        gradient=True,
    ),
    *(
        Row(
            "distillation",
            "on_policy",
            f"verl {estimator} as an advantage",
            partial(our_advantages, estimator=estimator),
            partial(verl_advantages, estimator=estimator),
            advantage_cases,
        )
        for estimator in ("k1", "k3")
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
@given(data=st.data())
@same_cases
def test_values_and_gradients(row: Row, data: st.DataObject) -> None:
    row.check(data.draw(row.cases))
