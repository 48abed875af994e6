"""What is known of a run, for the card of its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from roll_like.check.findings import is_repo_id
from roll_like.config.load import dump_config
from roll_like.config.run import RunConfig
from roll_like.metrics.summary import CURVES, Summary
from roll_like.models.card import ModelCard
from roll_like.models.load import from_anywhere

#: Keys that decide how a model was trained; of each pipeline, those that it has.
_SETTINGS = (
    "algorithm.advantage.type",
    "algorithm.loss.type",
    "algorithm.kl.use",
    "loss.type",
    "loss.beta",
    "rollout.prompts_per_step",
    "rollout.samples_per_prompt",
    "rollout.groups_per_step",
    "rollout.episodes_per_group",
    "rollout.temperature",
    "samples_per_step",
    "pairs_per_step",
    "training.optimizer.lr",
    "training.lora.rank",
    "training.lora.quantization",
)


def model_card(config: RunConfig, steps: int, summary: Summary | None = None) -> ModelCard:
    """Return what is known of a run, for the directory of its model.

    Args:
        summary: The run's figures, where they are at hand.
    """
    text = dump_config(config)
    values: Mapping[str, Any] = yaml.safe_load(text)
    sources = list(_sources(values, "data"))
    prompts = {source.get("system_prompt") for source in sources}
    path = config.model.path
    base = from_anywhere(path, Path())
    curves = None if summary is None else summary.run_dir / CURVES
    return ModelCard(
        name=config.name if summary is None else str(summary.figures["name"]),
        base_model=path,
        base_id=base if base == path and "/" in base else None,
        pipeline=config.pipeline,
        steps=steps,
        evaluation={} if summary is None else _evaluation(summary),
        evaluated_on=[_label(source) for source in _sources(values, "evaluation")],
        figures={} if summary is None else _rewards(summary),
        settings=_settings(values, sources),
        datasets=[source["path"] for source in sources if is_repo_id(source["path"])],
        system_prompt=prompts.pop() if len(prompts) == 1 else None,
        curves=curves if curves is not None and curves.is_file() else None,
        config_yaml=text,
    )


def _evaluation(summary: Summary) -> dict[str, tuple[float | None, float | None]]:
    figures = summary.figures
    measured = "eval/avg" if figures["eval_loss_after"] is None else "eval/loss"
    before, after = ("eval_before", "eval_after") if measured == "eval/avg" else ("eval_loss_before", "eval_loss_after")
    found: dict[str, tuple[float | None, float | None]] = {measured: (figures[before], figures[after])}
    found |= {name: (old, new) for name, (old, new) in figures["before_after"].items() if name == "eval/accuracy"}
    return {name: pair for name, pair in found.items() if pair != (None, None)}


def _rewards(summary: Summary) -> dict[str, float]:
    figures = summary.figures
    return {name: figures[name] for name in ("reward_first", "reward_last") if figures[name] is not None}


def _settings(values: Mapping[str, Any], sources: list[Mapping[str, Any]]) -> dict[str, str]:
    found = {}
    if sources:
        found["data.sources"] = ", ".join(map(_label, sources))
    if used := setting_of(values, "rewards", "use"):
        found["rewards.use"] = ", ".join(str(reward.get("name") or reward["type"]) for reward in used)
    for key in _SETTINGS:
        value = setting_of(values, *key.split("."))
        if value not in (None, "none"):
            found[key] = str(value)
    return found


def _sources(values: Mapping[str, Any], section: str) -> Iterator[Mapping[str, Any]]:
    yield from setting_of(values, section, "sources") or ()


def _label(source: Mapping[str, Any]) -> str:
    return str(source.get("name") or (source["path"] if is_repo_id(source["path"]) else Path(source["path"]).stem))


def setting_of(values: Mapping[str, Any], *keys: str) -> Any:
    """Return what a nested mapping has at a path of keys; None where it has no such path."""
    value: Any = values
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
