"""A row's set-up code and the program behind it, as one text."""

from __future__ import annotations

import ast
import re

#: An import from `__future__`, where one may stand: at the beginning of a line or behind a semicolon.
_FUTURE = re.compile(
    r"(?:^|;)[ \t]*from[ \t]+__future__[ \t]+import\b(?:[ \t]*\([^)]*\)|(?:\\\n|[^\n;#(])*)", re.MULTILINE
)
#: Most imports from which on the end of the head is looked for; hostile text is not parsed again and again.
_TRIES = 8
_LONGEST_HEAD = 1 << 15
_ODD_ESCAPE = re.compile(r"\\(?=[^\n\\'\"abfnrtv0-7xNuU])")


def with_setup(setup: str, program: str) -> str:
    """Return both as one program: imports from `__future__`, which have to come first, then set-up, then the rest."""
    if not setup.strip():
        return program
    if "__future__" not in setup + program:
        return f"{setup.rstrip()}\n\n{program}"
    features, rest = [], []
    for text in (setup, program):
        names, without = _without_future(text)
        features += names
        rest.append(without)
    first = f"from __future__ import {', '.join(dict.fromkeys(features))}\n" if features else ""
    return f"{first}{rest[0].rstrip()}\n\n{rest[1]}"


def _without_future(text: str) -> tuple[list[str], str]:
    """Return the features that a text imports where it may, and the text with `pass` for these imports.

    Imports behind other statements stay: they are errors, as they are without set-up.
    """
    ends = [match.end() for match in _FUTURE.finditer(text)][:_TRIES]
    for end in reversed(ends):
        head = text[:end]
        if len(head) > _LONGEST_HEAD:
            continue
        try:
            # an unknown escape is a warning, which goes nowhere from here
            body = ast.parse(_ODD_ESCAPE.sub("x", head)).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # this one is within a string
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]  # the docstring
        imports = [one for one in body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
        if imports != body[: len(imports)]:
            continue
        return [alias.name for one in imports for alias in one.names], _replaced(text, imports)
    return [], text


def _replaced(text: str, imports: list[ast.ImportFrom]) -> str:
    """Put `pass` in the place of statements; their columns count bytes."""
    lines = text.encode().split(b"\n")
    for one in reversed(imports):
        assert one.end_lineno is not None
        assert one.end_col_offset is not None
        before = lines[one.lineno - 1][: one.col_offset]
        behind = lines[one.end_lineno - 1][one.end_col_offset :]
        lines[one.lineno - 1 : one.end_lineno] = [before + b"pass" + behind, *[b""] * (one.end_lineno - one.lineno)]
    return b"\n".join(lines).decode()


__all__ = ["with_setup"]
