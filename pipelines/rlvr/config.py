"""The configuration of `pipeline: rlvr`: reinforcement learning with verifiable rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll_like.config.prompts import PromptConfig
from roll_like.config.run import NAME_PATTERN


class RLVRConfig(PromptConfig):
    """One RLVR run: everything a YAML file may say."""

    pipeline: Literal["rlvr"] = Field(default="rlvr", description="This pipeline.")
    name: str = Field(default="rlvr", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
