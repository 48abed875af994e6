"""The program in a response: its last fenced block, with the language that its tag names."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPENING = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`{]*)[^`]*$")
_LANGUAGES = {
    "python": ("python", "py", "python3", "py3"),
    "cpp": ("cpp", "c++", "cc", "cxx", "c++17", "c++20"),
    "javascript": ("javascript", "js", "node", "nodejs", "mjs"),
}
_BY_TAG = {tag: language for language, tags in _LANGUAGES.items() for tag in tags}


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced block; `language` is None without a tag, and the tag itself where it names no language known here."""

    source: str
    language: str | None


def code_blocks(text: str) -> list[CodeBlock]:
    """Return the fenced blocks (Markdown's ``` or ~~~) that are closed, in order."""
    found: list[CodeBlock] = []
    fence, tag, lines = "", "", list[str]()
    for line in text.splitlines():
        if fence:
            closing = line.strip()
            if len(closing) >= len(fence) and set(closing) == {fence[0]}:
                found.append(CodeBlock("\n".join(lines) + "\n", _BY_TAG.get(tag.lower(), tag) if tag else None))
                fence = ""
            else:
                lines.append(line)
        elif match := _OPENING.match(line):
            fence, tag, lines = match[1], match[2], []
    return found


def last_program(text: str, language: str) -> CodeBlock | None:
    """Return the last block whose tag names a programming language known here, or else the last without a tag.

    Blocks of output or of shell commands often follow a program; their tags tell them apart.

    Args:
        text: The response.
        language: What a block without a tag is taken for.
    """
    blocks = code_blocks(text)
    tagged = [block for block in blocks if block.language in _LANGUAGES]
    plain = [CodeBlock(block.source, language) for block in blocks if block.language is None]
    found = tagged or plain
    return found[-1] if found else None
