"""`inference.type: hf_by_value`: transformers' engine, which is sent weights as one on another machine is."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from roll_like.config.inference import OBJECT_STORE, EngineCapabilities
from roll_like.inference.hf.config import HFConfig
from roll_like.inference.hf.plugin import HFPlugin
from roll_like.registry import INFERENCE_ENGINES


class ByValueConfig(HFConfig):
    """The settings of transformers' engine."""

    capabilities: ClassVar[EngineCapabilities] = replace(HFConfig.capabilities, weight_transports=(OBJECT_STORE,))

    type: Literal["hf_by_value"] = "hf_by_value"


@INFERENCE_ENGINES.register("hf_by_value")
class ByValuePlugin(HFPlugin):
    """The engine itself is the same."""

    Config = ByValueConfig
