"""Everything of ours that the page has to speak of."""

from __future__ import annotations

from typing import get_args

from roll_like.algorithms.aggregation import Aggregation
from roll_like.algorithms.kl import KLEstimator
from roll_like.config.algorithm import CorrectionConfig, RejectConfig
from roll_like.registry import ADVANTAGES, DISTILLATION_LOSSES, LOSSES, PREFERENCE_LOSSES, Registry


def computed() -> list[tuple[str, str]]:
    """Return (kind, name) of every built-in that computes a number."""
    return [
        *(("advantage", name) for name in _built_in(ADVANTAGES)),
        *(("loss", name) for name in _built_in(LOSSES)),
        *(("demonstrations", name) for name in ("off_policy", "sft", "sft schedule")),
        *(("preference", name) for name in _built_in(PREFERENCE_LOSSES)),
        ("reward model", "bradley_terry"),
        *(("distillation", name) for name in [*_built_in(DISTILLATION_LOSSES), "on_policy"]),
        *(("aggregation", name) for name in get_args(Aggregation)),
        *(("kl", name) for name in [*get_args(KLEstimator), "adaptive"]),
        *(("correction", name) for name in _corrections()),
    ]


def _corrections() -> list[str]:
    weights, rejection = CorrectionConfig.model_fields, RejectConfig.model_fields
    kinds = [kind for kind in get_args(weights["type"].annotation) if kind != "none"]
    return [
        *(f"{kind} {level}" for kind in kinds for level in get_args(weights["level"].annotation)),
        *(
            f"reject {level} {estimator}"
            for level in get_args(rejection["level"].annotation)
            for estimator in get_args(rejection["estimator"].annotation)
        ),
    ]


def _built_in(registry: Registry) -> list[str]:
    # other test modules register plugins of their own
    return [name for name in registry.names() if registry.origin(name).startswith("roll_like.")]
