"""Files as people have them: JSON, CSV, ShareGPT's and OpenAI's conversations, for every pipeline."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tiny_model import make_tiny_tokenizer

from roll_like.builtin.pipelines.dpo.config import LabelledData
from roll_like.builtin.pipelines.dpo.labelled_data import load_labelled
from roll_like.builtin.pipelines.reward_model.config import ScoredAnswerData, ScoredPairData
from roll_like.builtin.pipelines.reward_model.scored_answers import load_scored_answers
from roll_like.builtin.pipelines.reward_model.scored_pairs import load_scored_pairs
from roll_like.config.data import ConversationData, DataSource, PairData
from roll_like.data import files
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.pairs import load_pairs
from roll_like.data.rows import read_rows
from roll_like.data.tasks import load_tasks
from roll_like.envs.rows import read_task_rows
from roll_like.errors import DataError


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(make_tiny_tokenizer())


def rows(path: Path) -> list[tuple[dict[str, Any], str]]:
    return [
        (row.fields, row.origin.removeprefix(f"{path.parent}/")) for row in read_rows(DataSource(path=str(path)), "s")
    ]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_cells_of_a_table_stay_texts(tmp_path: Path) -> None:
    text = 'prompt,answer,note\r\n"Add 1, and\r\n""2""",007,\r\n\r\nnext,0.50,\u2028x\r\n'
    assert rows(write(tmp_path / "a.csv", text)) == [
        ({"prompt": 'Add 1, and\n"2"', "answer": "007", "note": None}, "a.csv:2"),
        ({"prompt": "next", "answer": "0.50", "note": "\u2028x"}, "a.csv:5"),
    ]
    assert rows(write(tmp_path / "b.tsv", b"\xef\xbb\xbfprompt\tanswer\na, b\t1\n")) == [
        ({"prompt": "a, b", "answer": "1"}, "b.tsv:2")
    ]
    assert rows(write(tmp_path / "c.csv", f"prompt\n{'x' * 200_000}\n"))[0][0] == {"prompt": "x" * 200_000}
    assert rows(write(tmp_path / "d.csv", "")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3\n", "t.csv:3: expected 2 cells, as in the first line, found 1"),
        ("a,b\n1,2,3\n", "t.csv:2: expected 2 cells, as in the first line, found 3"),
        ("a,a\n1,2\n", "t.csv:1: two columns are called 'a'"),
        ('a,b\n"1,2\n', "t.csv:2: not a table: unexpected end of data"),
        (b"a,b\n\xff,1\n", "t.csv:2: the byte 0xff is not UTF-8"),
    ],
)
def test_what_is_no_table(text: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        rows(write(tmp_path / "t.csv", text))
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


@pytest.mark.parametrize(
    "text",
    [
        '[{"a": 1}, {"a": 2}]',
        '{"version": "1", "data": [{"a": 1}, {"a": 2}]}',
        '{"a": 1}\n{"a": 2}\n',
        '\ufeff[{"a": 1}, {"a": 2}]',
    ],
)
def test_json_as_a_list_or_one_object_a_line(text: str, tmp_path: Path) -> None:
    assert rows(write(tmp_path / "a.json", text)) == [({"a": 1}, "a.json:1"), ({"a": 2}, "a.json:2")]


def test_splits_in_one_json_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps({"train": [{"a": 1}, {"a": 2}], "test": [{"a": 3}], "version": 1}))
    assert rows(path) == [({"a": 1}, "a.json:1"), ({"a": 2}, "a.json:2")]
    for split, values in (("test", [3]), ("train[1:]", [2])):
        found = read_rows(DataSource(path=str(path), split=split), "data.sources[0]")
        assert [row.fields["a"] for row in found] == values
    with pytest.raises(DataError, match=r"no split 'dev'; it has 'train', 'test'") as raised:
        list(read_rows(DataSource(path=str(path), split="dev"), "data.sources[0]"))
    assert "data.sources[0].split" in str(raised.value)
    lists = write(tmp_path / "b.json", json.dumps({"questions": [{"a": 1}], "facts": [{"b": 2}]}))
    assert len(rows(lists)) == 1  # a row with two lists


def test_one_object_is_one_row(tmp_path: Path) -> None:
    assert rows(write(tmp_path / "a.json", '{"messages": ["x"]}')) == [({"messages": ["x"]}, "a.json:1")]
    for message in ({"role": "user", "content": "q"}, {"from": "human", "value": "q"}):  # one row, and no list of rows
        for text in (json.dumps({"messages": [message]}), json.dumps({"messages": [message]}, indent=1)):
            for name in ("a.json", "a.jsonl"):
                assert rows(write(tmp_path / name, text)) == [({"messages": [message]}, f"{name}:1")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "a.json:1: expected a JSON object, found int"),
        ("3", "a.json: expected a list of JSON objects, found int"),
        ('[{"a": 1},\n{"a" 2}]', "a.json:2: not JSON: Expecting ':' delimiter"),
    ],
)
def test_what_is_no_json(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        rows(write(tmp_path / "a.json", text))
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


def test_a_directory_of_several_kinds(tmp_path: Path) -> None:
    write(tmp_path / "b.csv", "a\n1\n")
    write(tmp_path / "a.jsonl", '{"a": 0}\n')
    write(tmp_path / "dataset_infos.json", '{"description": "not a row"}')
    found = [row.fields for row in read_rows(DataSource(path=str(tmp_path)), "s")]
    assert found == [{"a": 0}, {"a": "1"}]


SHAREGPT = [
    {"from": "system", "value": "Be short."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello"},
]
OPENAI = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
    {"role": "assistant", "content": "Hello"},
]


@pytest.mark.parametrize(("field", "messages"), [("conversations", SHAREGPT), ("messages", OPENAI)])
def test_conversations_of_others_are_those_with_roles(
    field: str, messages: list[dict[str, Any]], renderer: Renderer, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.json", json.dumps([{field: messages}]))
    plain = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    expected = write(tmp_path / "b.jsonl", json.dumps({"prompt": plain, "completion": "Hello"}))
    data = ConversationData(
        sources=[{"path": str(file), "messages_field": field}, {"path": str(expected)}], max_tokens=99
    )
    found = load_conversations(data, renderer)
    (one,), (other,) = (source.items for source in found.sources)
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.loss_mask.tolist() == other.loss_mask.tolist()
    (task,) = load_tasks(
        [DataSource(path=str(write(tmp_path / "c.json", json.dumps([{field: messages[:2]}]))), prompt_field=field)],
        renderer,
        99,
    ).tasks
    assert list(task.messages) == plain


def test_preferences_of_sharegpt(renderer: Renderer, tmp_path: Path) -> None:
    row = {"conversations": SHAREGPT[:2], "chosen": SHAREGPT[2], "rejected": {"from": "gpt", "value": "No"}}
    file = write(tmp_path / "a.json", json.dumps([row]))
    data = PairData(sources=[{"path": str(file), "prompt_field": "conversations"}], max_tokens=99)
    (pair,) = load_pairs(data, renderer).sources[0].items
    decode = renderer.tokenizer.decode
    assert decode(pair.chosen.token_ids).endswith("<|im_start|>assistant\nHello<|im_end|>")
    assert decode(pair.rejected.token_ids).endswith("<|im_start|>assistant\nNo<|im_end|>")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            {"from": "narrator", "value": "x"},
            "expected one of human, user, gpt, assistant, system, tool, observation in 'from'",
        ),
        ({"from": "human"}, "expected a text in 'content', found NoneType None"),
        ({"role": "user", "content": [{"type": "audio"}]}, "expected parts {type: text, text: …} or {type: image_url"),
    ],
)
def test_messages_that_cannot_be_read(message: dict[str, Any], text: str, renderer: Renderer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", json.dumps({"prompt": [message]}))
    with pytest.raises(DataError) as caught:
        load_tasks([DataSource(path=str(file))], renderer, 99)
    assert text in str(caught.value)


def test_tables_for_every_kind_of_row(renderer: Renderer, tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.csv",
        "prompt,completion,chosen,rejected,label,margin\nHi,Hello,Hello,No,True,0.5\nHo,Hello,Hello,No,0,1\n",
    )
    sources = [{"path": str(file)}]
    (first, second) = load_tasks([DataSource(path=str(file), answer_field="completion")], renderer, 99).tasks
    assert (first.answer, first.metadata["margin"], second.origin) == ("Hello", "0.5", f"{file}:3")
    assert len(load_conversations(ConversationData(sources=sources, max_tokens=99), renderer).sources[0].items) == 2
    assert len(load_pairs(PairData(sources=sources, max_tokens=99), renderer).sources[0].items) == 2
    labelled = load_labelled(LabelledData(sources=sources, max_tokens=99), renderer).sources[0].items
    assert [each.desirable for each in labelled] == [True, False]
    scored = load_scored_pairs(
        ScoredPairData(sources=[{"path": str(file), "margin_field": "margin"}], max_tokens=99), renderer
    )
    assert [pair.margin for pair in scored.sources[0].items] == [0.5, 1.0]
    for field, scores in (("margin", [0.5, 1.0]), ("label", [1.0, 0.0])):
        rows = ScoredAnswerData(sources=[{"path": str(file), "score_field": field}], max_tokens=99)
        answers = load_scored_answers(rows, renderer, loss="bce").sources[0].items
        assert [answer.score for answer in answers] == scores


#: Without the time, so that the tests are called the same in every process.
gzipped = partial(gzip.compress, mtime=0)
ROWS = '{"a": "é \u2028 \u0085 \x1c"}\n{"a": "\U0001f600"}\n'.replace("\x1c", "\\u001c")
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 9\n"
VALUES = [{"a": "é \u2028 \u0085 \x1c"}, {"a": "\U0001f600"}]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", ROWS.encode("utf-8-sig")),
        ("a.ndjson", ROWS.encode()),
        ("A.JSONL", ROWS.encode()),
        ("a.jsonl", ROWS.replace("\n", "\r\n").encode()),
        ("a.jsonl", ROWS.replace("\n", "\n\n \n").encode()),
        ("a.jsonl", ROWS.rstrip().encode()),
        ("a.jsonl", ROWS.encode("utf-16")),
        ("a.jsonl", ROWS.encode("utf-16-le")),
        ("a.jsonl", ROWS.encode("utf-32")),
        ("a.jsonl.gz", gzipped(ROWS.encode())),
        ("a.jsonl.gz", b"".join(gzipped(f"{line}\n".encode()) for line in ROWS.strip().split("\n"))),
        ("a.JSONL.GZ", gzipped(ROWS.encode("utf-16"))),
        ("a.jsonl.bz2", bz2.compress(ROWS.encode())),
        ("a.jsonl.xz", lzma.compress(ROWS.encode())),
        ("a.jsonl.zst", bytes(pyarrow.compress(ROWS.encode(), "zstd"))),
        ("a.json.gz", gzipped(json.dumps(VALUES).encode())),
        ("a.json", json.dumps({"rows": VALUES}, indent=2, ensure_ascii=False).encode("utf-8-sig")),
        ("a.json", "\n".join(json.dumps(row, indent=2) for row in VALUES).encode()),
        ("a.jsonl", json.dumps(VALUES).encode()),
        ("a.jsonl", json.dumps(VALUES, indent=2).encode()),
        ("a.jsonl", "\n".join(json.dumps(row, indent=2) for row in VALUES).encode()),
        ("a.csv.gz", gzipped("a\né \u2028 \u0085 \x1c\n\U0001f600\n".encode())),
        ("a.tsv", "a\né \u2028 \u0085 \x1c\n\U0001f600\n".encode("utf-16")),
    ],
)
def test_encodings_layouts_and_compression(name: str, data: bytes, tmp_path: Path) -> None:
    assert [fields for fields, _ in rows(write(tmp_path / name, data))] == VALUES


def test_a_byte_order_mark_in_the_middle(tmp_path: Path) -> None:
    joined = '{"a": 1}\n'.encode("utf-8-sig") + '{"a": 2}\n'.encode("utf-8-sig")
    assert rows(write(tmp_path / "a.jsonl", joined)) == [({"a": 1}, "a.jsonl:1"), ({"a": 2}, "a.jsonl:2")]


def test_lines_of_objects_over_several_lines(tmp_path: Path) -> None:
    text = '\n{\n "a": 1\n}\n\n{"a": 2} {"a": 3}\n'
    expected = [({"a": 1}, "a.jsonl:2"), ({"a": 2}, "a.jsonl:6"), ({"a": 3}, "a.jsonl:6")]
    assert rows(write(tmp_path / "a.jsonl", text)) == expected


def test_columns_of_tables_of_arrow(tmp_path: Path) -> None:
    table = pyarrow.table({"a": [1, None], "b": [[{"role": "user", "n": None}], None], "c": [b"\xff", b""]})
    expected = [
        ({"a": 1, "b": [{"role": "user", "n": None}], "c": b"\xff"}, 1),
        ({"a": None, "b": None, "c": b""}, 2),
    ]
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    pyarrow.parquet.write_table(table, tmp_path / "b.Parquet", row_group_size=1)
    with pyarrow.ipc.new_file(tmp_path / "c.arrow", table.schema) as file:
        file.write_table(table)
    with pyarrow.ipc.new_stream(tmp_path / "d.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in ("a.parquet", "b.Parquet", "c.arrow", "d.arrow"):
        assert rows(tmp_path / name) == [(fields, f"{name}:{number}") for fields, number in expected]


def test_values_of_many_types_as_datasets_keeps_them(tmp_path: Path) -> None:
    features = datasets.Features({"a": datasets.Json(), "b": datasets.Value("string")})
    datasets.Dataset.from_list([{"a": {"x": [1, "y"]}, "b": "{}"}], features=features).to_parquet(
        tmp_path / "a.parquet"
    )
    assert rows(tmp_path / "a.parquet") == [({"a": {"x": [1, "y"]}, "b": "{}"}, "a.parquet:1")]


def test_large_rows_of_parquet_are_read_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow refuses nested columns of which one batch has more than 2 GiB: 1,024 rows with images of 2 MB."""
    blobs = [[{"bytes": bytes([row]) * 10_000, "path": None}] for row in range(100)]
    table = pyarrow.table({"blobs": blobs, "row": range(100)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    taken: list[int] = []
    whole = pyarrow.parquet.ParquetFile.iter_batches

    def iter_batches(file: Any, rows: int, **options: Any) -> Any:
        taken.append(rows)
        return whole(file, rows, **options)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", iter_batches)
    monkeypatch.setattr(files, "_BYTES_AT_A_TIME", 50_500)
    found = rows(tmp_path / "a.parquet")
    assert [(fields["row"], len(fields["blobs"][0]["bytes"])) for fields, _ in found] == [
        (n, 10_000) for n in range(100)
    ]
    monkeypatch.setattr(files, "_BYTES_AT_A_TIME", 1)
    rows(tmp_path / "a.parquet")
    assert taken[0] in (4, 5)
    assert taken[1:] == [1]


def test_rows_of_parquet_that_share_a_large_value_are_read_fewer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file keeps such a value once, and does not say how large its rows are."""
    blobs = [[{"bytes": b"x" * (1 if row < 50 else 10_000)}] for row in range(100)]
    table = pyarrow.table({"blobs": blobs, "row": range(100)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=80)
    whole, most = pyarrow.parquet.ParquetFile.iter_batches, 65_000

    def iter_batches(file: Any, rows: int, **options: Any) -> Any:
        for batch in whole(file, rows, **options):
            if batch.nbytes > most:
                raise pyarrow.ArrowNotImplementedError(
                    "Nested data conversions not implemented for chunked array outputs"
                )
            yield batch

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", iter_batches)
    monkeypatch.setattr(files, "_AT_A_TIME", 33)
    found = rows(tmp_path / "a.parquet")
    assert [(fields["row"], len(fields["blobs"][0]["bytes"])) for fields, _ in found] == [
        (row, 1 if row < 50 else 10_000) for row in range(100)
    ]
    most = 100
    with pytest.raises(DataError, match="cannot be read: Nested data conversions not implemented"):
        rows(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json", "a.csv", "a.arrow", "a.jsonl.gz", "b.parquet"])
def test_files_without_rows(name: str, tmp_path: Path, renderer: Renderer) -> None:
    if name == "b.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.string())}), tmp_path / name)
    else:
        write(tmp_path / name, "")
    with pytest.raises(DataError, match=rf"{name} holds no rows"):
        load_tasks([DataSource(path=str(tmp_path / name))], renderer, 99)
    write(tmp_path / "z.jsonl", '{"prompt": "a"}\n')
    assert len(load_tasks([DataSource(path=str(tmp_path))], renderer, 99).tasks) == 1  # beside others it is no fault


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": 1, "a": 2}\n', "a.jsonl:2: an object has the key 'a' twice"),
        ("a.jsonl", '{"a": {"b": 1, "b": 2}}\n', "a.jsonl:1: an object has the key 'b' twice"),
        ("a.json", '[{"a": 1},\n\n {"a": 1, "a": 2}]', "a.json:3: an object has the key 'a' twice"),
        ("a.jsonl", '{"a": 1}\n{"a": -Infinity}\n', "a.jsonl:2: -Infinity is no number of JSON"),
        ("a.jsonl", '{"a": 1e308}\n{"a": -1e400}\n', "a.jsonl:2: -1e400 is too large for a number"),
        ("a.jsonl", '{"a": 1}\n{"a": ' + "[" * 200_000, "a.jsonl:2: the value is nested too deeply"),
        ("a.json", '[{"a": 1},\n{"a": ' + "[" * 200_000, "a.json:2: the value is nested too deeply"),
        ("a.jsonl", '{"a": 1}\n7\n', "a.jsonl:2: expected a JSON object, found int"),
        ("a.jsonl", '{"a": 1} {"a": 2}\n', "a.jsonl:1: not JSON: '{\"a\": 2}' after the object"),
        ("a.jsonl", '{"a": 1}\n{"a": 2\n', "a.jsonl:2: not JSON: Expecting ',' delimiter"),
        ("a.jsonl", '{"a": 1\n{"a": 2}\n', "a.jsonl:1: not JSON: Expecting ',' delimiter"),
        ("a.jsonl", '{"a": 1\n', "a.jsonl:1: not JSON: Expecting ',' delimiter"),
        ("a.jsonl", '{\n "a": 1,\n "b" 2\n}\n', "a.jsonl:3: not JSON: Expecting ':' delimiter"),
        ("a.jsonl", '[{"a": 1},\n{"b" 2}]\n', "a.jsonl:2: not JSON: Expecting ':' delimiter"),
        ("a.jsonl", '{"a": 1}\n{"a": "x\ty"}\n', "a.jsonl:2: not JSON: Invalid control character"),
        ("a.jsonl", '{"a": 1}\n' + "\0" * 512, "a.jsonl:2: not JSON: Expecting value"),
        ("a.jsonl", '{"a": 1}\n{"a": "é"}\n'.encode("latin-1"), "a.jsonl:2: the byte 0xe9 is not UTF-8"),
        ("a.json", '[{"a": 1},\n{"a": "é"}]'.encode("latin-1"), "a.json:2: the byte 0xe9 is not UTF-8"),
        ("a.jsonl", ROWS.encode("utf-16")[:-1], "a.jsonl cannot be read"),
        ("a.jsonl.gz", gzipped(ROWS.encode())[:-9], "a.jsonl.gz cannot be read"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz cannot be read"),
        ("a.jsonl.bz2", bz2.compress(ROWS.encode())[:-9], "a.jsonl.bz2 cannot be read"),
        ("a.jsonl.xz", lzma.compress(ROWS.encode())[:-9], "a.jsonl.xz cannot be read"),
        ("a.jsonl.zst", b"no zstd at all", "a.jsonl.zst cannot be read"),
        ("a.parquet", b"PAR1", "a.parquet cannot be read"),
        ("a.arrow", b"ARROW1", "a.arrow cannot be read"),
        ("a.parquet.gz", b"", "a.parquet.gz: expected a file that ends in .jsonl"),
        ("a.csv", LFS, "a.csv is a pointer of Git LFS"),
        ("a.jsonl", LFS, "a.jsonl is a pointer of Git LFS"),
        ("a.parquet", LFS, "a.parquet is a pointer of Git LFS"),
        ("a.zip", b"", "a.zip: expected a file that ends in .jsonl"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(name: str, data: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        rows(write(tmp_path / name, data))
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


def test_what_python_writes_for_nothing(tmp_path: Path, renderer: Renderer) -> None:
    file = write(tmp_path / "a.jsonl", '{"prompt": "q", "answer": NaN}\n')
    assert rows(file)[0][0] == {"prompt": "q", "answer": None}
    with pytest.raises(DataError, match=r"a\.jsonl:1: expected a text or a number in 'answer'"):
        load_tasks([DataSource(path=str(file), answer_field="answer")], renderer, 99)


HALF = '{"prompt": "a", "completion": "b"}\n{"prompt": "x \\ud83d", "completion": "b"}\n'
DEEP = '{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "b", "c": ' + "[" * 150 + "]" * 150 + "}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HALF, "'prompt' holds half of a surrogate pair, '\\ud83d', which is no character"),
        (
            HALF.replace('"prompt": "x \\ud83d"', '"prompt": "x", "m": {"\\uDC00": [1]}'),
            "'m' holds half of a surrogate",
        ),
        (HALF.replace("\\ud83d", "\\ude00\\ud83d"), "'prompt' holds half of a surrogate pair"),
        (DEEP, "'c' is nested deeper than 100 levels"),
    ],
)
def test_text_that_no_tokenizer_takes(text: str, message: str, renderer: Renderer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", text)
    with pytest.raises(DataError) as caught:
        load_tasks([DataSource(path=str(file))], renderer, 99)
    assert caught.value.message.startswith(f"{file}:2: {message}")
    with pytest.raises(DataError, match=r"a\.jsonl:2: "):
        read_task_rows(str(file), ("prompt",))
    data = ConversationData(sources=[{"path": str(file)}], max_tokens=99)
    with pytest.raises(DataError, match=r"a\.jsonl:2: "):
        load_conversations(data, renderer)
    (report,) = load_conversations(data.model_copy(update={"bad_rows": "skip"}), renderer).report
    assert (report.kept, [(left.problem.name, left.count) for left in report.left_out]) == (1, [("TEXT", 1)])


def test_pairs_of_escapes_and_control_characters_are_text(renderer: Renderer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"prompt": "\\ud83d\\ude00 \\u0000 \\u001b[31m", "x": "\\ud83d\\ude00"}\n')
    (task,) = load_tasks([DataSource(path=str(file))], renderer, 99).tasks
    assert task.messages[0]["content"] == "\U0001f600 \0 \x1b[31m"


def test_columns_of_several_types_in_several_files(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"answer": [1]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"answer": ["one"], "more": [[1]]}), tmp_path / "b.parquet")
    found = [row.fields for row in read_rows(DataSource(path=str(tmp_path)), "s")]
    assert found == [{"answer": 1}, {"answer": "one", "more": [1]}]
