"""Runs in a process of their own, of which the engine is killed, and later the driver; what weight syncs sent."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from faults import at, kill
from run_config import read_lines, start_run

SYNCS = "syncs.jsonl"
PROGRAM = """
import sys

sys.path.append({tests!r})
from dying_runs import run

run(engine={engine}, driver={driver})
"""


def run_and_die(config: Path, *, engine: int, driver: int) -> str:
    """Start a run, kill its engine as a step begins to sample, and its driver as another is logged; return its output.

    Args:
        config: The run's file; `SYNCS` comes to be beside it.
        engine: The step in which the engine is killed. It has been replaced before the driver dies.
        driver: The step that is not logged any more.
    """
    tests = str(Path(__file__).parent)
    (config.parent / "dying_run.py").write_text(PROGRAM.format(tests=tests, engine=engine, driver=driver))
    process = start_run(config, program="dying_run", start_new_session=True)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, output
    assert "engine 0 was replaced in" in output, output
    return output


def run(*, engine: int, driver: int) -> None:
    """Be that run."""
    from roll_like.cli import main
    from roll_like.policy_gradient.workers import Workers
    from roll_like.run.state import RunState

    patch = pytest.MonkeyPatch()
    record_syncs(patch, Path(SYNCS))
    at(patch, Workers, "generating", engine, lambda workers: kill(workers.inference.cluster._actors[0]))
    at(patch, RunState, "log", driver, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    sys.exit(main())


def record_syncs(patch: pytest.MonkeyPatch, file: Path) -> None:
    """Append the report of each weight sync to a file, with the engines, and how many tensors they hold in 8 bits."""
    from roll_like.inference.weight_transfer import sync

    push, compare, quantized = sync.WeightSync.push, sync.compare_fingerprints, [0]

    def compared(sent: Any, held: Any, *others: Any) -> Any:
        quantized[0] = len(held.quantized)
        return compare(sent, held, *others)

    def pushed(weights: Any, *arguments: Any, again: bool = False) -> Any:
        report = push(weights, *arguments, again=again)
        line = {**asdict(report), "engines": weights._engines.membership, "quantized": quantized[0]}
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        return report

    patch.setattr(sync, "compare_fingerprints", compared)
    patch.setattr(sync.WeightSync, "push", pushed)


def syncs_of(directory: Path) -> list[dict[str, Any]]:
    """Return what was recorded, in order."""
    return read_lines(directory / SYNCS)
