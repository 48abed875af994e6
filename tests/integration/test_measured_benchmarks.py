"""Benchmarks on real engines, with rows of their published schemas: in a resumed run, and by `roll-like eval`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmark_protocols import ROWS
from hygiene import nothing_left
from run_config import command_here, read_lines, run_here, write_run

from roll_like.config.benchmarks import benchmark_names, read_benchmark

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.usefixtures("warm_ray")]

VLLM = {"type": "vllm", "kv_cache_gib": 0.2, "max_running": 32}
TESTS = json.dumps([{"input": "3\n", "output": "6\n", "testtype": "stdin"}])
#: A few rows of every benchmark, by split.
PUBLISHED: dict[str, Mapping[str, Sequence[Mapping[str, Any]]]] = {
    **ROWS,
    "math500": {"test": [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]},
    "aime24": {"train": [{"Problem": f"What is {n} + 1?", "Answer": n + 1} for n in range(3)]},
    "aime25": {"test": [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]},
    **{
        key: {"train": [{"problem_idx": n, "problem": f"What is {n} + 1?", "answer": n + 1} for n in range(2)]}
        for key in ("aime26", "brumo25", "hmmt_feb25", "hmmt_feb26", "hmmt_nov25")
    },
    **{
        key: {"test": [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(2)]}
        for key in ("amc23", "minervamath")
    },
    "olympiadbench": {
        "train": [
            {
                "question": "What is $x$ in $x^2 = 1$?",
                "final_answer": ["$1$", "$-1$"],
                "answer_type": "Numerical",
                "is_multiple_answer": True,
                "unit": None,
            }
        ]
    },
    "mmlu": {
        "test": [
            {"question": "2+2?", "subject": "algebra", "choices": ["3", "4", "5", "6"], "answer": n} for n in (1, 2)
        ]
    },
    "supergpqa": {
        "train": [{"question": "Which?", "options": ["red", "blue"], "answer": "blue", "answer_letter": "B"}]
    },
    "gpqa": {
        "train": [
            {
                "Question": "Which gas is lightest?",
                "Correct Answer": "Hydrogen",
                "Incorrect Answer 1": "Helium",
                "Incorrect Answer 2": "Neon",
                "Incorrect Answer 3": "Argon",
            }
        ]
    },
    "livecodebench": {
        "test": [
            {
                "question_content": "Read a number and print its double.",
                "starter_code": "",
                "public_test_cases": TESTS,
                "private_test_cases": TESTS,
                "metadata": "{}",
            }
        ]
    },
}


def write_rows(folder: Path, name: str) -> Path:
    """Write a benchmark's rows as a directory with a file for each split; subsets each have a directory in it."""
    subsets = read_benchmark(name).subsets
    for split, rows in PUBLISHED[name].items():
        for subset in subsets or ("",):
            chosen = [row for row in rows if row.get("subset", "") == subset]
            place = folder / name / subset
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return folder / name


@pytest.fixture
def wide_model(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with room for prompts of many examples."""
    folder = tmp_path / "wide"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    return folder


def test_a_run_measures_benchmarks_and_is_resumed(tmp_path: Path, tiny_model: Path) -> None:
    short = {"max_prompt_tokens": 256, "max_response_tokens": 12}
    config = write_run(
        tmp_path,
        tiny_model,
        inference=VLLM,
        evaluation={
            "every": 1,
            "benchmarks": [
                {"name": "math500", "path": str(write_rows(tmp_path, "math500")), "samples_per_prompt": 3, **short},
                {"name": "ifeval", "path": str(write_rows(tmp_path, "ifeval")), "limit": 1, **short},
            ],
        },
    )
    with nothing_left():
        code, output = run_here(config, "steps=1")
        assert code == 0, output
        code, output = run_here(config, "steps=3", "--resume")
        assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    found = read_lines(run / "evaluations.jsonl")
    assert [one["step"] for one in found] == [0, 1, 2, 3]  # that of step 1 is not measured again
    for one in found:
        assert {f"eval/benchmark/math500/{name}" for name in ("avg", "pass@1", "pass@2", "pass@3", "maj@3")} <= set(one)
        assert "eval/benchmark/math500/reward/math_verify" in one
        scores = [one["eval/benchmark/math500/avg"], one["eval/benchmark/ifeval/avg"]]
        assert one["eval/benchmarks"] == one["eval/avg"] == pytest.approx(sum(scores) / 2)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_before"] == found[0]["eval/avg"]
    assert summary["eval_after"] == found[-1]["eval/avg"]
    assert (run / "checkpoints" / "best").exists()


def figures_of(output: str) -> str:
    """What was printed as tables, without their lines."""
    return re.sub(r"[│┃┡━┩┏┳┓├┼┤└┴┘─╇]+", " ", output)


def test_every_benchmark_at_once_and_two_models_compared(
    tmp_path: Path, wide_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # where the table has each figure in one line
    names = benchmark_names()
    places = [f"--data={name}={write_rows(tmp_path / 'rows', name)}" for name in names]
    other = shutil.copytree(wide_model, tmp_path / "other")
    for model in (wide_model, other):
        command = ["eval", "--benchmark", ",".join(names), *places, "--max-response-tokens", "24"]
        if model is other:  # sampled anew beside what was measured before
            command += ["--model", str(tmp_path / "first.json")]
        output = tmp_path / ("other.json" if model is other else "first.json")
        with nothing_left():
            code, printed = command_here(tmp_path, *command, "--model", str(model), "-o", str(output))
        assert code == 0, printed
    first, second = json.loads((tmp_path / "other.json").read_text())["models"]
    assert first == json.loads((tmp_path / "first.json").read_text())["models"][0]
    by_name = {one["benchmark"]: one for one in second["benchmarks"]}
    assert sorted(by_name) == names
    for name, one in by_name.items():
        k, rows = one["samples_per_prompt"], next(iter(PUBLISHED[name].values()))
        assert len(one["tasks"]) == len(rows)
        assert one["failures"] == 0
        assert one["changed"] == {"max_response_tokens": 24}
        assert 0 < one["response_tokens"] <= 24
        score = one["figures"][f"avg@{k}"]
        assert score["value"] == pytest.approx(sum(one["tasks"].values()) / len(rows))
        assert 0 <= score["low"] <= score["value"] <= score["high"] <= 1
        assert (f"pass@{k}" in one["figures"]) == (k > 1)
    assert by_name["math500"]["figures"].keys() >= {"avg@4", "pass@4", "maj@4", "math_verify"}
    assert by_name["aime24"]["samples_per_prompt"] == 64
    told = figures_of(printed)
    for name in names:
        assert re.search(rf"{name} +avg@\d+ +\d+ +[01]\.\d+ \[", told), f"{name}\n{printed}"
    differences = json.loads((tmp_path / "other.json").read_text())["differences"]
    assert [one["benchmark"] for one in differences] == names
    assert all(one["reason"] is None and one["low"] <= one["value"] <= one["high"] for one in differences)
