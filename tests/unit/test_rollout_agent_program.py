"""Agent programs as real processes: how they are started, scored, refused, and ended with all that they started."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from chat_templates import renderer
from fake_policy import PROGRAM, FakePolicy, assert_token_exact, episode_settings
from hygiene import ended
from test_rollout_env_manager import SETTINGS

from roll_like.agents import agent_program, container
from roll_like.agents.agent_program import AgentPrograms
from roll_like.agents.env_manager import EnvManager, EpisodePlan, episode_task
from roll_like.agents.episode import EnvironmentSpec, EpisodeLimits, ProgramSpec, Started, Stepped
from roll_like.agents.proxy import Proxy
from roll_like.builtin.pipelines.agentic.config import SET_FOR_PROGRAMS
from roll_like.cluster import guardian
from roll_like.config.containers import ContainerConfig
from roll_like.errors import EnvError, GenerationError
from roll_like.inference.interface import Sampling
from roll_like.rollout.collection import Collected, collect_batch
from roll_like.rollout.router import SampleLost
from roll_like.types import Scored, StopReason

CHATML = renderer("chatml")
AGENT = Path(__file__).resolve().parents[1] / "plain_agent.py"
QA = EnvironmentSpec(name="qa", env_id="test/QA-v0", kwargs={})


def program(*acts: str, **changes: Any) -> ProgramSpec:
    """A program that does these things, one after another."""
    return replace(PROGRAM, command=(sys.executable, "-I", "-S", str(AGENT), *acts), **changes)


class Quiz:
    """An environment that wants `fox`."""

    def __init__(self, *, ends: bool = True, agent: str = "") -> None:
        self.ends, self.agent, self.closed, self.answers = ends, agent, 0, []

    async def reset(self, seed: int) -> Started:
        messages = [{"role": "user", "content": f"question {seed}"}]
        return Started(messages=messages, tools=[], state="", agent=self.agent)

    async def step(self, text: str) -> Stepped:
        self.answers.append(text)
        right = text == "fox"
        return Stepped(
            messages=[], reward=float(right), terminated=self.ends, truncated=False, success=right, state="end"
        )

    async def close(self) -> None:
        self.closed += 1


class Quizzes:
    """Makes quizzes."""

    def __init__(self, **settings: Any) -> None:
        self.made: list[Quiz] = []
        self._settings = settings

    def open(self, spec: EnvironmentSpec) -> Quiz:
        self.made.append(Quiz(**self._settings))
        return self.made[-1]


@asynccontextmanager
async def programs(policy: FakePolicy, quizzes: Quizzes | None = None) -> AsyncIterator[AgentPrograms]:
    async with Proxy(policy, CHATML) as proxy:
        yield AgentPrograms(proxy, quizzes)
        assert not proxy._episodes  # every episode was closed


async def play(
    spec: ProgramSpec,
    policy: FakePolicy | None = None,
    *,
    quizzes: Quizzes | None = None,
    turns: int = 5,
    seed: int = 7,
) -> Scored:
    async with programs(policy or FakePolicy(CHATML, ["the fox", "a dog"]), quizzes) as player:
        settings = episode_settings(
            task=episode_task(spec, seed), sampling=Sampling(max_tokens=64), turns=turns, tokens=1000
        )
        return await player.play(spec, settings)


async def failure(spec: ProgramSpec, **more: Any) -> str:
    with pytest.raises(EnvError) as caught:
        await play(spec, **more)
    return str(caught.value)


def gone(message: str) -> bool:
    """Whether the child that a program named is gone."""
    (pid,) = map(int, re.findall(r"child (\d+)", message))
    return ended(pid)


# ---- playing -------------------------------------------------------------------------------------


async def test_a_program_plays_an_episode() -> None:
    policy = FakePolicy(CHATML, ["the fox", "a dog"])
    scored = await play(program("turn", "turn", "reward=0.5"), policy)
    assert_token_exact(scored, policy)
    assert (scored.reward, scored.turn_rewards, scored.details["success"]) == (0.5, (0.0, 0.5), 1.0)
    assert scored.record[0].shown == ({"role": "user", "content": "seed 7"},)
    assert scored.trajectory.task.task_id == "agent:7"


async def test_what_a_program_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SET_FOR_PROGRAMS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "inner.example")
    spec = program("environment", "exit=1", env={"MINE": "yes"}, directory=str(tmp_path))
    said = (await failure(spec)).partition("ends with:\n")[2].splitlines()
    variables = json.loads(said[0])
    assert variables["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert variables["OPENAI_API_KEY"].startswith("sk-roll-")
    assert variables.keys() - os.environ.keys() - {"MINE"} == set(SET_FOR_PROGRAMS)  # and may not be configured
    assert (variables["ROLL_LIKE_SEED"], variables["MINE"]) == ("7", "yes")
    assert json.loads(variables["ROLL_LIKE_TASK"]) == {"name": "agent", "seed": 7}
    assert variables["NO_PROXY"] == "inner.example,127.0.0.1"
    assert said[1] == str(tmp_path)


async def test_a_task_that_no_variable_holds_is_still_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_program, "MAX_TASK_BYTES", 10)
    said = await failure(program("environment", "exit=1"))
    assert "ROLL_LIKE_TASK" not in said
    assert "OPENAI_API_KEY" in said


async def test_a_program_that_lingers_after_its_reward_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_program, "LINGER_SECONDS", 0.2)
    began = time.monotonic()
    scored = await play(program("turn", "reward=1", "sleep=30"))
    assert scored.reward == 1
    assert time.monotonic() - began < 30


async def test_much_output_does_not_block_a_program() -> None:
    assert (await play(program("flood=3000000", "turn", "reward=1"))).reward == 1


# ---- scored by an environment --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acts", "answers", "reward"),
    [
        (("task", "turn", "answer=fox"), ["fox"], 1.0),
        (("turn", "turn"), ["a dog"], 0.0),  # the last thing that the policy said
    ],
)
async def test_an_environment_scores_the_answer(acts: tuple[str, ...], answers: list[str], reward: float) -> None:
    quizzes = Quizzes()
    scored = await play(program(*acts, environment=QA), quizzes=quizzes)
    (quiz,) = quizzes.made
    assert quiz.answers == answers
    assert (scored.reward, scored.details["success"]) == (reward, reward)
    assert quiz.closed == 1


async def test_reasoning_is_trained_on_and_no_part_of_what_a_program_or_its_environment_gets() -> None:
    policy, quizzes = FakePolicy(CHATML, ["<think>hm</think>the fox", "<think>or a dog?</think>fox"]), Quizzes()
    scored = await play(program("turn", "turn", environment=QA), policy, quizzes=quizzes)
    assert (quizzes.made[0].answers, scored.reward) == (["fox"], 1.0)
    assert_token_exact(scored, policy)
    assert [turn.text for turn in scored.record] == ["<think>hm</think>the fox", "<think>or a dog?</think>fox"]
    assert scored.details["conversations"] == 1
    quizzes = Quizzes()
    await play(
        program("turn", environment=QA, reasoning_apart=False), FakePolicy(CHATML, ["<think>a"]), quizzes=quizzes
    )
    assert quizzes.made[0].answers == ["<think>a"]


async def test_another_models_answers_are_not_trained_on() -> None:
    said = await failure(
        program("turn", models=("agent",))
    )  # it asks for `policy`, as a simulated user would by mistake
    assert "HTTP Error 404" in said


async def test_the_environments_messages_are_the_programs_task() -> None:
    quizzes = Quizzes()
    said = await failure(program("task", "exit=1", environment=QA), quizzes=quizzes)
    told = json.loads(said.partition("ends with:\n")[2].splitlines()[0])
    assert told["messages"] == [{"role": "user", "content": "question 7"}]
    assert (quizzes.made[0].answers, quizzes.made[0].closed) == ([], 1)


async def test_an_environment_that_goes_on_cannot_score() -> None:
    quizzes = Quizzes(ends=False)
    said = await failure(program("turn", environment=QA), quizzes=quizzes)
    assert "'test/QA-v0' did not end with the answer" in said
    assert quizzes.made[0].closed == 1


async def test_an_environment_of_several_agents_cannot_score() -> None:
    quizzes = Quizzes(agent="white")
    assert "'test/QA-v0' has several agents" in await failure(program("turn", environment=QA), quizzes=quizzes)
    assert (quizzes.made[0].answers, quizzes.made[0].closed) == ([], 1)


# ---- limits --------------------------------------------------------------------------------------


async def test_a_program_that_a_limit_stopped_has_its_limit_reward() -> None:
    policy = FakePolicy(CHATML, ["fox"])
    scored = await play(program("endless", limit_reward=-1.0), policy, turns=3)  # ends with an exception of its own
    assert (scored.reward, len(scored.record), scored.trajectory.stop_reason) == (-1.0, 3, StopReason.LENGTH)
    assert_token_exact(scored, policy)


async def test_without_a_limit_reward_it_has_failed() -> None:
    said = await failure(program("endless"), turns=2)
    assert "posted no reward, and it had no turns left" in said
    assert "program.limit_reward" in said


async def test_at_a_limit_an_environment_scores_what_was_said_last() -> None:
    quizzes = Quizzes()
    scored = await play(
        program("endless", environment=QA), FakePolicy(CHATML, ["dog", "fox"]), quizzes=quizzes, turns=2
    )
    assert (scored.reward, scored.trajectory.stop_reason) == (1.0, StopReason.LENGTH)


# ---- failures ------------------------------------------------------------------------------------


async def test_a_program_that_fails_is_quoted() -> None:
    said = await failure(program("turn", "say=my tool is broken", "exit=3"))
    assert "ended with status 3, with 1 turns taken; its stderr ends with:\nmy tool is broken" in said
    assert "docs/agents.md" in said
    assert "its stdout ends with:\nxxx" in await failure(program("flood=3", "exit=1"))
    assert "it wrote nothing" in await failure(program("exit=1"))


async def test_a_program_that_does_nothing() -> None:
    assert "sent no chat request" in await failure(program())
    assert "posted no reward\n" in await failure(program("turn"))


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    open_files = len(psutil.Process().open_files())
    said = await failure(replace(PROGRAM, command=("no-such-agent", "--now")))
    assert "`no-such-agent --now` cannot be started" in said
    assert "correct `program.command`" in said
    assert "cannot be started" in await failure(program(directory=str(tmp_path / "nowhere")))
    assert len(psutil.Process().open_files()) == open_files


@pytest.mark.parametrize("child", ["group", "session"])
async def test_a_program_that_hangs_goes_with_its_children(child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def too_long(process: Any, episode: Any) -> None:
        """Let its time be over once it has taken a turn."""
        while not episode.turns:
            await asyncio.sleep(0.01)
        raise TimeoutError

    monkeypatch.setattr(agent_program, "_ended", too_long)
    said = await failure(program(f"child={child}", "turn", "sleep=600"))
    assert f"did not end within {PROGRAM.timeout_seconds:g} s, with 1 turns taken" in said
    assert "program.timeout_seconds" in said
    assert gone(said)


async def test_a_program_that_does_not_let_itself_be_ended() -> None:
    said = await failure(program("stubborn", "say=ready", "sleep=60", timeout_seconds=2.0))
    assert "did not end within 2 s" in said


@pytest.mark.parametrize("child", ["group", "session"])
async def test_children_that_stay_behind_are_ended(child: str) -> None:
    began = time.monotonic()
    said = await failure(program(f"child={child}", "exit=1"))
    assert gone(said)
    assert time.monotonic() - began < 30  # less than the child would have held its pipe


async def test_a_child_that_got_away_holds_nobody_up() -> None:
    began = time.monotonic()
    said = await failure(program("child=escaped", "exit=1"))
    assert time.monotonic() - began < 30
    (pid,) = map(int, re.findall(r"child (\d+)", said))
    psutil.Process(pid).kill()


async def test_a_lost_sample_ends_the_program() -> None:
    began = time.monotonic()
    with pytest.raises(SampleLost, match="engine hiccup"):
        await play(program("turn", "sleep=60"), FakePolicy(CHATML, [SampleLost("engine hiccup")]))
    assert time.monotonic() - began < 30


async def test_a_play_that_is_cancelled_ends_the_program() -> None:
    policy = FakePolicy(CHATML, ["fox"])
    others = psutil.Process().children(recursive=True)  # of other tests in this process
    playing = asyncio.create_task(play(program("turn", "child=session", "sleep=60"), policy))
    while not policy.generations:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    children = [one for one in psutil.Process().children(recursive=True) if one not in others]
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert children
    assert ended(*(one.pid for one in children))


# ---- many of them, through the manager -----------------------------------------------------------


def collect(spec: ProgramSpec, policy: FakePolicy, *, retries: int = 1, groups: int = 1, **changes: Any) -> Collected:
    settings = {**SETTINGS, "sampling": Sampling(max_tokens=64), "limits": EpisodeLimits(turns=5, tokens=1000)}

    async def filled() -> Collected:
        async with programs(policy) as player:
            manager = EnvManager(policy, Quizzes(), [spec], CHATML, retries=retries, programs=player)
            tasks = (episode_task(spec, seed) for seed in itertools.count(40))
            runner = manager.runner(EpisodePlan(**(settings | changes)), 5)
            return await asyncio.wait_for(collect_batch(runner, tasks, groups=groups), timeout=60)

    return asyncio.run(filled())


def policy_of(says: Any) -> FakePolicy:
    return FakePolicy(CHATML, says)


def test_members_of_a_group_begin_alike_and_are_drawn_apart() -> None:
    policy = policy_of(["fox"])
    collected = collect(program("turn", "turn", "reward=1"), policy, groups=2, urgent=True)
    assert [group.task.task_id for group in collected.groups] == ["agent:40", "agent:41"]
    for group in collected.groups:
        first, second = group.samples
        seed = group.task.metadata["seed"]
        assert group.task.messages == ({"role": "user", "content": f"seed {seed}"},)
        assert first.record[0].shown == second.record[0].shown == group.task.messages
    assert len({request.seed for request in policy.requests}) == len(policy.requests) == 8
    assert policy.urgent == [True] * 8
    assert {request.request_id.rpartition("-")[0] for request in policy.requests} == {
        f"0-{group}-{index}-0" for group in range(2) for index in range(2)
    }


def test_a_failed_program_is_tried_again_and_then_counted() -> None:
    collected = collect(program("say=no luck", "exit=1"), policy_of(["fox"]), retries=1)
    assert [failure.stage for failure in collected.failures] == ["environment", "environment"]
    assert "no luck" in collected.failures[0].error
    assert collected.failures[0].origin.endswith("with seed 40")
    assert not collected.groups[0].samples


def test_a_lost_sample_is_tried_again() -> None:
    collected = collect(program("turn", "reward=1"), policy_of([SampleLost("hiccup"), "fox"]), episodes_per_group=1)
    assert not collected.failures
    assert collected.groups[0].samples[0].reward == 1


def test_no_replica_left_ends_everything() -> None:
    with pytest.raises(GenerationError, match="every replica is gone"):
        collect(program("turn", "reward=1"), policy_of([GenerationError("every replica is gone")]))


def test_no_more_programs_at_a_time_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0
    run: Callable[..., Any] = agent_program._run_program

    async def counted(*arguments: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await run(*arguments)
        running -= 1

    monkeypatch.setattr(agent_program, "_run_program", counted)
    collected = collect(program("turn", "reward=1", max_programs=2), policy_of(["fox"]), episodes_per_group=6)
    assert len(collected.groups[0].samples) == 6
    assert most == 2


def test_redundant_programs_are_ended() -> None:
    before = psutil.Process().children()  # of other tests in this process
    collected = collect(
        program("turn", "reward=1", "sleep=0", max_programs=3), policy_of(["fox"]), episodes_per_group=2, redundant=2
    )
    assert len(collected.groups[0].samples) == 2
    assert not [one for one in psutil.Process().children() if one not in before]


def test_programs_need_their_runner() -> None:
    with pytest.raises(ValueError, match="pass AgentPrograms"):
        EnvManager(policy_of(["fox"]), Quizzes(), [PROGRAM], CHATML, retries=0)


async def test_an_engine_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = tmp_path / "podman"
    engine.write_text("#!/bin/sh\nsleep 60; true\n")  # what it starts holds its pipes
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(container, "START_SECONDS", 0.2)
    spec = ContainerConfig(type="podman", image="agent:1")
    async with Proxy(FakePolicy(CHATML, ["fox"]), CHATML) as proxy:
        with pytest.raises(EnvError, match=r"agent could not be removed: `podman rm` did not end within 0\.2 s"):
            await container.Container(spec, "agent", proxy, str(tmp_path)).remove()
    problem = await agent_program.container_problem(spec.model_copy(update={"network": "host"}))
    assert problem == (
        "image",
        "podman has no image 'agent:1': `podman image` did not end within 0.2 s; pull or build it, runs do not",
    )
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(engine) in (one.info["cmdline"] or [])]


async def test_a_container_that_is_made_after_its_command_was_killed_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "podman").write_text(
        f"""#!/bin/sh
cd {tmp_path}
case $1 in
rm) echo >> asked; test "$(wc -l < asked)" -lt 3 || touch made; echo Error: no such container >&2; rm made ;;
esac
"""
    )
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    # a quarter of a second a look: it is asked three times in a second
    monkeypatch.setattr(container, "SETTLE_SECONDS", 1.0)
    clock = itertools.count(0.0, 0.25)
    monkeypatch.setattr(container, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    async with Proxy(FakePolicy(CHATML, ["fox"]), CHATML) as proxy:
        spec = ContainerConfig(type="podman", image="agent:1")
        await container.Container(spec, "agent", proxy, str(tmp_path)).remove()
    assert len((tmp_path / "asked").read_text().splitlines()) == 3
    assert not (tmp_path / "made").exists()  # it was there, and went


def test_a_container_that_an_engine_does_not_remove_at_once_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "podman").write_text(
        f"""#!/bin/sh
cd {tmp_path}
case $1 in
ps) test -e removed || echo "c0ffee map[roll-like.run:roll-1234]"; echo "5eed map[a:b]" ;;
rm) echo "$@" >> asked; test "$(wc -l < asked)" -lt 3 || touch removed; test -e removed ;;
esac
"""
    )
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    guardian.remove_containers("roll-1234", ["podman"])
    assert (tmp_path / "asked").read_text().splitlines() == ["rm --force --volumes c0ffee"] * 3


def test_folders_that_may_not_be_read_are_removed(tmp_path: Path) -> None:
    folder = guardian.temporary_folder("abc", str(tmp_path))
    assert folder.parent == tmp_path
    (folder / "work" / "work").mkdir(parents=True)
    (folder / "work" / "work").chmod(0)
    guardian.remove_folder(folder)
    assert not folder.exists()
