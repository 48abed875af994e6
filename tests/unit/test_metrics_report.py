"""`roll-like report`: what the page of a run, or of several seeds, says, and that nothing in it acts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import Page, answer, make_run, stands_alone

from roll_like import cli
from roll_like.errors import ConfigError, DataError
from roll_like.metrics import files
from roll_like.metrics.panels import Panel
from roll_like.metrics.reports.configuration import as_yaml, differences
from roll_like.metrics.reports.events import MOST_EVENTS, sentence
from roll_like.metrics.reports.figures import figure
from roll_like.metrics.reports.lines import STRETCHES, Line, lines_of, thinned
from roll_like.metrics.reports.report import ANSWER_CHARACTERS, report_page
from roll_like.metrics.runs import labels_of, read_run


@pytest.fixture(autouse=True)
def _plain_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run draws `curves.png`; these tests look at pages."""
    monkeypatch.setattr("roll_like.metrics.summary.draw_curves", lambda path, *_: path.write_bytes(b""))


def page_of(*folders: Path) -> Page:
    source, _ = report_page(folders)
    page = Page(source)
    stands_alone(page, source)
    return page


def test_a_page_has_what_a_run_came_to(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "demo", config={"training": {"lr": 1e-5}}))
    for part in ("demo", "finished", "rlvr", "4 of 4 steps in", "0.800 samples/s · 8.000 tokens/s · 0 warnings"):
        assert part in page.text
    assert page.row("rollout/reward/mean") == ["rollout/reward/mean", "", "0.150", "0.350", "+0.200"]
    assert page.row("eval/avg") == ["eval/avg", "", "0.250", "0.500", "+0.250"]
    assert page.row("eval/pass@4")[1:4] == ["share", "0.500", "1.000"]
    for title in ("Training reward", "Evaluation", "Response length", "Engine mismatch"):
        assert title in page.text
    for title in ("Gradient norm", "KL from reference"):  # not logged
        assert title not in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 6  # and throughput, memory
    assert page.row("generate")[1:3] == ["6.00 s", "60.0 %"]
    assert page.row("end")[3] == "the run ended: finished"
    assert "lr: 1.0e-05" in page.text
    assert "python 3." in page.text


def test_answers_stand_side_by_side_with_the_reference(tmp_path: Path) -> None:
    rows = (answer("it is two", 0.0, reference="three"), answer("it is three", 1.0, reference="three", answer="3"))
    text = " ".join(page_of(make_run(tmp_path / "demo", rows=rows)).text.split())
    assert text.count("Which is more: 2 or 3?") == 1
    assert "Reference answer: three" in text
    assert "before training · reward 0, 3 tokens, ended by stop it is two" in text
    assert "after step 4 · reward 1.000, 3 tokens, ended by stop, read as 3 it is three" in text


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)></pre><!-- {{ 7*7 }} \x1b[31m\u202eevil &amp;"


def test_what_a_model_or_a_data_set_wrote_is_escaped(tmp_path: Path) -> None:
    rows = (
        answer(HOSTILE, 0.0, prompt=HOSTILE, reference=HOSTILE, stop_reason=HOSTILE),
        answer(HOSTILE, 1.0, prompt=HOSTILE, answer=HOSTILE),
    )
    run = make_run(tmp_path / "demo", rows=rows, config={"system": HOSTILE, HOSTILE: 1}, end=None)
    files.append(run / files.EVENTS, [{"kind": HOSTILE, "step": HOSTILE, "elapsed": 1.0, "text": HOSTILE},
                                      {"kind": "warning", "step": 1, "elapsed": 1.0, "text": HOSTILE}])  # fmt: skip
    lines = [json.loads(line) for line in (run / files.METRICS).read_text().splitlines()]
    files.replace(run / files.METRICS, [{**line, f"rollout/domain/{HOSTILE}/reward": 0.5} for line in lines])
    record = json.loads((run / files.RUN).read_text())
    files.replace(run / files.RUN, [{**record, "name": HOSTILE, "pipeline": HOSTILE, "versions": {HOSTILE: HOSTILE}}])
    source, _ = report_page([run])
    page = Page(source)
    stands_alone(page, source)
    assert "<script" not in source
    assert "<img" not in source
    assert "\x1b" not in source
    assert "\u202e" not in source
    shown = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert page.text.count(shown) >= 10
    assert "49" not in page.text.replace("{{ 7*7 }}", "").partition("Answers")[2].partition("Time")[0]


def test_a_long_answer_is_cut_and_says_where_the_rest_is(tmp_path: Path) -> None:
    rows = (answer("x" * (ANSWER_CHARACTERS + 7), 0.0), answer("short", 1.0, prompt="another"))
    page = page_of(make_run(tmp_path / "demo", rows=rows))
    assert "x" * ANSWER_CHARACTERS in page.text
    assert "x" * (ANSWER_CHARACTERS + 1) not in page.text
    assert "7 more characters: roll-like rollouts RUN --show eval0/0.0" in page.text
    assert "another prompt:" in page.text


def test_seeds_have_means_and_bands(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"demo-seed-{seed}", seed=seed, lift=seed / 10) for seed in (0, 1, 4)]
    page = page_of(*folders)
    assert ("h1", {}) in page.tags
    assert "demo\n" in page.text
    assert "demo-seed-4" in page.text
    assert page.row("eval/avg")[2:] == ["0.417 (0.250–0.650)", "0.667 (0.500–0.900)", "+0.250"]
    assert page.row("demo-seed-1")[1:3] == ["1", "finished"]
    assert page.row("key") == ["key", "demo-seed-0", "demo-seed-1", "demo-seed-4"]
    assert page.row("seed") == ["seed", "0", "1", "4"]
    assert "differ in more than their seeds" not in page.text


def test_a_band_is_over_the_steps_that_all_runs_have(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / "a", steps=4)), read_run(make_run(tmp_path / "b", steps=2, lift=0.2))]
    (line,) = lines_of(Panel("reward", ("rollout/reward/mean",)), runs)
    assert list(line.points[0]) == [1, 2]
    assert list(line.points[1]) == pytest.approx([0.2, 0.3])
    assert list(line.low) == pytest.approx([0.1, 0.2])
    assert list(line.high) == pytest.approx([0.3, 0.4])
    assert [list(steps) for steps, _ in line.faint] == [[1, 2, 3, 4], [1, 2]]
    _, notes = report_page([run.folder for run in runs])
    assert notes == ["several of these runs have the seed 0", "these runs have taken different numbers of steps"]


def test_long_curves_are_thinned_and_keep_their_peaks() -> None:
    steps, values = list(range(1, 10_001)), [0.0] * 10_000
    values[4321], values[4322] = 7.0, -7.0
    short = Line("x", "x", ([1, 2], [0.0, 1.0]))
    assert thinned(short) == Line("x", "x", ([1, 2], [0.0, 1.0]))
    line = thinned(Line("x", "x", (steps, values), faint=[(steps, values)]))
    for kept, heights in (line.points, *line.faint):
        assert list(kept) == sorted(kept)
        assert len(kept) <= 2 * STRETCHES
        assert dict(zip(kept, heights, strict=True))[4322] == 7.0
        assert dict(zip(kept, heights, strict=True))[4323] == -7.0
    band = thinned(Line("x", "x", (steps, [1.0] * 10_000), low=values, high=[9.0 + value for value in values]))
    assert len(band.points[0]) == len(band.low) == len(band.high) == STRETCHES
    assert (min(band.low), max(band.high), set(band.points[1])) == (-7.0, 16.0, {1.0})


def test_values_that_are_not_finite_are_no_points(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", end=None)
    lines = [json.loads(line) for line in (run / files.METRICS).read_text().splitlines()]
    lines[0]["rollout/reward/mean"], lines[1]["rollout/reward/mean"] = "NaN", "Infinity"
    for line in lines:
        line["mismatch/kl"] = "NaN"
    files.replace(run / files.METRICS, lines)
    (line,) = lines_of(Panel("reward", ("rollout/reward/mean",)), [read_run(run)])
    assert list(line.points[0]) == [3, 4]
    page = page_of(run)
    assert "KL from reference" not in page.text
    assert "unfinished" in page.text


def test_other_keys_than_the_seed_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, lr in ((0, 1e-5), (1, 2e-5)):
        make_run(
            tmp_path / f"demo-{seed}", seed=seed, config={"training": {"lr": lr}, "metrics": {"console": str(seed)}}
        )
    target = tmp_path / "pages" / "demo.html"
    command = ["report", "demo-0", "demo-1", "--output-dir", str(tmp_path), "-o", str(target)]
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    assert out == f"written: {target}\n"
    assert err == "warning: these runs differ in more than their seeds: training.lr\n"
    assert Page(target.read_text()).row("training.lr") == ["training.lr", "1e-05", "2e-05"]


def test_the_page_lies_in_the_folder_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "demo", pipeline="sft")
    assert cli.main(["report", str(folder)]) == 0
    page = Page((folder / "report.html").read_text())
    assert page.row("eval/loss")[2:] == ["1.750", "1.500", "−0.250"]
    assert page.row("train/perplexity")[2:4] == ["7.500", "5.500"]
    assert "Answers before and after" not in page.text
    assert "Learning rate" in page.text


def test_events_are_sentences() -> None:
    events: dict[str, dict[str, Any]] = {
        "workers (0, 1) of inference stood still for 1m30s in phase generate and were killed": {
            "kind": "hang", "role": "inference", "ranks": (0, 1), "phase": "generate", "seconds": 90.0},
        "workers of trainer were replaced in 12s": {"kind": "recovery", "role": "trainer", "seconds": 12.0},
        "workers of judge were lost and not replaced": {"kind": "recovery", "role": "judge", "seconds": None},
        "went back from step 7 to the checkpoint of step 5": {"kind": "rewind", "step": 7, "to": 5, "seconds": 1.0},
        "the run ended: failed; mlflow: 3 steps missing (disk full)": {
            "kind": "end", "status": "failed", "failures": {"mlflow": {"undelivered": 3, "last_error": "disk full"}}},
        '{"note": "of another version"}': {"kind": "hang", "step": 1, "note": "of another version"},
        '{"what": 1}': {"kind": "further", "elapsed": 1.0, "what": 1},
    }  # fmt: skip
    assert [sentence(event) for event in events.values()] == list(events)


def test_of_many_events_the_last_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", end=None)
    warnings = [{"kind": "warning", "step": 1, "elapsed": 1.0, "text": f"w{number}."} for number in range(250)]
    files.append(run / files.EVENTS, warnings)
    page = page_of(run)
    assert "50 earlier ones are in events.jsonl" in page.text
    assert "w49." not in page.text
    assert "w50." in page.text
    assert sum(cells[0] == "warning" for cells in page.cells) == MOST_EVENTS


def test_failures_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", end=None)
    lines = [json.loads(line) for line in (run / files.METRICS).read_text().splitlines()]
    lines[1] |= {"rollout/failures": 2.0, "health/restarts/inference": 1.0}
    lines[2] |= {"rollout/failures": 1.0}
    files.replace(run / files.METRICS, lines)
    assert (
        "inference restarts (health/restarts/inference): 1.000; failures (rollout/failures): 3.000" in page_of(run).text
    )


def test_secrets_are_hidden() -> None:
    config = {"metrics": {"trackers": [{"tracking_uri": "http://me:word@host/x"}]}, "api_key": "abc", "max_tokens": 3}
    text = as_yaml(config)
    assert "http://(hidden)@host/x" in text
    assert "api_key: (hidden)" in text
    assert "max_tokens: 3" in text
    assert differences([{"api_key": "a", "x": 1}, {"api_key": "b", "y": [1, 2]}]) == {
        "api_key": ["(hidden)", "(hidden)"], "x": ["1", "–"], "y.0": ["–", "1"], "y.1": ["–", "2"],
    }  # fmt: skip
    assert differences([{"seed": 1, "a": {"b": 1}}, {"seed": 2, "a": {"b": 2}}], leave_out=("seed",)) == {
        "a.b": ["1", "2"]
    }


def test_figures_of_several_runs() -> None:
    assert figure([]) == "–"
    assert figure([0.5]) == "0.500"
    assert figure([0.5, 0.25, float("nan")]) == "0.375 (0.250–0.500)"
    assert figure([float("nan")]) == "nan"


def test_folders_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    assert labels_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert labels_of([tmp_path / "a" / "run", tmp_path / "b" / "other"]) == ["run", "other"]


def test_wrong_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = make_run(tmp_path / "demo")
    (tmp_path / "empty").mkdir()
    none = make_run(tmp_path / "none", steps=0)
    with pytest.raises(DataError, match=r"empty holds no run\.json; expected the folder of a run"):
        report_page([tmp_path / "empty"])
    with pytest.raises(DataError, match=r"none has no steps yet: metrics\.jsonl and evaluations\.jsonl are empty"):
        report_page([none])
    with pytest.raises(ConfigError, match=r"different pipelines \(rlvr, sft\).*\n  fix: .*roll-like compare"):
        report_page([demo, make_run(tmp_path / "other", pipeline="sft")])
    with pytest.raises(ConfigError, match="is named twice"):
        report_page([demo, tmp_path / "x" / ".." / "demo"])
    assert cli.main(["report", "dem", "--output-dir", str(tmp_path)]) == 2
    assert "report dem: there is no run in" in (said := capsys.readouterr().err)
    assert "demo" in said
    (demo / "file").touch()
    assert cli.main(["report", str(demo), "-o", str(demo / "file" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_damaged_files_are_named(tmp_path: Path) -> None:
    demo = make_run(tmp_path / "demo")
    (demo / "config.yaml").write_text("a: [")
    with pytest.raises(DataError, match=r"config\.yaml cannot be read"):
        report_page([demo])
    (demo / "config.yaml").write_text("- a")
    with pytest.raises(DataError, match=r"config\.yaml holds list, expected keys and values"):
        report_page([demo])
    (demo / "config.yaml").unlink()
    assert "The folder has no config.yaml." in page_of(demo).text
    files.rollouts_path(demo, 0, kind="eval").write_text("no JSON\n")
    with pytest.raises(DataError, match=r"rollouts of .* cannot be read"):
        report_page([demo])
    (demo / files.METRICS).write_text("no JSON\n{}\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: expected one JSON object per line"):
        report_page([demo])
