"""Packages that only some environments need."""

from __future__ import annotations

import importlib
from types import ModuleType

from roll_like.errors import EnvError


def need(module: str, package: str, env_id: str, install: str | None = None) -> ModuleType:
    """Return an imported module of an optional package.

    Args:
        module: What to import.
        package: Its name for pip, with the version that is known to work.
        env_id: Which environment needs it.
        install: How it is installed, where pip alone does not do that.

    Raises:
        EnvError: It, or something that it needs, is not installed; the message holds the pip command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvError(
            f"environment {env_id} needs the package {package}, which cannot be imported: {error}",
            fix=install or f"pip install '{package}', or pip install 'roll-like[envs]' for all optional environments",
        ) from error
