"""What commands share: options that several have, numbers within bounds, ports, warnings.

Nothing heavy is imported here: `roll-like --help` reads this file too.
"""

from __future__ import annotations

import argparse
import errno
import math
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from roll_like.errors import ConfigError

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


def listening_error(host: str, port: int) -> OSError | None:
    """Return why a server cannot listen at an address; None where it can."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def refuse_used_port(host: str, port: int, *, command: str) -> None:
    """Refuse an address that a server cannot listen at.

    Args:
        host: Name or address to listen on.
        port: TCP port.
        command: Who asks, for messages.

    Raises:
        ConfigError: The port is in use, or the host is not this machine's.
    """
    if not PORTS[0] <= port <= PORTS[1]:  # the system takes a larger one modulo 65536
        raise ConfigError(f"--port {port}: expected a TCP port", fix="choose one from 1024 to 65535")
    if (error := listening_error(host, port)) is not None:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use",
                fix=f"choose another one, such as --port {port + 1}; an earlier `roll-like {command}` may still run "
                "there",
            ) from error
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error}",
            fix="--host is an address of this machine; a --port below 1024 may need rights",
        ) from error
