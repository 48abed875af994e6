r"""Seconds, tokens/s, MFU and memory of one rank's training step with other settings, one after another.

    python benchmarks/trainer_variants.py --variant bare --variant "" --variant training.zero_stage=2
    python benchmarks/trainer_variants.py --device cuda --prompts 4 --samples 1 --shortest 16300 --longest 16384 \
        --max-tokens 16512 rollout.max_response_tokens=16384 model.path=FOLDER model.dtype=bfloat16 \
        --variant training.compile=true --variant "training.compile=true training.gradient_checkpointing=true"

Without Ray, each in a process that is forked from one with all imports done: a GPU that is lent by the minute has no
time for starts. Each variant is a line of JSON: what it takes to its first step, the median of the steps after the
second, and where `--peak` says what the GPU can do, its MFU (`roll_like/models/flops.py` says which FLOPs count).
`--profile` adds kernels and launches. The variant `bare` is the loop that one would write by hand (trainers/bare.py).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers.integrations.sdpa_attention
import transformers.modeling_layers  # noqa: F401 - imported once, for all variants
from common import Options, add_common_arguments, add_device_argument, finish
from trainers.bare import bare_loop
from trainers.batches import Work, policy_work
from trainers.profiled import profiled

from roll_like.algorithms.kl import KLController
from roll_like.models.load import resolve_model
from roll_like.policy_gradient.objective import PolicyObjective
from roll_like.training.engine import TrainingEngine
from roll_like.training.interface import Share
from roll_like.training.rank import TrainingRank
from roll_like.training.start import rank_spec

#: The variant that is no variant of the engine.
BARE = "bare"


class OwnRank:
    """A cluster of one rank in this process, as far as a `TrainingEngine` asks."""

    name = "training"

    def __init__(self, rank: TrainingRank) -> None:
        self._rank = rank

    def __len__(self) -> int:
        return 1

    def everywhere(self, method: Any, *arguments: Any) -> list[Any]:
        return [method(self._rank, *arguments)]

    def scatter(self, method: Any, shares: Sequence[Any]) -> list[Any]:
        return [method(self._rank, share) for share in shares]


def measured(options: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Return the figures of a variant."""
    if variant == BARE:
        return measured_bare(options)
    began = time.perf_counter()
    options = argparse.Namespace(**{**vars(options), "overrides": [*options.overrides, *variant.split()]})
    work = policy_work(options)
    config = work.config
    objective = PolicyObjective(
        settings=config.training,
        algorithm=config.algorithm,
        max_response_tokens=config.rollout.max_response_tokens,
        kl=KLController(config.algorithm.kl),
    )
    devices = config.resources.devices_of("training")
    spec = rank_spec(config, resolve_model(config.model), devices, objective, total_updates=1000)
    os.environ |= {"DS_ACCELERATOR": spec.device}
    rank = TrainingRank(spec, 0, 1)
    figures: dict[str, Any] = {"variant": variant}
    try:
        rank.start(rank.address())
        figures["start_seconds"] = round(time.perf_counter() - began, 1)
        cluster: Any = OwnRank(rank)
        engine = TrainingEngine(cluster, objective, joined=rank.joins_rows())
        seconds = []
        for step in range(2 + options.repetitions):
            if spec.device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            metrics = engine.train_step(work.batches[0])
            if spec.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            if step == 0:
                figures |= {"first_step_seconds": round(seconds[0], 2), "loss": metrics["train/loss"].value}
                figures["grad_norm"] = round(float(metrics["train/grad_norm"].value), 5)
        median = statistics.median(seconds[2:])
        figures |= speed(options, work, median)
        if options.profile:
            update = next(iter(objective.updates(work.batches[0], engine)))
            figures["profile"] = profiled(rank, Share(batches=update.shards[0], shared=update.shared))
    except Exception as error:  # noqa: BLE001 - the next variant may work
        figures["error"] = f"{type(error).__name__}: {error}"[:600]
    return figures


def measured_bare(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the hand-written loop."""
    figures: dict[str, Any] = {"variant": BARE}
    try:
        work = policy_work(options)
        loop = bare_loop("grpo", work)
        seconds = [loop.turn() for _ in range(2 + options.repetitions)]
        figures |= {"first_step_seconds": round(seconds[0], 2), **speed(options, work, statistics.median(seconds[2:]))}
    except Exception as error:  # noqa: BLE001 - the next variant may work
        figures["error"] = f"{type(error).__name__}: {error}"[:600]
    return figures


def speed(options: argparse.Namespace, work: Work[Any, Any], seconds: float) -> dict[str, Any]:
    """Return what a step of so many seconds comes to."""
    tflops = work.flops / seconds / 1e12
    figures: dict[str, Any] = {
        "seconds": round(seconds, 4),
        "tokens_per_second": round(work.tokens / seconds),
        "model_tflops_per_second": round(tflops, 1),
    }
    if options.peak:
        figures["mfu"] = round(tflops / options.peak, 4)
    if options.device == "cuda":
        figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        torch.cuda.reset_peak_memory_stats()
    return figures


def send(connection: Connection, options: argparse.Namespace, variant: str) -> None:
    """Be the process of a variant."""
    connection.send(measured(options, variant))
    os._exit(0)  # what libraries do at the end takes seconds


def parser() -> Options:
    arguments = Options(__doc__, repetitions=1, prompts=2, samples=2)
    add_common_arguments(arguments)
    add_device_argument(arguments)
    arguments.add_argument(
        "--variant", action="append", help="key=value of the configuration, several with spaces; or bare"
    )
    arguments.add_argument("--max-tokens", type=int, help="budget of a micro-batch; default: the quickstart's")
    arguments.add_argument("--prompts", type=int, default=16, help="groups in the batch")
    arguments.add_argument("--samples", type=int, default=8, help="samples of each group")
    arguments.add_argument("--shortest", type=int, default=15, help="tokens of the shortest response")
    arguments.add_argument("--longest", type=int, default=40, help="tokens of the longest response")
    arguments.add_argument("--limit", type=float, default=600.0, help="seconds of a variant, at most")
    arguments.add_argument("--peak", type=float, help="TFLOP/s that the device can do: 989.5 for an H100 in bfloat16")
    arguments.add_argument("--profile", action="store_true", help="also tell where a step spends its time")
    arguments.add_argument("overrides", nargs="*", help="key=value of the configuration, for all variants")
    arguments.set_defaults(zero_stage=None, bare_max_tokens=None, no_share_prompts=False)
    return arguments


def main() -> None:
    options = parser().parse_args()
    forked = multiprocessing.get_context("fork")
    figures: dict[str, Any] = {"benchmark": "trainer_variants"}
    for index, variant in enumerate(options.variant or [""]):
        receiver, sender = forked.Pipe(duplex=False)
        process = forked.Process(target=send, args=(sender, options, variant))
        process.start()
        sender.close()
        found: dict[str, Any] = {"variant": variant, "error": f"no end after {options.limit:.0f} s"}
        try:
            if receiver.poll(options.limit):
                found = receiver.recv()
        except EOFError:
            found["error"] = "its process died"
        process.kill()
        process.join()
        print(json.dumps(found), flush=True)
        figures |= {f"{index}_{name}": found[name] for name in ("seconds", "error") if name in found}
    finish(options, figures)


if __name__ == "__main__":
    main()
