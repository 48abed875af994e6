"""No option that nothing reads: every field of every configuration class is taken of an expression of that class."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from config_reads import Code, Reads, reads
from pydantic import BaseModel
from typing_extensions import get_protocol_members, is_protocol

from roll_like.config.base import PluginConfig
from roll_like.registry import (
    ADVANTAGES,
    CALLBACKS,
    DISTILLATION_LOSSES,
    INFERENCE_ENGINES,
    LOSSES,
    PIPELINES,
    PREFERENCE_LOSSES,
    REWARDS,
    TRACKERS,
)
from roll_like.tools.config import ToolConfig

#: Products that are checked where they are written, and have no further effect; keys that choose a class.
CHECKED_ONLY = {"samples_per_step", "episodes_per_step", "type", "pipeline"}
#: Read by `OfflinePipeline` of a section whose class is a parameter of it, which types do not lead to.
BY_PARAMETER = {"sources", "shuffle", "pairs_per_step"}


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
    for registry in (
        PIPELINES,
        ADVANTAGES,
        LOSSES,
        PREFERENCE_LOSSES,
        DISTILLATION_LOSSES,
        REWARDS,
        INFERENCE_ENGINES,
        TRACKERS,
        CALLBACKS,
    ):
        for name in registry.names():
            if registry.origin(name).startswith("roll_like."):
                plugin = registry.get(name)
                models(plugin if registry is PIPELINES else plugin.Config, seen)
                models(getattr(plugin, "Judge", None) or PluginConfig, seen)
    for tool in parts(ToolConfig):
        models(tool, seen)
    return sorted(seen - {PluginConfig}, key=lambda model: model.__qualname__)


def unread(model: type[BaseModel], fields: set[tuple[type, str]]) -> set[str]:
    has = {*model.model_fields, *dir(model)}
    read = {
        name
        for owner, name in fields
        # what `issubclass` says, which takes long of classes of pydantic
        if (get_protocol_members(owner) <= has if is_protocol(owner) else model in owner.__mro__)
        or (not is_protocol(owner) and owner in model.__mro__)
    }
    return set(model.model_fields) - read - CHECKED_ONLY - BY_PARAMETER


def test_every_field_is_read() -> None:
    fields = reads().fields
    missing = {model.__qualname__: found for model in config_classes() if (found := unread(model, fields))}
    assert missing == {}, "nothing reads these"


class Inner(BaseModel):
    used: int = 1
    unused: int = 2


class Outer(BaseModel):
    inner: tuple[Inner, ...] = ()
    same_name: int = 3


class Other(BaseModel):
    same_name: int = 4
    unused: int = 5


TOY = """
def build(config: Outer, others: Sequence[Other]) -> int:
    total = sum(each.same_name + each.unused for each in others)
    first, *_ = [inner for inner in config.inner if inner.used]
    return total + first.used
"""


def test_a_field_that_only_shares_a_name_with_one_that_is_read_is_found() -> None:
    found = Reads()
    found.follow({"toy": Code(ast.parse(TOY), {"Outer": Outer, "Other": Other, "Sequence": Sequence})})
    assert unread(Inner, found.fields) == {"unused"}
    assert unread(Outer, found.fields) == {"same_name"}
    assert unread(Other, found.fields) == set()
