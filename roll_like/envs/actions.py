"""Actions in a policy's answer: where they stand, and how they are written."""

from __future__ import annotations

import json
import string
from typing import Literal, TypeAlias

from roll_like.data.reasoning import answer_of

#: `tag`: `<action>left</action>`; `json`: `{"action": "left"}`; `word`: the answer is the action.
Style: TypeAlias = Literal["tag", "json", "word"]
STYLES: tuple[Style, ...] = ("tag", "json", "word")

_DECODER = json.JSONDecoder()
#: Braces that are tried as the start of an object, from the end of the text.
_MAX_BRACES = 64


def write_action(name: str, style: Style) -> str:
    """Return an answer that says `name`.

    >>> write_action("left", "tag"), write_action("left", "json")
    ('<action>left</action>', '{"action": "left"}')
    """
    if style == "tag":
        return f"<action>{name}</action>"
    return json.dumps({"action": name}) if style == "json" else name


def read_action(text: str, style: Style) -> str | None:
    """Return what the last action in `text` says, or None where there is none.

    The last one counts, so that words before it may mention others; one in the reasoning does not.

    >>> read_action("Not <action>up</action>: <action> left </action>", "tag")
    'left'
    >>> read_action("<think><action>up</action></think>", "tag") is None
    True
    """
    text = answer_of(text)
    if style == "tag":
        return read_tag(text, "action")
    return _last_object(text) if style == "json" else text.strip().strip(string.punctuation) or None


def read_tag(text: str, tag: str) -> str | None:
    """Return what stands in the last complete `<tag>…</tag>`, or None where there is none.

    >>> read_tag("<answer>4</answer>", "answer")
    '4'
    """
    lowered = text.lower()
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = lowered.rfind(closing)
    start = lowered.rfind(opening, 0, max(end, 0))
    return None if end < 0 or start < 0 else text[start + len(opening) : end].strip()


def _last_object(text: str) -> str | None:
    at = len(text)
    for _ in range(_MAX_BRACES):
        at = text.rfind("{", 0, at)
        if at < 0:
            return None
        try:
            found, _ = _DECODER.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(found, dict) and isinstance(found.get("action"), str):
            return str(found["action"]).strip()
    return None
