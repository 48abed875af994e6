"""Programs that use the `openai` client play real vLLM: what is trained on is what the engine saw, token for token."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_thread import EngineThread, float_spec
from seen_sequences import Recorder
from tiny_model import make_tiny_model, make_tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from roll_like.agents.agent_program import AgentPrograms
from roll_like.agents.env_manager import EnvManager, EpisodePlan, episode_task
from roll_like.agents.episode import EnvironmentSpec, EpisodeLimits, ProgramSpec, VerifiersSpec
from roll_like.agents.proxy import Proxy
from roll_like.agents.verifiers_episodes import VerifiersEnvironments
from roll_like.data.chat import Renderer
from roll_like.inference.interface import Sampling
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.rollout.collection import Collected, collect_batch
from roll_like.rollout.router import Router
from roll_like.types import StopReason, Trajectory

pytestmark = pytest.mark.integration

GROUPS, MEMBERS, TURNS = 2, 2, 4
AGENT = Path(__file__).with_name("openai_agent.py")
VERIFIERS = Path(__file__).resolve().parents[2] / ".verifiers" / "bin" / "python"
RAMBLES = {"turns": 4, "sums_up_after": 2, "sub_agents": 1}


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


def engine_turns(recorder: Recorder) -> Counter[Any]:
    """What the engine was given, what it sampled, and how likely."""
    return Counter(
        (
            tuple(asked.prompt_ids.tolist()),
            tuple(recorder.sampled[name].token_ids.tolist()),
            tuple(recorder.sampled[name].logprobs.tolist()),
        )
        for name, asked in recorder.asked.items()
    )


def trained_turns(trajectory: Trajectory) -> Iterator[tuple[Any, ...]]:
    """The same of what is trained on."""
    assert (trajectory.turns >= 0).tolist() == trajectory.sampled.tolist()
    for turn in range(trajectory.turns.max() + 1):
        places = np.flatnonzero(trajectory.turns == turn)
        (part,) = (part for part in trajectory.parts if part.start <= places[0] < part.end)
        prompt, sampled = trajectory.token_ids[part.start : places[0]], trajectory.token_ids[places]
        yield tuple(prompt.tolist()), tuple(sampled.tolist()), tuple(trajectory.logprobs[places].tolist())


async def play_verifiers(
    recorder: Recorder, taskset: str, harness: dict[str, Any], *, tokens: int, response: int
) -> Collected:
    router, renderer = Router([recorder], max_running=16, max_in_flight=16, retries=0), Renderer(make_tiny_tokenizer())
    spec = VerifiersSpec(
        name=taskset,
        python=str(VERIFIERS),
        config={"taskset": {"id": taskset}},
        seats={"runtime": {"type": "subprocess"}, "harness": harness},
        select={},
        held_out=0,
        env={"PYTHONPATH": str(AGENT.parents[1] / "verifiers_tasks")},
        timeout_seconds=60,
        max_episodes=4,
    )
    limits = EpisodeLimits(turns=20, tokens=tokens)
    plan = EpisodePlan(episodes_per_group=MEMBERS, sampling=Sampling(max_tokens=response), limits=limits)
    async with Proxy(router, renderer) as proxy:
        environments = VerifiersEnvironments(proxy, limits)
        try:
            manager = EnvManager(router, NoEnvironments(), [spec], renderer, retries=0, verifiers=environments)
            tasks = (episode_task(spec, seed) for seed in itertools.count())
            return await collect_batch(manager.runner(plan, 0), tasks, groups=GROUPS)
        finally:
            await environments.close()


def fitted(model: Path, tokenizer: PreTrainedTokenizerFast, conversations: Sequence[list[dict[str, str]]]) -> None:
    """Fit a model to what the assistant says in some conversations until it says little else."""
    import torch

    network, losses = AutoModelForCausalLM.from_pretrained(model), [1.0]
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    rows = []
    for messages in conversations:
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        labels = [-100] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                begin = len(
                    tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, return_dict=False)
                )
                end = len(tokenizer.apply_chat_template(messages[: turn + 1], return_dict=False)) - 1  # its newline
                labels[begin:end] = ids[begin:end]
        rows.append((torch.tensor([ids]), torch.tensor([labels])))
    while max(losses[-len(rows) :]) > 2e-4:
        assert len(losses) < 4000, losses[-1]
        ids, labels = rows[len(losses) % len(rows)]
        loss = network(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    network.save_pretrained(model)


@pytest.mark.slow
@pytest.mark.skipif(not VERIFIERS.exists(), reason="make verifiers installs what it plays in")
def test_tools_of_verifiers_are_called_by_what_the_engine_sampled(tmp_path: Path) -> None:
    model, tokenizer = make_tiny_model(tmp_path / "model", dtype="float32"), make_tiny_tokenizer()
    said = {}
    for item in ("pear", "melon"):
        call = f'<tool_call>\n{{"name": "shop_price", "arguments": {{"item": "{item}"}}}}\n</tool_call>'
        said[f"What does a {item} cost?"] = (call, str(3 * len(item)))
    conversations = [
        [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": call},
            {"role": "tool", "content": price},
            {"role": "assistant", "content": f"it costs {price}"},
        ]
        for asked, (call, price) in said.items()
    ]
    fitted(model, tokenizer, conversations)
    with EngineThread(VLLMEngine(VLLMConfig(kv_cache_gib=0.1, max_running=16), float_spec(model))) as vllm:
        recorder = Recorder(vllm.engine)
        collected = vllm.run(play_verifiers(recorder, "shop", {"id": "null"}, tokens=450, response=100))
    assert not collected.failures, collected.failures
    samples = [sample for group in collected.groups for sample in group.samples]
    turns = Counter(turn for one in samples for turn in trained_turns(one.trajectory))
    assert turns == engine_turns(recorder)
    called = [one for one in samples if one.reward == 1.0]
    assert len(called) >= 2  # what the tool answered was read
    for one in called:
        assert len(one.trajectory.parts) == 1
        assert [turn.tool_calls[0]["name"] for turn in one.record if turn.tool_calls] == ["shop_price"]


@pytest.mark.skipif(not VERIFIERS.exists(), reason="make verifiers installs what it plays in")
def test_environments_of_verifiers_are_trained_on_what_the_engine_saw(vllm: EngineThread) -> None:
    recorder = Recorder(vllm.engine)
    harness = {"id": "rambles", **RAMBLES}
    collected = vllm.run(play_verifiers(recorder, "sums", harness, tokens=500, response=8))
    assert not collected.failures, collected.failures
    episodes = [sample.trajectory for group in collected.groups for sample in group.samples]
    assert len(recorder.sampled) == 8 * len(episodes)
    assert Counter(turn for one in episodes for turn in trained_turns(one)) == engine_turns(recorder)
    for one in episodes:  # two turns, two after the summary, and four of a sub-agent that remembers nothing
        assert (
            sorted(len({*one.turns[part.start : part.end].tolist()} - {-1}) for part in one.parts) == [1] * 4 + [2] * 2
        )


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
