"""Rows of published datasets, by the settings that docs/data.md gives; nested fields, transcripts, parts of answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_model import make_tiny_tokenizer

from roll_like.config.data import ConversationData, DataSource, PairData
from roll_like.data.boxed import last_boxed
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.fields import read_transcript, value_at
from roll_like.data.pairs import load_pairs
from roll_like.data.tasks import load_tasks
from roll_like.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Datasets of the hub\n")[2].partition("\n## ")[0]
#: The settings of each dataset, in the order of the page.
SETTINGS = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", SECTION, flags=re.M | re.S)]
USER, ASSISTANT = {"role": "user", "content": "6 × 7?"}, {"role": "assistant", "content": "42"}
OTHER = {"role": "assistant", "content": "41"}

#: A row of each dataset's schema, with values of our own.
PUBLISHED: dict[str, dict[str, Any]] = {
    "openai/gsm8k": {"question": "6 × 7?", "answer": "Six sevens are <<6*7=42>>42.\nNot 4####2, but\n#### 42"},
    "EleutherAI/hendrycks_math": {
        "problem": "6 × 7?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "Not $\\boxed{41}$, for $6 \\cdot 7 = \\boxed{42}$.",
    },
    "HuggingFaceH4/MATH-500": {
        "problem": "6 × 7?",
        "solution": "It is $\\boxed{42}$.",
        "answer": "42",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
    "BytedTsinghua-SIA/DAPO-Math-17k": {
        "data_source": "math_dapo",
        "prompt": [{"content": "6 × 7?", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    },
    "AI-MO/aimo-validation-aime": {"id": 1, "problem": "6 × 7?", "solution": "…", "answer": "42", "url": "https://"},
    "nvidia/OpenMathReasoning": {
        "problem": "6 × 7?",
        "generated_solution": "42",
        "expected_answer": "42",
        "problem_type": "has_answer_extracted",
        "pass_rate_72b_tir": "0.5",
    },
    "AI-MO/NuminaMath-CoT": {"source": "s", "problem": "6 × 7?", "solution": "42", "messages": [USER, ASSISTANT]},
    "allenai/tulu-3-sft-mixture": {"id": "a_1", "messages": [USER, ASSISTANT], "source": "ai2-adapt-dev/a"},
    "HuggingFaceH4/ultrafeedback_binarized": {
        "prompt": "6 × 7?",
        "prompt_id": "f0",
        "chosen": [USER, ASSISTANT],
        "rejected": [USER, OTHER],
        "messages": [USER, ASSISTANT],
        "score_chosen": 8.0,
        "score_rejected": 2.0,
    },
    "Anthropic/hh-rlhf": {
        "chosen": "\n\nHuman: 6 × 7?\n\nAssistant: 42",
        "rejected": "\n\nHuman: 6 × 7?\n\nAssistant: 41",
    },
}


@pytest.fixture(scope="module")
def render() -> Renderer:
    return Renderer(make_tiny_tokenizer())


def test_the_page_has_every_dataset() -> None:
    assert {source["path"] for values in SETTINGS for source in values["data"]["sources"]} == set(PUBLISHED)


@pytest.mark.parametrize("values", SETTINGS, ids=lambda values: values["data"]["sources"][0]["path"].split("/")[1])
def test_rows_as_they_are_published(values: dict[str, Any], render: Renderer, tmp_path: Path) -> None:
    """Each dataset has its question and its answers as the reader means them."""
    pipeline, data = values.get("pipeline", "rlvr"), dict(values["data"])
    sources = []
    for number, source in enumerate(data.pop("sources")):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps(PUBLISHED[source["path"]]))
        # of a file, the split is what its name says
        sources.append({**source, "path": str(file), "subset": None, "split": "train"})
    prompt = render.render([USER], ())
    if pipeline == "rlvr":
        for task in load_tasks([DataSource(**source) for source in sources], render, 999).tasks:
            assert (task.answer, render.decode(task.prompt_ids)) == ("42", prompt)
        return
    count = data.pop("samples_per_step", None) or data.pop("pairs_per_step")
    assert count == 64
    if pipeline == "sft":
        (sample,) = load_conversations(ConversationData(sources=sources, **data), render).samples
        assert render.decode(sample.token_ids[: sample.first_trained]) == prompt
        assert render.decode(sample.token_ids[sample.loss_mask]) == "42<|im_end|>"
    else:
        (pair,) = load_pairs(PairData(sources=sources, **data), render).samples
        assert render.decode(pair.chosen.token_ids[: pair.chosen.first_trained]) == prompt
        answers = [render.decode(each.token_ids[each.loss_mask]) for each in pair.sequences]
        assert answers == ["42<|im_end|>", "41<|im_end|>"]


def tasks(tmp_path: Path, render: Renderer, row: dict[str, Any], **source: Any) -> Any:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    return load_tasks([DataSource(path=str(file), **source)], render, 999).tasks[0]


def test_nested_fields(tmp_path: Path, render: Renderer) -> None:
    row = {"extra": {"question": "Hi?", "answers": [{"text": "a"}, {"text": "b"}]}, "a.b": "whole", "a": {"b": "part"}}
    task = tasks(tmp_path, render, row, prompt_field="extra.question", answer_field="extra.answers.1.text")
    assert (task.messages[0]["content"], task.answer) == ("Hi?", "b")
    assert tasks(tmp_path, render, row, prompt_field="extra.question", answer_field="a.b").answer == "whole"
    with pytest.raises(DataError, match=r"no field 'extra.answers.7.text'; it has 'extra', 'a.b', 'a'"):
        tasks(tmp_path, render, row, prompt_field="extra.question", answer_field="extra.answers.7.text")
    with pytest.raises(LookupError):
        value_at({"a": "text"}, "a.b")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"$\boxed 5$, as said.", "5"),
        (r"\fbox{3}", "3"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right\}}", r"\left\{ x \right\}"),
        ("no box", None),
    ],
)
def test_boxes(text: str, answer: str | None) -> None:
    assert last_boxed(text, bare=True) == answer


def test_answers_that_are_not_there_name_their_row(tmp_path: Path, render: Renderer) -> None:
    row = {"prompt": "?", "answer": "42", "empty": "#### "}
    message = r"rows.jsonl:1: expected an answer after '####' in 'answer', found '42'"
    with pytest.raises(DataError, match=message) as caught:
        tasks(tmp_path, render, row, answer_field="answer", answer_after="####")
    assert "data.sources.0.answer_after" in str(caught.value.fix)
    with pytest.raises(DataError, match="expected an answer after"):
        tasks(tmp_path, render, row, answer_field="empty", answer_after="####")
    with pytest.raises(DataError, match=r"rows.jsonl:1: expected \\boxed"):
        tasks(tmp_path, render, row, answer_field="answer", answer_boxed=True)
    with pytest.raises(ConfigError, match="answer_after says where in `answer_field`"):
        DataSource(path="a.jsonl", answer_after="####")
    with pytest.raises(ConfigError, match="remove one of them"):
        DataSource(path="a.jsonl", answer_field="answer", answer_after="####", answer_boxed=True)
    talk = {"messages": [USER, {"role": "assistant", "content": "So\n#### 42"}]}
    task = tasks(tmp_path, render, talk, prompt_field="messages", answer_field="messages", answer_after="####")
    assert task.answer == "42"


def test_transcripts(tmp_path: Path, render: Renderer) -> None:
    text = "\n\nHuman: Hi\n\nA list:\n\nAssistant: One\n\ntwo Human: x\n\nHuman: \n\nAssistant:"
    assert read_transcript(text) == [
        {"role": "user", "content": "Hi\n\nA list:"},
        {"role": "assistant", "content": "One\n\ntwo Human: x"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
    ]
    assert len(read_transcript(text, begun=True)) == 3
    row = {"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": "Hello", "rejected": "Go away"}
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(row))
    (pair,) = load_pairs(PairData(sources=[{"path": str(file), "transcripts": True}]), render).samples
    prompt = render.render([{"role": "user", "content": "Hi"}], ())
    assert render.decode(pair.chosen.token_ids[: pair.chosen.first_trained]) == prompt


def test_texts_in_place_of_conversations_name_the_remedy(tmp_path: Path, render: Renderer) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(PUBLISHED["Anthropic/hh-rlhf"]))
    with pytest.raises(DataError, match="is not a list of messages") as caught:
        load_pairs(PairData(sources=[{"path": str(file)}]), render)
    assert "data.sources.0.transcripts: true" in str(caught.value.fix)
