"""Runs that the GPUs there are cannot serve: how many they are, what torch can do with them, which kinds they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from config_files import MINIMAL, changed

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check.gpus import require_capable, require_room
from roll_like.cluster import RaySession, ResourceManager, resources
from roll_like.cluster.resources import Gpu, _own_gpu
from roll_like.config.load import load_config
from roll_like.config.resources import DeviceRange, ResourcesConfig
from roll_like.errors import ResourceError
from roll_like.run import launch

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
H200 = Gpu(accelerator_id="0", name="NVIDIA H200", capability=(9, 0), memory_bytes=140 * GIB, triton=True)
T4 = Gpu(accelerator_id="1", name="Tesla T4", capability=(7, 5), memory_bytes=15 * GIB, triton=True)
#: What torch finds on a GPU of 40960 MiB.
A100 = Gpu(
    accelerator_id="2",
    name="NVIDIA A100-SXM4-40GB",
    capability=(8, 0),
    memory_bytes=int(39.4 * GIB),
    triton=True,
)


def hardware(**changes: Any) -> ResourcesConfig:
    return ResourcesConfig(**{"device": "cuda", "devices_per_node": 2, **changes})


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
    return Gpu(accelerator_id=str(number), name="NVIDIA H200", capability=(9, 0), memory_bytes=1, triton=True)


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
    monkeypatch.setattr(resources, "find_spec", {"triton": "there"}.get)
    found = _own_gpu()
    assert found == Gpu(accelerator_id="3", name="NVIDIA H200", capability=(9, 0), memory_bytes=7, triton=True)
    monkeypatch.setattr(resources, "find_spec", {}.get)
    assert _own_gpu() == replace(found, triton=False)


@pytest.mark.parametrize(
    ("built_for", "capability", "runs"),
    [
        (["sm_75", "sm_80", "sm_90"], (8, 6), True),
        (["sm_75", "sm_80", "sm_90"], (7, 0), False),
        (["sm_80", "sm_86"], (9, 0), False),
        (["sm_86"], (8, 0), False),
        (["sm_80", "compute_90"], (12, 0), True),
        (["compute_90"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_120"], (12, 1), True),
        ([], (9, 0), True),
        (["gfx942"], (9, 4), True),
    ],
)
def test_a_probe_says_whether_torch_has_kernels_for_its_gpu(
    monkeypatch: pytest.MonkeyPatch, built_for: list[str], capability: tuple[int, int], runs: bool
) -> None:
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": [0]})
    properties = SimpleNamespace(name="a GPU", major=capability[0], minor=capability[1], total_memory=7)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(resources, "node_address", lambda: "192.0.2.7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    found = _own_gpu()
    if runs:
        assert isinstance(found, Gpu)
        return
    major, minor = capability
    assert found == (
        f"torch {torch.__version__} is built for {', '.join(built_for)}, and this a GPU on 192.0.2.7 has compute "
        f"capability {major}.{minor}"
    )


#: The trainer on device 0, the engine on device 1.
TWO = ("resources.devices_per_node=2", "resources.device_mapping.inference=1")
REFERENCE = ("algorithm.kl.use=loss", "reference={}", "resources.device_mapping.reference=1")
JUDGE = (
    "judge={type: vllm, path: org/judge}",
    "rewards.use=[{type: llm_judge, judges: [{url: judge, model: judge}]}]",
)


@pytest.mark.usefixtures("recording_pipeline")
@pytest.mark.parametrize(
    ("overrides", "gpus", "message", "fix"),
    [
        ([], [H200, H200], None, ""),
        ([], [], None, ""),
        (
            ["model.dtype=auto", *TWO],
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
        (["model.dtype=float32", "training.attention=varlen"], [T4], None, ""),
        (
            ["model.dtype=float32", "training.attention=flex"],
            [T4],
            "training.attention: flex needs flash or Triton kernels, and device 0",
            "training.attention: dense, or use other GPUs",
        ),
        (["training.attention=flex"], [H200], None, ""),
        (
            ["training.attention=flex"],
            [replace(H200, triton=False)],
            "training.attention: flex is compiled with Triton, and the machine of device 0 has none",
            "training.attention: auto",
        ),
        (["training.attention=auto"], [replace(H200, triton=False)], None, ""),
        # engines have kernels of their own
        (["model.dtype=float16", *TWO], [H200, T4], None, ""),
        (["model.dtype=float16", *TWO, *REFERENCE], [H200, T4], "training.attention: auto needs .* device 1", "dense"),
        (
            ["model.dtype=float32", *JUDGE],
            [T4],
            "judge.dtype: bfloat16 computes in bfloat16, and device 0 is a Tesla T4",
            "judge.dtype: float16",
        ),
        (["model.dtype=float32", *JUDGE, "judge.dtype=float16"], [T4], None, ""),
        (["model.dtype=bfloat16", *JUDGE, "judge.dtype=float16"], [H200], None, ""),
        (
            ["model.head_dtype=float32", "inference.deterministic=true"],
            [A100],
            "device 0 .* capability 8.0: with model.head_dtype: float32 vLLM's output layer depends on the batch",
            "inference.type: hf",
        ),
        (["model.head_dtype=float32", "inference.deterministic=true"], [H200], None, ""),
        (["model.head_dtype=float32"], [A100], None, ""),
        (["resources.gpu=A100-40GB"], [A100], None, ""),
        (["resources.gpu=L40S"], [H200], None, ""),
        (
            ["resources.gpu=H100", *TWO],
            [H200, A100],
            r"device 1 is a NVIDIA A100-SXM4-40GB with 39\.4 GiB, and resources\.gpu: H100 states 79\.6 GiB",
            "resources.gpu: A100-40GB",
        ),
        (
            ["resources.gpu=L40S"],
            [replace(A100, name="NVIDIA A800")],
            "resources.gpu: L40S states 45.0 GiB",
            "resources.gpu_memory_gib: 39.4",
        ),
        (
            ["resources.gpu=A100-40GB", "resources.gpu_memory_gib=42"],
            [A100],
            "device 0 .* resources.gpu_memory_gib states 42.0 GiB",
            "resources.gpu_memory_gib: 39.4",
        ),
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


def on_a_gpu(model: Path, output: Path, **changes: Any) -> RLVRConfig:
    values = {
        "resources": {"device": "cuda", "devices_per_node": 1, "device_mapping": {"training": "0", "inference": "0"}},
        "training": {"workers": 1},
        "inference": {"type": "vllm", "replicas": 1},
        "model": {"path": str(model), "dtype": "bfloat16"},
        "output_dir": str(output),
    }
    return RLVRConfig.model_validate(changed(changed(MINIMAL, **values), **changes))


def test_what_does_not_fit_on_the_gpus_there_are_is_named(tiny_model: Path, tmp_path: Path) -> None:
    """Two CUDA contexts of 0.6 GiB, and an engine that takes half of the GPU: more than 2 GiB."""
    small = replace(A100, memory_bytes=2 * GIB)
    config = on_a_gpu(tiny_model, tmp_path)
    require_room(config, [])
    require_room(config, [A100])
    with pytest.raises(
        ResourceError, match=r"device 1 is a NVIDIA A100-SXM4-40GB with 2\.0 GiB, .*does not fit"
    ) as error:
        require_room(config, [A100, small])
    assert "inference.gpu_memory_utilization: GPU 0 would hold" in error.value.message
    assert "resources.gpu_memory_gib=2.0" in str(error.value.fix)
    require_room(on_a_gpu(tiny_model, tmp_path, resources__gpu_memory_gib=2), [small])  # the check has refused it


@pytest.mark.parametrize(
    ("start", "stated", "message"),
    [
        (lambda config: launch.running(config, None), None, "the run does not fit"),
        (lambda config: launch.running(config, None), 80, "resources.gpu_memory_gib states 80.0 GiB"),
        (launch.measuring, 80, "resources.gpu_memory_gib states 80.0 GiB"),
    ],
)
def test_nothing_is_started_on_gpus_that_are_too_small(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[[RLVRConfig], AbstractContextManager[object]],
    stated: float | None,
    message: str,
) -> None:
    session = SimpleNamespace(snapshots=None, memory=None)
    manager = SimpleNamespace(allocate=lambda: None, gpus=(replace(A100, memory_bytes=2 * GIB),))
    monkeypatch.setattr(launch, "RaySession", lambda *_, **__: nullcontext(session))
    monkeypatch.setattr(launch, "ResourceManager", lambda _: nullcontext(manager))
    config = on_a_gpu(tiny_model, tmp_path, resources__gpu_memory_gib=stated)
    with pytest.raises(ResourceError, match=message), start(config):
        raise AssertionError("it was started")
