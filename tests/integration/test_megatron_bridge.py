"""Weights of the backend `megatron` as Megatron-Bridge, NVIDIA's converter, gives them to the same ranks: bit by bit.

Bridge names parameters as Megatron-Core's layers with Transformer Engine do, where a norm is part of the projection
after it.
"""

from __future__ import annotations

import importlib
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typing_extensions
from gloo_ranks import on_ranks
from test_training_megatron import FOLDER, INSTALLED, Options, start
from tiny_families import make_family

from roll_like.cluster.address import free_port
from roll_like.models.megatron_plan import LATENT
from roll_like.models.stored import read_tensor, stored_tensors

BRIDGE = Path(__file__).parents[2] / ".megatron_bridge"
TIMEOUT = 600
pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(2 * TIMEOUT),
    INSTALLED,
    pytest.mark.skipif(not BRIDGE.is_dir(), reason="`scripts/megatron.sh megatron_bridge` has not installed it"),
]
#: Family → Bridge's module and class.
CLASSES = {
    "llama": ("llama.llama_bridge", "LlamaBridge"),
    "qwen2": ("qwen.qwen2_bridge", "Qwen2Bridge"),
    "qwen3": ("qwen.qwen3_bridge", "Qwen3Bridge"),
    "qwen3_moe": ("qwen.qwen3_moe_bridge", "Qwen3MoEBridge"),
    "glm4_moe": ("glm.glm45_bridge", "GLM45Bridge"),
    "deepseek_v3": ("deepseek.deepseek_v3_bridge", "DeepSeekV3Bridge"),
    "gpt_oss": ("gpt_oss.gpt_oss_bridge", "GPTOSSBridge"),
}
LAYOUTS: tuple[Options, ...] = ({"tensor_parallel": 2}, {"tensor_parallel": 2, "expert_parallel": 2})


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


class _TransformerEngine(ModuleType):
    """What Bridge imports names from and does not call here."""

    __version__ = "0.0.1"
    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


def import_bridge() -> None:
    """Import the converters without the package's own start, which imports models of images and speech.

    Megatron-Core must have been imported: it looks for Transformer Engine itself.
    """
    import megatron

    from roll_like.training.megatron_cpu import OnCPU

    typing.override = typing_extensions.override  # type: ignore[attr-defined]
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules[name] = _TransformerEngine(name)
    megatron.__path__ = [*megatron.__path__, str(BRIDGE / "megatron")]
    folder = BRIDGE / "megatron" / "bridge"
    folders = {"": folder, ".models": folder / "models"}
    folders |= {f".models.{name.split('.')[0]}": folder / "models" / name.split(".")[0] for name, _ in CLASSES.values()}
    for name, path in folders.items():
        package = sys.modules[f"megatron.bridge{name}"] = ModuleType(f"megatron.bridge{name}")
        package.__path__ = [str(path)]
    with OnCPU():
        for name, _ in CLASSES.values():
            importlib.import_module(f"megatron.bridge.models.{name}")
        mapping = importlib.import_module("megatron.bridge.models.conversion.param_mapping").AutoMapping
    for kind in ("Linear", "Norm"):
        mapping.register_module_type(kind, "replicated")


def bridges_name(name: str, layer: Any, latent: bool, expert: int) -> str:
    """What Bridge calls one of our parameters.

    Args:
        name: Ours, within the chunk.
        layer: The chunk's layer; None outside of them.
        latent: Whether attention is latent.
        expert: Number of the rank's first expert.
    """
    if layer is None:
        return name
    if not latent:
        name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if not layer.is_moe_layer:
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return re.sub(r"local_experts\.(\d+)", lambda found: f"local_experts.{int(found[1]) + expert}", name)


def mapping_of(registry: Any, name: str) -> Any:
    """How Bridge makes a parameter; for some families it only knows experts of one module for all."""
    found = registry.megatron_to_hf_lookup(name)
    if found is None:
        found = registry.megatron_to_hf_lookup(re.sub(r"local_experts\.(\d+)\.(linear_fc\d\.\w+)", r"\2\1", name))
        assert found is not None, name
        found.megatron_param = name
    return found


def differing(trainer: Any, family: str, model: Path) -> Iterator[str]:
    """Yield our parameters that Bridge would have filled otherwise; there is no pipeline."""
    from megatron.core import parallel_state
    from transformers import AutoConfig

    module, kind = CLASSES[family]
    bridge = getattr(sys.modules[f"megatron.bridge.models.{module}"], kind)()
    bridge.hf_config = AutoConfig.from_pretrained(model)
    bridge.hf_pretrained = SimpleNamespace(config=bridge.hf_config)
    registry, stored = bridge.mapping_registry(), stored_tensors(model)
    (chunk,) = trainer._backend._chunks
    owners = dict(chunk.named_modules())
    compared = 0
    for name, parameter in chunk.named_parameters():
        if name.endswith("sinks"):  # Bridge looks for them in a module of another name
            continue
        found = re.match(r"decoder\.layers\.(\d+)\.", name)
        layer = chunk.decoder.layers[int(found[1])] if found else None
        own = len(layer.mlp.experts.local_experts) if layer is not None and layer.is_moe_layer else 0
        first = own * parallel_state.get_expert_model_parallel_rank()
        mapping = mapping_of(registry, bridges_name(name, layer, family in LATENT, first))
        names = mapping.hf_param
        whole = (
            {part: read_tensor(stored, each) for part, each in names.items()}
            if isinstance(names, dict)
            else read_tensor(stored, names)
        )
        theirs = mapping.hf_to_megatron(whole, owners[name.rpartition(".")[0]])
        compared += 1
        if not torch.equal(theirs, parameter.detach()):
            yield f"{family}: {name}, {mapping.hf_param}"
    assert compared > 10


def compare(rank: int, ranks: int, _: Any, cases: list[tuple[str, Any, Path, Options]]) -> list[str]:
    sys.path.append(str(FOLDER))
    found: list[str] = []
    for index, (family, address, model, options) in enumerate(cases):
        trainer = start(rank, ranks, address, str(model), options)
        if index == 0:
            import_bridge()
        found += differing(trainer, family, model)
        trainer.close()
    return found


def test_ranks_have_what_megatron_bridge_gives_them(tmp_path: Path) -> None:
    models = {family: make_family(family, tmp_path / family) for family in CLASSES}
    cases = [
        (family, ("127.0.0.1", free_port()), models[family], options)
        for family in CLASSES
        for options in LAYOUTS
        if "expert_parallel" not in options or family not in ("llama", "qwen2", "qwen3")
    ]
    assert on_ranks(compare, cases, timeout=TIMEOUT) == [[], []]
