"""Changelog, citation file and project name the same version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_changelog_and_citation_are_of_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", changelog, flags=re.M)
    assert headings[0] == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", heading) for heading in headings[1:]]
    assert all(released), "a version has a number and a date"
    version, date = released[0].groups() if released[0] else ("", "")
    assert version == PROJECT["version"]
    kinds = set(re.findall(r"^### (.+)$", changelog, flags=re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}  # of keepachangelog.com
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    # of schema 1.2.0 of the Citation File Format: what is required, and what else is used here
    optional = {"type", "abstract", "version", "date-released", "license", "keywords"}
    assert citation.keys() == {"cff-version", "message", "title", "authors"} | optional
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert all(author.keys() <= {"name", "given-names", "family-names", "orcid"} for author in citation["authors"])
    assert citation["version"] == version
    assert citation["date-released"] == date  # a text: the schema has no dates of YAML
    assert citation["license"] == PROJECT["license"]
