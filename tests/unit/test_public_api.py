from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import roll_like
from roll_like import errors

ROOT = Path(__file__).resolve().parents[2]
OURS = {"roll_like", "pipelines", "envs", "rewards"}
PUBLIC = {
    "AgenticConfig",
    "Completion",
    "DPOConfig",
    "DistillConfig",
    "OnPolicyDistillConfig",
    "OnlineDPOConfig",
    "RLVRConfig",
    "RewardModelRunConfig",
    "SFTConfig",
    "Outcome",
    "Reward",
    "RewardCase",
    "RewardConfig",
    "RewardReport",
    "RewardResult",
    "check_reward",
    "register_reward",
}
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "datasets", "mlflow", "matplotlib")
ERRORS = [found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, errors.RollLikeError)]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_public_names_are_those_that_are_exported() -> None:
    assert set(roll_like.__all__) == PUBLIC
    assert all(hasattr(roll_like, name) for name in PUBLIC)
    assert not hasattr(roll_like, "no_such_name")


def test_the_stub_has_the_same_names_from_the_same_places() -> None:
    stub = ast.parse((ROOT / "roll_like" / "__init__.pyi").read_text(encoding="utf-8"))
    places = {alias.asname: node.module for node in stub.body for alias in node.names}  # type: ignore[attr-defined]
    assert set(places) == PUBLIC
    for name, place in places.items():
        assert getattr(importlib.import_module(place), name) is getattr(roll_like, name)


def test_no_file_lies_at_the_root_of_the_package_but_these() -> None:
    allowed = {"__init__", "cli", "types", "values", "errors", "registry"}
    assert {path.stem for path in (ROOT / "roll_like").glob("*.py")} == allowed


def test_the_built_ins_are_reached_under_one_name_only() -> None:
    """Imported as `rewards` too, a module would register everything twice."""
    folders = ("roll_like", "pipelines", "envs", "rewards", "tests", "benchmarks", "scripts", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    found = {(file.name, name) for file in files for name in imports(file)}
    assert {(file, name) for file, name in found if name.partition(".")[0] in ("pipelines", "envs", "rewards")} == set()


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, roll_like; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(code) == "[]"


def test_the_configuration_classes_load_nothing_heavy() -> None:
    code = f"import sys; from roll_like import RLVRConfig, DPOConfig; print([x for x in {HEAVY!r} if x in sys.modules])"
    assert run(code) == "[]"


@pytest.mark.parametrize("config", ["rlvr_quickstart", "agentic_frozenlake", "online_dpo_quickstart", "sft_quickstart"])
def test_a_configuration_is_loaded_without_anything_heavy(config: str) -> None:
    """A misspelt key is reported in a second: what an editor, a notebook's first cell and a typo need."""
    load = f"from roll_like.config.load import load_config; load_config({str(ROOT / 'configs' / config)!r} + '.yaml')"
    assert run(f"import sys; {load}; print([name for name in {HEAVY!r} if name in sys.modules])") == "[]"


def test_every_package_that_is_imported_is_declared() -> None:
    files = [file for folder in OURS for file in (ROOT / folder).rglob("*.py")]
    imported = {name.partition(".")[0] for file in files for name in imports(file)} - sys.stdlib_module_names
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    declared = {normal(re.split(r"[^\w.-]", name)[0]) for name in wanted}
    # pydantic pins its core; vLLM's CPU build has a name of its own
    given = {*OURS, "pydantic_core", "vllm"}
    installed = packages_distributions()
    undeclared = {
        name for name in imported - given if not {normal(found) for found in installed.get(name, [name])} & declared
    }
    assert undeclared == set()


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", sorted(PUBLIC - {"Outcome"}))
def test_every_public_name_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(roll_like, name))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_errors_keep_their_remedy_through_pickling_and_are_drawn(error: type[errors.RollLikeError]) -> None:
    found = pickle.loads(pickle.dumps(error("what was found", fix="what to change")))
    assert type(found) is error
    assert (found.message, found.fix) == ("what was found", "what to change")
    assert str(found) == "what was found\n  fix: what to change"
    drawn = inspect.getdoc(errors) or ""
    assert error.__name__ in drawn
    if error is not errors.RollLikeError:
        standard = next(base for base in error.__mro__ if base.__module__ == "builtins")
        assert f"{error.__name__:<18} ({standard.__name__})" in drawn
