"""How sure the policy is of what it samples: a reward without a verifier and without labels.

- type: confidence
  measure: self_certainty
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from roll_like import Outcome, RewardConfig, RewardResult, register_reward
from roll_like.rewards.of_policy import Answered, PolicyForward, PolicyReward, Renderer
from roll_like.types import TrainingSample


class ConfidenceConfig(RewardConfig):
    """Settings of the `confidence` reward."""

    by_policy: ClassVar[bool] = True

    type: Literal["confidence"] = "confidence"
    measure: Literal["self_certainty", "negative_entropy"] = Field(
        default="self_certainty",
        description="Mean over the sampled tokens, in nats. self_certainty: KL(U ‖ π) of the uniform distribution over "
        "the vocabulary (Intuitor, arXiv:2505.19590). negative_entropy: −H(π) (RENT, arXiv:2505.22660).",
    )


@register_reward("confidence")
class Confidence(PolicyReward):
    """Mean self-certainty, or negative entropy, of the distributions that a response was sampled from."""

    Config: ClassVar[type[RewardConfig]] = ConfidenceConfig

    config: ConfidenceConfig

    def measure(self, samples: Sequence[Answered], policy: PolicyForward, renderer: Renderer) -> Sequence[Outcome]:
        """Return the mean of each sample."""
        del renderer
        asked = [_all_sampled(sample) for sample in samples]
        certain = self.config.measure == "self_certainty"
        found = policy.certainties(asked) if certain else policy.entropies(asked)
        sign = 1.0 if certain else -1.0
        return [
            RewardResult(sign * float(of_tokens_T[sample.loss_mask].mean(dtype=np.float64)))
            for sample, of_tokens_T in zip(asked, found, strict=True)
        ]


def _all_sampled(sample: Answered) -> TrainingSample:
    trajectory = sample.scored.trajectory
    return TrainingSample(
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.sampled,
        group_id=trajectory.task.task_id,
        prompt_length=len(trajectory.task.prompt_ids),
        images=trajectory.task.images,
        routes=trajectory.routes,
    )
