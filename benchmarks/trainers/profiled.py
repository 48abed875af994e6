"""Where the time of the engine's step goes: its ranks' kernels, launches and waits, as PyTorch's profiler sees them."""

from __future__ import annotations

import time
from typing import Any

import ray
import torch
from torch.profiler import ProfilerActivity, profile

from roll_like.training.interface import Share, Update
from roll_like.training.rank import TrainingRank

#: Operators of one table.
ROWS = 15
#: What makes the host wait for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")


def profiled_step(engine: Any, step: Any) -> dict[str, Any]:
    """Return rank 0's figures of a step's first optimizer step, once timed and once profiled.

    `seconds` are those without the profiler, by phase; `device_seconds` what kernels took together, on CPU operators;
    `kernels` and `waits` are counts; `most` are the operators or kernels that took longest, with seconds and calls, and
    `host` what took the rank's process longest, its own time only.
    """
    update: Update[Any] = next(iter(engine.objective.updates(step, engine)))
    share = Share(batches=update.shards[0], shared=update.shared)
    figures: dict[str, Any] = ray.get(engine.cluster._actors[0].__ray_call__.remote(profiled, share))
    return figures


def profiled(rank: TrainingRank, share: Share[Any]) -> dict[str, Any]:
    seconds = _timed(rank, share)
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as recorded:
        _timed(rank, share)
    averages = recorded.key_averages()
    took = {each.key: each.self_device_time_total if cuda else each.self_cpu_time_total for each in averages}
    counts = {each.key: each.count for each in averages}
    host = {each.key: each.self_cpu_time_total for each in averages}
    return {
        "seconds": seconds,
        "micro_batches": len(share.batches),
        "device_seconds": round(sum(took.values()) / 1e6, 4),
        "kernels": sum(count for key, count in counts.items() if "LaunchKernel" in key),
        "waits": {key: counts[key] for key in WAITS if key in counts},
        "most": _longest(took, counts),
        "host_seconds": round(sum(host.values()) / 1e6, 4),
        "host": _longest(host, counts),
    }


def _longest(took: dict[str, float], counts: dict[str, int]) -> list[tuple[str, float, int]]:
    return [
        (key[:90], round(took[key] / 1e6, 4), counts[key]) for key in sorted(took, key=lambda key: -took[key])[:ROWS]
    ]


def _timed(rank: TrainingRank, share: Share[Any]) -> dict[str, float]:
    seconds = {}
    for name, call in (("forward_backward", lambda: rank.forward_backward(share)), ("optimizer", rank.optimizer_step)):
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[name] = round(time.perf_counter() - began, 4)
    return seconds
