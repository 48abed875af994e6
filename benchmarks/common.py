"""What the benchmarks share: the batch, processes for the other side, interleaved repetitions, the last line.

Both sides of a comparison live in processes of their own with the same allocator and thread
environment, and take turns within one run (A B A B A B), so that a noisy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.config.run import RunConfig
from roll_like.config.source import read_source
from roll_like.models.precision import settled

ConfigT = TypeVar("ConfigT", bound=RunConfig)
ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "rlvr_quickstart.yaml"
#: Where `make oracle-setup` installs TRL, apart from the packages of `.venv`.
EXTRA_PACKAGES = ROOT / ".oracle"
#: What `--smoke` changes in a configuration: one of the model's layers, which alone leaves more than one token likely.
SMOKE_MODEL = ("model.keep_layers=[15]",)
#: The same in the quickstart's: also few and short samples, from transformers, which starts faster than vLLM, and a
#: reward that differs among samples of such a model, so that there is something to train on.
SMOKE_RUN = (
    *SMOKE_MODEL,
    "inference.type=hf",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=4",
    "rollout.samples_per_step=8",
    "rollout.max_response_tokens=8",
    "rewards.use=[{type: repetition, n: 1, by: characters, free: 0}]",
)


class Options(argparse.ArgumentParser):
    """The command line of a benchmark; each has `--smoke`, which runs all of it in seconds.

    Args:
        doc: The script's docstring.
        smoke: What `--smoke` takes instead of the options' defaults: sizes.
    """

    def __init__(self, doc: str | None, **smoke: Any) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--smoke", action="store_true", help="only see that it runs: tiny sizes, meaningless figures")
        self.smoke = smoke

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if "--smoke" in (sys.argv[1:] if args is None else args):
            self.set_defaults(**self.smoke)
        return super().parse_known_args(args, namespace)


def quickstart(*overrides: str, smoke: bool = False) -> RLVRConfig:
    """Return the quickstart's configuration, with dotted `key=value` overrides."""
    return configuration(RLVRConfig, QUICKSTART, *(SMOKE_RUN if smoke else ()), *overrides)


def configuration(kind: type[ConfigT], path: Path, *overrides: str) -> ConfigT:
    """Return a configuration of the repository, in the precision that it has here, with `key=value` overrides."""
    os.chdir(ROOT)  # its data paths are relative
    return settled(kind.model_validate(read_source(path, overrides).values))


def say(text: str) -> None:
    """Print one line of progress, with the machine's load: a number without it says little."""
    print(f"[load {os.getloadavg()[0]:.1f}] {text}", flush=True)


def finish(options: argparse.Namespace, figures: Mapping[str, Any]) -> None:
    """Print the figures as one JSON object: the last line of every benchmark."""
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2), "smoke": options.smoke}
    print(json.dumps(rounded | machine), flush=True)


def add_common_arguments(parser: argparse.ArgumentParser, *, repetitions: int = 3) -> None:
    """Add the options that every comparison has."""
    parser.add_argument(
        "--repetitions", type=repetition_count, default=repetitions, help="turns of each side; the median counts"
    )
    parser.add_argument("--threads", type=int, default=2, help="cores of each side")
    parser.add_argument(
        "--plain-environment",
        action="store_true",
        help="give the other side only OMP_NUM_THREADS, as a user would, instead of our allocator and thread settings",
    )


def find_trl() -> None:
    """Make TRL importable, without hiding any package of `.venv`; ends the process where it is not installed."""
    if not (EXTRA_PACKAGES / "trl").is_dir():
        sys.exit("TRL is missing: run `make oracle-setup`")
    sys.path.append(str(EXTRA_PACKAGES))


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Add the choice between cores and one GPU."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="`--threads` cores, or one GPU")


def device_overrides(options: argparse.Namespace, *roles: str) -> list[str]:
    """Return the `resources` section that `--device` and `--threads` mean; the roles share the devices."""
    devices = options.threads if options.device == "cpu" else 1
    return [
        f"resources.device={options.device}",
        f"resources.devices_per_node={devices}",
        *(f"resources.device_mapping.{role}=0-{devices - 1}" for role in roles),
    ]


def repetition_count(text: str) -> int:
    """Read a number of repetitions: a median of fewer than three says nothing about noise."""
    count = int(text)
    if count < 3:
        raise argparse.ArgumentTypeError(f"{count} repetitions; at least 3 were expected")
    return count


def environment_of(threads: int, *, plain: bool) -> dict[str, str]:
    """Return what a side's process gets: our workers' settings, or only its number of threads."""
    from roll_like.cluster import thread_environment

    if plain:
        return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    return thread_environment(threads)


def interleaved(sides: Mapping[str, Callable[[], float]], *, repetitions: int, warm_ups: int = 1) -> dict[str, float]:
    """Let the sides take turns and return each one's median seconds.

    Args:
        sides: Name → does the work once and returns how long it took, in seconds.
        repetitions: Counted turns of each.
        warm_ups: Turns before that which do not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(-warm_ups, repetitions):
        for name, work in sides.items():
            took = work()
            if turn >= 0:
                seconds[name].append(took)
            say(f"{name}: {took:.4g} s{' (warm-up, not counted)' if turn < 0 else ''}")
    return {name: statistics.median(values) for name, values in seconds.items()}


class Peer:
    """A function in a Python process of its own, called over pipes with JSON.

    The process runs `serve` in the given script; what it prints goes to the terminal.

    Args:
        script: File that calls `serve` when its first argument is `--serve`.
        arguments: Command line after `--serve`.
        environment: Added to this process's environment.
    """

    def __init__(self, script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = script.stem
        to_child, self._to = os.pipe()
        self._from, from_child = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, str(script), "--serve", str(to_child), str(from_child), *arguments],
            env={**os.environ, **environment},
            pass_fds=(to_child, from_child),
        )
        os.close(to_child)
        os.close(from_child)
        self._writer = os.fdopen(self._to, "w")
        self._reader = os.fdopen(self._from)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(BrokenPipeError):  # it has ended itself
            self._writer.close()  # the end of its input ends it
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.close()

    def call(self, **message: Any) -> Any:
        """Send a message and return the answer.

        Raises:
            RuntimeError: The process ended instead of answering; its traceback is on the terminal.
        """
        try:
            self._writer.write(json.dumps(message) + "\n")
            self._writer.flush()
        except BrokenPipeError:
            pass  # the missing answer says it
        line = self._reader.readline()
        if not line:
            raise RuntimeError(f"the other side of {self._name} ended with exit code {self._process.wait()}")
        return json.loads(line)


def serve(reading: int, writing: int, answer: Callable[[dict[str, Any]], Any]) -> None:
    """Answer a `Peer`'s messages until it closes its end."""
    with os.fdopen(reading) as messages, os.fdopen(writing, "w") as answers:
        for line in messages:
            answers.write(json.dumps(answer(json.loads(line))) + "\n")
            answers.flush()


def prompts_of(config: RLVRConfig, count: int) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    """Return the token ids of the first training prompts, as the run would send them."""
    from roll_like.data.tasks import load_tasks
    from roll_like.models.load import load_renderer

    tasks = load_tasks(config.data.sources, load_renderer(config.model), config.data.max_prompt_tokens)
    return [task.prompt_ids for task in tasks.tasks[:count]]
