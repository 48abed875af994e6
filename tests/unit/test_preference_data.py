"""The data of supervised and preference training: what the script makes of a wheel, and the files that were made."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from chat_templates import renderer
from loose_modules import SCRIPTS, load_module

from roll_like.config.data import ConversationData, PairData
from roll_like.data.conversations import load_conversations
from roll_like.data.pairs import load_pairs

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "data"
SCORES = ("relevance_scores_train", "relevance_scores_eval")
NAMES = ("pairs_train", "pairs_eval", "sft_train", "sft_eval", "relevance_train", "relevance_eval")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_module(SCRIPTS / "make_preference_data.py")


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def cache(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a wheel of 700 how-tos and 200 summaries of 100 articles."""
    howtos = [
        {"question": f"How to do {n} ?", "options": f"A. first {n} \nB. other {n}", "answer": f"{'AB'[n % 2]}. …"}
        for n in range(700)
    ]
    summaries = [
        {"article_sent": f"article {n // 2} of many.", "correct_sent": f"right {n}.", "incorrect_sent": f"wrong {n}."}
        for n in range(200)
    ]
    with zipfile.ZipFile(tmp_path / script.WHEEL, "w") as archive:
        for name, rows in ((script.PIQA, howtos), (script.SUMMARIES, summaries)):
            archive.writestr(name, "".join(json.dumps(row) + "\n" for row in rows))
    digest = hashlib.sha256((tmp_path / script.WHEEL).read_bytes()).hexdigest()
    monkeypatch.setattr(script, "SHA256", digest)
    return tmp_path


def test_the_script_reads_right_and_wrong_answers(script: ModuleType, cache: Path) -> None:
    howtos, summaries = script.read_pairs(script.wheel(cache))
    assert (howtos[0].chosen, howtos[0].rejected) == ("first 0", "other 0")
    assert (howtos[1].chosen, howtos[1].rejected) == ("other 1", "first 1")
    assert (howtos[1].prompt, howtos[1].origin) == ("How to do 1 ?", "PIQA/validation.jsonl:2")
    assert summaries[3].prompt == "Summarize in one short sentence: article 1 of many."
    assert (summaries[3].chosen, summaries[3].rejected) == ("right 3.", "wrong 3.")


def test_the_same_arguments_write_the_same_bytes(script: ModuleType, cache: Path, tmp_path: Path) -> None:
    written = {}
    for number, seed in enumerate(("0", "0", "1")):
        folder = tmp_path / str(number)
        folder.mkdir()
        script.main(["--cache", str(cache), "--out", str(folder), "--seed", seed])
        written[number] = [(folder / f"{name}.jsonl").read_bytes() for name in (*NAMES, *SCORES)]
    assert written[0] == written[1]
    assert written[0] != written[2]


def test_another_wheel_is_refused(script: ModuleType, cache: Path) -> None:
    with (cache / script.WHEEL).open("ab") as file:
        file.write(b"x")
    with pytest.raises(SystemExit, match=r"has the hash [0-9a-f]+, expected"):
        script.wheel(cache)


def test_pairs_that_cannot_be_used(script: ModuleType) -> None:
    fine = {"topic": "a", "prompt": "How to go?", "chosen": "walk", "rejected": "sit", "origin": ""}
    assert script.Pair(**fine).usable
    for change in ({"prompt": "dresser"}, {"rejected": "walk"}, {"rejected": "x" * script.LONGEST}):
        assert not script.Pair(**{**fine, **change}).usable
    with pytest.raises(ValueError, match="3 topics asked for, there are 1"):
        script.split([script.Pair(**fine)], (3, 0), 0)


def test_nothing_that_is_evaluated_is_trained_on() -> None:
    prompts = {name: {row["prompt"].lower() for row in rows_of(FOLDER / f"{name}.jsonl")} for name in NAMES}
    evaluated = set().union(*(prompts[name] for name in NAMES if name.endswith("eval")))
    assert not evaluated & set().union(*(prompts[name] for name in NAMES if name.endswith("train")))
    lines = [row["origin"] for name in NAMES[:2] for row in rows_of(FOLDER / f"{name}.jsonl")]
    assert len(set(lines)) == len(lines)
    kinds = {name: {row["origin"].split("/")[0] for row in rows_of(FOLDER / f"{name}.jsonl")} for name in NAMES}
    assert {name: len(kinds[name]) for name in NAMES} == dict.fromkeys(NAMES[:4], 2) | dict.fromkeys(NAMES[4:], 1)


def test_wrong_answers_are_right_ones_of_other_goals() -> None:
    for name in NAMES[4:]:
        rows = rows_of(FOLDER / f"{name}.jsonl")
        right = {row["chosen"]: row["prompt"] for row in rows}
        assert all(row["rejected"] != row["chosen"] and right[row["rejected"]] != row["prompt"] for row in rows)


def test_single_answers_are_one_of_each_pair() -> None:
    for name in SCORES:
        pairs = rows_of(FOLDER / f"{name.replace('_scores', '')}.jsonl")
        rows: list[Any] = rows_of(FOLDER / f"{name}.jsonl")
        sides = ["chosen" if row["score"] else "rejected" for row in rows]
        assert [row["prompt"] for row in rows] == [pair["prompt"] for pair in pairs]
        assert [row["completion"] for row in rows] == [pair[side] for pair, side in zip(pairs, sides, strict=True)]
        assert abs(sides.count("chosen") - sides.count("rejected")) <= 1


def test_the_files_are_small() -> None:
    assert sum((FOLDER / f"{name}.jsonl").stat().st_size for name in (*NAMES, *SCORES)) < 600_000
    counts = {name: len(rows_of(FOLDER / f"{name}.jsonl")) for name in NAMES}
    assert min(counts["pairs_train"], counts["sft_train"], counts["relevance_train"]) >= 300
    assert min(counts["pairs_eval"], counts["sft_eval"], counts["relevance_eval"]) >= 100


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_a_short_sample(name: str) -> None:
    longest = 160 if name.startswith("relevance") else 120  # an answer to another prompt
    data = {"sources": [{"path": str(FOLDER / f"{name}.jsonl")}], "max_tokens": longest, "too_long": "refuse"}
    render = renderer("SmolLM2")
    if not name.startswith("sft"):
        (report,) = load_pairs(PairData.model_validate(data), render).report
    else:
        (report,) = load_conversations(ConversationData.model_validate(data), render).report
    assert report.rows == report.samples == len(rows_of(FOLDER / f"{name}.jsonl"))
    assert 0.1 < report.trained / report.tokens < 0.5
