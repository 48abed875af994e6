"""Several runs of one configuration, one after the other: every combination of some values.

roll-like sweep --config run.yaml --over training.optimizer.lr=[1e-6,1e-5] --over seed=[0,1,2]
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from roll_like.errors import ConfigError

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class SweptRun:
    """One run of a sweep.

    Attributes:
        name: Of the run and of its folder.
        overrides: What it changes, its name included.
    """

    name: str
    overrides: tuple[str, ...]


def swept_runs(name: str, over: Sequence[str]) -> list[SweptRun]:
    """Return the runs of a sweep; the values of the last key change fastest.

    >>> [run.name for run in swept_runs("sums", ["training.optimizer.lr=[1e-6, 1e-5]", "seed=[0]"])]
    ['sums-lr-1e-6-seed-0', 'sums-lr-1e-5-seed-0']

    Args:
        over: `key=[value, …]`, in YAML.

    Raises:
        ConfigError: One of them is no list of values, a key is given twice, or two runs would have one name.
    """
    axes = [_axis(text) for text in over]
    keys = [key for key, _ in axes]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ConfigError(f"--over names {twice!r} twice", fix="give all of its values in one list")
    runs = []
    for values in itertools.product(*(values for _, values in axes)):
        parts = [f"{key.rpartition('.')[2]}-{_in_a_name(value)}" for key, value in zip(keys, values, strict=True)]
        of_run = "-".join([name, *parts])
        changes = (f"{key}={value}" for key, value in zip(keys, values, strict=True))
        runs.append(SweptRun(of_run, (*changes, f"name={of_run}")))
    names = [run.name for run in runs]
    alike = next((each for each in names if names.count(each) > 1), None)
    if alike is not None:
        raise ConfigError(f"two runs of the sweep would be called {alike!r}", fix="give each value once in --over")
    return runs


def _axis(text: str) -> tuple[str, list[str]]:
    """Return a key and its values, each as an override writes it."""
    key, _, listed = text.partition("=")
    try:
        values = yaml.safe_load(listed)
    except yaml.YAMLError:
        values = None
    if not key or not isinstance(values, list) or not values:
        raise ConfigError(
            f"--over {text}: expected key=[value, …]", fix="write such as --over training.optimizer.lr=[1e-6,1e-5]"
        )
    if key == "name":
        raise ConfigError("--over name: the runs of a sweep are named by what they change", fix="leave it out")
    return key, [_written(value) for value in values]


def _written(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").rstrip("\n")


def _in_a_name(value: str) -> str:
    return _NOT_IN_NAMES.sub("_", value.rpartition("/")[2]).strip("_") or "_"
