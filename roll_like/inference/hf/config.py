"""The transformers engine's settings."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from roll_like.config.base import PositiveInt
from roll_like.config.inference import OBJECT_STORE, SHARED_MEMORY, EngineCapabilities, EngineConfig


class HFConfig(EngineConfig):
    """Transformers generates: deterministic, slow, for comparison and small cases."""

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities(
        weight_transports=(SHARED_MEMORY, OBJECT_STORE),
        pause=True,
        prompt_logprobs=True,
        top_logprobs=20,
        weight_changes=True,
        float32_head=True,
    )

    type: Literal["hf"] = Field(default="hf", description="This engine.")
    max_running: PositiveInt = Field(default=32, description="Sequences decoded together.")
