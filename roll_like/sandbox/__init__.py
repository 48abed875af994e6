"""Evaluation of programs that a model wrote: they run isolated, and statuses are formed outside."""

from roll_like.sandbox.backends import self_test
from roll_like.sandbox.box import SandboxUnavailable
from roll_like.sandbox.compare import Comparison
from roll_like.sandbox.evaluator import CodeEvaluator
from roll_like.sandbox.types import (
    AssertTest,
    CallTest,
    CodeResult,
    Limits,
    StdioTest,
    TestCase,
    TestResult,
    TestStatus,
)

__all__ = [
    "AssertTest",
    "CallTest",
    "CodeEvaluator",
    "CodeResult",
    "Comparison",
    "Limits",
    "SandboxUnavailable",
    "StdioTest",
    "TestCase",
    "TestResult",
    "TestStatus",
    "self_test",
]
