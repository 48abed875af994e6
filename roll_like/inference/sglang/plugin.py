"""The SGLang engine's registration. Imports neither torch nor SGLang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from roll_like.config.base import Finding
from roll_like.config.inference import NCCL, EngineConfig, JudgeConfig
from roll_like.config.resources import ResourcesConfig
from roll_like.inference.plugin import EnginePlugin
from roll_like.inference.settings import unknown_arguments
from roll_like.inference.sglang.arguments import (
    DOCUMENTED,
    INSTALL,
    TESTED,
    can_serve,
    installed_version,
    known_arguments,
    sglang_environment,
)
from roll_like.inference.sglang.config import SGLangConfig
from roll_like.registry import INFERENCE_ENGINES

if TYPE_CHECKING:
    from roll_like.cluster import ClusterHandle
    from roll_like.inference.interface import EngineSpec, InferenceEngine
    from roll_like.inference.weight_transfer.interface import WeightTransfer


@INFERENCE_ENGINES.register("sglang")
class SGLangPlugin(EnginePlugin):
    """SGLang."""

    Config = SGLangConfig

    @classmethod
    def engine(cls) -> type[InferenceEngine]:
        """Import the engine; SGLang itself is imported when it starts."""
        from roll_like.inference.sglang.engine import SGLangEngine

        return SGLangEngine

    @classmethod
    def environment(cls, config: EngineConfig | JudgeConfig, spec: EngineSpec) -> dict[str, str]:
        """Return the variables that SGLang reads while it is imported."""
        del config, spec
        return sglang_environment()

    @classmethod
    def weight_transfer(
        cls,
        backend: str,
        engines: ClusterHandle[InferenceEngine],
        gpus_per_engine: int,
        trainer_address: Callable[[], tuple[str, int]],
    ) -> WeightTransfer:
        """Return broadcasts to GPUs of the engines' own; else the transfer through shared memory."""
        if backend != NCCL.name:
            return super().weight_transfer(backend, engines, gpus_per_engine, trainer_address)
        from roll_like.inference.sglang.weight_transfer import SGLangTransfer

        address, port = trainer_address()
        return SGLangTransfer(engines=engines, gpus_per_engine=gpus_per_engine, address=address, port=port)

    @classmethod
    def routes_obstacle(cls, config: EngineConfig, *, device: str) -> None:
        """Return None: a request asks for them."""
        del config, device

    @classmethod
    def check(cls, config: EngineConfig, resources: ResourcesConfig) -> Iterator[Finding]:
        """Yield a missing or unknown version, names in `engine_args` that it does not know, settings without effect."""
        assert isinstance(config, SGLangConfig)
        found = installed_version()
        if found is None:
            yield Finding.error("inference.type", f"the package sglang is not installed here; {INSTALL}")
        elif not can_serve(found):
            why = f"sglang {found} is installed, and {TESTED} or newer of its series is needed; {INSTALL}"
            yield Finding.error("inference.type", why)
        else:
            if found != TESTED:
                why = f"sglang {found} is installed; the calls that are tested are those of {TESTED}"
                yield Finding.warning("inference.type", why)
            for name, hint in unknown_arguments(config.engine_args, known_arguments(), DOCUMENTED).items():
                yield Finding.error(f"inference.engine_args.{name}", f"SGLang has no such server argument; {hint}")
        yield from config.without_effect(resources)
