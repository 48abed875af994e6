"""`make test`: a stage that fails hides no later one, and the end says which failed and what was slow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPORT = '<testsuites><testsuite><testcase classname="tests.{0}" name="test_a" time="{1}"/></testsuite></testsuites>'


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder of programs that only write down how they were called, beside the Python that runs the script."""
    for name in ("ruff", "mypy", "lint-imports", "pytest", "bash"):
        program = tmp_path / name
        program.write_text(
            f"#!{sys.executable}\n"
            "import pathlib, sys\n"
            f"called = {name!r} + ' ' + ' '.join(sys.argv[1:])\n"
            f"with pathlib.Path({str(tmp_path / 'calls')!r}).open('a') as calls: print(called, file=calls)\n"
            "print('said by', called)\n"
            "for word in sys.argv:\n"
            "    if word.startswith('--junitxml='):\n"
            "        kind = sys.argv[1].removeprefix('tests/')\n"
            f"        report = {REPORT!r}.format(kind, {{'unit': 3.25, 'chaos': 40.5}}.get(kind, 1))\n"
            "        pathlib.Path(word.removeprefix('--junitxml=')).write_text(report)\n"
            f"failing = pathlib.Path({str(tmp_path / 'failing')!r}).read_text().split('|')\n"
            "sys.exit(any(called.startswith(start) for start in failing if start))\n"
        )
        program.chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "failing").touch()
    return tmp_path


def run(tools: Path, *arguments: str) -> tuple[int, str, list[str]]:
    done = subprocess.run(
        [str(tools / "python"), str(ROOT / "scripts" / "run_tests.py"), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout, (tools / "calls").read_text().splitlines()


def test_what_fails_hides_nothing_and_is_named_at_the_end(tools: Path) -> None:
    (tools / "failing").write_text("ruff check|mypy|pytest tests/sandbox")
    code, output, calls = run(tools)
    assert code == 1
    for start in (
        "ruff check .",
        "ruff format",
        "mypy",
        "lint-imports",
        "bash scripts/site.sh",
    ):
        assert sum(call.startswith(start) for call in calls) == 1, start
    for start in ("pytest tests/unit tests/oracle", "pytest tests/sandbox -n", "pytest tests/chaos tests/integration"):
        assert sum(call.startswith(start) and "-m not gpu and not slow" in call for call in calls) == 1, start
    assert "said by mypy" in output
    verdicts = re.findall(r"^ +[\d.]+ s  (.*?) +(passed|FAILED|FAILED: .*)$", output, re.MULTILINE)
    assert verdicts == [
        ("lint", "FAILED"),
        ("unit and oracle", "passed"),
        ("sandbox", "FAILED"),
        ("types", "FAILED"),
        ("imports", "passed"),
        ("site", "passed"),
        ("runs", "passed"),
        ("altogether", "FAILED: lint, sandbox, types"),
    ]


def test_the_slowest_tests_of_all_stages_are_listed(tools: Path) -> None:
    code, output, calls = run(tools, "--slow")
    assert code == 0
    assert output.endswith("all passed\n")
    table = output.partition("=== slowest tests\n")[2].splitlines()
    assert [line.split(" s ")[1].strip() for line in table[:2]] == ["tests.chaos::test_a", "tests.unit::test_a"]
    assert table[0].strip().startswith("40.5 s")
    assert sum("-m not gpu --junitxml" in call for call in calls) == 3
