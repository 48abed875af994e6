"""What is known of the vLLM engine before it is loaded."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from roll_like.config.inference import EngineConfig, JudgeConfig, WeightBackend, engines_share_gpus
from roll_like.config.sections import SamplingResourcesConfig
from roll_like.config.violations import Finding
from roll_like.inference.plugin import EnginePlugin
from roll_like.inference.vllm.config import VLLMConfig, VLLMJudgeConfig, VLLMSettings
from roll_like.inference.vllm.environment import vllm_environment
from roll_like.registry import INFERENCE_ENGINES

if TYPE_CHECKING:
    from roll_like.cluster import ClusterHandle
    from roll_like.inference.interface import EngineSpec, InferenceEngine, JudgeServer
    from roll_like.inference.weight_transfer.interface import WeightTransfer


@INFERENCE_ENGINES.register("vllm")
class VLLMPlugin(EnginePlugin):
    """vLLM."""

    Config = VLLMConfig
    Judge = VLLMJudgeConfig

    @classmethod
    def engine(cls) -> type[InferenceEngine]:
        """Import the engine; vLLM itself is imported when it starts."""
        from roll_like.inference.vllm.engine import VLLMEngine

        return VLLMEngine

    @classmethod
    def judge_server(cls) -> type[JudgeServer]:
        """Import what starts vLLM's server."""
        from roll_like.inference.vllm.server import VLLMServer

        return VLLMServer

    @classmethod
    def environment(cls, config: EngineConfig | JudgeConfig, spec: EngineSpec) -> dict[str, str]:
        """Return the variables that vLLM reads while it is imported."""
        assert isinstance(config, VLLMSettings)
        return vllm_environment(config, spec.threads, spec.device)

    @classmethod
    def weight_transfer(
        cls,
        backend: WeightBackend,
        engines: ClusterHandle[InferenceEngine],
        gpus_per_engine: int,
        trainer_address: Callable[[], tuple[str, int]],
    ) -> WeightTransfer:
        """Return vLLM's own transfer between GPUs; on CPU the one through shared memory."""
        if backend == "shared_memory":
            return super().weight_transfer(backend, engines, gpus_per_engine, trainer_address)
        from roll_like.inference.vllm.weight_transfer import VLLMTransfer

        address, port = trainer_address()
        return VLLMTransfer(
            engines=engines, backend=backend, gpus_per_engine=gpus_per_engine, address=address, port=port
        )

    @classmethod
    def check(cls, config: EngineConfig, resources: SamplingResourcesConfig) -> Iterator[Finding]:
        """Yield names in `engine_args` that vLLM does not know, and a `sleep` without effect."""
        assert isinstance(config, VLLMConfig)
        yield from _unknown_arguments(config)
        if config.sleep is not None and not engines_share_gpus(resources):
            why = (
                "resources.device is cpu, where there is no GPU memory to free"
                if resources.device == "cpu"
                else "the trainer works on other GPUs (resources.device_mapping)"
            )
            yield Finding("warning", "inference.sleep", f"has no effect: {why}; remove the key")


def _unknown_arguments(config: VLLMSettings) -> Iterator[Finding]:
    given = config.engine_args
    known = _vllm_arguments() if given else set()
    if given and not known:
        yield Finding("note", "inference.engine_args", "not checked: vLLM is not installed here")
        return
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; see vLLM's documentation of AsyncEngineArgs"
            yield Finding("error", f"inference.engine_args.{name}", f"vLLM has no such engine argument{hint}")


def _vllm_arguments() -> set[str]:
    """Return the fields of vLLM's engine arguments, read from its source: importing it takes many seconds."""
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [Path(folder) / "engine" / "arg_utils.py" for folder in folders]
    return {
        statement.target.id
        for file in files
        if file.is_file()
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in {"EngineArgs", "AsyncEngineArgs"}
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
