"""The section `guards`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll_like.config.base import ConfigModel
from roll_like.config.sections import PositiveFloat, PositiveInt

GuardName = Literal["mismatch", "grad_norm", "reward", "entropy", "truncation", "zero_variance"]


class GuardsConfig(ConfigModel):
    """Metrics that are watched for signs that training breaks down. Each guard warns; those in `stop` end the run."""

    stop: tuple[GuardName, ...] = Field(
        default=(),
        description="Guards that end the run: `mismatch` (engine and trainer disagree), `grad_norm` (one update 10 "
        "times the usual), `reward` (less than half of its best), `entropy` (a tenth of that at the start), "
        "`truncation` (nearly all answers cut), `zero_variance` (nothing to learn from). The others warn only.",
    )
    patience: PositiveInt = Field(
        default=20,
        description="Steps in a row that reward, entropy, truncation or zero variance must be bad. Steps.",
    )
    mismatch_limit: PositiveFloat = Field(
        default=1.0,
        description="`mismatch` finds a `mismatch/kl` above this, for three steps in a row. Nats per token.",
    )
    mismatch_growth: Annotated[float, Field(gt=1)] = Field(
        default=5.0,
        description="`mismatch` also finds a `mismatch/kl` above this many times the median of the first 20 steps. A "
        "median below 0.0001 nats counts as 0.0001.",
    )
