"""Agent programs in containers of Podman, Docker and Apptainer: what they reach, what limits them, what they leave."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from chat_templates import renderer
from fake_policy import PROGRAM, FakePolicy, assert_token_exact, episode_settings
from hygiene import nothing_left
from machine_image import (
    IMAGE,
    UV_IMAGE,
    import_machine_image,
    import_network_image,
    import_uv_image,
    write_machine_folder,
)
from run_config import read_lines, run_here, start_run, write_episodes_run
from test_verifiers import TASKS, VERIFIERS, spec_of
from test_verifiers import table as verifiers_table

from roll_like.agents.agent_program import AgentPrograms, container_problem
from roll_like.agents.container import LABEL
from roll_like.agents.episode import ProgramSpec, VerifiersLost
from roll_like.agents.proxy import Proxy
from roll_like.config.containers import ContainerConfig
from roll_like.errors import EnvError
from roll_like.types import Scored

CHATML = renderer("chatml")
TESTS = Path(__file__).resolve().parents[1]
GUARDIAN = TESTS.parent / "roll_like" / "cluster" / "guardian.py"
ENGINES = ("podman", "docker", "apptainer")
#: What containers of programs are made from, and those of verifiers' runtimes.
IMAGES, RUNTIME_IMAGES = dict.fromkeys(ENGINES, IMAGE), dict.fromkeys(ENGINES, IMAGE)
pytestmark = [pytest.mark.integration, pytest.mark.slow]
needs_verifiers = pytest.mark.skipif(not VERIFIERS.exists(), reason="make verifiers installs what it plays in")


def ran(*command: str | Path, **options: Any) -> str:
    return subprocess.run(command, check=True, text=True, capture_output=True, timeout=120, **options).stdout.strip()


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine that runs containers here, with an image that has this machine's Python and nothing else."""
    name = request.param
    with pytest.MonkeyPatch.context() as patch:
        try:
            if name == "apptainer":
                if os.geteuid() == 0:  # as a user's: root may lack what Apptainer wants of it
                    patch.setenv("APPTAINER_USERNS", "1")
                folder = tmp_path_factory.mktemp("apptainer")
                write_machine_folder(folder / "image")
                ran(name, "exec", folder / "image", "true")
                squash = "--mksquashfs-args=-noI -noD -noF -noX"
                ran(name, "build", squash, folder / "image.sif", folder / "image")
                patch.setitem(IMAGES, name, str(folder / "image"))
                patch.setitem(RUNTIME_IMAGES, name, str(folder / "image.sif"))
            else:
                ran(name, "info")
                import_machine_image(name)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"{name} does not run containers here: {error} {getattr(error, 'stderr', '')}")
        yield name
        assert running(name) == [], "a container was left"
        if name != "apptainer":
            ran(name, "rmi", IMAGE)


def volumes(engine: str) -> str:
    return "" if engine == "apptainer" else ran(engine, "volume", "ls", "--quiet")


def running(engine: str) -> list[str]:
    """The containers that there are, of this run's programs and of verifiers."""
    if engine == "apptainer":
        found = psutil.process_iter(["name", "status"])
        named = [one for one in found if one.info["name"] == "appinit" and one.info["status"] != psutil.STATUS_ZOMBIE]
        return [str(one.pid) for one in named]
    names = ran(engine, "ps", "-a", "--format={{.Names}}").split()
    return [name for name in names if name.startswith(("roll-like-", "vf-"))]


def program(engine: str, *acts: str, options: tuple[str, ...] = (), **container: Any) -> ProgramSpec:
    """`plain_agent.py` in a container."""
    mounts = (f"{TESTS}:/tests", *container.pop("mounts", ()))
    spec = ContainerConfig(type=engine, image=IMAGES[engine], mounts=mounts, options=options, **container)
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
    if engine == "apptainer" and network == "bridge":
        pytest.skip("Apptainer's networks need root and plugins; the configuration refuses them")
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


async def test_mounts(engine: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    spec = program(engine, mounts=(f"{tmp_path}/in:/in", f"{tmp_path}/out:/out:rw"))
    large = "head -c 100000000 /dev/zero > /app/large && echo large"
    script = f"echo kept > /out/file; echo its > /app/own; cat /app/own; {large}; echo no > /in/file"
    written = await said(shell(spec, script))
    assert "/in/file" in written  # read-only
    assert {"its", "large"} <= set(written.splitlines())
    assert (tmp_path / "out" / "file").read_text() == "kept\n"
    assert list((tmp_path / "in").iterdir()) == []
    if engine == "apptainer":
        assert not (Path(IMAGES[engine]) / "app" / "own").exists()


@pytest.fixture
def limiting(engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    """Options of an engine that keeps limits; Apptainer does so for root, in control groups that it makes itself."""
    if engine != "apptainer" or os.geteuid() != 0:
        return ()
    stated = Path("/etc/apptainer/apptainer.conf").read_text()
    (tmp_path / "apptainer.conf").write_text(re.sub("(?m)^systemd cgroups = .*", "systemd cgroups = no", stated))
    monkeypatch.setenv("APPTAINER_CONFIG_FILE", str(tmp_path / "apptainer.conf"))
    monkeypatch.delenv("APPTAINER_USERNS")
    return ("--no-privs", "--drop-caps=CAP_SYS_RESOURCE")


async def test_limits(engine: str, limiting: tuple[str, ...]) -> None:
    limits = {"memory_gib": 0.0625, "cpus": 0.5}
    spec = program(engine, options=limiting, **limits)
    assert spec.container is not None
    if problem := await container_problem(spec.container):
        assert problem[0] == "memory_gib"
        pytest.skip(f"{engine} keeps no limits here: {problem[1]}")
    if engine == "apptainer":
        sleeping = asyncio.ensure_future(play(replace(spec, command=("sleep", "60"))))
        while not (found := [*Path("/sys/fs/cgroup").glob("cpu/apptainer/*/cpu.cfs_quota_us")]):
            await asyncio.sleep(0.05)
        assert found[0].read_text().split() == ["50000"]
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
    else:
        script = (
            "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/cpu.max "
            "/sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/cpu/cpu.cfs_quota_us"
        )
        written = await said(shell(spec, script))
        assert "67108864" in written.splitlines()
        assert any(line.split()[0] == "50000" for line in written.splitlines() if line)
    hungry = replace(spec, command=("/usr/bin/python3", "-c", "len(bytearray(2**28)) and print('had it')"))
    with pytest.raises(EnvError, match=r"ended with status 137\b") as caught:
        await play(hungry)
    assert "ends with:\nhad it" not in str(caught.value)
    assert "raise `program.runtime.memory_gib`" in str(caught.value)
    assert not Path("oom").exists()  # a note of Podman's


async def test_containers_end_with_their_episodes(engine: str) -> None:
    before = volumes(engine)
    late = replace(program(engine, "sleep=60"), timeout_seconds=5)
    with pytest.raises(EnvError, match="did not end within 5 s"):
        await play(late)
    assert running(engine) == []
    for seconds in (5, 0.05, 0.2, 0.4, 0.8):  # also while it starts
        cancelled = asyncio.ensure_future(play(program(engine, "child=escaped", "sleep=60")))
        await asyncio.sleep(seconds)
        if seconds == 5:
            assert running(engine)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert running(engine) == []
    assert volumes(engine) == before


def test_containers_of_a_killed_run_are_found_by_their_labels(engine: str) -> None:
    if engine == "apptainer":
        pytest.skip("Apptainer's containers end with what started them, and have no labels")
    session = f"roll-{secrets.token_hex(8)}"
    labels = ("--label", f"{LABEL}={session}"), ("--label", f"verifiers.run={session}-1"), ("--label", "a=b")
    before = volumes(engine)
    names = [ran(engine, "run", "--detach", *label, "--entrypoint=sleep", IMAGE, "600") for label in labels]
    try:
        guardian = subprocess.Popen([sys.executable, "-I", "-S", GUARDIAN, session], stdin=subprocess.PIPE)
        guardian.communicate(b"", timeout=60)  # the driver was killed: it has not said that it was done
        assert ran(engine, "ps", "--all", "--quiet", "--no-trunc").split() == names[2:]
    finally:
        ran(engine, "rm", "--force", "--volumes", names[2])
    assert volumes(engine) == before


@needs_verifiers
async def test_verifiers_plays_in_containers(engine: str) -> None:
    spec = spec_of({"id": "sums"}, seats=boxed(engine, harness={"id": "formats", "asks": "responses"}))
    async with verifiers_table("it is 4") as each:
        (part,) = await each.play(spec, seed=2)
        assert_token_exact(part, each.policy)
        assert part.reward == 2.0
        each.policy.open.clear()
        playing = asyncio.ensure_future(each.play(spec, seed=2))
        while len(each.policy.requests) < 2:
            await asyncio.sleep(0.05)
        assert running(engine)
        for server in psutil.Process().children():
            server.kill()  # it had no time to remove its container
        with pytest.raises(VerifiersLost, match="ended with status -9"):
            await playing
    assert running(engine) == []


def boxed(engine: str, **seats: Any) -> dict[str, Any]:
    """Agents of verifiers that play in containers."""
    return {"runtime": {"type": engine, "image": RUNTIME_IMAGES[engine]}, **seats}


@needs_verifiers
async def test_harnesses_install_themselves_in_containers(engine: str) -> None:
    if engine == "apptainer":
        pytest.skip("its image for verifiers has no uv")
    import_uv_image(engine, VERIFIERS.with_name("uv").resolve())
    script = '# /// script\n# dependencies = ["six"]\n# ///\nimport six\n'
    command = ["run", "--rm", "--interactive", "--network=bridge", "--entrypoint=uv", UV_IMAGE, "run", "--script", "-"]
    tried = subprocess.run([engine, *command], input=script, text=True, capture_output=True, check=False, timeout=120)
    if tried.returncode:
        pytest.skip(f"a container of {engine} reaches no package index: {tried.stderr[-300:]}")
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo $((2 + 2))"}}\n</tool_call>'
    seats = {"runtime": {"type": engine, "image": UV_IMAGE}, "harness": {"id": "bash"}}
    async with verifiers_table(call, "it is 4", tokens=4000) as each:
        (part,) = await each.play(spec_of({"id": "sums"}, seats=seats, timeout_seconds=300), seed=2, tokens=4000)
        assert_token_exact(part, each.policy)
    assert part.reward == 2.0
    assert [turn.tool_calls[0]["result"] for turn in part.record if turn.tool_calls] == ["4\n"]


@needs_verifiers
@pytest.mark.parametrize("allow", ["everything", "nothing"])
async def test_verifiers_cuts_the_network_of_containers(engine: str, allow: str) -> None:
    if engine == "apptainer":
        pytest.skip("verifiers' runtime of Apptainer has no network policy")
    seats = boxed(engine, harness={"id": "formats", "asks": "gateway"})
    if allow == "nothing":
        import_network_image(engine)
        seats["runtime"]["allow"] = []
    with socket.create_server(("0.0.0.0", 0)) as server:
        server.setblocking(False)
        seats["harness"]["port"] = server.getsockname()[1]
        async with verifiers_table("it is 4") as each:
            (part,) = await each.play(spec_of({"id": "sums"}, seats=seats), seed=2)
        assert part.reward == 2.0
        reached = True
        try:
            server.accept()[0].close()
        except BlockingIOError:
            reached = False
    if os.geteuid() == 0 or allow == "nothing":  # a user's networks have no gateway of this machine's
        assert reached == (allow == "everything")


ROLLS = """
import random, runpy, sys
sys.argv = ["agent", "turn", f"reward={random.random()}"]
runpy.run_path("/tests/plain_agent.py", run_name="__main__")
"""


@pytest.mark.usefixtures("warm_ray")
def test_a_run_trains_on_what_containers_played(engine: str, tiny_model: Path, tmp_path: Path) -> None:
    runtime = {"type": engine, "image": IMAGES[engine], "mounts": [f"{TESTS}:/tests"]}
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


@needs_verifiers
def test_a_run_that_is_killed_leaves_no_container(engine: str, tiny_model: Path, tmp_path: Path) -> None:
    runtime = {"type": engine, "image": IMAGES[engine], "mounts": [f"{TESTS}:/tests"]}
    program = {"command": ["python3", "-I", "-S", "/tests/plain_agent.py", "turn", "sleep=100"], "runtime": runtime}
    verifiers = {
        "python": str(VERIFIERS),
        "env": {"PYTHONPATH": str(TASKS)},
        "taskset": "sums",
        **boxed(engine, harness={"id": "formats", "asks": "slowly"}),
    }
    config = write_episodes_run(
        tmp_path,
        tiny_model,
        environments=[{"name": "boxed", "program": program}, {"verifiers": verifiers}],
        algorithm={"advantage": "grpo"},
        rollout={"groups_per_step": 2, "episodes_per_group": 2, "max_response_tokens": 8, "max_episode_tokens": 160},
    )
    with nothing_left(60):
        process = start_run(config, start_new_session=True)
        try:
            for _ in range(1200):
                assert process.poll() is None, process.communicate()[0]
                if len(running(engine)) == 4:
                    break
                time.sleep(0.1)
            assert len(running(engine)) == 4
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        until = time.monotonic() + 30
        while running(engine) and time.monotonic() < until:
            time.sleep(0.2)
        assert running(engine) == []


async def test_what_cannot_run_is_named(engine: str) -> None:
    missing = replace(program(engine), command=("no-such-program",))
    assert "no-such-program" in await said(missing)
    spec = ContainerConfig(type=engine, image="localhost/no-such-image:1")
    problem = await container_problem(spec)
    assert problem is not None
    assert problem[0] == "image"
    assert "no-such-image" in problem[1]
    assert await container_problem(replace(spec, image=IMAGES[engine])) is None
