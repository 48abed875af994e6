"""Distillation in TRL 1.16, liger-kernel 0.8.5, verl 0.9.1 and PyTorch: mean over tokens, and gradients of the head.

TRL: `GKDTrainer.generalized_jsd_loss` and `DistillationTrainer`'s chunked loss, the top-k loss of
`ServerDistillationTrainer` (called without a trainer: it reads one setting) and the functions of SDPO. liger-kernel:
`LigerFusedLinearJSDLoss`, not compiled. verl: what its FSDP engine computes from logits.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from oracle_imports import references
from torch import Tensor
from torch.nn.functional import kl_div

with references():
    from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDLoss
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.experimental.sdpo import loss_utils as sdpo
    from trl.experimental.server_distillation.server_distillation_trainer import ServerDistillationTrainer
    from trl.trainer.distillation_trainer import _chunked_divergence_loss
    from verl.trainer.distillation.fsdp import losses as verl_fsdp

#: What marks tokens that do not count.
IGNORED = -100


def mean_and_gradients(case: Any, losses_N: Tensor) -> tuple[Tensor, ...]:
    """Mean over the case's tokens, and its gradients for hidden states, projection and bias."""
    mean = losses_N[case.mask_N].mean()
    return mean, *torch.autograd.grad(mean, case.pair.learned)


def torch_kl(case: Any, order: str, skew: float = 0.0) -> tuple[Tensor, ...]:
    """`kl_div` of whole logits: of the teacher (`forward`) or the student, from a mixture that holds some of itself."""
    student, teacher = (
        (logits_NV / case.temperature).log_softmax(-1) for logits_NV in (case.pair.logits_NV, case.teacher_NV)
    )
    of, other = (teacher, student) if order == "forward" else (student, teacher)
    mixture = (skew * of.exp() + (1 - skew) * other.exp()).log()
    return mean_and_gradients(case, kl_div(mixture, of, reduction="none", log_target=True).sum(-1))


def trl_gkd(case: Any, beta: float) -> tuple[Tensor, ...]:
    labels_1N = torch.where(case.mask_N, case.pair.targets_N, IGNORED)[None]
    loss = GKDTrainer.generalized_jsd_loss(
        case.pair.logits_NV[None], case.teacher_NV[None], labels_1N, beta=beta, temperature=case.temperature
    )
    return loss, *torch.autograd.grad(loss, case.pair.learned)


def trl_chunked(case: Any, beta: float) -> tuple[Tensor, ...]:
    """From hidden states; in float32."""
    pair = case.pair
    loss, _, _ = _chunked_divergence_loss(
        pair.hidden_ND[None],
        pair.teacher_hidden_NE[None],
        pair.weight_VD,
        pair.teacher_weight_VE,
        case.mask_N[None],
        beta,
        student_lm_head_bias=pair.bias,
        teacher_lm_head_bias=pair.teacher_bias,
        temperature=case.temperature,
    )
    return loss, *torch.autograd.grad(loss, pair.learned)


def trl_server_top_k(case: Any, *, tail: bool) -> tuple[Tensor, ...]:
    """Forward KL from what a teacher's server sends."""
    trainer = SimpleNamespace(
        loss_add_tail=tail, _reduce_divergence_loss=ServerDistillationTrainer._reduce_divergence_loss
    )
    teacher = case.teacher_top_k
    loss = ServerDistillationTrainer._compute_server_forward_kl_loss(
        trainer,
        {"topk_logprobs": teacher.logprobs_NK[None], "topk_token_ids": teacher.ids_NK[None]},
        (case.pair.logits_NV / case.temperature).log_softmax(-1)[None],
        torch.where(case.mask_N, 0, IGNORED)[None],
    )
    return loss, *torch.autograd.grad(loss, case.pair.learned)


def trl_sdpo_top_k(case: Any, alpha: float, *, tail: bool) -> tuple[Tensor, ...]:
    """Over the student's top-k, unlike everybody else's."""
    losses_N = sdpo.compute_topk_self_distillation_loss(
        case.pair.logits_NV / case.temperature,
        case.teacher_NV / case.temperature,
        distillation_topk=case.k,
        distillation_alpha=alpha,
        distillation_add_tail=tail,
    )
    return mean_and_gradients(case, losses_N)


def trl_sdpo_sampled(case: Any) -> tuple[Tensor, ...]:
    losses_N = sdpo.compute_sampled_token_self_distillation_loss(
        case.pair.logits_NV, case.teacher_NV, case.pair.targets_N, distillation_alpha=1.0
    )
    return mean_and_gradients(case, losses_N)


def liger_jsd(case: Any, beta: float, hard: float = 0.0) -> tuple[Tensor, ...]:
    """`hard` is the weight of the cross-entropy, one minus it that of the divergence."""
    pair = case.pair
    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=hard,
        weight_soft_loss=1 - hard,
        beta=beta,
        temperature=case.temperature,
        compiled=False,
        chunk_size=2,
    )(
        pair.hidden_ND,
        pair.weight_VD,
        pair.teacher_hidden_NE,
        pair.teacher_weight_VE,
        torch.where(case.mask_N, pair.targets_N, IGNORED),
        pair.bias,
        pair.teacher_bias,
    )
    return loss, *torch.autograd.grad(loss, pair.learned)


def verl_top_k(case: Any, *, chunked: bool) -> tuple[Tensor, ...]:
    """Forward KL over the top-k alone, neither renormalised nor completed; in float32."""
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None, use_chunked_topk=chunked))
    teacher = case.teacher_top_k
    nested = (torch.nested.nested_tensor([rows], layout=torch.jagged) for rows in (teacher.logprobs_NK, teacher.ids_NK))
    found = verl_fsdp.compute_forward_kl_topk(
        (case.pair.logits_NV / case.temperature)[None], *nested, config, data_format="thd"
    )
    return mean_and_gradients(case, found["distillation_losses"][0])
