"""Agent programs in containers of Podman and Docker: what they reach, what limits them, and what they leave."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from chat_templates import renderer
from fake_policy import PROGRAM, FakePolicy, assert_token_exact, episode_settings
from hygiene import nothing_left
from machine_image import IMAGE, import_machine_image
from run_config import read_lines, run_here, write_episodes_run
from test_verifiers import VERIFIERS, spec_of
from test_verifiers import table as verifiers_table

from roll_like.agents.agent_program import AgentPrograms
from roll_like.agents.container import LABEL, container_problem
from roll_like.agents.episode import ContainerSpec, ProgramSpec, VerifiersLost
from roll_like.agents.proxy import Proxy
from roll_like.errors import EnvError
from roll_like.types import Scored

CHATML = renderer("chatml")
TESTS = Path(__file__).resolve().parents[1]
GUARDIAN = TESTS.parent / "roll_like" / "cluster" / "guardian.py"
ENGINES = ("podman", "docker")
pytestmark = [pytest.mark.integration, pytest.mark.slow]
needs_verifiers = pytest.mark.skipif(not VERIFIERS.exists(), reason="make verifiers installs what it plays in")


def ran(*command: str | Path, **options: Any) -> str:
    return subprocess.run(command, check=True, text=True, capture_output=True, timeout=120, **options).stdout.strip()


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """An engine that runs containers here, with an image that has this machine's Python and nothing else."""
    name = request.param
    try:
        ran(name, "info")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{name} does not run containers here: {error}")
    import_machine_image(name)
    yield name
    assert ran(name, "ps", "-a", "--filter=name=roll-like-", "--format={{.Names}}") == "", "a container was left"
    ran(name, "rmi", IMAGE)


def program(engine: str, *acts: str, options: tuple[str, ...] = (), **container: Any) -> ProgramSpec:
    """`plain_agent.py` in a container."""
    mounts = (f"{TESTS}:/tests", *container.pop("mounts", ()))
    spec = ContainerSpec(type=engine, image=IMAGE, mounts=mounts, options=options, **container)
    command = ("/usr/bin/python3", "-I", "-S", "/tests/plain_agent.py", *acts)
    return replace(PROGRAM, command=command, container=spec, timeout_seconds=60)


async def play(spec: ProgramSpec, policy: FakePolicy | None = None, *, turns: int = 5) -> Scored:
    async with Proxy(policy or FakePolicy(CHATML, ["the fox", "a dog"]), CHATML) as proxy:
        return await AgentPrograms(proxy).play(spec, episode_settings(seed=7, turns=turns))


async def said(spec: ProgramSpec) -> str:
    with pytest.raises(EnvError) as caught:
        await play(spec)
    return caught.value.message.partition("ends with:\n")[2]


def shell(spec: ProgramSpec, script: str) -> ProgramSpec:
    """The same container with another program, which says something and fails."""
    return replace(spec, command=("sh", "-c", f"({script}) >&2; exit 3"))


@pytest.mark.parametrize("network", ["none", "bridge", "host"])
async def test_a_program_asks_the_policy(engine: str, network: str) -> None:
    policy = FakePolicy(CHATML, ["the fox", "a dog"])
    scored = await play(program(engine, "turn", "turn", "reward=0.5", network=network), policy)
    assert_token_exact(scored, policy)
    assert (scored.reward, len(scored.record)) == (0.5, 2)


async def test_nothing_but_the_policy_is_reached(engine: str) -> None:
    spec = program(engine)
    assert (await said(shell(spec, "cat /proc/net/dev | grep -c :"))) == "1"  # loopback alone
    variables = await said(shell(replace(spec, env={"MINE": "yes", "HOME": "/app"}), "env"))
    assert {"MINE=yes", "HOME=/app", "NO_PROXY=127.0.0.1"} <= set(variables.splitlines())
    assert "OPENAI_BASE_URL=http://127.0.0.1:" in variables
    assert not any(line.startswith("PYTEST_CURRENT_TEST") for line in variables.splitlines())


async def test_mounts_and_limits(engine: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    mounts = (f"{tmp_path}/in:/in", f"{tmp_path}/out:/out:rw")
    spec = program(engine, mounts=mounts, memory_gib=0.0625, cpus=0.5)
    script = (
        "echo kept > /out/file; echo no > /in/file; cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/cpu.max "
        "/sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/cpu/cpu.cfs_quota_us"
    )
    written = await said(shell(spec, script))
    assert "/in/file" in written  # read-only
    assert "67108864" in written.splitlines()
    assert any(line.split()[0] == "50000" for line in written.splitlines() if line)
    assert (tmp_path / "out" / "file").read_text() == "kept\n"
    assert list((tmp_path / "in").iterdir()) == []
    hungry = replace(spec, command=("/usr/bin/python3", "-c", "len(bytearray(2**28)) and print('had it')"))
    with pytest.raises(EnvError, match=r"ended with status 137\b") as caught:
        await play(hungry)
    assert "it wrote nothing" in str(caught.value)
    assert "raise `program.runtime.memory_gib`" in str(caught.value)
    assert not Path("oom").exists()  # a note of Podman's


async def test_containers_end_with_their_episodes(engine: str) -> None:
    late = replace(program(engine, "sleep=60"), timeout_seconds=5)
    with pytest.raises(EnvError, match="did not end within 5 s"):
        await play(late)
    assert ran(engine, "ps", "-a", "--filter=name=roll-like-", "--format={{.Names}}") == ""
    for seconds in (5, 0.05, 0.2, 0.4, 0.8):  # also while it starts
        cancelled = asyncio.ensure_future(play(program(engine, "child=escaped", "sleep=60")))
        await asyncio.sleep(seconds)
        if seconds == 5:
            assert ran(engine, "ps", "--filter=name=roll-like-", "--format={{.Names}}")
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert ran(engine, "ps", "-a", "--filter=name=roll-like-", "--format={{.Names}}") == ""


def test_a_run_that_is_killed_leaves_no_container(engine: str) -> None:
    session = f"roll-{secrets.token_hex(8)}"
    labels = ("--label", f"{LABEL}={session}"), ("--label", f"verifiers.run={session}-1"), ("--label", "a=b")
    names = [ran(engine, "run", "--detach", *label, "--entrypoint=sleep", IMAGE, "600") for label in labels]
    try:
        guardian = subprocess.Popen([sys.executable, "-I", "-S", GUARDIAN, session], stdin=subprocess.PIPE)
        guardian.communicate(b"", timeout=60)  # the driver was killed: it has not said that it was done
        assert ran(engine, "ps", "--all", "--quiet", "--no-trunc").split() == names[2:]
    finally:
        ran(engine, "rm", "--force", names[2])


@needs_verifiers
async def test_verifiers_plays_in_containers(engine: str) -> None:
    runtime = {"type": engine, "image": IMAGE, "memory": 0.25, "cpu": 1}
    seats = {"runtime": runtime, "harness": {"id": "formats", "asks": "responses"}}
    async with verifiers_table("it is 4") as each:
        (part,) = await each.play(spec_of({"id": "sums"}, seats=seats), seed=2)
        assert_token_exact(part, each.policy)
        assert part.reward == 2.0
        each.policy.open.clear()
        playing = asyncio.ensure_future(each.play(spec_of({"id": "sums"}, seats=seats), seed=2))
        while len(each.policy.requests) < 2:
            await asyncio.sleep(0.05)
        (name,) = ran(engine, "ps", "--filter=name=vf-", "--format={{.Names}}").split()
        for server in psutil.Process().children():
            server.kill()  # it had no time to remove its container
        with pytest.raises(VerifiersLost, match="ended with status -9"):
            await playing
    assert name not in ran(engine, "ps", "--all", "--format={{.Names}}")


ROLLS = """
import random, runpy, sys
sys.argv = ["agent", "turn", f"reward={random.random()}"]
runpy.run_path("/tests/plain_agent.py", run_name="__main__")
"""


@pytest.mark.usefixtures("warm_ray")
def test_a_run_trains_on_what_containers_played(engine: str, tiny_model: Path, tmp_path: Path) -> None:
    runtime = {"type": engine, "image": IMAGE, "mounts": [f"{TESTS}:/tests"], "memory_gib": 0.25, "cpus": 1}
    program = {"command": ["python3", "-I", "-S", "-c", ROLLS], "runtime": runtime, "max_programs": 4}
    config = write_episodes_run(
        tmp_path,
        tiny_model,
        steps=3,
        environments=[{"name": "boxed", "program": program}],
        algorithm={"advantage": "grpo"},
        inference={"type": "hf"},
        rollout={
            "groups_per_step": 2,
            "episodes_per_group": 2,
            "max_turns": 2,
            "max_response_tokens": 8,
            "max_episode_tokens": 160,
        },
        evaluation={"seeds": 2, "episodes_per_seed": 1},
        checkpoint={"at_end": False, "export": False},
    )
    with nothing_left():
        code, output = run_here(config)
    assert code == 0, output
    steps = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert [(step["rollout/samples"], step["rollout/failures"]) for step in steps] == [(4, 0)] * 3
    assert all(step["train/grad_norm"] > 0 for step in steps)


async def test_what_cannot_run_is_named(engine: str) -> None:
    missing = replace(program(engine), command=("no-such-program",))
    assert "no-such-program" in await said(missing)
    spec = ContainerSpec(type=engine, image="localhost/no-such-image:1")
    problem = await container_problem(spec)
    assert problem is not None
    assert problem[0] == "image"
    assert "no-such-image" in problem[1]
    assert await container_problem(replace(spec, image=IMAGE)) is None
