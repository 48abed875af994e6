"""Distillation losses: divergences between next-token distributions of a student and a teacher."""

from roll_like.algorithms.distillation.base import DistillationConfig, DistillationLoss, Outcomes
from roll_like.algorithms.distillation.divergences import (
    AdaptiveKL,
    ForwardKL,
    JensenShannon,
    ReverseKL,
    SkewedForwardKL,
    SkewedReverseKL,
)
from roll_like.algorithms.distillation.objective import distillation_losses, distillation_objective
from roll_like.algorithms.distillation.on_policy import (
    sampled_divergence,
    teacher_advantages,
    with_teacher_advantages,
)
from roll_like.algorithms.distillation.teacher import Teacher, TeacherHead, TeacherLogits, TeacherTopK, teacher_topk

__all__ = [
    "AdaptiveKL",
    "DistillationConfig",
    "DistillationLoss",
    "ForwardKL",
    "JensenShannon",
    "Outcomes",
    "ReverseKL",
    "SkewedForwardKL",
    "SkewedReverseKL",
    "Teacher",
    "TeacherHead",
    "TeacherLogits",
    "TeacherTopK",
    "distillation_losses",
    "distillation_objective",
    "sampled_divergence",
    "teacher_advantages",
    "teacher_topk",
    "with_teacher_advantages",
]
