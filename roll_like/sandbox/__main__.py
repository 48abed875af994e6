"""Print what the self-test of a sandbox finds: `python -m roll_like.sandbox [BACKEND]`. Exits 1 where it fails."""

from __future__ import annotations

import argparse
import sys

from roll_like.errors import ConfigError
from roll_like.sandbox.backends import BACKENDS, examine
from roll_like.sandbox.bwrap import HELP


def main(arguments: list[str] | None = None) -> int:
    """Run the self-test and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m roll_like.sandbox", description=(__doc__ or "").split(":")[0], allow_abbrev=False
    )
    parser.add_argument("backend", nargs="?", default="auto", help=f"one of {', '.join(BACKENDS)}")
    backend = parser.parse_args(arguments).backend
    try:
        report = examine(backend)
    except ConfigError as error:
        parser.error(str(error))
    print(report.table())
    if report.probes and not report.passed:
        print(f"fix: {HELP}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
