"""Runs that the GPUs there are cannot serve: how many they are, what torch can do with them, which kinds they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from roll_like.check.gpus import require_capable
from roll_like.cluster import RaySession, ResourceManager, resources
from roll_like.cluster.resources import Gpu, _own_gpu
from roll_like.config.load import load_config
from roll_like.config.sections import DeviceRange, HardwareConfig
from roll_like.errors import ResourceError

ROOT = Path(__file__).resolve().parents[2]
H200 = Gpu(accelerator_id="0", name="NVIDIA H200", capability=(9, 0), memory_bytes=140 * 2**30)
T4 = Gpu(accelerator_id="1", name="Tesla T4", capability=(7, 5), memory_bytes=15 * 2**30)


def hardware(**changes: Any) -> HardwareConfig:
    return HardwareConfig(**{"device": "cuda", "devices_per_node": 2, **changes})


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("visible", "cuda", "count", "message"),
    [
        (None, None, 0, r"resources.device is cuda, and torch \S+ is a build without CUDA"),
        (None, "13.0", 0, r"torch \S+, built for CUDA 13.0, finds no GPU"),
        (None, "13.0", 1, r"devices_per_node is 2, and this machine has 1 GPU\n"),
        ("0,3,4", "13.0", 3, r"devices_per_node is 8, .* has 3 GPUs for this process \(CUDA_VISIBLE_DEVICES=0,3,4\)"),
    ],
)
def test_too_few_gpus_are_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, cuda: str | None, count: int, message: str
) -> None:
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    wanted = hardware(devices_per_node=8 if count > 2 else 2)
    with pytest.raises(ResourceError, match=message) as error, RaySession(wanted, tmp_path):
        pass
    assert error.value.fix
    assert ("docs/gpu.md" if count == 0 else f"at most {count}") in error.value.fix


class FakeRay:
    """Two nodes with two GPUs each; what a probe finds is given."""

    def __init__(self, found: list[Gpu | str]) -> None:
        self.found = found
        self.asked: list[tuple[Any, int, dict[str, Any]]] = []
        self.removed = 0

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 16.0, "GPU": 2.0}}] * 2

    def remote(self, **options: Any) -> Any:
        def place(scheduling_strategy: Any) -> Any:
            self.asked.append(
                (scheduling_strategy.placement_group, scheduling_strategy.placement_group_bundle_index, options)
            )
            number = len(self.asked) - 1
            return SimpleNamespace(remote=lambda: number)

        def bind(function: Any) -> Any:
            assert function is _own_gpu
            return SimpleNamespace(options=place)

        return bind

    def get(self, refs: list[int], timeout: float) -> list[Gpu | str]:
        assert timeout > 0
        return [self.found[ref] for ref in refs]


def allocated(monkeypatch: pytest.MonkeyPatch, found: list[Gpu | str]) -> tuple[ResourceManager, FakeRay]:
    fake = FakeRay(found)
    groups = iter("ab")
    monkeypatch.setattr(resources, "ray", fake)
    monkeypatch.setattr(resources, "placement_group", lambda bundles, strategy: Group(next(groups)))
    monkeypatch.setattr(resources, "remove_placement_group", lambda group: setattr(fake, "removed", fake.removed + 1))
    monkeypatch.setattr(
        resources,
        "PlacementGroupSchedulingStrategy",
        lambda group, placement_group_bundle_index: SimpleNamespace(
            placement_group=group, placement_group_bundle_index=placement_group_bundle_index
        ),
    )
    manager = ResourceManager(hardware(nodes=2, address="auto"))
    return manager, fake


class Group:
    def __init__(self, name: str) -> None:
        self.name = name

    def wait(self, seconds: float) -> bool:
        return True


def gpu(number: int) -> Gpu:
    return Gpu(accelerator_id=str(number), name="NVIDIA H200", capability=(9, 0), memory_bytes=1)


def test_every_gpu_is_looked_at_by_a_process_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    # the second node calls its GPUs 5 and 7
    manager, fake = allocated(monkeypatch, [gpu(0), gpu(1), gpu(5), gpu(7)])
    manager.allocate()
    assert [(group.name, bundle) for group, bundle, _ in fake.asked] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert all(options == {"num_cpus": 0, "num_gpus": 1, "max_calls": 1} for _, _, options in fake.asked)
    (whole,) = manager.place(DeviceRange.model_validate("2-3"), 1, "inference")
    assert whole.accelerator_ids == ("5", "7")
    assert [one.accelerator_ids for one in manager.place(DeviceRange.model_validate("1-2"), 2, "training")] == [
        ("1",),
        ("5",),
    ]


def test_a_node_whose_torch_has_no_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, fake = allocated(monkeypatch, [gpu(0), gpu(1), gpu(0), "torch 2.13.0+cpu is a build without CUDA"])
    with pytest.raises(ResourceError, match=r"GPU 1 of node 1 cannot be used: .* is a build without CUDA"):
        manager.allocate()
    assert fake.removed == 2


def test_a_probe_says_why_torch_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": [3]})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(resources, "node_address", lambda: "192.0.2.7")
    assert _own_gpu() == f"torch {torch.__version__} is a build without CUDA, on 192.0.2.7"
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert _own_gpu() == Gpu(accelerator_id="3", name="NVIDIA H200", capability=(9, 0), memory_bytes=7)


@pytest.mark.usefixtures("recording_pipeline")
@pytest.mark.parametrize(
    ("overrides", "gpus", "message", "fix"),
    [
        ([], [H200, H200], None, ""),
        ([], [], None, ""),
        (
            ["model.dtype=auto"],
            [H200, T4],
            "auto computes in bfloat16, and device 1 is a Tesla T4",
            "float16",
        ),
        (["model.dtype=bfloat16"], [T4], "dtype: bfloat16 computes in bfloat16, and device 0", "model.dtype"),
        (["model.dtype=float16"], [T4], "training.attention: auto needs flash or Triton kernels", "attention: dense"),
        (
            ["model.dtype=float16", "training.attention=varlen"],
            [T4],
            r"training.attention: varlen .* compute capability 7.5",
            "attention: dense",
        ),
        (["model.dtype=float16", "training.attention=dense"], [T4], None, ""),
        (["model.dtype=float32"], [T4], None, ""),
        (
            ["model.dtype=float16", "training.attention=dense", "algorithm.advantage=gae", "critic={attention: auto}"],
            [T4],
            "critic.attention: auto needs",
            "critic.attention: dense",
        ),
    ],
)
def test_gpus_that_lack_what_the_run_computes_with_are_named(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], gpus: list[Gpu], message: str | None, fix: str
) -> None:
    monkeypatch.chdir(ROOT)
    config: Any = load_config(ROOT / "configs" / "rlvr_1gpu.yaml", overrides)
    if message is None:
        require_capable(config, gpus)
        return
    with pytest.raises(ResourceError, match=message) as error:
        require_capable(config, gpus)
    assert fix in str(error.value.fix)
