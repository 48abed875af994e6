"""examples/reverse_text: what its data and its reward are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reward_support import completion

from examples.reverse_text.reverse_text import SAY, backwards, main


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (SAY.format("dlrow olleh"), 1.0),
        ("Here it is: <backwards>\ndlrow olleh\n</backwards>.", 1.0),
        (SAY.format("olleh"), 2 * 5 / (5 + 11)),
        (SAY.format("xyz"), 0.0),
        ("dlrow olleh", 0.0),
        ("<backwards>dlrow olleh", 0.0),
    ],
)
def test_the_reward_is_how_much_is_right(text: str, reward: float) -> None:
    assert backwards(completion(text, "dlrow olleh")) == reward


def test_no_text_is_in_two_files(tmp_path: Path) -> None:
    for folder in ("once", "again"):
        main(["--characters", "8", "12", "--tasks", "40", "--evaluate", "8", str(tmp_path / folder)])
    names = ("eval", "train", "sft")
    files = {name: (tmp_path / "once" / f"{name}.jsonl").read_bytes() for name in names}
    assert files == {name: (tmp_path / "again" / f"{name}.jsonl").read_bytes() for name in names}
    rows = {name: [json.loads(line) for line in content.splitlines()] for name, content in files.items()}
    assert (len(rows["eval"]), len(rows["train"])) == (8, 40)
    answers = [row["answer"] for each in rows.values() for row in each]
    assert len(set(answers)) == len(answers) > 1000
    for row in rows["sft"]:
        assert 8 <= len(row["answer"]) <= 12
        assert row["prompt"].endswith(f": {row['answer'][::-1]}")
        assert row["completion"] == SAY.format(row["answer"])


def test_too_few_texts_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tasks", "1000000", str(tmp_path)])
    assert "texts are too few for --tasks 1000000" in capsys.readouterr().err
