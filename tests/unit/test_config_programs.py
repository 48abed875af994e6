"""Programs in the configuration of an agentic run: what may be written, what is refused, and what a check finds."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from chat_templates import renderer
from config_files import MINIMAL_AGENTIC, changed, refused

from roll_like.agents.episode import EnvironmentSpec, ProgramSpec
from roll_like.builtin.pipelines.agentic.check import _tasks_apart, environment_findings
from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.agentic.environments import EnvironmentWorkers, specs_of
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.config.containers import ContainerConfig
from roll_like.config.load import dump_config
from roll_like.errors import ConfigError
from roll_like.rollout.router import Router

COMMAND = {"command": ["python", "agent.py"]}
LAKE = "roll_like/FrozenLake-v0"


def config(*environments: dict[str, Any], **changes: Any) -> AgenticConfig:
    return AgenticConfig.from_values(changed(MINIMAL_AGENTIC, environments=list(environments), **changes))


def test_a_program_becomes_what_episodes_are_played_by() -> None:
    program = {
        "command": ["agent", "--fast"],
        "env": {"DEPTH": "3"},
        "directory": "agents",
        "timeout_seconds": 9,
        "max_programs": 2,
        "limit_reward": None,
        "reasoning": "content",
        "models": ["policy"],
    }
    parsed = config({"program": program}, {"name": "scored", "program": COMMAND, "id": LAKE, "kwargs": {"size": 3}})
    lake = EnvironmentSpec(name="scored", env_id=LAKE, kwargs={"size": 3})
    assert specs_of(parsed.environments) == [
        ProgramSpec(
            name="program",
            command=("agent", "--fast"),
            env={"DEPTH": "3"},
            directory="agents",
            timeout_seconds=9,
            max_programs=2,
            limit_reward=None,
            reasoning_apart=False,
            models=("policy",),
        ),
        ProgramSpec(
            name="scored",
            command=("python", "agent.py"),
            timeout_seconds=300,
            max_programs=16,
            limit_reward=0.0,
            environment=lake,
            reasoning_apart=True,
            models=(),
        ),
    ]


def test_a_program_may_have_a_container() -> None:
    runtime = {"type": "podman", "image": "agent:1", "mounts": ["a:/a", "b:/b:rw"], "memory_gib": 2, "cpus": 0.5}
    (spec,) = specs_of(config({"program": {**COMMAND, "runtime": runtime}}).environments)
    container = ContainerConfig(type="podman", image="agent:1", mounts=("a:/a", "b:/b:rw"), memory_gib=2.0, cpus=0.5)
    assert isinstance(spec, ProgramSpec)
    assert spec.container == container
    for mount in ("a", "a:b", "a:/a:no", ":/a", "a:/b:/c:ro"):
        found = refused(config, {"program": {**COMMAND, "runtime": {**runtime, "mounts": ["a:/a", mount]}}})
        assert "expected `source:target`" in found["environments.0.program.runtime.mounts.1"]
    found = refused(config, {"program": {**COMMAND, "runtime": {**runtime, "type": "apptainer", "network": "bridge"}}})
    assert found == {
        "environments.0.program.runtime.network": "found 'bridge'; with Apptainer expected `none` or `host`"
    }


def test_a_container_that_cannot_run_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parsed = config({"program": {**COMMAND, "runtime": {"type": "podman", "image": "agent:1"}}})
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = environment_findings(parsed, None)
    assert (finding.key, finding.level) == ("environments.0.program.runtime.type", "error")
    assert "there is no 'podman' on this machine" in finding.message
    for name, script in {"podman": "echo no such image >&2; exit 1", "nsenter": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (finding,) = environment_findings(parsed, None)
    assert finding.key == "environments.0.program.runtime.image"
    assert "podman has no image 'agent:1': no such image" in finding.message


def test_an_image_of_apptainer_is_a_file_or_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runtime = {"type": "apptainer", "image": str(tmp_path / "agent.sif")}
    parsed = config({"program": {**COMMAND, "runtime": runtime}})
    for name in ("apptainer", "nsenter"):
        (tmp_path / name).write_text("#!/bin/sh\necho no user namespaces >&2; exit 255\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (finding,) = environment_findings(parsed, None)
    assert finding.key == "environments.0.program.runtime.image"
    assert "expected a SIF file or a folder of this machine" in finding.message
    (tmp_path / "agent.sif").touch()
    (finding,) = environment_findings(parsed, None)
    assert finding.key == "environments.0.program.runtime.type"
    assert "does not start: no user namespaces" in finding.message


def test_a_resolved_configuration_is_valid_again() -> None:
    parsed = config({"program": COMMAND}, {"id": LAKE, "name": "both", "program": COMMAND})
    assert AgenticConfig.from_values(yaml.safe_load(dump_config(parsed))) == parsed


@pytest.mark.parametrize(
    ("environments", "changes", "key", "says"),
    [
        ([{}], {}, "environments.0", "none of `id`, `program` and `verifiers` is set"),
        ([{"program": {}}], {}, "environments.0.program.command", "Field required"),
        ([{"program": {"command": []}}], {}, "environments.0.program.command", "at least 1 item"),
        (
            [{"program": COMMAND, "kwargs": {"size": 3}}],
            {},
            "environments.0.kwargs",
            "an environment's options, and there is no `id`",
        ),
        (
            [{"id": LAKE, "program": {**COMMAND, "limit_reward": -1}}],
            {},
            "environments.0.program.limit_reward",
            f"'{LAKE}' scores every episode",
        ),
        (
            [{"program": {**COMMAND, "env": {"OPENAI_API_KEY": "sk"}}}],
            {},
            "environments.0.program.env.OPENAI_API_KEY",
            "the run sets this for every episode",
        ),
        ([{"id": LAKE}], {"proxy": {"port": 8000}}, "proxy", "no environment has a `program`"),
        ([{"program": COMMAND}], {"proxy": {"port": 70000}}, "proxy.port", "less than or equal to 65535"),
        ([{"program": COMMAND}, {"program": COMMAND}], {}, "environments", "two environments are called 'program'"),
        (
            [{"program": COMMAND}],
            {"evaluation": {"environments": [{}]}},
            "evaluation.environments.0",
            "none of `id`, `program`",
        ),
        (
            [{"program": COMMAND}],
            {"evaluation": {"environments": [{"program": {"command": ["other"]}}]}},
            "evaluation.environments.0.name",
            "also what an environment with other settings is called",
        ),
        (
            [{"program": COMMAND}],
            {"evaluation": {"first_seed": 3}},
            "evaluation.first_seed",
            "are also trained on",
        ),
    ],
)
def test_what_is_refused(environments: list[Any], changes: dict[str, Any], key: str, says: str) -> None:
    found = refused(config, *environments, **changes)
    assert key in found, found
    assert says in found[key]


def test_another_program_may_be_measured_on_the_same_seeds() -> None:
    other = {"name": "other", "program": {"command": ["other"]}}
    assert config({"program": COMMAND}, evaluation={"first_seed": 0, "environments": [other]}).evaluated


def findings(*environments: dict[str, Any], **changes: Any) -> dict[str, str]:
    parsed = config(*environments, **changes)
    found = list(environment_findings(parsed, None))
    assert all(finding.level == "error" for finding in found)
    return {finding.key: finding.message for finding in found}


def test_a_check_finds_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "agent"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    for program in (
        COMMAND,  # the run's own Python, wherever that is
        {"command": [sys.executable]},
        {"command": ["sh"]},
        {"command": ["./agent"], "directory": str(tmp_path)},
        {"command": ["./agent"]},
        {"command": ["agent"], "env": {"PATH": str(tmp_path)}},
    ):
        assert findings({"program": program}) == {}, program


def test_a_check_misses_programs(tmp_path: Path) -> None:
    (tmp_path / "agent").write_text("not executable")
    for program in (
        {"command": ["no-such-agent"]},
        {"command": ["./no-such-agent"], "directory": str(tmp_path)},
        {"command": ["./agent"], "directory": str(tmp_path)},
        {"command": ["sh"], "env": {"PATH": str(tmp_path)}},
    ):
        (message,) = findings({"program": program}).values()
        assert f"there is no program {program['command'][0]!r} in" in message
        assert "environments.0.program.directory" in message
    missing = findings({"program": {**COMMAND, "directory": "no/such/folder"}})
    assert missing == {"environments.0.program.directory": "'no/such/folder' is no directory; correct it"}


def test_a_check_begins_what_scores_a_program() -> None:
    both = {"id": "roll_like/NoSuch-v0", "program": {"command": ["no-such-agent"]}}
    assert set(findings(both, evaluation={"first_seed": 7000})) == {"environments.0.program.command", "environments.0"}
    # what the policy is shown is up to the program, so nothing is said about its length
    assert findings({"id": LAKE, "program": COMMAND}, rollout__max_episode_tokens=64) == {}


def test_an_address_that_is_taken_is_named_by_its_keys() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, DriverLoop() as runner, ExitStack() as stack:
        port = taken.getsockname()[1]
        playing = EnvironmentWorkers(config({"program": COMMAND}, proxy={"port": port}), None, stack)
        router = Router([], max_running=1, max_in_flight=1, retries=0)
        with pytest.raises(ConfigError, match=f"answered at 127.0.0.1:{port}(.|\\n)*proxy.port; port 0"):
            playing._started_proxy(router, renderer("chatml"), runner)


def test_the_proxy_ends_with_the_run() -> None:
    with DriverLoop() as runner:
        with ExitStack() as stack:
            playing = EnvironmentWorkers(config({"program": COMMAND}), None, stack)
            proxy = playing._started_proxy(
                Router([], max_running=1, max_in_flight=1, retries=0), renderer("chatml"), runner
            )
            assert httpx.get(f"{proxy.base_url}/models", trust_env=False).status_code == 401
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{proxy.base_url}/models", trust_env=False)


@pytest.mark.parametrize(
    ("trained", "evaluated", "found"),
    [
        (
            {},
            None,
            ("warning", "environments.0.verifiers.held_out", "that are trained on too"),
        ),
        ({"held_out": 4}, None, None),
        ({"held_out": 4}, {"held_out": 2}, None),
        ({"held_out": 4}, {}, ("warning", "evaluation.environments.0.verifiers.held_out", "are trained on too")),
        (
            {"held_out": 4},
            {"held_out": 8},
            ("error", "evaluation.environments.0.verifiers.held_out", "found 8, and training holds out 4 tasks"),
        ),
        ({}, {"select": {"skip": 100}}, None),
        ({}, {"taskset": "b"}, None),
    ],
)
def test_evaluations_play_other_tasks_of_verifiers(
    trained: dict[str, Any], evaluated: dict[str, Any] | None, found: tuple[str, str, str] | None
) -> None:
    others = [] if evaluated is None else [{"name": "other", "verifiers": {"taskset": "a", **evaluated}}]
    parsed = config({"verifiers": {"taskset": "a", **trained}}, evaluation={"environments": others})
    told = [(one.level, one.key, one.message) for one in _tasks_apart(parsed)]
    assert [one[:2] for one in told] == ([] if found is None else [found[:2]])
    assert found is None or found[2] in told[0][2]
