"""`${…}` in a file whose target another file, or an override, has replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_like.config.load import load_config
from roll_like.config.source import read_source
from roll_like.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
BASE = """
data:
  sources:
    - {path: a.jsonl, name: a, system_prompt: Think., label: first}
    - {path: b.jsonl, name: b}
evaluation:
  sources:
    - path: ${data.sources.1.path}
      name: of ${data.sources.1.name}
      system_prompt: ${data.sources.0.system_prompt}
      title: ${data.sources.0.label}
"""


def evaluated(tmp_path: Path, child: str, *overrides: str) -> dict[str, Any]:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "child.yaml").write_text(f"extends: base.yaml\n{child}")
    values = read_source(tmp_path / "child.yaml", overrides).values
    found: dict[str, Any] = values["evaluation"]["sources"][0]
    return found


OLD = {"path": "b.jsonl", "name": "of b", "system_prompt": "Think.", "title": "first"}
# item 0 has no system prompt any more, so neither has what refers to it by that name; another name keeps its value
NEW = {"path": "b.jsonl", "name": "of b", "title": "first"}


def test_references_follow_what_is_still_there(tmp_path: Path) -> None:
    assert evaluated(tmp_path, "") == OLD
    assert evaluated(
        tmp_path, "data:\n  sources:\n    - {path: c, system_prompt: Go., label: l}\n    - {path: d, name: e}\n"
    ) == {
        "path": "d",
        "name": "of e",
        "system_prompt": "Go.",
        "title": "l",
    }


def test_references_into_a_list_that_was_replaced(tmp_path: Path) -> None:
    assert evaluated(tmp_path, "data:\n  sources:\n    - {path: c.jsonl}\n") == NEW
    assert evaluated(tmp_path, "", "data.sources=[{path: c.jsonl}]") == NEW
    (tmp_path / "grandchild.yaml").write_text("extends: child.yaml\nseed: 1\n")
    evaluated(tmp_path, "data:\n  sources:\n    - {path: c.jsonl}\n")
    assert read_source(tmp_path / "grandchild.yaml").values["evaluation"]["sources"][0] == NEW


def test_a_whole_list_that_is_referred_to(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("old:\n  rows: [{path: a}]\nevaluation:\n  sources: ${old.rows}\n")
    (tmp_path / "child.yaml").write_text("extends: base.yaml\nold: null\n")
    assert read_source(tmp_path / "child.yaml").values["evaluation"] == {"sources": [{"path": "a"}]}


@pytest.mark.parametrize("reference", ["${data.sources.7.path}", "${data.sources.0.nothing}", "${nowhere}"])
def test_a_reference_that_never_led_anywhere_is_refused(tmp_path: Path, reference: str) -> None:
    (tmp_path / "base.yaml").write_text(BASE + f"name: {reference}\n")
    (tmp_path / "child.yaml").write_text("extends: base.yaml\ndata:\n  sources: [{path: c}]\n")
    with pytest.raises(ConfigError, match="name cannot be resolved: Interpolation key"):
        read_source(tmp_path / "child.yaml")


def test_new_data_for_a_published_example(tmp_path: Path) -> None:
    (tmp_path / "child.yaml").write_text(
        f"extends: {ROOT / 'configs' / 'rlvr_8gpu_colocated.yaml'}\ndata:\n  sources:\n    - path: my.jsonl\n"
    )
    config: Any = load_config(tmp_path / "child.yaml")
    assert config.evaluation.sources[0].path == "HuggingFaceH4/MATH-500"
    assert config.evaluation.sources[0].system_prompt is None
