"""The command line: run, check, evaluate, export, try rewards, browse rollouts, list plugins, write the schema.

Nothing heavy is imported here: `roll-like --help` answers at once, each command imports what it needs.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_like.config.base import PipelineConfig
    from roll_like.errors import RollLikeError

OK, FAILED, WRONG_CONFIG, INTERRUPTED = 0, 1, 2, 130

_EPILOG = """\
exit codes: 0 done; 1 failed, or a check found problems; 2 the command line or the configuration is wrong;
130 interrupted

examples:
  roll-like run --config configs/rlvr_quickstart.yaml steps=5 training.optimizer.lr=1e-5
  roll-like run --config configs/rlvr_quickstart.yaml --check
  roll-like run --config configs/rlvr_quickstart.yaml --resume
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: Arguments without the program's name; default: the process's own.
    """
    parser = build_parser()
    arguments, further = parser.parse_known_args(argv)
    _take_overrides(parser, arguments, further)
    # imported after parsing, so that --help stays quick
    from roll_like.errors import ConfigError, RollLikeError

    command: Callable[[argparse.Namespace], int] | None = arguments.command
    try:
        if command is not None:
            return command(arguments)
        config = _load(arguments)  # `run`
        if arguments.check:
            return _check(config)
        config.pipeline_class().launch(config, resume=arguments.resume)
        return OK
    except RollLikeError as error:
        _report(error, debug=arguments.debug)
        return WRONG_CONFIG if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    parser = argparse.ArgumentParser(
        prog="roll-like",
        description="Reinforcement learning on language models: Ray, vLLM and DeepSpeed, on CPU and GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = _add(commands, "run", None, "train, or check a configuration")  # `main` does this one itself
    _add_config(run)
    run.add_argument("--check", action="store_true", help="find every problem and print the plan; start nothing")
    run.add_argument(
        "--resume", nargs="?", const="", metavar="RUN", help="continue a run by its name; default: this configuration's"
    )

    evaluate = _add(commands, "eval", _evaluate, "measure a model on the evaluation tasks")
    _add_config(evaluate)
    evaluate.add_argument("--model", required=True, metavar="DIR", help="model to evaluate: directory, hub id or GGUF")

    export = _add(commands, "export", _export, "turn a checkpoint into a Hugging Face directory")
    export.add_argument("--checkpoint", required=True, type=Path, metavar="DIR", help="a run's checkpoint")
    export.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="directory to write")

    reward = _add(commands, "check-reward", _check_reward, "try a reward on right, wrong, empty and hostile answers")
    reward.add_argument("name", metavar="NAME", help="registered name; with --config also its `name` there")
    reward.add_argument("overrides", nargs="*", metavar="key=value", help="set one of its settings, such as boxed=true")
    reward.add_argument(
        "--cases", type=Path, metavar="FILE", help="answers whose correct score is known, one JSON object a line"
    )
    reward.add_argument("--config", type=Path, metavar="FILE", help="YAML file of a run to take its settings from")
    _add_import(reward)
    reward.add_argument("--slow", type=float, metavar="SECONDS", help="what takes longer is suspicious (default: 1)")

    environment = _add(commands, "check-env", _check_env, "try an environment out and say what is wrong with it")
    environment.add_argument("id", metavar="ID", help="registered id, such as roll_like/FrozenLake-v0")
    environment.add_argument("overrides", nargs="*", metavar="key=value", help="one of its options, such as size=3")
    _add_import(environment)

    _add_rollouts(
        _add(commands, "rollouts", _rollouts, "show what a run's policy wrote: list, one whole, two compared")
    )

    schema = _add(commands, "schema", _schema, "write the JSON Schema of a pipeline's configuration")
    schema.add_argument("--pipeline", default="rlvr", help="name of the pipeline (default: rlvr)")
    schema.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write; default: standard output")

    _add(commands, "plugins", _plugins, "list every registered plugin and where it comes from")
    return parser


def _add(
    commands: Any, name: str, command: Callable[[argparse.Namespace], int] | None, text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(command=command)
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error too")
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="change a key, such as rollout.temperature=0.8"
    )


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import", action="append", default=[], dest="modules", metavar="MODULE", help="module that registers it"
    )


def _add_rollouts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of a run, or its folder")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default: runs)"
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--show", metavar="ID", help="print one whole, turn by turn")
    one.add_argument("--diff", nargs=2, metavar=("ID", "ID"), help="compare two, side by side")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead")
    wanted = parser.add_argument_group("what a list holds")
    wanted.add_argument("--step", metavar="N|A:B", help="of one step, or from A to B; A: and :B are open")
    wanted.add_argument("--kind", choices=("train", "evaluate"), help="of training or of evaluations; default: both")
    wanted.add_argument("--domain", metavar="NAME", help="of one domain or environment")
    wanted.add_argument(
        "--reward", metavar="MIN:MAX", help="with a reward in these bounds (--reward=-1:0 for negative)"
    )
    solved = wanted.add_mutually_exclusive_group()
    solved.add_argument("--success", action="store_const", const=True, help="that solved their task")
    solved.add_argument("--failure", action="store_const", const=False, dest="success", help="that did not")
    wanted.add_argument("--limit", type=int, metavar="N", help="at most N, 0 for all (default: 50; all with --json)")


def _take_overrides(parser: argparse.ArgumentParser, arguments: argparse.Namespace, further: list[str]) -> None:
    """Put overrides that stand between or after options where the others are."""
    unknown = [text for text in further if text.startswith("-") or "=" not in text]
    if unknown or (further and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognised arguments: {' '.join(unknown or further)}")
    if further:
        arguments.overrides = [*arguments.overrides, *further]
    # `--resume key=value` means this configuration's run and an override
    resume = getattr(arguments, "resume", None)
    if resume is not None and "=" in resume:
        arguments.overrides = [*arguments.overrides, resume]
        arguments.resume = ""


def _report(error: RollLikeError, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    print(f"error: {error}", file=sys.stderr)


def _load(arguments: argparse.Namespace) -> PipelineConfig:
    from roll_like.config.load import load_config

    return load_config(arguments.config, arguments.overrides)


def _check(config: PipelineConfig) -> int:
    from rich.console import Console

    from roll_like.check import show
    from roll_like.errors import ConfigError

    pipeline = config.pipeline_class()
    if not hasattr(pipeline, "check"):
        raise ConfigError(
            f"pipeline: {config.pipeline!r} has no check of its own; the file itself is valid",
            fix="run it without --check, or give its class a class method `check(config) -> roll_like.check.Report`",
        )
    report = pipeline.check(config)
    show(report, Console(), Console(stderr=True))
    return FAILED if report.errors else OK


def _evaluate(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    figures = config.pipeline_class().evaluate(config, arguments.model)
    for name, value in sorted(figures.items()):
        print(f"{name:40} {value:.4g}")
    print(json.dumps(figures))
    return OK


def _export(arguments: argparse.Namespace) -> int:
    from roll_like.run.export import export_checkpoint

    export_checkpoint(arguments.checkpoint, arguments.output)
    print(f"written: {arguments.output}")
    return OK


def _check_reward(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from roll_like.config.load import import_plugins
    from roll_like.rewards.check import SLOW_SECONDS, check_reward
    from roll_like.rewards.settings import settings_of

    import_plugins(arguments.modules)
    name, settings = settings_of(arguments.name, arguments.config, arguments.overrides)
    slow = SLOW_SECONDS if arguments.slow is None else arguments.slow
    report = check_reward(name, arguments.cases, settings=settings, slow_seconds=slow)
    report.show(Console())
    return FAILED if report.suspicious else OK


def _check_env(arguments: argparse.Namespace) -> int:
    import yaml
    from rich.console import Console

    from roll_like.config.load import import_plugins
    from roll_like.envs import check_env

    import_plugins(arguments.modules)
    options = {}
    for override in arguments.overrides:
        key, _, value = override.partition("=")
        options[key] = yaml.safe_load(value)
    report = check_env(arguments.id, **options)
    report.show(Console())
    return OK if report.ok else FAILED


def _rollouts(arguments: argparse.Namespace) -> int:
    from roll_like.metrics.browse import Rollouts, Wanted, browse, find_run, read_range

    ranges = {}
    if arguments.step is not None:
        ranges["steps"] = read_range("--step", arguments.step, int)
    if arguments.reward is not None:
        ranges["rewards"] = read_range("--reward", arguments.reward)
    browse(
        Rollouts(find_run(arguments.run, arguments.output_dir)),
        Wanted(kind=arguments.kind, domain=arguments.domain, success=arguments.success, **ranges),
        show=arguments.show,
        diff=arguments.diff,
        limit=arguments.limit,
        as_json=arguments.json,
    )
    return OK


def _schema(arguments: argparse.Namespace) -> int:
    from roll_like.config.schema import json_schema, write_json
    from roll_like.registry import PIPELINES

    text = write_json(json_schema(PIPELINES.get(arguments.pipeline)))
    if arguments.output is None:
        sys.stdout.write(text)
        return OK
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(text, encoding="utf-8")
    print(f"written: {arguments.output}")
    return OK


def _plugins(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from roll_like.registry import REGISTRIES

    table = Table("kind", "name", title="Plugins", title_justify="left")
    table.add_column("from", overflow="fold")
    for registry in REGISTRIES:
        for name in registry.names():
            table.add_row(registry.kind, name, registry.origin(name))
    Console().print(table)
    broken = [problem for registry in REGISTRIES if (problem := registry.broken()) is not None]
    for problem in broken:
        _report(problem, debug=arguments.debug)
    return FAILED if broken else OK


if __name__ == "__main__":
    sys.exit(main())
