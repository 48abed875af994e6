"""Files that are no YAML: the message names the line that has to change, and what to write there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll_like.config.source import read_source
from roll_like.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "configs" / "rlvr_quickstart.yaml").read_text(encoding="utf-8").splitlines()
KEY = re.compile(r"(?P<start> *(?:- )?)(?P<key>[\w.-]+):(?P<value> [^#\[{]*)?(?P<comment> +#.*)?")


def refused(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_source(path)
    return str(caught.value).replace(str(path), "c.yaml")


@pytest.mark.parametrize(
    ("text", "line", "what", "fix"),
    [
        ("pipeline rlvr\nname: x\n", 1, "there is no colon after the key [pipeline rlvr]", "write `pipeline: rlvr`"),
        ("name: x\nsteps 10\n\nseed: 1\n", 2, "there is no colon", "write `steps: 10`"),
        ("name: x\nmodel\n  path: y\n", 2, "there is no colon", "write `model:`"),
        ("name: x\nsteps:10\nseed: 1\n", 2, "there is no blank after the colon", "write `steps: 10`"),
        ("name: x\nsteps = 10\nseed: 1\n", 2, "`=` is no colon", "write `steps: 10`"),
        ("name: x\nsteps\uff1a10\nseed: 1\n", 2, "`\uff1a` is no colon", "write `steps: 10`"),
        ("name: x\nsources:\n  -path: a\n    name: b\n", 3, "there is no blank after the dash", "write `- path: a`"),
        (
            'name: "x\nsteps: 1\nseed: "2"\n',
            1,
            'a quote (") is opened and not closed',
            'close it in this line: `name: "x"`',
        ),
        ("name: x\nstop: ['a, b]\nseed: 1\n", 2, "a quote (') is opened", "write it in pairs, or leave it out"),
        ("name: 'it's'\nseed: 1\n", 1, "a quote (') is opened", "write it in pairs"),
        ("name: x\nstop: [a, b\nseed: 1\n", 2, "`[` is not closed", "close it: `stop: [a, b]`"),
        ("name: x\nstop: [a, b  # two\nseed: 1\n", 2, "`[` is not closed", "close it: `stop: [a, b]`"),
        ("name: x\nstop: [a, b]]\nseed: 1\n", 2, "`]` closes nothing", "write `stop: [a, b]`"),
        ("name: x\nloss: {type: ppo\nseed: 1\n", 2, "`{` is not closed", "close it: `loss: {type: ppo}`"),
        ("name: run: 5\nseed: 1\n", 1, "a value that holds `: ` is text in quotes", "write `name: 'run: 5'`"),
        ("name: @x\nseed: 1\n", 1, "this value needs quotes", "write `name: '@x'`"),
        ("name: %x  # y\nseed: 1\n", 1, "this value needs quotes", "write `name: '%x'`"),
        ("name: *x\nseed: 1\n", 1, "an anchor that is not defined", "put it in quotes"),
        ("a:\n  b: 1\n   c: 2\n  d: 3\n", 3, "it is indented by 3, and line 2 by 2", "alike"),
        ("a:\n  b: 1\n c: 2\n  d: 3\n", 3, "it is indented by 1, and line 2 by 2", "alike"),
        ("a:\n   b: 1\n  c: 2\n  d: 3\n", 2, "it is indented by 3, and line 3 by 2", "alike"),
        ("a:\n  b: 1\n\tc: 2\n", 3, "a tab stands where spaces belong", "indent with spaces"),
        ("a:\n  b:\t1\n", 2, "a tab stands where spaces belong", "write a space instead"),
        ("a: 1\n---\nb: 2\n", 2, "a second document begins here", "leave out the line `---`"),
    ],
)
def test_the_line_of_the_mistake_is_named(tmp_path: Path, text: str, line: int, what: str, fix: str) -> None:
    message = refused(tmp_path / "c.yaml", text)
    assert f"c.yaml:{line}: not valid YAML: " in message
    assert what in message
    assert fix in message
    assert len(message.splitlines()) == 2


MUTATIONS = {
    "no colon": lambda m: f"{m['start']}{m['key']}{m['value'] or ''}",
    "no blank": lambda m: m["value"] and f"{m['start']}{m['key']}:{m['value'].strip()}",
    "equals sign": lambda m: m["value"] and f"{m['start']}{m['key']} = {m['value'].strip()}",
    "open quote": lambda m: m["value"] and f'{m["start"]}{m["key"]}: "{m["value"].strip()}',
    "open bracket": lambda m: m["value"] and f"{m['start']}{m['key']}: [{m['value'].strip()}",
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=list(MUTATIONS))
def test_in_any_line_of_a_file(tmp_path: Path, mutate: object) -> None:
    assert callable(mutate)
    refusals = 0
    for number, line in enumerate(LINES):
        match = KEY.fullmatch(line)
        changed = mutate(match) if match else None
        # the only key of a section without a colon is valid: a text in place of the section
        if changed and not (_alone(number) and not {'"', "["} & set(changed)):
            text = "\n".join([*LINES[:number], changed, *LINES[number + 1 :], ""])
            path = tmp_path / "c.yaml"
            path.write_text(text, encoding="utf-8")
            with pytest.raises(ConfigError) as caught:
                read_source(path)
            assert f"c.yaml:{number + 1}: " in str(caught.value), changed
            refusals += 1
    assert refusals > 30


def _alone(number: int) -> bool:
    def depth(each: int) -> int:
        line = LINES[each] if each < len(LINES) else ""
        return len(line) - len(line.lstrip())

    return depth(number) > depth(number - 1) and depth(number + 1) < depth(number)


@pytest.mark.parametrize(
    ("text", "line", "name", "first"),
    [
        ("steps: 1\nseed: 2\nsteps: 3\n", 3, "steps", 1),
        ("rollout:\n  temperature: 1\n  stop: []\n  temperature: 2\n", 4, "rollout.temperature", 2),
        ("rollout:\n  n: 1\n\nrollout:\n  m: 1\n", 4, "rollout", 1),
        ("sources:\n  - path: a\n    path: b\n", 3, "sources.0.path", 2),
        ("a: {b: 1, b: 2}\n", 1, "a.b", 1),
    ],
)
def test_of_a_duplicate_key_both_lines_are_named(tmp_path: Path, text: str, line: int, name: str, first: int) -> None:
    message = refused(tmp_path / "c.yaml", text)
    assert f"c.yaml:{line}: duplicate key {name}: it is written in line {first} already" in message


def test_anchors_that_are_merged_are_no_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a: &a {x: 1}\nb:\n  <<: *a\n  x: 2\nc: *a\n")
    assert read_source(path).values["b"] == {"x": 2}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("name: x\n".encode("utf-16"), "is not UTF-8 text but UTF-16"),
        ("seed: 1\nname: größe\n".encode("latin-1"), "c.yaml:2: not UTF-8 text: byte 0xf6"),
        (b"seed: 1\nname: a\0b\n", "c.yaml:2: not valid YAML: the control character U+0000"),
    ],
)
def test_what_is_no_text(tmp_path: Path, data: bytes, expected: str) -> None:
    assert expected in refused(tmp_path / "c.yaml", data)


@pytest.mark.parametrize("data", [b"\xef\xbb\xbfseed: 1\r\nname: x\r\n", b"seed: 1\rname: x\r"])
def test_marks_and_line_ends_of_other_systems(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "c.yaml").write_bytes(data)
    assert read_source(tmp_path / "c.yaml").values == {"seed": 1, "name": "x"}


def test_a_name_with_a_separator_of_lines_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text('name: "a\\u2028b"\n')
    assert read_source(tmp_path / "c.yaml").values == {"name": "a\u2028b"}
