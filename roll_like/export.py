"""From a checkpoint on disk to a Hugging Face directory, without Ray and without the run's hardware."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.checkpoint import read_checkpoint
from roll_like.config.load import load_config
from roll_like.errors import CheckpointError
from roll_like.models.export import ModelCard, save_hf_directory
from roll_like.models.load import load_tokenizer, resolve_model

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "causal_lm."


def export_checkpoint(checkpoint: Path, output: Path) -> None:
    """Merge a checkpoint's shards, whatever its ZeRO stage and world size, into a Hugging Face directory.

    Args:
        checkpoint: A `step_…` directory of a run.
        output: Where to write.

    Raises:
        CheckpointError: The checkpoint is damaged, or `output` cannot be written.
    """
    found = read_checkpoint(checkpoint)
    config: Any = load_config(checkpoint / "config.yaml")  # of whichever pipeline: all have a name and a model
    model = resolve_model(config.model)
    from transformers import AutoConfig

    card = ModelCard(
        name=config.name,
        base_model=config.model.path,
        pipeline=config.pipeline,
        steps=found.step,
        config_yaml=(checkpoint / "config.yaml").read_text(),
    )
    save_hf_directory(
        merged_weights(checkpoint),
        AutoConfig.from_pretrained(model.path, trust_remote_code=config.model.trust_remote_code),
        load_tokenizer(config.model),
        output,
        card,
        dtype=config.model.dtype,
        base_dir=model.path,
        trust_remote_code=config.model.trust_remote_code,
    )


def merged_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return a checkpoint's whole parameters by their Hugging Face names.

    Raises:
        CheckpointError: DeepSpeed cannot put the shards together.
    """
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # only ZeRO-3 shards parameters; the other stages keep them whole in rank 0's file
    sharded = any((checkpoint / "engine").glob("zero_pp_rank_*_model_states.pt"))
    try:
        if sharded:
            weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag="engine")
        else:
            (file,) = (checkpoint / "engine").glob("mp_rank_00_model_states.pt")
            weights = torch.load(file, map_location="cpu", weights_only=False)["module"]
    except (OSError, RuntimeError, ValueError, KeyError, AssertionError) as error:
        raise CheckpointError(
            f"the shards in {checkpoint} cannot be merged: {type(error).__name__}: {error}"
        ) from error
    return {name.removeprefix(_PREFIX): weight.detach() for name, weight in weights.items() if name.startswith(_PREFIX)}
