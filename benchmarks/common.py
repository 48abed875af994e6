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

ConfigT = TypeVar("ConfigT", bound=RunConfig)
ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "rlvr_quickstart.yaml"
#: Where `pip install --target` puts what only a benchmark needs (requirements/bench.txt).
EXTRA_PACKAGES = ROOT / ".bench"


def quickstart(*overrides: str) -> RLVRConfig:
    """Return the quickstart's configuration, with dotted `key=value` overrides."""
    return configuration(RLVRConfig, QUICKSTART, *overrides)


def configuration(kind: type[ConfigT], path: Path, *overrides: str) -> ConfigT:
    """Return a configuration of the repository, with dotted `key=value` overrides."""
    os.chdir(ROOT)  # its data paths are relative
    return kind.model_validate(read_source(path, overrides).values)


def say(text: str) -> None:
    """Print one line of progress, with the machine's load: a number without it says little."""
    print(f"[load {os.getloadavg()[0]:.1f}] {text}", flush=True)


def finish(figures: Mapping[str, Any]) -> None:
    """Print the figures as one JSON object: the last line of every benchmark."""
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({**rounded, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}), flush=True)


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
            say(f"{name}: {took:.2f} s{' (warm-up, not counted)' if turn < 0 else ''}")
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
    from roll_like.models.load import load_tokenizer

    tasks = load_tasks(config.data.sources, load_tokenizer(config.model), config.data.max_prompt_tokens)
    return [task.prompt_ids for task in tasks.tasks[:count]]
