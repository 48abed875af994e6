"""What a preference configuration refuses, its plan, and what its check finds in pairs and labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from config_files import changed, refused, write_rows

from roll_like.builtin.pipelines.dpo.config import DPOConfig, LabelledData
from roll_like.builtin.pipelines.dpo.labelled_objective import LabelledStep
from roll_like.builtin.pipelines.dpo.pipeline import DPOPipeline
from roll_like.builtin.pipelines.dpo.preferences import PrecomputedReference, batch_of, reference_inputs
from roll_like.check import Report
from roll_like.config.data import PairData
from roll_like.offline.check import offline_plan

MINIMAL: dict[str, Any] = {
    "pipeline": "dpo",
    "steps": 10,
    "model": {"path": "org/model"},
    "data": {"sources": [{"path": "train.jsonl"}], "pairs_per_step": 4, "max_tokens": 128},
    "reference": {},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1"}},
}
LABELS: dict[str, Any] = {"type": "labels", "sources": [{"path": "labels.jsonl"}], "samples_per_step": 4}
KTO: dict[str, Any] = {"data": {**LABELS, "max_tokens": 128}, "algorithm": {"loss": "kto"}}


def config(**changes: Any) -> DPOConfig:
    return DPOConfig.from_values(changed(MINIMAL, **changes))


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
        ({"reference": None}, "reference", "'dpo' compares with a reference model; add `reference: {}`"),
        ({"algorithm": {"loss": "simpo"}}, "reference", "'simpo' compares with no reference model"),
        ({"algorithm": {"loss": "kto"}, "reference": None}, "reference", "with a reference model; add `reference: {}`"),
        (
            {"data": LABELS},
            "data.type",
            "'dpo' compares two answers to one prompt, and rows of `type: labels` have one each; use rows of "
            "`type: pairs`, or a loss on single answers: algorithm.loss.type = kto",
        ),
        ({"evaluation": {"type": "labels", "sources": [{"path": "e.jsonl"}]}}, "evaluation.type", "have one each"),
        (
            {"data": {"type": "lables", "sources": []}},
            "data",
            "expected a section with `type: pairs` (the default) or `type: labels`",
        ),
        ({"data__samples_per_step": 4}, "data.pairs.samples_per_step", "Extra inputs"),
        ({**KTO, "data": {**LABELS, "samples_per_step": 1}}, "data.samples_per_step", "set it to 2 or more"),
        ({"algorithm": {"loss": "kto"}, "data__pairs_per_step": 1}, "data.pairs_per_step", "one step has 1 pair, and"),
        (
            {**KTO, "training": {"max_tokens_per_micro_batch": 100}},
            "training.max_tokens_per_micro_batch",
            "100 tokens cannot hold one longest sample (data.max_tokens = 128); set it to 128 or more",
        ),
        (
            {**KTO, "training": {"workers": 2}, "data": {**LABELS, "samples_per_step": 1}},
            "training.workers",
            "raise data.samples_per_step",
        ),
        ({"algorithm": {"loss": {"type": "dpo", "betta": 1}}}, "algorithm.loss.betta", "Extra inputs"),
        (
            {"reference": {"mode": "cluster"}, "resources__device_mapping__reference": "1-2"},
            "resources.device_mapping.reference",
            "overlaps training's 0-1 only in part",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], key: str, expected: str) -> None:
    found = refused(config, **changes)
    assert expected in found.get(key, ""), found


def test_losses_without_a_reference_need_none_and_a_cluster_has_a_place() -> None:
    assert config(algorithm={"loss": "orpo"}, reference=None).reference is None
    clustered = config(reference={"mode": "cluster"}, resources__device_mapping={"training": "0", "reference": "1"})
    assert [role.name for role in offline_plan(clustered, {}).roles] == ["training", "reference"]
    assert [role.name for role in offline_plan(config(), {}).roles] == ["training"]
    pairs, longest = config().items_per_step[0], config().longest_sample
    assert offline_plan(config(), {}).max_tokens_per_step == pairs * 2 * longest  # both answers, each with the prompt


def test_single_answers_and_pairs_are_told_apart_by_their_type() -> None:
    of_pairs = config(algorithm={"loss": "kto"}, evaluation={"type": "labels", "sources": [{"path": "e.jsonl"}]})
    assert (of_pairs.items_per_step, of_pairs.data.type) == ((4, "pairs"), "pairs")
    of_labels = config(**KTO, evaluation={"sources": [{"path": "e.jsonl"}]})
    assert of_labels.items_per_step == (4, "samples")
    evaluated = (of_pairs.evaluated_rows, of_labels.evaluated_rows, config().evaluated_rows)
    assert isinstance(evaluated[0], LabelledData)
    assert isinstance(evaluated[1], PairData)
    assert evaluated[2] is None
    assert (evaluated[0].max_tokens, evaluated[1].sources[0].path) == (128, "e.jsonl")
    # one answer fits where two would not
    tight = {"training": {"max_tokens_per_micro_batch": 200}}
    assert config(algorithm={"loss": "kto"}, **tight).training.max_tokens_per_micro_batch == 200
    for each in (of_pairs, of_labels):
        assert DPOConfig.from_values(each.model_dump(by_alias=True)) == each


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with ten good pairs to train on and two others to evaluate."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, lambda n: {"prompt": f"Say {n}", "chosen": f"It is {n}.", "rejected": "No."})
    return tmp_path


def report(tiny_model: Path, **changes: Any) -> Report:
    return DPOPipeline.check(config(model={"path": str(tiny_model)}, **changes))


def test_a_good_configuration_has_no_findings_and_a_plan(rows: Path, tiny_model: Path) -> None:
    found = report(tiny_model, steps=None, epochs=2, evaluation={"sources": [{"path": "eval.jsonl"}]})
    assert found.findings == []
    assert (found.plan.steps, found.plan.samples_per_step) == (5, 4)  # 2 × 10 pairs, 4 a step


@pytest.fixture
def labels(rows: Path) -> Path:
    """The same with ten labels beside them, four of which are desirable."""
    lines = [json.dumps({"prompt": f"Say {n}", "completion": f"It is {n}.", "label": n < 4}) for n in range(10)]
    (rows / "labels.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return rows


def messages(found: Report, level: str) -> list[str]:
    return [str(finding) for finding in found.findings if finding.level == level]


def test_labels_are_counted_and_weighed(labels: Path, tiny_model: Path) -> None:
    found = report(tiny_model, **KTO, evaluation={"sources": [{"path": "eval.jsonl"}]})
    assert messages(found, "note") == ["note: data.sources: 4 answers are desirable and 6 undesirable"]
    (warning,) = messages(found, "warning")
    # 0.4 against 0.6: by λ_D of 1.5 to 2 they come to 1 to 4/3
    assert warning.startswith(
        "warning: algorithm.loss.desirable_weight: 40% of the answers are desirable; with weights of 1"
    )
    assert "count 0.67 times as much" in warning
    assert warning.endswith("set it to between 1.5 and 2")
    assert (found.plan.units, found.plan.samples_per_step) == (("samples", "samples"), 4)
    balanced = report(tiny_model, **{**KTO, "algorithm": {"loss": {"type": "kto", "desirable_weight": 1.6}}})
    assert messages(balanced, "warning") == []
    assert report(tiny_model, algorithm={"loss": "kto"}).findings == []  # of pairs there are as many of both


def test_the_shares_of_sources_count_in_the_balance(labels: Path, tiny_model: Path) -> None:
    row = {"prompt": "Say one", "completion": "It is one.", "label": True}
    (labels / "more.jsonl").write_text(json.dumps(row) + "\n")
    sources = [{"path": "labels.jsonl"}, {"path": "more.jsonl", "weight": 4}]
    found = report(tiny_model, **{**KTO, "data": {**LABELS, "sources": sources, "max_tokens": 128}})
    (warning,) = messages(found, "warning")  # (1 × 0.4 + 4 × 1)/5 = 0.88 of the draws
    assert "algorithm.loss.undesirable_weight: 88% of the answers are desirable" in warning
    assert warning.endswith("between 5.5 and 7.3")


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (True, "all 10 answers have the label true, and 'kto' learns from the difference between desirable and"),
        (False, "add rows with the label true, or correct label_field"),
    ],
)
def test_labels_of_one_kind_are_refused(labels: Path, tiny_model: Path, label: bool, expected: str) -> None:
    lines = [json.dumps({"prompt": f"Say {n}", "completion": f"It is {n}.", "label": label}) for n in range(10)]
    (labels / "labels.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (error,) = messages(report(tiny_model, **KTO), "error")
    assert expected in error
    assert error.endswith("pipeline: sft") == label


def test_answers_to_one_prompt_have_no_baseline(labels: Path, tiny_model: Path) -> None:
    lines = [json.dumps({"prompt": "Say it", "completion": f"It is {n}.", "label": n == 0}) for n in range(2)]
    (labels / "one.jsonl").write_text("".join(f"{line}\n" for line in lines))
    found = report(tiny_model, **KTO, evaluation={"type": "labels", "sources": [{"path": "one.jsonl"}]})
    (error,) = messages(found, "error")
    assert "evaluation.sources: all answers have one prompt" in error


def test_answers_that_are_evaluated_and_trained_on_are_seen_in_either_form(labels: Path, tiny_model: Path) -> None:
    lines = [json.dumps({"prompt": f"Say {n}", "completion": f"It is {n}.", "label": False}) for n in (3, 11)]
    (labels / "again.jsonl").write_text("".join(f"{line}\n" for line in lines))
    found = report(
        tiny_model, algorithm={"loss": "kto"}, evaluation={"type": "labels", "sources": [{"path": "again.jsonl"}]}
    )
    (warning,) = messages(found, "warning")
    assert "1 of 2 samples are also trained on, first again.jsonl:1" in warning


def test_everything_that_a_reference_is_asked_in_a_run_is_known_before(labels: Path, tiny_model: Path) -> None:
    for changes in (KTO, {"algorithm": {"loss": "kto"}}):
        asked = config(model={"path": str(tiny_model)}, **changes)
        data = DPOPipeline.trained_on(asked)
        known = PrecomputedReference({}).extended(cast(Any, LengthModel()), reference_inputs(asked, data, None))
        order = data.order(seed=asked.seed)
        mismatched = 0
        for _ in range(asked.total_steps):
            step = batch_of(asked, order.take(asked.items_per_step[0]))
            assert known(step.sequences).tolist() == [float(len(each.token_ids)) for each in step.sequences]
            assert isinstance(step, LabelledStep)
            mismatched += len(step.mismatched)
        assert mismatched == asked.total_steps * asked.items_per_step[0] * (1 if changes is KTO else 2)


class LengthModel:
    """Says how long sequences are."""

    def __call__(self, samples: Any) -> Any:
        return np.array([float(len(each.token_ids)) for each in samples], np.float32)


def test_bad_pairs_are_named_or_counted(rows: Path, tiny_model: Path) -> None:
    with (rows / "train.jsonl").open("a") as file:
        file.write('{"prompt": "Say x", "chosen": "It is.", "rejected": "It is."}\n')
    [error] = report(tiny_model).errors
    assert "train.jsonl:11" in str(error)
    assert "1 with identical chosen and rejected left out, first train.jsonl:11" in str(
        report(tiny_model, data__bad_rows="skip").sources[0]
    )


def test_what_a_reference_said_is_kept_for_a_resumed_run(rows: Path, tiny_model: Path, tmp_path: Path) -> None:
    asked = config(model={"path": str(tiny_model)})
    samples = [*reference_inputs(asked, DPOPipeline.trained_on(asked), None)]
    # ten chosen answers, and one rejected one to each prompt
    assert len(samples) == 20

    class Engine:
        said = 0

        def __call__(self, samples: Any) -> Any:
            self.said += len(samples)
            return -np.arange(len(samples), dtype=np.float32)

    engine: Any = Engine()
    said = PrecomputedReference({}).extended(engine, [*samples[:10], *samples])
    assert engine.said == 20  # each once
    assert said(samples[6:10]).tolist() == [-6, -7, -8, -9]
    path = tmp_path / "reference.npz"
    said.write(path, "these")
    read = PrecomputedReference.read(path, "these")
    assert read(samples).tolist() == said(samples).tolist()
    assert [*read.missing(samples)] == []
    for other in (PrecomputedReference.read(path, "others"), PrecomputedReference.read(tmp_path / "none.npz", "these")):
        assert len([*other.missing(samples)]) == 20
