"""What a supervised configuration refuses, its plan, and what its check finds in conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import changed, refused, write_rows
from pydantic import ValidationError

from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.builtin.pipelines.sft.pipeline import SFTPipeline
from roll_like.check import Report
from roll_like.config.offline import steps_of

MINIMAL: dict[str, Any] = {
    "pipeline": "sft",
    "steps": 10,
    "model": {"path": "org/model"},
    "data": {"sources": [{"path": "train.jsonl"}], "samples_per_step": 4, "max_tokens": 128},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1"}},
}


def config(**changes: Any) -> SFTConfig:
    return SFTConfig.from_values(changed(MINIMAL, **changes))


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"steps": None}, "steps", "set exactly one of `steps` and `epochs`: neither is set"),
        ({"epochs": 2}, "steps", "both are set; keep steps: 10 with epochs: null, or epochs: 2 with steps: null"),
        (
            {"training": {"max_tokens_per_micro_batch": 100}},
            "training.max_tokens_per_micro_batch",
            "100 tokens cannot hold one longest sample (data.max_tokens = 128); set it to 128 or more",
        ),
        (
            {"data__samples_per_step": 1, "training": {"workers": 2}},
            "training.workers",
            "one step has 1 samples, fewer than 2 workers",
        ),
        (
            {"resources__device_mapping__training": "0-3"},
            "resources.device_mapping.training",
            "ends after the last device",
        ),
        ({"resources__device_mapping__inference": "0-1"}, "resources.device_mapping.inference", "Extra inputs"),
        ({"model__dtype": "float16"}, "model.dtype", "overflows on CPU"),
        (
            {"evaluation": {"sources": [{"path": "e.jsonl"}], "before": False, "after": False}},
            "evaluation",
            "it would never run",
        ),
        ({"data__sources": []}, "data.sources", "at least 1 item"),
        ({"steps": None, "epochs": 1e26}, "epochs", "less than or equal to 1000000"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], key: str, expected: str) -> None:
    found = refused(config, **changes)
    assert expected in found[key]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with ten good rows to train on and two others to evaluate."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, lambda word: {"prompt": f"Say {word}", "completion": f"It is {word}."})
    return tmp_path


def report(tiny_model: Path, **changes: Any) -> Report:
    return SFTPipeline.check(config(model={"path": str(tiny_model)}, **changes))


def only(found: Report, level: str) -> str:
    [finding] = [finding for finding in found.findings if finding.level == level]
    return str(finding)


def test_a_good_configuration_has_no_findings_and_a_plan(rows: Path, tiny_model: Path) -> None:
    found = report(tiny_model, evaluation={"sources": [{"path": "eval.jsonl"}]})
    assert found.findings == []
    assert (found.plan.samples_per_step, found.plan.updates, len(found.plan.roles)) == (4, 10, 1)
    assert [line.role for line in found.plan.memory] == ["training"]
    assert [str(source).partition(",")[0] for source in found.sources] == ["train: 10 of 10 rows", "eval: 2 of 2 rows"]


def test_epochs_are_steps_once_the_data_was_read(rows: Path, tiny_model: Path) -> None:
    assert report(tiny_model, steps=None, epochs=2.5).plan.steps == 7  # 25 samples, 4 a step
    asked = config(model={"path": str(tiny_model)}, steps=None, epochs=2.5)
    assert (asked.steps_for(10), config().steps_for(10)) == (7, 10)
    resolved = asked.lasting(10)
    assert (resolved.total_steps, resolved.epochs) == (7, None)
    assert SFTConfig.from_values(resolved.model_dump(by_alias=True)) == resolved
    with pytest.raises(ValueError, match="follow from the data"):
        _ = asked.total_steps


def test_a_step_to_profile_that_epochs_do_not_reach_is_an_error(rows: Path, tiny_model: Path) -> None:
    found = report(tiny_model, steps=None, epochs=2.5, profile={"steps": [7, 8]}).findings
    assert [(each.level, each.key) for each in found] == [("error", "profile.steps.1")]
    assert "step 8 never comes: the run has 7 steps" in found[0].message


def test_bad_rows_are_named_or_counted(rows: Path, tiny_model: Path) -> None:
    with (rows / "train.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    found = report(tiny_model)
    assert "train.jsonl:11" in only(found, "error")
    skipped = report(tiny_model, data__bad_rows="skip")
    assert not skipped.errors
    assert "1 without an assistant turn left out, first train.jsonl:11" in str(skipped.sources[0])


def test_what_may_not_be_meant_is_a_warning(rows: Path, tiny_model: Path) -> None:
    assert "the data has 10" in only(report(tiny_model, data__samples_per_step=16), "warning")
    both = report(tiny_model, evaluation={"sources": [{"path": "train.jsonl", "name": "again"}]})
    assert "10 of 10 samples are also trained on, first train.jsonl:1" in only(both, "warning")
    warm = report(tiny_model, training={"optimizer": {"warmup_steps": 10}})
    assert "10 of warm-up never reach the peak rate" in only(warm, "warning")


def test_an_evaluation_that_never_comes_is_a_warning_also_with_epochs(rows: Path, tiny_model: Path) -> None:
    rare = report(tiny_model, steps=None, epochs=2, evaluation={"sources": [{"path": "eval.jsonl"}], "every": 6})
    assert "evaluation.every: the run has 5 steps, fewer than 6" in only(rare, "warning")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"steps": 1}, "steps: the run reads 4 of 10 samples, and the others never; raise it, or set epochs: 1 and"),
        ({"steps": None, "epochs": 0.5}, None),
        ({"steps": None, "epochs": 0.01}, "epochs: the run reads 4 of 10 samples, and the others never; raise it"),
        ({"steps": 2}, None),
    ],
)
def test_data_that_is_mostly_unread_is_a_warning(
    rows: Path, tiny_model: Path, changes: dict[str, Any], expected: str | None
) -> None:
    found = report(tiny_model, **changes)
    assert expected in only(found, "warning") if expected else not found.findings


def test_a_source_whose_weight_leaves_most_of_it_unread_is_a_warning(rows: Path, tiny_model: Path) -> None:
    def sources(weight: float) -> list[dict[str, Any]]:
        return [{"path": "train.jsonl"}, {"path": "eval.jsonl", "weight": weight}]

    assert not report(tiny_model, data__sources=sources(0.1)).findings
    message = only(report(tiny_model, data__sources=sources(1e-9)), "warning")
    assert "data.sources.1.weight: the run reads about 0 of 2 samples of 'eval', and the others never" in message
    assert "1e-09 is 1e-09 of all weights; raise it" in message


@pytest.mark.parametrize(
    ("epochs", "items", "per_step", "steps"),
    [
        (1.1, 100, 10, 11),  # in binary fractions 11.000000000000002
        (0.1, 30, 1, 3),
        (1.15, 100, 1, 115),
        (2.5, 7, 2, 9),  # 17.5 items
        (3, 10, 10, 3),
    ],
)
def test_decimal_epochs_are_exact(epochs: float, items: int, per_step: int, steps: int) -> None:
    assert steps_of(epochs, items, per_step) == steps


@pytest.mark.parametrize("betas", [[0.9, 1.0], [1.0, 0.999], [-0.1, 0.9]])
def test_decay_rates_that_never_move_or_divide_by_zero_are_refused(betas: list[float]) -> None:
    with pytest.raises(ValidationError, match="betas"):
        config(training={"optimizer": {"lr": 1e-4, "betas": betas}})
