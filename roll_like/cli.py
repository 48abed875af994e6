"""The command line: run, check, evaluate, export, try rewards, look at runs, write files to start from.

Nothing heavy is imported here: `roll-like --help` answers at once, each command imports what it needs.
"""

from __future__ import annotations

import argparse
import atexit
import codecs
import gc
import io
import json
import locale
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.errors import (
    FAILED,
    INTERRUPTED,
    OK,
    RETRY,
    WRONG_CONFIG,
    ConfigError,
    PluginError,
    ResourceError,
    RollLikeError,
)
from roll_like.metrics.commands import number_within
from roll_like.run.streams import lasting_streams, open_standard_streams
from roll_like.service.commands import add_service
from roll_like.serving.commands import add_serving
from roll_like.starters.commands import add_init
from roll_like.starters.layout_command import add_plan
from roll_like.viewer.commands import add_commands

if TYPE_CHECKING:
    from roll_like.algorithms.loss_check import AlgorithmReport
    from roll_like.config.base import PipelineConfig
    from roll_like.config.run import RunConfig

_EPILOG = """\
exit codes: 0 done; 1 failed, or a check found problems; 2 the command line or the configuration is wrong;
75 a process or a machine was lost, or a signal stopped a run with --resume auto: the same command continues;
130 interrupted

examples:
  roll-like run --config configs/rlvr_quickstart.yaml steps=5 training.optimizer.lr=1e-5
  roll-like run --config configs/rlvr_quickstart.yaml --check
  roll-like run --config configs/rlvr_quickstart.yaml --resume
  roll-like run --config configs/rlvr_quickstart.yaml --restart 5

completion in bash and zsh: pip install 'roll-like[completion]', then eval "$(register-python-argcomplete roll-like)"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: Arguments without the program's name; default: the process's own.
    """
    open_standard_streams()
    _use_utf_8()
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:
        _complete(parser)
    argv = sys.argv[1:] if argv is None else argv
    arguments, further = parser.parse_known_args(argv)
    _take_overrides(parser, arguments, further, argv)
    _refuse_contradictions(parser, arguments)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except RollLikeError as error:
        _report(error, debug=arguments.debug)
        if isinstance(error, ConfigError | PluginError):
            return WRONG_CONFIG
        return RETRY if error.retry else FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _use_utf_8() -> None:
    """Start this program anew in Python's UTF-8 mode, where the locale has another encoding; workers inherit the mode.

    What is printed to a stream of another encoding (`PYTHONIOENCODING`) loses the characters that it has not.
    """
    if codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8" and "PYTHONUTF8" not in os.environ:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    parser = argparse.ArgumentParser(
        prog="roll-like",
        description="Reinforcement learning on language models: Ray, vLLM and DeepSpeed, on CPU and GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = _add(commands, "run", _run, "train, or check a configuration")
    _add_config(run)
    run.add_argument("--check", action="store_true", help="find every problem and print the plan; start nothing")
    run.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue a run by its name; default: this configuration's; auto: the same, and done if it is finished",
    )
    run.add_argument(
        "--restart",
        type=int,
        metavar="N",
        help="run with --resume auto, and up to N times again if a process or a machine is lost",
    )

    run.add_argument("--print-config", action="store_true", help="print the whole configuration as YAML; start nothing")

    sweep = _add(commands, "sweep", _sweep, "train every combination of some values, one run after the other")
    _add_config(sweep)
    sweep.add_argument(
        "--over",
        action="append",
        required=True,
        metavar="key=[value,…]",
        help="values of a key; may be given several times",
    )

    evaluate = _add(commands, "eval", _evaluate, "measure a model on the evaluation tasks, or on benchmarks by name")
    _add_config(evaluate)
    evaluate.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="DIR",
        help="model to evaluate: directory, hub id or GGUF; with --benchmark also a checkpoint, or a JSON file of "
        "earlier results, and several times to compare",
    )
    _add_benchmarks(evaluate)

    export = _add(commands, "export", _export, "turn a checkpoint into a Hugging Face directory")
    export.add_argument("--checkpoint", required=True, type=Path, metavar="DIR", help="a run's checkpoint")
    export.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="directory to write")

    reward = _add(commands, "check-reward", _check_reward, "try a reward on right, wrong, empty and hostile answers")
    reward.add_argument("name", metavar="NAME", help="registered name; with --config also its `name` there")
    reward.add_argument("overrides", nargs="*", metavar="key=value", help="set one of its settings, such as boxed=true")
    reward.add_argument(
        "--cases", type=Path, metavar="FILE", help="answers whose correct score is known, one JSON object a line"
    )
    reward.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of a run: its settings, and rows of its data"
    )
    _add_import(reward)
    reward.add_argument(
        "--slow",
        type=number_within(float, 0.001),
        metavar="SECONDS",
        help="what takes longer is suspicious (default: 1)",
    )

    for kind, command, help_text in (
        ("check-loss", _check_loss, "try a policy loss on random tokens, whole and in micro-batches"),
        ("check-advantage", _check_advantage, "try an advantage estimator on random groups, also resumed"),
    ):
        algorithm = _add(commands, kind, command, help_text)
        algorithm.add_argument("name", metavar="NAME", help="registered name")
        algorithm.add_argument("overrides", nargs="*", metavar="key=value", help="set one of its settings")
        _add_import(algorithm)

    environment = _add(commands, "check-env", _check_env, "try an environment out and say what is wrong with it")
    environment.add_argument("id", nargs="?", metavar="ID", help="registered id, such as roll_like/FrozenLake-v0")
    environment.add_argument("overrides", nargs="*", metavar="key=value", help="one of its options, such as size=3")
    environment.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of a run: try all its environments, verifiers' too"
    )
    _add_import(environment)

    add_init(partial(_add, commands))
    add_plan(partial(_add, commands))
    add_commands(partial(_add, commands))
    add_serving(partial(_add, commands))
    add_service(partial(_add, commands))

    schema = _add(commands, "schema", _schema, "write the JSON Schema of a pipeline's configuration")
    schema.add_argument("--pipeline", default="rlvr", help="name of the pipeline (default: rlvr)")
    schema.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write; default: standard output")

    _add(commands, "plugins", _plugins, "list every registered plugin and where it comes from")
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks how its line goes on, and exit; without argcomplete there is no answer."""
    try:
        import argcomplete
    except ImportError:
        sys.exit(FAILED)
    argcomplete.autocomplete(parser)


class _Version(argparse.Action):
    """Prints the installed version; looked up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"roll-like {version('roll-like')}")
        parser.exit()


def _add(commands: Any, name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    # not abbreviated: what runs the command again (`supervised_command`) finds options by their names
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(command=command)
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error too")
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file; it is required")
    parser.set_defaults(needs_file=True)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="change a key, such as rollout.temperature=0.8"
    )


def _add_benchmarks(parser: argparse.ArgumentParser) -> None:
    # without the configuration's modules, which take longer to import than all commands
    names = sorted(path.stem for path in (Path(__file__).parent / "data" / "benchmarks").glob("*.yaml"))
    options = parser.add_argument_group("benchmarks", "Without --config: on this machine's GPUs, else its cores.")
    options.add_argument(
        "--benchmark",
        action="append",
        metavar="NAME[,NAME…]",
        help=f"{', '.join(names)}; or the path of a benchmark's YAML file; may be given several times",
    )
    options.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="file or directory with a benchmark's rows; default: its dataset on the hub",
    )
    positive = number_within(int, 1)
    options.add_argument("--limit", type=positive, metavar="N", help="first N rows of each benchmark; default: all")
    options.add_argument("--samples", type=positive, metavar="K", help="answers to a prompt; default: the benchmark's")
    options.add_argument(
        "--temperature", type=number_within(float, 0, 100), metavar="T", help="0 is greedy; default: the benchmark's"
    )
    options.add_argument(
        "--max-response-tokens", type=positive, metavar="N", help="longest answer; default: the benchmark's"
    )
    options.add_argument(
        "--form", choices=("chat", "completion"), help="ask in a chat, or by plain text; default: the benchmark's"
    )
    options.add_argument("-o", "--output", type=Path, metavar="FILE", help="JSON file to write; default: printed")


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import", action="append", default=[], dest="modules", metavar="MODULE", help="module that registers it"
    )


def _take_overrides(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, further: list[str], argv: Sequence[str]
) -> None:
    """Put overrides that stand between or after options where the others are, and require a file to override."""
    unknown = [text for text in further if text.startswith("-") or "=" not in text]
    if unknown or (further and not hasattr(arguments, "overrides")):
        meant = _meant_overrides(unknown, argv) if hasattr(arguments, "overrides") else ""
        hint = f"; keys are set without dashes: {meant}" if meant else ""
        parser.error(f"unrecognised arguments: {' '.join(unknown or further)}{hint}")
    if further:
        arguments.overrides = [*arguments.overrides, *further]
    needs_file = getattr(arguments, "needs_file", False) and not getattr(arguments, "benchmark", None)
    if needs_file and arguments.config is None:
        files = [text for text in arguments.overrides if text.endswith((".yaml", ".yml")) and "=" not in text]
        parser.error(f"a file is missing: write --config {files[0] if files else 'FILE'}")
    # `--resume key=value` means this configuration's run and an override
    resume = getattr(arguments, "resume", None)
    if resume is not None and "=" in resume:
        arguments.overrides = [*arguments.overrides, resume]
        arguments.resume = ""


def _meant_overrides(unknown: Sequence[str], argv: Sequence[str]) -> str:
    """Return what sets the keys that were written as options.

    >>> _meant_overrides(["--steps", "--training.optimizer.lr=1e-5"], ["--steps", "5", "--training.optimizer.lr=1e-5"])
    'steps=5 training.optimizer.lr=1e-5'
    """
    meant = []
    for option in (text for text in unknown if text.startswith("-")):
        key, equals, value = option.lstrip("-").partition("=")
        text = value if equals else next(iter(argv[argv.index(option) + 1 :]), "--")
        if not text.startswith("--"):
            # `--set steps=5` names the key itself
            meant.append(text if "=" in text and not equals else f"{key.replace('-', '_')}={text}")
    return " ".join(meant)


def _refuse_contradictions(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse `--restart` with what says otherwise."""
    restart = getattr(arguments, "restart", None)
    if restart is None:
        return
    if restart < 1:
        parser.error(f"--restart {restart}: expected how often the run may be started again, 1 or more")
    if arguments.resume is not None:
        parser.error("--restart continues the latest run of this configuration by itself; leave --resume out")
    if arguments.check or arguments.print_config:
        option = "--check" if arguments.check else "--print-config"
        parser.error(f"{option} starts nothing, so there is nothing to restart; leave one of the two out")


@lasting_streams()
def _run(arguments: argparse.Namespace) -> int:
    from roll_like.config.run import RunConfig
    from roll_like.run.folder import AUTO, announcement, is_finished, latest_run
    from roll_like.run.signals import StopRequested, StopSignal
    from roll_like.run.supervise import beat

    beat()
    config = _load(arguments)
    if arguments.print_config:
        return _print_config(config)
    if arguments.check:
        return _check(config, arguments.resume, debug=arguments.debug)
    automatic = arguments.resume == AUTO
    if isinstance(config, RunConfig):
        if arguments.restart is not None:
            return _supervise(config, arguments.restart)
        latest = latest_run(config) if automatic else None
        if latest is not None and is_finished(latest, config):
            print(f"{latest} is finished; nothing is left to do")
            return OK
        print(announcement(config, arguments.resume), flush=True)  # what follows takes seconds to import
    elif automatic or arguments.restart is not None:
        raise ConfigError(
            f"the configuration of pipeline: {config.pipeline!r} is no RunConfig, so where its runs are is not known",
            fix="leave --restart and --resume auto out, or derive it from roll_like.config.run.RunConfig",
        )
    try:
        with StopSignal() as signal, signal.interruptible():
            result = config.pipeline_class().launch(config, resume=arguments.resume)
            stopped = automatic and result.stopped  # a pipeline without a RunConfig may return anything
    except StopRequested as stop:
        again = "the same command" if automatic else "the same command or --resume"
        print(f"stopped by {stop} before the run had started; {again} continues it", file=sys.stderr)
        stopped = automatic
    except ResourceError as error:
        if not automatic or not isinstance(config, RunConfig) or config.resources.address is None:
            raise
        _report(error, debug=arguments.debug)
        return RETRY  # a machine of the cluster may come back
    return RETRY if stopped else OK


def _supervise(config: RunConfig, restarts: int) -> int:
    from roll_like.run.checkpoint import newest_step
    from roll_like.run.folder import latest_run, locked
    from roll_like.run.supervise import Supervisor, supervised_command

    def progress() -> tuple[Path, int] | None:
        latest = latest_run(config)
        if latest is None:
            return None
        with locked(latest):  # what clears up after a killed attempt may be bringing its last checkpoint to disk
            return latest, newest_step(latest / "checkpoints")

    return Supervisor(supervised_command(sys.orig_argv), restarts, progress, _say).run()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report(error: RollLikeError, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    print(f"error: {error}", file=sys.stderr)


def _load(arguments: argparse.Namespace) -> PipelineConfig:
    from roll_like.models.imports import quick_imports

    with quick_imports():
        from roll_like.config.load import load_config

        return load_config(arguments.config, arguments.overrides)


def _check(config: PipelineConfig, resume: str | None, *, debug: bool) -> int:
    from rich.console import Console

    from roll_like.config.run import RunConfig
    from roll_like.models.imports import quick_imports
    from roll_like.run.folder import require_run

    if isinstance(config, RunConfig):
        require_run(config, resume)

    with quick_imports():
        from roll_like.check import show

        pipeline = config.pipeline_class()
    if not hasattr(pipeline, "check"):
        raise ConfigError(
            f"pipeline: {config.pipeline!r} has no check of its own; the file itself is valid",
            fix="run it without --check, or give its class a class method `check(config) -> roll_like.check.Report`",
        )
    of_checkpoint = []
    if isinstance(config, RunConfig) and resume is not None:
        with quick_imports():
            from roll_like.run.launch import check_resumption

        of_checkpoint = check_resumption(config, resume)
    atexit.register(gc.freeze)  # at its end Python would look through all that was imported: a second
    with quick_imports():  # transformers' are most of a check
        report = pipeline.check(config)
    report.findings += of_checkpoint
    show(report, Console(), Console(stderr=True), whole=debug)
    return FAILED if report.errors else OK


def _print_config(config: PipelineConfig) -> int:
    from roll_like.config.load import dump_config

    sys.stdout.write(dump_config(config))
    return OK


@lasting_streams()
def _sweep(arguments: argparse.Namespace) -> int:
    """Train each run in a process of its own; one that is finished already is not trained again.

    After a signal to stop, the same command goes on with the run that was under way.
    """
    from rich.console import Console

    from roll_like.config.load import load_config
    from roll_like.config.run import RunConfig
    from roll_like.run.folder import AUTO
    from roll_like.run.supervise import Child
    from roll_like.run.sweep import swept_runs
    from roll_like.viewer.comparison import compare

    config = _load(arguments)
    if not isinstance(config, RunConfig):
        raise ConfigError(f"runs of pipeline: {config.pipeline!r} have no name, so they cannot be swept over")
    runs = swept_runs(config.name, arguments.over)
    for run in runs:  # a mistake in the last one is found before the first one starts
        load_config(arguments.config, [*arguments.overrides, *run.overrides])
    codes = {}
    command = [sys.executable, "-m", "roll_like.cli", "run", "--config", str(arguments.config), "--resume", AUTO]
    with Child(_say) as child:
        for number, run in enumerate(runs, 1):
            print(f"run {number} of {len(runs)}: {' '.join(run.overrides[:-1])}", flush=True)
            codes[run.name] = child.run([*command, *arguments.overrides, *run.overrides])
            if child.stopping is not None:
                _say(f"stopped in run {number} of {len(runs)}; the same command continues it")
                return INTERRUPTED if child.stopping == signal.SIGINT else RETRY
    finished = [config.runs_dir / name for name, code in codes.items() if code == OK]
    if len(finished) > 1:
        console = Console(highlight=False)
        console.print(*compare(finished).tables(console.width))
    failed = [f"{name} (exit code {code})" for name, code in codes.items() if code != OK]
    if failed:
        print(f"error: {len(failed)} of {len(runs)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return FAILED if failed else OK


def _evaluate(arguments: argparse.Namespace) -> int:
    if arguments.benchmark:
        return _measure(arguments)
    if len(arguments.model) > 1:
        raise ConfigError("--model is given several times, without --benchmark", fix="evaluate one model at a time")
    for option in ("data", "limit", "samples", "temperature", "max_response_tokens", "form", "output"):
        if getattr(arguments, option) not in (None, []):
            written = f"--{option.replace('_', '-')}"
            raise ConfigError(f"{written} belongs to benchmarks", fix="add --benchmark NAME, or leave it out")
    config = _load(arguments)
    figures = config.pipeline_class().evaluate(config, arguments.model[0])
    for name, value in sorted(figures.items()):
        print(f"{name:40} {value:.4g}")
    print(json.dumps(figures))
    return OK


def _measure(arguments: argparse.Namespace) -> int:
    """Measure models on benchmarks: one table, one JSON."""
    from rich.console import Console

    from roll_like.config.benchmarks import chosen_benchmarks
    from roll_like.models.imports import quick_imports

    changed = {"limit": arguments.limit, "samples_per_prompt": arguments.samples, "form": arguments.form}
    changed |= {"temperature": arguments.temperature, "max_response_tokens": arguments.max_response_tokens}
    uses = chosen_benchmarks(arguments.benchmark, arguments.data, changed)
    with quick_imports():
        from roll_like.metrics.files import replace_text
        from roll_like.run.measure import benchmark_config, measure_models, result_tables, results_json

    config = benchmark_config(arguments.config, arguments.overrides, uses, arguments.model[0])
    output = arguments.output
    if output is not None:
        if output.resolve() in (Path(model).resolve() for model in arguments.model):
            raise ConfigError(f"-o {output}: a --model is there", fix="name a file of its own for the results")
        output.parent.mkdir(parents=True, exist_ok=True)
    models = []
    try:
        for measured in measure_models(config, arguments.model):
            models.append(measured)
            if output is not None:  # before anything is compared
                replace_text(output, json.dumps({"models": [one.as_json() for one in models]}, allow_nan=False) + "\n")
    finally:  # what is measured is kept if a later model fails
        if models:
            Console(highlight=False).print(*result_tables(models))
            text = json.dumps(results_json(models), allow_nan=False)
            try:
                if output is not None:
                    replace_text(output, text + "\n")
            except OSError:
                output = None
                raise
            finally:
                print(text if output is None else f"written: {output}")
    return OK


def _export(arguments: argparse.Namespace) -> int:
    from roll_like.service.checkpoints import read_about

    if read_about(arguments.checkpoint) is not None:
        from roll_like.service.export import export_stored as export
    else:
        from roll_like.run.export import export_checkpoint as export
    export(arguments.checkpoint, arguments.output)
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
    cases = arguments.cases
    if cases is None and arguments.config is not None:
        from roll_like.check.reward_rows import reward_cases
        from roll_like.config.load import load_config

        cases = reward_cases(load_config(arguments.config), arguments.name) or None
    report = check_reward(name, cases, settings=settings, slow_seconds=slow)
    report.show(Console())
    return FAILED if report.suspicious else OK


def _check_loss(arguments: argparse.Namespace) -> int:
    from roll_like.algorithms.loss_check import check_loss

    return _check_algorithm(arguments, check_loss)


def _check_advantage(arguments: argparse.Namespace) -> int:
    from roll_like.algorithms.advantage_check import check_advantage

    return _check_algorithm(arguments, check_advantage)


def _check_algorithm(arguments: argparse.Namespace, check: Callable[..., AlgorithmReport]) -> int:
    from roll_like.config.load import import_plugins
    from roll_like.config.source import overridden

    import_plugins(arguments.modules)
    report = check(arguments.name, settings=overridden({}, arguments.overrides))
    print(report)
    return FAILED if report.problems else OK


def _check_env(arguments: argparse.Namespace) -> int:
    import yaml
    from rich.console import Console

    from roll_like.config.load import import_plugins
    from roll_like.envs import check_env
    from roll_like.envs.registration import make_any

    import_plugins(arguments.modules)
    if (arguments.id is None) == (arguments.config is None):
        raise ConfigError("check-env tries one environment, or those of a run", fix="name either ID or --config FILE")
    if arguments.config is not None:
        from roll_like.builtin.pipelines.agentic.trial import tried_environments
        from roll_like.config.load import load_config

        reports = list(tried_environments(load_config(arguments.config)))
        for report in reports:
            report.show(Console())
        return OK if all(report.ok for report in reports) else FAILED
    options = {}
    for override in arguments.overrides:
        key, _, value = override.partition("=")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{key}: {value!r} is no YAML value", fix="correct it, or quote it") from error
    # an option of the environment may be called as one of `check_env`
    report = check_env(partial(make_any, arguments.id, **options))
    report.show(Console())
    return OK if report.ok else FAILED


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
