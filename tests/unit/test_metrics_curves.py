"""Panels show what was logged: which there are, limits of constant series, values that are not finite, single steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from roll_like.metrics.curves import (
    PANELS,
    STRETCHES,
    Line,
    Panel,
    averaged,
    choose_panels,
    lines_of,
    mean_line,
    smoothed,
    split_panels,
    thinned,
)
from roll_like.metrics.names import metric_info
from roll_like.metrics.plots import draw_curves, draw_panel, fit_constant, plot_finite
from roll_like.metrics.runs import Run

NAN = math.nan
SAMPLING = {"rollout/reward/mean": 0.5, "rollout/response_length/mean": 40.0, "train/grad_norm": 1.0}


@pytest.fixture
def axis() -> Any:
    figure = Figure()
    FigureCanvasAgg(figure)
    return figure.subplots()


def titles(logged: dict[str, float], evaluated: dict[str, float] | None = None) -> list[str]:
    steps = [{"step": 1, "time/step": 1.0, **logged}]
    chosen = choose_panels(steps, [{"step": 0, **evaluated}] if evaluated else [], brief=True)
    return [panel.title for panel in chosen]


def run_of(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]] | None = None) -> Run:
    return Run(Path(), {"name": "run"}, tuple(steps), tuple(evaluations or ()), ())


def test_every_panel_is_of_metrics_that_have_a_name() -> None:
    plain = [name for panel in PANELS for name in panel.names if not set(name) & set("(.+")]
    assert [name for name in plain if not metric_info(name).description] == []


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        ({}, []),
        ({"train/kl": 0.1}, ["KL from reference"]),
        ({"mismatch/kl": 0.1}, ["Engine mismatch"]),
        ({"train/kl": 0.1, "mismatch/kl": 0.1}, ["KL from reference, engine mismatch"]),
    ],
)
def test_the_panel_of_divergences_names_those_that_are_logged(logged: dict[str, float], expected: list[str]) -> None:
    found = titles({**SAMPLING, **logged}, {"eval/avg": 0.5})
    rest = ["Gradient norm before clipping"]
    assert found == ["Training reward", "Evaluation", "Response length", *expected, *rest]
    of_report = choose_panels([{"step": 1, **SAMPLING, **logged}], [])
    assert [panel.title for panel in of_report if "KL" in panel.title or "mismatch" in panel.title] == expected


def test_beside_each_other_divergences_have_their_own_names() -> None:
    steps = [{"step": 1, **SAMPLING, "train/kl": 0.1, "mismatch/kl": 0.1}]
    found = [panel.title for panel in split_panels(choose_panels(steps, []))]
    assert found[2:4] == ["KL from reference", "Engine mismatch"]


def test_without_evaluations_there_is_no_panel_of_them() -> None:
    assert "Evaluation" not in titles(SAMPLING)
    assert titles({}) == []
    assert titles({"time/train": 0.5}) == ["Time of a step"]


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ([0.5, 0.5, 0.5], (0.0, 1.0)),
        ([-2.0, -2.0], (-4.0, 0.0)),
        ([1e-3], (0.0, 2e-3)),
        ([0.1 + 0.2, 0.3], (0.0, 0.6)),
        ([0.0, 0.0], (-0.05, 1.0)),
        ([0.0, NAN, 0.0], (-0.05, 1.0)),
    ],
)
def test_a_constant_series_has_an_axis_from_zero(axis: Any, values: list[float], limits: tuple[float, float]) -> None:
    axis.plot(range(len(values)), values)
    fit_constant(axis, values)
    assert axis.get_ylim() == pytest.approx(limits)
    assert [text.get_text() for text in axis.texts] == (["0 throughout"] if limits[0] == -0.05 else [])


def test_other_series_keep_their_axis(axis: Any) -> None:
    axis.plot([1, 2], [0.5, 0.50001])
    before = axis.get_ylim()
    fit_constant(axis, [0.5, 0.50001])
    assert axis.get_ylim() == before


def test_a_value_between_two_that_are_not_finite_has_a_mark(axis: Any) -> None:
    plot_finite(axis, ([1, 2, 3, 4, 5, 6], [1.0, NAN, 2.0, NAN, 3.0, 4.0]))
    (line,) = axis.lines
    assert (line.get_marker(), line.get_markevery()) == ("o", [0, 2])
    assert [math.isnan(value) for value in line.get_ydata()] == [False, True, False, True, False, False]


def test_a_mean_over_steps_leaves_out_what_is_not_finite() -> None:
    assert smoothed([1.0, NAN, 3.0, 3.0, 3.0, math.inf]) == pytest.approx([1.0, 2.0, 3.0, 3.0, 3.0, 3.0])
    assert math.isnan(smoothed([NAN])[0])


def test_steps_without_a_finite_value_are_marked(axis: Any) -> None:
    lines = [Line("a", "a", ([1, 3], [0.5, 0.7]), lost=[2]), Line("b", "b", ([1], [0.6]), lost=[2, 3])]
    draw_panel(axis, Panel(title="both", names=("a", "b")), lines)
    crosses = [line for line in axis.lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[2, 3]]


@pytest.mark.parametrize(("count", "value"), [(1, 0.0), (1, NAN), (2, math.inf), (7, 0.3), (7, NAN)])
def test_curves_of_any_values_are_drawn(tmp_path: Path, count: int, value: float) -> None:
    logged = {
        **dict.fromkeys(SAMPLING, value),
        "train/kl": value,
        "mismatch/kl": value,
        "rollout/domain/a/reward": value,
    }
    steps = [{"step": step, "time/step": 1.0, "time/train": 0.5, **logged} for step in range(1, count + 1)]
    draw_curves(tmp_path / "curves.png", run_of(steps, [{"step": 0, "eval/avg": value}]))
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def rewards(*values: float) -> Run:
    return run_of([{"step": step, "rollout/reward/mean": value} for step, value in enumerate(values, 1)])


def test_a_band_is_over_the_steps_of_which_all_runs_have_a_value() -> None:
    panel = Panel(title="reward", names=("rollout/reward/mean",))
    runs = [rewards(0.1, 0.2, 0.3, 0.4), rewards(0.3, 0.4, NAN), run_of([{"step": 1}])]
    mean = mean_line([line for run in runs for line in lines_of(panel, run)])
    assert mean is not None
    assert list(mean.points[0]) == [1, 2]
    assert list(mean.points[1]) == pytest.approx([0.2, 0.3])
    assert list(mean.low) == pytest.approx([0.1, 0.2])
    assert list(mean.high) == pytest.approx([0.3, 0.4])
    assert mean_line(lines_of(panel, runs[0])) is None


def test_values_that_are_not_finite_interrupt_a_line() -> None:
    (line,) = lines_of(Panel(title="reward", names=("rollout/reward/mean",), smooth=True), rewards(NAN, math.inf, 1, 2))
    assert list(line.lost) == [1, 2]
    assert [math.isnan(value) for value in line.points[1]] == [True, True, False, False]


def test_long_curves_are_thinned_and_keep_their_peaks() -> None:
    steps, values = list(range(1, 10_001)), [0.0] * 10_000
    values[4321], values[4322], values[7000] = 7.0, -7.0, NAN
    short = Line("x", "x", ([1, 2], [0.0, 1.0]))
    assert thinned(short) == short
    line = thinned(Line("x", "x", (steps, values), faint=(steps, values)))
    for kept, heights in (line.points, line.faint or ((), ())):
        assert list(kept) == sorted(kept)
        assert len(kept) <= 2 * STRETCHES
        assert dict(zip(kept, heights, strict=True))[4322] == 7.0
        assert dict(zip(kept, heights, strict=True))[4323] == -7.0
    values[7000] = 0.0
    band = thinned(Line("x", "x", (steps, [1.0] * 10_000), low=values, high=[9.0 + value for value in values]))
    assert len(band.points[0]) == len(band.low) == len(band.high) == STRETCHES
    assert (min(band.low), max(band.high), set(band.points[1])) == (-7.0, 16.0, {1.0})
    assert sum(averaged((steps, values))[1]) == pytest.approx(0.0)


def test_panels_are_split_by_metric() -> None:
    clipped = Panel(title="Clipped", names=("train/clip_fraction_high", "train/clip_fraction_low"))
    panels = [
        clipped,
        Panel(title="KL", names=("train/kl", "mismatch/kl")),
        Panel(title="Loss", names=("train/loss",)),
        Panel(title="again", names=("train/kl",)),
    ]
    assert [(panel.title, panel.names) for panel in split_panels(panels)] == [
        ("Clipped: clipped high", ("train/clip_fraction_high",)),
        ("Clipped: clipped low", ("train/clip_fraction_low",)),
        ("KL from reference", ("train/kl",)),
        ("Engine mismatch", ("mismatch/kl",)),
        ("Loss", ("train/loss",)),
    ]
