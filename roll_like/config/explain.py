"""From pydantic's errors to one message a person can act on.

Each problem names its full key, what was found, what was expected, the nearest right key where one was
misspelt, and the file and line (or the override) where it was set.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from roll_like.config.keys import (
    LISTS,
    MAPPINGS,
    all_keys,
    field_at,
    key_path,
    keys_by_use,
    keys_of,
    meaning_of,
    section_at,
    union_members,
)
from roll_like.config.other_names import other_names, translated
from roll_like.config.source import COMMAND_LINE, KeyPath, Source, dotted
from roll_like.errors import ConfigError
from roll_like.registry import likely

#: What some write for "nothing". Where text is expected too, it is taken for that.
NOTHING = ("None", "none", "NONE")


def explain(error: ValidationError, root: type[BaseModel], source: Source) -> ConfigError:
    """Return one ConfigError that lists every problem of `error`.

    Args:
        source: What was written, and where.
    """
    found = _merged(error.errors(include_url=False))
    meant = {path for details in found if (path := _meant_key(details, root, source.values)) is not None}
    found = [details for details in found if not _follows(details, found, meant, root, source.values)]
    # a key that is not known comes before one that is missing, perhaps because of it
    found.sort(key=lambda details: _ORDER.get(details["type"], 1))
    if len(found) == 1:
        return ConfigError(_problem(found[0], root, source))
    problems = [_problem(details, root, source).removesuffix(f" [{source.label}]") for details in found]
    listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return ConfigError(f"{len(problems)} problems in {source.label}:\n{listed}")


def _merged(found: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return errors with one for each value that is none of several lists of words; pydantic has one for each list."""
    merged: dict[tuple[int | str, ...], ErrorDetails] = {}
    for details in found:
        *parts, last = details["loc"] or ("",)
        of_list = details["type"] == "literal_error" and str(last).startswith("literal[")
        place = tuple(parts) if of_list else details["loc"]
        if of_list and place in merged:
            words = [*_WORD.findall(merged[place]["msg"]), *_WORD.findall(details["msg"])]
            message = f"Input should be {', '.join(words[:-1])} or {words[-1]}"
            merged[place] = {**merged[place], "msg": message}
        else:
            merged[place] = {**details, "loc": place}
    return list(merged.values())


#: A word in a message of pydantic.
_WORD = re.compile(r"'[^']*'")
#: Kinds of pydantic's errors, and what was expected.
_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "expected a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "expected a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "expected true or false"),
}


#: Those where a number was expected.
_NUMBERS = ("int_type", "int_parsing", "int_from_float", "float_type", "float_parsing")


#: Kinds of errors that come before others, and after them.
_ORDER = {"extra_forbidden": 0, "missing": 2}


def _meant_key(details: ErrorDetails, root: type[BaseModel], values: Mapping[str, Any]) -> KeyPath | None:
    """Return the key beside an unknown one that it probably stands for."""
    if details["type"] != "extra_forbidden":
        return None
    path = key_path(details["loc"], root, values)
    section = section_at(path[:-1], root, values)
    near = likely(str(path[-1]), list(keys_of(section))) if section is not None else []
    return (*path[:-1], near[0]) if near else None


def _follows(
    details: ErrorDetails,
    found: Sequence[ErrorDetails],
    meant: set[KeyPath],
    root: type[BaseModel],
    values: Mapping[str, Any],
) -> bool:
    """Return whether a problem is only what another one leads to.

    A list is too short because pydantic left out items with problems of their own; a key is missing because it is
    misspelt.
    """
    loc = details["loc"]
    if details["type"] == "missing":
        return key_path(loc, root, values) in meant
    inside = (other["loc"] for other in found if len(other["loc"]) > len(loc))
    return details["type"] == "too_short" and any(other[: len(loc)] == loc for other in inside)


def _problem(details: ErrorDetails, root: type[BaseModel], source: Source) -> str:
    path = key_path(details["loc"], root, source.values)
    text = _describe(details, path, root, source)
    return f"{dotted(path) or 'the whole file'}: {text} [{source.place_of(path)}]"


def _describe(details: ErrorDetails, path: KeyPath, root: type[BaseModel], source: Source) -> str:
    kind, found, values = details["type"], details["input"], source.values
    if kind == "extra_forbidden":
        below = _below(path, root, values)
        return f"unknown key; {below}" if below else f"unknown key{_nearest(path, root, values)}"
    if kind == "missing":
        return _missing(path, field_at(path, root, values))
    message = details["msg"]
    if kind == "rule":
        return message if found is None else f"found {_show(found)}; {message}"
    if kind in ("truth", "nothing"):
        return _misread(found, path, root, source)
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    expected = _expected(details, path) + _hint(kind, path, root, found, values)
    if kind == "string_type" and isinstance(found, int | float):
        expected += f"; write it in quotes: {_quoted(path, found, source)}"
    return f"found {_show(found)}; {expected[0].lower()}{expected[1:]}"


def _below(path: KeyPath, root: type[BaseModel], values: Mapping[str, Any]) -> str | None:
    """Return how a file has a key that was written with dots; None where it is none."""
    first, *others = str(path[-1]).split(".")
    if not others or dotted(path) not in map(dotted, all_keys(root, values)):
        return None
    lines = f"{first}: {''.join(f'{{{each}: ' for each in others)}…{'}' * len(others)}"
    return f"in files a key stands below its section: `{lines}`"


def _missing(path: KeyPath, info: FieldInfo | None) -> str:
    if path and isinstance(path[-1], int):
        return "missing: the list is too short"
    meaning = meaning_of(info).rstrip(".") if info is not None else ""
    return "missing, and there is no default" + (f" ({meaning})" if meaning else "")


def _expected(details: ErrorDetails, path: KeyPath) -> str:
    """Return pydantic's message in the words of this project."""
    kind, found, message = details["type"], details["input"], details["msg"]
    expected = message.replace("Input should be", "expected").replace("Input should", "it should")
    expected = expected.replace("expected greater", "expected a number greater").replace(
        "expected less", "expected a number less"
    )
    if kind in {"model_type", "model_attributes_type"}:
        expected = "expected a section of `key: value` lines"
    if kind == "too_short":
        least = details["ctx"]["min_length"]
        expected = f"expected a list of {least} or more"
    if kind in _EXPECTED:
        expected = _EXPECTED[kind]
    if kind == "int_parsing_size":
        expected = "expected a smaller number"
    if kind == "string_type":
        expected = "expected text"
    if kind == "string_pattern_mismatch" and path[-1] == "name":
        expected = "expected letters, digits, `_`, `-` and `.` alone, and no `.` first"
    if kind in {"tuple_type", "list_type"}:
        expected = "expected a list"
    if kind == "literal_error":
        words = [word.strip("'") for word in _WORD.findall(message)]
        meant = other_names().values.get(str(found))
        near = [meant] if meant in words else likely(str(found), words)
        expected += f"; did you mean {near[0]!r}?" if near else ""
    return expected


def _misread(found: Any, path: KeyPath, root: type[BaseModel], source: Source) -> str:
    """Return what is said of a word that YAML reads as true or false, and of one that it does not read as nothing."""
    info, written = field_at(path, root, source.values), source.written.get(path)
    expected = expected_by(info.annotation) if info is not None else "something else"
    if not isinstance(found, bool):
        return f"found {_show(found)}, which is a text; YAML's word for nothing is null; write null, or remove the key"
    word = str(found).lower()
    shown = written if written not in (None, word) else None
    text = f"found {shown}, which YAML reads as {word}" if shown else f"found {word}"
    in_quotes = info is not None and any(option in (str, shown) for option in union_members(info.annotation))
    return f"{text}; expected {expected}" + (
        f"; for the text write it in quotes: {_quoted(path, word, source)}" if in_quotes else ""
    )


def _quoted(path: KeyPath, value: Any, source: Source) -> str:
    """Return how a value that YAML reads as no text is written as one; a shell takes the outer quotes away."""
    text, place = source.written.get(path, str(value)), source.place_of(path)
    if not place.startswith(COMMAND_LINE):
        return f"'{text}'"
    key = place.removeprefix(COMMAND_LINE).partition("=")[0].strip()
    return f"{key}='\"{text}\"'" if _is_whole(key, path) else f"\"{text}\", and all of the value in ': {key}='…'"


def _is_whole(key: str, path: KeyPath) -> bool:
    """Return whether an override's key, in which numbers may stand in brackets, is that of a value."""
    return key.replace("[", ".").replace("]", "") == ".".join(map(str, path))


def expected_by(annotation: Any) -> str:
    """Return in words what a field takes.

    >>> expected_by(int), expected_by(float | None)
    ('a whole number', 'a number')
    """
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    found: list[str] = []
    for option in union_members(annotation):
        if get_origin(option) in LISTS:
            found.append("a list")
        elif get_origin(option) in MAPPINGS or (isinstance(option, type) and issubclass(option, BaseModel)):
            found.append("a section of `key: value` lines")
        elif isinstance(option, str):
            found.append(repr(option))
        elif option is not type(None):
            found.append(names.get(option, "text"))
    return listed(list(dict.fromkeys(found)))


def _hint(kind: str, path: KeyPath, root: type[BaseModel], found: Any, values: Mapping[str, Any]) -> str:
    """Return what to write in place of a value of another kind, after `; `; nothing where that is not known."""
    if isinstance(found, str) and found in NOTHING:
        return _nothing_hint(kind, field_at(path, root, values))
    if kind in _NUMBERS:
        return _number_hint(path, found, values)
    if kind in {"tuple_type", "list_type"}:
        if isinstance(found, str | int | float):
            return f"; write `{as_list(str(found))}`"
        first = next(iter(found), "") if isinstance(found, Mapping) else ""
        return (
            f"; write a dash and a blank before the first key of each: `- {str(first).lstrip('-')}: …`" if first else ""
        )
    if kind in {"model_type", "model_attributes_type"}:
        return _section_hint(section_at(path, root, {}), found)
    return ""


def _nothing_hint(kind: str, info: FieldInfo | None) -> str:
    if kind in {"tuple_type", "list_type"}:
        return "; for none write `[]`"
    if info is not None and type(None) in union_members(info.annotation):
        return "; YAML's word for nothing is null"
    return "" if info is None or info.is_required() else "; for the default remove the key"


def _number_hint(path: KeyPath, found: Any, values: Mapping[str, Any]) -> str:
    if isinstance(found, str):
        meant = meant_number(found)
        return f"; write {meant}" if meant is not None else ""
    if not isinstance(found, float) or not 0 < found < 1:
        return ""
    if path[-1] != "warmup_steps":
        return "; it counts, and is no share"
    steps = values.get("steps")
    text = "; it counts optimizer updates, and no key takes a share of them"
    if not isinstance(steps, int):
        return f"{text}: multiply {found:g} by their number, which --check prints without this key"
    algorithm = values.get("algorithm")
    updates = algorithm.get("updates_per_step", 1) if isinstance(algorithm, Mapping) else 1
    total = steps * updates if isinstance(updates, int) else steps
    share = max(1, round(found * total))
    return f"{text}; {found:g} of the run's {total} optimizer updates are {share}: write {share}"


def _section_hint(section: type[BaseModel] | None, found: Any) -> str:
    keys = keys_of(section) if section is not None else {}
    if isinstance(found, list) and found and all(isinstance(each, Mapping) for each in found):
        return "; remove the dash before its keys"
    if not isinstance(found, str):
        return ""
    pair = re.fullmatch(r"([\w.-]+)\s*[:=\s]\s*(\S.*)", found)
    if pair and pair[1] in keys:
        return f"; write `{pair[1]}: {pair[2]}`, with a colon and a blank"
    return f"; write `path: {found}` below it" if "path" in keys else ""


def _show(value: Any) -> str:
    if isinstance(value, str):
        shown = repr(value)
    elif isinstance(value, bool | None.__class__):
        shown = {True: "true", False: "false", None: "nothing (null)"}[value]
    else:
        shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 80 else f"{shown[:77]}…"


def _nearest(path: KeyPath, root: type[BaseModel], values: Mapping[str, Any]) -> str:
    """Return `; did you mean …` for the unknown key at the end of `path`."""
    key, section = str(path[-1]), path[:-1]
    parent = section_at(section, root, values)
    siblings = [] if parent is None else keys_by_use(parent)
    keys = list(all_keys(root, values))
    everywhere = [known for known in keys if known[:-1] != section]
    same_name = [dotted(known) for known in everywhere if known[-1] == key]
    key = key.lstrip("+~-")  # Hydra's signs
    near = likely(key, siblings, cutoff=0.75)
    if near:
        return f"; did you mean `{dotted((*section, near[0]))}`?"
    if same_name:
        return f"; `{key}` belongs to {' or '.join(same_name[:3])}"
    if (other := translated(key, {dotted(known) for known in keys})) is not None:
        return f"; {other}"
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if near:
        return f"; did you mean `{dotted((*section, near[0]))}`?"
    far = difflib.get_close_matches(key, [str(known[-1]) for known in everywhere], n=1, cutoff=0.75)
    if far:
        return f"; did you mean `{next(dotted(known) for known in everywhere if known[-1] == far[0])}`?"
    return f"; known here: {', '.join(siblings)}" if siblings else ""


_DIGITS = r"[-+]?\d+(?:\.\d+)?"
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:[, '_]\d{3})+(?:\.\d+)?")
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_PERCENT = re.compile(rf"({_DIGITS})\s*%")
_POWER = re.compile(rf"(?:({_DIGITS})\s*[*x×·]\s*)?10\s*(?:\^|\*\*)\s*\(?([-+]?\d+)\)?")
_SCALED = re.compile(rf"({_DIGITS})\s*([kKmMbB])")
_WITH_UNIT = re.compile(rf"({_DIGITS}(?:[eE][-+]?\d+)?)\s*[^\W\d_]+")
_SCALES = {"k": 1e3, "m": 1e6, "b": 1e9}
#: How people write numbers, and what each is.
_SPELLINGS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], float]], ...] = (
    (_PERCENT, lambda match: float(match[1]) / 100),
    (_THOUSANDS, lambda match: float(re.sub(r"[, '_]", "", match[0]))),
    (_DECIMAL_COMMA, lambda match: float(match[0].replace(",", "."))),
    (_POWER, lambda match: float(f"{match[1] or 1}e{match[2]}")),
    (_SCALED, lambda match: float(match[1]) * _SCALES[match[2].lower()]),
)


def meant_number(text: str) -> str | None:
    """Return how YAML writes the number that a text means; None where it means none.

    >>> [meant_number(text) for text in ("80%", "1,000", "0,5", "10k", "2*10^-5", "1GB", "many")]
    ['0.8', '1000', '0.5', '10000', '2e-05', '1', None]
    """
    text = text.strip()
    for pattern, value in _SPELLINGS:
        if match := pattern.fullmatch(text):
            return _written(value(match))
    match = _WITH_UNIT.fullmatch(text)
    return match[1] if match else None


def _written(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"


def as_list(text: str) -> str:
    """Return a text as YAML's list of what stands between its commas.

    >>> as_list("tensorboard, mlflow"), as_list("(0.9, 0.95)"), as_list("###")
    ('[tensorboard, mlflow]', '[0.9, 0.95]', "['###']")
    """
    inner = text.strip()
    if len(inner) > 1 and inner[0] + inner[-1] in ("()", "[]", "{}"):
        inner = inner[1:-1]
    parts = [part.strip().strip("'\"") for part in inner.split(",")]
    return f"[{', '.join(_as_item(part) for part in parts if part)}]"


def _as_item(text: str) -> str:
    try:
        plain = yaml.safe_load(f"[{text}]") in ([text], [meant := yaml.safe_load(text)]) and not isinstance(meant, dict)
    except yaml.YAMLError:
        plain = False
    return text if plain else "'" + text.replace("'", "''") + "'"


def listed(words: Sequence[str]) -> str:
    """Return words as a sentence lists them: `a, b or c`."""
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)
