"""Low-rank adapters on a Hugging Face model: adding them, switching them off, merging them, writing them.

Layers are peft's, injected in place: names stay the model's own, with `.base_layer` before a frozen weight and
`.lora_A.default`, `.lora_B.default` beside it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.config.model import ModelTask
from roll_like.config.training import LoRAConfig
from roll_like.errors import CheckpointError, ConfigError
from roll_like.models.modules import persistent_buffers
from roll_like.models.quantized import dequantized, quantize, quiet_bitsandbytes, shape_and_dtype
from roll_like.models.vision import vision_tower

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_IN_FILE = re.compile(r"\.lora_[AB]\.weight$")
_ADAPTER = re.compile(r"\.(lora_[AB])\.default\.weight$")
_BASE = ".base_layer"
_ROUTER = re.compile(r"router$|(^|_|\.)gate$")
_FILE_PREFIX = "base_model.model."


def linear_layers(causal_lm: Any) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of each linear layer in a model's blocks, by its whole name.

    Blocks are what is numbered: neither the head nor layers around the blocks are among them. Nor are those of a vision
    tower, some of which have the names of the language model's.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head, tower = causal_lm.get_output_embeddings(), tower_name(causal_lm)
    found: dict[str, tuple[int, int]] = {}
    for name, layer in causal_lm.named_modules():
        if layer is head or re.search(r"\.\d+\.", name) is None:
            continue
        if tower is not None and name.startswith(f"{tower}."):
            continue
        if isinstance(layer, nn.Linear):
            found[name] = layer.in_features, layer.out_features
        elif isinstance(layer, Conv1D):
            found[name] = layer.nx, layer.nf
    return found


def tower_name(causal_lm: Any) -> str | None:
    """Return the name of a model's vision tower, which gets no adapters; None where there is none."""
    tower = vision_tower(causal_lm)
    return None if tower is None else next(name for name, layer in causal_lm.named_modules() if layer is tower)


def targets(causal_lm: Any, config: LoRAConfig, section: str = "training") -> tuple[str, ...]:
    """Return the names of layers that get adapters, as in `target_modules`: last parts of whole names.

    Args:
        causal_lm: The whole model, perhaps an empty one.
        config: The `lora` section.
        section: Where it is, for messages: `training` or `critic`.

    Raises:
        ConfigError: The model has no such layer; names those that it has.
    """
    layers = linear_layers(causal_lm)
    there = tuple(sorted({name.rpartition(".")[2] for name in layers}))
    if not there:
        raise ConfigError(
            f"{section}.lora: {type(causal_lm).__name__} has no linear layers in numbered blocks",
            fix="remove the section",
        )
    for wanted in config.target_modules or ():
        if not _chosen(layers, (wanted,)):
            near = difflib.get_close_matches(wanted, there, n=1)
            blocks = "its blocks" if tower_name(causal_lm) is None else "the blocks of its language model"
            raise ConfigError(
                f"{section}.lora.target_modules: the model has no linear layer {wanted!r} in {blocks}; it "
                f"has {', '.join(there)}",
                fix=f"use {near[0]!r}" if near else "use some of these, or leave the key out for all of them",
            )
    return there if config.target_modules is None else config.target_modules


def adapted_width(causal_lm: Any, config: LoRAConfig, section: str = "training") -> int:
    """Return inputs plus outputs of all layers that get adapters: times the rank, that is what is trained.

    Raises:
        ConfigError: As `targets`.
    """
    layers = linear_layers(causal_lm)
    return sum(sum(layers[name]) for name in adapted_layers(causal_lm, config, section))


def adapted_layers(causal_lm: Any, config: LoRAConfig, section: str = "training") -> list[str]:
    """Return the whole names of all layers that get adapters.

    Raises:
        ConfigError: As `targets`.
    """
    return _chosen(linear_layers(causal_lm), targets(causal_lm, config, section))


def _chosen(layers: dict[str, tuple[int, int]], wanted: tuple[str, ...]) -> list[str]:
    return [name for name in layers if any(name == each or name.endswith(f".{each}") for each in wanted)]


def quantized_layers(causal_lm: Any, config: LoRAConfig, section: str = "training") -> list[str]:
    """Return the whole names of all layers whose weights are quantised: linear ones in the blocks, but no routers.

    Only `nn.Linear` itself: classes that derive from it may read their weights.

    Raises:
        ConfigError: The model has none.
    """
    from torch import nn

    if config.quantization is None:
        return []
    found = [
        name
        for name in linear_layers(causal_lm)
        if type(causal_lm.get_submodule(name)) is nn.Linear and _ROUTER.search(name) is None
    ]
    if not found:
        raise ConfigError(
            f"{section}.lora.quantization: {type(causal_lm).__name__} has no nn.Linear in its numbered blocks, and "
            "nothing else can be quantised",
            fix="remove the key",
        )
    return found


def quantized_width(causal_lm: Any, config: LoRAConfig, section: str = "training") -> int:
    """Return how many weights are quantised.

    Raises:
        ConfigError: As `quantized_layers`.
    """
    layers = linear_layers(causal_lm)
    return sum(math.prod(layers[name]) for name in quantized_layers(causal_lm, config, section))


def add_adapters(causal_lm: Any, config: LoRAConfig, *, seed: int, section: str = "training") -> None:
    """Freeze a model, quantise it where that is asked for, and add adapters to it, in place.

    They change nothing until they have been trained.

    Args:
        causal_lm: The whole model, on any device but the meta device.
        config: The `lora` section.
        seed: Of the A matrices: the same on every rank, and in a resumed run.
        section: Where it is, for messages: `training` or `critic`.

    Raises:
        ConfigError: The model has no such layers, or bitsandbytes is needed and not installed.
    """
    import torch

    with quiet_bitsandbytes():
        from peft import inject_adapter_in_model

    names = targets(causal_lm, config, section)
    if config.quantization is not None:
        quantize(causal_lm, quantized_layers(causal_lm, config, section), config.quantization, section)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(_peft_config(causal_lm, config, names), causal_lm)
    for weight in named_weights(causal_lm):
        for part in weight.parts[1:]:  # peft leaves those beside quantised weights in float32
            part.data = part.data.to(weight.dtype)


def _peft_config(causal_lm: Any, config: LoRAConfig, names: tuple[str, ...], **more: Any) -> Any:
    with quiet_bitsandbytes():
        from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    tower = tower_name(causal_lm)
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        lora_dropout=config.dropout,
        target_modules=sorted(names),
        exclude_modules=None if tower is None else rf"{re.escape(tower)}\..*",
        init_lora_weights="gaussian" if config.init == "gaussian" else True,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in causal_lm.modules()),
        **more,
    )


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Let a model compute as it did before it had adapters. For forward passes without gradients."""
    layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "lora_A")]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    for parameter in trained:  # peft freezes them meanwhile; what trains a module looks at this at its first pass
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@dataclass(frozen=True, slots=True)
class NamedWeight:
    """A parameter of a Hugging Face model under its own name, with the adapter beside it where there is one.

    Attributes:
        name: As in the model without adapters.
        parameter: The parameter; frozen where it has an adapter, perhaps quantised (`models.quantized`).
        layer: The layer that has the adapter.
        buffer: Whether it is no parameter: it keeps its precision, and nothing trains it.
    """

    name: str
    parameter: Tensor
    layer: Any = None
    buffer: bool = False

    @property
    def parts(self) -> list[Tensor]:
        """Every parameter that the weight follows from."""
        if self.layer is None:
            return [self.parameter]
        return [self.parameter, self.layer.lora_A["default"].weight, self.layer.lora_B["default"].weight]

    @property
    def dtype(self) -> torch.dtype:
        """What the forward pass computes with, also where the weight is quantised."""
        return shape_and_dtype(self.parameter)[1]

    def merged(self, dtype: torch.dtype, parts: Sequence[Tensor] | None = None, *, copy: bool = False) -> Tensor:
        """Return W + scale·B·A, computed in float32; of a quantised W what the forward pass dequantises.

        Args:
            parts: What `parts` are where those are sharded: whole.
            copy: For memory that is about to go.
        """
        weight, *adapter = (dequantized(part) for part in parts or self.parts)
        if self.layer is None:
            return weight.to(weight.dtype if self.buffer else dtype, copy=copy)
        weight, down, up = (part.float() for part in (weight, *adapter))
        product = up @ down
        if self.layer.fan_in_fan_out:
            product = product.t()
        return weight.add(product, alpha=self.layer.scaling["default"]).to(dtype)

    @property
    def frozen(self) -> NamedWeight:
        """The same without its adapter."""
        return replace(self, layer=None)

    def adapter(
        self, dtype: torch.dtype, parts: Sequence[Tensor] | None = None, *, copy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return A and scale·B, shapes [r, in] and [out, r], for engines that multiply x with A and then with this.

        Args:
            dtype: Of the result. A and B are rounded to it before B is scaled, as they are in a forward pass.
            parts: What A and B are where those are sharded: whole.
            copy: For memory that is about to go.
        """
        down, up = (part.detach() for part in parts or self.parts[1:])
        return down.to(dtype, copy=copy), (up.to(dtype).float() * self.layer.scaling["default"]).to(dtype)


def named_weights(module: nn.Module) -> Iterator[NamedWeight]:
    """Yield what a checkpoint has of a model without adapters: `named_parameters` in their order, then buffers."""
    adapted = {name: layer for name, layer in module.named_modules() if hasattr(layer, "lora_A")}
    for name, parameter in module.named_parameters():
        if adapted and _ADAPTER.search(name):
            continue
        owner, _, kind = name.rpartition(".")
        layer = adapted.get(owner.removesuffix(_BASE))
        if layer is None:
            yield NamedWeight(name, parameter)
        else:
            yield NamedWeight(f"{owner.removesuffix(_BASE)}.{kind}", parameter, layer if kind == "weight" else None)
    for name, buffer in persistent_buffers(module):
        yield NamedWeight(name, buffer, buffer=True)


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names that the matrices A and B beside a weight have in peft's files.

    >>> adapter_names("layers.0.q_proj.weight")
    ('layers.0.q_proj.lora_A.weight', 'layers.0.q_proj.lora_B.weight')
    """
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def adapter_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what is trained of a model with adapters, by the names that peft's files have: a new output, too."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield _FILE_PREFIX + _ADAPTER.sub(r".\1.weight", name), parameter


def load_adapters(causal_lm: Any, weights: Mapping[str, Tensor]) -> None:
    """Take the adapters of a checkpoint, and whatever else it holds.

    Args:
        weights: By the model's own names. Afterwards these are what is trained of it.

    Raises:
        CheckpointError: They are of other layers.
    """
    there = {name for name, _ in causal_lm.named_parameters() if _ADAPTER.search(name)}
    found = {name: weight for name, weight in weights.items() if _ADAPTER.search(name)}
    if there != set(found):
        raise CheckpointError(
            f"the checkpoint holds {len(found)} tensors of adapters and the model has {len(there)}; first that only "
            f"one of them has: {min(there ^ set(found))}",
            fix="use the model and the training.lora that the run had",
        )
    causal_lm.load_state_dict(weights, strict=False)
    for name, parameter in causal_lm.named_parameters():
        parameter.requires_grad_(name in weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Trained adapters without their model, as peft keeps them.

    Attributes:
        peft_config: A `peft.LoraConfig`.
        tensors: By the names of peft's files.
    """

    peft_config: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(
        cls, causal_lm: Any, config: LoRAConfig, tensors: dict[str, Tensor], *, base: str, task: ModelTask
    ) -> Adapter:
        """Describe a model's adapters.

        Args:
            config: The `training.lora` section.
            tensors: Theirs, whole, as `adapter_parameters` names them.
            base: The model that they belong to: a hub id or a directory.
        """
        lora = [name for name in tensors if _IN_FILE.search(name)]
        whole = {name.removeprefix(_FILE_PREFIX).rpartition(".")[0] for name in tensors.keys() - set(lora)}
        written = _peft_config(
            causal_lm,
            config,
            config.target_modules or tuple({name.split(".")[-3] for name in lora}),
            base_model_name_or_path=base,
            inference_mode=True,
            task_type={"text-generation": "CAUSAL_LM", "text-classification": "SEQ_CLS"}.get(task, "TOKEN_CLS"),
            modules_to_save=sorted(whole) or None,
        )
        return cls(peft_config=written, tensors=tensors)

    def write(self, directory: Path) -> None:
        """Write what `peft.PeftModel.from_pretrained(base, directory)` reads."""
        from safetensors.torch import save_file

        directory.mkdir()
        self.peft_config.save_pretrained(str(directory))
        tensors = {name: tensor.cpu().clone().contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
