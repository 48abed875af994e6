"""Configurations as people compare them: keys that differ, and nothing in them that is secret."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from roll_like.metrics.trackers import flatten_params

#: What seeds of one experiment may differ in, and what says where a run lies and who is told.
NOT_COMPARED = ("name", "seed", "output_dir", "metrics", "checkpoint")
HIDDEN = "(hidden)"
_SECRET_KEY = re.compile(r"(?:password|secret|token|api_?key|credentials)$", re.IGNORECASE)
_USER_IN_URI = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_secrets(value: Any, key: str = "") -> Any:
    """Return a configuration whose passwords and keys are hidden: a page is passed on.

    >>> without_secrets({"uri": "http://me:pass@host", "api_key": "k", "max_tokens": 5})
    {'uri': 'http://(hidden)@host', 'api_key': '(hidden)', 'max_tokens': 5}
    """
    if isinstance(value, Mapping):
        return {name: without_secrets(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if _SECRET_KEY.search(key) else _USER_IN_URI.sub(HIDDEN, value)


def as_yaml(config: Mapping[str, Any]) -> str:
    """Return a configuration as it stands in its file, secrets hidden; "" for an empty one."""
    return yaml.safe_dump(without_secrets(config), sort_keys=False, allow_unicode=True, width=110) if config else ""


#: What stands for the value of a key that a configuration does not have.
ABSENT = "–"


def differences(configs: Sequence[Mapping[str, Any]], *, leave_out: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the keys whose values are not the same in all configurations, each with its values, `–` for none.

    Secrets that differ are both `(hidden)`.

    Args:
        configs: At least one.
        leave_out: Keys, or sections, that do not count.
    """
    flat = [flatten_params(config) if config else {} for config in configs]
    shown = [flatten_params(without_secrets(config)) if config else {} for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one)
    return {
        key: [one.get(key, ABSENT) for one in shown]
        for key in keys
        if key.partition(".")[0] not in leave_out and len({one.get(key) for one in flat}) > 1
    }
