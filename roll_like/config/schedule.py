"""When groups are sampled: in turns with training, while it goes on, or not at all, where a run replays another's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from roll_like.config.base import ConfigModel
from roll_like.config.sections import PositiveFloat, PositiveInt


class SyncSchedule(ConfigModel):
    """Sample a step's groups, then train on them."""

    type: Literal["sync"] = Field(default="sync", description="Generation and training take turns; the default.")


class AsyncSchedule(ConfigModel):
    """Sample while the policy is trained. No group is discarded for its age, and none is older than `max_staleness`."""

    type: Literal["async"] = Field(description="Generation goes on while the policy is trained.")
    max_staleness: PositiveInt = Field(
        default=1,
        description="Largest number of policy versions between the oldest token of a sample and the weights that are "
        "trained on it. 2 to 4 if some groups take much longer than others.",
    )
    ahead: PositiveFloat = Field(
        default=1.0,
        description="Groups in flight or waiting beyond those of the step, as a multiple of them; about the mean "
        "staleness of samples. At most `max_staleness`.",
    )
    stall_seconds: PositiveFloat = Field(
        default=1800.0, description="End the run when a step waits this long and no group ends. Seconds."
    )

    @field_validator("max_staleness", mode="before")
    @classmethod
    def _samples_may_be_older(cls, value: Any) -> Any:
        if value == 0:
            raise ValueError(
                "found 0: no group may be older than the weights that it trains, so none can be sampled while the "
                "policy is trained; set type: sync, or max_staleness to 1 or more"
            )
        return value

    @model_validator(mode="after")
    def _bound_can_be_kept(self) -> Self:
        if self.ahead > self.max_staleness:
            raise ValueError(
                f"ahead: {self.ahead:g} keeps more groups waiting than can be trained while they are at most "
                f"max_staleness: {self.max_staleness} versions old; lower ahead to {self.max_staleness}, or raise "
                "max_staleness"
            )
        return self


class ReplaySchedule(ConfigModel):
    """Train on the groups that an earlier run recorded in the same step; nothing is sampled or scored."""

    type: Literal["replay"] = Field(default="replay", description="Recorded rollouts are trained on again.")
    path: Path = Field(description="Folder of a run with `rollout.save_tokens: true`, such as `runs/EARLIER`.")


def _type_of(value: Any) -> Any:
    """Return the type that a value names; the default where it names none."""
    return value.get("type", "sync") if isinstance(value, Mapping) else getattr(value, "type", None)


RolloutSchedule: TypeAlias = Annotated[
    Annotated[SyncSchedule, Tag("sync")]
    | Annotated[AsyncSchedule, Tag("async")]
    | Annotated[ReplaySchedule, Tag("replay")],
    Discriminator(
        _type_of,
        custom_error_type="schedule",
        custom_error_message="a schedule is a mapping with a type: sync, async or replay, as "
        "{type: async, max_staleness: 2}",
    ),
]
