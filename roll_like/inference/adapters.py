"""Whether the engines of a run with `training.lora` are sent adapters alone, or merged weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_like.config.policy_gradient import SamplingRunConfig
from roll_like.config.sections import LoRAConfig
from roll_like.errors import ConfigError
from roll_like.inference.interface import AdapterSpec
from roll_like.inference.plugin import EnginePlugin
from roll_like.models.checkpoint_names import tensor_groups
from roll_like.models.lora import adapted_layers
from roll_like.models.modules import empty_model, load_model_config
from roll_like.models.shape import load_model_shape
from roll_like.registry import INFERENCE_ENGINES

#: What decides, where the engine has it.
ADAPTERS_KEY = "inference.lora"


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """What engines are sent.

    Attributes:
        adapter: The adapters that are sent alone; None for whole weights, which adapters are merged into.
        reason: Why merged weights are sent although there are adapters; empty otherwise.
    """

    adapter: AdapterSpec | None
    reason: str = ""


def adapter_choice(config: SamplingRunConfig, model: Path) -> AdapterChoice:
    """Return what a run's engines are sent.

    Args:
        config: The run's configuration.
        model: Directory of `model.path`.

    Raises:
        ConfigError: `inference.lora: true`, and they cannot be sent alone; or the model has no such layers.
    """
    lora, wanted = config.training.lora, config.inference.sends_adapters
    if lora is None:
        return AdapterChoice(None)
    if wanted is False:
        return AdapterChoice(None, "inference.lora is false")
    loaded = load_model_config(model, trust_remote_code=config.model.trust_remote_code)
    adapter, obstacle = _adapter(empty_model(loaded, config.model.trust_remote_code), lora)
    if obstacle is None:
        plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(config.inference.type)
        obstacle = plugin.adapter_obstacle(
            (loaded.architectures or [""])[0],
            adapter,
            device=config.resources.device,
            experts=load_model_shape(model).experts > 0,
        )
    if obstacle is None:
        return AdapterChoice(adapter)
    if wanted:
        raise ConfigError(
            f"inference.lora: adapters cannot be sent alone: {obstacle}",
            fix="set inference.lora: false, which sends merged weights, or remove the key",
        )
    return AdapterChoice(None, obstacle)


def _adapter(model: Any, lora: LoRAConfig) -> tuple[AdapterSpec, str | None]:
    """Return the adapters of an empty model, and what keeps them from being sent alone, if anything does."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    alone = {
        group.parameters[0]: group.tensors[0]
        for group in tensor_groups(model, shapes)
        if len(group.parameters) == len(group.tensors) == 1
    }
    weights = [f"{layer}.weight" for layer in adapted_layers(model, lora)]
    adapter = AdapterSpec(
        rank=lora.rank, modules=tuple(sorted({alone.get(name, name).split(".")[-2] for name in weights}))
    )
    changed = sorted({name.split(".")[-2] for name in weights if name not in alone})
    if changed:
        return adapter, f"the model's checkpoint format has {', '.join(changed)} in another form"
    return adapter, None
