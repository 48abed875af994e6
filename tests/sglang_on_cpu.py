"""`inference.type: sglang_stand_in`: our SGLang engine on the stand-in for SGLang, which runs on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal

from sglang_engine import STAND_IN

from roll_like.config.base import Violation
from roll_like.config.resources import ResourcesConfig
from roll_like.inference.interface import InferenceEngine
from roll_like.inference.sglang.config import SGLangConfig
from roll_like.inference.sglang.plugin import SGLangPlugin
from roll_like.registry import INFERENCE_ENGINES


class StandInConfig(SGLangConfig):
    """SGLang's settings, without the rule that it needs a GPU."""

    type: Literal["sglang_stand_in"] = "sglang_stand_in"

    def violations(self, resources: ResourcesConfig) -> Iterator[Violation]:
        yield from ()


@INFERENCE_ENGINES.register("sglang_stand_in")
class StandInPlugin(SGLangPlugin):
    """The plugin, in whose processes `import sglang` finds the stand-in."""

    Config = StandInConfig

    @classmethod
    def engine(cls) -> type[InferenceEngine]:
        if str(STAND_IN) not in sys.path:
            sys.path.insert(0, str(STAND_IN))
        return super().engine()
