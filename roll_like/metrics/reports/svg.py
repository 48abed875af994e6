"""Curves as SVG that stands in a page: drawn by matplotlib, coloured by the page's style sheet.

Colours are those of the page, in light and in dark mode: figures are drawn in stand-in colours, and variables of CSS
replace them.
"""

from __future__ import annotations

import html
import io
import logging
import re
from collections.abc import Sequence
from typing import Any

from roll_like.metrics.plots import fit_constant, mark_lost
from roll_like.metrics.reports.lines import Line, thinned

#: Colours of lines in the style sheet, `--line-0` to `--line-7`; further lines are dashed.
COLOURS = 8
DASHES = ("-", "--", ":", "-.")
#: The same on white, for PNG files.
ON_WHITE = ("#1d5fa8", "#d1642e", "#2a9d8f", "#9b5de5", "#b8860b", "#6b7280", "#c2185b", "#5d7a1f")
_INK, _GRID = "#010101", "#020202"
_STAND_INS = tuple(f"#0300{number:02x}" for number in range(COLOURS))
_WIDTH, _HEIGHT = 4.6, 2.5  # inches; the page scales it


def curves_svg(lines: Sequence[Line], *, number: int, label: str) -> str:
    """Return an SVG element with the curves of a panel.

    Args:
        lines: What to draw.
        number: Which figure of its page it is; keeps the ids of the page apart.
        label: What it shows, for screen readers. Escaped here.
    """
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # says that it builds a cache
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # text stays text, and is not read as mathematics; ids are the same each time
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "roll_like", "text.parse_math": False}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        FigureCanvasSVG(figure)
        axis = figure.subplots()
        draw_lines(axis, lines, _STAND_INS)
        style_axis(axis, ink=_INK, grid=_GRID)
        figure.patch.set_visible(False)
        axis.patch.set_visible(False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _in_page(file.getvalue(), number, label)


def draw_lines(axis: Any, lines: Sequence[Line], colours: Sequence[str]) -> None:
    """Draw lines with their bands into an axis of matplotlib, in the order of colours and dashes."""
    for index, line in enumerate(map(thinned, lines)):
        colour, dash = colours[index % len(colours)], DASHES[index // len(colours) % len(DASHES)]
        for steps, values in line.faint:
            axis.plot(steps, values, color=colour, linewidth=1.0, alpha=0.35)
        steps, values = line.points
        if len(line.low):
            axis.fill_between(steps, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
        # a single point has no line
        marker = "o" if line.marked or len(steps) == 1 else ""
        axis.plot(steps, values, color=colour, linestyle=dash, linewidth=2.0, marker=marker, markersize=4)
    mark_lost(axis, sorted({step for line in lines for step in line.lost}))
    fit_constant(axis, [value for line in lines for _, values in (line.points, *line.faint) for value in values])


def style_axis(axis: Any, *, ink: str, grid: str) -> None:
    """Give an axis whole steps, a light grid and no frame on the right and on top."""
    axis.set_xlabel("step", color=ink)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(grid)
    axis.tick_params(color=grid, labelcolor=ink)
    axis.grid(axis="y", color=grid, linewidth=0.6)
    axis.set_axisbelow(True)


def _in_page(document: str, number: int, label: str) -> str:
    """Turn a document of SVG into an element: without what needs a network, and with ids and colours of the page."""
    body = document[document.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r"font-family: [^;\"]+;? ?", "", body)
    view = re.search(r'viewBox="([^"]+)"', body)
    size = view[1] if view else f"0 0 {_WIDTH * 72:g} {_HEIGHT * 72:g}"
    body = re.sub(r"<svg[^>]*>", f'<svg viewBox="{size}" role="img" aria-label="{html.escape(label)}">', body, count=1)
    used = set(re.findall(r'(?:href="|url\()#([\w.-]+)', body))
    body = re.sub(r'\s+id="([\w.-]+)"', lambda found: f' id="f{number}-{found[1]}"' if found[1] in used else "", body)
    body = re.sub(r'(href="|url\()#', rf"\g<1>#f{number}-", body)
    colours = {_INK: "var(--ink)", _GRID: "var(--rule)"}
    colours |= {colour: f"var(--line-{index})" for index, colour in enumerate(_STAND_INS)}
    for stand_in, variable in colours.items():
        body = body.replace(stand_in, variable)
    return body.strip()
