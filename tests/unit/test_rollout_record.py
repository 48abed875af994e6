"""What an episode leaves for people: its turns as they were played, from real environments in this process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from chat_templates import renderer
from fake_policy import episode_settings

import roll_like.builtin.envs  # noqa: F401 - registers the built-in environments
from roll_like.agents.env_manager import episode_task
from roll_like.agents.env_worker import EnvWorker
from roll_like.agents.episode import EnvironmentSpec, Started, Stepped, play
from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.types import Scored, Segment, StopReason

RENDERER = renderer("chatml")


class Words:
    """Says what it was told to say, turn by turn."""

    def __init__(self, words: Sequence[str], cut: Sequence[int] = ()) -> None:
        self._words: Iterator[str] = itertools.cycle(words)
        self._turns, self._cut = itertools.count(), cut

    async def generate(self, request: GenerateRequest, affinity_key: Any, urgent: bool = False) -> Generation:
        word = next(self._words)
        ids = np.asarray([*RENDERER.encode(word), *RENDERER.end_ids], np.int32)[: request.sampling.max_tokens]
        return Generation(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            segments=(Segment(start=0, end=len(ids), policy_version=4),),
            text=word,
            stop_reason=StopReason.LENGTH if next(self._turns) in self._cut else StopReason.STOP,
        )


class Local:
    """An environment on a worker of this process."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._worker = EnvWorker()
        self._spec = spec

    async def reset(self, seed: int) -> Started:
        started = await self._worker.reset("one", self._spec, seed)
        assert isinstance(started, Started)
        return started

    async def step(self, text: str) -> Stepped:
        stepped = await self._worker.step("one", text)
        assert isinstance(stepped, Stepped)
        return stepped

    async def close(self) -> None:
        await self._worker.close("one")


def played(env_id: str, words: Sequence[str], *, turns: int = 10, **kwargs: Any) -> Scored:
    (sample,) = parts(env_id, words, turns=turns, **kwargs)
    return sample


def parts(
    env_id: str, words: Sequence[str], *, turns: int = 10, cut: Sequence[int] = (), **kwargs: Any
) -> list[Scored]:
    """Play an episode of any number of agents; the token limit cuts the turns `cut`."""
    spec = EnvironmentSpec(name="one", env_id=env_id, kwargs=kwargs)
    return asyncio.run(
        play(
            Local(spec),
            Words(words, cut),
            RENDERER,
            episode_settings(task=episode_task(spec, 3), sampling=Sampling(max_tokens=64), turns=turns, tokens=4000),
        )
    )


def test_turns_are_recorded_as_they_were_played() -> None:
    before = time.time()
    sample = played(
        "roll_like/FrozenLake-v0", ["I go.", "<action>right</action>", "<action>down</action>"], lake=["SF", "FG"]
    )
    after = time.time()
    first, second, third = sample.record
    assert [message["role"] for message in first.shown] == ["system", "user"]
    assert [message["role"] for message in second.shown] == ["user"]
    assert (first.invalid, second.invalid, third.invalid) == (True, False, False)
    assert (first.text, first.tool_calls) == ("I go.", ())
    assert tuple(turn.reward for turn in sample.record) == sample.turn_rewards
    assert tuple(turn.state for turn in sample.record) == sample.turn_states
    assert sum(turn.tokens for turn in sample.record) == sample.trajectory.response_length
    # each prompt holds the one before it, and its answer
    assert second.prompt_tokens > first.prompt_tokens + first.tokens
    assert first.prompt_tokens == sample.trajectory.parts[0].prompt_length
    assert (first.after, second.after) == ((), ())
    assert third.after
    times = [moment for turn in sample.record for moment in (turn.began, turn.sampled, turn.ended)]
    assert times == sorted(times)
    assert before <= times[0]
    assert times[-1] <= after


def test_an_episode_that_a_limit_ends_keeps_what_it_was_shown_last() -> None:
    sample = played("roll_like/FrozenLake-v0", ["<action>right</action>"], lake=["SFF", "FFG"], turns=1)
    (turn,) = sample.record
    assert turn.after
    assert turn.after != turn.shown


def test_calls_are_recorded_with_what_came_of_them(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "What is 2 + 3?", "answer": "5"}\n')
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'
    wrong = '<tool_call>{"name": "calculator"</tool_call>'
    sample = played("roll_like/Tools-v0", [call + wrong, "<answer>5</answer>"], path=str(tasks))
    first, last = sample.record
    right, unread = first.tool_calls
    assert right == {"name": "calculator", "arguments": {"expression": "2+3"}, "result": "5", "error": False}
    assert (unread["name"], unread["error"]) == ("", True)
    assert unread["arguments"] == wrong
    assert "cannot be read" in unread["result"]
    assert (first.invalid, last.invalid, last.tool_calls) == (True, False, ())
    assert [message["role"] for message in last.shown] == ["tool", "tool"]
