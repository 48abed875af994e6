"""What a preference configuration refuses, its plan, and what its check finds in pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_files import changed
from pydantic import ValidationError

from roll_like.check import Report, check_run
from roll_like.check.given import given_plan, pair_findings
from roll_like.comparing import PrecomputedReference, answers_of, pairs_of
from roll_like.config.dpo import DPOConfig

MINIMAL: dict[str, Any] = {
    "pipeline": "dpo",
    "steps": 10,
    "model": {"path": "org/model"},
    "data": {"sources": [{"path": "train.jsonl"}], "pairs_per_step": 4, "max_tokens": 128},
    "reference": {},
    "resources": {"device": "cpu", "devices_per_node": 2, "spans": {"training": "0-1"}},
}


def config(**changes: Any) -> DPOConfig:
    return DPOConfig.model_validate(changed(MINIMAL, **changes))


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"steps": None}, "steps", "neither is set; set one of them"),
        (
            {"training": {"max_tokens_per_micro_batch": 200}},
            "training.max_tokens_per_micro_batch",
            "200 tokens cannot hold the two answers of one pair (2 × data.max_tokens = 256); set it to 256 or more",
        ),
        (
            {"data__pairs_per_step": 1, "training": {"workers": 2}},
            "training.workers",
            "one step has 1 pairs, fewer than 2 workers",
        ),
        ({"reference": None}, "reference", "'dpo' compares with a reference model; add `reference: {}`"),
        ({"algorithm": {"loss": "simpo"}}, "reference", "'simpo' compares with no reference model"),
        ({"algorithm": {"loss": "kto"}}, "algorithm.loss.type", "'kto' learns from single answers"),
        ({"algorithm": {"loss": {"type": "dpo", "betta": 1}}}, "algorithm.loss.betta", "Extra inputs"),
        (
            {"reference": {"mode": "cluster"}, "resources__spans__reference": "1-2"},
            "resources.spans.reference",
            "overlaps training's 0-1 only in part",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], key: str, expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**changes)
    found = {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}
    assert expected in found.get(key, ""), found


def test_losses_without_a_reference_need_none_and_a_cluster_has_a_place() -> None:
    assert config(algorithm={"loss": "orpo"}, reference=None).reference is None
    clustered = config(reference={"mode": "cluster"}, resources__spans={"training": "0", "reference": "1"})
    assert [role.name for role in given_plan(clustered, None).roles] == ["training", "reference"]
    assert [role.name for role in given_plan(config(), None).roles] == ["training"]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with ten good pairs to train on and two others to evaluate."""
    monkeypatch.chdir(tmp_path)
    for name, numbers in (("train", range(10)), ("eval", range(10, 12))):
        lines = [
            json.dumps({"prompt": f"Say {number}", "chosen": f"It is {number}.", "rejected": "No."})
            for number in numbers
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


def report(tiny_model: Path, **changes: Any) -> Report:
    return check_run(config(model={"path": str(tiny_model)}, **changes), given_plan, pair_findings)


def test_a_good_configuration_has_no_findings_and_a_plan(rows: Path, tiny_model: Path) -> None:
    found = report(tiny_model, steps=None, epochs=2, evaluation={"sources": [{"path": "eval.jsonl"}]})
    assert found.findings == []
    assert (found.plan.steps, found.plan.samples_per_step) == (5, 4)  # 2 × 10 pairs, 4 a step


def test_bad_pairs_are_named_or_counted(rows: Path, tiny_model: Path) -> None:
    with (rows / "train.jsonl").open("a") as file:
        file.write('{"prompt": "Say x", "chosen": "It is.", "rejected": "It is."}\n')
    [error] = report(tiny_model).errors
    assert "train.jsonl:11" in str(error)
    assert "1 with identical chosen and rejected left out, first train.jsonl:11" in str(
        report(tiny_model, data__bad_rows="skip").sources[0]
    )


def test_what_a_reference_said_is_kept_for_a_resumed_run(rows: Path, tiny_model: Path, tmp_path: Path) -> None:
    pairs = pairs_of(config(model={"path": str(tiny_model)})).samples
    assert len(answers_of(pairs)) == 20

    class Engine:
        def sums(self, samples: Any) -> Any:
            return -np.arange(len(samples), dtype=np.float32)

    engine: Any = Engine()
    said = PrecomputedReference.compute(engine, pairs)
    assert said.sums(pairs[3:5]).tolist() == [-6, -7, -8, -9]
    path = tmp_path / "reference.npz"
    said.write(path, pairs, "these")
    read = PrecomputedReference.read(path, pairs, "these")
    assert read is not None
    assert read.sums(pairs).tolist() == said.sums(pairs).tolist()
    assert PrecomputedReference.read(path, pairs, "others") is None
    assert PrecomputedReference.read(tmp_path / "none.npz", pairs, "these") is None
