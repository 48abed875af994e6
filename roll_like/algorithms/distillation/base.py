"""What distillation losses have in common: from two distributions at each token to a divergence.

Outcomes are the whole vocabulary, or the teacher's most likely tokens and one more outcome for every other token. A
user's own loss comes in through the registry:

    @DISTILLATION_LOSSES.register("squared")
    class Squared(DistillationLoss):
        class Config(DistillationConfig):
            type: Literal["squared"] = "squared"

        def divergence(self, outcomes: Outcomes) -> Tensor:
            return (outcomes.student_NM.exp() - outcomes.teacher_NM.exp()).square().sum(-1)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from roll_like.algorithms.base import Algorithm
from roll_like.config.base import Fraction, PluginConfig, PositiveFloat

if TYPE_CHECKING:
    from torch import Tensor


class DistillationConfig(PluginConfig):
    """What every distillation loss has: temperature, how top-k logits are completed, and the share of cross-entropy."""

    temperature: PositiveFloat = Field(
        default=1.0, description="Logits of teacher and student are divided by this before they are compared."
    )
    scale_by_temperature: bool = Field(
        default=True,
        description="Multiply the divergence by the square of the temperature, so that its gradient keeps its size.",
    )
    ce_weight: Fraction = Field(
        default=0.0, description="Share of the cross-entropy with the data's own tokens; the divergence has the rest."
    )
    tail: Literal["rest", "renormalise"] = Field(
        default="rest",
        description="What the tokens beyond the teacher's top-k are: one more outcome that holds their mass, or left "
        "out, with both distributions renormalised over the top-k.",
    )
    unmatched_weight: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="With `other_tokenizer`: weight of ULD's rank term, added to the divergence. Tokens that only one "
        "vocabulary has are compared by the rank of their probabilities; 0: they are not.",
    )


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The two distributions of each token over the same M outcomes, as log-probabilities, float32 or float64.

    Attributes:
        student_NM: With gradient; finite.
        teacher_NM: Without gradient; −∞ where the teacher excludes an outcome.
        rest: Whether the last outcome is "any other token", not a token of its own.
    """

    student_NM: Tensor
    teacher_NM: Tensor
    rest: bool = False


class DistillationLoss(Algorithm, ABC):
    """Base of distillation losses."""

    Config: ClassVar[type[DistillationConfig]] = DistillationConfig

    @abstractmethod
    def divergence(self, outcomes: Outcomes) -> Tensor:
        """Return how far student and teacher are apart at each token, in nats, shape [N].

        Rows are independent: a token's divergence reads its own row only. Called on parts of a batch, in any order.
        """

    @property
    def divergence_factor(self) -> float:
        """What multiplies the divergence: (1 − `ce_weight`)·T², or without T² (`scale_by_temperature`).

        Gradients of softened distributions shrink with 1/T² (Hinton, Vinyals, Dean 2015, arXiv:1503.02531, section 2).
        """
        square = self.config.temperature**2 if self.config.scale_by_temperature else 1.0
        return float((1 - self.config.ce_weight) * square)
