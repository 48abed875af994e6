"""One table names every metric; the page of the documentation shows the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_like.metrics.names import METRICS, TIMERS, metric_info
from roll_like.metrics.progress import ASYNCHRONOUS, CURVES


@pytest.mark.parametrize(
    ("name", "label", "unit"),
    [
        ("rollout/reward/mean", "reward", ""),
        ("rollout/reward/ifeval", "ifeval", ""),
        ("rollout/ifeval/strict", "ifeval/strict", ""),
        ("rollout/source/gsm8k/reward", "gsm8k", ""),
        ("eval/pass@8", "eval pass@8", "share"),
        ("eval/domain/maths/avg", "maths", ""),
        ("eval/domain/maths/pass@8", "maths", "share"),
        ("eval/maj@8", "eval maj@8", "share"),
        ("eval/base/avg", "base avg", ""),
        ("eval/adapter/sft/pass@4", "sft pass@4", ""),
        ("eval/domain/maths/maj@8", "maths", "share"),
        ("time/evaluate", "evaluate", "s"),
        ("time/something_else", "something_else", "s"),
        ("mine", "mine", ""),
    ],
)
def test_the_first_row_that_fits_describes(name: str, label: str, unit: str) -> None:
    info = metric_info(name)
    assert (info.name, info.label, info.unit) == (name, label, unit)


def test_names_are_unique_and_described() -> None:
    names = [info.name for info in METRICS]
    assert len(set(names)) == len(names)
    assert all(info.description.endswith(".") for info in METRICS)


def test_no_pattern_hides_a_later_row() -> None:
    assert [info for info in METRICS if "<" not in info.name and metric_info(info.name) != info] == []


def test_console_and_plots_show_known_names() -> None:
    shown = {*CURVES, *ASYNCHRONOUS, *TIMERS}
    assert [name for name in shown if not metric_info(name).description] == []


def test_the_page_shows_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    rows = [f"| `{info.name}` | {info.unit or '–'} | {info.description} |" for info in METRICS]
    assert "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows]) in page.read_text()
