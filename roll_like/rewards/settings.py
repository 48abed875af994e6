"""Settings of one reward: from a run's file, from `key=value`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll_like.config.load import load_config
from roll_like.config.source import overridden
from roll_like.errors import ConfigError


def settings_of(name: str, config: Path | None, overrides: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return a reward's registered name and its settings.

    Args:
        name: Its registered name, or the `name` that it has in `config`.
        config: A run's file, whose `rewards.use` holds its settings.
        overrides: Settings as `key=value`; values are YAML, dots divide nested keys.

    Raises:
        ConfigError: The file is wrong or names no such reward, or an override is none.
    """
    values = overridden({} if config is None else _from_file(name, config), overrides)
    return str(values.get("type", name)), values


def _from_file(name: str, path: Path) -> dict[str, Any]:
    rewards = getattr(load_config(path), "rewards", None)
    # defaults are left out: some settings are refused where they have no effect
    sections: list[dict[str, Any]] = [
        section.model_dump(mode="json", exclude_unset=True) | {"type": section.type}
        for section in getattr(rewards, "use", ())
    ]
    found = [section for section in sections if section.get("name") == name]
    found = found or [section for section in sections if section["type"] == name]
    if not found:
        names = ", ".join(repr(section.get("name") or section["type"]) for section in sections)
        raise ConfigError(
            f"{path} uses no reward {name!r}; its rewards are {names or 'none'}",
            fix=f"add it to `rewards.use` of {path}, or leave --config out",
        )
    return found[0]
