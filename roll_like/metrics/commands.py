"""The commands that look at runs, and change none: their options, and what each calls.

Nothing heavy is imported here: `roll-like --help` reads this file too.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from roll_like.errors import OK

#: Adds a command to the parser: its name, what runs it, and what it does in a few words.
Add: TypeAlias = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
NumberT = TypeVar("NumberT", int, float)
#: TCP ports that a server can listen on.
PORTS = (1, 65535)
#: The page of a report, in the folder of its first run.
REPORT = "report.html"


def add_commands(add: Add) -> None:
    """Add every command about runs."""
    report = add("report", _report, "write one page about a run, or about the seeds of one experiment")
    _add_runs(report, "run, by its name or folder; several are seeds of one experiment")
    report.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"HTML file to write; default: {REPORT} in the run's folder"
    )

    compare = add("compare", _compare, "put runs beside each other: figures, configurations, curves")
    _add_runs(compare, "run, by its name or folder; two or more")
    compare.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="also write the curves: FILE.html, or FILE.png"
    )

    watch = add("watch", _watch, "follow a run that goes on; of one that has ended, print the summary")
    watch.add_argument("run", metavar="RUN", help="name of a run, or its folder")
    add_output_dir(watch)

    ui = add("ui", _ui, "serve the MLflow user interface on the store of the runs")
    ui.add_argument("run", nargs="?", metavar="RUN", help="run whose store is served; default: that of all runs")
    add_output_dir(ui)
    ui.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    ui.add_argument(
        "--port", type=number_within(int, *PORTS), default=5000, help="TCP port to listen on (default: 5000)"
    )


def number_within(kind: type[NumberT], least: float, most: float = math.inf) -> Callable[[str], NumberT]:
    """Return what reads an option's number, and refuses one outside its bounds."""
    words = f"expected a {'whole ' if kind is int else ''}number "
    words += f"of {least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"

    def read(text: str) -> NumberT:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least) - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{words}, found {text!r}")
        return value

    return read


def _add_runs(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help=text)
    add_output_dir(parser)


def add_output_dir(parser: argparse.ArgumentParser) -> None:
    """Add the folder in which runs are looked up by their names."""
    parser.add_argument(
        "--output-dir", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default: runs)"
    )


def _report(arguments: argparse.Namespace) -> int:
    from roll_like.metrics.reports.page import write_page
    from roll_like.metrics.reports.report import report_page
    from roll_like.metrics.runs import find_run

    folders = [find_run(run, arguments.output_dir, command="report") for run in arguments.runs]
    page, notes = report_page(folders)
    path = arguments.output or folders[0] / REPORT
    write_page(path, page)
    warn(notes)
    print(f"written: {path}")
    return OK


def _compare(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from roll_like.metrics.reports.comparison import compare, write_comparison
    from roll_like.metrics.runs import find_run

    comparison = compare([find_run(run, arguments.output_dir, command="compare") for run in arguments.runs])
    if arguments.output is not None:
        write_comparison(comparison, arguments.output)
    console = Console(highlight=False)
    console.print(*comparison.tables(console.width))
    warn(comparison.notes)
    if arguments.output is not None:
        print(f"written: {arguments.output}")
    return OK


def _watch(arguments: argparse.Namespace) -> int:
    from roll_like.metrics.runs import find_run
    from roll_like.metrics.watcher import watch

    return watch(find_run(arguments.run, arguments.output_dir, command="watch"))


def _ui(arguments: argparse.Namespace) -> int:
    from roll_like.metrics.mlflow_ui import find_store, serve_mlflow

    return serve_mlflow(find_store(arguments.run, arguments.output_dir), arguments.host, arguments.port)


def warn(notes: Sequence[str]) -> None:
    """Print warnings to standard error."""
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
