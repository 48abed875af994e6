"""From a checkpoint of a service to a Hugging Face directory, without Ray and without the service's hardware."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from roll_like.errors import CheckpointError
from roll_like.run.checkpoint import read_checkpoint
from roll_like.run.export import export_weights, merged_weights
from roll_like.service.checkpoints import CONFIG, STATE, read_about
from roll_like.service.config import load_service_config

if TYPE_CHECKING:
    from torch import Tensor


def export_stored(checkpoint: Path, output: Path) -> None:
    """Merge what the ranks of a service wrote, on however many ranks, into a Hugging Face directory.

    Args:
        checkpoint: A folder `models/MODEL/weights/NAME` of a service.
        output: Where to write.

    Raises:
        CheckpointError: It is for samplers, it is damaged, or `output` cannot be written.
    """
    about = read_about(checkpoint)
    if about is None or about.kind != "weights":
        raise CheckpointError(
            f"{checkpoint} has weights for samplers", fix="name a checkpoint that save_state has written"
        )
    config = load_service_config(checkpoint / CONFIG).workers
    training = config.training
    read_checkpoint(checkpoint / STATE)  # compares checksums
    weights = merged_weights(checkpoint / STATE, training.backend)
    if training.lora is not None and about.lora_rank is not None:
        weights = _of_rank(weights, about.lora_rank)
        lora = training.lora.model_copy(update={"rank": about.lora_rank})
        config = config.model_copy(update={"training": training.model_copy(update={"lora": lora})})
    export_weights(weights, config, about.updates, output)


def _of_rank(weights: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return adapters without the rows and columns that one of a lower rank than the service's has more."""
    return {
        name: (tensor[:rank] if ".lora_A." in name else tensor[:, :rank]).contiguous()
        for name, tensor in weights.items()
    }
