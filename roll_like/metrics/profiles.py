"""Profiles of a run's steps on disk, and how one of the next step is asked for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from roll_like.errors import ConfigError
from roll_like.metrics import files
from roll_like.metrics.runs import is_running


def profile_stem(run_dir: Path, step: int) -> Path:
    """Return where a step's profile lies, without the ends of its files."""
    return run_dir / files.PROFILE / f"step_{step:06d}"


def read_profiles(run_dir: Path) -> list[dict[str, Any]]:
    """Return what the report shows of each profiled step, in order.

    Raises:
        ValueError: A file is damaged; names it.
    """
    paths = sorted((run_dir / files.PROFILE).glob("step_*.json"))
    return [record for path in paths for record in files.read_jsonl(path)]


def request_profile(run_dir: Path, *, poll_seconds: float = 0.5) -> dict[str, Any]:
    """Have a run profile its next step; wait for that, and return what the report shows of it.

    Raises:
        ConfigError: The run does not go on, ends before its next step is over, or its folder cannot be written.
    """
    fix = "set `profile: {steps: [5]}` in its configuration to profile a step of a run that is to start"
    if not is_running(run_dir):
        raise ConfigError(f"{run_dir} has no step to profile: the run does not go on", fix=fix)
    known = {profile["step"] for profile in read_profiles(run_dir)}
    request = run_dir / files.PROFILE / files.PROFILE_REQUEST
    try:
        request.parent.mkdir(exist_ok=True)
        request.touch()
    except OSError as error:
        raise ConfigError(f"{request} cannot be written: {error.strerror or error}", fix="ask as its user") from error
    try:
        while True:
            going_on = is_running(run_dir)
            found = [profile for profile in read_profiles(run_dir) if profile["step"] not in known]
            if found:
                return found[-1]
            if not going_on:
                raise ConfigError(f"{run_dir} ended before a step was profiled", fix=fix)
            time.sleep(poll_seconds)
    finally:
        request.unlink(missing_ok=True)
