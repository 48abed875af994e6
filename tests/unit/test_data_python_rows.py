"""Rows that Python gives: lists of mappings and `datasets`, in the data of every pipeline."""

from __future__ import annotations

import base64
import io
import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from PIL import Image
from tiny_model import make_tiny_tokenizer

from roll_like.builtin.pipelines.distill.config import DistillationDataConfig
from roll_like.builtin.pipelines.dpo.config import LabelledDataConfig, PreferenceDataConfig
from roll_like.builtin.pipelines.online_dpo.config import PairEvaluationConfig
from roll_like.builtin.pipelines.reward_model.config import ScoredAnswerDataConfig, ScoredPairData
from roll_like.builtin.pipelines.sft.config import SFTConfig, SFTDataConfig, SFTEvaluationConfig
from roll_like.config.base import ConfigModel
from roll_like.config.data import ConversationData, DataConfig, DataSource
from roll_like.config.evaluation import EvaluationConfig
from roll_like.config.load import dump_config, load_config
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.images import read_picture
from roll_like.data.rows import read_rows
from roll_like.data.stored_rows import with_stored_rows
from roll_like.errors import ConfigError, DataError

ROWS = [{"prompt": f"{n} + 1?", "completion": str(n + 1)} for n in range(3)]
DATASET = datasets.Dataset.from_list(ROWS)
SPLITS = datasets.DatasetDict(train=DATASET, test=DATASET.select([2]))
SECTIONS: dict[Any, dict[str, Any]] = {
    DataConfig: {},  # of rlvr, online_dpo and on_policy_distill
    EvaluationConfig: {},
    SFTDataConfig: {"samples_per_step": 1},
    SFTEvaluationConfig: {},
    PreferenceDataConfig: {"pairs_per_step": 1},
    LabelledDataConfig: {"samples_per_step": 1},
    PairEvaluationConfig: {},
    ScoredPairData: {},
    ScoredAnswerDataConfig: {"samples_per_step": 1},
    DistillationDataConfig: {"samples_per_step": 1},
}


class DataHolder(ConfigModel):
    data: DataConfig


def read(source: Any, key: str = "data.sources.0") -> list[dict[str, Any]]:
    return [row.fields for row in read_rows(source, key)]


@pytest.mark.parametrize("section", list(SECTIONS), ids=lambda section: section.__name__)
def test_every_section_takes_rows_and_datasets(section: Any) -> None:
    further = SECTIONS[section]
    for sources in ([{"rows": ROWS}], [ROWS], [{"rows": DATASET}], [DATASET], DATASET, [SPLITS], SPLITS):
        (source,) = section(sources=sources, **further).sources
        assert read(source) == ROWS
        assert source.label == "rows"
    (source,) = section(sources=[{"rows": SPLITS, "split": "test", "name": "sums"}], **further).sources
    assert (read(source), source.label) == (ROWS[2:], "sums")
    assert len(section(sources=[{"rows": ROWS, "name": "a"}, {"rows": DATASET, "name": "b"}], **further).sources) == 2
    if not further:
        assert read(section.model_validate(DATASET).sources[0]) == ROWS
        assert read(section.model_validate(ROWS).sources[0]) == ROWS


WRONG = {
    "neither": ({}, "a source has a `path` or `rows`, and neither is set"),
    "both": ({"path": "a.jsonl", "rows": ROWS}, "and both are set"),
    "no mapping": (
        {"rows": [ROWS[0], "text"]},
        r"rows\[1\]: expected a mapping from names of fields to values, found str",
    ),
    "a name that is no text": ({"rows": [{1: "a"}]}, r"rows\[0\]: expected a mapping"),
    "no list": ({"rows": 3}, "expected a list of mappings or a datasets.Dataset, found int"),
    "a stream": ({"rows": DATASET.to_iterable_dataset()}, "use datasets.Dataset.from_generator"),
    "a subset": ({"rows": ROWS, "subset": "main"}, "have no subset"),
    "streamed": ({"rows": ROWS, "streaming": True}, "have no streaming"),
}


@pytest.mark.parametrize(("source", "message"), WRONG.values(), ids=list(WRONG))
def test_what_is_no_source(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(sources=[source])


def test_a_row_that_is_wrong_is_named_by_its_place() -> None:
    data = ConversationData(sources=[{"rows": [ROWS[0], {"prompt": "?"}]}])
    with pytest.raises(DataError, match=r"^data.sources.0.rows\[1\]: the row has no field 'completion'"):
        load_conversations(data, Renderer(make_tiny_tokenizer()))
    with pytest.raises(DataError, match="`rows` holds no rows"):
        load_conversations(ConversationData(sources=[{"rows": []}]), Renderer(make_tiny_tokenizer()))
    with pytest.raises(DataError, match="no split 'dev'; it has 'train', 'test'"):
        read(DataSource(rows=SPLITS, split="dev"))


def test_a_run_keeps_the_rows_in_its_folder(tmp_path: Path) -> None:
    """Lists as JSON lines, datasets as Parquet; the configuration names them, and loads anew."""
    config = SFTConfig(
        model={"path": "model"},
        steps=1,
        data={"sources": [{"rows": ROWS}, {"rows": SPLITS, "split": "test", "name": "b"}], "samples_per_step": 1},
        evaluation={"sources": [DATASET]},
        resources={"devices_per_node": 1, "device": "cpu", "device_mapping": {"training": 0}},
    )
    kept = with_stored_rows(config, tmp_path / "data")
    sources = [*kept.data.sources, *kept.evaluation.sources]
    assert [Path(source.path).name for source in sources] == [
        "data.sources.0.jsonl", "data.sources.1.parquet", "evaluation.sources.0.parquet",
    ]  # fmt: skip
    assert [read(source) for source in sources] == [ROWS, ROWS[2:], ROWS]
    assert [source.label for source in sources] == ["rows", "b", "rows"]
    text = dump_config(kept)
    assert "+ 1?" not in text
    assert {source["rows"] for source in yaml.safe_load(text)["data"]["sources"]} == {None}
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(tmp_path / "config.yaml") == kept
    assert len(pickle.dumps(kept)) < 20_000
    # the tokens are those of the rows in memory
    render = Renderer(make_tiny_tokenizer())
    assert load_conversations(kept.data, render).fingerprint == load_conversations(config.data, render).fingerprint
    assert with_stored_rows(kept, tmp_path / "data") is kept


def test_images_of_rows_are_found_from_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    red = Image.new("RGB", (2, 3), "red")
    red.save("red.png")
    text = io.BytesIO()
    red.save(text, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(text.getvalue()).decode()}"
    part = {"type": "image_url", "image_url": {"url": "red.png"}}
    rows = [
        {"prompt": "?", "images": ["red.png", text.getvalue(), red, url, {"bytes": text.getvalue(), "path": None}]},
        {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}], "images": None},
    ]
    kept = with_stored_rows(DataHolder(data=DataConfig(sources=[rows])), tmp_path / "runs" / "x" / "data")
    first, second = read_rows(kept.data.sources[0], "s")
    assert [read_picture(image, first).size() for image in first.images] == [(2, 3)] * 5
    assert second.fields["prompt"][0]["content"][0]["image_url"]["url"] == str(tmp_path / "red.png")


def test_a_value_that_no_file_holds_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.sources.0.rows\[0\] cannot be written to the run's folder: object"):
        with_stored_rows(DataHolder(data=DataConfig(sources=[[{"prompt": "?", "x": object()}]])), tmp_path)


def test_rows_in_yaml(tmp_path: Path) -> None:
    source = DataSource.model_validate(
        yaml.safe_load("rows:\n  - {prompt: '6 × 7?', answer: 42}\nanswer_field: answer\n")
    )
    assert read(source) == [{"prompt": "6 × 7?", "answer": 42}]
    assert json.loads(json.dumps(source.model_dump(mode="json")))["rows"] == [{"prompt": "6 × 7?", "answer": 42}]
