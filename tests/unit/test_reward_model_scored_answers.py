"""Answers with a score each: their rows, the loss of whole steps over micro-batches and ranks, the check of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import renderer
from config_files import changed, refused
from plain_engine import PlainEngine
from tiny_model import make_tiny_tokenizer
from torch.nn.functional import binary_cross_entropy_with_logits

from roll_like.builtin.pipelines.reward_model.answer_objective import ScoredAnswerObjective
from roll_like.builtin.pipelines.reward_model.config import (
    RewardModelAlgorithmConfig,
    RewardModelRunConfig,
    ScoredAnswerData,
    ScoredPairData,
)
from roll_like.builtin.pipelines.reward_model.objective import ScoreModule
from roll_like.builtin.pipelines.reward_model.pipeline import RewardModelPipeline
from roll_like.builtin.pipelines.reward_model.scored_answers import ScoredAnswer, load_scored_answers
from roll_like.builtin.pipelines.reward_model.scored_pairs import load_scored_pairs
from roll_like.config.run import ALWAYS_SHARED
from roll_like.config.training import TrainingConfig
from roll_like.data.chat import Renderer
from roll_like.data.samples import SampleSet
from roll_like.errors import DataError
from roll_like.models.classifier import load_classifier
from roll_like.training.backbone import use_row_attention
from roll_like.training.layout import Layout
from roll_like.values import reduce

ROW = {"prompt": "6 x 7?", "completion": "It is 42.", "score": 1}


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(
    path: Path, render: Renderer | None = None, loss: str = "bce", source: dict[str, Any] | None = None, **limits: Any
) -> SampleSet[ScoredAnswer]:
    data = ScoredAnswerData.model_validate({"sources": [{"path": str(path), **(source or {})}], **limits})
    return load_scored_answers(data, render or Renderer(make_tiny_tokenizer()), loss=loss)


def test_scores_are_numbers_words_of_a_table_and_truth_values(tmp_path: Path) -> None:
    values = [1, 0, 0.25, True, False, "1", "0.75", "true", " False ", "1e-1"]
    found = load(write(tmp_path, *(ROW | {"score": value} for value in values)))
    assert [each.score for each in found] == [1, 0, 0.25, 1, 0, 1, 0.75, 1, 0, 0.1]
    ratings = [-3, 4.5, "10", True]
    found = load(write(tmp_path, *(ROW | {"score": value} for value in ratings)), loss="mse")
    assert [each.score for each in found] == [-3, 4.5, 10, 1]
    named = load(write(tmp_path, ROW | {"value": 0.5}), source={"score_field": "value"})
    assert [each.score for each in named] == [0.5]
    assert named.fingerprint != load(write(tmp_path, ROW)).fingerprint


@pytest.mark.parametrize("value", [None, "good", "", [], {}, "nan", "inf", 10**400])
def test_what_is_no_score_is_named_with_its_row(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path, ROW, ROW | {"score": value})
    for loss in ("bce", "mse"):
        with pytest.raises(DataError, match=r"answers\.jsonl:2: expected a number.* in 'score', found") as said:
            load(path, loss=loss)
        assert said.value.fix == "correct the row, or data.sources.0.score_field"


def test_ratings_are_refused_by_a_loss_on_probabilities(tmp_path: Path) -> None:
    path = write(tmp_path, ROW, ROW | {"score": 4})
    assert [each.score for each in load(path, loss="mse")] == [1, 4]  # and what was kept of them is not taken
    with pytest.raises(DataError, match=r"answers\.jsonl:2: expected a number from 0 to 1, .* found int 4") as said:
        load(path)
    assert said.value.fix is not None
    assert said.value.fix.endswith("divide ratings by their highest, or set algorithm.loss: mse")
    with pytest.raises(DataError, match=r"answers\.jsonl:1: the row has no field 'rating'"):
        load(path, source={"score_field": "rating"})


@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3", "chatml", "sentencepiece"])
def test_conversations_are_those_of_pairs(tmp_path: Path, name: str) -> None:
    render = renderer(name)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "6 x 7?", "chosen": "It is 42.", "rejected": "No."}) + "\n")
    (pair,) = load_scored_pairs(ScoredPairData.model_validate({"sources": [{"path": str(pairs)}]}), render).samples
    messages = [{"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": "It is 42."}]
    for row in (ROW, {"messages": messages, "score": 1}):
        (answer,) = load(write(tmp_path, row), render).samples
        assert answer.token_ids.tolist() == pair.chosen.token_ids.tolist()
        assert np.flatnonzero(answer.loss_mask).tolist() == [len(answer) - 1]


def test_rows_that_do_not_end_with_a_scored_answer_are_named(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    with pytest.raises(DataError, match="the last message is of 'user', expected the assistant's"):
        load(write(tmp_path, {"messages": [user, answer, user], "score": 1}))
    with pytest.raises(DataError, match="the scored answer has a flag"):
        load(write(tmp_path, {"messages": [user, answer | {"weight": 0}], "score": 1}))
    with pytest.raises(DataError, match="message 1 is the assistant's and is empty"):
        load(write(tmp_path, ROW | {"completion": ""}))
    path = write(tmp_path, ROW, ROW | {"completion": "word " * 60})
    (report,) = load(path, max_tokens=50).report
    assert (report.rows, report.kept) == (2, 1)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(ranks=1, max_tokens=512, share_prompts=False, packing=True),
        Layout(ranks=1, max_tokens=40, share_prompts=False, packing=True),
        Layout(ranks=4, max_tokens=40, share_prompts=False, packing=True),  # the last rank has filler only
    ],
    ids=["one batch", "small batches", "more ranks than rows"],
)
def test_a_step_is_the_mean_over_its_answers_however_it_is_laid_out(
    tiny_model: Path, tmp_path: Path, layout: Layout
) -> None:
    labels = [1.0, 0.0, 0.25]
    texts = ["It is 42.", "41, or perhaps it is 40, who knows", "42"]
    rows = [ROW | {"completion": text, "score": label} for text, label in zip(texts, labels, strict=True)]
    answers = load(write(tmp_path, *rows)).samples
    theirs = load_classifier(tiny_model, "float32", seed=0).eval()
    with torch.no_grad():
        theirs.score.weight.mul_(100)
    scores_S = torch.cat(
        [theirs(input_ids=torch.from_numpy(each.token_ids)[None].long()).logits[0] for each in answers]
    )
    expected = binary_cross_entropy_with_logits(scores_S, torch.tensor(labels))
    expected.backward()

    ours = load_classifier(tiny_model, "float32", seed=0).eval()
    with torch.no_grad():
        ours.score.weight.mul_(100)
    use_row_attention(ours, row_sharing=ALWAYS_SHARED)
    objective = ScoredAnswerObjective(
        settings=TrainingConfig(), algorithm=RewardModelAlgorithmConfig(loss="bce"), pad_token_id=0
    )
    engine: Any = PlainEngine(objective, ScoreModule(ours), layout)
    (update,) = objective.updates(answers, engine)
    value, figures = engine.loss(update)
    torch.autograd.backward(value)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert figures["preference/samples"] == 3
    found = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(found[name].grad, parameter.grad, atol=1e-5), name
    measured = reduce(objective.measure(answers, engine))
    assert measured["train/loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert measured["preference/score"] == pytest.approx(float(scores_S.detach().mean()), abs=1e-4)
    right, *wrong = scores_S.tolist()
    above = [float(right > other) for other in wrong]
    assert measured["preference/auc"] == pytest.approx(sum(above) / 2)
    assert {name: measured[name] for name in figures if name.startswith("preference/")} == pytest.approx(
        {name: value for name, value in figures.items() if name.startswith("preference/")}, abs=1e-4
    )


MINIMAL: dict[str, Any] = {
    "pipeline": "reward_model",
    "steps": 5,
    "model": {"path": "org/model"},
    "data": {"type": "scores", "sources": [{"path": "answers.jsonl"}], "samples_per_step": 2, "max_tokens": 128},
    "algorithm": {"loss": "bce"},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1"}},
}
PAIRS = {"sources": [{"path": "pairs.jsonl"}], "pairs_per_step": 2, "max_tokens": 128}


def config(**changes: Any) -> RewardModelRunConfig:
    return RewardModelRunConfig.from_values(changed(MINIMAL, **changes))


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"algorithm": {}}, "algorithm.loss", "set bce for scores from 0 to 1 (right or wrong), or mse for ratings"),
        ({"algorithm": {"loss": "hinge"}}, "algorithm.loss", "Input should be 'bradley_terry', 'bce' or 'mse'"),
        ({"data": PAIRS}, "algorithm.loss", "'bce' learns from answers that have a score each"),
        (
            {"data__type": "labels"},
            "data",
            "expected a section with `type: pairs` (the default) or `type: scores` or `type: steps`",
        ),
        (
            {"algorithm__label_smoothing": 0.1},
            "algorithm.label_smoothing",
            "it is of pairs, and data.type is scores; remove it: write soft scores into the rows",
        ),
        ({"algorithm__center_coefficient": 0.01}, "algorithm.center_coefficient", "it is of pairs"),
        (
            {"data__sources": [{"path": "a.jsonl", "margin_field": "by"}]},
            "data.scores.sources.0.margin_field",
            "Extra inputs",
        ),
        ({"data__pairs_per_step": 2}, "data.scores.pairs_per_step", "Extra inputs"),
        ({"data__too_long": "cut"}, "data.scores.too_long", "Input should be 'skip' or 'refuse'"),
        (
            {"evaluation": {"sources": [{"path": "e.jsonl"}]}},
            "evaluation.type",
            "is measured on rows of the same kind; set type: scores",
        ),
        (
            {"training": {"max_tokens_per_micro_batch": 100}},
            "training.max_tokens_per_micro_batch",
            "data.max_tokens = 128",
        ),
    ],
)
def test_what_does_not_go_with_scores_is_refused(changes: dict[str, Any], key: str, expected: str) -> None:
    found = refused(config, **changes)
    assert expected in found.get(key, ""), found


def test_a_micro_batch_need_not_hold_two_answers() -> None:
    assert config(training={"max_tokens_per_micro_batch": 128}).items_per_step == (2, "samples")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def notes(model: Path, **changes: Any) -> list[tuple[str, str]]:
    found = RewardModelPipeline.check(config(model={"path": str(model)}, **changes)).findings
    return [(each.level, each.message) for each in found]


def test_the_spread_of_scores_is_told_and_one_score_for_all_is_an_error(folder: Path, tiny_model: Path) -> None:
    rows = [ROW | {"prompt": f"{n} x 7?", "score": n % 2 if n else 0.5} for n in range(10)]
    write(folder, *rows)
    assert notes(tiny_model) == [("note", "5 answers have a score above 0.5 and 4 one below")]
    write(folder, *(row | {"score": n} for n, row in enumerate(rows)))
    expected = "scores are from 0 to 9, with a mean of 4.5 and a standard deviation of 2.87"
    assert notes(tiny_model, algorithm={"loss": "mse"}) == [("note", expected)]
    write(folder, *(row | {"score": 1} for row in rows))
    ((level, message),) = notes(tiny_model)
    assert level == "error"
    assert message.startswith("all 10 answers have the score 1, so that a model that reads nothing is right")
