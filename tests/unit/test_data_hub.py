"""Datasets of the hub, read by Hugging Face's own client from a hub on this machine, and what is said without one."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import COMMIT, FakeHub, Repository, fake_hub

from roll_like.check.data import is_out_of_reach
from roll_like.config.data import DataSource
from roll_like.data.rows import read_rows
from roll_like.errors import DataError

CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""
ROWS = [{"question": f"{n} + 1?", "answer": f"<<{n}+1={n + 1}>>\n#### {n + 1}"} for n in range(4)]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as started:
        for place in ("huggingface_hub.constants.ENDPOINT", "datasets.config.HF_ENDPOINT"):
            monkeypatch.setattr(place, started.url)
        template = started.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        files = started.url + "/datasets/{repo_id}/resolve/{revision}/{path}"
        monkeypatch.setattr("datasets.config.HUB_DATASETS_URL", files)
        monkeypatch.setattr("datasets.config.USE_PARQUET_EXPORT", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
        monkeypatch.setattr("datasets.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
        offline(monkeypatch, False)
        started.datasets = {
            "openai/gsm8k": Repository(
                private=False,
                files={
                    "README.md": CARD,
                    "main/train-00000-of-00001.parquet": parquet(ROWS),
                    "main/test-00000-of-00001.parquet": parquet(ROWS[:1]),
                    "socratic/train-00000-of-00001.parquet": parquet(ROWS[:2]),
                },
            ),
            "ada/plain": Repository(private=False, files={"train.jsonl": json.dumps({"prompt": "Hi"}).encode()}),
            "ada/gated": Repository(private=False, files={"README.md": b"-"}, gated=True),
            "ada/script": Repository(private=False, files={"README.md": b"-", "script.py": b"raise SystemExit"}),
        }
        yield started


def offline(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", value)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", value)


def origins(**source: Any) -> list[str]:
    return [row.origin for row in read_rows(DataSource(**source), "data.sources.0")]


@pytest.mark.usefixtures("hub")
def test_a_subset_with_its_splits() -> None:
    gsm8k = {"path": "openai/gsm8k", "subset": "main"}
    assert is_out_of_reach(DataSource(**gsm8k))
    rows = list(read_rows(DataSource(**gsm8k), "s"))
    assert [row.fields for row in rows] == ROWS
    assert rows[3].origin == "openai/gsm8k/main[train]:4"
    assert not is_out_of_reach(DataSource(**gsm8k))
    assert is_out_of_reach(DataSource(path="openai/gsm8k", subset="socratic"))
    assert origins(**gsm8k, split="test") == ["openai/gsm8k/main[test]:1"]
    assert len(origins(**gsm8k, split="train[:50%]")) == 2
    assert len(origins(path="openai/gsm8k", subset="socratic")) == 2
    assert [row.fields for row in read_rows(DataSource(**gsm8k, streaming=True), "s")] == ROWS
    assert origins(path="ada/plain", revision=COMMIT) == ["ada/plain[train]:1"]


WRONG = {
    "no subset": ({"path": "openai/gsm8k"}, r"several subsets: \['main', 'socratic'\]", "data.sources.0.subset"),
    "another subset": ({"subset": "mian"}, r"no subset 'mian'; it has \['main', 'socratic'\]", "data.sources.0.subset"),
    "another split": ({"subset": "main", "split": "tst"}, r"no split 'tst'; it has \['train', 'test'\]", ".0.split"),
    "another split, streamed": (
        {"subset": "main", "split": "tst", "streaming": True},
        r"no split 'tst'; it has \['train', 'test'\]",
        ".0.split",
    ),
    "another revision": ({"subset": "main", "revision": "v9"}, "no revision 'v9'", "data.sources.0.revision"),
    "gated": ({"path": "ada/gated"}, "to those who may read it", "hf auth login"),
    "a script": ({"path": "ada/script"}, "is a Python script", "refs/convert/parquet"),
    "missing": ({"path": "ada/nothing"}, "neither a local file or directory", "data.sources.0.path"),
}


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("source", "message", "key"), WRONG.values(), ids=list(WRONG))
def test_what_cannot_be_had(source: dict[str, Any], message: str, key: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        origins(**{"path": "openai/gsm8k", **source})
    assert key in str(caught.value.fix)
    assert "Traceback" not in str(caught.value)


@pytest.mark.usefixtures("hub")
def test_without_network_only_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gsm8k = {"path": "openai/gsm8k", "subset": "main"}
    assert len(origins(**gsm8k)) == 4
    offline(monkeypatch, True)
    assert len(origins(**gsm8k)) == 4
    assert len(origins(**gsm8k, revision=COMMIT)) == 4
    with pytest.raises(DataError, match="cache has the revision 0123") as caught:
        origins(**gsm8k, revision="v2")
    assert "data.sources.0.revision" in str(caught.value.fix)
    with pytest.raises(DataError, match="has the subset 'main'") as caught:
        origins(path="openai/gsm8k")
    assert str(caught.value.fix) == "set data.sources.0.subset: main"
    with pytest.raises(DataError, match=r"no subset 'socratic'; it has \['main'\]"):
        origins(path="openai/gsm8k", subset="socratic")
    with pytest.raises(DataError, match="hub cannot be reached") as caught:
        origins(path="ada/plain")
    assert "hf download ada/plain --repo-type dataset" in str(caught.value.fix)


@pytest.mark.usefixtures("hub")
def test_a_hub_that_does_not_answer(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("huggingface_hub.constants.ENDPOINT", "datasets.config.HF_ENDPOINT"):
        monkeypatch.setattr(place, "http://127.0.0.1:9")
    with pytest.raises(DataError, match="cannot be reached"):
        origins(path="ada/plain")


def test_a_folder_as_the_hub_has_it(tmp_path: Path) -> None:
    for name, content in {"README.md": CARD, "main/train-0.parquet": parquet(ROWS)}.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    assert [row.fields for row in read_rows(DataSource(path=str(tmp_path), subset="main"), "s")] == ROWS
