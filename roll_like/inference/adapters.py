"""Whether engines of a run with `training.lora` are sent adapters alone, or merged weights; what they hold beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from roll_like.config.sampling import SamplingRunConfig
from roll_like.config.training import LoRAConfig
from roll_like.errors import ConfigError
from roll_like.inference.interface import AdapterSpec, FrozenAdapter
from roll_like.inference.plugin import EnginePlugin
from roll_like.models.checkpoint_names import tensor_groups
from roll_like.models.lora import adapted_layers
from roll_like.models.modules import empty_model, load_model_config
from roll_like.models.shape import load_model_shape
from roll_like.models.stored_adapter import StoredAdapter
from roll_like.registry import INFERENCE_ENGINES

#: What keeps adapters from being sent alone where the frozen base is in 4 bits.
QUANTIZED = (
    "the trainer computes with a quantised base (training.lora.quantization), and the engine would load one that is not"
)
#: What keeps them where the model's own layers guess tokens.
GUESSING = "the layers that guess (inference.speculative.method: mtp) read what the policy's layers compute"
#: What names adapters that are held beside the policy's.
FROZEN_KEY = "evaluation.adapters"


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
        model: Directory of `model.path`.

    Raises:
        ConfigError: `inference.lora: true`, or a key that needs the base model in the engine, and adapters cannot be
            sent alone; the model has no such layers; or an adapter to hold beside does not fit the model.
    """
    lora, wanted = config.training.lora, config.inference.sends_adapters
    if lora is None:
        return AdapterChoice(None)
    if wanted is False:
        quantizes = config.inference.quantizes
        return AdapterChoice(
            None, f"the engine holds weights in {quantizes}" if quantizes else "inference.lora is false"
        )
    loaded = load_model_config(model, trust_remote_code=config.model.trust_remote_code)
    empty = empty_model(loaded, config.model.trust_remote_code)
    adapter, obstacle = _adapter(empty, lora)
    plugin: type[EnginePlugin] = INFERENCE_ENGINES.get(config.inference.type)
    obstacle_of = partial(
        plugin.adapter_obstacle,
        (loaded.architectures or [""])[0],
        device=config.resources.device,
        experts=load_model_shape(model).experts > 0,
    )
    obstacle = obstacle or (GUESSING if config.inference.guesses_by_itself else obstacle_of(adapter))
    if obstacle is None:
        return AdapterChoice(replace(adapter, frozen=tuple(_frozen(config, empty, obstacle_of))))
    for key in config.adapter_keys:
        raise ConfigError(
            f"{key}: the engine would have no base model beside the policy, because adapters cannot be sent alone: "
            f"{obstacle}",
            fix="remove the key",
        )
    if wanted:
        raise ConfigError(
            f"inference.lora: adapters cannot be sent alone: {obstacle}",
            fix="set inference.lora: false, which sends merged weights, or remove the key",
        )
    return AdapterChoice(None, obstacle)


def _frozen(
    config: SamplingRunConfig, model: Any, obstacle_of: Callable[[AdapterSpec], str | None]
) -> Iterator[FrozenAdapter]:
    """Yield the adapters to hold beside the policy's.

    Args:
        model: The base model, perhaps an empty one.

    Raises:
        ConfigError: One is not there, does not fit the model, or is not served.
    """
    for name, path in config.frozen_adapters.items():
        key = f"{FROZEN_KEY}.{name}"
        stored = StoredAdapter.read(Path(path).expanduser(), key)
        stored.require_base(model, config.model.path, key)
        obstacle = obstacle_of(AdapterSpec(rank=stored.rank, modules=stored.modules))
        if obstacle is not None:
            raise ConfigError(f"{key}: the engine does not take this adapter: {obstacle}", fix="remove it")
        yield FrozenAdapter(name=name, path=str(stored.path), rank=stored.rank, modules=stored.modules)


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
    return adapter, None if lora.quantization is None else QUANTIZED
