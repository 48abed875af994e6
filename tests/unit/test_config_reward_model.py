"""What the configuration of a reward model's run refuses, its plan, and what its check finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import changed, refused, write_rows
from transformers import AutoModelForSequenceClassification

from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.builtin.pipelines.reward_model.pipeline import RewardModelPipeline
from roll_like.check import Report

MINIMAL: dict[str, Any] = {
    "pipeline": "reward_model",
    "steps": 10,
    "model": {"path": "org/model"},
    "data": {"sources": [{"path": "train.jsonl"}], "pairs_per_step": 4, "max_tokens": 128},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1"}},
}


def config(**changes: Any) -> RewardModelRunConfig:
    return RewardModelRunConfig.from_values(changed(MINIMAL, **changes))


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"steps": None}, "steps", "set exactly one of `steps` and `epochs`: neither is set"),
        (
            {"training": {"max_tokens_per_micro_batch": 200}},
            "training.max_tokens_per_micro_batch",
            "200 tokens cannot hold the two answers of one pair: 2 × 128 = 256 (data.max_tokens = 128)",
        ),
        (
            {"data__pairs_per_step": 1, "training": {"workers": 2}},
            "training.workers",
            "one step has 1 pairs, fewer than 2 workers",
        ),
        ({"data__too_long": "cut"}, "data.pairs.too_long", "Input should be 'skip' or 'refuse'"),
        ({"algorithm": {"label_smoothing": 0.7}}, "algorithm.label_smoothing", "less than or equal to 0.5"),
        ({"algorithm": {"loss": "dpo"}}, "algorithm.loss", "Input should be 'bradley_terry', 'bce' or 'mse'"),
        ({"reference": {}}, "reference", "Extra inputs"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], key: str, expected: str) -> None:
    found = refused(config, **changes)
    assert expected in found.get(key, ""), found


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with ten good pairs to train on and two others to evaluate."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, lambda n: {"prompt": f"Say {n}", "chosen": f"It is {n}.", "rejected": "No."})
    return tmp_path


def report(model: Path, **changes: Any) -> Report:
    return RewardModelPipeline.check(config(model={"path": str(model)}, **changes))


def test_a_good_configuration_has_no_findings_and_a_plan(rows: Path, tiny_model: Path) -> None:
    found = report(tiny_model, steps=None, epochs=2, evaluation={"sources": [{"path": "eval.jsonl"}]})
    assert found.findings == []
    assert (found.plan.steps, found.plan.samples_per_step) == (5, 4)  # 2 × 10 pairs, 4 a step
    assert [source.name for source in found.sources] == ["train", "eval"]
    assert [name for name, _ in found.plan.memory[0].parts] == ["weights", "gradients", "optimizer"]  # no logits


def test_what_is_wrong_with_rows_and_model_is_found(rows: Path, tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2)
    for file in tiny_model.iterdir():
        (tmp_path / "two").mkdir(exist_ok=True)
        (tmp_path / "two" / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(tmp_path / "two")
    found = report(tmp_path / "two", evaluation={"sources": [{"path": "train.jsonl"}]}, data__max_tokens=2048)
    assert [(each.level, each.key) for each in found.findings] == [
        ("error", "model.path"),
        ("error", "data"),
        ("warning", "evaluation.sources"),
    ]
    texts = [each.message for each in found.findings]
    assert "is a classifier with 2 outputs, and a reward model has one; set model.path to a language model" in texts[0]
    assert "2048 tokens (data.max_tokens = 2048) exceed max_position_embeddings (1024)" in texts[1]
    assert "10 of 10 pairs are also trained on" in texts[2]
