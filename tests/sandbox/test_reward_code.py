"""The code reward with the sandbox behind it: the shapes of tests that data sets have, and answers out to be paid."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from reward_support import completion, outcomes

from roll_like import RewardResult, check_reward
from roll_like.builtin.rewards.code import Code, CodeConfig
from roll_like.errors import RewardError, SandboxError

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
SOLUTION = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
STDIO = "a, b = map(int, input().split())\nprint(a + b)\n"
HUMAN_EVAL = "def check(candidate):\n    assert candidate(3, 4) == 7\n    assert candidate(-1, 1) == 0\n"

ROWS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("calls", {"tests": [{"args": [3, 4], "expected": 7}], "entry_point": "add"}, [ADD, SOLUTION]),
    ("HumanEval", {"tests": HUMAN_EVAL, "entry_point": "add"}, [ADD]),
    ("MBPP", {"tests": ["assert add(3, 4) == 7", "assert add(1, 1) == 2"]}, [ADD]),
    ("APPS stdin", {"tests": '{"inputs": ["3 4\\n"], "outputs": ["7\\n"]}'}, [STDIO]),
    ("APPS calls", {"tests": {"inputs": [[3, 4]], "outputs": [7], "fn_name": "add"}}, [ADD, SOLUTION]),
    (
        "LiveCodeBench",
        {"tests": [{"input": "3\n4", "output": "7", "testtype": "functional"}], "entry_point": "add"},
        [ADD, SOLUTION],
    ),
    ("pairs", {"tests": [{"input": "3 4\n", "output": "7"}, {"input": "1 1\n", "output": "2"}]}, [STDIO]),
]


@pytest.fixture(scope="module")
def reward() -> Iterator[Code]:
    made = Code(CodeConfig(wall_seconds=3))
    made.start()
    yield made
    made.close()


def fenced(source: str) -> str:
    return f"Here it is:\n```python\n{source}```\nDone."


@pytest.mark.parametrize(("metadata", "programs"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_gold_1_wrong_0_empty_0_hostile_0(reward: Code, metadata: dict[str, Any], programs: list[str]) -> None:
    hostile = [
        "raise SystemExit(0)\n",
        "import os\nos._exit(0)\n",
        "print('7')\nprint('2')\n",
        "class Same:\n    def __eq__(self, other): return True\ndef add(a, b): return Same()\n",
        "import sys\nadd = lambda a, b: sys._getframe(1).f_locals.get('expected')\n",
    ]
    texts = [*map(fenced, programs), fenced(WRONG), "", "All tests passed.", *map(fenced, hostile)]
    found = outcomes(reward, [completion(text, **metadata) for text in texts])
    values = [outcome.value if isinstance(outcome, RewardResult) else outcome for outcome in found]
    assert values == [1.0] * len(programs) + [0.0] * (len(texts) - len(programs))


def test_a_share_of_the_tests() -> None:
    reward = Code(CodeConfig(reward="fraction"))
    try:
        tests = [{"args": [a, 0], "expected": a} for a in range(3)] + [{"args": [3, 4], "expected": 7}]
        (status,) = outcomes(reward, [completion(fenced(WRONG), tests=tests, entry_point="add")])
        assert isinstance(status, RewardResult)
        assert (status.value, status.details["status/wrong_answer"]) == (0.75, 1.0)
    finally:
        reward.close()


def test_setup_is_in_scope(reward: Code) -> None:
    own = Code(CodeConfig(setup_field="setup"))
    program = fenced("def area(r: float) -> List[float]:\n    return [math.floor(math.pi * r * r)]\n")
    row = {"tests": [{"args": [2], "expected": [12]}], "entry_point": "area"}
    try:
        (status,) = outcomes(own, [completion(program, **row, setup="import math\nfrom typing import List")])
        assert isinstance(status, RewardResult)
        assert status.value == 1.0
    finally:
        own.close()
    (status,) = outcomes(reward, [completion(program, **row)])
    assert isinstance(status, RewardResult)
    assert status.value == 0.0


def test_a_time_limit_is_a_judgement_and_a_sandbox_that_is_not_there_is_none() -> None:
    row = {"tests": [{"args": [1, 2], "expected": 3}], "entry_point": "add"}
    slow = Code(CodeConfig(wall_seconds=0.5))
    try:
        (status,) = outcomes(slow, [completion(fenced("def add(a, b):\n    while True: pass\n"), **row)])
        assert isinstance(status, RewardResult)
        assert (status.value, status.details["status/timeout"]) == (0.0, 1.0)
    finally:
        slow.close()
    with pytest.raises(SandboxError):
        Code(CodeConfig(backend="remote:http://127.0.0.1:9")).start()


def test_programs_that_never_end_are_scored_within_the_time_of_a_group() -> None:
    tests = [{"input": f"{number}\n", "output": "0\n"} for number in range(20)]
    program = "import time\nwhile True: time.sleep(60)\n"
    endless = [completion(fenced(program), tests=tests) for _ in range(4)]
    for settings, limit in ({"reward": "binary"}, 25.0), ({"reward": "fraction", "total_seconds": 2.0}, 30.0):
        reward = Code(CodeConfig.model_validate({"wall_seconds": 1.0, **settings}))
        reward.start()
        try:
            began = time.monotonic()
            found = outcomes(reward, endless)
            assert time.monotonic() - began < limit  # twenty tests of four programs would take forty seconds
            assert all(isinstance(one, RewardResult) and one.details["status/timeout"] for one in found)
        finally:
            reward.close()


def test_a_row_that_cannot_be_carried_into_the_sandbox_is_a_failure(reward: Code) -> None:
    tests = [{"args": [1], "expected": 1}]
    (outcome,) = outcomes(reward, [completion(fenced(ADD), tests=tests, entry_point="no name")])
    assert isinstance(outcome, RewardError)


def test_its_own_cases_are_not_suspicious() -> None:
    report = check_reward("code")
    assert report.suspicious == [], str(report)
