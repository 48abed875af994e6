"""From a checkpoint on disk to a Hugging Face directory, without Ray and without the run's hardware."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.config.load import load_config
from roll_like.config.run import RunConfig
from roll_like.errors import CheckpointError
from roll_like.models.classifier import load_classifier
from roll_like.models.export import save_hf_directory
from roll_like.models.load import ResolvedModel, from_anywhere, load_tokenizer, resolve_model
from roll_like.models.lora import Adapter, adapter_parameters, add_adapters, load_adapters, named_weights
from roll_like.models.modules import load_causal_lm, load_model_config
from roll_like.models.precision import precision_of
from roll_like.models.vision import processor_files
from roll_like.registry import TRAINING_BACKENDS
from roll_like.run.card import model_card
from roll_like.run.checkpoint import read_checkpoint, require_checkpoint
from roll_like.training.backend import LazyTensors, TrainingBackend

if TYPE_CHECKING:
    from torch import Tensor

#: Where the Hugging Face model is in the modules that ranks train.
_PREFIXES = ("causal_lm.", "classifier.")


def export_checkpoint(checkpoint: Path, output: Path) -> None:
    """Merge a checkpoint's shards, whatever wrote them on however many ranks, into a Hugging Face directory.

    Args:
        checkpoint: A `step_…` directory of a run.
        output: Where to write.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or `output` cannot be written.
    """
    require_checkpoint(checkpoint)
    found = read_checkpoint(checkpoint)
    config: Any = load_config(checkpoint / "config.yaml")  # of whichever pipeline: all have a name and a model
    export_weights(merged_weights(checkpoint, config.training.backend), config, found.step, output)


def export_weights(trained: Mapping[str, Tensor], config: RunConfig, steps: int, output: Path) -> None:
    """Write trained weights as a Hugging Face directory.

    Args:
        trained: By their Hugging Face names; with adapters, only what was trained.
        config: What they were trained with.
        steps: For how long.
        output: Where to write.

    Raises:
        CheckpointError: They are of another model, or `output` cannot be written.
    """
    model = resolve_model(config.model)
    weights: Any = trained
    adapter = None
    if config.training.lora is not None:
        weights, adapter = _with_base(weights, config, model)
    shape = load_model_config(model.path, trust_remote_code=config.model.trust_remote_code)
    shape.update(dict(config.stated_in_model))
    save_hf_directory(
        weights,
        shape,
        load_tokenizer(config.model),
        output,
        model_card(config, steps),
        dtype=precision_of(config),
        base_dir=model.path,
        trust_remote_code=config.model.trust_remote_code,
        adapter=adapter,
        task=config.task,
        more_files=processor_files(model.path),
    )


def _with_base(
    trained: Mapping[str, Tensor], config: RunConfig, model: ResolvedModel
) -> tuple[Iterator[tuple[str, Tensor]], Adapter]:
    """Yield the weights of a model with a checkpoint's adapters merged, and the adapters; the base is not in it."""
    lora = config.training.lora
    assert lora is not None, "the caller asked"
    dtype, trusted = precision_of(config), config.model.trust_remote_code
    loaded: Any = (
        load_causal_lm(model.path, dtype, trust_remote_code=trusted)
        if config.task == "text-generation"
        else load_classifier(model.path, dtype, seed=config.seed, task=config.task, trust_remote_code=trusted)
    )
    add_adapters(loaded, lora, seed=config.seed)
    load_adapters(loaded, trained)
    tensors = {name: parameter.detach() for name, parameter in adapter_parameters(loaded)}
    adapter = Adapter.of(loaded, lora, tensors, base=from_anywhere(model.label, model.path), task=config.task)
    return ((weight.name, weight.merged(weight.dtype)) for weight in named_weights(loaded)), adapter


def merged_weights(checkpoint: Path, backend: str) -> Mapping[str, Tensor]:
    """Return a checkpoint's whole parameters by their Hugging Face names; with adapters, only what was trained.

    Each is put together when it is asked for, where the backend can do that.

    Args:
        checkpoint: A `step_…` directory of a run.

    Raises:
        CheckpointError: The backend cannot put the shards together, now or when a parameter is asked for.
    """
    plugin: type[TrainingBackend] = TRAINING_BACKENDS.get(backend)
    with _reading(checkpoint):
        weights = plugin.merged(checkpoint)
    if weights is None:
        raise CheckpointError(
            f"the training backend {backend!r} cannot merge the shards of a checkpoint",
            fix="set checkpoint.export: true and resume the run, which writes a model directory after its last step",
        )

    def read(name: str) -> Tensor:
        with _reading(checkpoint):
            return weights[name].detach()

    return LazyTensors(
        {
            name.removeprefix(prefix): partial(read, name)
            for name in weights
            for prefix in _PREFIXES
            if name.startswith(prefix)
        }
    )


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, AssertionError) as error:
        raise CheckpointError(
            f"the shards in {checkpoint} cannot be merged: {type(error).__name__}: {error}"
        ) from error
