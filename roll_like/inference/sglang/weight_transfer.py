"""GPUs that trainer and engines do not share: rank 0 broadcasts in a process group with SGLang's schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed
from torch import Tensor

from roll_like.cluster.progress import PROGRESS, Work
from roll_like.config.inference import GPU_BUCKET_BYTES
from roll_like.inference.interface import InferenceEngine
from roll_like.inference.weight_transfer.interface import SendReport, WeightSource, send_buckets

if TYPE_CHECKING:
    from roll_like.cluster import ClusterHandle

GROUP = "roll_like_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangTransfer:
    """Broadcasts from trainer rank 0 to every GPU of every engine.

    Args:
        address: Host of trainer rank 0.
        port: Free port there.
        backend: Of the process group: `nccl`, or `gloo` in tests.
        bucket_bytes: Size of one bucket, which is announced in one call and sent in one broadcast.
    """

    engines: ClusterHandle[InferenceEngine]
    gpus_per_engine: int
    address: str
    port: int
    backend: str = "nccl"
    bucket_bytes: int = GPU_BUCKET_BYTES
    in_parts: ClassVar[bool] = False  # rank 0 and all schedulers are one group

    @property
    def world_size(self) -> int:
        """Trainer rank 0 and all GPUs of all engines."""
        return 1 + len(self.engines) * self.gpus_per_engine

    def connect(self, source: WeightSource, rank: int, part: int = 0) -> SGLangSender:
        """Connect to the engines: opens the process group on rank 0."""
        del part  # all of it
        return SGLangSender(self, source, rank)

    def places(self) -> list[dict[str, Any]]:
        """Return what each engine needs to join: its GPUs follow those of the engine before it."""
        return [
            {
                "master_address": self.address,
                "master_port": self.port,
                "rank_offset": 1 + engine * self.gpus_per_engine,
                "world_size": self.world_size,
                "group_name": GROUP,
                "backend": self.backend,
            }
            for engine in range(len(self.engines))
        ]


class SGLangSender:
    """One rank's end; see `WeightSender`."""

    def __init__(self, transfer: SGLangTransfer, source: WeightSource, rank: int) -> None:
        self._transfer = transfer
        self._source = source
        self._rank = rank
        self._group: Any = None
        if rank != 0:
            return
        # the function that SGLang's schedulers call too: names of stores and prefixes of keys have to be equal
        from sglang.srt.utils import init_custom_process_group

        host = f"[{transfer.address}]" if ":" in transfer.address else transfer.address
        with ThreadPoolExecutor(1, thread_name_prefix="weight-sync") as thread, PROGRESS.phase("connect_weights"):
            joining = thread.submit(transfer.engines.scatter, InferenceEngine.init_weight_transfer, transfer.places())
            self._group = init_custom_process_group(
                backend=transfer.backend,
                init_method=f"tcp://{host}:{transfer.port}",
                world_size=transfer.world_size,
                rank=0,
                group_name=GROUP,
            )
            joining.result()

    def send(self, seed: int) -> SendReport:
        """Gather on every rank; announce and broadcast on rank 0."""
        with ThreadPoolExecutor(1, thread_name_prefix="weight-sync") as thread:
            send = partial(self._broadcast, thread)
            return send_buckets(self._source, self._transfer.bucket_bytes, self._rank, seed, send)

    def _broadcast(self, thread: ThreadPoolExecutor, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Send one bucket; returns when every engine has loaded it."""
        # SGLang takes views of the bytes, and each begins at a multiple of its values' size
        ordered = sorted(tensors, key=lambda named: -named[1].element_size())
        info = {
            "names": [name for name, _ in ordered],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
            "shapes": [list(tensor.shape) for _, tensor in ordered],
            "group_name": GROUP,
            "load_format": "flattened_bucket",
        }
        device = "cuda" if self._transfer.backend == "nccl" else "cpu"
        engines = self._transfer.engines
        with PROGRESS.phase("send_weights", Work.ELSEWHERE):
            loading = thread.submit(engines.everywhere, InferenceEngine.update_weights, info)
            # kept until it has arrived; not waited for before the engines answer, since one that refuses never joins
            packed = torch.cat([each.detach().to(device).reshape(-1).view(torch.uint8) for _, each in ordered])
            sent = torch.distributed.broadcast(packed, src=0, group=self._group, async_op=True)
            loading.result()
            sent.wait()

    def close(self) -> None:
        """Leave the process group."""
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)
            self._group = None
