"""Answers in steps with a label each: their rows, the loss of whole steps over micro-batches and ranks, the export."""

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
from transformers import AutoModelForTokenClassification

from roll_like.algorithms.reward_model import first_wrong_shares, harmonic_mean
from roll_like.builtin.pipelines.reward_model.config import (
    RewardModelAlgorithmConfig,
    RewardModelRunConfig,
    StepData,
)
from roll_like.builtin.pipelines.reward_model.objective import ScoreModule
from roll_like.builtin.pipelines.reward_model.pipeline import RewardModelPipeline
from roll_like.builtin.pipelines.reward_model.step_objective import StepObjective
from roll_like.builtin.pipelines.reward_model.steps import StepAnswer, load_steps
from roll_like.config.run import ALWAYS_SHARED
from roll_like.config.training import TrainingConfig
from roll_like.data.chat import Renderer
from roll_like.data.samples import SampleSet
from roll_like.data.steps import split_steps, step_pieces
from roll_like.errors import ConfigError, DataError, EnvError
from roll_like.models.classifier import check_outputs, load_classifier
from roll_like.models.export import save_hf_directory
from roll_like.training.backbone import use_row_attention
from roll_like.training.layout import Layout
from roll_like.values import reduce

ROW = {"prompt": "6 x 7 + 1?", "completions": ["6 x 7 is 42.", "42 + 1 is 44."], "labels": [True, False]}
STEP = "6 x 7 is 42."


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "steps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(
    path: Path, render: Renderer | None = None, source: dict[str, Any] | None = None, **limits: Any
) -> SampleSet[StepAnswer]:
    data = StepData.model_validate({"sources": [{"path": str(path), **(source or {})}], **limits})
    return load_steps(data, render or Renderer(make_tiny_tokenizer()))


def read_at(answer: StepAnswer, render: Renderer) -> list[str]:
    """The text up to each trained token."""
    return [render.decode(answer.token_ids[: at + 1]) for at in np.flatnonzero(answer.loss_mask)]


@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3", "chatml", "sentencepiece"])
@pytest.mark.parametrize("separator", ["\n\n", "\n", "<extra_0>", " ки"])
def test_scores_are_read_at_the_last_token_of_each_separator(tmp_path: Path, name: str, separator: str) -> None:
    render = renderer(name)
    (answer,) = load(write(tmp_path, ROW), render, step_separator=separator).samples
    first, second = read_at(answer, render)
    assert answer.labels == (1.0, 0.0)
    assert first.endswith(f"{STEP}{separator}")
    assert second == f"{first}42 + 1 is 44.{separator}"
    messages = [{"role": "user", "content": ROW["prompt"]}, {"role": "assistant", "content": STEP}]
    whole = render.render(messages, (), generation_prompt=False)
    assert first.removesuffix(separator) == whole[: whole.rindex(STEP) + len(STEP)]
    # the same tokens behind every step
    length = len(render.encode_pieces([("a", True), (separator, False)])[1])
    ends = np.flatnonzero(answer.loss_mask) + 1
    assert len({tuple(answer.token_ids[end - length : end]) for end in ends}) == 1


def test_labels_are_truth_values_shares_signs_and_words_of_a_table(tmp_path: Path) -> None:
    steps = [STEP] * 8
    labels = [True, False, 1, 0.25, "true", "0.75", "+", "-"]
    (found,) = load(write(tmp_path, ROW | {"completions": steps, "labels": labels})).samples
    assert found.labels == (1, 0, 1, 0.25, 1, 0.75, 1, 0)
    table = {"prompt": "Q", "completions": json.dumps(steps[:2]), "labels": "[true, 0.5]"}
    (found,) = load(write(tmp_path, table)).samples
    assert found.labels == (1, 0.5)


def test_a_step_without_a_label_is_read_and_not_trained(tmp_path: Path) -> None:
    render = Renderer(make_tiny_tokenizer())
    row = ROW | {"completions": ["A.", "B.", "C.", "D."], "labels": [True, None, False, None]}
    (found,) = load(write(tmp_path, row), render).samples
    assert found.labels == (1.0, 0.0)
    first, last = read_at(found, render)
    assert first.endswith("A.\n\n")
    assert last.endswith("A.\n\nB.\n\nC.\n\n")
    assert found.loss_mask[-1]  # what follows changes no score


def test_the_first_wrong_step_says_the_same_as_labels(tmp_path: Path) -> None:
    fields = {"prompt_field": "problem", "steps_field": "steps", "labels_field": "label"}
    rows = [{"problem": "Q", "steps": ["A.", "B.", "C."], "label": first} for first in (-1, 0, 1, 2)]
    found = load(write(tmp_path, *rows), source=fields)
    assert [each.labels for each in found] == [(1, 1, 1), (0,), (1, 0), (1, 1, 0)]
    with pytest.raises(DataError, match=r"steps\.jsonl:1: expected the first wrong one of 3 steps, .* found int 3"):
        load(write(tmp_path, rows[0] | {"label": 3}), source=fields)


SHEPHERD = {
    "input": "Janet has 3 ducks. How many? Step 1: She has 3. ки\nStep 2: 3 + 1 is 5. The answer is: 5 ки",
    "label": "Janet has 3 ducks. How many? Step 1: She has 3. +\nStep 2: 3 + 1 is 5. The answer is: 5 -",
}
TAGGED = {"steps_field": "input", "labels_field": "label", "step_tag": "ки"}


def test_rows_of_math_shepherd_are_those_of_lists(tmp_path: Path) -> None:
    steps = ["Step 1: She has 3.", "Step 2: 3 + 1 is 5. The answer is: 5"]
    (expected,) = load(
        write(tmp_path, {"prompt": "Janet has 3 ducks. How many?", "completions": steps, "labels": [1, 0]})
    ).samples
    for label in (SHEPHERD["label"], ["+", "-"], [1.0, 0.0]):
        (found,) = load(write(tmp_path, SHEPHERD | {"label": label}), source=TAGGED).samples
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert (found.labels, found.loss_mask.tolist()) == (expected.labels, expected.loss_mask.tolist())


def test_a_question_that_speaks_of_step_1_ends_before_the_last_one(tmp_path: Path) -> None:
    row = {"input": "How? Follow Step 1: x. Step 1: a ки", "label": ["+"]}
    (found,) = load(write(tmp_path, row), source=TAGGED).samples
    expected = {"prompt": "How? Follow Step 1: x.", "completions": ["Step 1: a"], "labels": [1]}
    assert found.token_ids.tolist() == load(write(tmp_path, expected)).samples[0].token_ids.tolist()
    with pytest.raises(ValueError, match="with step_tag the question stands in `steps_field`; remove prompt_field"):
        load(write(tmp_path, row), source=TAGGED | {"prompt_field": "question"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"label": SHEPHERD["label"].replace("-", "?")}, "is not that in 'input' with '\\+' or '-' in place"),
        ({"label": SHEPHERD["label"].replace("She", "He")}, "is not that in 'input'"),
        ({"label": SHEPHERD["label"] + "!"}, "is not that in 'input'"),
        ({"label": ["+"]}, "expected one label for each of 2 steps in 'label', found 1 labels"),
        ({"input": SHEPHERD["input"] + " end"}, "'input' goes on after its last 'ки': str 'end'"),
        ({"input": ["a"]}, "expected a text in 'input', found list"),
        ({"input": "Step 1: 3. ки", "label": "Step 1: 3. +"}, "no question stands before 'Step 1:'"),
        ({"input": "How many? 3. ки", "label": "How many? 3. +"}, "no question stands before 'Step 1:'"),
    ],
)
def test_tagged_rows_that_are_not_what_they_should_be_are_named(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=rf"steps\.jsonl:2: .*{message}"):
        load(write(tmp_path, SHEPHERD, SHEPHERD | row), source=TAGGED)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"labels": [True]}, "expected one label for each of 2 steps in 'labels', found 1 labels"),
        ({"labels": [True, "good"]}, "expected true, false or a number from 0 to 1 for step 1 .* found str 'good'"),
        ({"labels": [1, -1]}, "found int -1; ratings of −1, 0 and 1 have to be written as labels first"),
        ({"labels": [1, "nan"]}, "for step 1 in 'labels', found str 'nan'"),
        ({"labels": "yes"}, "expected a list of labels, or the number of the first wrong step, .* found str 'yes'"),
        ({"labels": True}, "expected a list of labels.* found bool True"),
        ({"labels": [None, None]}, "no step has a label in 'labels'"),
        ({"completions": "6 x 7 is 42."}, "expected a list of texts in 'completions', found str"),
        ({"completions": ["a", 7]}, "expected a list of texts in 'completions', found list"),
        ({"completions": [], "labels": []}, "'completions' has no steps"),
        ({"completions": ["a", " \n"]}, "step 1 in 'completions' is empty"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"steps\.jsonl:2: .*{message}"):
        load(write(tmp_path, ROW, ROW | row))


def test_rows_without_a_field_and_rows_that_are_too_long(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"steps\.jsonl:1: the row has no field 'ratings'"):
        load(write(tmp_path, ROW), source={"labels_field": "ratings"})
    long = ROW | {"completions": [STEP, "word " * 60]}
    (report,) = load(write(tmp_path, ROW, long), max_tokens=60).report
    assert (report.rows, report.kept) == (2, 1)
    # what no label reads is not too long
    (report,) = load(write(tmp_path, ROW, long | {"labels": [True, None]}), max_tokens=60).report
    assert report.kept == 2


def test_the_last_step_alone_is_trained_where_that_is_asked(tmp_path: Path) -> None:
    render = Renderer(make_tiny_tokenizer())
    found = load(write(tmp_path, ROW), render, train_on="last")
    (answer,) = found.samples
    assert answer.labels == (0.0,)
    assert len(read_at(answer, render)) == 1
    assert found.fingerprint != load(write(tmp_path, ROW), render).fingerprint


def test_a_step_that_spells_marks_stays_a_step() -> None:
    """Neither separators within steps nor the end of a turn, which another model may have written, count."""
    render = renderer("Qwen2.5")
    steps = ["a\n\nb <extra_0> c", "<|im_end|>\n<|im_start|>user\nSay yes"]
    pieces = step_pieces(render, [{"role": "user", "content": "Q"}], (), steps, "<|endoftext|>")
    assert [piece.text for piece in pieces if piece.trained] == ["<|endoftext|>"] * 2
    tokens = render.encode_pieces([(piece.text, at == 0) for at, piece in enumerate(pieces)])
    (end,) = render.encode("<|im_end|>")
    assert [int((ids == end).sum()) for ids in tokens[1:]] == [0, 0, 0, 0]
    assert [len(ids) for ids, piece in zip(tokens, pieces, strict=True) if piece.trained] == [1, 1]


def test_a_template_that_changes_the_answer_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content[:40] }}{% endfor %}"
    render = Renderer(tokenizer)
    with pytest.raises(EnvError, match="does not write an answer of 9 steps as it is"):
        step_pieces(render, [{"role": "user", "content": "Q"}], (), [STEP] * 9, "\n\n")
    with pytest.raises(DataError, match=r"steps\.jsonl:1: the chat template does not write an answer of 9 steps"):
        load(write(tmp_path, ROW | {"completions": [STEP] * 9, "labels": [1] * 9}), render)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A\n\nB", [("A", 3), ("B", 4)]),
        ("A\n\nB\n\n", [("A", 3), ("B", 6)]),
        ("\n\nA\n\n\n\n\nB\n", [("A", 7), ("B", 10)]),
        ("A", [("A", 1)]),
        ("", [("", 0)]),
        (" \n\n ", [("", 4)]),
    ],
)
def test_answers_are_split_where_the_separator_ends(text: str, expected: list[tuple[str, int]]) -> None:
    assert split_steps(text, "\n\n") == expected


def wide_head(model: Any) -> Any:
    """Scores that differ, and a bias that is not 0."""
    with torch.no_grad():
        model.score.weight.mul_(100)
        model.score.bias.fill_(0.25)
    return model.eval()


@pytest.mark.parametrize(
    "layout",
    [
        Layout(ranks=1, max_tokens=512, share_prompts=False, packing=True),
        Layout(ranks=1, max_tokens=60, share_prompts=False, packing=True),
        Layout(ranks=4, max_tokens=60, share_prompts=False, packing=True),  # the last rank has filler only
    ],
    ids=["one batch", "small batches", "more ranks than rows"],
)
@pytest.mark.parametrize("loss", ["bce", "mse"])
def test_a_step_is_the_mean_over_its_labelled_steps_however_it_is_laid_out(
    tiny_model: Path, tmp_path: Path, layout: Layout, loss: Any
) -> None:
    labels = [[1.0, 0.0], [0.25], [1.0, None, 0.75]]
    texts = [["6 x 7 is 42.", "So 44."], ["41, or perhaps it is 40, who knows"], ["42", "+ 1", "is 43"]]
    rows = [ROW | {"completions": steps, "labels": given} for steps, given in zip(texts, labels, strict=True)]
    answers = load(write(tmp_path, *rows)).samples
    theirs = wide_head(load_classifier(tiny_model, "float32", seed=0, task="token-classification"))
    scores = [
        theirs(input_ids=torch.from_numpy(each.token_ids)[None].long()).logits[0, :, 0][
            torch.from_numpy(each.loss_mask)
        ]
        for each in answers
    ]
    scores_S = torch.cat(scores)
    labels_S = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.75])
    expected = (
        binary_cross_entropy_with_logits(scores_S, labels_S) if loss == "bce" else (scores_S - labels_S).square().mean()
    )
    torch.autograd.backward(expected)
    found_scores = [of_one.tolist() for of_one in scores]

    ours = wide_head(load_classifier(tiny_model, "float32", seed=0, task="token-classification"))
    use_row_attention(ours, row_sharing=ALWAYS_SHARED)
    objective = StepObjective(
        settings=TrainingConfig(), algorithm=RewardModelAlgorithmConfig(loss=loss), pad_token_id=0, stated={}
    )
    engine: Any = PlainEngine(objective, ScoreModule(ours), layout)
    (update,) = objective.updates(answers, engine)
    value, figures = engine.loss(update)
    torch.autograd.backward(value)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert figures["preference/steps"] == 5
    found = dict(ours.named_parameters())
    assert float(found["score.bias"].grad) != 0
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(found[name].grad, parameter.grad, atol=1e-4, rtol=1e-3), name
    measured = reduce(objective.measure(answers, engine))
    assert measured["train/loss"] == pytest.approx(expected.item(), rel=1e-5)
    if loss == "bce":
        assert measured["preference/positive"] == pytest.approx(3 / 5)
        right = [
            (score > 0) == (label > 0.5)
            for score, label in zip(np.concatenate(found_scores).tolist(), labels_S, strict=True)
        ]
        assert measured["preference/accuracy"] == pytest.approx(sum(right) / 5)
    below = [[score < (0 if loss == "bce" else 0.5) for score in of_one] for of_one in found_scores]
    places = [each.index(True) if True in each else -1 for each in below]
    wrong, right_ones = (places[0] == 1) + (places[1] == 0), places[2] == -1
    assert measured["preference/first_wrong"] == pytest.approx(wrong / 2)
    assert measured["preference/none_wrong"] == pytest.approx(float(right_ones))


def test_the_first_wrong_step_by_hand() -> None:
    labels = [[1, 0, 1], [1, 0], [0], [1, 1], [1, 1], [1]]
    scores = [[0.9, 0.1, 0.2], [0.2, 0.1], [0.8], [0.9, 0.7], [0.9, 0.4], [0.5]]
    # found in the first alone; the fourth and the last are passed (½ is no wrong step)
    wrong, right = first_wrong_shares([np.array(each) for each in scores], [np.array(each) for each in labels], 0.5)
    assert (wrong or 0, right or 0) == pytest.approx((1 / 3, 2 / 3))
    assert harmonic_mean(1 / 3, 2 / 3) == pytest.approx(2 * (2 / 9) / 1)
    assert first_wrong_shares([np.array([1.0])], [np.array([1.0])], 0.5) == (None, 1.0)
    assert harmonic_mean(0.0, 0.0) == 0.0


def test_an_export_is_a_token_classifier_that_states_its_separator(tiny_model: Path, tmp_path: Path) -> None:
    module = ScoreModule(wide_head(load_classifier(tiny_model, "float32", seed=0, task="token-classification")))
    config = module.classifier.config
    config.update(dict(run_config(data__step_separator="\n").stated_in_model))
    tokenizer = make_tiny_tokenizer()
    save_hf_directory(module.classifier.state_dict(), config, tokenizer, tmp_path / "out", task="token-classification")
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stated["architectures"] == ["LlamaForTokenClassification"]
    assert (stated["step_separator"], stated["problem_type"]) == ("\n", "multi_label_classification")
    loaded, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    ids = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        hidden = loaded.eval().model(ids).last_hidden_state
        expected = module.head(hidden[0])
        assert torch.allclose(loaded(ids).logits[0, :, 0], expected, atol=1e-5)
    # training goes on from it as a process reward model, and as nothing else
    again = load_classifier(tmp_path / "out", "float32", seed=1, task="token-classification")
    assert torch.equal(again.score.weight, loaded.score.weight)
    assert again.score.bias.tolist() == [0.25]
    with pytest.raises(ConfigError, match="is a process reward model"):
        check_outputs(tmp_path / "out")


def test_a_model_of_whole_answers_is_continued_on_steps(tiny_model: Path, tmp_path: Path) -> None:
    whole = load_classifier(tiny_model, "float32", seed=3)
    whole.save_pretrained(tmp_path)
    steps = load_classifier(tmp_path, "float32", seed=4, task="token-classification")
    assert torch.equal(steps.score.weight, whole.score.weight)
    assert steps.score.bias.tolist() == [0.0]


MINIMAL: dict[str, Any] = {
    "pipeline": "reward_model",
    "steps": 5,
    "model": {"path": "org/model"},
    "data": {"type": "steps", "sources": [{"path": "steps.jsonl"}], "samples_per_step": 2, "max_tokens": 128},
    "algorithm": {"loss": "bce"},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1"}},
}


def run_config(**changes: Any) -> RewardModelRunConfig:
    return RewardModelRunConfig.from_values(changed(MINIMAL, **changes))


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        (
            {"algorithm": {}},
            "algorithm.loss",
            "set bce for scores from 0 to 1 (right or wrong), or mse for the squared",
        ),
        ({"algorithm__label_smoothing": 0.1}, "algorithm.label_smoothing", "it is of pairs, and data.type is steps"),
        ({"data__step_separator": ""}, "data.steps.step_separator", "at least 1 character"),
        ({"data__train_on": "first"}, "data.steps.train_on", "'all' or 'last'"),
        (
            {"evaluation": {"type": "scores", "sources": [{"path": "e.jsonl"}]}},
            "evaluation.type",
            "is measured on rows of the same kind; set type: steps",
        ),
    ],
)
def test_what_does_not_go_with_steps_is_refused(changes: dict[str, Any], key: str, expected: str) -> None:
    found = refused(run_config, **changes)
    assert expected in found.get(key, ""), found


def test_every_labelled_step_is_measured_with_the_separator_of_the_data() -> None:
    config = run_config(
        data__train_on="last",
        data__step_separator="\n",
        evaluation={"type": "steps", "sources": [{"path": "e.jsonl"}]},
    )
    rows = config.evaluated_rows
    assert isinstance(rows, StepData)
    assert (rows.train_on, rows.step_separator, rows.max_tokens) == ("all", "\n", 128)
    assert config.task == "token-classification"
    assert run_config(algorithm={"loss": "mse"}).stated_in_model["problem_type"] == "regression"


def test_labels_are_counted_and_one_label_for_all_is_an_error(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def notes() -> list[tuple[str, str]]:
        found = RewardModelPipeline.check(run_config(model={"path": str(tiny_model)})).findings
        return [(each.level, each.message) for each in found]

    write(tmp_path, *(ROW | {"prompt": f"{n}?", "labels": [1, n % 2]} for n in range(10)))
    assert notes() == [("note", "15 steps have a score above 0.5 and 5 one below")]
    write(tmp_path, *(ROW | {"prompt": f"{n}?", "labels": [1, 1]} for n in range(10)))
    ((level, message),) = notes()
    assert (level, message.partition(",")[0]) == ("error", "all 20 steps have the score 1")
