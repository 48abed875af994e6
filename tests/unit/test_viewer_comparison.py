"""`roll-like compare`: the tables, the page and the image of several runs."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import data_of, make_run

from roll_like import cli
from roll_like.errors import ConfigError, DataError
from roll_like.viewer.comparison import RunComparison, compare
from roll_like.viewer.page import report_page

pytestmark = pytest.mark.usefixtures("plain_curves")


def printed(comparison: RunComparison, width: int) -> list[list[str]]:
    """The tables' lines as words between the columns."""
    console = Console(width=width, color_system=None, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(*comparison.tables(width))
        lines = console.export_text().splitlines()
    return [[cell.strip() for cell in line.replace("┃", "│").strip("│").split("│")] for line in lines]


def pair(folder: Path) -> list[Path]:
    lr = [{"training": {"lr": lr}} for lr in (1e-5, 2e-5)]
    return [
        make_run(folder / "slow", config=lr[0]),
        make_run(folder / "[bold]fast", config=lr[1], lift=0.25, seed=1, steps=2, end=None),
    ]


def test_tables_have_figures_and_keys_that_differ(tmp_path: Path) -> None:
    rows = printed(compare(pair(tmp_path)), 110)
    for row in (
        ["", "slow", "[bold]fast"],
        ["status", "finished", "unfinished"],
        ["steps", "4/4", "2/2"],
        ["samples/s", "0.800", "0.800"],
        ["best evaluation", "0.500", "0.750"],
        ["eval/avg", "0.250 → 0.500", "0.500 → 0.750"],
        ["rollout/reward/mean", "0.150 → 0.350", "0.350 → 0.450"],
        ["warnings", "0", "0"],
        ["seed", "0", "1"],
        ["training.lr", "1e-05", "2e-05"],
    ):
        assert row in rows
    assert not any(row[0] in {"name", "output_dir"} for row in rows)


def test_a_narrow_terminal_gets_several_tables(tmp_path: Path) -> None:
    heads = [row for row in printed(compare(pair(tmp_path)), 60) if row[0] == "" and len(row) == 2]
    assert heads == [["", "slow"], ["", "[bold]fast"]] * 2


def test_runs_of_different_pipelines_share_what_they_share(tmp_path: Path) -> None:
    sampled = {"pipeline": "rlvr", "rollout": {"temperature": 1.0}, "steps": 20}
    given = {"pipeline": "sft", "data": {"packing": True}, "steps": 30}
    folders = [make_run(tmp_path / "one", config=sampled), make_run(tmp_path / "two", pipeline="sft", config=given)]
    comparison = compare(folders)
    assert comparison.differing == {"pipeline": ["rlvr", "sft"], "steps": ["20", "30"]}
    rows = printed(comparison, 110)
    assert ["eval/avg", "0.250 → 0.500", "–"] in rows
    assert ["eval/loss (nats/token)", "–", "1.750 → 1.500"] in rows
    assert ["best evaluation", "0.500", "–"] in rows
    assert list(comparison.notes) == [
        "the runs are of different pipelines (rlvr, sft): not all figures are in all of them, and of the configuration "
        "those keys are shown that all of them have"
    ]
    drawn = {panel.names[0]: [len(line.points[0]) for line in lines] for panel, lines in comparison.curves()}
    assert drawn["rollout/reward/mean"] == [4, 0]
    assert drawn["train/loss"] == [0, 4]  # a run keeps its place, and so its colour
    assert drawn["throughput/tokens_per_second"] == [4, 0]


def test_the_page_has_a_panel_for_each_metric(tmp_path: Path) -> None:
    folders = [*pair(tmp_path), make_run(tmp_path / "<script>alert(1)</script>".replace("/", "∕"))]
    data = data_of(report_page(compare(folders), together=False)[0])
    overview = data["overview"]
    assert [run["label"] for run in overview["runs"]] == [folder.name for folder in folders]
    assert overview["differing"]["training.lr"] == ["1e-05", "2e-05", "–"]
    found = [run["figures"]["before_after"]["eval/pass@4"] for run in overview["runs"]]
    assert found == [[0.5, 1.0], [1.0, 1.0], [0.5, 1.0]]
    panels = {panel["title"]: panel for panel in overview["panels"]}
    assert len(panels) == 7
    assert [line["label"] for line in panels["Evaluation: eval pass@4"]["lines"]] == [folder.name for folder in folders]
    assert panels["Training reward"]["mean"]["x"] == [1, 2]
    assert {row["run"] for row in data["rollouts"]} == {folder.name for folder in folders}


def test_the_image_has_a_legend_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    legends: list[list[str]] = []
    real = Figure.legend

    def legend(figure: Figure, handles: list[object], labels: list[str], **kwargs: object) -> object:
        drawn = real(figure, handles, labels, **kwargs)
        legends.append([text.get_text() for text in drawn.get_texts()])
        return drawn

    monkeypatch.setattr(Figure, "legend", legend)
    runs = [make_run(tmp_path / "$x"), make_run(tmp_path / "_y$", lift=0.1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(runs).draw(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert legends == [["$x", " _y$"]]


def test_the_command_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", seed=3)
    (two / "config.yaml").unlink()
    for name in ("curves.html", "curves.png"):
        command = ["compare", "one", str(two), "--output-dir", str(tmp_path), "-o", str(tmp_path / name)]
        assert cli.main(command) == 0
        out, err = capsys.readouterr()
        assert "0.250 → 0.500" in out
        assert out.endswith(f"written: {tmp_path / name}\n")
        assert err == "warning: two has no config.yaml\n"
        assert (tmp_path / name).stat().st_size > 1000
    assert cli.main(["compare", str(one), str(two)]) == 0
    assert "written" not in capsys.readouterr().out


def test_wrong_runs_and_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, none = make_run(tmp_path / "one"), make_run(tmp_path / "none", steps=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"only .*one was named; expected two runs or more\n  fix: .*roll-like report"
    ):
        compare([one])
    with pytest.raises(ConfigError, match="is named twice"):
        compare([one, one])
    with pytest.raises(DataError, match="has no steps yet"):
        compare([one, none])
    with pytest.raises(DataError, match=r"holds no run\.json"):
        compare([one, tmp_path / "empty"])
    other = make_run(tmp_path / "other")
    command = ["compare", str(one), str(other), "-o"]
    assert cli.main([*command, str(tmp_path / "curves.pdf")]) == 2
    assert "curves.pdf: expected a name that ends in .html or .png" in capsys.readouterr().err
    for name in ("x.html", "x.png"):
        assert cli.main([*command, str(one / "run.json" / name)]) == 2
        assert f"{name} cannot be written: File exists" in capsys.readouterr().err


def test_an_evaluation_before_training_is_not_the_runs_achievement(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "one"), make_run(tmp_path / "two")]
    lines = (folders[1] / "evaluations.jsonl").read_text().splitlines(keepends=True)
    (folders[1] / "evaluations.jsonl").write_text(lines[0])
    rows = printed(compare(folders), 110)
    assert ["best evaluation", "0.500", "0.250 (before training)"] in rows
    assert ["eval/avg", "0.250 → 0.500", "0.250 → –"] in rows
