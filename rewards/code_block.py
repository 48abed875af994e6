"""The program in a response: its last fenced block, with the language that its tag names.

Read as models write them, not as Markdown's standard has it: fences stand in lists and quotations, at any depth, behind
text and behind the last line of code; tags carry versions, file names and attributes.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

#: What stands before a fence at the beginning of a line, the fence, and what follows it.
_OPENING = re.compile(r"^([ \t>]*)(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?(`{3,}|~{3,})[ \t]*([^`]*)$")
_OPENING_BEHIND_TEXT = re.compile(r"^([ \t>]*)[^`]*[^`\s][ \t]*(`{3,})[ \t]*([^\s`]*)[ \t]*$")
_BYTE_ORDER_MARK = "\ufeff"
_FENCE = re.compile(r"`{3}|~{3}")
_QUOTE = re.compile(r"^[ \t]*>[ ]?")
_DEEPEST_QUOTE = 16
_WORD_ENDS = re.compile(r"[\s,:;=(){}\[\]\"']+")
#: How lines of comments begin: a fence at the end of one belongs to it.
_COMMENTS = ("#", "//", "*", "/*")
_LANGUAGES = {
    "python": re.compile(r"(?:[ic]?python|pypy|py)[-_]?[\dx]*(?:\.[\dx]+)*|\S+\.py"),
    "cpp": re.compile(r"(?:c|g|gnu)\+\+[\dxyz]*|cpp[\dxyz]*|cc|cxx|\S+\.(?:cpp|cc|cxx)"),
    "javascript": re.compile(r"javascript|[cm]?js|es\d+|node(?:\.?js)?|\S+\.[cm]?js"),
}
#: Python's comments and strings, as far as it takes to see where a string of several lines begins.
_LONG_QUOTES = ('"""', "'''")
_PYTHON = re.compile(r"#.*|\"{3}|'{3}|\"(?:\\.|[^\"\\])*\"?|'(?:\\.|[^'\\])*'?")


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced block; `language` is None without a tag, and the tag itself where it names no language known here."""

    source: str
    language: str | None


def code_blocks(text: str) -> list[CodeBlock]:
    """Return the fenced blocks (Markdown's ``` or ~~~) that are closed, in order.

    Fences within a Python string of several lines, as in a docstring, do not end a block. The beginning of another
    block does; the end of the text does not: it may have been cut off.
    """
    lines = re.sub(r"\r\n?", "\n", text.removeprefix(_BYTE_ORDER_MARK)).split("\n")
    found: list[CodeBlock] = []
    number = 0
    while number < len(lines):
        opening = _opening(lines[number])
        number += 1
        if opening is None:
            continue
        prefix, fence, tag = opening[1], opening[2], _tag(opening[3])
        end, rest = _end(lines, number, prefix, fence, _language(tag))
        if end == len(lines):
            continue  # not closed: what follows is looked at by itself
        block = [_unquoted(line, prefix) for line in lines[number:end]] + ([rest] if rest else [])
        source = "".join(f"{line}\n" for line in _dedented(block, prefix)).removeprefix(_BYTE_ORDER_MARK)
        found.append(CodeBlock(source, _language(tag)))
        number = end if _begins_another(lines[end]) else end + 1
    return found


def last_program(text: str, language: str, wanted: Collection[str] = (), *, longest: bool = False) -> CodeBlock | None:
    """Return the last block whose tag names a programming language known here, or else the last without a tag.

    Blocks of output or of shell commands often follow a program; their tags tell them apart.

    Args:
        language: What a block without a tag is taken for.
        wanted: Languages whose blocks come before those of others: a translation may follow a program.
        longest: Return the block with the most lines instead, the last of several: an example of use may follow.
    """
    blocks = code_blocks(text)
    tagged = [block for block in blocks if block.language in _LANGUAGES]
    plain = [CodeBlock(block.source, language) for block in blocks if block.language is None]
    found = [block for block in tagged if block.language in wanted] or tagged or plain
    if longest and found:
        return max(reversed(found), key=lambda block: len(block.source.split("\n")))
    return found[-1] if found else None


def _opening(line: str) -> re.Match[str] | None:
    if not _FENCE.search(line):
        return None
    return _OPENING.match(line) or _OPENING_BEHIND_TEXT.match(line)


def _begins_another(line: str) -> bool:
    """Say whether a line that ends a block begins the next one: it has a tag, not a sentence, behind its fence."""
    opening = _OPENING.match(line)
    return opening is not None and (_language(_tag(opening[3])) in _LANGUAGES or len(opening[3].split()) == 1)


def _tag(information: str) -> str:
    """Return the first word behind a fence: `python title="x"`, `{.python .numberLines}`, `python:main.py`."""
    words = [word for word in _WORD_ENDS.split(information) if word]
    return words[0].lstrip(".").lower() if words else ""


def _language(tag: str) -> str | None:
    if not tag:
        return None
    return next((language for language, names in _LANGUAGES.items() if names.fullmatch(tag)), tag)


def _end(lines: list[str], start: int, prefix: str, fence: str, language: str | None) -> tuple[int, str]:
    """Return the number of the line that ends a block, and the code before the fence on it; all lines: none does."""
    at_start = re.compile(rf"[ \t]*{re.escape(fence[0])}{{{len(fence)},}}")
    behind_code = re.compile(rf"(.*[^`])`{{{len(fence)},}}[ \t]*") if fence[0] == "`" else None
    python = language in {"python", None}
    quote, until = "", start
    for number in range(start, len(lines)):
        line = _unquoted(lines[number], prefix)
        if not quote and at_start.match(line):
            return number, ""
        if not quote or number >= until:
            match = behind_code.fullmatch(line) if behind_code else None
            if match and match[1].strip() and not line.lstrip().startswith(_COMMENTS):
                opened = _open_string(match[1], quote) if python else ""
                if not opened or _string_end(lines, number + 1, opened, fence) == len(lines):
                    return number, match[1].rstrip()
        if python:
            before, quote = quote, _open_string(line, quote)
            if quote and (not before or number >= until):
                until = _string_end(lines, number + 1, quote, fence)
                quote = quote if until < len(lines) else ""
    return len(lines), ""


def _open_string(line: str, quote: str) -> str:
    """Return the quotes of the string of several lines that is open at a line's end, if one is."""
    at = 0
    while True:
        if quote:
            end = line.find(quote, at)
            if end < 0:
                return quote
            at = end + len(quote)
        quote = ""
        while not quote:
            match = _PYTHON.search(line, at)
            if match is None:
                return ""
            at = match.end()
            quote = match[0] if match[0] in _LONG_QUOTES else ""


def _string_end(lines: list[str], start: int, quote: str, fence: str) -> int:
    """Return the number of the line that ends a string; all lines where its fences say that none does.

    Fences in it come in pairs. A program that lacks the end of a string is followed by the end of its block.
    """
    inside = False
    for number in range(start, len(lines)):
        if quote in lines[number]:
            return len(lines) if inside else number
        opening = _OPENING.match(lines[number]) if fence in lines[number] else None
        if opening is not None:
            if inside and opening[3].strip():
                return len(lines)
            inside = not inside
    return len(lines)


def _unquoted(line: str, prefix: str) -> str:
    for _ in range(min(prefix.count(">"), _DEEPEST_QUOTE)):
        line = _QUOTE.sub("", line, count=1)
    return line


def _dedented(block: list[str], prefix: str) -> list[str]:
    """Remove what all lines are indented by, or else as much as the fence is, as Markdown does."""
    filled = [line for line in block if line.strip()]
    indentations = [_indentation(line) for line in filled]
    least = min(indentations, key=len, default="")
    margin = least if all(one.startswith(least) for one in indentations) else ""
    if margin:
        return [line.removeprefix(margin) for line in block]
    width = len(_indentation(prefix.rpartition(">")[2]))
    if not filled or len(_indentation(filled[0])) < width:
        return block
    return [line[min(width, len(_indentation(line))) :] for line in block]


def _indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]
