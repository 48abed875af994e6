"""Weight sync: seconds and GB/s of trainer to vLLM, against a plain copy of the same bytes.

    python benchmarks/weight_sync.py                    # the quickstart's model
    python benchmarks/weight_sync.py --model DIRECTORY

A sync is everything between freezing and going on: gathering, copying into shared memory, checksums on
both sides, loading and packing in vLLM's process, resetting its prefix cache, and the comparison of every
tensor. The plain copy is `torch.Tensor.copy_` from tensor to tensor into memory that is already there.
Trainer and engine are processes of their own, without Ray, which would add about a millisecond a call.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common import Options, add_common_arguments, environment_of, finish, quickstart, say

T = TypeVar("T")


def parser() -> Options:
    arguments = Options(__doc__, repetitions=1)
    add_common_arguments(arguments, repetitions=5)
    arguments.add_argument("--model", help="directory of a model; default: the quickstart's")
    arguments.add_argument("--bucket-mib", type=int, default=64, help="size of one bucket")
    return arguments


class Engine:
    """An inference engine on an event loop of its own; for the sync, the cluster of this one engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._run(engine.start())

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def everywhere(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [self._run(getattr(self._engine, method.__name__)(*arguments))]

    def close(self) -> None:
        self._run(self._engine.close())


def main(options: argparse.Namespace) -> None:
    from roll_like.inference.interface import EngineSpec
    from roll_like.inference.weight_transfer.shared_memory import SharedMemoryTransfer
    from roll_like.inference.weight_transfer.sync import WeightSync
    from roll_like.models.load import resolve_model
    from roll_like.models.modules import load_causal_lm
    from roll_like.registry import INFERENCE_ENGINES

    config = quickstart(smoke=options.smoke)
    dtype = config.model.dtype
    path = options.model or str(resolve_model(config.model).path)
    spec = EngineSpec(
        model_path=path,
        tokenizer_path=path,
        dtype=dtype,
        device="cpu",
        threads=options.threads,
        tensor_parallel_size=1,
        max_model_len=256,
        seed=0,
    )
    engine = Engine(INFERENCE_ENGINES.get(config.inference.type).engine()(config.inference, spec))
    policy = Policy(load_causal_lm(Path(path), dtype))
    sender = SharedMemoryTransfer(engine, options.bucket_mib << 20).connect(policy, rank=0)
    sync = WeightSync(sender.send, engine)
    target = [tensor.clone() for _, tensor in policy.full_weights()]
    pushes, copies = [], []
    for turn in range(-1, options.repetitions):
        push, copy = sync.push(), copy_seconds(policy, target)
        say(f"sync {push.seconds:.3f} s (check {push.check_seconds:.3f} s), plain copy {copy:.3f} s")
        if turn >= 0:  # the first turn touches fresh memory
            pushes.append(push)
            copies.append(copy)
    sender.close()
    engine.close()
    seconds, plain = statistics.median(push.seconds for push in pushes), statistics.median(copies)
    size = pushes[0].bytes
    finish(
        options,
        {
            "benchmark": "weight_sync",
            "model": Path(path).name,
            "bytes": size,
            "seconds": seconds,
            "check_seconds": statistics.median(push.check_seconds for push in pushes),
            "gb_per_second": size / 1e9 / seconds,
            "plain_copy_seconds": plain,
            "plain_copy_gb_per_second": size / 1e9 / plain,
            "ratio": seconds / plain,
            "tensors_checked": pushes[0].checked,
            "dtype": dtype,
        },
    )


class Policy:
    """A transformers model in the trainer's place."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def full_weights(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()


def copy_seconds(policy: Policy, target: Sequence[Any]) -> float:
    """Return how long it takes to copy every tensor."""
    began = time.perf_counter()
    for (_, tensor), place in zip(policy.full_weights(), target, strict=True):
        place.copy_(tensor)
    return time.perf_counter() - began


if __name__ == "__main__":
    chosen = parser().parse_args()
    os.environ.update(environment_of(chosen.threads, plain=chosen.plain_environment))
    main(chosen)
