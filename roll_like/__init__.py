"""Reinforcement learning on language models with Ray, vLLM and DeepSpeed.

What most plugins, notebooks and scripts need is imported from here; the rest of the public interface, from the modules
that `docs/reference/` names. `__init__.pyi` lists the names by module, for type checkers, editors and this file, which
imports a name when it is first used: `import roll_like` and a worker process load only what they need.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
#: The module of each public name.
_MODULES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, flags=re.MULTILINE)}

__all__ = sorted(_MODULES)  # noqa: PLE0605 - a list of strings, though computed


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
