"""From pydantic's errors to one message a person can act on.

Each problem names its full key, what was found, what was expected, the nearest right key where one was
misspelt, and the file and line (or the override) where it was set.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from roll_like.config.other_names import translated
from roll_like.config.source import KeyPath, Source, dotted
from roll_like.config.value_hints import NOTHING, as_list, listed, meant_number
from roll_like.errors import ConfigError, PluginError
from roll_like.registry import likely

#: Keys of earlier versions, and what became of each. They are looked up before any guess at a misspelt key.
RENAMED = {
    "spans": "it is now called `resources.device_mapping`",
    "span": "it is now called `devices`",
    "pairing": "it is now called `pairs.select`",
    "refresh": "`iteration` is now `pipeline: online_dpo` with `reference.mode: iteration` (its default); for `never` "
    "remove the key, or with `pipeline: online_dpo` set `reference.mode: cluster`",
    "drop_groups_without_signal": "it is now called `drop_zero_variance_groups`",
    "iterations": "pairs of the policy's own answers are now `pipeline: online_dpo`, with its sections at the top: "
    "`iterations.prompts` is `data`; `iterations.rollout`, `rewards`, `judge`, `inference` and `evaluation` are "
    "`rollout`, `rewards`, `judge`, `inference` and `evaluation`; `data.pairs_per_step`, `data.shuffle`, "
    "`iterations.pairing`, `min_margin`, `truncated`, `epochs` and `steps` are `pairs_per_step`, `shuffle`, `select`, "
    "`min_margin`, `truncated`, `epochs` and `steps` of `pairs`; `reference.refresh: iteration` is "
    "`reference.mode: iteration`; an `evaluation` on given pairs is `pair_evaluation`",
}


def explain(error: ValidationError, root: type[BaseModel], source: Source) -> ConfigError:
    """Return one ConfigError that lists every problem of `error`.

    Args:
        error: What pydantic found.
        root: The class that was validated against.
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
#: What some write for a precision or a device.
_SYNONYMS = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "gpu": "cuda",
    "nvidia": "cuda",
}


#: Kinds of pydantic's errors, and what was expected.
_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "expected a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "expected a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "expected true or false"),
}


#: Those where a number was expected.
_NUMBERS = ("int_type", "int_parsing", "int_from_float", "float_type", "float_parsing")


def meaning_of(info: FieldInfo) -> str:
    """Return the description of a field; that of its section where it has none of its own."""
    section = info.annotation
    inherited = section.__doc__ if isinstance(section, type) and issubclass(section, BaseModel) else None
    return info.description or inherited or ""


#: Kinds of errors that come before others, and after them.
_ORDER = {"extra_forbidden": 0, "missing": 2}


def _meant_key(details: ErrorDetails, root: type[BaseModel], values: Mapping[str, Any]) -> KeyPath | None:
    """Return the key beside an unknown one that it probably stands for."""
    if details["type"] != "extra_forbidden":
        return None
    path = key_path(details["loc"], root, values)
    section = section_at(path[:-1], root, values)
    near = likely(str(path[-1]), list(_keys(section))) if section is not None else []
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
        renamed = RENAMED.get(str(path[-1]))
        return f"unknown key; {renamed}" if renamed else f"unknown key{_nearest(path, root, values)}"
    if kind == "missing" and path and isinstance(path[-1], int):
        return "missing: the list is too short"
    if kind == "missing":
        info = _field_at(path, root, values)
        meaning = meaning_of(info).rstrip(".") if info is not None else ""
        return "missing, and there is no default" + (f" ({meaning})" if meaning else "")
    message = details["msg"]
    if kind == "rule":
        return message if found is None else f"found {_show(found)}; {message}"
    if kind in ("truth", "nothing"):
        return _misread(found, source.written.get(path), _field_at(path, root, values))
    if kind == "value_error":
        return message.removeprefix("Value error, ")
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
        number = isinstance(found, int | float) and not isinstance(found, bool)
        expected = f"expected text; write it in quotes: '{found}'" if number else "expected text"
    if kind == "string_pattern_mismatch" and path[-1] == "name":
        expected = "expected letters, digits, `_`, `-` and `.` alone, and no `.` first"
    if kind in {"tuple_type", "list_type"}:
        expected = "expected a list"
    if kind == "literal_error":
        words = [word.strip("'") for word in _WORD.findall(message)]
        near = [_SYNONYMS.get(str(found), "")] if _SYNONYMS.get(str(found)) in words else []
        near = near or likely(str(found), words)
        expected += f"; did you mean {near[0]!r}?" if near else ""
    expected += _hint(kind, path, root, found, values)
    return f"found {_show(found)}; {expected[0].lower()}{expected[1:]}"


def _misread(found: Any, written: str | None, info: FieldInfo | None) -> str:
    """Return what is said of a word that YAML reads as true or false, and of one that it does not read as nothing."""
    expected = expected_by(info.annotation) if info is not None else "something else"
    if not isinstance(found, bool):
        return f"found {_show(found)}, which is a text; YAML's word for nothing is null; write null, or remove the key"
    word = str(found).lower()
    shown = written if written not in (None, word) else None
    text = f"found {shown}, which YAML reads as {word}" if shown else f"found {word}"
    in_quotes = info is not None and any(option in (str, shown) for option in options(info.annotation))
    return f"{text}; expected {expected}" + (f"; for the text write it in quotes: '{shown or word}'" if in_quotes else "")


def expected_by(annotation: Any) -> str:
    """Return in words what a field takes.

    >>> expected_by(int), expected_by(float | None)
    ('a whole number', 'a number')
    """
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    found: list[str] = []
    for option in options(annotation):
        if get_origin(option) in _LISTS:
            found.append("a list")
        elif get_origin(option) in _MAPPINGS or (isinstance(option, type) and issubclass(option, BaseModel)):
            found.append("a section of `key: value` lines")
        elif isinstance(option, str):
            found.append(repr(option))
        elif option is not type(None):
            found.append(names.get(option, "text"))
    return listed(list(dict.fromkeys(found)))


def _hint(kind: str, path: KeyPath, root: type[BaseModel], found: Any, values: Mapping[str, Any]) -> str:
    """Return what to write in place of a value of another kind, beginning with `; `; nothing where that is not known."""
    info = _field_at(path, root, values)
    if isinstance(found, str) and found in NOTHING:
        if kind in {"tuple_type", "list_type"}:
            return "; for none write `[]`"
        optional = info is not None and type(None) in options(info.annotation)
        if optional:
            return "; YAML's word for nothing is null"
        return "" if info is None or info.is_required() else "; for the default remove the key"
    if kind in _NUMBERS:
        return _number_hint(path, found, values)
    if kind in {"tuple_type", "list_type"}:
        if isinstance(found, str | int | float):
            return f"; write `{as_list(str(found))}`"
        first = next(iter(found), "") if isinstance(found, Mapping) else ""
        return f"; write a dash and a blank before the first key of each: `- {str(first).lstrip('-')}: …`" if first else ""
    if kind in {"model_type", "model_attributes_type"}:
        return _section_hint(section_at(path, root, {}), found)
    return ""


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
    keys = _keys(section) if section is not None else {}
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
    siblings = list(_keys(parent)) if parent is not None else []
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


def all_keys(root: type[BaseModel], values: Any = None, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of every key that `root` knows, given the types that `values` has chosen.

    Items of lists and of mappings are those of `values`, or where there are none item 0 and `<name>`.
    """
    for key, info in _keys(root).items():
        here = (*path, key)
        yield here
        value = values.get(key) if isinstance(values, Mapping) else None
        for child, annotation, metadata, item in _children(info, value, here):
            section = _section(annotation, metadata, item)
            if section is not None:
                yield from all_keys(section, item, child)


def _children(info: FieldInfo, value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any, Sequence[Any], Any]]:
    elements: Iterable[tuple[str | int, Any]]
    if (item := _item(info.annotation, _LISTS)) is not None:
        elements = enumerate(value if isinstance(value, list | tuple) and value else (None,))
    elif (item := _item(info.annotation, _MAPPINGS)) is not None:
        elements = (value if isinstance(value, Mapping) and value else {"<name>": None}).items()
    else:
        yield path, info.annotation, info.metadata, value
        return
    annotation, metadata = item
    for part, element in elements:
        yield (*path, part), annotation, metadata, element


def section_at(path: KeyPath, root: type[BaseModel], values: Any) -> type[BaseModel] | None:
    """Return the class of the section at `path`, or None when there is no section."""
    annotation: Any = root
    metadata: Sequence[Any] = ()
    here = values
    for part in path:
        item = _item(annotation, _MAPPINGS if isinstance(part, str) else _LISTS)
        if item is not None or isinstance(part, int):
            annotation, metadata = item or (None, ())
        else:
            section = _section(annotation, metadata, here)
            info = _keys(section).get(part) if section is not None else None
            annotation, metadata = (info.annotation, info.metadata) if info is not None else (None, ())
        here = _get(here, part)
    return _section(annotation, metadata, here)


def key_path(loc: tuple[str | int, ...], root: type[BaseModel], values: Any) -> KeyPath:
    """Return an error's location without the union tags that pydantic puts into it."""
    path: KeyPath = ()
    for part in loc:
        written = isinstance(part, int) or not path or part in _known_or_written(path, root, values)
        # a tag names the chosen member of a union; it is no key of any section
        if written or not _is_tag(path, str(part), root, values):
            path = (*path, part)
    return path


def _known_or_written(path: KeyPath, root: type[BaseModel], values: Any) -> set[str]:
    here = values
    for part in path:
        here = _get(here, part)
    section = section_at(path, root, values)
    return {*(_keys(section) if section is not None else ()), *(here if isinstance(here, Mapping) else ())}


def _is_tag(path: KeyPath, part: str, root: type[BaseModel], values: Any) -> bool:
    info = _field_at(path, root, values)
    members = _members(info.annotation) if info is not None else []
    return len(members) > 1 and any(_type_name(member) == part for member in members)


def _field_at(path: KeyPath, root: type[BaseModel], values: Any) -> FieldInfo | None:
    parent = section_at(path[:-1], root, values)
    return _keys(parent).get(str(path[-1])) if parent is not None and path else None


def _get(value: Any, part: str | int) -> Any:
    if isinstance(part, str):
        return value.get(part) if isinstance(value, Mapping) else None
    return value[part] if isinstance(value, list | tuple) and part < len(value) else None


def _keys(section: type[BaseModel]) -> dict[str, FieldInfo]:
    return {info.alias or name: info for name, info in section.model_fields.items()}


_LISTS, _MAPPINGS = (tuple, list), (dict,)


def _item(annotation: Any, kinds: tuple[type, ...]) -> tuple[Any, Sequence[Any]] | None:
    """Return annotation and metadata of the items of a list or a mapping, None when it is none of `kinds`."""
    for option in options(annotation):
        if get_origin(option) in kinds:
            item = get_args(option)[1 if kinds == _MAPPINGS else 0]
            return (get_args(item)[0], get_args(item)[1:]) if get_origin(item) is Annotated else (item, ())
    return None


def _section(annotation: Any, metadata: Sequence[Any], value: Any) -> type[BaseModel] | None:
    for mark in (*metadata, *_marks(annotation)):
        if (config_of := getattr(mark, "config_of", None)) is not None:  # of a `PluginSetting`
            try:
                section: type[BaseModel] = config_of({} if value is None else value)
                return section
            except (PluginError, ValueError):
                return None  # the missing or unknown name is a problem of its own, reported at its own key
    members = _members(annotation)
    chosen = value.get("type") if isinstance(value, Mapping) else None
    named = [member for member in members if _type_name(member) == chosen]
    return next(iter(named or members), None)


def _marks(annotation: Any) -> Iterator[Any]:
    """Yield what the alternatives of a union are annotated with."""
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    elif get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from _marks(option)


def _members(annotation: Any) -> list[type[BaseModel]]:
    return [option for option in options(annotation) if isinstance(option, type) and issubclass(option, BaseModel)]


def options(annotation: Any) -> list[Any]:
    """Return the alternatives of a union, without annotations."""
    if get_origin(annotation) is Annotated:
        return options(get_args(annotation)[0])
    if get_origin(annotation) is not None and get_origin(annotation) not in (tuple, list, dict):
        return [option for part in get_args(annotation) for option in options(part)]
    return [annotation]


def _type_name(member: type[BaseModel]) -> str | None:
    info = member.model_fields.get("type")
    return info.default if info is not None and isinstance(info.default, str) else None
