"""Environments of other projects, most of them through verifiers: real packages and servers, on this machine alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from chat_templates import renderer
from fake_policy import FakePolicy, assert_token_exact, episode_settings
from hygiene import nothing_left
from machine_image import IMAGE, import_machine_image
from run_config import command_here

from roll_like.agents.episode import EpisodeLimits, VerifiersLost, VerifiersSpec
from roll_like.agents.proxy import Proxy
from roll_like.agents.verifiers_episodes import VerifiersEnvironments
from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.agentic.environments import spec_of
from roll_like.config.load import load_config
from roll_like.envs import check_env, make_env
from roll_like.errors import EnvError
from roll_like.inference.interface import GenerateRequest
from roll_like.rollout.router import Router
from roll_like.types import Scored, StopReason

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "shared_environments"
VERIFIERS = ROOT / ".verifiers" / "bin" / "python"
CLIENTS = ROOT / ".clients" / ".setup-stamp"
GYM = ROOT / ".nemo-gym" / "bin" / "python"
HARBOR = ROOT / ".harbor" / "bin" / "python"
CHATML = renderer("chatml")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(not VERIFIERS.exists(), reason="make verifiers installs what it plays in"),
]
needs_gym = pytest.mark.skipif(not GYM.exists(), reason=".nemo-gym has no Python with nemo-gym: docs/contributing.md")
needs_harbor = pytest.mark.skipif(
    not HARBOR.exists(), reason=".harbor has no Python with verifiers[harbor]: docs/contributing.md"
)


@pytest.fixture(scope="module")
def nltk_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nltk_data")
    subprocess.run([sys.executable, EXAMPLES / "word_list.py", EXAMPLES / "words.txt", folder], check=True)
    return folder


@contextlib.contextmanager
def served(*command: str | Path) -> Iterator[str]:
    """A server that gets a free port as its last argument; yields its address when it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    with subprocess.Popen([*command, str(port)], env=variables) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                assert process.poll() is None, "the server ended"
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def numbers() -> Iterator[str]:
    with served(VERIFIERS, EXAMPLES / "number_server.py", "--sessions=8") as address:
        yield address


@pytest.fixture(scope="module")
def choices() -> Iterator[str]:
    with served(GYM, EXAMPLES / "gym_server.py", "resources_servers.mcqa.app:MCQAResourcesServer") as address:
        yield address


@pytest.fixture(scope="module")
def weather() -> Iterator[str]:
    server = "resources_servers.example_single_tool_call.app:SimpleWeatherResourcesServer"
    with served(GYM, EXAMPLES / "gym_server.py", server) as address:
        yield address


@pytest.fixture(scope="module", params=["podman", "docker"])
def engine(request: pytest.FixtureRequest) -> str:
    return engine_with_image(request.param)


def engine_with_image(name: str) -> str:
    try:
        subprocess.run([name, "info"], check=True, capture_output=True, timeout=60)
        import_machine_image(name)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{name} does not run containers here: {error}")
    return name


def harbor_tasks(folder: Path, engine: str, tasks: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Write tasks of Harbor, as files by name, into a repository; return what plays them."""
    for name, files in tasks.items():
        for path, text in files.items():
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_text(text)
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "Tasks"]):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *arguments], cwd=folder, check=True)
    rows = [{"name": name, "git_url": str(folder), "path": name} for name in tasks]
    registry = [{"name": "toy", "version": "1.0", "description": "", "tasks": rows}]
    (folder / "registry.json").write_text(json.dumps(registry))
    return {
        "taskset": {"dataset": "toy@1.0", "registry_path": str(folder / "registry.json")},
        "runtime": engine,
        "env": {"PYTHONPATH": str(ROOT / "tests" / "verifiers_tasks"), "HOME": str(folder)},  # Harbor's cache
    }


def harbor_task(name: str, test: str | None = None, image: str | None = IMAGE) -> dict[str, str]:
    """The files of a task that asks for a word in the file `answer`."""
    environment = "" if image is None else f'docker_image = "{image}"\n'
    score = (
        f'[ "$(cat answer)" = {name} ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n'
    )
    return {
        "task.toml": f'version = "1.0"\n[environment]\n{environment}',
        "instruction.md": f"Write {name} into the file `answer`.\n",
        "tests/test.sh": test or score,
        "environment/.keep": "",
    }


def harbor_examples(folder: Path, engine: str) -> dict[str, Any]:
    """Tasks of which one cannot be scored."""
    wrong = harbor_task("wrong", "echo no such file >&2; exit 3\n")
    return harbor_tasks(folder, engine, {"one": harbor_task("one"), "two": harbor_task("two"), "wrong": wrong})


def entry(name: str, **changes: Any) -> VerifiersSpec:
    """The environment of an example, with its taskset's options changed."""
    config = load_config(EXAMPLES / f"{name}.yaml")
    assert isinstance(config, AgenticConfig)
    spec = spec_of(config.environments[0])
    assert isinstance(spec, VerifiersSpec)
    taskset = {**spec.config["taskset"], **changes.pop("taskset", {})}
    python = str(HARBOR if name == "harbor" else VERIFIERS)
    return replace(spec, python=python, config={**spec.config, "taskset": taskset}, **changes)


class Table:
    """The server of one environment; whoever plays there next is its policy."""

    def __init__(self, spec: VerifiersSpec, turns: int) -> None:
        self.spec = spec
        self.turns = turns
        self.policy = FakePolicy(CHATML, [""])
        self.environments: VerifiersEnvironments | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    async def play(self, policy: FakePolicy, *, seed: int = 0) -> Scored:
        self.policy = policy
        assert self.environments is not None
        (part,) = await self.environments.play(self.spec, episode_settings(seed=seed, turns=self.turns))
        assert_token_exact(part, policy)
        return part


@contextlib.asynccontextmanager
async def table(spec: VerifiersSpec, *, turns: int = 10) -> AsyncIterator[Table]:
    each = Table(spec, turns)
    async with Proxy(cast(Router, each), CHATML) as proxy:
        each.environments = VerifiersEnvironments(proxy, EpisodeLimits(turns=turns, tokens=4000))
        try:
            yield each
        finally:
            await each.environments.close()


async def test_a_game_of_textarena(nltk_data: Path) -> None:
    letters = iter("etaoinshrdlcumgpywbfvk")
    async with table(entry("textarena", env={"NLTK_DATA": str(nltk_data)}), turns=30) as each:
        part = await each.play(FakePolicy(CHATML, lambda _: f"[{next(letters)}]"), seed=3)
        assert "You are playing Hangman" in str(part.record[0].shown)
        assert part.trajectory.stop_reason == StopReason.STOP
        assert 0 < part.reward <= 1  # the share of the word's letters that were found
        repeated = await each.play(FakePolicy(CHATML, ["[e]"]), seed=3)
        assert (len(repeated.record), repeated.reward < 1) == (3, True)  # the second invalid move ends the game


async def test_an_environment_of_openenv(numbers: str) -> None:
    def halves(request: GenerateRequest) -> str:
        low, high = 1, 9
        for told in re.findall(r"higher|lower", CHATML.decode(request.prompt_ids)):
            middle = (low + high) // 2
            low, high = (middle + 1, high) if told == "higher" else (low, middle - 1)
        return str((low + high) // 2)

    async with table(entry("openenv", taskset={"base_url": numbers}), turns=4) as each:
        part = await each.play(FakePolicy(CHATML, halves))
        assert (part.reward, len(part.trajectory.parts)) == (1.0, 1)
        wrong = await each.play(FakePolicy(CHATML, ["I do not know"]))
        assert (wrong.reward, len(wrong.record), wrong.trajectory.stop_reason) == (0.0, 4, StopReason.STOP)
        with pytest.raises(EnvError, match=r"'openenv' failed: .*VALIDATION_ERROR"):  # not what the action takes
            await each.play(FakePolicy(CHATML, ['{"number": 5}']))
    async with table(entry("openenv", taskset={"base_url": "http://127.0.0.1:9"})) as each:
        with pytest.raises(EnvError, match=r"'openenv' failed: .*Failed to connect"):
            await each.play(FakePolicy(CHATML, ["5"]))


def test_a_server_of_openenv_is_an_environment(numbers: str) -> None:
    report = check_env("roll_like/OpenEnv-v0", base_url=numbers)
    assert report.ok, report
    with closing(make_env("roll_like/OpenEnv-v0", base_url=numbers, invalid_penalty=-0.5)) as env:
        text, _ = env.reset(seed=0)
        assert "1 to 9" in text
        assert '"guess"' in env.get_wrapper_attr("system_prompt")
        refused = env.step('{"number": 5}')
        assert (refused[1:4], refused[4]["invalid_action"]) == ((-0.5, False, False), True)
        low, high, over = 1, 9, False
        while not over:
            middle = (low + high) // 2
            text, reward, over, _, _ = env.step(f'{{"guess": {middle}}}')
            low, high = (middle + 1, high) if text == "higher" else (low, middle - 1)
        assert reward == 1.0
        assert env.reset(seed=0)[0].startswith("Find my number")
        with ExitStack() as stack:
            more = [stack.enter_context(closing(make_env("roll_like/OpenEnv-v0", base_url=numbers))) for _ in range(8)]
            for each in more[:7]:
                each.reset(seed=0)
            with pytest.raises(EnvError, match="CAPACITY_REACHED"):
                more[7].reset(seed=0)
    with pytest.raises(EnvError, match="cannot be reached"):
        make_env("roll_like/OpenEnv-v0", base_url="http://127.0.0.1:9")


@needs_gym
async def test_nemo_gym_scores_answers(choices: str) -> None:
    rows = EXAMPLES / "choices.jsonl"
    spec = entry("nemo_gym", taskset={"dataset": str(rows), "task": {"resources_url": choices}})
    letter = json.loads(rows.read_text().splitlines()[spec.held_out])["expected_answer"]
    async with table(spec) as each:
        right = await each.play(FakePolicy(CHATML, [f"\\boxed{{{letter}}}"]))
        assert right.reward == right.details["verifiers/nemo_gym"] == 1.0
        assert (await each.play(FakePolicy(CHATML, ["I do not know"]))).reward == 0.0


@needs_gym
async def test_a_reward_that_nemo_gym_takes_back_is_a_failure() -> None:
    rows = EXAMPLES / "choices.jsonl"
    with served(GYM, EXAMPLES / "gym_server.py", "broken_gym:BrokenServer") as address:
        async with table(entry("nemo_gym", taskset={"dataset": str(rows), "task": {"resources_url": address}})) as each:
            with pytest.raises(EnvError, match=r"NeMo Gym could not score .*: the judge is away"):
                await each.play(FakePolicy(CHATML, ["A"]))


@needs_gym
async def test_tools_of_nemo_gym_are_called(weather: str, tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "name": "get_weather", "description": "", "parameters": parameters, "strict": True}
    asked = {"input": [{"role": "user", "content": "What is the weather in Rome?"}], "tools": [tool]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"responses_create_params": asked}) + "\n")
    task = {"dataset": str(tmp_path / "rows.jsonl"), "task": {"resources_url": weather}}
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    async with table(entry("nemo_gym", taskset=task, held_out=0)) as each:
        policy = FakePolicy(CHATML, [call, "cold"])
        assert (await each.play(policy)).reward == 1.0
    assert "The weather in Rome is cold." in CHATML.decode(policy.requests[-1].prompt_ids)


@needs_harbor
async def test_tasks_of_harbor_are_played_in_containers(engine: str, tmp_path: Path) -> None:
    harbor = harbor_examples(tmp_path, engine)
    seats = {"runtime": {"type": harbor["runtime"]}, "harness": {"id": "shells"}}
    async with table(entry("harbor", taskset=harbor["taskset"], env=harbor["env"], seats=seats)) as each:
        assert (await each.play(FakePolicy(CHATML, ["echo two > answer"]), seed=1)).reward == 1.0
        missed = await each.play(FakePolicy(CHATML, ["echo two > answer"]), seed=0)
        assert missed.reward == 0.0
        assert "Write one into the file" in str(missed.record[0].shown)
        with pytest.raises(EnvError, match=r"Harbor verifier produced no reward\.json and no valid reward\.txt"):
            await each.play(FakePolicy(CHATML, ["true"]), seed=2)


#: Of an image that is built: the answer has to be made of what only that image has.
BUILT = f"FROM {IMAGE}\nRUN echo secret > /app/hidden\nWORKDIR /app\n"


@needs_harbor
async def test_an_image_of_harbor_that_is_built_before_the_run(engine: str, tmp_path: Path) -> None:
    task = {**harbor_task("secret", image=None), "environment/Dockerfile": BUILT}
    played = harbor_tasks(tmp_path, engine, {"built": task})
    seats: dict[str, Any] = {"runtime": {"type": engine}, "harness": {"id": "shells"}}
    async with table(entry("harbor", taskset=played["taskset"], env=played["env"], seats=seats, held_out=0)) as each:
        with pytest.raises(EnvError, match="building Dockerfiles isn't supported"):
            await each.play(FakePolicy(CHATML, ["true"]))
    image = "localhost/roll-like-built:1"
    subprocess.run([engine, "build", "--quiet", "--tag", image, tmp_path / "built" / "environment"], check=True)
    try:
        seats["runtime"]["image"] = image
        taskset = {**played["taskset"], "ignore_dockerfile": True}
        async with table(entry("harbor", taskset=taskset, env=played["env"], seats=seats, held_out=0)) as each:
            assert (await each.play(FakePolicy(CHATML, ["cat /app/hidden > answer"]))).reward == 1.0
            assert (await each.play(FakePolicy(CHATML, ["echo > answer"]))).reward == 0.0
    finally:
        subprocess.run([engine, "rmi", image], check=True, capture_output=True)


#: A task with a service beside the one that the policy works in, whose image is built from a Dockerfile.
COMPOSED = f"""
services:
  main:
    build: .
    command: sleep infinity
    depends_on: [words]
    volumes: [kept:/kept]
  words:
    image: {IMAGE}
    command: sh -c "mkdir /tmp/words && cd /tmp/words && echo composed > word && exec python3 -m http.server 8000"
volumes: {{kept: {{}}}}
"""
ASKED = 'from urllib.request import urlopen; print(urlopen("http://words:8000/word").read().decode())'


@needs_harbor
async def test_tasks_of_harbor_that_use_compose(engine: str, tmp_path: Path) -> None:
    if (
        engine != "docker"
        or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip("verifiers runs Compose's files of Harbor's tasks with `docker compose` alone")
    files = {"environment/docker-compose.yaml": COMPOSED, "environment/Dockerfile": BUILT}
    played = harbor_tasks(tmp_path, engine, {"composed": {**harbor_task("composed", image=None), **files}})
    seats = {"runtime": {"type": engine}, "harness": {"id": "shells"}}
    spec = entry("harbor", taskset=played["taskset"], env=played["env"], seats=seats, held_out=0)
    async with table(spec) as each:
        with pytest.raises(EnvError, match=r"only run trusted tasks with --env\.trust-compose"):
            await each.play(FakePolicy(CHATML, ["true"]))
    spec = replace(spec, config={**spec.config, "trust_compose": True})
    networks = docker("network", "ls", "--format={{.Name}}")
    async with table(spec) as each:
        answer = f"cat /app/hidden && python3 -c '{ASKED}' > answer"
        assert (await each.play(FakePolicy(CHATML, [answer]))).reward == 1.0
        assert (await each.play(FakePolicy(CHATML, ["echo > answer"]))).reward == 0.0
        policy = FakePolicy(CHATML, ["true"])
        policy.open.clear()
        playing = asyncio.ensure_future(each.play(policy))
        while not policy.requests:
            await asyncio.sleep(0.05)
        for server in psutil.Process().children():
            server.kill()  # it had no time to end the project
        with pytest.raises(VerifiersLost, match="ended with status -9"):
            await playing
    assert docker("ps", "--all", "--format={{.Names}}", "--filter=name=vf-") == ""
    assert docker("network", "ls", "--format={{.Name}}") == networks
    assert docker("volume", "ls", "--format={{.Name}}", "--filter=name=vf-") == ""


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout


EXAMPLE_RUNS = [
    pytest.param("gem", marks=pytest.mark.skipif(find_spec("gem") is None, reason="gem-llm is not installed")),
    pytest.param("skyrl_gym", marks=pytest.mark.skipif(find_spec("skyrl_gym") is None, reason="it is not installed")),
    pytest.param(
        "atropos", marks=pytest.mark.skipif(not CLIENTS.exists(), reason="make clients installs what it plays in")
    ),
    "textarena",
    "openenv",
    "openenv_direct",
    pytest.param("nemo_gym", marks=needs_gym),
    pytest.param("harbor", marks=needs_harbor),
]


@pytest.mark.usefixtures("warm_ray")
@pytest.mark.parametrize("name", EXAMPLE_RUNS)
def test_the_example_trains(name: str, tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    changes: dict[str, Any] = {
        "model.path": tiny_model,
        "steps": 3,
        "inference.type": "hf",
        "output_dir": tmp_path,
        "metrics.trackers": "[]",
        "checkpoint.at_end": "false",
        "checkpoint.export": "false",
        "rollout.groups_per_step": 2,
        "rollout.episodes_per_group": 2,
        "rollout.max_response_tokens": 8,
        "evaluation.seeds": 2,
        "evaluation.episodes_per_seed": 1,
    }
    if name not in ("gem", "skyrl_gym", "atropos", "openenv_direct", "harbor"):
        changes["environments.0.verifiers.python"] = VERIFIERS
    if name == "textarena":
        changes["environments.0.verifiers.env.NLTK_DATA"] = request.getfixturevalue("nltk_data")
    elif name == "openenv":
        changes["environments.0.verifiers.taskset.base_url"] = request.getfixturevalue("numbers")
    elif name == "openenv_direct":
        changes["environments.0.kwargs.base_url"] = request.getfixturevalue("numbers")
    elif name == "harbor":
        played = harbor_examples(tmp_path / "tasks", engine_with_image("podman"))
        changes |= {f"environments.0.verifiers.taskset.{key}": value for key, value in played["taskset"].items()}
        changes |= {f"environments.0.verifiers.env.{key}": value for key, value in played["env"].items()}
        changes["rollout.max_episode_tokens"] = 1024  # of the tiny model
        changes["environments.0.verifiers.taskset.tasks"] = "[one, two]"
        changes["environments.0.verifiers.harness"] = "shells"
        changes["environments.0.verifiers.runtime"] = played["runtime"]
        changes["environments.0.verifiers.python"] = HARBOR
    elif name == "nemo_gym":
        changes["environments.0.verifiers.taskset.task.resources_url"] = request.getfixturevalue("choices")
    config = f"examples/shared_environments/{name}.yaml"
    stated = [f"{key}={value}" for key, value in changes.items()]
    checked, said = command_here(ROOT, "run", "--config", config, "--check", *stated)
    assert checked == 0, said
    with nothing_left():
        code, output = command_here(ROOT, "run", "--config", config, *stated)
    assert code == 0, output
    steps = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert [step["rollout/samples"] for step in steps] == [4, 4, 4]
    assert all(step["rollout/failures"] == 0 for step in steps)
    evaluations = [json.loads(line) for line in (tmp_path / name / "evaluations.jsonl").read_text().splitlines()]
    assert len(evaluations) == 2  # before and after
    worst = {"gem": -0.1, "atropos": -1.0}.get(name, 0.0)
    assert all(worst <= each["eval/avg"] <= 1 for each in evaluations)
