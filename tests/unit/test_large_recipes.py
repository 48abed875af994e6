"""Runs for large GPUs to start from: each fits by its plan, and reads rows as the public data sets have them."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from loose_modules import load_module
from published_models import cache_published_models

from roll_like import cli
from roll_like.builtin.rewards.code import Code
from roll_like.builtin.rewards.math import Math
from roll_like.config.load import load_config
from roll_like.data.rows import read_rows
from roll_like.errors import DataError
from roll_like.tools.search import SearchIndex, read_corpus
from roll_like.types import Task

ROOT = Path(__file__).resolve().parents[2]

#: Rows of HotpotQA's subset `distractor`, with two paragraphs in the place of ten.
HOTPOT = [
    {
        "id": f"5a8b{number}",
        "question": question,
        "answer": answer,
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": ["Ed Wood (film)"], "sent_id": [0]},
        "context": {
            "title": ["Ed Wood (film)", title],
            "sentences": [["Ed Wood is a 1994 film.", " It is about a director."], [f"{title} was born in {year}."]],
        },
    }
    for number, (question, answer, title, year) in enumerate(
        [
            ("Who directed Ed Wood?", "Tim Burton", "Tim Burton", 1958),
            ("Who was born in 1966?", "Scott D.", "Scott D.", 1966),
        ]
    )
]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hugging Face cache with the published config.json of models, and nothing else."""
    cache_published_models(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def make_search_data() -> Callable[[list[str]], None]:
    """`scripts/make_search_data.py`."""
    main: Callable[[list[str]], None] = runpy.run_path(str(ROOT / "scripts" / "make_search_data.py"))["main"]
    return main


def write_hotpot(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(folder / "rows.jsonl")
    return ["--train", path, "--eval", path, "--folder", str(folder / "search_data")]


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("rlvr_gsm8k_1gpu_24gb", "Memory of GPU 0 of 24.0 GiB"),
        ("rlvr_8gpu_colocated", "Memory of each of the GPUs 0-7 of 79.6 GiB"),
        ("rlvr_code_8gpu", "Memory of each of the GPUs 0-7 of 79.6 GiB"),
        ("agentic_search_8gpu", "Memory of each of the GPUs 0-7 of 79.6 GiB"),
        ("vision_geometry_8gpu", "Memory of each of the GPUs 0-7 of 79.6 GiB"),
        ("rlvr_moe_16gpu", "Memory of each of the GPUs 0-15 of 79.6 GiB"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_each_fits_on_its_gpus_by_the_plan(
    name: str,
    gpus: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    make_search_data: Callable[[list[str]], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_search_data(write_hotpot(tmp_path, HOTPOT))
    code = cli.main(["run", "--config", str(ROOT / "configs" / f"{name}.yaml"), "--check", f"output_dir={tmp_path}"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert gpus in shown.out


def test_questions_and_paragraphs_of_hotpotqa(tmp_path: Path, make_search_data: Callable[[list[str]], None]) -> None:
    make_search_data(write_hotpot(tmp_path, HOTPOT))
    rows = [json.loads(line) for line in (tmp_path / "search_data" / "train.jsonl").read_text().splitlines()]
    assert rows[0] == {"prompt": "Who directed Ed Wood?", "answer": "Tim Burton"}
    corpus = read_corpus(tmp_path / "search_data" / "corpus.jsonl")
    assert [passage.title for passage in corpus] == ["Ed Wood (film)", "Tim Burton", "Scott D."]  # each once
    assert corpus[0].text == "Ed Wood is a 1994 film. It is about a director."
    assert SearchIndex(corpus).search("born 1966", 1)[0][0].title == "Scott D."
    with pytest.raises(DataError, match=r"rows\.jsonl:1: expected the fields question, answer and context"):
        make_search_data(write_hotpot(tmp_path, [{"question": "Who?"}]))


#: A row of SWE-bench's schema, as the hub has it.
SWE = {
    "instance_id": "Org__sums-1",
    "repo": "Org/sums",
    "base_commit": "0" * 40,
    "problem_statement": "add(3, 2) is 1.\n",
    "hints_text": "",
    "created_at": "2026-01-01",
    "version": "1",
    "environment_setup_commit": "0" * 40,
    "patch": "diff --git a/sums.py b/sums.py\n",
    "test_patch": "diff --git a/tests/test_a.py b/tests/test_a.py\n--- a/x\ndiff --git a/tests/b.txt b/tests/b.txt\n",
    "FAIL_TO_PASS": '["tests/test_sums.py::test_add"]',
    "PASS_TO_PASS": "[]",
}


def swe_rows(folder: Path, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    """What `scripts/make_swe_data.py` makes of training rows."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(folder / "rows.jsonl")
    main = runpy.run_path(str(ROOT / "scripts" / "make_swe_data.py"))["main"]
    main(["--train", path, "--eval", path, "--folder", str(folder / "swe_data")])
    return [json.loads(line) for line in (folder / "swe_data" / "train.jsonl").read_text().splitlines()]


def test_issues_of_swe_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = {**SWE, "FAIL_TO_PASS": ["a.py::b"], "PASS_TO_PASS": ["a.py::c"], "docker_image": "swerebench/image:1"}
    django = {**SWE, "repo": "django/django", "FAIL_TO_PASS": '["test_add (sums.tests.Sums)"]'}
    issue, other = swe_rows(tmp_path, SWE, django, named)
    assert issue["image"] == "docker.io/xingyaoww/sweb.eval.x86_64.org_s_sums-1:latest"
    asked = "The repository in /testbed has this issue:\n\n<issue>\nadd(3, 2) is 1.\n</issue>"
    assert issue["prompt"].startswith(asked)
    assert issue["test_files"] == ["tests/b.txt", "tests/test_a.py"]
    assert (issue["fail_to_pass"], issue["pass_to_pass"]) == (["tests/test_sums.py::test_add"], [])
    assert (other["image"], other["pass_to_pass"]) == ("swerebench/image:1", ["a.py::c"])
    evaluated = json.loads((tmp_path / "swe_data" / "eval.jsonl").read_text().splitlines()[0])
    assert evaluated["image"] == "docker.io/swebench/sweb.eval.x86_64.org_1776_sums-1:latest"
    told = "train.jsonl: 2 issues\n  left out, because their tests have no names of pytest: 1 (django/django 1)"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"test_patch": None}, r"rows\.jsonl:1: expected the fields instance_id, .*; test_patch is missing"),
        ({"FAIL_TO_PASS": "a.py::b"}, r"rows\.jsonl:1: expected names of tests in FAIL_TO_PASS, found 'a\.py::b'"),
        ({"PASS_TO_PASS": [1]}, r"expected names of tests in PASS_TO_PASS, found '\[1\]'"),
    ],
)
def test_rows_of_another_schema_than_swe_bench_s(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        swe_rows(tmp_path, {**SWE, **changed})


def task_of(config: str, row: dict[str, Any], tmp_path: Path) -> Task:
    """A row of a recipe's first source, as its rewards see it."""
    import numpy as np

    source = load_config(ROOT / "configs" / f"{config}.yaml").data.sources[0]  # type: ignore[attr-defined]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    local = source.model_copy(update={"path": str(tmp_path / "rows.jsonl"), "subset": None})
    (read,) = read_rows(local, "data.sources.0")
    return Task(
        task_id="0",
        source="s",
        domain="s",
        messages=(),
        prompt_ids=np.zeros(1, np.int32),
        answer=read.fields.get(source.answer_field or ""),
        metadata=read.fields,
        origin=read.origin,
    )


def test_rows_of_deepcoder_have_tests(tmp_path: Path) -> None:
    """`tests` is JSON text; each test names its type."""
    tests = [{"type": "stdin_stdout", "input": "3 4\n", "output": "7\n"}]
    task = task_of("rlvr_code_8gpu", {"problem": "Add two numbers.", "tests": json.dumps(tests)}, tmp_path)
    config = load_config(ROOT / "configs" / "rlvr_code_8gpu.yaml")
    Code(config.rewards.use[0]).check_row(task)  # type: ignore[attr-defined]
    assert task.metadata["problem"] == "Add two numbers."


def test_rows_of_geometry3k_have_answers(tmp_path: Path) -> None:
    row = {"images": ["diagram.png"], "problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }"}
    config = load_config(ROOT / "configs" / "vision_geometry_8gpu.yaml")
    Math(config.rewards.use[0]).check_row(task_of("vision_geometry_8gpu", row, tmp_path))  # type: ignore[attr-defined]


class OfVerifiers:
    """In the place of every class of verifiers, which has an environment of its own."""

    TaskError: ClassVar[type[Exception]] = RuntimeError

    def __class_getitem__(cls, item: Any) -> type:
        return cls


def test_what_resolves_an_issue(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TaskConfig", "TaskData", "Task", "State", "Trace", "Runtime", "TasksetConfig", "Taskset", "TaskError")
    package, version = ModuleType("verifiers"), ModuleType("verifiers.v1")
    vars(version).update(dict.fromkeys(names, OfVerifiers), reward=lambda function: function)
    vars(package).update(v1=version)
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", version)
    passed = load_module(ROOT / "examples" / "swe" / "swe_tasks.py").passed_tests
    head = "PASSED a.py::printed\n===== short test summary info ====="
    lines = [
        *("PASSED a.py::one", "PASSED a.py::more[1 + 1]", "PASSED a.py::more[1 + 2]", "FAILED a.py::two - it is 0"),
        *("PASSED a.py::some[1 + 1]", "FAILED a.py::some[1 + 2] - 3", "XFAIL a.py::known", "XPASS a.py::mended"),
        *("ERROR a.py::broken - no fixture", "SKIPPED [1] a.py:3: not here", "===== 9 passed in 0.1s ====="),
    ]
    found = passed("\n".join([head, *lines]))
    whole = {"a.py::one", "a.py::more[1 + 1]", "a.py::more[1 + 2]", "a.py::some[1 + 1]", "a.py::known"}
    assert found == whole | {"a.py::more[1"}  # names up to a blank, as in the rows of SWE-bench
    assert passed("no summary") == set()
