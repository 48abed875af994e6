from __future__ import annotations

import functools
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import gymnasium
import pytest

from roll_like.envs import make_env, registered, registration
from roll_like.errors import EnvError, PluginError


def test_an_environment_is_made_by_id_and_options() -> None:
    env = make_env("roll_like/FrozenLake-v0", size=3, view="grid")
    observation, _ = env.reset(seed=0)
    assert [len(line.split()) for line in observation.splitlines()] == [3, 3, 3]
    assert env.spec is not None
    assert env.spec.id == "roll_like/FrozenLake-v0"
    assert make_env("roll_like.builtin.envs:roll_like/FrozenLake-v0").spec is not None


@pytest.mark.parametrize("wrong", ["roll_like/FrozenLak-v0", "FrozenLake", "roll_like/frozenlake-v0", "frozen_lake"])
def test_an_unknown_id_names_the_nearest(wrong: str) -> None:
    with pytest.raises(EnvError, match=r"unknown environment .*'roll_like/FrozenLake-v0'") as caught:
        make_env(wrong)
    assert "import:" in str(caught.value.fix)


def test_an_id_like_no_other() -> None:
    with pytest.raises(EnvError, match=r"\d+ ids are registered"):
        make_env("zzzzzz/qqqqq-v0")


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(EnvError, match="no option 'sise'; did you mean 'size'"):
        make_env("roll_like/FrozenLake-v0", sise=3)


def test_an_option_that_the_environment_refuses() -> None:
    with pytest.raises(EnvError, match="size should be 2 to 20"):
        make_env("roll_like/FrozenLake-v0", size=1)
    with pytest.raises(EnvError, match="grid, words, both"):
        make_env("roll_like/FrozenLake-v0", view="picture")
    with pytest.raises(EnvError, match=r"cannot be made with \{'size': 'big'\}: TypeError"):
        make_env("roll_like/FrozenLake-v0", size="big")


def test_spaces_that_are_no_text_name_the_wrapper_or_our_own() -> None:
    with pytest.raises(EnvError, match=r"Discrete\(16\)") as caught:
        make_env("FrozenLake-v1")
    assert "'roll_like/FrozenLake-v0', or make it with render_mode='ansi'" in str(caught.value.fix)
    with pytest.raises(EnvError, match="expected text") as caught:
        make_env("CartPole-v1")
    assert str(caught.value.fix).startswith("describe its observations")
    assert "DiscreteActions with 2 names" in str(caught.value.fix)


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(PluginError, match="'no_such_module'"):
        make_env("no_such_module:Maze-v0")


PLUGIN = """
import gymnasium
from roll_like.envs import FreeText

class Echo(gymnasium.Env):
    observation_space = action_space = FreeText()

def register():
    gymnasium.register("{name}-v0", entry_point=Echo)
"""


@pytest.mark.parametrize(("name", "attribute"), [("PluggedModule", ""), ("PluggedFunction", ":register")])
def test_installed_packages_bring_environments(
    name: str, attribute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = PLUGIN.format(name=name) + ("" if attribute else "\nregister()\n")
    (tmp_path / f"{name.lower()}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint(name="x", value=f"{name.lower()}{attribute}", group=registration.GROUP)
    monkeypatch.setattr(registration, "entry_points", lambda group: [point] if group == registration.GROUP else [])
    monkeypatch.setattr(registration, "load_plugins", functools.cache(registration.load_plugins.__wrapped__))
    try:
        assert f"{name}-v0" in registered()
        assert make_env(f"{name}-v0").unwrapped.__class__.__name__ == "Echo"
    finally:
        gymnasium.registry.pop(f"{name}-v0", None)
        sys.modules.pop(name.lower(), None)


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="broken", value="no_such_module", group=registration.GROUP)
    monkeypatch.setattr(registration, "entry_points", lambda group: [point])
    monkeypatch.setattr(registration, "load_plugins", functools.cache(registration.load_plugins.__wrapped__))
    with pytest.raises(PluginError, match=r"'broken'.*no_such_module"):
        registered()


def test_environments_load_nothing_heavy() -> None:
    # environments are made in many small processes
    heavy = ("torch", "ray", "vllm", "deepspeed", "transformers", "datasets", "mlflow", "matplotlib")
    code = f"import sys, envs, roll_like.envs; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
