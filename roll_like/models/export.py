"""Write a model as a Hugging Face directory that transformers and vLLM load, with a card of its run."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from roll_like.config.sections import Precision, Task
from roll_like.errors import CheckpointError
from roll_like.models.classifier import classifier_config
from roll_like.models.lora import Adapter
from roll_like.models.modules import empty_model
from roll_like.models.quiet import quiet

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


#: Where an exported model keeps its adapters alone.
ADAPTER_FOLDER = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What is known of the run that made a model.

    Attributes:
        name: Name of the run.
        base_model: What was trained, as the user spelt it.
        pipeline: `rlvr`, `dpo`, …
        steps: Training steps done.
        evaluation: Metric name → (before, after); None where it was not measured.
        figures: Further numbers of the run, by metric name.
        config_yaml: The resolved configuration.
    """

    name: str
    base_model: str
    pipeline: str
    steps: int
    evaluation: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    config_yaml: str = ""


def render_model_card(card: ModelCard, task: Task = "text-generation") -> str:
    """Return the card as Markdown, with the metadata header that the hub reads."""
    header = ["library_name: transformers", f"pipeline_tag: {task}"]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", card.base_model):  # the hub takes nothing but its own ids here
        header.append(f"base_model: {json.dumps(card.base_model)}")
    header += ["tags:", "- roll_like", "- reinforcement-learning", f"- {card.pipeline}"]
    lines = ["---", *header, "---", "", f"# {card.name}", ""]
    lines += [f"`{card.base_model}` after {card.steps} steps of the `{card.pipeline}` pipeline of roll_like.", ""]
    if card.evaluation:
        lines += ["## Evaluation", "", "| metric | before | after |", "|---|---|---|"]
        lines += [f"| {name} | {_figure(old)} | {_figure(new)} |" for name, (old, new) in card.evaluation.items()]
        lines.append("")
    if card.figures:
        lines += ["## Training", "", "| figure | value |", "|---|---|"]
        lines += [f"| {name} | {_figure(value)} |" for name, value in card.figures.items()]
        lines.append("")
    if card.config_yaml:
        lines += ["## Configuration", "", "```yaml", card.config_yaml.rstrip("\n"), "```", ""]
    return "\n".join(lines)


def save_hf_directory(
    state_dict: Mapping[str, torch.Tensor],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: Path,
    card: ModelCard | None = None,
    *,
    dtype: Precision | None = None,
    base_dir: Path | None = None,
    trust_remote_code: bool = False,
    adapter: Adapter | None = None,
    task: Task = "text-generation",
) -> Path:
    """Write a model so that transformers and vLLM load it; all of it appears at once, or nothing.

    Args:
        state_dict: Full (unsharded) weights by parameter name; of tied tensors, one copy will do.
        config: The model's configuration.
        tokenizer: The tokenizer, with the chat template to keep.
        out_dir: Where to write; an earlier export there is replaced.
        card: The run, for README.md; none is written without it.
        dtype: Precision to write; default: as the weights are.
        base_dir: Directory of the starting model, whose generation settings are kept.
        trust_remote_code: Whether the model's class comes with the model.
        adapter: What of the model was trained, where that is less than all; goes into the folder `adapter`.
        task: Whether it is a language model, or a sequence classifier with one output.

    Raises:
        CheckpointError: The weights do not fit the configuration, or the directory cannot be written.
    """
    config = copy.deepcopy(config)  # saving writes precision and architecture into it
    if task == "text-classification":
        classifier_config(config, tokenizer)
    model = empty_model(config, trust_remote_code, task)
    weights = _fit(state_dict, model, dtype)
    out_dir = out_dir.expanduser().resolve()
    temporary: Path | None = None
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
        temporary.chmod(0o755)
        model.to(next(iter(weights.values())).dtype)  # what config.json states
        with quiet():
            model.save_pretrained(temporary, state_dict=weights, max_shard_size="5GB")
        tokenizer.save_pretrained(temporary)
        if base_dir is not None and (base_dir / "generation_config.json").is_file():
            shutil.copyfile(base_dir / "generation_config.json", temporary / "generation_config.json")
        if card is not None:
            (temporary / "README.md").write_text(render_model_card(card, task), encoding="utf-8")
        if adapter is not None:
            adapter.write(temporary / ADAPTER_FOLDER)
        _sync(temporary)
        _swap(temporary, out_dir)
    except Exception as error:  # a full disk is an OSError, a SafetensorError or a plain Exception of tokenizers
        raise CheckpointError(
            f"the model cannot be written to {out_dir}: {error}",
            fix="free space there, or write elsewhere (output_dir, or model.cache_dir for converted models)",
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return out_dir


def _fit(
    state_dict: Mapping[str, torch.Tensor], model: PreTrainedModel, dtype: Precision | None
) -> dict[str, torch.Tensor]:
    """Return exactly the tensors that the architecture stores, each in memory of its own."""
    import torch

    tied: Mapping[str, str] = model.all_tied_weights_keys
    weights: dict[str, torch.Tensor] = {}
    for name, expected in model.state_dict().items():
        if name in tied:
            continue
        aliases = [name, *(alias for alias, source in tied.items() if source == name)]
        copies = [state_dict[alias] for alias in aliases if alias in state_dict]
        if not copies:
            raise CheckpointError(f"{name}, of shape {tuple(expected.shape)}, is missing in the weights to export")
        found = copies[0]
        if any(not torch.equal(found, other) for other in copies[1:]):
            raise CheckpointError(f"the model ties {' and '.join(aliases)}, but the weights to export differ there")
        if found.shape != expected.shape:
            raise CheckpointError(
                f"the weights to export hold {name} in shape {tuple(found.shape)}; "
                f"the model's configuration says {tuple(expected.shape)}"
            )
        tensor = found.detach().to("cpu")
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(getattr(torch, dtype))
        # safetensors refuses views of one buffer, which is what a trainer's flat parameters are
        weights[name] = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor.contiguous()
    unknown = sorted(set(state_dict) - set(weights) - set(tied))
    if unknown:
        raise CheckpointError(
            f"the weights to export hold {len(unknown)} tensors that the model's configuration does not know; "
            f"first: {unknown[0]}"
        )
    return weights


def _sync(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(0o644)  # safetensors writes files that only their owner may read
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def _swap(temporary: Path, out_dir: Path) -> None:
    """Put `temporary` in the place of `out_dir`."""
    if out_dir.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.old.", dir=out_dir.parent))
        out_dir.rename(old / "was")
        temporary.rename(out_dir)
        shutil.rmtree(old)
    else:
        temporary.rename(out_dir)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
