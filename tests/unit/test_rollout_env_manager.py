"""Episodes and groups of them against fakes: rewards by turn, limits, failures, redundancy, hung environments."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chat_templates import renderer
from fake_policy import Unqueued
from tests_support import all_follows

from roll_like.agents.env_manager import EnvironmentLost, EnvManager, EpisodePlan, episode_task
from roll_like.agents.episode import EnvironmentSpec, EpisodeLimits, Started, Stepped
from roll_like.agents.episode_rewards import EpisodeRewards
from roll_like.errors import EnvError
from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.rollout.collection import Collected, collect_batch
from roll_like.rollout.router import Router, SampleLost
from roll_like.types import Segment, StopReason, Task

SPEC = EnvironmentSpec(name="walk", env_id="test/Walk-v0", kwargs={})
RENDERER = renderer("chatml")
SETTINGS: dict[str, Any] = {
    "episodes_per_group": 2,
    "sampling": Sampling(max_tokens=16),
    "limits": EpisodeLimits(turns=10, tokens=1000),
}


class Speaker(Unqueued):
    """Says one word a turn; remembers what it was asked."""

    def __init__(self, word: str = "right", losses: int = 0) -> None:
        super().__init__()
        self.requests: list[GenerateRequest] = []
        self.urgent: list[bool] = []
        self.had_priority: list[bool] = []
        self.homes: list[Any] = []
        self._ids = np.asarray([*RENDERER.encode(word), *RENDERER.end_ids], np.int32)
        self._word = word
        self._losses = losses

    async def generate(self, request: GenerateRequest, affinity_key: Any, urgent: bool = False) -> Generation:
        self.requests.append(request)
        self.urgent.append(urgent)
        self.had_priority.append(affinity_key in self.prioritized)
        self.homes.append(affinity_key)
        await asyncio.sleep(0)
        if self._losses:
            self._losses -= 1
            raise SampleLost("engine hiccup")
        ids = self._ids[: request.sampling.max_tokens]
        return Generation(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            segments=(Segment(start=0, end=len(ids), policy_version=4),),
            text=self._word,
            stop_reason=StopReason.STOP if len(ids) == len(self._ids) else StopReason.LENGTH,
        )


class Walk:
    """Ends after `length` turns, with reward 1 for the last and 0.1 for the others."""

    def __init__(self, length: int = 3, *, fails: Callable[[], Exception | None] = lambda: None, **more: Any) -> None:
        self.length = length
        self.fails = fails
        self.turns = 0
        self.closed = 0
        self.more = more

    async def reset(self, seed: int) -> Started:
        self.seed = seed
        messages = [{"role": "system", "content": "Walk."}, {"role": "user", "content": f"start {seed}"}]
        return Started(messages=messages, tools=[], state=f"{seed}:0")

    async def step(self, text: str) -> Stepped:
        await asyncio.sleep(self.more.get("delay", 0))
        if (error := self.fails()) is not None:
            raise error
        self.turns += 1
        done = self.turns == self.length
        return Stepped(
            messages=[{"role": "user", "content": f"you are at {self.turns}"}],
            reward=1.0 if done else 0.1,
            terminated=done and not self.more.get("cut"),
            truncated=done and bool(self.more.get("cut")),
            success=True if done else None,
            state=f"{self.seed}:{self.turns}",
            fresh=bool(self.more.get("fresh")),
        )

    async def close(self) -> None:
        self.closed += 1


class Pool:
    """Makes environments by a function of how many there were before."""

    def __init__(self, make: Callable[[int], Walk] = lambda number: Walk()) -> None:
        self.made: list[Walk] = []
        self._make = make

    def open(self, spec: EnvironmentSpec) -> Walk:
        self.made.append(self._make(len(self.made)))
        return self.made[-1]


def tasks() -> Iterator[Task]:
    return (episode_task(SPEC, seed) for seed in itertools.count())


def collect(
    pool: Pool,
    speaker: Speaker | None = None,
    *,
    retries: int = 1,
    rewards: EpisodeRewards | None = None,
    groups: int = 1,
    at_once: int = 0,
    waited_for: int = 0,
    **changes: Any,
) -> Collected:
    manager = EnvManager(speaker or Speaker(), pool, [SPEC], RENDERER, retries=retries, rewards=rewards)
    runner = manager.runner(EpisodePlan(**(SETTINGS | changes)), 5)
    collecting = collect_batch(runner, tasks(), groups=groups, at_once=at_once, waited_for=waited_for)
    return asyncio.run(asyncio.wait_for(collecting, timeout=60))


def test_an_episode_is_one_token_exact_sequence_with_rewards_by_turn() -> None:
    speaker, pool = Speaker(), Pool()
    (group,) = collect(pool, speaker).groups
    sample = group.samples[0]
    trajectory = sample.trajectory
    assert sample.turn_rewards == (0.1, 0.1, 1.0)
    assert sample.reward == pytest.approx(1.2)
    assert sample.turn_states == ("0:0", "0:1", "0:2")
    assert sample.details == {"turns": 3.0, "cuts": 0.0, "success": 1.0}
    assert trajectory.stop_reason is StopReason.STOP
    (part,) = trajectory.parts
    assert (part.start, part.end) == (0, len(trajectory.token_ids))
    # each prompt is the beginning of the next, and of the trajectory
    prompts = [request.prompt_ids for request in speaker.requests if request.request_id.startswith("0-0-0-")]
    for prompt in prompts:
        assert prompt.tolist() == trajectory.token_ids[: len(prompt)].tolist()
    assert trajectory.turns.max() == 2
    assert (trajectory.turns >= 0).tolist() == trajectory.sampled.tolist()
    assert trajectory.logprobs[trajectory.sampled].tolist() == [-0.5] * int(trajectory.sampled.sum())
    assert {segment.policy_version for segment in trajectory.segments} == {4}
    for segment in trajectory.segments:
        assert trajectory.sampled[segment.start : segment.end].all()
    assert group.task.messages[1]["content"] == "start 0"
    assert group.task.prompt_ids.tolist() == prompts[0].tolist()
    assert all(one.closed == 1 for one in pool.made)


def test_a_call_without_a_text_says_nothing() -> None:
    class Shown(Walk):
        async def reset(self, seed: int) -> Started:
            started = await super().reset(seed)
            call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {}}]}
            return replace(started, messages=[*started.messages, call, {"role": "tool", "content": "4"}])

    (group,) = collect(Pool(lambda number: Shown())).groups
    sample = group.samples[0].trajectory
    assert sample.text.split() == ["right"] * 3
    assert [message["content"] for message in sample.task.messages] == ["Walk.", "start 0", "", "4"]


def test_members_of_a_group_share_seed_and_differ_in_sampling_and_turns_share_a_home() -> None:
    speaker, pool = Speaker(), Pool()
    collect(pool, speaker, groups=2)
    assert [one.seed for one in pool.made] == [0, 0, 1, 1]
    assert set(speaker.homes) == {"0-0-0", "0-0-1", "0-1-0", "0-1-1"}
    for request, home in zip(speaker.requests, speaker.homes, strict=True):
        assert request.request_id.startswith(f"{home}-")
    seeds = [request.seed for request in speaker.requests]
    assert len(set(seeds)) == len(seeds)
    again = Speaker()
    collect(Pool(), again, groups=2)
    assert sorted(seeds) == sorted(request.seed for request in again.requests)


def test_an_environment_that_begins_anew_gives_parts_that_share_the_return() -> None:
    (group,) = collect(Pool(lambda number: Walk(fresh=True))).groups
    trajectory = group.samples[0].trajectory
    assert len(trajectory.parts) == 3
    ends = [part.end for part in trajectory.parts]
    assert [part.start for part in trajectory.parts] == [0, *ends[:-1]]
    assert ends[-1] == len(trajectory.token_ids)
    for turn, part in enumerate(trajectory.parts):
        assert set(trajectory.turns[part.start : part.end]) == {-1, turn}


def test_turns_and_tokens_are_limited() -> None:
    (group,) = collect(Pool(lambda number: Walk(100)), limits=EpisodeLimits(turns=4, tokens=1000)).groups
    sample = group.samples[0]
    assert len(sample.turn_rewards) == 4
    assert sample.trajectory.stop_reason is StopReason.LENGTH
    speaker = Speaker()
    (group,) = collect(Pool(lambda number: Walk(100)), speaker, limits=EpisodeLimits(turns=100, tokens=150)).groups
    assert max(len(request.prompt_ids) + request.sampling.max_tokens for request in speaker.requests) <= 150
    assert len(group.samples[0].trajectory.token_ids) <= 150
    cut = collect(Pool(lambda number: Walk(cut=True))).groups[0].samples[0]
    assert cut.trajectory.stop_reason is StopReason.LENGTH


def test_a_first_prompt_without_room_for_a_turn_is_a_failure() -> None:
    """It earned nothing and solved nothing: it would be a reward of 0."""
    shown = len(RENDERER.encode(RENDERER.render(asyncio.run(Walk().reset(0)).messages, [])))
    speaker = Speaker()
    collected = collect(Pool(), speaker, limits=EpisodeLimits(turns=4, tokens=shown))
    assert (collected.groups[0].samples, speaker.requests) == ((), [])
    assert collected.failures[0].error.startswith(f"the first prompt has {shown} tokens, and a conversation {shown}")
    (group,) = collect(Pool(), limits=EpisodeLimits(turns=4, tokens=shown + 1)).groups
    assert [len(sample.turn_rewards) for sample in group.samples] == [1, 1]


def test_an_episode_that_ends_with_a_turn_that_was_cut_is_truncated() -> None:
    """Its mask, its share and its evaluation are those of a single answer; earlier turns may be cut."""
    short = {"sampling": Sampling(max_tokens=1)}
    (group,) = collect(Pool(), **short).groups
    assert {one.trajectory.stop_reason for one in group.samples} == {StopReason.LENGTH}
    assert [one.reward for one in group.samples] == pytest.approx([1.2, 1.2])
    (whole,) = collect(Pool()).groups
    assert {one.trajectory.stop_reason for one in whole.samples} == {StopReason.STOP}


def once(error: Exception) -> Callable[[], Exception | None]:
    errors = iter([error])
    return lambda: next(errors, None)


def test_a_crashed_environment_is_tried_again_and_then_a_failure() -> None:
    first = Pool(lambda number: Walk(fails=once(EnvError("broke")) if number == 0 else lambda: None))
    collected = collect(first)
    assert len(collected.groups[0].samples) == 2
    assert collected.failures == ()
    assert len(first.made) == 3
    always = collect(Pool(lambda number: Walk(fails=lambda: EnvError("broke"))))
    assert [failure.stage for failure in always.failures] == ["environment"] * 2
    assert "broke" in always.failures[0].error
    assert always.failures[0].origin == "test/Walk-v0 with seed 0"
    assert always.groups[0].samples == ()


def test_a_lost_turn_is_tried_again_and_then_a_failure() -> None:
    assert collect(Pool(), Speaker(losses=1), episodes_per_group=1).failures == ()
    (failure,) = collect(Pool(), Speaker(losses=2), episodes_per_group=1).failures
    assert (failure.stage, "hiccup" in failure.error) == ("generate", True)


def test_who_loses_its_worker_to_others_is_not_to_blame() -> None:
    innocent = Pool(lambda number: Walk(fails=once(EnvironmentLost("gone")) if number < 3 else lambda: None))
    assert collect(innocent, retries=0, episodes_per_group=1).failures == ()
    assert len(innocent.made) == 4
    unlucky = Pool(lambda number: Walk(fails=lambda: EnvironmentLost("gone")))
    assert len(collect(unlucky, retries=0, episodes_per_group=1).failures) == 1


def test_redundant_episodes_make_up_for_slow_and_broken_ones() -> None:
    def make(number: int) -> Walk:
        if number == 0:
            return Walk(delay=60)
        return Walk(fails=lambda: EnvError("broke")) if number == 1 else Walk()

    pool = Pool(make)
    collected = collect(pool, retries=0, redundant=2)
    assert len(collected.groups[0].samples) == 2
    assert len(collected.failures) == 1
    assert all(one.closed == 1 for one in pool.made)  # the slow one was stopped


def test_a_slow_group_does_not_hold_up_the_others() -> None:
    collected = collect(Pool(lambda number: Walk(delay=60 if number < 2 else 0)), groups=2, at_once=3)
    assert [group.task.metadata["seed"] for group in collected.groups] == [1, 2]
    assert [task.metadata["seed"] for task in collected.unfinished] == [0]


@pytest.mark.parametrize(("silent", "in_a_turn"), [(False, 0), (True, 2)])
def test_a_group_that_hangs_says_whether_in_its_environment_or_at_the_policy(silent: bool, in_a_turn: int) -> None:
    class Silent:
        async def submit(self, requests: Sequence[GenerateRequest]) -> None: ...

        async def poll(self, timeout: float) -> Sequence[Generation]:
            return await asyncio.Future()

        async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def work() -> str:
        policy = Router([Silent()], max_running=8, max_in_flight=8, retries=0) if silent else Speaker()
        pool = Pool(lambda number: Walk(delay=1000))
        manager = EnvManager(policy, pool, [SPEC], RENDERER, retries=1)
        plan = EpisodePlan(**SETTINGS)
        runner = manager.runner(plan, 5)
        group = asyncio.create_task(runner.run(7, episode_task(SPEC, 0)))
        await all_follows()
        text = runner.describe(7)
        group.cancel()
        return text

    assert asyncio.run(work()) == f"2 of its episodes under way, {in_a_turn} of them in a turn of the policy"


def test_urgent_plans_ask_for_urgent_turns_and_groups_that_are_waited_for_are_prioritized() -> None:
    measured, trained = Speaker(), Speaker()
    collect(Pool(), measured, urgent=True)
    assert len(measured.urgent) == 6
    assert all(measured.urgent)
    collect(Pool(), trained, redundant=1, groups=2, waited_for=1)
    assert not any(trained.urgent)
    assert {home for home, first in zip(trained.homes, trained.had_priority, strict=True) if first} == {
        "0-0-0", "0-0-1", "0-0-2",
    }  # fmt: skip
    assert any(home.startswith("0-1-") for home in trained.homes)
    assert not trained.prioritized  # the groups have ended
