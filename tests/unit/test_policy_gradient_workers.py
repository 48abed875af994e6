"""Who has the devices during a step: what engines and trainer are told."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from roll_like.policy_gradient.workers import Workers


class Told:
    """Engines, trainer and weight sync in one; writes down what they are told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def ask_everywhere(self, method: Any) -> str:
        return str(method.__name__)

    def offload(self) -> None:
        self.calls.append("offload")

    def reload(self) -> None:
        self.calls.append("reload")

    def push(self) -> None:
        self.calls.append("push")


@pytest.mark.parametrize(
    ("shares_gpus", "takes_turns", "expected"),
    [
        (False, False, ["sample", "train", "push"]),
        (False, True, ["sample", "sleep", "train", "wake", "push"]),
        (True, False, ["offload", "sample", "sleep", "reload", "train", "wake", "push"]),
        (True, True, ["offload", "sample", "sleep", "reload", "train", "wake", "push"]),
    ],
)
def test_engines_sleep_while_the_trainer_works_on_their_devices(
    shares_gpus: bool, takes_turns: bool, expected: list[str]
) -> None:
    told: Any = Told()
    state: Any = SimpleNamespace(timer=nullcontext, interruptible=nullcontext)
    runner: Any = SimpleNamespace(run=told.calls.append)
    nothing: Any = None
    workers = Workers(
        state=state,
        runner=runner,
        actor=told,
        critic=None,
        kl_reference=None,
        advantages=nothing,
        engines=told,
        weights=told,
        time_shared=[told] if shares_gpus else [],
        takes_turns=takes_turns,
    )
    with workers.generating():
        told.calls.append("sample")
    with workers.training():
        told.calls.append("train")
    workers.push()
    assert told.calls == expected
