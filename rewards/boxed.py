r"""`\boxed{…}`: where many models put a final answer."""

from __future__ import annotations

_COMMANDS = ("\\boxed", "\\fbox")


def last_boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{…}` holds, with nested braces balanced; None without a complete one.

    >>> last_boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    end = len(text)
    while end > 0:
        start, command = max((text.rfind(command, 0, end), command) for command in _COMMANDS)
        if start < 0:
            return None
        held = _braces(text, start + len(command))
        if held is not None:
            return held
        end = start
    return None


def _braces(text: str, at: int) -> str | None:
    """Return what the braces that open at `at` (blanks skipped) hold; None if none open there or none close."""
    while at < len(text) and text[at].isspace():
        at += 1
    if text[at : at + 1] != "{":
        return None
    depth = 0
    for position in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[at + 1 : position]
    return None
