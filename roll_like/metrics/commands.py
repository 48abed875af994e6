"""What commands share: options that several have, numbers within bounds, warnings.

Nothing heavy is imported here: `roll-like --help` reads this file too.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

#: Adds a command to the parser: its name, what runs it, and what it does in a few words.
Add: TypeAlias = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
NumberT = TypeVar("NumberT", int, float)
#: TCP ports that a server can listen on.
PORTS = (1, 65535)


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


def add_output_dir(parser: argparse.ArgumentParser) -> None:
    """Add the folder in which runs are looked up by their names."""
    parser.add_argument(
        "--output-dir", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default: runs)"
    )


def warn(notes: Sequence[str]) -> None:
    """Print warnings to standard error."""
    for note in notes:
        print(f"warning: {note}", file=sys.stderr)
