"""The command that looks at rollouts: its options, and what it calls.

Nothing heavy is imported here: `roll-like --help` reads this file too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from roll_like.errors import OK, ConfigError, DataError
from roll_like.metrics.commands import Add, add_output_dir, warn

if TYPE_CHECKING:
    from roll_like.viewer.browse import Rollouts, Wanted


def add_rollouts(add: Add) -> None:
    """Add `rollouts`."""
    parser = add("rollouts", _rollouts, "show what a run's policy wrote: list, one whole, two compared, or a page")
    parser.add_argument("run", metavar="RUN", help="name of a run, or its folder")
    add_output_dir(parser)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--show", metavar="ID", help="print one whole, turn by turn")
    one.add_argument("--diff", nargs=2, metavar=("ID", "ID"), help="compare two, side by side")
    one.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a page for the browser: FILE.html")
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
    if arguments.output is not None:
        return _write_page(rollouts, wanted, arguments)
    browse(
        rollouts,
        wanted,
        show=arguments.show,
        diff=arguments.diff,
        limit=arguments.limit,
        as_json=arguments.json,
    )
    return OK


def _write_page(rollouts: Rollouts, wanted: Wanted, arguments: argparse.Namespace) -> int:
    from roll_like.metrics.reports.page import write_page
    from roll_like.viewer.browse import nothing_found, warn_of_damage
    from roll_like.viewer.page import rollouts_page

    path: Path = arguments.output
    if path.suffix != ".html" or arguments.json:
        raise ConfigError(
            f"-o {path}{' --json' if arguments.json else ''}: a page is HTML, expected a file that ends in .html",
            fix="write -o PAGE.html; to keep JSON, leave out -o: roll-like rollouts RUN --json > FILE",
        )
    page = rollouts_page(rollouts, wanted, limit=arguments.limit)
    if not page.found:
        raise DataError(f"-o {path}: {nothing_found(rollouts)}", fix="choose others, or leave the choice out")
    write_page(path, page.text)
    warn_of_damage(rollouts)
    warn(page.notes)
    of = "" if page.held == page.found else f" of {page.found}; --limit N holds more, --limit 0 all"
    print(f"written: {path} ({len(page.text) / 1e6:.1f} MB, {page.held} rollouts{of})")
    return OK
