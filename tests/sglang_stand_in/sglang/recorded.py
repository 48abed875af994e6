"""The recorded signatures, and what is made of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORD: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[2] / "data" / "sglang_signatures.json").read_text(encoding="utf-8")
)


def recorded_class(name: str) -> type:
    """Return a class with the recorded fields; it takes keywords only, and refuses what SGLang's would."""
    fields: dict[str, str | None] = RECORD["classes"][name]

    def init(self: Any, **values: Any) -> None:
        unknown, missing = set(values) - set(fields), {f for f, d in fields.items() if d is None} - set(values)
        if unknown or missing:
            raise TypeError(f"{name} got unknown fields {sorted(unknown)}, and misses {sorted(missing)}")
        vars(self).update({field: default_of(default) for field, default in fields.items()} | values)

    return type(name, (), {"__init__": init, "__repr__": lambda self: f"{name}({vars(self)})"})


def default_of(source: str | None) -> Any:
    """Return a recorded default; ... of one that only SGLang can compute."""
    if source is None:
        return ...
    if source.startswith("field(default="):
        source = source.removeprefix("field(default=").partition(",")[0]
    try:
        return eval(source, {"__builtins__": {}})
    except NameError:
        return ...


def signature_of(name: str) -> inspect.Signature:
    """Return a recorded signature, of a method with `self`."""
    source = f"def function({RECORD['functions'][name]['parameters']}): pass"
    scope: dict[str, Any] = {}
    exec(source, scope)
    return inspect.signature(scope["function"])


def with_signature(name: str) -> Callable[[Any], Any]:
    """Make a method of the stand-in refuse calls that SGLang's method would refuse.

    Raises:
        TypeError: The stand-in's method is a coroutine where SGLang's is none, or the other way round.
    """
    recorded = signature_of(name)

    def decorate(method: Any) -> Any:
        coroutine = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
        if coroutine != RECORD["functions"][name]["asynchronous"]:
            raise TypeError(f"{name} is {'no ' if coroutine else 'a '}coroutine in SGLang")

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = recorded.bind(*args, **kwargs)
            bound.apply_defaults()
            return method(*bound.args, **bound.kwargs)

        return call

    return decorate
