from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tiny_model import make_tiny_tokenizer

from roll_like.config.data import DataSource
from roll_like.data.chat import Renderer
from roll_like.data.tasks import load_tasks
from roll_like.errors import DataError


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def load(path: Path | str, tokenizer, limit: int = 200, **settings: object):
    return load_tasks([DataSource(path=str(path), **settings)], Renderer(tokenizer), limit)


def test_a_row_becomes_a_task_tokenised_as_the_chat_template_says(tmp_path, tokenizer):
    file = write_lines(
        tmp_path / "sums.jsonl", {"prompt": "1 + 1?", "answer": 2, "kind": "sum", "kwargs": [{"n": 3}, {"w": "x"}]}
    )
    (task,) = load(file, tokenizer, answer_field="answer", system_prompt="Be short.").tasks
    assert task.messages == ({"role": "system", "content": "Be short."}, {"role": "user", "content": "1 + 1?"})
    assert task.answer == "2"
    assert task.metadata == {
        "answer": 2,
        "kind": "sum",
        "kwargs": [{"n": 3}, {"w": "x"}],
    }  # rows are not forced into one schema
    assert (task.task_id, task.source, task.origin) == ("sums:1", "sums", f"{file}:1")
    expected = tokenizer.apply_chat_template(list(task.messages), add_generation_prompt=True, return_dict=False)
    assert task.prompt_ids.dtype == np.int32
    assert task.prompt_ids.tolist() == expected
    assert tokenizer.decode(expected) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_prompt_may_be_messages(tmp_path, tokenizer):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (task,) = load(write_lines(tmp_path / "chat.jsonl", {"prompt": turns}), tokenizer).tasks
    assert list(task.messages) == turns


def test_blank_lines_do_not_shift_line_numbers(tmp_path, tokenizer):
    file = write_lines(tmp_path / "gaps.jsonl", {"prompt": "a"}, "", {"prompt": "b"})
    assert [task.origin for task in load(file, tokenizer)] == [f"{file}:1", f"{file}:3"]


def test_batches_of_rows_keep_their_order(tmp_path, tokenizer):
    file = write_lines(tmp_path / "many.jsonl", *({"prompt": f"question {n}", "n": n} for n in range(2100)))
    tasks = load(file, tokenizer).tasks
    assert [task.metadata["n"] for task in tasks] == list(range(2100))
    assert tokenizer.decode(tasks[2050].prompt_ids).count("question 2050") == 1


@pytest.mark.parametrize(
    ("row", "message", "fix"),
    [
        ({"question": "a"}, "no field 'prompt'; it has 'question'", r"data\.sources\.0\.prompt_field"),
        ({"prompt": 3}, "expected a text or a list of messages in 'prompt', found int 3", "prompt_field"),
        ({"prompt": " "}, "found str ' '", "prompt_field"),
        ({"prompt": []}, "found list", "prompt_field"),
        ({"prompt": ["hi"]}, "message 0 in 'prompt': expected {role, content}, found str 'hi'", "correct the row"),
        ({"prompt": [{"role": "user"}]}, "expected a text in 'content', found NoneType", "correct the row"),
        ({"prompt": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "besides role and content: tool", "remove"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, "nothing is left to answer", "answer_field: prompt too"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "has no field", "'conversations' holds a conversation"),
        ("{not json", "not JSON", "one JSON object a line"),
        ("[1]", "expected a JSON object, found list", "one JSON object a line"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_key(tmp_path, tokenizer, row, message, fix):
    file = write_lines(tmp_path / "bad.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(DataError) as caught:
        load(file, tokenizer)
    assert caught.value.message.startswith(f"{file}:2: ")
    assert message in caught.value.message
    assert re.search(fix, caught.value.fix or "")


def test_the_answer_field_must_hold_a_text_or_a_number(tmp_path, tokenizer):
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "q", "answer": None})
    with pytest.raises(DataError, match=r"a\.jsonl:1: expected a text or a number in 'answer', found NoneType"):
        load(file, tokenizer, answer_field="answer")
    with pytest.raises(DataError, match=r"a\.jsonl:1: the row has no field 'gold'[^$]*data\.sources\.0\.answer_field"):
        load(file, tokenizer, answer_field="gold")


def test_conversations_end_with_the_reference_answer(tmp_path, tokenizer):
    turns = [("human", "6 × 7?"), ("gpt", "42"), ("human", "And 6 × 6?"), ("gpt", "36")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns], "topic": "products"}
    fields = {"prompt_field": "conversations", "answer_field": "conversations"}
    (task,) = load(write_lines(tmp_path / "talk.jsonl", row), tokenizer, **fields).tasks
    assert [message["role"] for message in task.messages] == ["user", "assistant", "user"]
    assert (task.answer, task.metadata) == ("36", {"topic": "products"})
    for wrong, found in (
        (turns[:3], "found that the last message is of the role 'user'"),
        (turns[:1], "found one message"),
    ):
        row = {"conversations": [{"from": role, "value": text} for role, text in wrong]}
        with pytest.raises(DataError, match=found):
            load(write_lines(tmp_path / "talk.jsonl", row), tokenizer, **fields)


def test_two_system_messages_are_refused(tmp_path, tokenizer):
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    file = write_lines(tmp_path / "s.jsonl", {"prompt": turns})
    assert len(load(file, tokenizer)) == 1
    with pytest.raises(DataError, match=r"system message of its own"):
        load(file, tokenizer, system_prompt="c")


def test_roles_that_the_template_refuses_are_named(tmp_path):
    strict = make_tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    file = write_lines(tmp_path / "r.jsonl", {"prompt": "q"})
    with pytest.raises(DataError, match=r"r\.jsonl:1: the chat template refuses .* roles user: roles must alternate"):
        load(file, strict)


def test_parquet_rows(tmp_path, tokenizer):
    import pyarrow as pa
    import pyarrow.parquet as pq

    chat = [{"role": "user", "content": "a", "name": None}]
    file = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": chat, "n": 1}, {"prompt": chat, "n": None}]), file)
    first, second = load(file, tokenizer).tasks
    assert first.messages == ({"role": "user", "content": "a"},)
    assert (first.metadata, second.metadata) == ({"n": 1}, {"n": None})
    assert second.origin == f"{file}:2"


def test_a_directory_is_its_files_in_order(tmp_path, tokenizer):
    write_lines(tmp_path / "b.jsonl", {"prompt": "second"})
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as stream:
        stream.write('{"prompt": "first"}\n')
    tasks = load(tmp_path, tokenizer, name="both").tasks
    assert [task.messages[0]["content"] for task in tasks] == ["first", "second"]
    assert [task.task_id for task in tasks] == ["both:1", "both:2"]
    assert tasks[1].origin == f"{tmp_path / 'b.jsonl'}:1"


def test_a_dataset_saved_by_datasets(tmp_path, tokenizer):
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list([{"prompt": "x", "n": 7}]).save_to_disk(tmp_path / "saved")
    (task,) = load(tmp_path / "saved", tokenizer).tasks
    assert task.metadata == {"n": 7}


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("missing.jsonl", "there is no file or directory missing.jsonl"),
        ("./missing", "there is no file or directory ./missing"),
        (
            "nobody/nothing",
            r"neither a local file or directory, nor a dataset in the Hugging Face(.|\n)*hf download",
        ),
    ],
)
def test_a_source_that_is_not_there(tokenizer, spelling, message):
    with pytest.raises(DataError, match=message) as caught:
        load(spelling, tokenizer)
    assert "data.sources.0.path" in (caught.value.fix or "")


def test_files_that_cannot_be_read(tmp_path, tokenizer):
    (tmp_path / "table.xlsx").write_text("prompt\na\n")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "binary.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}\n')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but nothing else")
    (tmp_path / "none").mkdir()
    for name, message in {
        "table.xlsx": "expected a file that ends in .jsonl",
        "empty.jsonl": "holds no rows",
        "binary.jsonl": "binary.jsonl:1: the byte 0xff is not UTF-8",
        "broken.parquet": "cannot be read",
        "none": "holds no .jsonl",
    }.items():
        with pytest.raises(DataError, match=message):
            load(tmp_path / name, tokenizer)


def test_long_prompts_are_left_out_and_counted(tmp_path, tokenizer):
    file = write_lines(tmp_path / "l.jsonl", *({"prompt": "word " * n} for n in (1, 50, 2, 60)))
    tasks = load(file, tokenizer, limit=30)
    assert [task.task_id for task in tasks] == ["l:1", "l:3"]
    (report,) = tasks.report
    assert (report.rows, report.kept, report.left_out[0].count) == (4, 2, 2)
    assert report.left_out[0].first.startswith(f"{file}:2 (")
    assert report.longest > 60
    assert "2 of 4 rows; 2 prompts over the limit left out" in str(report)
    with pytest.raises(DataError, match=r"all 4 prompts are longer than 3 tokens(.|\n)*max_prompt_tokens"):
        load(file, tokenizer, limit=3)


def test_fields_that_a_reward_needs(tmp_path, tokenizer):
    one = write_lines(tmp_path / "one.jsonl", {"prompt": "a", "rule": "x", "gold": "1"})
    two = write_lines(
        tmp_path / "two.jsonl", {"prompt": "a", "rule": "y"}, {"prompt": "b", "rule": None}, {"prompt": "c"}
    )
    sources = [DataSource(path=str(one), answer_field="gold"), DataSource(path=str(two))]
    tasks = load_tasks(sources, Renderer(tokenizer), 200, key="evaluation.sources")
    first, second = tasks.sources
    first.require(("answer", "rule"), "reward 'math'")
    first.require((), "reward 'short'")
    with pytest.raises(DataError, match=r"two\.jsonl:2: reward 'r' needs the field 'rule'; it is null"):
        second.require(("rule",), "reward 'r'")
    with pytest.raises(DataError, match=r"two\.jsonl:1: (.|\n)*evaluation\.sources\.1\.answer_field"):
        second.require(("answer",), "reward 'r'")
    with pytest.raises(DataError, match=r"one\.jsonl:1: .*'gone'; it has fields 'rule'"):
        first.require(("gone",), "reward 'r'")


def test_the_fingerprint_follows_the_data_and_not_its_place(tmp_path, tokenizer):
    rows = [{"prompt": "a", "answer": "1", "rule": "x"}, {"prompt": "b", "answer": "2", "rule": "y"}]
    (tmp_path / "moved").mkdir()
    files = [
        write_lines(tmp_path / "here.jsonl", *rows),
        write_lines(tmp_path / "moved" / "d.jsonl", *rows),
        write_lines(tmp_path / "prompt.jsonl", rows[0], rows[1] | {"prompt": "c"}),
        write_lines(tmp_path / "answer.jsonl", rows[0], rows[1] | {"answer": "3"}),
        write_lines(tmp_path / "rule.jsonl", rows[0], rows[1] | {"rule": "z"}),
        write_lines(tmp_path / "order.jsonl", *reversed(rows)),
    ]
    prints = [load(file, tokenizer, answer_field="answer", name="d").fingerprint for file in files]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 5
