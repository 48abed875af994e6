"""Runs every stage of `make test` to its end, then says what failed, how long each stage took, and the slowest tests.

A stage that fails does not hide the later ones. The exit code is 0 when all passed.

    python scripts/run_tests.py [--slow]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# what one of the many processes has compiled, the others read
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
BIN = Path(sys.executable).parent
SLOWEST = 20
# a process a core
SIDE_BY_SIDE = ("-n", "logical", "--maxprocesses", "4")
# a file's tests share fixtures; in the order given, the longest files do not come last
TWO_WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")


@dataclass(frozen=True)
class Stage:
    """What is run, in turn; it fails when one of its commands does."""

    name: str
    commands: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Result:
    """How a stage ended, how many seconds it took, and what it printed if that was kept."""

    stage: Stage
    passed: bool
    seconds: float
    output: str


LINT = Stage("lint", [("ruff", "check", "."), ("ruff", "format", "--check", ".")])
TYPES = Stage("types", [("mypy",)])
IMPORTS = Stage("imports", [("lint-imports",)])
SITE = Stage("site", [("bash", "scripts/site.sh")])


def unit(marked: str) -> Stage:
    """Return the tests without Ray that a pytest mark expression selects."""
    folders = ("tests/unit", "tests/oracle")
    return Stage("unit and oracle", [("pytest", *folders, *SIDE_BY_SIDE, "--dist", "worksteal", "-m", marked)])


def sandbox(marked: str) -> Stage:
    """Return the tests of the sandbox that a pytest mark expression selects; a file's tests share boxes."""
    return Stage("sandbox", [("pytest", "tests/sandbox", *SIDE_BY_SIDE, "--dist", "loadfile", "-m", marked)])


def runs(marked: str) -> Stage:
    """Return the tests of whole runs and of engines: each of two test workers has one Ray for all of its tests."""
    return Stage("runs", [("pytest", "tests/chaos", "tests/integration", *TWO_WORKERS, "-m", marked)])


def run(stage: Stage, reports: Path, *, keep_output: bool = False) -> Result:
    """Run every command of a stage, whatever became of the one before."""
    if not keep_output:
        print(f"\n=== {stage.name}", flush=True)
    started, passed, output = time.monotonic(), True, ""
    for command in stage.commands:
        report = [f"--junitxml={reports / stage.name}.xml"] if command[0] == "pytest" else []
        done = subprocess.run(
            [
                shutil.which(command[0], path=f"{BIN}{os.pathsep}{os.environ['PATH']}") or command[0],
                *command[1:],
                *report,
            ],
            cwd=ROOT,
            env=ENVIRONMENT,
            check=False,
            text=True,
            stdout=subprocess.PIPE if keep_output else None,
            stderr=subprocess.STDOUT if keep_output else None,
        )
        passed = passed and done.returncode == 0
        output += done.stdout or ""
    return Result(stage, passed, time.monotonic() - started, output)


def run_all(marked: str, reports: Path) -> list[Result]:
    """Run every stage; what mostly waits, or takes one core, beside the unit tests."""
    results = [run(LINT, reports)]
    with ThreadPoolExecutor(1) as executor:
        aside = [
            executor.submit(run, each, reports, keep_output=True) for each in (sandbox(marked), TYPES, IMPORTS, SITE)
        ]
        results.append(run(unit(marked), reports))
        for finished in aside:
            results.append(finished.result())
            print(f"\n=== {results[-1].stage.name}\n{results[-1].output}", end="", flush=True)
    return [*results, run(runs(marked), reports)]


def slowest(reports: Path) -> list[tuple[float, str]]:
    """Return seconds and names of the slowest tests of all stages; a shared fixture counts with its first test."""
    cases = [case for report in reports.glob("*.xml") for case in ET.parse(report).iter("testcase")]
    timed = [(float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in cases]
    return sorted(timed, reverse=True)[:SLOWEST]


def summary(results: Sequence[Result], tests: Sequence[tuple[float, str]], seconds: float) -> str:
    """Return the tables that are printed at the end.

    >>> print(summary([Result(LINT, True, 2.0, "")], [(61.0, "tests.unit.test_a::test_b")], 75.0))
    <BLANKLINE>
    === slowest tests
       61.0 s  tests.unit.test_a::test_b
    <BLANKLINE>
    === stages
        2.0 s  lint             passed
       75.0 s  altogether       all passed
    """
    failed = [result.stage.name for result in results if not result.passed]
    lines = ["", "=== slowest tests"]
    lines += [f"{spent:7.1f} s  {name}" for spent, name in tests]
    lines += ["", "=== stages"]
    lines += [f"{r.seconds:7.1f} s  {r.stage.name:15}  {'passed' if r.passed else 'FAILED'}" for r in results]
    lines += [f"{seconds:7.1f} s  {'altogether':15}  {'FAILED: ' + ', '.join(failed) if failed else 'all passed'}"]
    return "\n".join(lines)


def main() -> int:
    """Run the stages and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--slow", action="store_true", help="also the tests that are marked slow")
    marked = "not gpu" if parser.parse_args().slow else "not gpu and not slow"
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as reports:
        results = run_all(marked, Path(reports))
        print(summary(results, slowest(Path(reports)), time.monotonic() - started))
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
