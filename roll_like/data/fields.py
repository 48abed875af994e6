r"""Fields of rows as sources name them: nested ones by dotted paths, transcripts as messages, answers within texts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from roll_like.config.data import DataSource, SourceConfig
from roll_like.data.boxed import last_boxed
from roll_like.errors import DataError

#: Keys of sources whose fields hold conversations.
_CONVERSATIONS = ("prompt_field", "messages_field", "completion_field", "chosen_field", "rejected_field")
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def named_field(fields: Mapping[str, Any], name: str) -> Any:
    """Return a field by its name or, where none is called so, by its path.

    Raises:
        LookupError: There is none.
    """
    return fields[name] if name in fields or "." not in name else value_at(fields, name)


def as_number(value: Any) -> float | None:
    """Return the finite number that a field holds, in a text too, as CSV has it; None if it holds none.

    >>> as_number("0.25"), as_number(3), as_number(True), as_number("nan")
    (0.25, 3.0, None, None)
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def as_named(fields: dict[str, Any], source: SourceConfig) -> dict[str, Any]:
    """Return a row's fields with those that the source names by a path, and with its transcripts as messages."""
    names = source.fields
    found = dict(fields)
    for name in names.values():
        if "." in name and name not in fields:
            try:
                found[name] = named_field(fields, name)
            except LookupError:
                continue  # whoever needs the field says that it is missing
    if source.transcripts:
        for key in _CONVERSATIONS:
            text = found.get(names.get(key, ""))
            if isinstance(text, str) and _SPEAKER.match(text):
                found[names[key]] = read_transcript(text, begun=key == "prompt_field")
    return found


def value_at(fields: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path: names of fields, and numbers of items from 0.

    >>> value_at({"reward_model": {"ground_truth": ["34"]}}, "reward_model.ground_truth.0")
    '34'

    Raises:
        LookupError: There is none.
    """
    value: Any = fields
    for part in path.split("."):
        if isinstance(value, list | tuple) and part.isdecimal():
            value = value[int(part)]
        elif isinstance(value, Mapping):
            value = value[part]
        else:
            raise KeyError(part)
    return value


def read_transcript(text: str, *, begun: bool = False) -> list[dict[str, str]]:
    r"""Return the messages of a transcript, without the blanks around them.

    Args:
        text: Begins with `Human:` or `Assistant:`; each further one is at the beginning of a paragraph.
        begun: Whether an empty last message of the assistant's only says whose turn it is.

    >>> read_transcript("\n\nHuman: Hi\n\nAssistant: Hello: you")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello: you'}]
    """
    _, *parts = _SPEAKER.split(text)
    messages = [
        {"role": _ROLES[name], "content": said.strip()} for name, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    if begun and len(messages) > 1 and messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()
    return messages


def final_answer(text: str, source: DataSource, origin: str, key: str) -> str:
    """Return the part of a reference answer that the source asks for.

    Raises:
        DataError: It is not there.
    """
    if source.answer_after is not None:
        before, mark, answer = text.rpartition(source.answer_after)
        if mark and answer.strip():
            return answer.strip()
        raise DataError(
            f"{origin}: expected an answer after {source.answer_after!r} in {source.answer_field!r}, found "
            f"{_end_of(before or text)}",
            fix=f"correct the row, or {key}.answer_after",
        )
    if source.answer_boxed:
        answer_in_box = (last_boxed(text, bare=True) or "").strip()
        if answer_in_box:
            return answer_in_box
        raise DataError(
            f"{origin}: expected \\boxed{{…}} in {source.answer_field!r}, found {_end_of(text)}",
            fix=f"correct the row, or set {key}.answer_boxed: false",
        )
    return text


def _end_of(text: str) -> str:
    return repr(text if len(text) <= 60 else "…" + text[-59:])
