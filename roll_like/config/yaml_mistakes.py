"""What is wrong with a file that is no YAML: the line that a person has to change, and what to write there.

A parser stops where the text makes no sense any more, which is often behind the mistake. So small mends of the lines in
question are tried, and the mistake is the one whose mend lets the parser go on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from roll_like.errors import ConfigError

_Loader: type[yaml.SafeLoader] | type[yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

#: Beyond this many characters no mends are tried; each one parses the whole text.
_MOST_TEXT = 200_000
#: Characters of a line that a message shows.
_SHOWN = 60
#: Lines before the one where the parser stopped that are looked at for a quote without its partner.
_QUOTED_LINES = 100

_NAME = r"(?P<start>\s*(?:- +)?)(?P<key>[A-Za-z_][\w.-]*)"
_NO_COLON = re.compile(rf"{_NAME}\s+(?P<value>[^\s:=#].*)")
_NO_VALUE = re.compile(rf"{_NAME}\s*(?P<comment>#.*)?")
_NO_BLANK = re.compile(rf"{_NAME}\s*(?P<sign>[:=\uff1a])\s*(?P<value>\S.*)")
_NO_BLANK_AFTER_DASH = re.compile(r"(?P<start>\s*)-(?P<item>[^\s-].*)")
_PAIR = re.compile(r"(?P<start>\s*(?:- +)?(?:[\w.-]+:\s+)?)(?P<value>[^\s'\"].*?)(?P<comment>\s+#.*)?")
_BRACKETS = {"[": "]", "{": "}"}


#: Problems of the parser that name the right line.
_KNOWN = {
    "another document": ("a second document begins here", "leave out the line `---`"),
    "undefined alias": ("`*` stands for an anchor that is not defined", "put it in quotes"),
}


@dataclass(frozen=True, slots=True)
class _Stop:
    """Where a parser stopped: line numbers from 0, `position` is how far it understood the text."""

    line: int
    begun: int
    position: int
    problem: str


@dataclass(frozen=True, slots=True)
class _Mend:
    """Another text for one line, and what is wrong if it helps."""

    line: int
    text: str
    what: str
    fix: str


def not_yaml(path: Path, text: str, error: yaml.MarkedYAMLError) -> ConfigError:
    """Return an error that names the line to change and what to write there."""
    if (number := no_break_space(text)) is not None:
        return no_space(path, number)
    if "expansion" in (error.problem or ""):
        return ConfigError(
            f"{path}: anchors and aliases expand to more values than a configuration has", fix="use fewer aliases"
        )
    lines, stop = text.splitlines(), _stop_of(error, text)
    for problem, (what, fix) in _KNOWN.items():
        if problem in stop.problem:
            return _refused(path, lines, stop.line, what, fix)
    tabs = [number for number in (stop.line, stop.begun) if number < len(lines) and "\t" in lines[number]]
    if tabs and re.search("cannot start any token|tab", stop.problem):
        indented = lines[tabs[0]][: len(lines[tabs[0]]) - len(lines[tabs[0]].lstrip())]
        fix = "indent with spaces" if "\t" in indented else "write a space instead"
        return _refused(path, lines, tabs[0], "a tab stands where spaces belong", fix)
    mend = _mend(lines, stop) if len(text) <= _MOST_TEXT else None
    if mend is not None:
        return _refused(path, lines, mend.line, mend.what, mend.fix)
    since = f", in what begins in line {stop.begun + 1}" if stop.begun < stop.line else ""
    return _refused(path, lines, min(stop.line, len(lines) - 1), f"{stop.problem}{since}", "correct the line")


def duplicate_key(node: yaml.Node | None, path: Path) -> ConfigError | None:
    """Return an error for the first key that is written twice, with both lines; None where each is written once."""
    sections: list[tuple[yaml.Node | None, tuple[str, ...]]] = [(node, ())]
    seen: set[int] = set()
    while sections:
        here, keys = sections.pop()
        if here is None or id(here) in seen or isinstance(here, yaml.ScalarNode):
            continue
        seen.add(id(here))  # an alias is the node of its anchor
        if isinstance(here, yaml.SequenceNode):
            sections += [(item, (*keys, str(index))) for index, item in enumerate(here.value)]
            continue
        first: dict[str, int] = {}
        for key, value in here.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line, name = key.start_mark.line + 1, ".".join((*keys, key.value))
            if key.value in first:
                return ConfigError(
                    f"{path}:{line}: duplicate key {name}: it is written in line {first[key.value]} already",
                    fix="remove one of the two, or join what stands below them",
                )
            first[key.value] = line
            sections.append((value, (*keys, key.value)))
    return None


def no_break_space(text: str) -> int | None:
    """Return the number of the first line with a no-break space, from 1."""
    return next((number for number, line in enumerate(text.splitlines(), 1) if "\u00a0" in line), None)


def no_space(path: Path, line: int) -> ConfigError:
    """Return the error for a no-break space in a line, numbered from 1."""
    return ConfigError(
        f"{path}:{line}: not valid YAML: a no-break space (U+00A0) stands where a space belongs",
        fix="type the space again; copying from a web page brings such characters along",
    )


def not_text(path: Path, data: bytes, error: UnicodeDecodeError) -> ConfigError:
    """Return the error for a file that is not UTF-8, with the line."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return ConfigError(f"{path} is not UTF-8 text but UTF-16", fix="save it as UTF-8")
    line = data.count(b"\n", 0, error.start) + 1
    return ConfigError(
        f"{path}:{line}: not UTF-8 text: byte 0x{data[error.start]:02x} is no character of it", fix="save it as UTF-8"
    )


def read_otherwise(node: yaml.ScalarNode) -> str | None:
    """Return the number that YAML 1.1 reads where most people see another: of `010` and of `1:30`; None elsewhere."""
    octal = re.fullmatch(r"[-+]?0[0-7_]+", node.value) and node.value.strip("-+0_") != ""
    if node.style is not None or not (octal or re.fullmatch(r"[-+]?\d[\d_]*(?::[0-5]?\d)+(?:\.\d*)?", node.value)):
        return None
    value = yaml.safe_load(node.value)
    return str(value) if isinstance(value, int | float) else None


def control_character(path: Path, text: str, error: yaml.reader.ReaderError) -> ConfigError:
    """Return the error for a character that YAML does not have, with its line."""
    line = text.count("\n", 0, error.position) + 1
    return ConfigError(
        f"{path}:{line}: not valid YAML: the control character U+{error.character:04X} is not allowed",
        fix="remove it; is this a configuration, or a binary file?",
    )


def _refused(path: Path, lines: Sequence[str], number: int, what: str, fix: str) -> ConfigError:
    shown = lines[number].strip() if 0 <= number < len(lines) else ""
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"
    quoted = f" [{shown}]" if shown else ""
    return ConfigError(f"{path}:{number + 1}: not valid YAML: {what}{quoted}", fix=fix)


def _stop(text: str) -> _Stop | None:
    """Return where the parser stops; None where it reads the whole text."""
    try:
        yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        return _stop_of(error, text)
    except (yaml.YAMLError, RecursionError):
        return _Stop(0, 0, -1, "")
    return None


def _stop_of(error: yaml.MarkedYAMLError, text: str) -> _Stop:
    problem = error.problem or "it cannot be read"
    line = error.problem_mark.line if error.problem_mark else 0
    begun = error.context_mark.line if error.context_mark else line
    # what is open at the end was understood up to where it begins
    pending = "simple key" in (error.context or "") or line >= len(text.splitlines())
    return _Stop(line, begun, begun if pending else line, problem)


def _mend(lines: Sequence[str], stop: _Stop) -> _Mend | None:
    """Return the first mend that makes the whole text YAML; else the first that lets the parser go on for a line."""
    partial = None
    for mend in _mends(lines, stop):
        if mend.text == lines[mend.line]:
            continue
        mended = "\n".join([*lines[: mend.line], mend.text, *lines[mend.line + 1 :]])
        further = _stop(f"{mended}\n")
        if further is None:
            return mend
        if partial is None and further.position > stop.position:
            partial = mend
    return partial


def _mends(lines: Sequence[str], stop: _Stop) -> Iterator[_Mend]:
    """Yield what may be wrong, the likeliest first."""
    written = [number for number, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")]
    before = [number for number in written if number < stop.line][-2:][::-1]
    here = [number for number in dict.fromkeys((stop.begun, stop.line, *before)) if number in written]
    for number in here:
        yield from _keys_without_colon(number, lines[number])
    for number in reversed([each for each in written if stop.line - _QUOTED_LINES <= each <= stop.line]):
        yield from _open_quote(number, lines[number])
    for number in here:
        yield from _open_bracket(number, lines[number])
    for number in (stop.line, stop.begun):
        if number in written:
            yield from _needs_quotes(number, lines[number])
    if stop.line in written and before:
        yield from _indented_otherwise(lines, stop.line, before[0], written)


def _keys_without_colon(number: int, line: str) -> Iterator[_Mend]:
    if match := _NO_BLANK_AFTER_DASH.fullmatch(line):
        item = match["item"].strip()
        yield _Mend(number, f"{match['start']}- {item}", "there is no blank after the dash", f"write `- {item}`")
    if (match := _NO_BLANK.fullmatch(line)) and not re.match(rf"{_NAME}\s*:\s", line):
        pair = f"{match['key']}: {match['value']}"
        what = "there is no blank after the colon" if match["sign"] == ":" else f"`{match['sign']}` is no colon"
        yield _Mend(number, f"{match['start']}{pair}", what, f"write `{pair.strip()}`")
    elif match := _NO_COLON.fullmatch(line):
        pair = f"{match['key']}: {match['value']}"
        yield _Mend(number, f"{match['start']}{pair}", "there is no colon after the key", f"write `{pair.strip()}`")
    elif match := _NO_VALUE.fullmatch(line):
        text = f"{match['start']}{match['key']}: {match['comment'] or ''}".rstrip()
        yield _Mend(number, text, "there is no colon after the key", f"write `{match['key']}:`")


def _open_quote(number: int, line: str) -> Iterator[_Mend]:
    for quote in ('"', "'"):
        if line.count(quote) % 2 == 0:
            continue
        bare, hash_, comment = line.partition(" #")
        closed = f"{bare.rstrip()}{quote}"
        what = f"a quote ({quote}) is opened and not closed, or the other way round"
        if re.search(rf"(?:^|[\s\[{{,]){quote}", bare):
            yield _Mend(number, closed + hash_ + comment, what, f"close it in this line: `{closed.strip()}`")
        yield _Mend(number, line.replace(quote, ""), what, "write it in pairs, or leave it out")


def _open_bracket(number: int, line: str) -> Iterator[_Mend]:
    for opening, closing in _BRACKETS.items():
        missing = line.count(opening) - line.count(closing)
        if missing > 0:
            bare, hash_, comment = line.partition(" #")
            closed = f"{bare.rstrip().rstrip(',')}{closing * missing}"
            yield _Mend(number, closed + hash_ + comment, f"`{opening}` is not closed", f"close it: `{closed.strip()}`")
        elif missing < 0:
            text = line[: line.rindex(closing)] + line[line.rindex(closing) + 1 :]
            yield _Mend(number, text, f"`{closing}` closes nothing that is open", f"write `{text.strip()}`")


def _needs_quotes(number: int, line: str) -> Iterator[_Mend]:
    match = _PAIR.fullmatch(line)
    if match is None or match["value"][0] in "[{":
        return
    value = match["value"].rstrip()
    quoted = "'" + value.replace("'", "''") + "'"
    what = "a value that holds `: ` is text in quotes" if re.search(r":(\s|$)", value) else "this value needs quotes"
    text = f"{match['start']}{quoted}{match['comment'] or ''}"
    yield _Mend(number, text, what, f"write `{(match['start'] + quoted).strip()}`")


def _indented_otherwise(lines: Sequence[str], number: int, before: int, written: Sequence[int]) -> Iterator[_Mend]:
    """Yield other indentations of a line and of the one before it: of that first whose own is the rarer in the file."""
    indents = [_indent(lines[each]) for each in written]
    fix = "indent the keys of one section alike, with two spaces more than the section's name"
    for each, other in sorted(
        ((number, before), (before, number)), key=lambda pair: indents.count(_indent(lines[pair[0]]))
    ):
        what = (
            f"it is indented by {_indent(lines[each])}, and line {other + 1} by {_indent(lines[other])}: they are "
            "neither beside each other nor one below the other"
        )
        nearest = dict.fromkeys([_indent(lines[other]), *reversed(indents[: written.index(each)])])
        for indent in (*nearest, _indent(lines[other]) + 2):
            yield _Mend(each, " " * indent + lines[each].lstrip(), what, fix)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
