"""`roll-like init`: its options, and what it prints.

Nothing heavy is imported here: `roll-like --help` reads this file too.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from roll_like.errors import OK
from roll_like.metrics.commands import Add
from roll_like.starters.starter import ENVIRONMENT, STARTERS, make_environment, write_starter


def add_init(add: Add) -> None:
    """Add the command `init`."""
    init = add("init", _init, "write a small working reward, environment, taskset or run to start from")
    init.add_argument("kind", choices=tuple(STARTERS), metavar="KIND", help=f"one of {', '.join(STARTERS)}")
    init.add_argument(
        "folder", nargs="?", type=Path, metavar="FOLDER", help="folder to write to; default: one named after the kind"
    )


def _init(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder or Path(arguments.kind)
    starter = STARTERS[arguments.kind]
    written = write_starter(arguments.kind, folder)
    print("written:")
    lines = {str(path): what for path, what in zip(written, starter.files.values(), strict=True)}
    if starter.packages:
        own = folder / ENVIRONMENT
        lines[str(own)] = f"an environment with {', '.join(starter.packages)}"
        if not own.exists():
            print(f"  installing into {own}; this takes seconds with uv, minutes with pip", flush=True)
        make_environment(own, starter.packages)
    _print(lines)
    first = [f"cd {shlex.quote(str(folder))}"]
    if shutil.which("roll-like") is None:  # called by its path, out of an environment that is not active
        first.append(f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"')
    print("\ntry, in this order:")
    for line in (*first, *starter.missing()):
        print(f"  {line}")
    _print({command: f"# {what}" for command, what in starter.commands.items()})
    return OK


def _print(lines: Mapping[str, str]) -> None:
    width = max(map(len, lines))
    for line, what in lines.items():
        print(f"  {line:{width}}   {what}")
