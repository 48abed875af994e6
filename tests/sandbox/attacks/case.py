"""What an attack is: a program, what is asked of it, and the statuses that say it failed.

Every attack is written so that `passed` means a breach: either the expected value is a secret that no program
can compute, or it is the word that the program gives only where the forbidden thing worked.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from roll_like.sandbox import AssertTest, CallTest, Limits, StdioTest, TestCase, TestStatus

#: Small, so that a flood ends soon; large enough for an honest program.
LIMITS = Limits(
    wall_seconds=3.0,
    cpu_seconds=2.0,
    memory_bytes=128 << 20,
    output_bytes=64 << 10,
    processes=8,
    file_bytes=4 << 20,
    tmp_bytes=8 << 20,
)
QUICK = Limits(
    wall_seconds=0.8,
    cpu_seconds=0.6,
    memory_bytes=128 << 20,
    output_bytes=64 << 10,
    processes=8,
    file_bytes=4 << 20,
    tmp_bytes=8 << 20,
)

WRONG = frozenset({TestStatus.WRONG_ANSWER})
RAISED = frozenset({TestStatus.RUNTIME_ERROR})
WRONG_OR_RAISED = WRONG | RAISED
TIMEOUT = frozenset({TestStatus.TIMEOUT})
MEMORY = frozenset({TestStatus.MEMORY_LIMIT})
OUTPUT = frozenset({TestStatus.OUTPUT_LIMIT})
PASSED = frozenset({TestStatus.PASSED})

ALL = ("stdio", "call", "assert")

#: What a program answers where the forbidden thing worked.
OPEN = "OPEN"

_MAIN = "\n\nif __name__ == '__main__':\n    print(solve(int(input())))\n"


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One program.

    Attributes:
        name: A few words.
        program: Its source; it defines `solve`, unless it means not to.
        statuses: Those that may come of it; `passed` only for honest controls.
        kinds: The kinds of tests that it is put to.
        expected: What `solve(1)` would have to give; `None` for a fresh secret.
        limits: What it may use.
        before: A program that runs first, to leave something behind.
        main: Whether a line that prints `solve(int(input()))` is added for `stdio`.
    """

    name: str
    program: str
    statuses: frozenset[TestStatus]
    kinds: tuple[str, ...] = ALL
    expected: object = None
    limits: Limits = field(default=LIMITS)
    before: str | None = None
    main: bool = True

    def source(self, kind: str) -> str:
        """The program for one kind of test."""
        return self.program + _MAIN if kind == "stdio" and self.main else self.program

    def tests(self, kind: str) -> list[TestCase]:
        """The tests of one kind: two calls, so that the first may prepare the second."""
        expected = f"answer-{secrets.token_hex(16)}" if self.expected is None else self.expected
        if kind == "stdio":
            return [StdioTest("1\n", f"{expected}\n")]
        if kind == "call":
            return [CallTest("solve", (1,), expected=expected), CallTest("solve", (2,), expected=expected)]
        return [AssertTest(f"answer = {expected!r}\nassert solve(1) == answer\nassert solve(2) == answer")]
