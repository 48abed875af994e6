"""No option that nothing reads: every field of every configuration class is looked at outside of such classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.config.base import PluginConfig
from roll_like.registry import ADVANTAGES, DISTILLATION_LOSSES, LOSSES, PREFERENCE_LOSSES, REWARDS, TRACKERS

ROOT = Path(__file__).resolve().parents[2]
CODE = [
    file for folder in ("roll_like", "pipelines", "rewards", "envs") for file in sorted((ROOT / folder).rglob("*.py"))
]
#: Options that only their own section reads: checked there, and without a further effect.
CHECKED_ONLY = {"samples_per_step", "episodes_per_step"}


def attributes(tree: ast.AST) -> Iterator[str]:
    """Every attribute that is read, except in validators, which are methods of a configuration class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value
        yield from attributes(node)


@lru_cache(maxsize=1)
def names_that_are_read() -> set[str]:
    return {name for file in CODE for name in attributes(ast.parse(file.read_text(encoding="utf-8")))}


def models(model: type[BaseModel], seen: set[type[BaseModel]]) -> None:
    if model in seen:
        return
    seen.add(model)
    for field in model.model_fields.values():
        for part in parts(field.annotation):
            models(part, seen)


def parts(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from parts(argument)


def config_classes() -> list[type[BaseModel]]:
    seen: set[type[BaseModel]] = set()
    for config in (
        RLVRConfig,
        AgenticConfig,
        SFTConfig,
        DPOConfig,
        DistillConfig,
        OnPolicyDistillConfig,
        RewardModelRunConfig,
    ):
        models(config, seen)
    for registry in (ADVANTAGES, LOSSES, PREFERENCE_LOSSES, DISTILLATION_LOSSES, REWARDS, TRACKERS):
        for name in registry.names():
            if registry.origin(name).startswith("roll_like."):
                models(registry.get(name).Config, seen)
    return sorted(seen - {PluginConfig}, key=lambda model: model.__qualname__)


@pytest.mark.parametrize("model", config_classes(), ids=lambda model: model.__qualname__)
def test_every_field_is_read(model: type[BaseModel]) -> None:
    unread = set(model.model_fields) - names_that_are_read() - CHECKED_ONLY - {"type", "pipeline"}
    assert not unread, f"nothing reads {', '.join(sorted(unread))} of {model.__qualname__}"
