"""Advantages of a step, with the KL penalty in the reward where the configuration says so."""

from __future__ import annotations

from collections.abc import Sequence

from roll_like.algorithms.advantages import AdvantageEstimator, policy_samples
from roll_like.algorithms.kl import token_penalties
from roll_like.config.rlvr import KLConfig
from roll_like.training.engine import TrainingEngine
from roll_like.types import Group, PolicySample, Scored


class Advantages:
    """Turns scored groups into samples to train on.

    Args:
        estimator: The registered estimator.
        kl: Where a KL penalty goes; `use: reward` subtracts it here, token by token.
        reference: The model that the penalty compares with.
    """

    def __init__(self, estimator: AdvantageEstimator, kl: KLConfig, reference: TrainingEngine | None) -> None:
        self._estimator = estimator
        self._kl = kl
        self._reference = reference

    def assign(self, groups: Sequence[Group[Scored]]) -> list[PolicySample]:
        """Return the groups' samples in order, each with its advantages."""
        if self._kl.use != "reward" or self._reference is None:
            return self._estimator.assign(groups)
        unpenalised = policy_samples(groups)
        penalties = token_penalties(
            unpenalised,
            self._reference.logprobs(unpenalised),
            estimator=self._kl.estimator,
            coefficient=self._kl.coefficient,
        )
        return self._estimator.assign(groups, penalties)
