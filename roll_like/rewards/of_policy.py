"""Rewards that the policy itself gives: what its forward pass says of a step's samples, before it learns from them.

Trainers compute them with the weights that the step begins with, so no engine and no further model is asked, and old
samples of asynchronous rollouts are scored by the policy that learns from them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from roll_like.data.chat import Renderer
from roll_like.errors import RewardError
from roll_like.rewards.base import Completion, Outcome, Reward
from roll_like.types import FloatArray, Scored, TrainingSample

__all__ = ["Answered", "PolicyForward", "PolicyReward", "Renderer"]


class PolicyForward(Protocol):
    """What the policy says of the targets (`loss_mask`) of samples, at temperature 1: arrays [T], 0 elsewhere."""

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Return the log-probability of each target, in nats."""

    def entropies(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Return the entropy of the distribution that each target was drawn from, in nats."""

    def certainties(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Return KL(uniform ‖ that distribution) over the vocabulary, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A sample of a step, in both forms.

    Attributes:
        scored: Its tokens.
        completion: Its text.
    """

    scored: Scored
    completion: Completion


class PolicyReward(Reward):
    """Base of rewards of the policy: `measure` in the place of `score`, for all samples of a step at a time."""

    def start(self) -> None:
        """Refuse to score in a reward worker, which has no policy.

        Raises:
            RewardError: Always.
        """
        raise RewardError(
            f"the reward {self.config.type!r} is computed by the policy that is trained, and there is none here",
            fix="try it in a run of pipeline: rlvr",
        )

    @abstractmethod
    def measure(self, samples: Sequence[Answered], policy: PolicyForward, renderer: Renderer) -> Sequence[Outcome]:
        """Return one outcome for each sample, in order.

        Args:
            samples: Those of a step that the reward scores; samples of a group follow each other.
            policy: The policy before the step's update.
            renderer: Its tokenizer.
        """
