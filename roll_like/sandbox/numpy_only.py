"""NumPy for programs and their tests, loaded from its own folder: nothing that is installed beside it comes with it.

Only the standard library: the file is loaded in the sandbox's first process, and in the process of an assert test.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from typing import Any

#: Parts that NumPy itself loads only when they are used.
LATER = ("fft", "linalg", "ma", "polynomial", "random")
#: One thread for each build's linear algebra: programs may start few, and a process that has some cannot fork safely.
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def numpy_folder() -> str:
    """Return the folder of this environment's NumPy."""
    spec = importlib.util.find_spec("numpy")
    assert spec is not None, "a dependency of this package"
    assert spec.origin is not None
    return os.path.dirname(os.path.realpath(spec.origin))


def load_numpy(folder: str, parts: Iterable[str] = (), *, strict: bool = False) -> None:
    """Import NumPy from its folder, whatever `sys.path` holds, and some of its parts.

    Args:
        strict: Nothing is close to something: `allclose([], 1.5)`, which says nothing of any number, is False.
    """
    for name in _THREADS:
        os.environ[name] = "1"
    spec = importlib.util.spec_from_file_location(
        "numpy", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["numpy"] = module
    spec.loader.exec_module(module)
    for part in parts:
        importlib.import_module(f"numpy.{part}")
    if strict:
        close, size = module.allclose, module.size

        def allclose(a: Any, b: Any, *arguments: Any, **options: Any) -> bool:
            return bool(close(a, b, *arguments, **options)) and bool(size(a)) == bool(size(b))

        module.allclose = allclose  # type: ignore[attr-defined]
