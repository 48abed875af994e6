"""What a run came to, derived from its files alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from roll_like.metrics import files
from roll_like.metrics.curves import choose_panels, lines_of
from roll_like.metrics.plots import draw_panel
from roll_like.metrics.runs import Run
from roll_like.metrics.summary import later, pick_pairs, write_summary

RUN = {"name": "demo", "pipeline": "rlvr", "total_steps": 9, "sampled_rollouts": 2, "versions": {"python": "3"}}


def row(task: str, text: str, reward: float) -> dict[str, Any]:
    return {"task_id": task, "prompt": f"question {task}", "text": text, "reward": reward}


def write_run(run_dir: Path, steps: int = 8, **run: Any) -> None:
    (run_dir / files.ROLLOUTS).mkdir(parents=True)
    files.replace(run_dir / files.RUN, [{**RUN, **run}])
    files.append(
        run_dir / files.METRICS,
        [
            {"step": step, "time": 0.0, "elapsed": 30.0 + 5 * step, "rollout/reward/mean": step / 10,
             "rollout/samples": 16, "rollout/tokens": 160, "rollout/failures": step % 2, "time/step": 4.0,
             "time/train": 3.0, "train/grad_norm": math.nan if step == 2 else 1.0}
            for step in range(1, steps + 1)
        ],
    )  # fmt: skip


def test_the_end_figures(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    write_run(run_dir)
    files.append(
        run_dir / files.EVALUATIONS,
        [
            {"step": 0, "elapsed": 29.0, "eval/avg": 0.2, "eval/pass@4": 0.5},
            {"step": 4, "elapsed": 51.0, "eval/avg": 0.8},
            {"step": 8, "elapsed": 72.0, "eval/avg": 0.1},
            {"step": 8, "elapsed": 75.0, "eval/avg": 0.6, "eval/pass@4": 0.9},
        ],
    )
    files.append(
        run_dir / files.EVENTS,
        [{"kind": "warning", "elapsed": 31.0}, {"kind": "end", "elapsed": 80.0, "status": "finished", "failures": {}}],
    )
    figures = write_summary(run_dir).figures
    written = json.loads((run_dir / "summary.json").read_text())
    assert written.keys() == figures.keys()
    assert (figures["reward_first"], figures["reward_last"]) == pytest.approx((0.2, 0.7))
    assert (figures["eval_before"], figures["eval_after"], figures["eval_best"]) == (0.2, 0.6, 0.8)
    assert (figures["steps"], figures["seconds"], figures["samples_per_second"]) == (8, 80.0, 4.0)
    assert (figures["tokens_per_second"], figures["failures"], figures["warnings"]) == (40.0, 4, 1)
    assert figures["time"] == {"time/train": 24.0}
    assert figures["status"] == "finished"
    assert figures["before_after"]["eval/pass@4"] == [0.5, 0.9]
    assert written["before_after"]["train/grad_norm"] == ["NaN", 1.0]


def test_steps_in_which_there_was_nothing_to_learn(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    write_run(run_dir)
    lines = files.read_jsonl(run_dir / files.METRICS)
    equal = {"train/updates": 0, "rollout/groups/accepted": 4, "rollout/groups/zero_variance": 1.0}
    files.replace(run_dir / files.METRICS, [line | (equal if line["step"] in {2, 5} else {}) for line in lines])
    summary = write_summary(run_dir)
    console = Console(width=140, record=True)
    for table in summary.tables():
        console.print(table)
    assert "steps without an update: 2 of 8 (step 5: all 4 groups have equal rewards)" in console.export_text()
    steps = files.read_jsonl(run_dir / files.METRICS)
    axis = axes_of(steps, [])[0]
    (marks,) = [line for line in axis.lines if line.get_label() == "no update"]
    assert list(marks.get_xdata()) == [2, 5]


def test_what_is_named_at_the_end_is_there(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    write_run(run_dir)
    (run_dir / "model").mkdir()
    named = str(write_summary(run_dir).tables()[-1])
    assert str(run_dir / "metrics.jsonl") in named
    assert "rollouts" not in named  # of a run on given data the folder is empty
    assert "model" not in named
    (run_dir / files.ROLLOUTS / "step_000001.jsonl").touch()
    (run_dir / "model" / "config.json").touch()
    named = str(write_summary(run_dir).tables()[-1])
    assert str(run_dir / "rollouts") in named
    assert str(run_dir / "model") in named


def test_a_run_that_samples_in_some_steps_only(tmp_path: Path) -> None:
    """Preferences among the policy's own answers: three iterations of two steps."""
    run_dir = tmp_path / "demo"
    (run_dir / files.ROLLOUTS).mkdir(parents=True)
    files.replace(run_dir / files.RUN, [{**RUN, "pipeline": "dpo"}])
    lines = [
        {"step": step, "time": 0.0, "elapsed": 9.0 * step, "time/step": 2.0, "train/loss": 0.7, "train/samples": 8,
         "train/tokens": 40, "preference/accuracy": 0.5 + step / 20}
        for step in range(1, 7)
    ]  # fmt: skip
    for line in lines[::2]:
        line |= {"rollout/reward/mean": line["step"] / 10, "rollout/samples": 64, "rollout/tokens": 640}
    files.append(run_dir / files.METRICS, lines)
    evaluations = [{"step": step, "elapsed": 1.0, "eval/avg": step / 6} for step in (0, 6)]
    files.append(run_dir / files.EVALUATIONS, evaluations)
    figures = write_summary(run_dir).figures
    assert (figures["reward_first"], figures["reward_last"]) == pytest.approx((0.1, 0.5))
    assert figures["before_after"]["preference/accuracy"] == pytest.approx([0.6, 0.75])
    assert (figures["samples"], figures["tokens"], figures["tokens_per_second"]) == (48, 240, 20.0)
    titles = panel_titles(lines, evaluations)
    assert titles[:2] == ["Training reward", "Evaluation"]
    assert "Right preferences in training" in titles
    assert titles.count("Evaluation") == 1
    evaluations[0]["eval/accuracy"] = 0.5  # of given pairs
    assert panel_titles(lines, evaluations).count("Evaluation") == 2


def axes_of(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> list[Any]:
    """The panels of `curves.png`."""
    run = Run(Path(), {}, tuple(steps), tuple(evaluations), ())
    axes = []
    for panel in choose_panels(steps, evaluations, brief=True):
        axes.append(Figure().subplots())
        draw_panel(axes[-1], panel, lines_of(panel, run))
    return axes


def panel_titles(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> list[str]:
    return [axis.get_title() for axis in axes_of(steps, evaluations)]


def test_the_curves_show_pass_at_k_for_the_k_of_the_run() -> None:
    evaluations = [{"step": step, "eval/avg": 0.5, "eval/pass@8": 0.75, "eval/failures": 0.0} for step in (0, 4)]
    evaluations[1] |= {"eval/pass@1": 0.5, "eval/pass@2": 0.6, "eval/maj@8": 0.7}
    axis = axes_of([{"step": 1, "rollout/reward/mean": 0.5}], evaluations)[1]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["eval/avg", "eval/pass@8", "eval/maj@8"]


def test_a_dead_run_is_unfinished(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    write_run(run_dir, steps=2)
    files.append(run_dir / files.EVENTS, [{"kind": "end", "elapsed": 9.0, "status": "stopped", "failures": {}},
                                          {"kind": "warning", "elapsed": 35.0}])  # fmt: skip
    with (run_dir / files.METRICS).open("a") as file:
        file.write('{"step": 3, "rollout')
    figures = write_summary(run_dir).figures
    assert (figures["status"], figures["steps"], figures["seconds"]) == ("unfinished", 2, 40.0)
    assert (figures["reward_first"], figures["reward_last"]) == pytest.approx((0.1, 0.2))  # no step counts as both
    assert (figures["eval_before"], figures["eval_after"]) == (None, None)
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_one_step_has_a_value_before_and_none_after(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    write_run(run_dir, steps=1)
    summary = write_summary(run_dir)
    assert summary.figures["before_after"]["rollout/reward/mean"] == [pytest.approx(0.1), None]
    assert (summary.figures["reward_first"], summary.figures["reward_last"]) == pytest.approx((0.1, 0.1))
    (row,) = [line for line in printed(summary.tables()).splitlines() if "rollout/reward/mean" in line]
    assert row.split()[-3:] == ["│", "│", "│"] or "–" in row


def test_a_run_without_steps_has_an_evaluation_only(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    write_run(run_dir, steps=0)
    files.append(run_dir / files.EVALUATIONS, [{"step": 0, "elapsed": 29.0, "eval/avg": 0.2}])
    summary = write_summary(run_dir)
    assert (summary.figures["reward_first"], summary.figures["samples_per_second"]) == (None, None)
    assert summary.figures["eval_before"] == 0.2
    assert "eval/avg" in printed(summary.tables())


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no run\.json; expected the folder of a run"):
        write_summary(tmp_path)


def printed(renderables: list[Any]) -> str:
    console = Console(width=110, color_system=None, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(*renderables)
        return console.export_text()


def test_the_tables_show_before_after_samples_and_places(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    write_run(run_dir)
    files.replace(files.rollouts_path(run_dir, 1), [row("a", "[red]bad[/red]", 0.0), row("b", "wor\x1b[2Jse", 0.25)])
    files.replace(files.rollouts_path(run_dir, 8), [row("a", "good", 1.0), row("b", "better", 0.75)])
    text = printed(write_summary(run_dir).tables())
    for part in ("demo: 8 steps", "rollout/reward/mean", "0.200", "0.700", "+0.500", "question a", "[red]bad[/red]",
                 "better", "0.750", "4.000 samples/s", "curves.png", "roll-like report"):  # fmt: skip
        assert part in text
    assert "step 1" in text
    assert "step 8" in text
    assert "wor\\x1b[2Jse" in text
    assert "\x1b" not in text


def test_evaluations_are_compared_rather_than_different_training_tasks(tmp_path: Path) -> None:
    write_run(tmp_path / "demo")
    run_dir = tmp_path / "demo"
    files.replace(files.rollouts_path(run_dir, 1), [row("train", "x", 0.0)])
    for step, text in ((0, "before"), (10, "after"), (2, "between")):
        rows = [row(str(task), f"{text} {task}", 0.5) for task in range(100) for _ in range(4)]
        files.replace(files.rollouts_path(run_dir, step, kind="eval"), rows)
    pairs = pick_pairs(run_dir, 4)
    assert [(pair.before["text"], pair.after["text"]) for pair in pairs] == [
        (f"before {task}", f"after {task}") for task in (0, 25, 50, 75)
    ]
    assert (pairs[0].before_label, pairs[0].after_label) == ("before training", "after step 10")
    assert pick_pairs(run_dir, 0) == []


def test_the_tasks_of_the_first_step_are_looked_for_in_later_ones(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    write_run(run_dir)
    for step, tasks in ((1, "abc"), (5, "cb"), (7, "bd"), (8, "de")):
        files.replace(files.rollouts_path(run_dir, step), [row(task, f"{task} of {step}", 0) for task in tasks])
    pairs = pick_pairs(run_dir, 10)
    assert [(pair.after["text"], pair.after_label) for pair in pairs] == [
        ("b of 7", "step 7"),
        ("c of 5", "step 5"),
    ]
    assert all(pair.before["task_id"] == pair.after["task_id"] for pair in pairs)
    assert later(pairs) == "later steps"


def test_training_rollouts_pair_by_task_then_by_order(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    write_run(run_dir)
    files.replace(files.rollouts_path(run_dir, 1), [row("a", "1", 0), row("b", "2", 0), row("c", "3", 0)])
    files.replace(files.rollouts_path(run_dir, 8), [row("d", "4", 0), row("b", "5", 0)])
    pairs = pick_pairs(run_dir, 10)
    assert [(pair.before["task_id"], pair.after["task_id"]) for pair in pairs] == [("b", "b")]
    files.replace(files.rollouts_path(run_dir, 8), [row("d", "4", 0), row("e", "5", 0)])
    pairs = pick_pairs(run_dir, 10)
    assert [(pair.before["task_id"], pair.after["task_id"]) for pair in pairs] == [("a", "d"), ("b", "e")]
