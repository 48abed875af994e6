"""The documentation site has every page of docs/ and every public name; its hooks move links as they say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from loose_modules import load_module

import roll_like

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = DOCS / "site"


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SETTINGS: dict[str, Any] = yaml.load((SITE / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def pages(entry: Any) -> Iterator[str]:
    """Yield the files of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from pages(inner)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(pages(SETTINGS["nav"]))
    assert len(listed) == len(set(listed))
    of_docs = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    of_examples = {str(page.relative_to(ROOT)) for page in (ROOT / "examples").rglob("*.md")}
    assert set(listed) == of_docs | of_examples


def test_nothing_is_loaded_from_elsewhere() -> None:
    theme, plugins = SETTINGS["theme"], [next(iter(p)) if isinstance(p, dict) else p for p in SETTINGS["plugins"]]
    assert theme["font"] is False
    assert {"search", "offline"} <= set(plugins)
    (script,) = SETTINGS["extra"]["polyfills"]
    assert "iframe-worker" in next(
        line for line in (SITE / "mkdocs.yml").read_text(encoding="utf-8").splitlines() if script in line
    )
    assert (DOCS / script).is_file()
    assert all((DOCS / file).is_file() for file in SETTINGS["extra_css"])


def test_every_exported_name_is_in_the_reference_once() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    named = re.findall(r"^::: roll_like\.([\w.]+)$", text, flags=re.M)
    assert sorted(name for name in named if "." not in name) == list(roll_like.__all__)
    assert len({name.rpartition(".")[2] for name in named}) == len(named)


def test_what_builds_it_is_pinned_and_apart_from_the_rest() -> None:
    wanted = [
        re.split(r"[\[=<>]", line)[0]
        for line in (ROOT / "requirements" / "docs.in").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    lock = (ROOT / "requirements" / "docs.txt").read_text(encoding="utf-8")
    assert all(re.search(rf"^{name}==\S+$", lock, flags=re.M) for name in wanted)
    assert "mkdocs" not in (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / "site.sh")], check=True)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hooks, without mkdocs: it is not installed where tests run."""
    monkeypatch.setitem(sys.modules, "mkdocs", ModuleType("mkdocs"))
    monkeypatch.setitem(sys.modules, "mkdocs.structure", ModuleType("mkdocs.structure"))
    files: Any = ModuleType("mkdocs.structure.files")
    files.File = files.Files = object
    monkeypatch.setitem(sys.modules, "mkdocs.structure.files", files)
    return load_module(SITE / "hooks.py")


@pytest.mark.parametrize(
    ("page", "written", "shown"),
    [
        ("rewards.md", "[here](../examples/notebook/README.md)", "[here](examples/notebook/README.md)"),
        ("tutorials/rlvr.md", "[rewards.md](../rewards.md#domains)", "[Rewards](../rewards.md#domains)"),
        ("examples/notebook/README.md", "[a](../../docs/rewards.md)", "[a](../../rewards.md)"),
        ("clusters.md", "[a](../configs/rlvr_1gpu.yaml)", "[a](configs/rlvr_1gpu.yaml)"),
        ("clusters.md", "[a](#slurm), [b](https://a.org/b.md)", "[a](#slurm), [b](https://a.org/b.md)"),
        ("clusters.md", "```\n[a](../b.md)\n```", "```\n[a](../b.md)\n```"),
    ],
)
def test_links_follow_what_they_lead_to(hooks: ModuleType, page: str, written: str, shown: str) -> None:
    at = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert hooks.on_page_markdown(written, page=at, config=None, files=None) == shown


def test_the_files_outside_docs_are_found(hooks: ModuleType) -> None:
    seen: set[str] = set()
    hooks.outside("docs/rewards.md", seen)
    assert seen == {"examples/custom_reward/README.md", "examples/notebook/README.md"}
