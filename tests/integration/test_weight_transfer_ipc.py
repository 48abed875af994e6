"""Weights through CUDA IPC and NCCL, with vLLM's own sending and receiving ends; host memory stands in for a GPU's."""

from __future__ import annotations

import inspect
import queue
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_like.cluster.node_watch import NodeWatch, page_prefix
from roll_like.cluster.progress import VARIABLE, ProgressPage
from roll_like.errors import WeightSyncError
from roll_like.inference.interface import InferenceEngine
from roll_like.inference.vllm import weight_transfer
from roll_like.inference.vllm.weight_transfer import VLLMTransfer
from roll_like.inference.weight_transfer.fingerprint import fingerprint
from roll_like.run.launch import memory_metrics
from roll_like.values import Max

pytestmark = pytest.mark.integration

SMALLEST_BUFFER = 1024
UUID = "GPU-0"
DEVICE_ARGUMENT = 6  # where vLLM writes the receiver's device into the arguments of a handle


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """A first import of vLLM warns."""
    with warnings.catch_warnings(action="ignore"):
        import roll_like.inference.vllm.worker_extension  # noqa: F401


@dataclass
class HostMemory:
    """Stands for a GPU: buffers are on the host, a handle is a buffer's number."""

    buffers: list[torch.Tensor] = field(default_factory=list)

    def empty(self, size: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cuda"
        return torch.empty(size, dtype=dtype)

    def reduce(self, buffer: torch.Tensor) -> tuple[None, tuple[int, ...]]:
        self.buffers.append(buffer)
        return None, (len(self.buffers) - 1, *range(DEVICE_ARGUMENT))

    def rebuild(self, number: int, *_: Any) -> torch.Tensor:
        return self.buffers[number]


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    import torch.multiprocessing.reductions
    from vllm.distributed.weight_transfer import packed_tensor

    memory = HostMemory()
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=UUID))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.multiprocessing.reductions, "rebuild_cuda_tensor", memory.rebuild)
    monkeypatch.setattr(packed_tensor, "reduce_tensor", memory.reduce)
    vllms_torch = SimpleNamespace(**{**vars(torch), "empty": memory.empty})
    monkeypatch.setattr(packed_tensor, "torch", vllms_torch)
    monkeypatch.setattr(weight_transfer, "BUFFER_BYTES", SMALLEST_BUFFER)
    return memory


class Engines:
    """Two engines that receive as vLLM's worker does."""

    def __init__(self) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import PackedBufferImporter

        self._importers = [PackedBufferImporter() for _ in range(2)]
        self.packed: list[bool] = []
        self.received: list[dict[str, torch.Tensor]] = [{}, {}]
        self.chunks = 0

    def __len__(self) -> int:
        return 2

    def scatter(self, method: Callable[..., Any], infos: list[dict[str, Any]]) -> None:
        assert method is InferenceEngine.init_weight_transfer
        self.packed = [info["packed"] for info in infos]

    def everywhere(self, method: Callable[..., Any], info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer

        assert method is InferenceEngine.update_weights
        self.chunks += 1
        for importer, received in zip(self._importers, self.received, strict=True):
            arrived = packed_ipc_consumer(
                info["ipc_handles"],
                info["names"],
                info["shapes"],
                info["dtype_names"],
                info["tensor_sizes"],
                device_index=0,
                importer=importer,
            )
            received.update(arrived)


class Rank:
    """A trainer rank with a tensor that is larger than the buffer would be without it."""

    def __init__(self) -> None:
        self.walks = 0
        self.weights = {
            "embed.weight": torch.randn(50, 64, dtype=torch.bfloat16),  # 6,400 bytes
            "norm.weight": torch.randn(7),
            "proj.weight": torch.randn(30, 33, dtype=torch.bfloat16),
            "bias": torch.randn(3),
        }

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.walks += 1
        yield from self.weights.items()


def test_a_tensor_larger_than_the_buffer_arrives_whole(host_memory: HostMemory) -> None:
    engines, source = Engines(), Rank()
    transfer = VLLMTransfer(engines=engines, backend="ipc", gpus_per_engine=1, address="", port=0)  # type: ignore[arg-type]
    sender = transfer.connect(source, rank=0)
    # every rank walks when it connects, so that none waits for another one later
    assert source.walks == 1
    assert engines.packed == [True, True]
    for seed in (1, 2):
        source.weights = {name: tensor + seed for name, tensor in source.weights.items()}
        report = sender.send(seed)
        for received in engines.received:
            assert received.keys() == source.weights.keys()
            assert all(torch.equal(received[name], tensor) for name, tensor in source.weights.items())
        assert report.fingerprints == {name: fingerprint(tensor, seed) for name, tensor in source.weights.items()}
    assert source.walks == 3
    assert [len(buffer) for buffer in host_memory.buffers] == [6400, 6400]
    assert engines.chunks == 4  # the embedding alone, then the rest, twice


def test_small_tensors_take_the_smallest_buffer(host_memory: HostMemory) -> None:
    engines, source = Engines(), Rank()
    del source.weights["embed.weight"], source.weights["proj.weight"]
    transfer = VLLMTransfer(engines=engines, backend="ipc", gpus_per_engine=1, address="", port=0)  # type: ignore[arg-type]
    transfer.connect(source, rank=0).send(1)
    assert [len(buffer) for buffer in host_memory.buffers] == [SMALLEST_BUFFER]


class Broadcasts:
    """A communicator of rank 0 and two engines, which meet in every call as in NCCL's."""

    def __init__(self) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        self._signature = inspect.signature(PyNcclCommunicator.broadcast)
        self._pipes: list[queue.Queue[torch.Tensor]] = [queue.Queue() for _ in range(2)]
        self.sizes: list[int] = []

    def sender(self, _: Any) -> Any:
        return self._end(self._send)

    def receiver(self, info: Any, _: Any) -> Any:
        pipe = self._pipes[info.rank_offset - 1]
        return self._end(lambda tensor: tensor.copy_(pipe.get(timeout=60)))

    def _end(self, move: Callable[[torch.Tensor], object]) -> Any:
        def broadcast(*args: Any, **kwargs: Any) -> None:
            bound = self._signature.bind(None, *args, **kwargs)
            assert bound.arguments["src"] == 0
            move(bound.arguments["tensor"])

        return SimpleNamespace(broadcast=broadcast, destroy=lambda: None)

    def _send(self, tensor: torch.Tensor) -> None:
        self.sizes.append(tensor.nbytes)
        for pipe in self._pipes:
            pipe.put(tensor.clone())


class ReceivingEngines:
    """Two engines with vLLM's receiving end, one GPU each."""

    def __init__(self) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        self.received: list[dict[str, torch.Tensor]] = [{}, {}]
        config: Any = SimpleNamespace(parallel_config=None, model_config=SimpleNamespace(dtype=torch.float32))
        self._ends = [
            WeightTransferEngineFactory.create_engine(
                SimpleNamespace(backend="nccl"),
                config,
                torch.device("cpu"),
                SimpleNamespace(load_weights=received.update),
            )
            for received in self.received
        ]

    def __len__(self) -> int:
        return 2

    def scatter(self, method: Callable[..., Any], infos: list[dict[str, Any]]) -> None:
        assert method is InferenceEngine.init_weight_transfer
        for end, info in zip(self._ends, infos, strict=True):
            end.init_transfer_engine(end.init_info_cls(**info))

    def everywhere(self, method: Callable[..., Any], info: dict[str, Any]) -> None:
        assert method is InferenceEngine.update_weights
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda end: end.receive_weights(end.update_info_cls(**info)), self._ends))


def test_small_tensors_are_broadcast_together_in_pieces_of_the_buffers_size(
    host_memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

    group = Broadcasts()
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", group.sender)
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", group.receiver)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    host_torch = SimpleNamespace(**{**vars(torch), "cuda": SimpleNamespace(stream=lambda stream: nullcontext())})
    monkeypatch.setattr(packed_tensor, "torch", host_torch)
    engines, source = ReceivingEngines(), Rank()
    source.weights |= {f"layers.{number}.norm": torch.randn(16) for number in range(100)}
    transfer = VLLMTransfer(engines=engines, backend="nccl", gpus_per_engine=1, address="", port=0)  # type: ignore[arg-type]
    sender = transfer.connect(source, rank=0)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # the embedding is larger than the buffer
        report = sender.send(1)
    sender.close()
    for received in engines.received:
        assert received.keys() == source.weights.keys()
        assert all(torch.equal(received[name], tensor) for name, tensor in source.weights.items())
    assert sum(group.sizes) == report.bytes == sum(tensor.nbytes for tensor in source.weights.values())
    # the embedding alone; each of the others goes with those before it, until they are more than the buffer's size
    assert group.sizes == [6400, 28 + 1980, 12 + 16 * 64, *[17 * 64] * 4, 16 * 64]


class PastTheLoaders(torch.nn.Module):
    """A model that copies the tensors of a layer by itself, as vLLM's GPT-OSS does."""

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(tie_word_embeddings=False))

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Linear(3, 3, bias=False)
        self.experts = torch.nn.Linear(3, 3, bias=False)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            parameter: Any = self.get_parameter(name)
            if name.startswith("norm"):
                parameter.weight_loader(parameter, tensor)
            else:
                parameter.data.copy_(tensor)


@pytest.mark.parametrize("backend", ["ipc", "nccl", "shared_memory"])
def test_layers_that_a_reload_would_leave_as_they_were_are_named(backend: str) -> None:
    """vLLM's transfers close a reload like that without an error, whatever the weights came by."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from roll_like.inference.vllm.worker_extension import WorkerExtension

    model = PastTheLoaders()
    record_metadata_for_reloading(model)
    extension = WorkerExtension()
    extension.model_runner = SimpleNamespace(get_model=lambda: model)
    config = SimpleNamespace(parallel_config=None, model_config=SimpleNamespace(dtype=torch.float32))
    engine = WeightTransferEngineFactory.create_engine(
        SimpleNamespace(backend=backend), config, torch.device("cpu"), model
    )
    old = model.experts.weight.detach().clone()
    engine.start_weight_update()
    model.load_weights([("norm.weight", torch.ones(3, 3)), ("experts.weight", torch.ones(3, 3))])
    with pytest.raises(WeightSyncError, match=r"PastTheLoaders put none .* into 1 of its layers \(experts\)"):
        extension.require_every_layer()
    engine.finish_weight_update()
    assert torch.equal(model.norm.weight, torch.ones(3, 3))
    assert torch.equal(model.experts.weight, old)
    extension.require_every_layer()  # nothing is open


def test_the_peak_of_a_workers_gpu_is_noted_with_every_check_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No phase ends in vLLM's worker, whose memory it is."""
    from roll_like.inference.vllm import worker_extension

    monkeypatch.setenv(VARIABLE, page_prefix(tmp_path, "inference", 0))
    page = ProgressPage()
    page.open()
    monkeypatch.setattr(worker_extension, "PROGRESS", page)
    extension = worker_extension.WorkerExtension()
    extension.model_runner = SimpleNamespace(get_model=torch.nn.Sequential)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for peak in (3, 5):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda peak=peak: peak * 2**30)
        extension.weight_fingerprints([], seed=1)
        metrics = memory_metrics(NodeWatch(tmp_path).memory())
        assert metrics["memory/inference_gpu_gib"] == Max(peak)
