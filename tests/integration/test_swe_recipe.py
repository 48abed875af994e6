"""The recipe for issues of repositories: its plan, its data, and agents that work in containers."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from chat_templates import renderer
from fake_policy import FakePolicy, assert_token_exact, episode_settings
from forked_python import forked_python
from machine_image import GIT_IMAGE, import_git_image
from published_models import cache_published_models

from roll_like import cli
from roll_like.agents.episode import EpisodeLimits, VerifiersSpec
from roll_like.agents.proxy import Proxy
from roll_like.agents.verifiers_episodes import VerifiersEnvironments
from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.agentic.environments import spec_of
from roll_like.config.load import load_config
from roll_like.errors import EnvError
from roll_like.rollout.router import Router
from roll_like.types import Scored

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "agentic_swe_8gpu.yaml"
VERIFIERS = ROOT / ".verifiers" / "bin" / "python"
CHATML = renderer("chatml")
IMAGE = "localhost/roll-like-swe-{owner}-{name}:1"
ISSUE = "org__sums-1"
WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
#: What the repository's own tests are at first, and what the hidden tests make of them.
TESTS = "from sums import add\n\n\ndef test_zero():\n    assert add(3, 0) == 3\n"
HIDDEN = f"""import pytest
{TESTS}

def test_both():
    assert add(3, 2) == 5


@pytest.mark.parametrize(("text", "total"), [("3 + 2", 5), ("3 + 0", 3)])
def test_text(text, total):
    assert add(int(text[0]), int(text[-1])) == total
"""

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not VERIFIERS.exists(), reason="make verifiers installs what it plays in"),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An interpreter that has imported verifiers."""
    with forked_python(VERIFIERS, ["verifiers.v1"], tmp_path_factory.mktemp("python")) as program:
        yield str(program)


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def write_repository(folder: Path) -> dict[str, Any]:
    """Write a repository before its issue is resolved, with later commits; return its row as SWE-bench has it."""
    (folder / "tests").mkdir(parents=True)
    git(folder, "init", "--quiet")
    files = {"sums.py": WRONG, "tests/test_sums.py": TESTS, "tests/test_slow.py": "def test_nothing():\n    pass\n"}
    (folder / "conftest.py").touch()  # pytest finds the package from here
    for name, text in files.items():
        (folder / name).write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "Sums")
    base = git(folder, "rev-parse", "HEAD").strip()
    (folder / "sums.py").write_text(RIGHT)
    patch = git(folder, "diff")
    git(folder, "commit", "-qam", "Add sums as they are")
    (folder / "tests" / "test_sums.py").write_text(HIDDEN)
    test_patch = git(folder, "diff")
    git(folder, "commit", "-qam", "Test sums")
    git(folder, "tag", "v2")
    git(folder, "checkout", "--quiet", base)
    (folder / "build.txt").write_text("of the image, in no commit\n")
    return {
        "instance_id": ISSUE,
        "repo": "org/sums",
        "base_commit": base,
        "problem_statement": "add(3, 2) is 1.",
        "hints_text": "",
        "version": "1",
        "patch": patch,
        "test_patch": test_patch,
        # the first word of two tests' names, of which one has passed before
        "FAIL_TO_PASS": json.dumps(["tests/test_sums.py::test_both", "tests/test_sums.py::test_text[3"]),
        "PASS_TO_PASS": ["tests/test_sums.py::test_zero", "tests/test_slow.py::test_nothing"],
    }


def make_data(folder: Path, rows: Sequence[dict[str, Any]], *options: str) -> Path:
    """Run `scripts/make_swe_data.py` on rows; return its folder."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--train", str(folder / "rows.jsonl"), "--eval", str(folder / "rows.jsonl")]
    main = runpy.run_path(str(ROOT / "scripts" / "make_swe_data.py"))["main"]
    main([*given, "--folder", str(folder / "swe_data"), *options])
    return folder / "swe_data"


@pytest.mark.slow
def test_it_fits_on_its_gpus_by_the_plan(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_published_models(tmp_path, monkeypatch)
    data = make_data(tmp_path, [write_repository(tmp_path / "repository")] * 3)
    monkeypatch.chdir(tmp_path)
    text = RECIPE.read_text().replace("examples/swe", str(ROOT / "examples" / "swe"))
    text = text.replace(".verifiers/bin/python", python).replace("swe_data/", f"{data}/")
    (tmp_path / "recipe.yaml").write_text(text)
    code = cli.main(["run", "--config", "recipe.yaml", "--check", f"output_dir={tmp_path}"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "Memory of each of the GPUs 0-7 of 79.6 GiB" in shown.out


@pytest.fixture(scope="module", params=["podman", "docker"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    try:
        subprocess.run([name, "info"], check=True, capture_output=True, timeout=60)
        import_git_image(name, Path(sys.prefix))
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{name} does not run containers here: {error}")
    return name


@pytest.fixture
def issue(engine: str, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A row of SWE-bench's schema whose image is there."""
    row = write_repository(tmp_path / "repository")
    (tmp_path / "Dockerfile").write_text(
        f"FROM {GIT_IMAGE}\nRUN mkdir -p /tools && ln -s /usr/bin/python3 /tools/python\nCOPY repository /testbed\n"
    )
    image = IMAGE.format(owner="org", name="sums-1")
    subprocess.run([engine, "build", "--quiet", "--tag", image, tmp_path], check=True, capture_output=True)
    yield row
    subprocess.run([engine, "rmi", "--force", image], check=True, capture_output=True)


class Desk:
    """The server of the recipe's environment; what is said is run as a command in the container."""

    def __init__(self) -> None:
        self.policy = FakePolicy(CHATML, [""])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    async def does(self, command: str) -> Scored:
        self.policy = FakePolicy(CHATML, [command])
        (part,) = await self.environments.play(self.spec, episode_settings(tokens=4000))
        assert_token_exact(part, self.policy)
        return part

    spec: VerifiersSpec
    environments: VerifiersEnvironments


@asynccontextmanager
async def desk(engine: str, data: Path, *, python_folder: str = "/tools", **options: Any) -> AsyncIterator[Desk]:
    config = load_config(RECIPE)
    assert isinstance(config, AgenticConfig)
    spec = spec_of(config.environments[0])
    assert isinstance(spec, VerifiersSpec)
    taskset = {**spec.config["taskset"], "path": str(data / "train.jsonl"), "task": {"python_folder": python_folder}}
    tools = f"{ROOT / 'examples' / 'swe'}:{ROOT / 'tests' / 'verifiers_tasks'}"
    each = Desk()
    each.spec = replace(
        spec,
        python=str(VERIFIERS),
        env={"PYTHONPATH": tools},
        seats={"runtime": {"type": engine}, "harness": {"id": "shells"}},
        config={**spec.config, "taskset": taskset, **options},
    )
    async with Proxy(cast(Router, each), CHATML) as proxy:
        each.environments = VerifiersEnvironments(proxy, EpisodeLimits(turns=4, tokens=4000))
        try:
            yield each
        finally:
            await each.environments.close()


MEND = "sed -i s/-/+/ sums.py"
#: What an agent does, its reward, and the share of the hidden tests that pass which had failed.
DONE = {
    MEND: (1.0, 1.0),
    f"{MEND} && git -c user.name=a -c user.email=a@b commit -qam mended": (1.0, 1.0),
    "true": (0.0, 0.0),
    # the agent's tests do not count, wherever it put them
    "rm tests/test_sums.py && mkdir tests/test_sums.py && touch tests/test_sums.py/x": (0.0, 0.0),
    "printf 'def test_both(): pass\\ndef test_zero(): pass\\n' > tests/test_sums.py": (0.0, 0.0),
    # what it resolves by breaking something else
    f"{MEND} && printf 'def test_nothing(): assert 0\\n' > tests/test_slow.py": (0.0, 1.0),
    # the solution is not in the repository's history
    "git checkout main -- sums.py || git checkout v2 -- sums.py || git checkout {later} -- sums.py": (0.0, 0.0),
    # outside of the repository nothing counts, and a repository that is broken has no changes
    f"{MEND} && rm -rf .git": (0.0, 0.0),
    "mkdir -p /logs/artifacts && echo no patch > /logs/artifacts/swe-changes.patch": (0.0, 0.0),
}


@pytest.mark.slow
async def test_agents_work_and_are_graded_in_containers(engine: str, issue: dict[str, Any], tmp_path: Path) -> None:
    later = git(tmp_path / "repository", "rev-parse", "v2").strip()
    data = make_data(tmp_path, [issue], "--train-images", IMAGE)
    async with desk(engine, data) as each:
        for command, (reward, mended) in DONE.items():
            part = await each.does(command.replace("{later}", later))
            assert (part.reward, part.details["verifiers/mended_tests"]) == (reward, mended), command
        assert "add(3, 2) is 1." in str(part.record[0].shown)
    async with desk(engine, data, id="single-agent") as each:  # graded where the agent worked
        assert (await each.does(MEND)).reward == 1.0
        assert (await each.does("true")).reward == 0.0


@pytest.mark.slow
async def test_an_image_that_is_not_the_rows_is_a_failure(engine: str, issue: dict[str, Any], tmp_path: Path) -> None:
    other = {**issue, "base_commit": "0" * 40}
    async with desk(engine, make_data(tmp_path, [other], "--train-images", IMAGE)) as each:
        with pytest.raises(EnvError, match=r"is not the repository of org__sums-1: exit code 1"):
            await each.does("true")
    async with desk(engine, make_data(tmp_path, [issue], "--train-images", IMAGE), python_folder="/usr") as each:
        with pytest.raises(EnvError, match=r"exit code 1: .*python"):
            await each.does("true")


@pytest.mark.slow
def test_rows_are_validated_by_their_own_patches(engine: str, issue: dict[str, Any], tmp_path: Path) -> None:
    patch = "diff --git a/new.txt b/new.txt\nnew file mode 100644\n--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+no\n"
    owner, _, name = ISSUE.partition("__")
    image = IMAGE.format(owner=owner, name=name)
    unresolved = {**issue, "instance_id": "org__sums-2", "patch": patch, "docker_image": image}
    data = make_data(tmp_path, [issue, unresolved], "--train-images", IMAGE)
    command = [VERIFIERS.with_name("vf-validate"), "swe-tasks", "--taskset.path", data / "train.jsonl"]
    command += ["--taskset.task.python_folder", "/tools", "--runtime.type", engine, "--only-gold"]
    done = subprocess.run(
        [*map(str, command), "--output-dir", str(tmp_path / "out")],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/usr/local/bin:/usr/sbin", "PYTHONPATH": str(ROOT / "examples" / "swe")},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    (results,) = (tmp_path / "out").rglob("results.jsonl")
    found = {row["index"]: row["valid"] for row in map(json.loads, results.read_text().splitlines())}
    assert found == {0: True, 1: False}, done.stdout + done.stderr
