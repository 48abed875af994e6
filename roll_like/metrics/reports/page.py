"""Pages of HTML that stand alone: no script, no network, every text of a model or a data set escaped.

Templates escape what they are given (jinja2's autoescape). Only the SVG of a figure goes in as it is; it has no text of
a run in it. A Content-Security-Policy forbids scripts and loads once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from roll_like.errors import ConfigError
from roll_like.metrics import files
from roll_like.metrics.names import metric_info
from roll_like.metrics.panels import Panel
from roll_like.metrics.reports.lines import Line
from roll_like.metrics.reports.svg import COLOURS, DASHES, curves_svg
from roll_like.metrics.rollout_text import printable


@dataclass(frozen=True, slots=True)
class Figure:
    """A panel on a page.

    Attributes:
        title: What it shows.
        unit: Unit of its first metric.
        names: Its metrics.
        svg: Its curves.
        legend: Label, colour number and whether the line is dashed, of each line; empty where there is one line only.
    """

    title: str
    unit: str
    names: str
    svg: str
    legend: tuple[tuple[str, int, bool], ...]


def figure_of(panel: Panel, lines: Sequence[Line], number: int, *, legend: bool) -> Figure:
    """Return a panel with its curves as SVG.

    Args:
        panel: What it shows.
        lines: At least one.
        number: Which figure of the page it is.
        legend: Whether its lines are named below it, where there are several.
    """
    return Figure(
        title=panel.title,
        unit=metric_info(lines[0].name).unit,
        names=", ".join(dict.fromkeys(line.name for line in lines)),
        svg=curves_svg(lines, number=number, label=panel.title),
        legend=legend_of([line.label for line in lines]) if legend and len(lines) > 1 else (),
    )


def legend_of(labels: Sequence[str]) -> tuple[tuple[str, int, bool], ...]:
    """Return each label with the number of its colour, and whether its line is dashed."""
    return tuple((label, index % COLOURS, index // COLOURS % len(DASHES) > 0) for index, label in enumerate(labels))


def render_page(template: str, *, folder: Path | None = None, **content: Any) -> str:
    """Return a page.

    Args:
        template: Name of a file in `templates/`, or in `folder`.
        folder: Where else templates are.
        content: What the template names; all text in it is escaped.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([Path(__file__).parent / "templates", *([] if folder is None else [folder])]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # control characters, and those that turn the direction of what follows, are no text
    environment.filters["printable"] = lambda text: printable(str(text))
    return environment.get_template(template).render(version=version("roll-like"), **content)


def write_page(path: Path, text: str) -> None:
    """Write a page, and the folder that it is to lie in.

    Raises:
        ConfigError: It cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_text(path, text)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> ConfigError:
    """Return the error of a page or an image that cannot be written."""
    return ConfigError(
        f"-o {path} cannot be written: {error.strerror}", fix="name a file in a folder that you may write to"
    )
