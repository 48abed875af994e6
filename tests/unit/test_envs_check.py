from __future__ import annotations

import io
import random
import sys
import threading
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from rich.console import Console

from roll_like.envs import FreeText, check_env
from roll_like.errors import EnvError


class Guess(gymnasium.Env[str, str]):
    """Say the number that is shown; the mould of every broken environment below."""

    observation_space = FreeText()
    action_space = FreeText()

    def __init__(self) -> None:
        self.number = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(100))
        return self.shown(), {}

    def shown(self) -> str:
        return f"Say {self.number}."

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        right = action == str(self.number)
        return "The end.", float(right), True, False, {"success": right}

    def scripted_action(self) -> str | None:
        return str(self.number)


class IgnoresSeed(Guess):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.number = random.randrange(10**9)
        return self.shown(), {}


class IgnoresSeedQuietly(Guess):
    """Seeds Gymnasium's generator, and draws from another one."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = random.randrange(10**9)
        return self.shown(), {}


class ConstantStart(Guess):
    def shown(self) -> str:
        self.number = 7
        return "Say 7."


class StepsAtRandom(Guess):
    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        return "The end.", random.random(), True, False, {"success": False}


class KeepsACounter(Guess):
    """Another instance of the same seed is another task."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.offset = type(self).made

    def shown(self) -> str:
        return f"Say {self.number}, number {self.offset}."


class InfiniteReward(Guess):
    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        return "The end.", float("inf"), True, False, {"success": True}


class WordsAsReward(Guess):
    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        return "The end.", "much", True, False, {"success": True}


class RaisesOnNonsense(Guess):
    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        self.number = int(action)
        return super().step(action)


class GoesOn(Guess):
    def __init__(self) -> None:
        super().__init__()
        self.turns = 0

    def reset(self, **options: Any) -> tuple[str, dict[str, Any]]:
        self.turns = 0
        return super().reset(**options)

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        self.turns += 1
        return self.shown(), 0.0, self.turns == 3, False, {"success": False}


class NeverEnds(Guess):
    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        return self.shown(), 0.0, False, False, {}


class HoldsALock(Guess):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class SaysNumbers(Guess):
    def step(self, action: str) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return 3, 0.0, True, False, {"success": False}


class SaysNothingOfSuccess(Guess):
    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        return "The end.", 0.0, True, False, {}


class SaysMaybe(Guess):
    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        return "The end.", 0.0, True, False, {"success": "maybe", "fresh": 2, "invalid_action": "no"}


class StrangeMessages(Guess):
    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        info = {"success": False, "messages": [{"role": "tool", "content": 4}], "tool_calls": ["look"]}
        return "The end.", 0.0, True, False, info


class StrangeTool(Guess):
    tools: ClassVar = [{"type": "function", "function": {"name": "look", "parameters": {"type": "objekt"}}}]


class NamelessTool(Guess):
    tools: ClassVar = ["look"]


class StrangePrompt(Guess):
    system_prompt = 3


class StrangeFlags(Guess):
    def step(self, action: str) -> tuple[str, Any, Any, Any, dict[str, Any]]:
        return "The end.", 0.0, "yes", None, {"success": False}


class ShowsCalls(Guess):
    """What a run takes: numbers of NumPy, any role, a call without a text."""

    def step(self, action: str) -> Any:
        _, reward, terminated, truncated, info = super().step(action)
        call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
        info = {key: np.bool_(value) for key, value in info.items()}
        info |= {"messages": [call, {"role": "ipython", "content": "4"}], "invalid_action": np.bool_(False)}
        return "The end.", np.float32(reward), np.bool_(terminated), truncated, info


class ClosesOnce(Guess):
    def close(self) -> None:
        del self.number


class FailsAtReset(Guess):
    def reset(self, **options: Any) -> tuple[str, dict[str, Any]]:
        raise OSError("no such file")


class ExitsAtReset(Guess):
    def reset(self, **options: Any) -> tuple[str, dict[str, Any]]:
        sys.exit("no key")


class ReturnsNothing(Guess):
    def reset(self, **options: Any) -> Any:
        return None


class ReturnsOldParts(Guess):
    def step(self, action: str) -> Any:
        return "The end.", 0.0, True, {}


class HasNoSpaces(Guess):
    observation_space = None
    action_space = None


class Mute(Guess):
    scripted_action = None  # type: ignore[assignment]


@pytest.mark.parametrize("right", [Guess, ShowsCalls])
def test_a_right_environment_has_no_findings_and_figures(right: type[Guess]) -> None:
    report = check_env(right)
    assert report.findings == ()
    assert report.ok
    assert report.first_observation.startswith("Say ")
    assert report.figures["scripted: success rate"] == 1.0
    assert report.figures["scripted: mean return"] == 1.0
    assert report.figures["random: success rate"] == 0.0
    assert report.figures["random: mean turns"] == 1.0


@pytest.mark.parametrize(
    ("broken", "level", "check", "what"),
    [
        (IgnoresSeed, "error", "seed", "reset ignores the seed"),
        (IgnoresSeedQuietly, "error", "seed", "reset ignores the seed: seed 0 started twice"),
        (ConstantStart, "warning", "seed", "all of 8 seeds start from the same state"),
        (StepsAtRandom, "error", "seed", "seed 0 and the same answers gave another turn 1 in the same instance"),
        (KeepsACounter, "error", "seed", "in another instance"),
        (InfiniteReward, "error", "reward", "the reward is inf"),
        (WordsAsReward, "error", "reward", "the reward is 'much'"),
        (RaisesOnNonsense, "error", "actions", "step('') raised ValueError"),
        (GoesOn, "warning", "end", "after its end the environment goes on"),
        (NeverEnds, "warning", "end", "the random policy played 200 turns without end"),
        (HoldsALock, "warning", "pickle", "cannot pickle '_thread.lock' object"),
        (SaysNumbers, "error", "observation", "step() should return a text or an image, found int"),
        (SaysNothingOfSuccess, "warning", "success", "missing at the end"),
        (SaysMaybe, "error", "info", "info[\"success\"] is 'maybe'"),
        (SaysMaybe, "error", "info", 'info["fresh"] is 2'),
        (SaysMaybe, "error", "info", "info[\"invalid_action\"] is 'no'"),
        (StrangeMessages, "error", "messages", "expected messages with a role and a content of texts and"),
        (StrangeMessages, "error", "tool_calls", "info[\"tool_calls\"] is ['look']"),
        (StrangeTool, "error", "tools", "'look' are no JSON schema: 'objekt'"),
        (NamelessTool, "error", "tools", "tools[0] is no function schema: look"),
        (StrangePrompt, "error", "prompt", "found int"),
        (StrangeFlags, "error", "flags", "terminated is 'yes'"),
        (StrangeFlags, "error", "flags", "truncated is None"),
        (ClosesOnce, "error", "close", "called twice, raised AttributeError"),
        (FailsAtReset, "error", "episode", "raised OSError: no such file"),
        (ExitsAtReset, "error", "episode", "raised SystemExit: no key"),
        (ReturnsNothing, "error", "episode", "reset() should return observation, info, found NoneType: None"),
        (ReturnsOldParts, "error", "episode", "terminated, truncated, info, found tuple of 4: ('The end.', 0.0, True"),
        (HasNoSpaces, "error", "spaces", "no observation and no action space"),
    ],
)
def test_what_is_wrong_is_found(broken: type[Guess], level: str, check: str, what: str) -> None:
    report = check_env(broken)
    found = [finding for finding in report.findings if finding.check == check]
    assert any(finding.level == level and what in finding.what for finding in found), report.findings
    assert report.ok is all(finding.level == "warning" for finding in report.findings)


def test_a_seed_that_is_ignored_is_told_once_and_with_its_remedy() -> None:
    fixes = {finding.fix for finding in check_env(IgnoresSeedQuietly).errors if finding.check == "seed"}
    assert any(fix is not None and "self.np_random" in fix for fix in fixes)


def test_an_environment_itself_may_be_checked() -> None:
    report = check_env(KeepsACounter())
    assert report.findings == ()  # no second instance to compare with


def test_a_policy_of_ones_own_is_played() -> None:
    assert not any(name.startswith("scripted") for name in check_env(Mute).figures)
    right = check_env(Mute, policy=lambda observation, _info: observation[4:-1])
    assert right.figures["scripted: success rate"] == 1.0
    wrong = check_env(Mute, policy=lambda _observation, _info: "no", seeds=[3, 4])
    (finding,) = wrong.findings
    assert finding.what == "the scripted policy solved 0 of 2 episodes"


class Numbers(Guess):
    observation_space = Box(0, 1)  # type: ignore[assignment]
    action_space = Discrete(2)  # type: ignore[assignment]


class Boxes(Guess):
    action_space = Box(0, 1)  # type: ignore[assignment]


def test_spaces_that_are_no_text_name_their_wrapper() -> None:
    assert [finding.fix for finding in check_env("FrozenLake-v1").errors] == [
        "make it with render_mode='ansi' and wrap it in roll_like.envs.AnsiText",
        "wrap it in roll_like.envs.DiscreteActions with 4 names of actions",
    ]
    numbers = check_env(Numbers)
    assert [finding.check for finding in numbers.errors] == ["spaces", "spaces"]
    assert "TransformObservation" in str(numbers.errors[0].fix)
    assert "DiscreteActions with 2 names" in str(numbers.errors[1].fix)
    assert "TransformAction" in str(check_env(Boxes).errors[0].fix)


def test_an_unknown_id_is_no_report() -> None:
    with pytest.raises(EnvError, match="did you mean 'roll_like/FrozenLake-v0'"):
        check_env("roll_like/FrozenLak-v0")


@pytest.mark.parametrize(
    ("env", "ok"), [(Guess, True), (ConstantStart, True), (InfiniteReward, False), (Numbers, False)]
)
def test_a_report_is_shown(env: type[Guess], ok: bool) -> None:
    stream = io.StringIO()
    report = check_env(env)
    report.show(Console(file=stream, width=300))
    assert report.ok == ok
    shown = stream.getvalue()
    for finding in report.findings:
        assert f"{finding.level}: {finding.check}: {finding.what}" in shown
        assert finding.fix is None or finding.fix in shown
    assert f"{len(report.errors)} errors, {len(report.warnings)} warnings" in shown
