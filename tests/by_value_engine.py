"""`inference.type: hf_by_value` and `vllm_by_value`: engines that are sent weights as on another machine."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from roll_like.config.inference import OBJECT_STORE, EngineCapabilities
from roll_like.inference.hf.config import HFConfig
from roll_like.inference.hf.plugin import HFPlugin
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.plugin import VLLMPlugin
from roll_like.registry import INFERENCE_ENGINES


class ByValueConfig(HFConfig):
    """The settings of transformers' engine."""

    capabilities: ClassVar[EngineCapabilities] = replace(HFConfig.capabilities, weight_transports=(OBJECT_STORE,))

    type: Literal["hf_by_value"] = "hf_by_value"


@INFERENCE_ENGINES.register("hf_by_value")
class ByValuePlugin(HFPlugin):
    """The engine itself is the same."""

    Config = ByValueConfig


class VLLMByValueConfig(VLLMConfig):
    """The settings of vLLM."""

    capabilities: ClassVar[EngineCapabilities] = replace(VLLMConfig.capabilities, weight_transports=(OBJECT_STORE,))

    type: Literal["vllm_by_value"] = "vllm_by_value"  # type: ignore[assignment]


@INFERENCE_ENGINES.register("vllm_by_value")
class VLLMByValuePlugin(VLLMPlugin):
    """The engine itself is the same."""

    Config = VLLMByValueConfig
