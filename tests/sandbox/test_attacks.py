"""The attack suite: no program passes by anything but solving, and none leaves anything behind."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from attacks import answer_theft
from attacks.case import LIMITS, QUICK, Attack
from attacks.suite import Arena, Host, descendants, host, settled, suite
from local_box import LocalBox

from roll_like.sandbox import CodeEvaluator, TestStatus

pytestmark = pytest.mark.integration

#: By day each attack comes in one of the ways in which programs are judged, in turn.
CASES = [
    pytest.param(
        category,
        at,
        kind,
        id=f"{category}-{attack.name}-{kind}".replace(" ", "_"),
        marks=[] if way == at % len(attack.kinds) else [pytest.mark.slow],
    )
    for category, attacks in suite("", 0).items()
    for at, attack in enumerate(attacks)
    for way, kind in enumerate(attack.kinds)
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host(tmp_path_factory.mktemp("host")) as made:
        yield made


@pytest.fixture(scope="module")
def before() -> int:
    """Processes below this one that other tests left idle."""
    return len(descendants())


@pytest.fixture(scope="module")
def arena(before: int) -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()
    assert asyncio.run(settled(before)) <= before, descendants()


@pytest.fixture(scope="module")
def attacks(target: Host) -> dict[str, list[Attack]]:
    return suite(str(target.canary), target.port)


@pytest.mark.parametrize(("category", "at", "kind"), CASES)
def test_status(
    category: str, at: int, kind: str, attacks: dict[str, list[Attack]], arena: Arena, target: Host
) -> None:
    attack = attacks[category][at]
    result = arena.run(attack, kind)
    assert result.status in attack.statuses, (result, attack.program)
    assert target.harm() is None


def test_the_suite_is_large_and_every_attack_means_to_fail() -> None:
    attacks = suite("", 0)
    controls = attacks.pop("honest")
    assert sum(map(len, attacks.values())) >= 60
    assert len(controls) >= 10
    assert all(TestStatus.PASSED in control.statuses for control in controls)
    for category in attacks.values():
        for attack in category:
            assert not attack.statuses & {TestStatus.PASSED, TestStatus.SANDBOX_ERROR}, attack.name
            assert attack.kinds


def test_no_process_of_an_attack_is_left(arena: Arena, before: int) -> None:
    """After the suite there are as many processes below this one as idle evaluators need, and no more."""
    idle = sorted({LIMITS, QUICK}, key=repr)
    control = suite("", 0)["honest"][0]
    for limits in idle:
        assert arena.run(replace(control, limits=limits), "stdio").status is TestStatus.PASSED
    fresh, with_arena = Arena(), len(descendants())
    try:
        for limits in idle:
            assert fresh.run(replace(control, limits=limits), "stdio").status is TestStatus.PASSED
        needed = len(descendants()) - with_arena
    finally:
        fresh.close()
    left = asyncio.run(settled(before + needed)) - before
    assert 0 < left <= needed, [process.cmdline() for process in descendants()]


def test_no_file_of_an_attack_is_left(target: Host) -> None:
    assert target.harm() is None
    for folder in ("/tmp", "/dev/shm"):
        assert not (Path(folder) / "left").exists()
        assert not (Path(folder) / "breach").exists()


#: Thieves that need a place which the harness below does not have.
_ELSEWHERE = {
    "memory of other processes",  # the harness gives none of its own away
    "memory of its parent by process_vm_readv",
    "a comparison that shows its other side",  # the harness compares nothing
    "an object whose methods get the answer",
    "a class where a function is asked for, with operators of its own",
}
_HARNESS = """
import linecache, os, sys
program, answer, folder = sys.argv[1:4]
os.chdir(folder)
reading, writing = os.pipe()
os.write(writing, (answer + "\\n").encode() * 2)
os.close(writing)
os.dup2(reading, 0)
keep = {"answer": answer, "kept": [answer]}
linecache.cache["x"] = (1, None, [answer], "x")
exec(f"def call(scope, answer):\\n    literal = {answer!r}\\n    return scope['solve'](1)")
scope = {"__name__": "thief"}
exec(compile(program, "thief", "exec"), scope)
json = __import__("json")
json.loads(json.dumps(answer))
sys.audit("roll-like", answer)
print(call(scope, answer))
"""


@pytest.mark.parametrize("name", [attack.name for attack in answer_theft.ATTACKS if attack.name not in _ELSEWHERE])
def test_a_thief_finds_an_answer_that_lies_about(name: str, tmp_path: Path) -> None:
    """Without walls, and with the answer where each looks, the programs do steal it."""
    attack = next(attack for attack in answer_theft.ATTACKS if attack.name == name)
    answer = f"answer-{secrets.token_hex(16)}"
    (tmp_path / "tests.json").write_text(answer)
    command = [sys.executable, "-I", "-c", _HARNESS, attack.program, answer, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"ANSWER": answer}, check=True)
    assert done.stdout.strip() == answer


@pytest.mark.filterwarnings("ignore:unclosed", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["a file of the host", "a file of the host written", "a link to a file of the host"])
def test_the_canary_dies_without_walls(name: str, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    with host(tmp_path / "host") as target:
        attack = next(a for a in suite(str(target.canary), target.port)["escape"] if a.name == name)
        program = attack.program.replace("/tmp/link", str(tmp_path / "link"))
        with CodeEvaluator(backend=LocalBox()) as evaluator:
            result = evaluator.evaluate_sync(program, attack.tests("call"))
        assert result.tests[0].status is TestStatus.PASSED
        assert (target.harm() is not None) == ("written" in name)


@pytest.mark.filterwarnings("ignore:unclosed", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_port_notices_a_connection_without_walls(tmp_path: Path) -> None:
    with host(tmp_path) as target:
        attack = suite(str(target.canary), target.port)["network"][0]
        with CodeEvaluator(backend=LocalBox()) as evaluator:
            assert evaluator.evaluate_sync(attack.program, attack.tests("call")).status is TestStatus.PASSED
        deadline = time.monotonic() + 60
        while target.harm() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "reached the host" in str(target.harm())
