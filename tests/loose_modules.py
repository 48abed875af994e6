"""Python files that belong to no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

#: Where the project's scripts are.
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def load_module(path: Path) -> ModuleType:
    """Run a file as a module that is named after it; who imports it again gets another one."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(spec.name)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
        if before is not None:
            sys.modules[spec.name] = before
    return module
