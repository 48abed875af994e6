"""Shipped configurations with random mistakes: what is wrong is refused in a few lines, and never by a traceback."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_like import cli
from roll_like.config.load import load_config
from roll_like.errors import ConfigError, PluginError
from roll_like.registry import REWARDS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs").rglob("*.yaml"))
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.yaml")) if path.parent.name != "launch"]
MUTATIONS = 8


def kind(path: Path) -> str:
    """Return which pipeline a file is of, or that it extends another file."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return "extends" if "extends" in values else str(values["pipeline"])


#: A file of each kind. At night all files are tried, and more often.
BY_DAY = sorted({kind(path): path for path in reversed(FILES)}.values())
#: Lines of a report of several problems, notes excluded.
MOST_LINES = 16
#: What a value may become. A text or a number may be valid in the place of another; these sections never are.
ANYTHING: list[Any] = [
    None,
    -1,
    0,
    1e308,
    2**70,
    "",
    "x" * 200,
    "\x00",
    "NaN",
    True,
    [],
    [[]],
    {},
    "a: b",
    "${nothing}",
]
NOWHERE: dict[str, Any] = {"no_such_key_at_all": {"nor": ["here"]}}

Path_ = tuple[str | int, ...]


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yield the path of every key and item."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def mutated(values: dict[str, Any], rng: random.Random) -> tuple[dict[str, Any], str, bool]:
    """Return a copy with one mistake, what it is, and whether it is one for certain."""
    changed = copy.deepcopy(values)
    path = rng.choice(list(places(values)))
    parent: Any = changed
    for part in path[:-1]:
        parent = parent[part]
    last = path[-1]
    kind = rng.choice(["value", "nowhere", "misspelt", "removed", "list", "text"])
    if kind == "misspelt" and isinstance(parent, dict):
        parent[f"{last}_of_mine"] = parent.pop(last)
        # names of teachers, pools and the like may be anything, and so may engine arguments and options
        return changed, f"{path} is misspelt", len(path) == 1
    if kind == "removed":
        del parent[last]
        return changed, f"{path} is removed", False
    found = {"nowhere": NOWHERE, "list": [parent[last]], "text": "???"}.get(kind, rng.choice(ANYTHING))
    parent[last] = found
    return changed, f"{path} is {found!r}", kind == "nowhere" and len(path) == 1


def answer(file: Path) -> str | None:
    """Return what is said of a file; None if it is valid."""
    try:
        load_config(file)
    except (ConfigError, PluginError) as error:
        return str(error)
    return None


def assert_answers(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutations: int) -> None:
    monkeypatch.chdir(ROOT)
    rng = random.Random(path.name)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "extends" in values:
        values["extends"] = str(path.parent / values["extends"])
    file, refused = tmp_path / "run.yaml", 0
    for _ in range(mutations):
        changed, what, wrong = mutated(values, rng)
        file.write_text(json.dumps(changed), encoding="utf-8")
        text = answer(file)
        assert text is not None or not wrong, f"{what}, and nothing is said"
        if text is not None:
            refused += 1
            lines = text.splitlines()
            assert len(lines) <= 12, f"{what}: {len(lines)} lines\n{text}"
            assert not any(word in text for word in ("Traceback", "pydantic", "<class", "object at 0x")), (
                f"{what}: {text}"
            )
    assert refused > mutations // 4


@pytest.mark.parametrize("path", BY_DAY, ids=lambda path: path.stem)
def test_mistakes_are_answered(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_answers(path, tmp_path, monkeypatch, MUTATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_many_mistakes_are_answered(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_answers(path, tmp_path, monkeypatch, 500)


def assert_check_answers(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mutations: int
) -> None:
    monkeypatch.chdir(ROOT)
    REWARDS.names()
    monkeypatch.setattr(REWARDS, "_plugins", dict(REWARDS._plugins))  # examples register rewards when they are imported
    rng = random.Random(f"check {path.name}")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "extends" in values:
        values["extends"] = str(path.parent / values["extends"])
    file = tmp_path / "run.yaml"
    for _ in range(mutations):
        changed, what, wrong = mutated(values, rng)
        file.write_text(json.dumps(changed), encoding="utf-8")
        code = cli.main(["run", "--config", str(file), "--check"])
        for module in [name for name in sys.modules if name.startswith("examples")]:
            del sys.modules[module]
        shown = capsys.readouterr()
        assert code in ((1, 2) if wrong else (0, 1, 2)), what
        assert ("error: " in shown.err) == (code != 0), f"{what}: {shown.err}"
        assert len(shown.err.splitlines()) <= MOST_LINES, f"{what}: {shown.err}"
        assert not any(word in shown.err for word in ("Traceback", "pydantic", "<class", "object at 0x")), (
            f"{what}: {shown.err}"
        )


@pytest.mark.parametrize("path", BY_DAY, ids=lambda path: path.stem)
def test_mistakes_are_answered_by_a_check(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_check_answers(path, tmp_path, monkeypatch, capsys, 2)


@pytest.mark.slow
@pytest.mark.parametrize("path", [*FILES, *EXAMPLES], ids=lambda path: path.stem)
def test_many_mistakes_are_answered_by_a_check(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_check_answers(path, tmp_path, monkeypatch, capsys, 30)


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    for text in (
        "{a: " * 3000 + "1" + "}" * 3000,
        "[" * 3000,
        "a:\n" + "".join(" " * n + "a:\n" for n in range(1, 3000)),
    ):
        (tmp_path / "deep.yaml").write_text(text)
        found = answer(tmp_path / "deep.yaml")
        assert found is not None
        assert len(found.splitlines()) <= 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps: 3\n\tname: x\n", "a tab stands where spaces belong"),
        ("steps: 3\nname:\u00a0x\n", "no-break space"),
        ("steps: 3\nmodel:\n\u00a0\u00a0dtype: float32\n", ":3: not valid YAML: a no-break space"),
        ("steps: 3\nname: x\u00a0\n", ":2: not valid YAML: a no-break space"),
        (
            "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)),
            "anchors and aliases expand to more values",
        ),
        ("steps: 3\nsteps: 4\n", "steps"),
        ("- steps\n", "key: value"),
        ("", "pipeline: the key is missing, as all are: the file is empty"),
        ("steps: [3\n", "run.yaml:1: not valid YAML: `[` is not closed"),
    ],
)
def test_what_is_no_yaml_says_where(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    found = answer(tmp_path / "run.yaml")
    assert found is not None
    assert expected in found
    assert len(found.splitlines()) <= 4
