"""Rows of preferences: a shared prompt, two responses, and what is refused or left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import renderer
from tiny_model import make_tiny_tokenizer

from roll_like.builtin.pipelines.dpo.labelled_data import labelled_samples
from roll_like.config.data import PairData
from roll_like.data.bad_rows import Problem
from roll_like.data.chat import Renderer
from roll_like.data.pairs import load_pairs
from roll_like.errors import DataError

HI = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
MORE = {"role": "user", "content": "More"}
HELLO = {"role": "assistant", "content": "Hello"}
AWAY = {"role": "assistant", "content": "Go away"}
FINE = {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}


@pytest.fixture(scope="module")
def render() -> Renderer:
    return Renderer(make_tiny_tokenizer())


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def load(path: Path, render: Renderer, source: dict[str, Any] | None = None, **settings: Any) -> Any:
    return load_pairs(PairData.model_validate({"sources": [{"path": str(path), **(source or {})}], **settings}), render)


def said(render: Renderer, sample: Any) -> str:
    return render.decode(sample.token_ids[sample.loss_mask])


@pytest.mark.parametrize(
    "row",
    [
        FINE,
        {"prompt": [HI], "chosen": [HELLO], "rejected": [AWAY]},
        {"prompt": "Hi", "chosen": [HI, HELLO], "rejected": [HI, AWAY]},
        {"chosen": [HI, HELLO], "rejected": [HI, AWAY]},
        {"prompt": None, "chosen": [HI, HELLO], "rejected": [HI, AWAY]},
        {"prompt": "Hi", "chosen": [HELLO], "rejected": "Go away"},
        {"prompt": json.dumps([HI]), "chosen": json.dumps([HELLO]), "rejected": json.dumps([HI, AWAY])},
        {"chosen": json.dumps([HI, HELLO]), "rejected": json.dumps([HI, AWAY])},
    ],
    ids=["texts", "messages", "prompt repeated", "prompt implied", "prompt null", "mixed", "JSON", "JSON, implied"],
)
def test_rows_of_every_form_are_the_same_pair(tmp_path: Path, render: Renderer, row: Any) -> None:
    file = write_lines(tmp_path / "pairs.jsonl", row)
    (pair,) = load(file, render)
    prompt = render.render([HI], ())
    assert pair.origin == f"{file}:1"
    assert render.decode(pair.chosen.token_ids[: pair.chosen.first_trained]) == prompt
    assert pair.chosen.token_ids[: pair.chosen.first_trained].tolist() == render.encode(prompt).tolist()
    assert pair.rejected.token_ids[: pair.rejected.first_trained].tolist() == render.encode(prompt).tolist()
    assert (said(render, pair.chosen), said(render, pair.rejected)) == ("Hello<|im_end|>", "Go away<|im_end|>")


def test_a_prompt_of_many_turns_is_not_trained(tmp_path: Path, render: Renderer) -> None:
    begun = [SYSTEM, HI, HELLO, MORE]
    row = {"chosen": [*begun, HELLO, MORE, HELLO], "rejected": [*begun, AWAY]}
    told = {"prompt": begun[1:], "chosen": row["chosen"], "rejected": row["rejected"]}
    first, second = load(write_lines(tmp_path / "pairs.jsonl", row, told), render)
    assert first.content() == second.content()
    assert said(render, first.chosen) == "Hello<|im_end|>Hello<|im_end|>"
    assert said(render, first.rejected) == "Go away<|im_end|>"
    assert render.decode(first.rejected.token_ids[: first.rejected.first_trained]) == render.render(begun, ())


def test_a_system_prompt(tmp_path: Path, render: Renderer) -> None:
    (pair,) = load(write_lines(tmp_path / "pairs.jsonl", FINE), render, {"system_prompt": "Be brief."})
    assert render.decode(pair.chosen.token_ids[: pair.chosen.first_trained]) == render.render([SYSTEM, HI], ())


BAD = [
    ({**FINE, "rejected": "Hello"}, Problem.IDENTICAL, "the same tokens"),
    ({"chosen": [HI, HELLO], "rejected": [HI, HELLO]}, Problem.IDENTICAL, "the same tokens"),
    ({**FINE, "chosen": " "}, Problem.EMPTY, "is empty"),
    ({**FINE, "rejected": None}, Problem.EMPTY, "'rejected' is NoneType None"),
    ({"chosen": [], "rejected": [HI, HELLO]}, Problem.EMPTY, "'chosen' has no messages"),
    ({"chosen": [HI, HELLO], "rejected": [MORE, AWAY]}, Problem.NO_SHARED_PROMPT, "part at message 0"),
    ({"chosen": [HI, HELLO], "rejected": [HI, HELLO, MORE, AWAY]}, Problem.NO_SHARED_PROMPT, "part at message 2"),
    ({"chosen": [HI, HELLO, HI], "rejected": [HI, HELLO, MORE]}, Problem.NO_SHARED_PROMPT, "part at message 2"),
]


@pytest.mark.parametrize(("row", "problem", "message"), BAD)
def test_bad_pairs_are_refused_or_counted_with_the_first_of_them(
    tmp_path: Path, render: Renderer, row: Any, problem: Problem, message: str
) -> None:
    file = write_lines(tmp_path / "pairs.jsonl", FINE, row, row, FINE)
    with pytest.raises(DataError) as caught:
        load(file, render)
    assert caught.value.message.startswith(f"{file}:2: ")
    assert message in caught.value.message
    assert "data.bad_rows: skip" in (caught.value.fix or "")
    pairs = load(file, render, bad_rows="skip")
    assert [pair.origin for pair in pairs] == [f"{file}:1", f"{file}:4"]
    (left,) = pairs.report[0].left_out
    assert (left.problem, left.count) == (problem, 2)
    assert left.first.startswith(f"{file}:2 (")


def test_responses_that_a_template_makes_the_same(tmp_path: Path) -> None:
    row = {"prompt": "Hi", "chosen": "Hello", "rejected": " Hello "}
    file = write_lines(tmp_path / "pairs.jsonl", row)
    assert len(load(file, renderer("chatml"))) == 1
    with pytest.raises(DataError, match="chosen and rejected are the same tokens"):
        load(file, renderer("trims"))


def test_a_template_that_opens_the_reasoning_for_one_response_only(tmp_path: Path) -> None:
    row = {"prompt": "1 + 1?", "chosen": "<think>\nEasy.</think>2", "rejected": "3"}
    with pytest.raises(DataError, match="writes one prompt before chosen and another before rejected"):
        load(write_lines(tmp_path / "pairs.jsonl", row), renderer("opens reasoning"))


@pytest.mark.parametrize(
    ("row", "message", "fix"),
    [
        ({"prompt": "a", "chosen": "b"}, "no field 'rejected'; it has 'prompt', 'chosen'", "sources.0.rejected_field"),
        (
            {"chosen": "a", "rejected": "b"},
            "no 'prompt', and 'chosen' is not a list of messages",
            "sources.0.prompt_field",
        ),
        ({**FINE, "chosen": 3}, "expected a text or a list of messages in 'chosen', found int 3", "chosen_field"),
        (
            {**FINE, "chosen": [MORE, HELLO]},
            "'chosen' does not begin with the messages of 'prompt'",
            "take 'prompt' out",
        ),
        ({**FINE, "chosen": [HI]}, "'chosen' does not begin with the messages of 'prompt' and go on", "take 'prompt'"),
        ({**FINE, "prompt": [HI, HELLO]}, "nothing is left to answer", "move"),
    ],
)
def test_rows_of_another_shape_are_always_refused(
    tmp_path: Path, render: Renderer, row: Any, message: str, fix: str
) -> None:
    file = write_lines(tmp_path / "pairs.jsonl", FINE, row)
    with pytest.raises(DataError) as caught:
        load(file, render, bad_rows="skip")
    assert caught.value.message.startswith(f"{file}:2: ")
    assert message in caught.value.message
    assert fix in (caught.value.fix or "")


def test_long_pairs(tmp_path: Path, render: Renderer) -> None:
    row = {"prompt": "Hi", "chosen": "word " * 40, "rejected": "word " * 40 + "again"}
    other = {"prompt": "Hi", "chosen": "word " * 40, "rejected": "No"}
    file = write_lines(tmp_path / "pairs.jsonl", FINE, row, other)
    pairs = load(file, render, max_tokens=40)
    assert [pair.origin[-1] for pair in pairs] == ["1"]
    assert (pairs.report[0].left_out[0].problem, pairs.report[0].left_out[0].count) == (Problem.TOO_LONG, 2)
    with pytest.raises(DataError, match=r"pairs\.jsonl:2: \d+ tokens, the limit is 40(.|\n)*data\.too_long"):
        load(file, render, max_tokens=40, too_long="refuse")
    with pytest.raises(DataError, match=r"pairs\.jsonl:2: chosen and rejected are the same tokens"):
        load(file, render, max_tokens=40, too_long="cut")
    pairs = load(file, render, max_tokens=40, too_long="cut", bad_rows="skip")
    assert [[len(each) for each in pair.sequences] for pair in pairs][1] == [40, len(pairs.samples[1].rejected)]
    assert pairs.report[0].left_out[0].problem is Problem.IDENTICAL


def test_the_report_and_the_fingerprint(tmp_path: Path, render: Renderer) -> None:
    file = write_lines(tmp_path / "pairs.jsonl", FINE, {**FINE, "rejected": "No"})
    pairs = load(file, render)
    (report,) = pairs.report
    every = [each for pair in pairs for each in pair.sequences]
    assert (report.rows, report.kept, report.samples) == (2, 2, 2)
    assert report.tokens == sum(map(len, every))
    assert report.trained == sum(each.trained_tokens for each in every)
    swapped = write_lines(
        tmp_path / "swapped.jsonl",
        *({**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in (FINE, {**FINE, "rejected": "No"})),
    )
    assert load(swapped, render, {"name": "pairs"}).fingerprint != pairs.fingerprint
    assert pairs.order(seed=0).next().content() in {pair.content() for pair in pairs}


def test_pairs_as_verdicts(tmp_path: Path, render: Renderer) -> None:
    pairs = load(write_lines(tmp_path / "pairs.jsonl", FINE), render)
    desirable, undesirable = labelled_samples(pairs)
    assert [*labelled_samples([desirable])] == [desirable]
    assert (desirable.desirable, said(render, desirable)) == (True, "Hello<|im_end|>")
    assert (undesirable.desirable, said(render, undesirable)) == (False, "Go away<|im_end|>")
