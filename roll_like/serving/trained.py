"""The model that a run has trained, and what its configuration says of how to ask it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll_like.config.load import load_config
from roll_like.config.run import RunConfig
from roll_like.data.reasoning import known_tags
from roll_like.errors import ConfigError, PluginError
from roll_like.metrics.runs import CONFIG, find_run, read_config
from roll_like.run.card import setting_of
from roll_like.run.checkpoint import checkpoint_name, newest_step
from roll_like.types import ReasoningTags

#: Where a run exports its model to, in its folder.
MODEL = "model"
#: How tokens are drawn, by the names that the configuration, vLLM and transformers have for it.
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
#: In `config.json`, of a model whose rotary frequencies depend on the context window: `roll_like.models.rotary`.
_LONG_ROPE = re.compile(r'"(?:rope_)?type"\s*:\s*"(?:longrope|su)"')
#: Pipelines whose models give numbers, not texts.
_SCORES = frozenset({"reward_model"})


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A directory in the format of Hugging Face, and the settings that it was trained with.

    Attributes:
        directory: The model's.
        name: Of its run; of the directory where that is no run's.
        template_options: Variables of its chat template.
        system_prompt: The system message that was put before each prompt, if all data had the same one.
        sampling: `temperature`, `top_p`, `top_k` and `min_p` of the run's rollouts; empty where it did not sample.
        on_cpu: Whether the run was on CPU.
        kv_cache_gib: Key-value cache of the run's engines, where it was on CPU. GiB.
        window: Context window of the run, in tokens; None where it is not known, or does not change what is computed.
    """

    directory: Path
    name: str
    template_options: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    on_cpu: bool = False
    kv_cache_gib: float | None = None
    window: int | None = None

    @property
    def depends_on_window(self) -> bool:
        """Whether what the model computes depends on the context window."""
        return _depends_on_window(self.directory)

    @property
    def reasoning(self) -> ReasoningTags | None:
        """What delimits reasoning, as its chat template or its tokenizer shows; None where they show nothing."""
        template = self.directory / "chat_template.jinja"
        config, tokenizer = (self._read(name) for name in ("tokenizer_config.json", "tokenizer.json"))
        written = (
            template.read_text(encoding="utf-8")
            if template.is_file()
            else json.dumps(config.get("chat_template"), ensure_ascii=False)
        )
        return known_tags(written, [str(token.get("content")) for token in tokenizer.get("added_tokens") or ()])

    def _read(self, name: str) -> dict[str, Any]:
        file = self.directory / name
        return dict(json.loads(file.read_bytes())) if file.is_file() else {}

    @property
    def model_type(self) -> str | None:
        """What `config.json` calls its architecture; None without that file."""
        found: str | None = self._read("config.json").get("model_type")
        return found


def _depends_on_window(directory: Path) -> bool:
    file = directory / "config.json"
    return file.is_file() and _LONG_ROPE.search(file.read_text(encoding="utf-8")) is not None


def _window(directory: Path, folder: Path) -> int | None:
    """Return the context window of a run, if its model depends on it and its configuration can be read from here."""
    if not _depends_on_window(directory):
        return None
    try:
        config = load_config(folder / CONFIG)
    except (ConfigError, PluginError):  # of modules that are elsewhere
        return None
    return config.context_window if isinstance(config, RunConfig) else None


def trained_model(run: str, output_dir: Path, *, command: str, scores: bool = False) -> TrainedModel:
    """Return what a run has trained.

    Args:
        run: A run's name or folder, or the directory of an exported model.
        command: Who asks, for messages.
        scores: Whether a model that gives scores will do.

    Raises:
        ConfigError: There is no such run, it has exported no model, or its model is no language model.
        DataError: Its configuration cannot be read.
    """
    if (Path(run) / "config.json").is_file():
        directory = Path(run).resolve()
        folder = directory.parent
        if directory.name != MODEL:
            return TrainedModel(directory, directory.name)
    else:
        folder = find_run(run, output_dir, command=command).resolve()
        directory = folder / MODEL
    config = read_config(folder)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{command} {run}: there is no model in {directory}; a run exports it when it ends (checkpoint.export)",
            fix=_how_to_get_a_model(folder),
        )
    if not scores and config.get("pipeline") in _SCORES:
        raise ConfigError(
            f"{command} {run}: the model of pipeline: {config['pipeline']} gives scores, not texts",
            fix="use it as the reward `reward_model` of a run; docs/tutorials/reward_model.md shows how",
        )
    prompts = {source.get("system_prompt") for source in setting_of(config, "data", "sources") or ()}
    return TrainedModel(
        directory=directory,
        name=folder.name,
        template_options=setting_of(config, "model", "template_options") or {},
        system_prompt=prompts.pop() if len(prompts) == 1 else None,
        sampling={key: value for key in SAMPLING if (value := setting_of(config, "rollout", key)) is not None},
        on_cpu=setting_of(config, "resources", "device") == "cpu",
        kv_cache_gib=setting_of(config, "inference", "kv_cache_gib"),
        window=_window(directory, folder),
    )


def _how_to_get_a_model(folder: Path) -> str:
    checkpoints = folder / "checkpoints"
    if step := newest_step(checkpoints):
        checkpoint = checkpoints / checkpoint_name(step)
        return f"export a checkpoint: roll-like export --checkpoint {checkpoint} -o {folder / MODEL}"
    return (
        "it has no checkpoint either: wait until it has ended; or start it again with checkpoint.export: true, and "
        "with checkpoint.every: N to have a checkpoint after every N steps"
    )
