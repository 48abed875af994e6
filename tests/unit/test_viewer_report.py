"""`roll-like report`: what the page of a run, or of several seeds, says, and that nothing in it acts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from browser import found_by, needs_chromium
from run_folders import Page, answer, data_of, make_run

from roll_like import cli
from roll_like.errors import ConfigError, DataError
from roll_like.metrics import files
from roll_like.metrics.runs import as_yaml, differences, labels_of
from roll_like.viewer.comparison import read_runs
from roll_like.viewer.events import sentence
from roll_like.viewer.page import MOST_EVENTS, MOST_FILES, report_page

pytestmark = pytest.mark.usefixtures("plain_curves")


def page_of(*folders: Path) -> dict[str, Any]:
    """The data of the page."""
    return data_of(report_page(read_runs(folders, command="report", seeds=len(folders) > 1))[0])


def test_a_page_has_what_a_run_came_to(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "demo", config={"training": {"lr": 1e-5}}))
    overview = page["overview"]
    (run,) = overview["runs"]
    assert (run["label"], run["status"], run["seed"]) == ("demo", "finished", "0")
    assert run["figures"]["samples_per_second"] == 0.8
    assert run["figures"]["before_after"]["rollout/reward/mean"] == pytest.approx([0.15, 0.35])
    assert overview["headlines"][:3] == ["eval/avg", "eval/pass@4", "rollout/reward/mean"]
    assert overview["metrics"]["eval/pass@4"]["unit"] == "share"
    titles = ["Training reward", "Evaluation", "Tokens per second", "Response length", "Engine mismatch"]
    assert [panel["title"] for panel in overview["panels"]] == [*titles, "Resident memory of all processes"]
    assert [(layer["label"], layer["y"]) for layer in run["timeline"]] == [
        ("generate", [6.0] * 4),
        ("train", [3.0] * 4),
    ]
    assert run["events"][-1]["text"] == "the run ended: finished"
    assert "lr: 1.0e-05" in overview["config"]
    assert overview["versions"]["python"].startswith("3.")
    assert len(page["rollouts"]) == 6


def test_answers_stand_side_by_side(tmp_path: Path) -> None:
    rows = (answer("it is two", 0.0, reference="three"), answer("it is three", 1.0, reference="three", answer="3"))
    page = page_of(make_run(tmp_path / "demo", rows=rows))
    assert page["overview"]["answers"] == [["eval0/0.0", "eval4/0.0", "before training", "after step 4"]]
    assert {row["key"]: row["text"] for row in page["rollouts"] if row["kind"] == "evaluate"} == {
        "eval0/0.0": "it is two",
        "eval4/0.0": "it is three",
    }


HOSTILE = (
    "<script>document.title = 'ran'</script><img src=x onerror=alert(1)></pre><!-- {{ 7*7 }} \x1b[31m\u202eevil &amp;"
)


def hostile_run(folder: Path) -> Path:
    """A run all of whose texts would act if they were let."""
    rows = (
        answer(HOSTILE, 0.0, prompt=HOSTILE, reference=HOSTILE, stop_reason=HOSTILE),
        answer(HOSTILE, 1.0, prompt=HOSTILE, answer=HOSTILE),
    )
    run = make_run(folder, rows=rows, config={"system": HOSTILE, HOSTILE: 1}, end=None)
    files.append(run / files.EVENTS, [{"kind": HOSTILE, "step": HOSTILE, "elapsed": 1.0, "text": HOSTILE},
                                      {"kind": "warning", "step": 1, "elapsed": 1.0, "text": HOSTILE}])  # fmt: skip
    lines = [json.loads(line) for line in (run / files.METRICS).read_text().splitlines()]
    files.replace(run / files.METRICS, [{**line, f"rollout/domain/{HOSTILE}/reward": 0.5} for line in lines])
    record = json.loads((run / files.RUN).read_text())
    files.replace(run / files.RUN, [{**record, "name": HOSTILE, "pipeline": HOSTILE, "versions": {HOSTILE: HOSTILE}}])
    return run


def test_what_a_model_or_a_data_set_wrote_is_escaped(tmp_path: Path) -> None:
    source, _ = report_page(read_runs([hostile_run(tmp_path / "demo")], command="report"))
    page = data_of(source)
    assert source.count("<script") == 2
    assert "<img" not in source
    assert not set(source) & set("\x1b\u202e")
    shown = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert Page(source).tags.count(("h1", {})) == 1
    assert json.dumps(page, ensure_ascii=False).count(json.dumps(shown, ensure_ascii=False)[1:-1]) >= 10


@needs_chromium
def test_the_page_shows_a_run_and_nothing_in_it_runs(tmp_path: Path) -> None:
    source, _ = report_page(read_runs([hostile_run(tmp_path / "demo")], command="report"))
    found = found_by(
        """
        const seen = { title: document.title, scripts: document.querySelectorAll("script, img").length, parts: {} };
        for (const part of ["overview", "rollouts", "timeline", "configuration"]) {
          document.getElementById(`to-${part}`).click();
          const section = document.getElementById(part);
          seen.parts[part] = [section.hidden, section.textContent.includes("document.title = 'ran'")];
        }
        seen.figures = document.querySelectorAll("#overview figure svg[role=img] path").length;
        seen.text = document.getElementById("overview").textContent;
        seen.rows = [...document.querySelectorAll("#timeline tr, #overview tr")].map(
          (row) => [...row.children].map((cell) => cell.textContent));
        return seen;
        """,
        source,
        tmp_path,
    )
    assert "ran" not in found["title"].partition("'ran'")[2]
    assert found["scripts"] == 3
    assert found["parts"] == {name: [False, True] for name in ("overview", "rollouts", "timeline", "configuration")}
    assert found["figures"] == 10  # the reward and the evaluation have two lines each, and so have the domains
    assert "4 of 4 steps in" in found["text"]
    assert "0.800 samples/s · 8.000 tokens/s · 1 warning" in found["text"]
    rows = {row[0]: row[1:] for row in found["rows"]}
    assert rows["rollout/reward/mean"][:4] == ["", "0.150", "0.350", "+0.200"]
    assert rows["eval/pass@4"][:4] == ["share", "0.500", "1.000", "+0.500"]
    assert rows["generate"][:2] == ["6.00 s", "60.0 %"]


@needs_chromium
def test_curves_of_seeds_are_shown_together_or_each(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"demo-seed-{seed}", seed=seed, lift=seed / 10) for seed in (0, 1, 4)]
    source, _ = report_page(read_runs(folders, command="report", seeds=True))
    found = found_by(
        """
        const look = () => ({
          rows: [...document.querySelectorAll("#overview details tr")].map(
            (row) => [...row.children].map((cell) => cell.textContent)).filter((row) => row[0] === "eval/avg")[0],
          bands: document.querySelectorAll("#overview polygon").length,
          lines: document.querySelector("#overview figure").querySelectorAll("path").length,
        });
        const seen = { heading: document.querySelector("h1").textContent, together: look() };
        [...document.querySelectorAll("#overview button")].find((one) => one.textContent === "each run").click();
        seen.each = look();
        seen.runs = [...document.querySelectorAll("#overview tbody td:first-child")].slice(0, 3).map(
          (cell) => cell.textContent);
        return seen;
        """,
        source,
        tmp_path,
    )
    assert found["heading"] == "demo"
    assert found["together"]["rows"][2:5] == ["0.417 (0.250–0.650)", "0.667 (0.500–0.900)", "+0.250"]
    assert found["each"]["rows"][2:] == ["0.250 → 0.500", "0.350 → 0.600", "0.650 → 0.900"]
    assert (found["together"]["bands"], found["together"]["lines"]) == (7, 4)
    assert (found["each"]["bands"], found["each"]["lines"]) == (0, 3)
    assert found["runs"] == [folder.name for folder in folders]


def test_seeds_have_means_and_notes(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a", steps=4), make_run(tmp_path / "b", steps=2, lift=0.2)]
    source, notes = report_page(read_runs(folders, command="report", seeds=True))
    overview = data_of(source)["overview"]
    mean = overview["panels"][0]["mean"]
    assert (mean["x"], mean["low"]) == ([1, 2], pytest.approx([0.1, 0.2]))
    assert notes == [
        "several of these runs have the seed 0",
        "these runs have taken different numbers of steps",
    ]


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
    assert data_of(target.read_text())["overview"]["differing"]["training.lr"] == ["1e-05", "2e-05"]


def test_the_page_lies_in_the_folder_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "demo", pipeline="sft")
    assert cli.main(["report", str(folder)]) == 0
    page = data_of((folder / "report.html").read_text())
    assert page["overview"]["runs"][0]["figures"]["before_after"]["eval/loss"] == [1.75, 1.5]
    assert (page["rollouts"], page["overview"]["answers"]) == ([], [])
    assert "Learning rate" in [panel["title"] for panel in page["overview"]["panels"]]


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
    (shown,) = page_of(run)["overview"]["runs"]
    assert (len(shown["events"]), shown["earlier"]) == (MOST_EVENTS, 50)
    assert shown["events"][0]["text"] == "w50."


def test_failures_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", end=None)
    lines = [json.loads(line) for line in (run / files.METRICS).read_text().splitlines()]
    lines[1] |= {"rollout/failures": 2.0, "health/restarts/inference": 1.0}
    lines[2] |= {"rollout/failures": 1.0}
    files.replace(run / files.METRICS, lines)
    assert page_of(run)["overview"]["failures"] == {
        "inference restarts (health/restarts/inference)": "1.000",
        "failures (rollout/failures)": "3.000",
    }


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


def test_folders_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    assert labels_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert labels_of([tmp_path / "a" / "run", tmp_path / "b" / "other"]) == ["run", "other"]


def test_wrong_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = make_run(tmp_path / "demo")
    (tmp_path / "empty").mkdir()
    none = make_run(tmp_path / "none", steps=0)
    with pytest.raises(DataError, match=r"empty holds no run\.json; expected the folder of a run"):
        page_of(*[tmp_path / "empty"])
    with pytest.raises(DataError, match=r"none has no steps yet: metrics\.jsonl and evaluations\.jsonl are empty"):
        page_of(*[none])
    with pytest.raises(ConfigError, match=r"different pipelines \(rlvr, sft\).*\n  fix: .*roll-like compare"):
        page_of(*[demo, make_run(tmp_path / "other", pipeline="sft")])
    with pytest.raises(ConfigError, match="is named twice"):
        page_of(*[demo, tmp_path / "x" / ".." / "demo"])
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
        page_of(*[demo])
    (demo / "config.yaml").write_text("- a")
    with pytest.raises(DataError, match=r"config\.yaml holds list, expected keys and values"):
        page_of(*[demo])
    (demo / "config.yaml").unlink()
    assert page_of(demo)["overview"]["config"] == ""
    files.rollouts_path(demo, 0, kind="eval").write_text("no JSON\n")
    with pytest.raises(DataError, match=r"rollouts of .* cannot be read"):
        page_of(*[demo])
    (demo / files.METRICS).write_text("no JSON\n{}\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: expected one JSON object per line"):
        page_of(*[demo])


def test_of_many_rollouts_a_page_has_some_of_the_whole_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo", steps=300)
    path = files.rollouts_path(run, 300, kind="eval")
    path.write_bytes(path.read_bytes() + b'{"half')
    source, notes = report_page(read_runs([run], command="report"))
    page = data_of(source)
    steps = [row["step"] for row in page["rollouts"] if row["kind"] == "train"]
    assert page["partly"]
    assert len(steps) == MOST_FILES - 2  # and two evaluations
    assert 1 <= max(after - before for before, after in itertools.pairwise(steps)) <= 4
    assert notes == [f"the last line of {path} is half written and was left out"]
    assert max(len(panel["lines"][0]["x"]) for panel in page["overview"]["panels"]) == 300
