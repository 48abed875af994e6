"""What docs/environments.md says: its code runs, its tables are complete."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

from roll_like import envs
from roll_like.envs import check_env, registered, registration

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)
SHARED = {"style", "invalid_penalty", "max_turns"}


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    yield
    for env_id in registered("mine"):
        del gymnasium.registry[env_id]


@pytest.mark.parametrize("block", [block for block in BLOCKS if "class " not in block])
def test_the_pages_code_runs(block: str) -> None:
    exec(block, {})


def test_the_pages_environment_is_right_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in BLOCKS if "class HigherLower" in block)
    written = [line for line in block.partition("\n\n\n")[2].partition("\n\n\n")[0].splitlines() if line]
    assert len(written) <= 30
    (tmp_path / "my_envs.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("my_envs")
        report = check_env("mine/HigherLower-v0")
    finally:
        sys.modules.pop("my_envs", None)
    assert report.findings == ()
    assert report.figures["scripted: success rate"] == 1.0


def test_the_pages_game_of_two_agents_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in BLOCKS if "class Nim" in block)
    (tmp_path / "my_game.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("my_game")
        assert check_env("mine/Nim-v0").ok
        env = gymnasium.make("mine/Nim-v0", disable_env_checker=True)
        left, player = int(env.reset(seed=1)[0].split()[0]), 0
        while left > 0:
            left, player = left - 1, 1 - player
            _, reward, ended, _, info = env.step("<action>1</action>")
            assert info["agent"] == ("first", "second")[player]
            assert (reward, ended) == (float(left == 0), left == 0)
        assert info["rewards"] == {("first", "second")[player]: -1.0}
    finally:
        sys.modules.pop("my_game", None)


def test_every_environment_and_option_is_listed() -> None:
    rows = dict(re.findall(r"^\| `(roll_like/[\w-]+)` \| .*? \| (.+?) \|$", PAGE, flags=re.M))
    assert set(rows) == set(registered("roll_like"))
    for env_id, listed in rows.items():
        known = set(registration.env_options(gymnasium.spec(env_id)))
        assert set(re.findall(r"`(\w+)`", listed)) == known - SHARED, env_id


def test_every_wrapper_is_listed() -> None:
    exported = {
        name
        for name in envs.__all__
        if inspect.isclass(getattr(envs, name)) and issubclass(getattr(envs, name), gymnasium.Wrapper)
    }
    assert set(re.findall(r"^\| `([A-Z]\w+)\(", PAGE, flags=re.M)) == exported - {"TextWrapper"}


def test_every_check_is_listed() -> None:
    code = "".join(
        (ROOT / "roll_like" / "envs" / name).read_text(encoding="utf-8") for name in ("probes.py", "check.py")
    )
    made = set(re.findall(r'(?:findings|found)\.(?:error|warning|no_exception|read)\(\s*"(\w+)"', code))
    table = PAGE.partition("| check | error | warning |")[2].partition("\n\n")[0]
    listed = {name for row in re.findall(r"^\| ([\w, ]+) \|", table, flags=re.M) for name in row.split(", ")}
    assert listed == made - {"gymnasium", "episode", "close"}


def test_every_public_name_says_what_it_is() -> None:
    for name in envs.__all__:
        assert inspect.getdoc(getattr(envs, name)), name
