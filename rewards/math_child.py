"""The process that compares mathematical answers. Run as a script by `rewards.child_pool`.

It reads `(gold, response, boxed)` from the pipe whose file descriptor is its first argument. It writes
None once, when it is ready, and `(gold_parsed, answer, equal)` for each request: `answer` is the response's
answer as text, empty where it has none. `response` is None when only the gold answer is to be parsed. It ends
when the pipe is closed, and its own alarm kills it if the pool is gone.
"""

from __future__ import annotations

import logging
import re
import resource
import signal
import sys
from fractions import Fraction
from multiprocessing.connection import Connection
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_PLAIN_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(?:\.\d+)?\s*%?")
# GSM8K's mark of a final answer; `#### 1. Introduction` and `#### Step 2` are Markdown headings
_MARKED = re.compile(r"^[ \t]*####[ \t]*(?!\d+[.)][ \t]+[A-Za-z])([-+$\\(\[{.\d].*)$", re.MULTILINE)
_DECIMAL = re.compile(r"\d+\.\d+(?:e[-+]?\d{1,3})?")
_ONLY_PROSE = re.compile(r"(?:[A-Za-z]{2,}[\s.,'-]*)+")


def parse_gold(answer: str) -> list[Any]:
    """Return the expressions that a reference answer stands for; none if it is no mathematics."""
    marked = _MARKED.findall(answer)
    text = (marked[-1] if marked else answer).strip()
    if "$" in text or "\\boxed" in text or "\\[" in text or "\\(" in text or _PLAIN_NUMBER.fullmatch(text):
        return _expressions(text)
    # in math mode `yes` would be the product y·e·s
    return [] if not text or _ONLY_PROSE.fullmatch(text) else _expressions(f"${text}$")


def compare(gold: str, response: str | None, boxed: bool) -> tuple[bool, str, bool]:
    """Return whether the gold answer is mathematics, the response's answer, and whether they are equal.

    Equal answers are equal texts where sympy writes them alike (1/2 and 0.5, x+1 and 1+x). All that equal the gold
    answer have its text, so that right answers are one, as the reward sees them; a wrong one may have several texts.
    """
    expected = parse_gold(gold)
    if response is None or not expected:
        return bool(expected), "", False
    found = _boxed(response) if boxed else _final(response)
    if not found:
        return True, "", False
    equal = bool(verify(expected, found, timeout_seconds=None))
    return True, _text(expected if equal else found), equal


def _text(found: list[Any]) -> str:
    """Return the first expression as text, its decimals as fractions."""
    first = next(item for item in found if not isinstance(item, str))
    return _DECIMAL.sub(lambda match: str(Fraction(match[0])), str(first))


def _expressions(text: str, *targets: LatexExtractionConfig) -> list[Any]:
    default = (LatexExtractionConfig(), ExprExtractionConfig())
    found: list[Any] = parse(text, extraction_config=targets or default, parsing_timeout=None)
    # a list of nothing but strings is text that looked like mathematics and could not be parsed
    return found if any(not isinstance(item, str) for item in found) else []


def _final(text: str) -> list[Any]:
    r"""Return the answer in `\boxed{…}`, or after `####`, or what math-verify takes for the last one."""
    marked = _MARKED.findall(text)
    if marked and "\\boxed" not in text and (found := _expressions(marked[-1])):
        return found
    return _expressions(text)


def _boxed(text: str) -> list[Any]:
    if "\\boxed" not in text:
        return []
    return _expressions(text, LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False))


def serve(connection: Connection, *, limit_seconds: float, memory_bytes: int) -> None:
    """Answer requests until the other side closes the pipe.

    Args:
        connection: Pipe to the pool.
        limit_seconds: After so long one request ends the process: the pool would have killed it before.
        memory_bytes: Address space limit, so that a tower of powers cannot exhaust the machine.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard))
    # the pool decides when to stop; a terminal's Ctrl-C reaches the whole process group
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection.send(None)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, limit_seconds)
        answer = compare(*request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), limit_seconds=float(sys.argv[2]), memory_bytes=int(sys.argv[3]))
