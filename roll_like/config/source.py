"""YAML files to one plain mapping: `extends:`, command-line overrides, `${…}` interpolation.

Remembers where each key was written, for messages.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from roll_like.config.yaml_mistakes import (
    control_character,
    duplicate_key,
    no_space,
    not_text,
    not_yaml,
    read_otherwise,
)
from roll_like.errors import ConfigError

KeyPath: TypeAlias = tuple[str | int, ...]

_OVERRIDE = re.compile(r"(?P<key>[^\s=]+)=(?P<value>.*)", re.DOTALL)
#: How the place of a key that an override has written begins.
COMMAND_LINE = "command line: "
#: The same as YAML, or with blanks.
_NEARLY_OVERRIDE = re.compile(r"\s*([\w.\[\]-]+)\s*[:=]\s*(\S.*)")
#: An item of a list as Python writes it: `sources[0]` is `sources.0`.
_INDEX = re.compile(r"\[(\d+)\]")


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as overrides write it: `data.sources.0.path`."""
    return ".".join(map(str, path))


@dataclass(slots=True)
class Source:
    """A configuration as written, before validation.

    Attributes:
        values: The merged mapping.
        places: Where each key was written: `file:line`, or the override.
        label: The file that was loaded.
        written: How values without quotes were written: `yes`, `off`, `1.10`.
        layers: The values before each file that extends others, and before overrides: what `${…}` in them referred to.
    """

    values: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)
    label: str = "the configuration"
    written: dict[KeyPath, str] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)

    def keep_layer(self) -> None:
        """Keep the values as they are, before others are put over them."""
        self.layers.append(copy.deepcopy(self.values))

    def forget(self, path: KeyPath) -> None:
        """Drop what is known of `path` and of all below it."""
        for known in (self.places, self.written):
            for gone in [key for key in known if key[: len(path)] == path]:
                del known[gone]

    def place_of(self, path: KeyPath) -> str:
        """Return where `path`, or the innermost section around it, was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.label


def read_source(path: Path, overrides: Sequence[str] = ()) -> Source:
    """Return `path` with what it extends, overridden and interpolated.

    A section is merged key by key, a list is replaced as a whole, and a section that names another `type`
    replaces the section of the former type, whose settings would mean nothing to it.

    Raises:
        ConfigError: A file is missing or is not valid YAML mapping, files extend each other in a circle, an override
            cannot be applied, or an interpolation leads nowhere.
    """
    source = _read_file(path, ())
    source.keep_layer()
    # a change of type drops the settings of the former type, so it comes before new settings
    for override in sorted(overrides, key=lambda text: not text.partition("=")[0].endswith(".type")):
        _override(source, override, overrides)
    source.values = _interpolate(source)
    return source


def overridden(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return settings that are no whole file's, with overrides (`key=value`) written over them.

    Raises:
        ConfigError: An override cannot be applied.
    """
    source = Source(values)
    for override in overrides:
        _override(source, override, overrides)
    return source.values


def _read_file(path: Path, extended_by: tuple[Path, ...]) -> Source:
    resolved = path.resolve()
    if resolved in extended_by:
        circle = " → ".join(str(file) for file in (*extended_by[extended_by.index(resolved) :], resolved))
        raise ConfigError(f"configurations extend each other in a circle: {circle}", fix="remove one `extends:`")
    source = _parse(path, extended_by[-1] if extended_by else None)
    parents = source.values.pop("extends", ())
    if isinstance(parents, str):
        parents = (parents,)
    if not isinstance(parents, list | tuple) or not all(_is_file_name(parent) for parent in parents):
        raise ConfigError(
            f"{source.places[('extends',)]}: expected a file name or a list of them, found {parents!r}",
            fix="write `extends: other.yaml`",
        )
    merged = Source({}, label=str(path))
    for parent in parents:
        _merge(merged, _read_file(path.parent / parent, (*extended_by, resolved)))
    _merge(merged, source)
    return merged


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _parse(path: Path, extended_by: Path | None) -> Source:
    where = f", which {extended_by} extends," if extended_by else ""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the configuration {path.absolute()}{where} cannot be read: {error.strerror}",
            fix="check the path; `extends:` is relative to the file that says it, --config to the working directory",
        ) from error
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if (twice := duplicate_key(node, path)) is not None:
            raise twice
        values = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else {}
    except UnicodeDecodeError as error:
        raise not_text(path, data, error) from error
    except RecursionError:
        raise ConfigError(
            f"{path}: values are nested too deeply to be read", fix="nest sections and lists less"
        ) from None
    except yaml.MarkedYAMLError as error:
        raise not_yaml(path, text, error) from error
    except yaml.reader.ReaderError as error:
        raise control_character(path, text, error) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}", fix="correct the file") from error
    except OmegaConfBaseException as error:
        raise _unresolved(error, str(path)) from error
    return _located(path, values, node)


def _located(path: Path, values: Any, node: yaml.Node | None) -> Source:
    """Return what a file holds, with where each key is; refuse what is no mapping of names."""
    if not isinstance(values, dict) or (node is not None and not isinstance(node, yaml.MappingNode)):
        found = "a list" if isinstance(values, list) else "a single value"
        raise ConfigError(f"{path}: expected a mapping of sections, found {found}", fix=_write_keys())
    places: dict[KeyPath, str] = {}
    written: dict[KeyPath, str] = {}
    if node is not None:
        _refuse_no_break_spaces(node, path)
        _locate(node, (), str(path), places, written)
    for key in values:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: expected names as keys, found {key!r}", fix=_write_keys())
    return Source({str(key): value for key, value in values.items()}, places, str(path), written)


def _refuse_no_break_spaces(node: yaml.Node, path: Path) -> None:
    """Refuse names and values without quotes that a no-break space became a part of."""
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.value != node.value.strip("\u00a0"):
            raise no_space(path, node.start_mark.line + 1)
        return
    for child in node.value:
        for part in child if isinstance(child, tuple) else (child,):
            _refuse_no_break_spaces(part, path)


def _write_keys() -> str:
    return "write `key: value` lines, such as `pipeline: rlvr`"


def _locate(node: yaml.Node, path: KeyPath, file: str, places: dict[KeyPath, str], written: dict[KeyPath, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            child = (*path, key.value)
            places[child] = f"{file}:{key.start_mark.line + 1}"
            _locate(value, child, file, places, written)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            places[*path, index] = f"{file}:{value.start_mark.line + 1}"
            _locate(value, (*path, index), file, places, written)
    elif isinstance(node, yaml.ScalarNode):
        if (other := read_otherwise(node)) is not None:
            raise ConfigError(
                f"{file}:{node.start_mark.line + 1}: {dotted(path)}: YAML reads {node.value} as {other}",
                fix=f"write {other} if you mean that, or put it in quotes if it is text: '{node.value}'",
            )
        if node.style is None and "${" not in node.value:
            written[path] = node.value


def _merge(base: Source, child: Source) -> None:
    """Put `child` over `base`, in place."""
    base.keep_layer()
    base.layers += child.layers
    replaced = _merge_values(base.values, child.values, ())
    for gone in replaced:
        base.forget(gone)
    base.places.update(child.places)
    base.written.update(child.written)


def _merge_values(base: dict[str, Any], child: Mapping[str, Any], path: KeyPath) -> list[KeyPath]:
    replaced: list[KeyPath] = []
    for key, value in child.items():
        former = base.get(key)
        if isinstance(former, dict) and isinstance(value, dict) and _same_type(former, value):
            replaced += _merge_values(former, value, (*path, key))
        else:
            base[key] = value
            replaced.append((*path, key))
    return replaced


def _same_type(former: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    return "type" not in value or former.get("type", value["type"]) == value["type"]


def _meant(override: str, beside: Sequence[str]) -> str:
    """Return how an override is written that has blanks around its `=`, or a colon in place of it.

    >>> _meant("steps: 5", ["steps: 5"]), _meant("=", ["seed=1", "steps", "=", "5"]), _meant("5", ["steps=", "5"])
    ('steps=5', 'steps=5', 'steps=5')
    """
    if nearly := _NEARLY_OVERRIDE.fullmatch(override):
        return f"{nearly[1]}={nearly[2]}"
    joined = re.sub(r"\s*=\s*", "=", " ".join(beside)).split()
    found = [text for text in joined if override.strip("=") in text.split("=") and _OVERRIDE.fullmatch(text)]
    found += [text for text in joined if override.strip() == "=" and _OVERRIDE.fullmatch(text) and text not in beside]
    return next((text for text in found if not text.endswith("=")), "for example steps=10")


def _override(source: Source, override: str, beside: Sequence[str]) -> None:
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        raise ConfigError(
            f"cannot read the override {override!r}; expected key=value, without blanks around `=`",
            fix=f"write {_meant(override, beside)}",
        )
    key = _INDEX.sub(r".\1", match["key"])
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    raw = yaml.ScalarNode("", match["value"].strip())
    if (other := read_otherwise(raw)) is not None:
        raise ConfigError(
            f"the override {override!r}: {key}: YAML reads {raw.value} as {other}",
            fix=f"write {key}={other} if you mean that",
        )
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={match['value']}"]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problem = (error.problem if isinstance(error, yaml.MarkedYAMLError) else None) or str(error).splitlines()[0]
        raise ConfigError(
            f"the value of the override {override!r} is not valid YAML: {problem}",
            fix="quote it, for example key='\"a: b\"'",
        ) from error
    assert isinstance(value, dict)
    node = yaml.compose(match["value"], Loader=yaml.SafeLoader)
    end = node.end_mark.index if node else 0
    written, rest = match["value"][:end].strip(), match["value"][end:].strip()
    if rest.startswith("#"):
        raise ConfigError(
            f"the override {override!r}: {key}: YAML reads {rest} as a comment, which leaves {written or 'nothing'}",
            fix=f"leave the comment out; for text put all of it in quotes: {key}='\"{match['value'].strip()}\"'",
        )
    section = _section_for(source, path, override)
    _assign(source, section, path, value["value"])
    source.forget(path)
    if isinstance(value["value"], int | float):
        source.written[path] = written
    elif isinstance(node, yaml.CollectionNode):
        _locate(node, path, f"the override {override!r}", {}, source.written)
    source.places[path] = f"{COMMAND_LINE}{override}"


def _section_for(source: Source, path: KeyPath, override: str) -> Any:
    """Return the mapping or list that holds the last part of `path`, made where it is missing."""
    here: Any = source.values
    for depth, part in enumerate(path[:-1]):
        if isinstance(here, dict):
            if here.get(str(part)) is None:
                here[str(part)] = {}
                source.places[path[: depth + 1]] = f"{COMMAND_LINE}{override}"
            here = here[str(part)]
        else:
            here = here[_index(here, path[: depth + 1], override)]
        if not isinstance(here, dict | list):
            raise ConfigError(
                f"the override {override!r} reaches into {dotted(path[: depth + 1])}, which is {here!r} and no section",
                fix=f"set the whole of it: {dotted(path[: depth + 1])}={{{dotted(path[depth + 1 :])}: …}}",
            )
    if isinstance(here, list):
        _index(here, path, override)
    return here


def _index(items: list[Any], path: KeyPath, override: str) -> int:
    part = path[-1]
    if isinstance(part, int) and part < len(items):
        return part
    held = f"a list of {len(items)}, numbered from 0" if items else "an empty list"
    raise ConfigError(
        f"the override {override!r} names {dotted(path)}, but {dotted(path[:-1])} is {held}",
        fix=f"use one of its numbers, or set the whole list: {dotted(path[:-1])}=[…]",
    )


def _assign(source: Source, section: Any, path: KeyPath, value: Any) -> None:
    if isinstance(section, dict) and path[-1] == "type" and section.get("type", value) != value:
        section.clear()
        for gone in [key for key in source.places if len(key) >= len(path) and key[: len(path) - 1] == path[:-1]]:
            del source.places[gone]
    _assign_value(section, path[-1], value)


def _interpolate(source: Source) -> dict[str, Any]:
    while True:
        try:
            values = OmegaConf.to_container(OmegaConf.create(source.values), resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            parts = re.findall(r"[^.\[\]]+", str(error.full_key))
            path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in parts)
            if isinstance(error, InterpolationResolutionError) and _as_it_was(source, path):
                continue  # each time one reference less
            raise _unresolved(error, source.place_of(path)) from error
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}


def _as_it_was(source: Source, path: KeyPath) -> bool:
    """Put a value in place of a reference into what a file or an override has replaced; return whether there was one.

    A section that is still there, and no longer has a key of that name, has its default; so has what refers to it by
    the same name. Else it is what the reference meant where it was written.
    """
    written = _at(source.values, path)
    reference = _REFERENCE.fullmatch(written) if isinstance(written, str) else None
    for layer in reversed(source.layers):
        if written is None or _at(layer, path) != written:
            continue
        try:
            value = OmegaConf.select(OmegaConf.create(layer), _selected(path), throw_on_resolution_failure=True)
        except OmegaConfBaseException:
            continue
        section = _at(source.values, path[:-1])
        if reference is not None and isinstance(section, dict):
            target = tuple(int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", reference[1]))
            if target[-1] == path[-1] and isinstance(_at(source.values, target[:-1]), dict):
                del section[path[-1]]
                return True
        assert isinstance(section, dict | list)
        plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        _assign_value(section, path[-1], _escaped(plain))
        return True
    return False


#: A value that is one reference.
_REFERENCE = re.compile(r"\$\{([\w.\[\]-]+)\}")


def _at(values: Any, path: KeyPath) -> Any:
    for part in path:
        if isinstance(values, dict):
            values = values.get(str(part))
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            return None
    return values


def _selected(path: KeyPath) -> str:
    return "".join(f"[{part}]" for part in path)


def _assign_value(section: Any, part: str | int, value: Any) -> None:
    if isinstance(section, list):
        assert isinstance(part, int)
        section[part] = value
    else:
        section[str(part)] = value


def _escaped(value: Any) -> Any:
    """Return a value that has been resolved so that it stays as it is."""
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _unresolved(error: OmegaConfBaseException, place: str) -> ConfigError:
    reason = str(error.msg or error).splitlines()[0]
    return ConfigError(
        f"{error.full_key or 'a value'} cannot be resolved: {reason} [{place}]",
        fix="${a.b} means the value of key a.b, ${oc.env:NAME} an environment variable; write \\${ for a plain ${",
    )
