"""The keys that a configuration class knows: where they are, what they hold, given the types that a file has chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from roll_like.config.source import KeyPath
from roll_like.errors import PluginError


def meaning_of(info: FieldInfo) -> str:
    """Return the description of a field; that of its section where it has none of its own."""
    section = info.annotation
    inherited = section.__doc__ if isinstance(section, type) and issubclass(section, BaseModel) else None
    return info.description or inherited or ""


def all_keys(root: type[BaseModel], values: Any = None, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of every key that `root` knows, given the types that `values` has chosen.

    Items of lists and of mappings are those of `values`, or where there are none item 0 and `<name>`.
    """
    for key, info in keys_of(root).items():
        here = (*path, key)
        yield here
        value = values.get(key) if isinstance(values, Mapping) else None
        for child, annotation, metadata, item in _children(info, value, here):
            section = _section(annotation, metadata, item)
            if section is not None:
                yield from all_keys(section, item, child)


def _children(info: FieldInfo, value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any, Sequence[Any], Any]]:
    elements: Iterable[tuple[str | int, Any]]
    if (item := _item(info.annotation, LISTS)) is not None:
        elements = enumerate(value if isinstance(value, list | tuple) and value else (None,))
    elif (item := _item(info.annotation, MAPPINGS)) is not None:
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
        item = _item(annotation, MAPPINGS if isinstance(part, str) else LISTS)
        if item is not None or isinstance(part, int):
            annotation, metadata = item or (None, ())
        else:
            section = _section(annotation, metadata, here)
            info = keys_of(section).get(part) if section is not None else None
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
    return {*(keys_of(section) if section is not None else ()), *(here if isinstance(here, Mapping) else ())}


def _is_tag(path: KeyPath, part: str, root: type[BaseModel], values: Any) -> bool:
    info = field_at(path, root, values)
    members = _members(info.annotation) if info is not None else []
    return len(members) > 1 and any(_type_name(member) == part for member in members)


def field_at(path: KeyPath, root: type[BaseModel], values: Any) -> FieldInfo | None:
    """Return the field at `path`, or None where there is none of that name."""
    parent = section_at(path[:-1], root, values)
    return keys_of(parent).get(str(path[-1])) if parent is not None and path else None


def _get(value: Any, part: str | int) -> Any:
    if isinstance(part, str):
        return value.get(part) if isinstance(value, Mapping) else None
    return value[part] if isinstance(value, list | tuple) and part < len(value) else None


def keys_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by the names that files have for them."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


def is_common(section: type[BaseModel], key: str) -> bool:
    """Return whether most files have a key that is not required: `common` of its class or of a base names it."""
    return any(key in vars(base).get("common", ()) for base in section.__mro__)


def keys_by_use(section: type[BaseModel]) -> list[str]:
    """Return the keys of a section, those first that most files have."""
    fields = keys_of(section)
    return sorted(fields, key=lambda key: not (fields[key].is_required() or is_common(section, key)))


LISTS, MAPPINGS = (tuple, list), (dict,)


def _item(annotation: Any, kinds: tuple[type, ...]) -> tuple[Any, Sequence[Any]] | None:
    """Return annotation and metadata of the items of a list or a mapping, None when it is none of `kinds`."""
    for option in union_members(annotation):
        if get_origin(option) in kinds:
            item = get_args(option)[1 if kinds == MAPPINGS else 0]
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
    return [
        option for option in union_members(annotation) if isinstance(option, type) and issubclass(option, BaseModel)
    ]


def union_members(annotation: Any) -> list[Any]:
    """Return the alternatives of a union, without annotations."""
    if get_origin(annotation) is Annotated:
        return union_members(get_args(annotation)[0])
    if get_origin(annotation) is not None and get_origin(annotation) not in (tuple, list, dict):
        return [option for part in get_args(annotation) for option in union_members(part)]
    return [annotation]


def _type_name(member: type[BaseModel]) -> str | None:
    info = member.model_fields.get("type")
    return info.default if info is not None and isinstance(info.default, str) else None
