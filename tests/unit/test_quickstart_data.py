import json
from pathlib import Path
from types import ModuleType

import pyarrow
import pytest
from loose_modules import SCRIPTS, load_module
from pyarrow import parquet

from roll_like import Completion
from roll_like.builtin.rewards.ifeval import IFEval, IFEvalConfig
from roll_like.builtin.rewards.ifeval.kinds import parse_instructions
from roll_like.types import StopReason

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_module(SCRIPTS / "make_quickstart_data.py")


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_committed_files_are_what_the_script_writes(script: ModuleType, tmp_path: Path) -> None:
    script.main(["--out", str(tmp_path)])
    for name in ("quickstart_train.jsonl", "quickstart_eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (ROOT / "configs" / "data" / name).read_bytes()


def test_rows_are_different_valid_and_on_disjoint_topics(script: ModuleType) -> None:
    train, evaluation = script.make_rows(list(script.REQUESTS), train=512, evaluation=32, seed=3)
    assert (len(train), len(evaluation)) == (512, 32)
    prompts = [row["prompt"] for row in train + evaluation]
    assert len(set(prompts)) == len(prompts)
    assert not {row["topic"] for row in train} & {row["topic"] for row in evaluation}
    for row in train + evaluation:
        assert row["topic"] in row["prompt"]
        assert "{" not in row["prompt"]
        parse_instructions(row["instructions"])


def test_kinds_have_equal_shares(script: ModuleType) -> None:
    train, _ = script.make_rows(["title", "short", "bullets"], train=90, evaluation=9, seed=0)
    first = [row["instructions"][0]["kind"] for row in train]
    assert {kind: first.count(kind) for kind in set(first)} == {"title": 30, "max_words": 30, "bullet_list": 30}
    assert set(first[:3]) == set(first)


def test_the_seed_decides(script: ModuleType) -> None:
    draw = [script.make_rows(["title"], train=20, evaluation=4, seed=seed) for seed in (0, 0, 1)]
    assert draw[0] == draw[1]
    assert draw[0] != draw[2]


def test_wrong_requests_say_so(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="unknown kind rhyme; known: no_commas"):
        script.make_rows(["rhyme"], train=4, evaluation=4, seed=0)
    with pytest.raises(ValueError, match="100000 rows asked for"):
        script.make_rows(["title"], train=100_000, evaluation=4, seed=0)


def test_answers_can_pass_and_copies_of_the_prompt_cannot(script: ModuleType) -> None:
    rows, _ = script.make_rows(list(script.REQUESTS), train=64, evaluation=8, seed=0)
    reward = IFEval(IFEvalConfig())
    for row in rows:
        answer, copy = (
            Completion(
                text=text,
                messages=({"role": "user", "content": row["prompt"]},),
                answer=None,
                metadata=row,
                stop_reason=StopReason.STOP,
                response_tokens=8,
            )
            for text in (script.REQUESTS[kind_of(script, row)].example.format(topic=row["topic"]), row["prompt"])
        )
        judged = reward.score([answer, copy])
        assert [result.value for result in judged] == [1.0, 0.0], (row, judged)


def kind_of(script: ModuleType, row: dict[str, object]) -> str:
    return next(name for name, request in script.REQUESTS.items() if list(request.instructions) == row["instructions"])


def test_rows_mean_the_same_after_a_round_trip_through_parquet(script: ModuleType, tmp_path: Path) -> None:
    rows, _ = script.make_rows(list(script.REQUESTS), train=40, evaluation=8, seed=0)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    back = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert any(None in instruction.values() for row in back for instruction in row["instructions"])
    for row, other in zip(rows, back, strict=True):
        assert parse_instructions(row["instructions"]) == parse_instructions(other["instructions"])


@pytest.mark.parametrize("split", ["train", "eval"])
def test_demonstrations_follow_the_instructions_of_their_rows(split: str) -> None:
    """Rows of configs/recipes/sdft.yaml: the quickstart's, with a good answer each."""
    plain = {row["prompt"]: row for row in read(ROOT / "configs" / "data" / f"quickstart_{split}.jsonl")}
    rows = read(ROOT / "configs" / "data" / f"sdft_{split}.jsonl")
    assert len({row["prompt"] for row in rows}) == len(rows) >= 32
    answers = [
        Completion(
            text=str(row["demonstration"]),
            messages=({"role": "user", "content": str(row["prompt"])},),
            answer=None,
            metadata=row,
            stop_reason=StopReason.STOP,
            response_tokens=8,
        )
        for row in rows
        if {**plain[row["prompt"]], "demonstration": row["demonstration"]} == row
    ]
    assert len(answers) == len(rows)
    assert {result.value for result in IFEval(IFEvalConfig(topic_field="topic")).score(answers)} == {1.0}
