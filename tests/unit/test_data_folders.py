"""Which files of a folder are read: splits and subsets, as names, a README.md or `datasets` say them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from roll_like.config.data import DataSource
from roll_like.data.content import files_hash
from roll_like.data.rows import read_rows
from roll_like.errors import DataError

#: What a test asks for when a folder has to be refused.
Refused = str


def lay(folder: Path, *names: str) -> Path:
    """Write files of one row each, which says which file it is of."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.table({"of": [name]}), path)
        elif name.endswith((".csv", ".CSV")):
            path.write_text(f"of\n{name}\n")
        else:
            path.write_text(json.dumps({"of": name}) + "\n")
    return folder


def read(path: Path, **source: Any) -> list[Any]:
    return [row.fields["of"] for row in read_rows(DataSource(path=str(path), **source), "data.sources.0")]


TWO = ("train.jsonl", "test.jsonl")
SHARDS = ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet")
SUBSETS = (
    "main/train-00000-of-00001.parquet",
    "main/test-00000-of-00001.parquet",
    "socratic/train-00000-of-00001.parquet",
)
FEEDBACK = tuple(f"data/{name}-00000-of-00001.parquet" for name in ("train_prefs", "train_sft", "test_prefs"))
EXPORTED = ("main/train/0000.parquet", "main/test/0000.parquet", "socratic/train/0000.parquet")


@pytest.mark.parametrize(
    ("files", "source", "found"),
    [
        (TWO, {}, ["train.jsonl"]),
        (TWO, {"split": "test"}, ["test.jsonl"]),
        (TWO, {"split": "train+test"}, ["train.jsonl", "test.jsonl"]),
        (TWO, {"split": "validation"}, "no split 'validation'; the splits that names of its files say: test, train"),
        (("TRAIN.JSONL", "Test.CSV"), {"split": "test"}, ["Test.CSV"]),
        (("gsm8k_train.jsonl", "math-train.jsonl", "gsm8k_test.jsonl"), {}, ["gsm8k_train.jsonl", "math-train.jsonl"]),
        (("train/a.jsonl", "train/b.jsonl", "test/a.jsonl"), {}, ["train/a.jsonl", "train/b.jsonl"]),
        (("train/a.jsonl", "train/b.jsonl", "test/a.jsonl"), {"split": "test"}, ["test/a.jsonl"]),
        (("my_train_set/a.jsonl", "my_test_set/a.jsonl"), {"split": "test"}, ["my_test_set/a.jsonl"]),
        (("training_data/train.jsonl", "training_data/test.jsonl"), {"split": "test"}, ["training_data/test.jsonl"]),
        (("train_0.csv", "train_1.csv", "test_0.csv"), {}, ["train_0.csv", "train_1.csv"]),
        (SHARDS, {}, list(SHARDS[:2])),
        (SHARDS, {"split": "test"}, [SHARDS[2]]),
        ((*SHARDS, "metadata.csv"), {}, list(SHARDS[:2])),
        (FEEDBACK, {"split": "train_prefs"}, [FEEDBACK[0]]),
        (FEEDBACK, {}, "no split 'train'; the splits that names of its files say: test_prefs, train_prefs, train_sft"),
        (("train_sft.jsonl", "train_prefs.jsonl"), {"split": "train_sft"}, ["train_sft.jsonl"]),
        (("val.jsonl", "train.jsonl"), {"split": "validation"}, ["val.jsonl"]),
        (("dev-00000-of-00001.parquet", "train.csv"), {"split": "validation"}, ["dev-00000-of-00001.parquet"]),
        (("validation.jsonl", "train.jsonl"), {"split": "dev"}, ["validation.jsonl"]),
        (("eval.jsonl", "test.jsonl"), {"split": "test"}, ["test.jsonl"]),
        (("eval.jsonl", "test.jsonl"), {"split": "eval"}, ["eval.jsonl"]),
        (("val.jsonl", "dev.jsonl"), {"split": "validation"}, "has the splits dev and val, and data.sources.0.split"),
        (("b.jsonl", "a.csv"), {}, ["a.csv", "b.jsonl"]),
        (("part-00000-of-00002.parquet", "part-00001-of-00002.parquet"), {}, None),
        (("b.jsonl", "a.csv"), {"split": "test"}, "no split 'test'; the splits that names of its files say: none"),
        (("test.jsonl",), {}, "no split 'train'; the splits that names of its files say: test"),
        ((*TWO, "other.jsonl"), {}, "others whose split is not clear from their names: other.jsonl"),
        (("train.jsonl", "train_and_test.jsonl"), {}, "not clear from their names: train_and_test.jsonl"),
        (("train.jsonl", "train.csv"), {}, "train.csv and {folder}/train.jsonl have one name"),
        (("train/a.jsonl", "test/a.jsonl", "custom/b.jsonl"), {"split": "custom"}, ["custom/b.jsonl"]),
        (("train/a.jsonl", "test/a.jsonl", "custom/b.jsonl"), {}, ["train/a.jsonl"]),
        (("x/train/a.jsonl", "x/custom/b/c.jsonl"), {"split": "custom"}, ["x/custom/b/c.jsonl"]),
        ((*TWO, "custom.jsonl"), {"split": "custom"}, ["custom.jsonl"]),
        (("train.json", "test.jsonl", "vocab.json"), {}, ["train.json"]),
        (SHARDS[1:], {}, "train-…-of-00002: 1 of 2 files are there, and 00000 is not"),
        (SHARDS[1:], {"split": "test"}, [SHARDS[2]]),
        (SUBSETS, {}, "holds several subsets: main, socratic"),
        (SUBSETS, {"subset": "main"}, [SUBSETS[0]]),
        (SUBSETS, {"split": "test"}, [SUBSETS[1]]),
        (SUBSETS, {"subset": "other"}, "has no subset 'other'"),
        (EXPORTED, {}, "holds several subsets: main, socratic"),
        (EXPORTED, {"subset": "socratic"}, [EXPORTED[2]]),
        (("a/train.jsonl", "b/train.jsonl"), {}, ["a/train.jsonl", "b/train.jsonl"]),
    ],
)
def test_splits_and_subsets_by_names(
    files: tuple[str, ...], source: dict[str, str], found: list[str] | Refused | None, tmp_path: Path
) -> None:
    folder = lay(tmp_path, *files)
    if isinstance(found, str):
        with pytest.raises(DataError) as caught:
            read(folder, **source)
        assert found.format(folder=folder) in caught.value.message
    else:
        assert read(folder, **source) == list(found or files)


@pytest.mark.parametrize(
    "name",
    [
        ".hidden.jsonl", ".ipynb_checkpoints/train-checkpoint.jsonl", "train.jsonl~", ".train.jsonl.swp",
        "#train.jsonl#", ".#train.jsonl", "~$train.csv", "_SUCCESS", "_metadata.jsonl", "__MACOSX/train.jsonl",
        "dataset_info.json",
        "state.json", "dataset_infos.json", "LICENSE", "notes.txt", ".cache/huggingface/train.jsonl", "train.jsonl.bak",
        ".git/train.jsonl",
    ],
)  # fmt: skip
def test_files_that_are_no_rows_are_passed_over(name: str, tmp_path: Path) -> None:
    lay(tmp_path, "train.jsonl", name)
    assert read(tmp_path) == ["train.jsonl"]


@pytest.mark.parametrize("name", ["train copy.jsonl", "train (1).jsonl", "train_2.jsonl"])
def test_a_copy_of_a_file_is_not_read_twice(name: str, tmp_path: Path) -> None:
    lay(tmp_path, "train.jsonl", name)
    for file in ("train.jsonl", name):
        (tmp_path / file).write_text('{"of": "a"}\n')
    with pytest.raises(DataError, match="hold the same rows"):
        read(tmp_path)
    (tmp_path / name).write_text('{"of": "b"}\n')  # of the same size
    assert sorted(read(tmp_path)) == ["a", "b"]


def test_links_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    blobs = lay(tmp_path / "blobs", "0123abc.jsonl")
    folder = tmp_path / "snapshot"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").symlink_to(blobs / "0123abc.jsonl")
    (folder / "more").symlink_to(lay(tmp_path / "elsewhere", "train.csv"))
    (folder / "data" / "up").symlink_to(folder)
    assert read(folder) == ["0123abc.jsonl", "train.csv"]


def test_a_folder_named_as_a_file(tmp_path: Path) -> None:
    lay(tmp_path / "train.parquet", "part-0.parquet", "_SUCCESS")
    assert read(tmp_path / "train.parquet") == ["part-0.parquet"]
    assert read(tmp_path) == ["part-0.parquet"]


def test_a_folder_whose_own_name_is_its_split(tmp_path: Path) -> None:
    assert read(lay(tmp_path / "test", "a.jsonl"), split="test") == ["a.jsonl"]


CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: first/*
  - split: test
    path: [second/a.jsonl, "second/deep/**"]
- config_name: socratic
  data_dir: third
  data_files: "*.jsonl"
- config_name: by_name
  data_dir: fourth
---
# A dataset
"""


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ({"subset": "main"}, ["first/x.jsonl", "first/y.jsonl"]),
        ({"subset": "main", "split": "test"}, ["second/a.jsonl", "second/deep/b.jsonl"]),
        ({"subset": "socratic"}, ["third/test.jsonl"]),
        ({"subset": "by_name", "split": "test"}, ["fourth/test.jsonl"]),
        ({}, "has several subsets: main, socratic, by_name"),
        ({"subset": "other"}, "has no subset 'other'; it has main, socratic, by_name"),
        ({"subset": "main", "split": "dev"}, "no split 'dev'; the splits that names of its files say: test, train"),
    ],
)
def test_a_card_says_subsets_and_splits(source: dict[str, str], found: list[str] | Refused, tmp_path: Path) -> None:
    names = ("first/x.jsonl", "first/y.jsonl", "second/a.jsonl", "second/other.jsonl", "second/deep/b.jsonl")
    folder = lay(tmp_path, *names, "third/test.jsonl", "fourth/test.jsonl", "fourth/train.jsonl")
    (folder / "README.md").write_text(CARD)
    if isinstance(found, str):
        with pytest.raises(DataError) as caught:
            read(folder, **source)
        assert found in caught.value.message
    else:
        assert read(folder, **source) == found


@pytest.mark.parametrize(
    "head", ["", "# Title\n", "---\nlicense: mit\n---\n", "---\nno end\n", "\ufeff---\na: 1\n---\n"]
)
def test_a_card_that_says_nothing(head: str, tmp_path: Path) -> None:
    (lay(tmp_path, *TWO) / "README.md").write_text(head)
    assert read(tmp_path, split="test") == ["test.jsonl"]


def test_the_default_subset_of_a_card(tmp_path: Path) -> None:
    lay(tmp_path, "a.jsonl", "b.jsonl")
    configs = "- config_name: x\n  data_files: a.jsonl\n- config_name: y\n  data_files: b.jsonl\n  default: true\n"
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert read(tmp_path) == ["b.jsonl"]


def saved(path: Path) -> Path:
    """Return a folder that `DatasetDict.save_to_disk` wrote."""
    splits = {
        name: datasets.Dataset.from_list([{"of": f"{name} {n}"} for n in range(10)]) for name in ("train", "test")
    }
    datasets.disable_progress_bars()
    datasets.DatasetDict(splits).save_to_disk(path)
    return path


@pytest.mark.parametrize(
    ("make", "source", "found"),
    [
        (saved, {}, [f"train {n}" for n in range(10)]),
        (saved, {"split": "test"}, [f"test {n}" for n in range(10)]),
        (saved, {"split": "train[:2]+test[-1:]"}, ["train 0", "train 1", "test 9"]),
        (saved, {"split": "dev"}, "no split 'dev'; the splits that names of its files say: test, train"),
        (lambda path: saved(path) / "test", {}, [f"test {n}" for n in range(10)]),
    ],
)
def test_what_datasets_saved(
    make: Callable[[Path], Path], source: dict[str, str], found: list[str] | Refused, tmp_path: Path
) -> None:
    folder = make(tmp_path / "saved")
    if isinstance(found, str):
        with pytest.raises(DataError) as caught:
            read(folder, **source)
        assert found in caught.value.message
    else:
        assert read(folder, **source) == found


@pytest.mark.parametrize(
    ("split", "found"),
    [
        ("train[:3]", [0, 1, 2]),
        ("train[8:]", [8, 9]),
        ("train[-2:]", [8, 9]),
        ("train[2:4]", [2, 3]),
        ("train[:20%]", [0, 1]),
        ("train[50%:70%]", [5, 6]),
        ("train[:1] + train[9:]", [0, 9]),
        ("train[3]", "is no part of a split"),
        ("train[a:b]", "is no part of a split"),
        ("train[:200]", list(range(10))),
        ("train+test", "is a file, and data.sources.0.split: train+test names several"),
        ("test", None),
    ],
)
def test_parts_of_a_file(split: str, found: list[int] | Refused | None, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"of": number}) + "\n" for number in range(10)))
    if isinstance(found, str):
        with pytest.raises(DataError) as caught:
            read(file, split=split)
        assert found in caught.value.message
    else:
        assert read(file, split=split) == (list(range(10)) if found is None else found)


def test_a_file_whose_name_says_another_split(tmp_path: Path) -> None:
    lay(tmp_path, *TWO)
    assert read(tmp_path / "test.jsonl") == ["test.jsonl"]
    assert read(tmp_path / "test.jsonl", split="test") == ["test.jsonl"]
    with pytest.raises(DataError, match=r"train.jsonl is not of the split 'test', as its name says"):
        read(tmp_path / "train.jsonl", split="test")


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path / "a", "train.zip", "table.xlsx")
    with pytest.raises(DataError, match=r"holds no \.jsonl.*file; it has table.xlsx, train.zip"):
        read(tmp_path / "a")
    closed = lay(tmp_path / "b", "train.jsonl", "closed/train.jsonl") / "closed"

    def scandir(path: str) -> Any:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", scandir)
    with pytest.raises(DataError, match=r"b cannot be read: Permission denied"):
        read(closed.parent)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "caf\udce9.jsonl").write_text('{"of": 1}\n')  # written where names were Latin-1
    with pytest.raises(DataError, match=r"caf.udce9\.jsonl' is not UTF-8"):
        read(tmp_path)
    assert files_hash(tmp_path)


def test_a_home_that_is_not_known() -> None:
    with pytest.raises(DataError, match=r"there is no file or directory ~no\.such\.user/a\.jsonl"):
        read(Path("~no.such.user/a.jsonl"))


def test_a_pattern_is_no_path(tmp_path: Path) -> None:
    lay(tmp_path, *TWO)
    with pytest.raises(DataError) as caught:
        read(tmp_path / "*.jsonl")
    assert "name a directory" in str(caught.value)
