"""The command `roll-like service`. Nothing heavy is imported here: `roll-like --help` reads this file too."""

from __future__ import annotations

import argparse
from pathlib import Path

from roll_like.errors import FAILED, OK
from roll_like.metrics.commands import Add


def add_service(add: Add) -> None:
    """Add `service`."""
    service = add("service", _service, "train and sample for programs that use the tinker client")
    service.add_argument("--config", type=Path, metavar="FILE", help="YAML file; it is required")
    service.set_defaults(needs_file=True)
    service.add_argument("overrides", nargs="*", metavar="key=value", help="change a key, such as port=8200")
    service.add_argument("--check", action="store_true", help="find every problem and print the plan; start nothing")


def _service(arguments: argparse.Namespace) -> int:
    from roll_like.models.imports import quick_imports

    with quick_imports():
        from roll_like.service.config import load_service_config
    config = load_service_config(arguments.config, arguments.overrides)
    with quick_imports():
        from roll_like.service.service import check_service, run_service
    if arguments.check:
        from rich.console import Console

        from roll_like.check import show

        report = check_service(config)
        show(report, Console(), Console(stderr=True), whole=arguments.debug)
        return FAILED if report.errors else OK
    run_service(config)
    return OK
