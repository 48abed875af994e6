"""Gymnasium environments of several agents: each has its own conversation, its own turns and its own reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import pytest
from test_rollout_record import RENDERER, parts

from roll_like import check_env
from roll_like.agents.env_worker import HostedEnvironment
from roll_like.agents.episode import EnvironmentSpec
from roll_like.envs import FreeText, agents_of
from roll_like.errors import EnvError


class Nim(gymnasium.Env[str, str]):
    """Take 1 or 2 of some sticks in turn; who takes the last one wins. A bad answer loses, and pays the other a bit."""

    agents = ("first", "second")
    system_prompt = "Take 1 or 2 sticks."
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, sticks: int = 4, says: Callable[[str], dict[str, Any]] | None = None) -> None:
        self.observation_space = self.action_space = FreeText()
        self.sticks, self.says = sticks, says

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.left, self.player = self.sticks, 0
        return f"{self.left} left", {"agent": "first"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        acted, other = self.agents[self.player], self.agents[1 - self.player]
        self.player = 1 - self.player
        if self.says is not None:
            return "?", 0.0, False, False, self.says(acted)
        if action not in ("1", "2"):
            return "bad", -1.0, True, False, {"rewards": {other: 0.25}, "success": False}
        self.left -= int(action)
        info = {"agent": other, "rewards": {other: -1.0}} if self.left <= 0 else {"agent": other}
        return f"{self.left} left", float(self.left <= 0), self.left <= 0, False, info


gymnasium.register("test/Nim-v0", entry_point=Nim, disable_env_checker=True)


def test_each_agent_has_its_own_conversation_turns_and_reward() -> None:
    first, second = parts("test/Nim-v0", ["1", "2", "1"])
    assert (first.agent, second.agent) == ("first", "second")
    assert (first.turn_rewards, second.turn_rewards) == ((0.0, 1.0), (-1.0,))
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert [turn.text for turn in first.record] == ["1", "1"]
    assert [turn.text for turn in second.record] == ["2"]
    # each sees what it was shown, and its own turns: nothing of the other's
    (begun,) = first.trajectory.parts
    whole = RENDERER.tokenizer.decode(first.trajectory.token_ids[begun.start : begun.end])
    assert whole.count("Take 1 or 2 sticks.") == 1
    assert "4 left" in whole
    assert "1 left" in whole
    assert "3 left" not in whole
    assert [message["content"] for message in second.record[0].shown] == ["Take 1 or 2 sticks.", "3 left"]
    assert second.record[0].after[0]["content"] == "0 left"  # shown to the one that would be next
    assert [message["content"] for message in second.trajectory.task.messages] == ["Take 1 or 2 sticks.", "3 left"]


def test_a_reward_before_the_first_turn_is_kept_and_agents_without_a_turn_are_left_out() -> None:
    (only,) = parts("test/Nim-v0", ["many"])  # the second agent earned 0.25, and has nothing to learn from
    assert (only.agent, only.reward) == ("first", -1.0)

    class Gift(Nim):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            observation, reward, ended, cut, info = super().step(action)
            return observation, reward, ended, cut, info | ({"rewards": {"second": 0.5}} if self.left == 3 else {})

    gymnasium.register("test/Gift-v0", entry_point=Gift, disable_env_checker=True)
    first, second = parts("test/Gift-v0", ["1", "1", "2"])
    assert first.turn_rewards == (0.0, 1.0)
    assert second.turn_rewards == (-0.5,)  # the gift of the turn before its first, and the game that it lost


def test_turns_of_all_agents_count_towards_the_limit() -> None:
    first, second = parts("test/Nim-v0", ["1"], turns=3, sticks=9)
    assert [len(one.record) for one in (first, second)] == [2, 1]
    assert first.trajectory.stop_reason is second.trajectory.stop_reason
    assert first.trajectory.stop_reason.value == "length"


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (lambda _: {"agent": "third"}, r'info\["agent"\] is \'third\'.*\n.*first, second'),
        (lambda _: {"rewards": {"frist": 1}}, r'info\["rewards"\] is .*of second'),
        (lambda acted: {"rewards": {acted: 1}}, r"return the reward of the agent that acted as `reward`"),
        (lambda _: {"rewards": {"second": float("nan")}}, "the reward is nan"),
    ],
)
def test_what_cannot_be_meant_is_refused(says: Any, message: str) -> None:
    env = HostedEnvironment(EnvironmentSpec(name="nim", env_id="test/Nim-v0", kwargs={"says": says}))
    env.reset(1)
    with pytest.raises(EnvError, match=message):
        env.step("1")


def test_names_are_names_and_an_agent_needs_them() -> None:
    env: Any = Nim()
    assert agents_of(env) == ("first", "second")
    env.agents = "first"
    with pytest.raises(EnvError, match="`agents` is 'first'"):
        agents_of(env)
    env.agents = ()
    hosted = HostedEnvironment(EnvironmentSpec(name="nim", env_id="test/Nim-v0", kwargs={}))
    hosted._agents = ()
    with pytest.raises(EnvError, match="the environment has no `agents`"):
        hosted.reset(1)


def test_check_env_plays_it() -> None:
    report = check_env("test/Nim-v0")
    assert report.ok, str(report.findings)
