"""Every model that a run needs, and where each comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roll_like.config.inference import JudgeConfig
from roll_like.config.model import ModelConfig
from roll_like.config.run import RunConfig
from roll_like.models.load import MODEL, is_hub_id, resolve_model

#: The key that names a run's judge.
JUDGE = "judge.path"


@dataclass(frozen=True, slots=True)
class RunModel:
    """A model that a run loads.

    Attributes:
        key: What names it: `model.path`, `teachers.large.path`.
        section: It as a `model` section.
        loads_itself: Whether a reward loads it, in whatever form that takes.
    """

    key: str
    section: ModelConfig
    loads_itself: bool = False


def models_of(config: RunConfig) -> Iterator[RunModel]:
    """Yield the models of a run: the trained one first."""
    any_config: Any = config
    yield RunModel(MODEL, config.model)
    of_roles = {"critic": getattr(config, "critic", None), **config.frozen}
    for role, section in of_roles.items():
        path = getattr(section, "path", None)
        if path is not None:
            key = f"teachers.{role.removeprefix('teacher ')}.path" if role.startswith("teacher ") else f"{role}.path"
            yield RunModel(key, config.model.at(path).model_copy(update={"tokenizer": None}))
    if getattr(any_config, "replay", None) is not None:
        return  # nothing is scored
    judge = getattr(any_config, "judge", None)
    if judge is not None:
        yield RunModel(JUDGE, judge_model(config, judge))
    for index, reward in enumerate(getattr(getattr(any_config, "rewards", None), "use", ())):
        path = getattr(reward, "model_path", None)
        if path is not None:
            yield RunModel(f"rewards.use.{index}.path", ModelConfig(path=path), loads_itself=True)


def judge_model(config: RunConfig, judge: JudgeConfig) -> ModelConfig:
    """Return the `model` section of a run's judge."""
    return ModelConfig(path=judge.path, dtype=judge.dtype, cache_dir=config.model.cache_dir)


def download_models(config: RunConfig) -> None:
    """Have every model of a run on this machine, before anything is started.

    Raises:
        ConfigError: One cannot be had; names its key.
    """
    for each in models_of(config):
        tokenizer = each.section.tokenizer
        wanted = is_hub_id(each.section.path) or (tokenizer is not None and is_hub_id(tokenizer))
        if wanted and not each.loads_itself:
            resolve_model(each.section, key=each.key)
