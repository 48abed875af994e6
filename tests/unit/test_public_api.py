from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from types import ModuleType

import pytest

import roll_like
from roll_like import errors

PUBLIC = {"Completion", "Outcome", "Reward", "RewardConfig", "Verdict", "register_reward"}
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "datasets", "mlflow", "matplotlib")
ERRORS = [found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, errors.RollLikeError)]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_public_names_are_those_that_are_exported() -> None:
    assert set(roll_like.__all__) == PUBLIC
    found = {
        name
        for name, value in vars(roll_like).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert found == PUBLIC


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, roll_like; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(code) == "[]"


def test_a_configuration_is_built_without_anything_heavy() -> None:
    # what an editor, a notebook's first cell and --check do before a run
    code = f"import sys, roll_like.config.rlvr; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run(code) == "[]"


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
