"""Calls whose arguments are tags within tags, as MiniMax M3 writes them: each tag begins with a token of its own.

]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="order">
]<]minimax[>[<items>]<]minimax[>[<item>]<]minimax[>[<sku>b-1]<]minimax[>[</sku>]<]minimax[>[</item>]<]minimax[>[</items>
]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>

A tag is a field of an object. The elements of a list are tags called `item`.
"""

from __future__ import annotations

import re

from roll_like.tools.base import AnyCall
from roll_like.tools.calls.functions import Element, Functions
from roll_like.tools.calls.literals import Unread, skip_space

#: What stands before each tag, as a pattern.
BEFORE_TAG = r"\]<\]minimax\[>\["
_TAG = re.compile(rf"{BEFORE_TAG}<(?P<closes>/?)(?P<name>[^<>]{{1,200}})>")
INVOKE = re.compile(rf"""\s*{BEFORE_TAG}<invoke\s+name\s*=\s*["']?(?P<name>[^"'>\n]{{0,200}})["']?\s*>""")
_DEEPEST = 100


def read_elements(text: str, at: int, functions: Functions) -> tuple[list[AnyCall], int]:
    """Read calls, one or more."""
    calls: list[AnyCall] = []
    while (head := INVOKE.match(text, at)) is not None:
        arguments, at = _element(text, head.end(), "invoke", 0)
        if isinstance(arguments, str):
            if arguments.strip():
                raise Unread("its arguments are text; expected a tag for each of them")
            arguments = []
        start = skip_space(text, head.start())
        calls.append(functions.from_elements(head["name"].strip(), arguments, text[start:at]))
    if not calls:
        raise Unread("expected <invoke name=…>")
    return calls, at


def _element(text: str, at: int, name: str, depth: int) -> tuple[Element, int]:
    """Return what is between an opening tag, which ends at `at`, and its closing one; and the place after that."""
    if depth > _DEEPEST:
        raise Unread("it is nested too deeply")
    written, inner = "", list[tuple[str, Element]]()
    while (tag := _TAG.search(text, at)) is not None:
        written, at = written + text[at : tag.start()], tag.end()
        if not tag["closes"]:
            value, at = _element(text, at, tag["name"].strip(), depth + 1)
            inner.append((tag["name"].strip(), value))
        elif tag["name"].strip() != name:
            raise Unread(f"expected </{name}>, found </{tag['name']}>")
        elif inner and written.strip():
            raise Unread(f"text beside the tags within <{name}>")
        else:
            return inner or written, at
    raise Unread(f"<{name}> has no closing tag")
