"""Gymnasium environments of several agents: each has its own conversation, its own turns and its own reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import pytest
from test_rollout_env_manager import Speaker
from test_rollout_record import RENDERER, Local, parts

from roll_like import check_env
from roll_like.agents.env_manager import EnvManager, EpisodePlan, episode_task
from roll_like.agents.env_worker import HostedEnvironment
from roll_like.agents.episode import EnvironmentSpec, EpisodeLimits
from roll_like.agents.episode_rewards import EpisodeRewards
from roll_like.envs import FewShot, FreeText, History, Instructions, ScaledReward, agents_of
from roll_like.errors import EnvError
from roll_like.inference.interface import Sampling
from roll_like.rewards.scorer import to_completion
from roll_like.rollout.metrics import rollout_rows
from roll_like.types import Group, Scored, Task, Trajectory


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


def test_names_are_names() -> None:
    env: Any = Nim()
    assert agents_of(env) == ("first", "second")
    env.agents = "first"
    with pytest.raises(EnvError, match="`agents` is 'first'"):
        agents_of(env)
    for wrong in (2, [2], {"first", "second"}):
        env.agents = wrong
        with pytest.raises(EnvError, match="`agents` is"):
            agents_of(env)
    env.agents = None
    assert agents_of(env) == ()


def test_check_env_plays_it() -> None:
    report = check_env("test/Nim-v0")
    assert report.ok, str(report.findings)
    for told, wrong in (({"rewards": {"frist": 1.0}}, "rewards"), ({"agent": "third"}, "agent")):
        report = check_env("test/Nim-v0", max_turns=3, says=lambda _, told=told: told)
        assert any(f'info["{wrong}"] is ' in one.what for one in report.errors if one.check == "agent")


class OwnInfo(Nim):
    """One agent, whose `info` has these names for something else."""

    agents = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "go", {"agent": 7, "rewards": [1, 2]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "end", 1.0, True, False, {"agent": "me", "rewards": [0.5], "success": True}


class Late(Nim):
    """Sets its agents in `reset`, as those of PettingZoo do."""

    agents = ()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.agents = ["first", "second"]
        return super().reset(seed=seed)


gymnasium.register("test/OwnInfo-v0", entry_point=OwnInfo, disable_env_checker=True)
gymnasium.register("test/Late-v0", entry_point=Late, disable_env_checker=True)


def test_without_agents_info_may_have_these_names() -> None:
    (sample,) = parts("test/OwnInfo-v0", ["1"])
    assert (sample.agent, sample.reward) == ("", 1.0)
    assert check_env("test/OwnInfo-v0").ok
    scaled = ScaledReward(OwnInfo(), 2.0)
    scaled.reset(seed=1)
    assert scaled.step("1")[1:] == (2.0, True, False, {"agent": "me", "rewards": [0.5], "success": True})


def test_agents_may_be_set_in_reset() -> None:
    assert [one.agent for one in parts("test/Late-v0", ["1", "2", "1"])] == ["first", "second"]
    assert check_env("test/Late-v0").ok


def test_wrappers_work_for_each_agent() -> None:
    def wrapped() -> gymnasium.Env[str, str]:
        solved = FewShot(Instructions(ScaledReward(Nim(5), 0.5), "Win."), [("2 left", "2")])
        return History(solved, 1)

    gymnasium.register("test/WrappedNim-v0", entry_point=wrapped, disable_env_checker=True)
    first, second = parts("test/WrappedNim-v0", ["1", "1", "2", "1"])
    assert (first.turn_rewards, second.turn_rewards) == ((0.0, -0.5), (0.0, 0.5))
    shown = [[message["content"] for message in turn.shown] for one in (first, second) for turn in one.record]
    rules = "Take 1 or 2 sticks."
    assert shown == [
        [rules, "2 left", "2", "Win.\n\n5 left"],
        [rules, "2 left", "2", "Before:\nWin.\n\n5 left\nYour answer: 1\n\nNow:\n3 left"],
        [rules, "2 left", "2", "Win.\n\n4 left"],
        [rules, "2 left", "2", "Before:\nWin.\n\n4 left\nYour answer: 1\n\nNow:\n1 left"],
    ]
    # without History, examples and instructions come once
    talk = "test/TalkNim-v0"
    gymnasium.register(
        talk,
        entry_point=lambda: FewShot(Instructions(Nim(5), "Win."), [("2 left", "2")]),
        disable_env_checker=True,
    )
    for one in parts(talk, ["1", "1", "2", "1"]):
        begun, later = one.record
        assert [message["content"] for message in begun.shown[:3]] == [rules, "2 left", "2"]
        assert begun.shown[3]["content"].startswith("Win.")
        assert [message["content"] for message in later.shown] == [later.shown[-1]["content"]]
        assert "Win." not in later.shown[-1]["content"]


def test_only_the_agent_whose_last_turn_was_cut_is_truncated() -> None:
    def stops(cut: list[int], words: list[str]) -> list[str]:
        return [str(one.trajectory.stop_reason) for one in parts("test/Nim-v0", words, cut=cut)]

    words = ["1", "2", "1"]  # of the first, the second, the first
    assert stops([], words) == ["stop", "stop"]
    assert stops([2], words) == ["length", "stop"]
    assert stops([1], words) == ["stop", "length"]
    assert stops([0], words) == ["stop", "stop"]  # another turn followed


def test_samples_of_a_group_keep_what_their_agent_was_shown() -> None:
    seen: dict[str, list[str]] = {}

    class Rewards:
        """Gives each agent another reward, by what it was shown first."""

        def scores(self, task: Task) -> bool:
            return True

        async def score(self, group: Group[Trajectory]) -> Group[Scored]:
            shown = [to_completion(one).messages[-1]["content"] for one in group.samples]
            seen[shown[0]] = shown
            samples = tuple(
                Scored(trajectory=one, reward=float(text[0]), rewards={"left": float(text[0])}, details={}, weights={})
                for one, text in zip(group.samples, shown, strict=True)
            )
            return Group(task=group.task, samples=samples, failures=group.failures)

    spec = EnvironmentSpec(name="nim", env_id="test/Nim-v0", kwargs={})
    pool: Any = SimpleNamespace(open=Local)
    rewards: Any = Rewards()
    manager = EnvManager(
        Speaker("1"), pool, [spec], RENDERER, retries=0, rewards=EpisodeRewards(rewards, environment_weight=0.0)
    )
    plan = EpisodePlan(episodes_per_group=2, sampling=Sampling(max_tokens=8), limits=EpisodeLimits(turns=9, tokens=900))
    group = asyncio.run(manager.runner(plan, 1).run(0, episode_task(spec, 1)))
    assert [one.agent for one in group.samples] == ["first", "first", "second", "second"]
    assert [one.reward for one in group.samples] == [4.0, 4.0, 3.0, 3.0]
    assert seen == {"4 left": ["4 left"] * 2, "3 left": ["3 left"] * 2}  # each agent's are scored as a group
    rows = rollout_rows([group])
    assert [row["messages"][-1]["content"] for row in rows] == ["4 left", "4 left", "3 left", "3 left"]
    assert [row["prompt"] for row in rows] == ["4 left", "4 left", "3 left", "3 left"]
    tasks = [one.trajectory.task for one in group.samples]
    assert tasks[0] is tasks[1]
    assert tasks[2] is tasks[3]
