"""What runs have in common that learn from data as it is: how long they last, and how much a step takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction as Ratio
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field

from roll_like.config.base import Epochs, Steps, Violation
from roll_like.config.data import RowLimits
from roll_like.config.evaluation import RowsEvaluationConfig
from roll_like.config.resources import TrainerResources
from roll_like.config.run import ALWAYS_SHARED, RunConfig, shared_prompt_violations


def steps_of(epochs: float, items: int, per_step: int) -> int:
    """Return in how many steps all items are read so often, the last step with fewer.

    >>> steps_of(1.1, 100, 10)  # where 1.1 * 100 / 10 is 11.000000000000002
    11
    """
    return math.ceil(Ratio(str(epochs)) * items / per_step)


class OfflineRunConfig(RunConfig):
    """A run that learns from given data, a step at a time."""

    steps: Steps | None = Field(default=None, description="Steps to train; or set `epochs`.")
    epochs: Epochs | None = Field(
        default=None, description="Passes over the data, as many steps as that takes; or set `steps`."
    )
    data: RowLimits = Field(description="What the model learns from, and how much of it in a step.")
    resources: TrainerResources

    if TYPE_CHECKING:  # declared by each pipeline, with sources of its own kind
        evaluation: RowsEvaluationConfig[Any] | None

    @property
    def longest_sample(self) -> int:
        """Longest sample with its prompt, in tokens."""
        return self.data.max_tokens

    @property
    def longest_sample_terms(self) -> str:
        """The same by its key."""
        return f"data.max_tokens = {self.longest_sample}"

    @property
    def evaluated_rows(self) -> RowLimits | None:
        """What the evaluation reads: its sources, with the limits of `data`; None without an evaluation."""
        return None if self.evaluation is None else self.data.reading(self.evaluation.sources)

    @property
    def items_per_step(self) -> tuple[int, str]:
        """How much of the data one step takes, and what it is counted in: pairs, or samples."""
        what = "pairs" if hasattr(self.data, "pairs_per_step") else "samples"
        return getattr(self.data, f"{what}_per_step"), what

    @property
    def shuffles(self) -> bool:
        """Whether each pass over a source has an order of its own: `data.shuffle`."""
        return bool(getattr(self.data, "shuffle", True))

    @property
    def row_sharing(self) -> str | None:
        """What puts several samples into one row: pairs always do, other samples by `data.packing`."""
        packing = getattr(self.data, "packing", None)
        return ALWAYS_SHARED if packing is None else "data.packing" if packing else None

    @property
    def total_steps(self) -> int:
        """Steps of the whole run; known for `epochs` once the data was read."""
        if self.steps is None:
            raise ValueError("the steps of `epochs` follow from the data; use `lasting`")
        return self.steps

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if (self.steps is None) == (self.epochs is None):
            found = "neither is set"
            if self.steps is not None:
                found = (
                    f"both are set; keep steps: {self.steps} with epochs: null, or epochs: {self.epochs:g} with steps: "
                    "null"
                )
            yield Violation(("steps",), f"set exactly one of `steps` and `epochs`: {found}")
        count, what = self.items_per_step
        yield from self.training.ranks_have_work(count, "step", what, f"raise data.{what}_per_step")
        yield from shared_prompt_violations(self.pipeline, self.training)

    def steps_for(self, items: int) -> int:
        """Return the steps of a run whose data has so many samples or pairs."""
        if self.steps is not None:
            return self.steps
        return steps_of(self.epochs or 0, items, self.items_per_step[0])

    def lasting(self, items: int) -> Self:
        """Return the configuration with the steps that its `epochs` are, where it has those."""
        if self.epochs is None:
            return self
        return self.model_copy(update={"steps": self.steps_for(items), "epochs": None})
