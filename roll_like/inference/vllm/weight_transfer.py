"""GPUs: vLLM's own trainer engines over NCCL (roles apart) and CUDA IPC (roles on the same GPUs)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from roll_like.cluster.progress import PROGRESS, Work
from roll_like.config.inference import GPU_BUCKET_BYTES
from roll_like.inference.interface import InferenceEngine
from roll_like.inference.weight_transfer.fingerprint import Digests, checked_numbers
from roll_like.inference.weight_transfer.interface import SendReport, WeightSource

if TYPE_CHECKING:
    from roll_like.cluster import ClusterHandle

#: vLLM's default is a GiB.
BUFFER_BYTES = GPU_BUCKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMTransfer:
    """Hands the weights to the trainer engine that vLLM brings along.

    Args:
        backend: `ipc` when every engine's GPUs are also trainer GPUs, else `nccl`.
        address: Host of trainer rank 0, for NCCL.
        port: Free port there, for NCCL.
    """

    engines: ClusterHandle[InferenceEngine]
    backend: str
    gpus_per_engine: int
    address: str
    port: int
    in_parts: ClassVar[bool] = False  # vLLM's engines join one group, with one trainer rank

    def connect(self, source: WeightSource, rank: int, part: int = 0) -> VLLMSender:
        """Connect to the engines: opens the NCCL group on rank 0."""
        del part  # all of it
        return VLLMSender(self, source, rank)

    def init_info(self, rank: int, largest_bytes: int) -> Any:
        """Return what vLLM's trainer engine is built from.

        Args:
            largest_bytes: Size of the largest tensor. Through CUDA IPC it fits into the buffer; NCCL broadcasts what
                reaches the size of the buffer together with the tensor that goes beyond it.
        """
        if self.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=max(BUFFER_BYTES, largest_bytes))
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(
            rank=rank,
            master_address=self.address,
            master_port=self.port,
            world_size=1 + len(self.engines) * self.gpus_per_engine,
            packed=True,
            packed_buffer_size_bytes=BUFFER_BYTES,
        )


class VLLMSender:
    """One rank's end; see `WeightSender`."""

    def __init__(self, transfer: VLLMTransfer, source: WeightSource, rank: int) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._rank = rank
        self._weights = _recording_source(source)
        # sharded weights are gathered by all ranks, and vLLM asks for this on some of them only
        largest = max(math.prod(meta.shape) * meta.dtype.itemsize for meta in self._weights.described)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            transfer.init_info(rank, largest), client=_SyncClient(transfer), source=self._weights
        )

    def send(self, seed: int) -> SendReport:
        """Let vLLM's engine walk through the weights, and note what goes by."""
        self._weights.begin(seed, recording=self._rank == 0)
        self._engine.send_weights()
        seen = self._weights
        return SendReport(fingerprints=dict(seen.digests.found()), bytes=seen.bytes, buckets=1 if seen.bytes else 0)

    def close(self) -> None:
        """Close the NCCL group or the IPC handles."""
        self._engine.shutdown()


class _SyncClient:
    """What vLLM's trainer engine calls the inference engines by; the driver starts and finishes an update itself."""

    def __init__(self, transfer: VLLMTransfer) -> None:
        self._transfer = transfer

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos: list[Mapping[str, Any]] = [init_info] * len(self._transfer.engines)
        if "rank_offset" in init_info:
            # every engine numbers its GPUs from 0; in the group they follow one another after the trainer
            offset, share = init_info["rank_offset"], self._transfer.gpus_per_engine
            infos = [{**init_info, "rank_offset": offset + engine * share} for engine in range(len(infos))]
        with PROGRESS.phase("connect_weights", Work.ELSEWHERE):
            self._transfer.engines.scatter(InferenceEngine.init_weight_transfer, infos)

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        with PROGRESS.phase("send_weights", Work.ELSEWHERE):
            self._transfer.engines.everywhere(InferenceEngine.update_weights, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


def _recording_source(source: WeightSource) -> Any:
    """Return a vLLM `WeightSource` that fingerprints what goes by."""
    from vllm.distributed.weight_transfer.base import ParamMeta
    from vllm.distributed.weight_transfer.base import WeightSource as VLLMSource

    class RecordingSource(VLLMSource):  # type: ignore[misc]
        def __init__(self) -> None:
            # names, shapes and precisions stay the same: one walk is enough
            self.described = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in source.full_weights()]
            self._seed = 0
            self._recording = False
            self.digests = Digests()
            self.bytes = 0

        def begin(self, seed: int, *, recording: bool) -> None:
            self._seed, self._recording = seed, recording
            self.digests, self.bytes = Digests(), 0

        def metadata(self) -> list[Any]:
            return self.described

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in source.full_weights():
                if self._recording:
                    self.digests.add(name, checked_numbers(tensor, self._seed))
                    self.bytes += tensor.numel() * tensor.element_size()
                yield name, tensor

        if hasattr(VLLMSource, "iter_full"):  # vLLM 0.33
            metadata = cached_property(metadata)  # type: ignore[assignment]
            iter_full = __iter__

    return RecordingSource()
