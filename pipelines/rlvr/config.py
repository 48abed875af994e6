"""The configuration of `pipeline: rlvr`: reinforcement learning with verifiable rewards."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

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
