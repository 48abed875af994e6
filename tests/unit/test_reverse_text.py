"""examples/reverse_text: what its data and its reward are."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from reward_support import completion

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    from examples.reverse_text import reverse_text

    return reverse_text


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<backwards>dlrow olleh</backwards>", 1.0),
        ("Here it is: <backwards>\ndlrow olleh\n</backwards>.", 1.0),
        ("<backwards>olleh</backwards>", 2 * 5 / (5 + 11)),
        ("<backwards>xyz</backwards>", 0.0),
        ("dlrow olleh", 0.0),
        ("<backwards>dlrow olleh", 0.0),
    ],
)
def test_the_reward_is_how_much_is_right(example: ModuleType, text: str, reward: float) -> None:
    assert example.backwards(completion(text, "dlrow olleh")) == reward


def test_no_text_is_in_two_files(example: ModuleType, tmp_path: Path) -> None:
    for folder in ("once", "again"):
        example.main(["--characters", "8", "12", "--tasks", "40", "--evaluate", "8", str(tmp_path / folder)])
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
        assert row["completion"] == f"<backwards>{row['answer']}</backwards>"


def test_too_few_texts_are_told(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.main(["--tasks", "1000000", str(tmp_path)])
    assert "texts are too few for --tasks 1000000" in capsys.readouterr().err
