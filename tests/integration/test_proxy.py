"""Programs that use the `openai` client play real vLLM: what is trained on is what the engine saw, token for token."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_thread import EngineThread
from seen_sequences import Recorder
from tiny_model import make_tiny_tokenizer

from roll_like.agents.agent_program import AgentPrograms
from roll_like.agents.env_manager import EnvManager, EpisodePlan, episode_task
from roll_like.agents.episode import EnvironmentSpec, EpisodeLimits, ProgramSpec
from roll_like.agents.proxy import Proxy
from roll_like.data.chat import Renderer
from roll_like.inference.interface import Sampling
from roll_like.rollout.collection import Collected, collect_batch
from roll_like.rollout.router import Router
from roll_like.types import StopReason

pytestmark = pytest.mark.integration

GROUPS, MEMBERS, TURNS = 2, 2, 4
AGENT = Path(__file__).with_name("openai_agent.py")


class NoEnvironments:
    """Programs score themselves."""

    def open(self, spec: EnvironmentSpec) -> Any:
        raise AssertionError("nothing hosts an environment here")


async def play(recorder: Recorder, seen: Path) -> Collected:
    router, renderer = Router([recorder], max_running=16, max_in_flight=16, retries=0), Renderer(make_tiny_tokenizer())
    spec = ProgramSpec(
        name="talk",
        command=(sys.executable, str(AGENT)),
        env={"SEEN": str(seen)},
        timeout_seconds=60,
        max_programs=2,
    )
    plan = EpisodePlan(
        episodes_per_group=MEMBERS,
        sampling=Sampling(max_tokens=12),
        limits=EpisodeLimits(turns=TURNS, tokens=500),
    )
    async with Proxy(router, renderer) as proxy:
        manager = EnvManager(router, NoEnvironments(), [spec], renderer, retries=0, programs=AgentPrograms(proxy))
        tasks = (episode_task(spec, seed) for seed in itertools.count())
        return await collect_batch(manager.runner(plan, 0), tasks, groups=GROUPS)


def test_programs_are_trained_on_what_the_engine_saw(vllm: EngineThread, tmp_path: Path) -> None:
    recorder = Recorder(vllm.engine)
    collected = vllm.run(play(recorder, tmp_path))
    assert not collected.failures, collected.failures
    episodes = [sample for group in collected.groups for sample in group.samples]
    told = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")]
    assert len(episodes) == len(told) == GROUPS * MEMBERS
    assert len(recorder.sampled) == TURNS * len(episodes)
    renderer, left = Renderer(make_tiny_tokenizer()), dict(recorder.sampled)
    for group, members in enumerate(collected.groups):
        assert members.task.metadata["seed"] == group
        for sample in members.samples:
            whole = sample.trajectory
            asked = [f"0-{group}-{whole.sample_index}-0-{turn}" for turn in range(TURNS)]
            # what the engine was given and what it sampled, with nothing between
            for turn, name in enumerate(asked):
                places = np.flatnonzero(whole.turns == turn)
                (part,) = (part for part in whole.parts if part.start <= places[0] < part.end)
                generation = left.pop(name)
                assert whole.token_ids[part.start : places[0]].tolist() == recorder.asked[name].prompt_ids.tolist()
                assert whole.token_ids[places].tolist() == generation.token_ids.tolist()
                assert whole.logprobs[places].tolist() == generation.logprobs.tolist()
                assert recorder.asked[name].sampling.max_tokens == (5 if turn == 1 else 12)
            # the helper's turn stands by itself, the others are one sequence
            turns = [sorted({*whole.turns[part.start : part.end].tolist()} - {-1}) for part in whole.parts]
            assert sorted(turns) == [[0, 2, 3], [1]]
            assert (whole.turns >= 0).tolist() == whole.sampled.tolist()
            # and what the program was told is what was sampled
            texts = [recorder.sampled[name].text for name in asked]
            told.remove([*texts, "episode_turn_limit"])
            assert sample.reward == len(texts[0])
            assert [record.text for record in sample.record] == texts
            assert whole.stop_reason is StopReason.LENGTH
            assert sample.details["conversations"] == 2
            assert f"begin {group}" in renderer.decode(whole.token_ids)
    assert not left
    assert not told
