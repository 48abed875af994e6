"""The benchmarks start and say what they take; what they share measures what it should."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests_support import policy_sample

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Imports a file of `benchmarks/`, and forgets it afterwards: their names are common ones."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def import_fresh(name: str) -> ModuleType:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    yield import_fresh
    for name in (*SCRIPTS, "common"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_says_what_it_measures_and_how_it_is_run(load, name: str) -> None:
    script = load(name)
    arguments = script.parser()
    assert f"python benchmarks/{name}.py" in script.__doc__
    assert script.__doc__.splitlines()[0] in arguments.format_help()
    arguments.parse_args([])
    with pytest.raises(SystemExit):
        arguments.parse_args(["--no-such-option"])


def test_every_benchmark_is_on_the_page_of_figures() -> None:
    page = (FOLDER.parent / "docs" / "benchmarks.md").read_text()
    assert set(SCRIPTS) <= set(re.findall(r"benchmarks/(\w+)\.py", page))


def test_sides_take_turns_and_the_median_counts(load, capsys: pytest.CaptureFixture[str]) -> None:
    common = load("common")
    order: list[str] = []
    times = {"a": iter([9.0, 1.0, 5.0, 2.0]), "b": iter([9.0, 4.0, 4.0, 8.0])}

    def side(name: str):
        def work() -> float:
            order.append(name)
            return next(times[name])

        return work

    medians = common.interleaved({"a": side("a"), "b": side("b")}, repetitions=3)
    assert medians == {"a": 2.0, "b": 4.0}
    assert "".join(order) == "abababab"
    assert capsys.readouterr().out.count("not counted") == 2


def test_fewer_than_three_repetitions_are_refused(load) -> None:
    arguments = argparse.ArgumentParser()
    load("common").add_common_arguments(arguments)
    assert arguments.parse_args(["--repetitions", "3"]).repetitions == 3
    with pytest.raises(SystemExit):
        arguments.parse_args(["--repetitions", "2"])


def test_the_last_line_is_one_json_object(load, capsys: pytest.CaptureFixture[str]) -> None:
    load("common").finish({"benchmark": "x", "ratio": 1.23456789})
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["benchmark"], figures["ratio"]) == ("x", 1.2346)
    assert figures["cores"] > 0


def test_both_sides_have_our_environment_unless_told_otherwise(load) -> None:
    common = load("common")
    assert common.environment_of(3, plain=True)["OMP_NUM_THREADS"] == "3"
    assert "GLIBC_TUNABLES" not in common.environment_of(3, plain=True)
    ours = common.environment_of(3, plain=False)
    assert (ours["OMP_NUM_THREADS"], "GLIBC_TUNABLES" in ours) == ("3", True)


PEER = """
import os, sys
sys.path.insert(0, {folder!r})
from common import serve

def answer(message):
    if message.get("die"):
        sys.exit(7)
    return [message["number"] * 2, sys.argv[4], os.environ["MINE"]]

serve(int(sys.argv[2]), int(sys.argv[3]), answer)
"""


def test_a_peer_answers_until_it_is_closed_and_says_when_it_dies(load, tmp_path: Path) -> None:
    common = load("common")
    script = tmp_path / "doubles.py"
    script.write_text(PEER.format(folder=str(FOLDER)))
    with common.Peer(script, ["argument"], {"MINE": "yes"}) as peer:
        assert peer.call(number=4) == [8, "argument", "yes"]
        assert peer.call(number=5)[0] == 10
    with (
        pytest.raises(RuntimeError, match="doubles ended with exit code 7"),
        common.Peer(script, ["argument"], {"MINE": "yes"}) as peer,
    ):
        peer.call(die=True)


def test_the_bare_loop_keeps_to_its_token_budget(load) -> None:
    samples = [policy_sample(prompt=prompt, response=4) for prompt in (30, 20, 9, 8, 2, 1)]
    batches = load("training").cut(samples, 64)
    assert [len(batch) for batch in batches] == [1, 2, 3]
    assert [sample for batch in batches for sample in batch] == samples
