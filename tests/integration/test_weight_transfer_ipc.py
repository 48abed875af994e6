"""Weights through CUDA IPC, with vLLM's own sending and receiving ends; host memory stands in for a GPU's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_like.errors import WeightSyncError
from roll_like.inference.interface import InferenceEngine
from roll_like.inference.vllm import weight_transfer
from roll_like.inference.vllm.weight_transfer import VLLMTransfer
from roll_like.inference.weight_transfer.fingerprint import fingerprint

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
    monkeypatch.setattr(weight_transfer, "IPC_BUFFER_BYTES", SMALLEST_BUFFER)
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
    for salt in (1, 2):
        source.weights = {name: tensor + salt for name, tensor in source.weights.items()}
        report = sender.send(salt)
        for received in engines.received:
            assert received.keys() == source.weights.keys()
            assert all(torch.equal(received[name], tensor) for name, tensor in source.weights.items())
        assert report.fingerprints == {name: fingerprint(tensor, salt) for name, tensor in source.weights.items()}
    assert source.walks == 3
    assert [len(buffer) for buffer in host_memory.buffers] == [6400, 6400]
    assert engines.chunks == 4  # the embedding alone, then the rest, twice


def test_small_tensors_take_the_smallest_buffer(host_memory: HostMemory) -> None:
    engines, source = Engines(), Rank()
    del source.weights["embed.weight"], source.weights["proj.weight"]
    transfer = VLLMTransfer(engines=engines, backend="ipc", gpus_per_engine=1, address="", port=0)  # type: ignore[arg-type]
    transfer.connect(source, rank=0).send(1)
    assert [len(buffer) for buffer in host_memory.buffers] == [SMALLEST_BUFFER]


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
