"""All attacks by category, and one run of one of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from attacks import answer_theft, comparison, escape, forgery, honest, resources
from attacks.case import Attack

from roll_like.sandbox import CodeEvaluator, CodeResult, StdioTest, TestStatus

CANARY = "nothing inside may read or write this\n"


@dataclass(frozen=True)
class Host:
    """What must stay as it is: a file, and a port to which nobody connects."""

    canary: Path
    port: int
    connections: list[object]

    def harm(self) -> str | None:
        """Say what was done to the host, or return `None`."""
        if self.canary.read_text() != CANARY:
            return "the canary was changed"
        if [entry for entry in self.canary.parent.iterdir() if entry != self.canary]:
            return "files lie beside the canary"
        if self.connections:
            return f"{len(self.connections)} connections reached the host"
        return None


@contextlib.contextmanager
def host(folder: Path) -> Iterator[Host]:
    """Put up a canary and a listening port."""
    canary = folder / "canary.txt"
    canary.write_text(CANARY)
    canary.chmod(0o666)
    connections: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            with contextlib.suppress(OSError):  # closed below
                while True:
                    connections.append(server.accept())

        threading.Thread(target=listen, daemon=True).start()
        yield Host(canary, server.getsockname()[1], connections)
        server.shutdown(socket.SHUT_RDWR)


def suite(canary: str, port: int) -> dict[str, list[Attack]]:
    """Every attack, by category; `honest` are the controls."""
    return {
        "answer theft": answer_theft.ATTACKS,
        "comparer tricks": comparison.ATTACKS,
        "forged results": forgery.FORGERIES,
        "early exits": forgery.EXITS,
        "timeouts": resources.TIMEOUTS,
        "floods": resources.FLOODS,
        "escape": escape.escapes(canary, port),
        "network": escape.network(canary, port),
        "persistence": escape.PERSISTENCE,
        "honest": honest.ATTACKS,
    }


class Arena:
    """Evaluators for the suite, one for each set of limits; attacks run one at a time, so each finds one zygote."""

    def __init__(self, backend: str = "auto") -> None:
        self._backend = backend
        self._evaluators: dict[object, CodeEvaluator] = {}

    def close(self) -> None:
        """End every process."""
        for evaluator in self._evaluators.values():
            evaluator.close()

    def run(self, attack: Attack, kind: str) -> CodeResult:
        """Put one program to one kind of test."""
        evaluator = self._evaluators.get(attack.limits)
        if evaluator is None:
            evaluator = CodeEvaluator(attack.limits, self._backend, workers=1)
            self._evaluators[attack.limits] = evaluator
        if attack.before is not None:
            before = evaluator.evaluate_sync(attack.before, [StdioTest("1", "")])
            assert before.status is TestStatus.PASSED, before
        return evaluator.evaluate_sync(attack.source(kind), attack.tests(kind))


def descendants() -> list[psutil.Process]:
    """Processes below this one, and those that an earlier one left behind."""
    return psutil.Process().children(recursive=True)


async def settled(most: int, seconds: float = 20.0) -> int:
    """Wait until no more than `most` processes are below this one; return how many there are."""
    for _ in range(int(seconds / 0.05)):
        if len(descendants()) <= most:
            break
        await asyncio.sleep(0.05)
    return len(descendants())
