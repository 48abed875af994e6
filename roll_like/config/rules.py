"""Rules between sections: each message says why a combination is wrong and what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll_like.config.rlvr import RLVRConfig


def check_rlvr(config: RLVRConfig) -> None:
    """Raise ValueError for the first combination of settings that cannot work together."""
    if config.algorithm.kl.use != "none" and config.reference is None:
        raise ValueError(
            f"algorithm.kl.use: {config.algorithm.kl.use} compares with a reference model, but there is no "
            "`reference` section; add `reference: {}` or set algorithm.kl.use: none"
        )
