"""Hooks of mkdocs: what pages link to outside docs/ becomes part of the site, and links follow it.

A page of docs/ keeps its place, `docs/rewards.md` is `rewards.html`; other files of the repository keep theirs,
`examples/notebook/README.md` is `examples/notebook/index.html`. In the repository links are relative paths of files.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"\[(?:[\w./]+\.md)\](?=\(([^)#\s]+))")
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
FENCE = re.compile(r"^(```.*?^```)$", flags=re.M | re.S)


def in_site(path: str) -> str:
    """Return where a file of the repository is in the site's sources.

    >>> in_site("docs/rewards.md"), in_site("examples/README.md")
    ('rewards.md', 'examples/README.md')
    """
    return path.removeprefix("docs/")


def in_repository(uri: str) -> str:
    """Return the path of a source of the site in the repository: `in_site` backwards."""
    return uri if uri.startswith(("examples/", "configs/", "roll_like/")) else f"docs/{uri}"


def linked(page: str, target: str) -> str:
    """Return the file of the repository that a page's link leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def title(path: str) -> str:
    """Return the first heading of a page of the repository."""
    found = re.search(r"^# (.+)$", (ROOT / path).read_text(encoding="utf-8"), flags=re.M)
    return found[1] if found else path


def outside(page: str, seen: set[str]) -> None:
    """Add what a page links to outside docs/, and what is linked from there."""
    for target in LINK.findall(FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))):
        found = linked(page, target)
        if not found.startswith("docs/") and found not in seen and (ROOT / found).is_file():
            seen.add(found)
            if found.endswith(".md"):
                outside(found, seen)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files outside docs/ that its pages link to."""
    found: set[str] = {"examples/README.md"}
    outside("examples/README.md", found)
    for file in list(files.documentation_pages()):
        outside(in_repository(file.src_uri), found)
    for path in sorted(found):
        files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between sources of the site, named after their titles."""
    here = page.file.src_uri
    source = in_repository(here)

    def moved(match: re.Match[str]) -> str:
        return posixpath.relpath(in_site(linked(source, match[1])), posixpath.dirname(here) or ".")

    def named(match: re.Match[str]) -> str:
        return f"[{title(linked(source, match[1]))}]"

    # blocks of code are the odd parts
    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(moved, NAMED.sub(named, part)) for part in parts[::2]]
    return "".join(parts)
