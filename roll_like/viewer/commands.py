"""The commands that look at runs, and change none: their options, and what each calls.

    report     one page about a run or several: figures, curves, rollouts, timeline, configuration
    compare    figures of several runs in the terminal; with -o the same page, or an image of the curves
    rollouts   what a policy wrote, in the terminal; with -o or --diff the same page
    pass-rates how often each row's task was solved, beside the rows
    watch, ui  a run that goes on; MLflow
    profile    a trace of the next step of a run that goes on

Nothing heavy is imported here: `roll-like --help` reads this file too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from roll_like.errors import OK, ConfigError, DataError
from roll_like.metrics.commands import PORTS, Add, add_output_dir, number_within, warn

if TYPE_CHECKING:
    from roll_like.viewer.browse import Rollouts, Wanted
    from roll_like.viewer.comparison import RunComparison

#: Pages in the folder of the first run, where no other name is given.
REPORT, DIFF = "report.html", "diff.html"


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
        "-o", "--output", type=Path, metavar="FILE", help="also write a page, FILE.html, or the curves, FILE.png"
    )
    _add_rollouts(add)

    rates = add("pass-rates", _pass_rates, "write a run's data with how often each row's task was solved")
    _add_run(rates)
    rates.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="directory for a file a source")
    rates.add_argument(
        "--kind", choices=("train", "evaluate"), default="train", help="answers of training (default) or of evaluations"
    )
    rates.add_argument(
        "--solved-at", type=float, default=1.0, metavar="R", help="least reward of a right answer (default: 1)"
    )

    watch = add("watch", _watch, "follow a run or a service that goes on; of a run that has ended, print the summary")
    _add_run(watch)

    profile = add("profile", _profile, "profile the next step of a run that goes on, for ui.perfetto.dev")
    _add_run(profile)

    ui = add("ui", _ui, "serve the MLflow user interface on the store of the runs")
    ui.add_argument("run", nargs="?", metavar="RUN", help="run whose store is served; default: that of all runs")
    add_output_dir(ui)
    ui.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    ui.add_argument(
        "--port", type=number_within(int, *PORTS), default=5000, help="TCP port to listen on (default: 5000)"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of a run, or its folder")
    add_output_dir(parser)


def _add_runs(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help=text)
    add_output_dir(parser)


def _add_rollouts(add: Add) -> None:
    parser = add("rollouts", _rollouts, "show what a run's policy wrote: list, one whole, or a page")
    _add_run(parser)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--show", metavar="ID", help="print one whole, turn by turn")
    one.add_argument(
        "--diff", nargs=2, metavar=("ID", "ID"), help=f"write a page of two beside each other (default: {DIFF})"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a page for the browser: FILE.html")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead")
    wanted = parser.add_argument_group("what a list or a page holds")
    wanted.add_argument("--step", metavar="N|A:B", help="of one step, or from A to B; A: and :B are open")
    wanted.add_argument("--kind", choices=("train", "evaluate"), help="of training or of evaluations; default: both")
    wanted.add_argument("--domain", metavar="NAME", help="of one domain or environment")
    wanted.add_argument(
        "--reward", metavar="MIN:MAX", help="with a reward in these bounds (--reward=-1:0 for negative)"
    )
    solved = wanted.add_mutually_exclusive_group()
    solved.add_argument("--success", action="store_const", const=True, help="that solved their task")
    solved.add_argument("--failure", action="store_const", const=False, dest="success", help="that did not")
    wanted.add_argument(
        "--limit", type=int, metavar="N", help="at most N, 0 for all (default: 50; 1000 on a page; all with --json)"
    )


def _report(arguments: argparse.Namespace) -> int:
    from roll_like.metrics.runs import find_run
    from roll_like.viewer.comparison import read_runs

    folders = [find_run(run, arguments.output_dir, command="report") for run in arguments.runs]
    comparison = read_runs(folders, command="report", seeds=len(folders) > 1)
    path = arguments.output or folders[0] / REPORT
    warn(_write_report(comparison, path, together=True))
    print(f"written: {path}")
    return OK


def _write_report(comparison: RunComparison, path: Path, *, together: bool) -> Sequence[str]:
    """Write the page of runs with figures; return what is to be noted of it."""
    from roll_like.viewer.page import report_page, write_page

    text, notes = report_page(comparison, together=together)
    write_page(path, text)
    return notes


def _compare(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from roll_like.metrics.runs import find_run
    from roll_like.viewer.comparison import compare
    from roll_like.viewer.page import unwritable

    comparison = compare([find_run(run, arguments.output_dir, command="compare") for run in arguments.runs])
    path: Path | None = arguments.output
    notes = comparison.notes
    if path is not None:
        if path.suffix.lower() == ".png":
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                comparison.draw(path)
            except OSError as error:
                raise unwritable(path, error) from error
        elif path.suffix.lower() in {".html", ".htm"}:
            notes = _write_report(comparison, path, together=False)
        else:
            raise ConfigError(f"-o {path}: expected a name that ends in .html or .png", fix=f"write -o {path}.html")
    console = Console(highlight=False)
    console.print(*comparison.tables(console.width))
    warn(notes)
    if path is not None:
        print(f"written: {path}")
    return OK


def _pass_rates(arguments: argparse.Namespace) -> int:
    from roll_like.metrics.runs import find_run
    from roll_like.viewer.pass_rates import write_pass_rates

    folder = find_run(arguments.run, arguments.output_dir, command="pass-rates")
    kind: Literal["step", "eval"] = "step" if arguments.kind == "train" else "eval"
    for written in write_pass_rates(folder, arguments.output, kind, arguments.solved_at):
        print(written)
    return OK


def _profile(arguments: argparse.Namespace) -> int:
    from roll_like.metrics.profiles import profile_stem, request_profile
    from roll_like.metrics.runs import find_run

    folder = find_run(arguments.run, arguments.output_dir, command="profile")
    found = request_profile(folder)
    print(f"written: {profile_stem(folder, found['step']).with_suffix('.json.gz')}")
    for wait in found["waits"]:
        print(f"  {wait}")
    return OK


def _rollouts(arguments: argparse.Namespace) -> int:
    from roll_like.viewer.browse import Rollouts, Wanted, browse, find_rollouts, read_range

    ranges = {}
    if arguments.step is not None:
        ranges["steps"] = read_range("--step", arguments.step, int)
    if arguments.reward is not None:
        ranges["rewards"] = read_range("--reward", arguments.reward)
    if arguments.limit is not None and arguments.limit < 0:
        raise ConfigError(f"--limit {arguments.limit}: expected a number of rollouts", fix="write --limit 0 for all")
    rollouts = Rollouts(find_rollouts(arguments.run, arguments.output_dir))
    wanted = Wanted(kind=arguments.kind, domain=arguments.domain, success=arguments.success, **ranges)
    named: Sequence[str] = arguments.diff or ([arguments.show] if arguments.show is not None else [])
    if named and (wanted != Wanted() or arguments.limit is not None):
        raise ConfigError(
            "--show and --diff name their rollouts by id, --step and the like choose what a list holds",
            fix="leave out one or the other",
        )
    if arguments.output is not None or (arguments.diff and not arguments.json):
        return _write_rollouts(rollouts, wanted, arguments, named)
    browse(rollouts, wanted, show=named, limit=arguments.limit, as_json=arguments.json)
    return OK


def _write_rollouts(rollouts: Rollouts, wanted: Wanted, arguments: argparse.Namespace, named: Sequence[str]) -> int:
    from roll_like.viewer.browse import nothing_found
    from roll_like.viewer.page import choose_rollouts, page, write_page

    path: Path = arguments.output or rollouts.run_dir / DIFF
    if path.suffix != ".html" or arguments.json:
        raise ConfigError(
            f"-o {path}{' --json' if arguments.json else ''}: a page is HTML, expected a file that ends in .html",
            fix="write -o PAGE.html; to keep JSON, leave out -o: roll-like rollouts RUN --json > FILE",
        )
    rows = [rollouts.get(name) for name in named] if named else rollouts.select(wanted)
    chosen = choose_rollouts(rollouts, rows, limit=arguments.limit)
    if not chosen.found:
        raise DataError(f"-o {path}: {nothing_found(rollouts)}", fix="choose others, or leave the choice out")
    held, notes = len(chosen.records), list(chosen.notes)
    if left_out := chosen.found - held:
        notes.append(f"{left_out} more rollouts were left out, evenly over groups; with --limit 0 the page holds all")
    title = f"{rollouts.run_dir.name}: rollouts"
    text = page(title, rollouts=[chosen], beside=named if arguments.diff else (), notes=notes)
    write_page(path, text)
    warn(chosen.notes)
    of = "" if held == chosen.found else f" of {chosen.found}; --limit N holds more, --limit 0 all"
    print(f"written: {path} ({len(text) / 1e6:.1f} MB, {held} rollouts{of})")
    return OK


def _watch(arguments: argparse.Namespace) -> int:
    from roll_like.metrics.runs import find_run
    from roll_like.metrics.watcher import watch
    from roll_like.service.status import STATUS, watch_status

    folder = find_run(arguments.run, arguments.output_dir, command="watch")
    return watch_status(folder) if (folder / STATUS).is_file() else watch(folder)


def _ui(arguments: argparse.Namespace) -> int:
    from roll_like.metrics.mlflow_ui import find_store, serve_mlflow

    return serve_mlflow(find_store(arguments.run, arguments.output_dir), arguments.host, arguments.port)
