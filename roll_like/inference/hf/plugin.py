"""What is known of the transformers engine before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from roll_like.config.inference import EngineConfig
from roll_like.inference.hf.config import HFConfig
from roll_like.inference.plugin import EnginePlugin
from roll_like.registry import INFERENCE_ENGINES

if TYPE_CHECKING:
    from roll_like.inference.interface import InferenceEngine


@INFERENCE_ENGINES.register("hf")
class HFPlugin(EnginePlugin):
    """Transformers."""

    Config = HFConfig

    @classmethod
    def engine(cls) -> type[InferenceEngine]:
        """Import the engine, and torch with it."""
        from roll_like.inference.hf.engine import HFEngine

        return HFEngine

    @classmethod
    def vision_obstacle(cls, *, here: bool) -> None:
        """Return None: without torchvision, transformers processes images with Pillow."""
        del here

    @classmethod
    def routes_obstacle(cls, config: EngineConfig, *, device: str) -> None:
        """Return None: what transformers' routers choose is seen here."""
        del config, device

    @classmethod
    def kept_obstacle(cls, config: EngineConfig, unbounded: Sequence[str], *, device: str) -> None:
        """Return None: tokens are drawn here."""
        del config, unbounded, device
