"""The configuration of `pipeline: rlvr`: reinforcement learning with verifiable rewards."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from roll_like.config.demonstrations import DemonstrationsConfig, ExperienceReplayConfig
from roll_like.config.named import NAME_PATTERN
from roll_like.config.sampling import PromptConfig
from roll_like.registry import PIPELINES


@PIPELINES.register("rlvr")
class RLVRConfig(PromptConfig):
    """One RLVR run: everything a YAML file may say."""

    implementation: ClassVar[str] = "roll_like.builtin.pipelines.rlvr.pipeline:RLVRPipeline"
    takes_images: ClassVar[bool] = True

    pipeline: Literal["rlvr"] = Field(default="rlvr", description="This pipeline.")
    name: str = Field(default="rlvr", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    demonstrations: DemonstrationsConfig | None = Field(
        default=None,
        description="Answers that rows give, learned from beside the policy's own (docs/demonstrations.md); none by "
        "default.",
    )
    experience_replay: ExperienceReplayConfig | None = Field(
        default=None,
        description="Right answers of earlier steps that join groups again (docs/demonstrations.md); none by default.",
    )

    @property
    def given_answers(self) -> DemonstrationsConfig | None:
        return self.demonstrations

    @property
    def replayed_answers(self) -> ExperienceReplayConfig | None:
        return self.experience_replay
