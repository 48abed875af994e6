r"""`\boxed{…}`: where many models put a final answer."""

from __future__ import annotations

import re

_COMMANDS = ("\\boxed", "\\fbox")


def last_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{…}` holds, with nested braces balanced; None without a complete one.

    >>> last_boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    closing = closing_braces(text)
    end = len(text)
    while end > 0:
        start, command = max((text.rfind(command, 0, end), command) for command in _COMMANDS)
        if start < 0:
            return None
        at = start + len(command)
        while at < len(text) and text[at].isspace():
            at += 1
        if at in closing:
            return text[at + 1 : closing[at]]
        end = start
    return None


def all_boxed(text: str) -> list[tuple[int, int, str]]:
    r"""Return where each complete `\boxed{…}` that is in no other one begins and ends, and what it holds."""
    closing = closing_braces(text)
    found: list[tuple[int, int, str]] = []
    for match in re.finditer(r"\\(?:boxed|fbox)\s*(?=\{)", text):
        if match.end() in closing and (not found or match.start() >= found[-1][1]):
            end = closing[match.end()]
            found.append((match.start(), end + 1, text[match.end() + 1 : end]))
    return found


def closing_braces(text: str) -> dict[int, int]:
    """Return where each brace that is closed closes; one pass, however many are open."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for match in re.finditer(r"[{}]", text):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            found[opened.pop()] = match.start()
    return found
