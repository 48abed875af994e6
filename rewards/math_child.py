"""The process that compares mathematical answers. Run as a script by `rewards.child_pool`.

It reads `(reference, response, boxed, tolerance, compare)` or a `SameAnswer` from the pipe whose file descriptor is its
first argument. It writes None once, when it is ready, and for each request a `Verdict` or a `GivenAnswer`,
or a `RuntimeError` where sympy raised.
`response` is None when only the reference answer is to be read. It ends when the pipe is closed, and its own alarm
kills it if the pool is gone.
"""

from __future__ import annotations

import logging
import resource
import signal
import sys
from multiprocessing.connection import Connection

from roll_like.builtin.rewards.mathematics import GivenAnswer, SameAnswer, Verdict
from roll_like.builtin.rewards.mathematics.grader import grade, same_answer
from roll_like.errors import FOREIGN_ERRORS, describe_error


def answer_requests(connection: Connection, *, limit_seconds: float, memory_bytes: int) -> None:
    """Answer requests until the other side closes the pipe.

    Args:
        limit_seconds: After so long one request ends the process: the pool would have killed it before.
        memory_bytes: Address space limit, so that a tower of powers cannot exhaust the machine.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # exact values of factorials have more digits than Python prints by default; the time-out bounds them
    sys.set_int_max_str_digits(0)
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
        answer: Verdict | GivenAnswer | RuntimeError
        try:
            answer = same_answer(request) if isinstance(request, SameAnswer) else grade(*request)
        except FOREIGN_ERRORS as error:  # sympy's; the pool's owner makes a failure of it
            answer = RuntimeError(describe_error(error))
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(answer)


if __name__ == "__main__":
    answer_requests(Connection(int(sys.argv[1])), limit_seconds=float(sys.argv[2]), memory_bytes=int(sys.argv[3]))
