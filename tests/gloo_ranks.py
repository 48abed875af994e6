"""Ranks of a training engine in processes of their own, without Ray: what `start_engine` starts, by hand."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pytest

from roll_like.cluster.address import free_port

#: How long ranks may take. Seconds.
TIMEOUT = 200
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
#: What every rank imports: nearly all of a short test's time.
IMPORTS = [
    "deepspeed.module_inject",
    "functorch.compile",
    "roll_like.training.rank",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
]


def on_ranks(function: Callable[..., Any], *arguments: Any, ranks: int = 2, timeout: float = TIMEOUT) -> list[Any]:
    """Call `function(rank, world_size, address, *arguments)` in a new process for each rank; return what they return.

    Args:
        function: Of a module; it and its arguments must pickle.
        arguments: Its further arguments.
        ranks: How many.
        timeout: How long each may take. Seconds.
    """
    context = multiprocessing.get_context("forkserver")
    # the first call of a test session starts a process that imports; each rank is a fork of it
    context.set_forkserver_preload(IMPORTS)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        ensure_running()
    address = ("127.0.0.1", free_port())
    pipes, processes = [], []
    for rank in range(ranks):
        here, there = context.Pipe(duplex=False)
        # daemons: a rank that waits for one that failed ends with the test
        process = context.Process(target=_call, args=(there, function, (rank, ranks, address, *arguments)), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    found = []
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(timeout), f"rank {rank} said nothing for {timeout} s"
            failure, result = pickle.loads(pipe.recv_bytes())
            assert failure is None, f"rank {rank}:\n{failure}"
            found.append(result)
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
            process.join()
    return found


def _call(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.chdir(Path(__file__).parent)
    try:
        # not `send`: that would share a tensor's memory, which ends with this process
        pipe.send_bytes(pickle.dumps((None, function(*arguments))))
    except BaseException:  # noqa: BLE001 - the test says what it was
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
