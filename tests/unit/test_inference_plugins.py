"""An engine of a user's own, from a module of theirs: settings, rules, plan, generation and weights, without Ray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config_files import MINIMAL, changed, write
from engine_specs import engine_spec

import roll_like
from roll_like.check.plan import plan
from roll_like.config.inference import (
    OBJECT_STORE,
    SHARED_MEMORY,
    WEIGHT_TRANSPORTS,
    EngineCapabilities,
    WeightTransport,
    weight_backend,
)
from roll_like.config.load import load_config
from roll_like.config.resources import ResourcesConfig
from roll_like.errors import ConfigError, PluginError
from roll_like.inference.interface import GenerateRequest, InferenceEngine, Sampling
from roll_like.inference.settings import SleepingEngineConfig
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.weight_transfer.shared_memory import SharedMemoryTransfer
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.registry import INFERENCE_ENGINES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def users_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The engine of docs/contributing.md in a module of the user's, and a configuration beside it."""
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    (source,) = (block.partition("\n```")[0] for block in page.split("```python\n")[1:] if "EnginePlugin" in block)
    (tmp_path / "users_engine.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    INFERENCE_ENGINES.names()
    monkeypatch.setattr(INFERENCE_ENGINES, "_plugins", dict(INFERENCE_ENGINES._plugins))
    yield write(tmp_path / "run.yaml", changed(MINIMAL))
    sys.modules.pop("users_engine", None)


def configured(file: Path, *overrides: str) -> Any:
    return load_config(file, ["import=[users_engine]", "inference={type: parrot, repeats: 2}", *overrides])


class OneEngine:
    """A cluster of one engine, in this process."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    def everywhere(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        call = getattr(self._engine, method.__name__)(*args)
        try:  # as the coroutine of this engine never waits, no event loop is needed
            call.send(None)
        except StopIteration as done:
            return [done.value]
        raise AssertionError(f"{method.__name__} waits")


def test_its_settings_are_validated_like_those_of_built_in_engines(users_engine: Path) -> None:
    config = configured(users_engine)
    assert (config.inference.type, config.inference.repeats, config.inference.replicas) == ("parrot", 2, 1)
    assert [role.name for role in plan(config).roles] == ["training", "inference"]
    assert configured(users_engine, "inference.max_model_len=100").context_window == 100
    with pytest.raises(ConfigError, match=r"inference\.repeat: unknown key; did you mean `inference\.repeats`"):
        configured(users_engine, "inference.repeat=2")
    with pytest.raises(ConfigError, match=r"inference\.max_model_len: 90 tokens cannot hold the longest sample"):
        configured(users_engine, "inference.max_model_len=90")
    with pytest.raises(ConfigError, match="the inference engine 'parrot' cannot be used here; use one of: vllm"):
        configured(users_engine, "judge={type: parrot, path: model}")


def test_its_capabilities_decide_what_hardware_it_runs_on(users_engine: Path) -> None:
    gpus = ["resources.device=cuda", "training.workers=2"]
    with pytest.raises(ConfigError, match="'parrot' cannot divide a model among GPUs, and each replica would have 2"):
        configured(users_engine, *gpus)
    assert configured(users_engine, *gpus, "inference.replicas=2").inference.replicas == 2


def test_settings_of_the_probe_are_refused_where_nothing_is_probed(
    users_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in (("probe_every", 3), ("probe_tolerance", 0.2)):
        with pytest.raises(ConfigError, match=rf"inference\.{key}: the engine 'parrot' does not tell the log-prob"):
            configured(users_engine, f"inference.{key}={value}")
    engine = type(configured(users_engine).inference)
    monkeypatch.setattr(engine, "capabilities", EngineCapabilities(prompt_logprobs=True))
    assert configured(users_engine, "inference.probe_every=3").inference.probe_every == 3


NODES = (
    "resources.nodes=2",
    "resources.address=auto",
    "resources.devices_per_node=1",
    "resources.device_mapping={training: '0', inference: '1'}",
)


def test_changes_alone_are_refused_where_weights_do_not_travel(
    users_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"inference\.weight_sync: weights travel by shared_memory here"):
        configured(users_engine, "inference.weight_sync=delta")
    with pytest.raises(ConfigError, match=r"inference\.full_sync_every: weights travel by shared_memory here"):
        configured(users_engine, "inference.full_sync_every=5")
    engine = type(configured(users_engine).inference)
    transports = (SHARED_MEMORY, OBJECT_STORE)
    monkeypatch.setattr(engine, "capabilities", EngineCapabilities(weight_transports=transports))
    with pytest.raises(ConfigError, match=r"inference\.weight_sync: the engine 'parrot' keeps no copy"):
        configured(users_engine, *NODES, "inference.weight_sync=delta")
    changes = EngineCapabilities(weight_transports=transports, weight_changes=True)
    monkeypatch.setattr(engine, "capabilities", changes)
    assert configured(users_engine, *NODES, "inference.full_sync_every=5").inference.weight_sync == "auto"
    assert configured(users_engine, *NODES, "inference.weight_sync=delta").inference.full_sync_every == 20
    with pytest.raises(ConfigError, match=r"full_sync_every: inference\.weight_sync is full, so every sync is full"):
        configured(users_engine, *NODES, "inference.weight_sync=full", "inference.full_sync_every=5")


GPUS = ("resources.device=cuda", "resources.devices_per_node=1", "inference.replicas=2", "training.workers=2")


def test_weights_travel_by_what_it_declares(users_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = [*GPUS, "resources.nodes=2", "resources.address=auto"]
    with pytest.raises(
        ConfigError, match="weights would travel to the engines by ipc or object_store here, and the engine 'parrot'"
    ):
        configured(users_engine, *cluster)
    engine = type(configured(users_engine).inference)
    pigeon = WeightTransport("pigeon", lambda resources: resources.nodes > 1)
    monkeypatch.setattr(engine, "capabilities", EngineCapabilities(weight_transports=(pigeon, SHARED_MEMORY)))
    config = configured(users_engine, *cluster)
    assert weight_backend(config.inference, config.resources) == "pigeon"
    config = configured(users_engine)
    assert weight_backend(config.inference, config.resources) == "shared_memory"

    replicas: Any = None
    with pytest.raises(PluginError, match="Parrot declares the weight transport 'pigeon' and has no transfer for it"):
        INFERENCE_ENGINES.get("parrot").weight_transfer("pigeon", replicas, 1, lambda: ("nowhere", 0))


@pytest.mark.parametrize(
    ("device", "nodes", "inference", "expected"),
    [
        ("cpu", 1, "0-1", ["shared_memory", "object_store"]),
        ("cpu", 2, "4-5", ["object_store"]),
        ("cuda", 1, "0-1", ["ipc", "shared_memory", "object_store"]),
        ("cuda", 1, "2-3", ["nccl", "shared_memory", "object_store"]),
        ("cuda", 2, "0-1", ["ipc", "object_store"]),
        ("cuda", 2, "2-3", ["nccl", "object_store"]),
    ],
)
def test_transports_follow_from_the_hardware(device: str, nodes: int, inference: str, expected: list[str]) -> None:
    mapping = {"training": "0-1", "inference": inference}
    resources = ResourcesConfig.model_validate(
        {"device": device, "nodes": nodes, "devices_per_node": 4, "device_mapping": mapping}
    )
    assert [transport.name for transport in WEIGHT_TRANSPORTS if transport.works(resources)] == expected


@pytest.mark.parametrize(
    ("nodes", "inference", "expected"),
    [(1, "0-1", "shared_memory"), (1, "2-3", "shared_memory"), (2, "2-3", "object_store")],
)
def test_the_transformers_engine_takes_weights_of_gpus_through_host_memory(
    nodes: int, inference: str, expected: str
) -> None:
    mapping = {"training": "0-1", "inference": inference}
    resources = ResourcesConfig.model_validate(
        {"device": "cuda", "nodes": nodes, "devices_per_node": 4, "device_mapping": mapping}
    )
    plugin = INFERENCE_ENGINES.get("hf")
    backend = weight_backend(plugin.Config(), resources)
    assert backend == expected
    replicas: Any = [None]
    transfer: Any = plugin.weight_transfer(backend, replicas, 1, lambda: ("nowhere", 0))
    assert (type(transfer), transfer.by_value) == (SharedMemoryTransfer, nodes > 1)


async def test_it_generates(users_engine: Path) -> None:
    config = configured(users_engine)
    engine = INFERENCE_ENGINES.get("parrot").engine()(config.inference, engine_spec("model"))
    await engine.start()
    prompt = np.array([3, 4, 5], np.int32)
    request = GenerateRequest(request_id="one", prompt_ids=prompt, sampling=Sampling(max_tokens=8), seed=0)
    await engine.submit([request])
    (generation,) = await engine.poll(1.0)
    assert (generation.request_id, generation.token_ids.tolist()) == ("one", [5, 5])
    await engine.sleep()  # engines that have nothing to free need not say so
    await engine.wake()
    await engine.close()


def test_it_takes_weights_by_the_transfer_that_its_plugin_chooses(users_engine: Path) -> None:
    config = configured(users_engine)
    plugin = INFERENCE_ENGINES.get("parrot")
    engine = plugin.engine()(config.inference, engine_spec("model"))
    cluster: Any = OneEngine(engine)
    weights = {"embed.weight": torch.randn(20, 8), "norm.weight": torch.ones(8)}

    class Trainer:
        def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from weights.items()

    transfer = plugin.weight_transfer("shared_memory", cluster, 1, lambda: ("nowhere", 0))
    sender = transfer.connect(Trainer(), rank=0)
    report = WeightSync(sender.send, cluster).push()
    assert (report.version, report.checked, engine.version) == (1, 2, 1)
    assert all(torch.equal(engine.weights[name], tensor) for name, tensor in weights.items())
    sender.close()


def test_settings_of_engines_load_without_torch_vllm_and_ray() -> None:
    check = (
        "import sys; from roll_like.registry import INFERENCE_ENGINES as engines; "
        "[engines.get(name).Config() for name in engines.names()]; "
        "print([name for name in ('torch', 'vllm', 'ray', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_keys_that_one_engine_has_are_named_in_its_folder_only() -> None:
    package = Path(roll_like.__file__).parent
    own = set(VLLMConfig.model_fields) - set(SleepingEngineConfig.model_fields)  # which SGLang's has too
    assert "kv_cache_gib" in own
    # what other libraries call their keys names ours
    files = {file for file in package.rglob("*.py") if "/inference/" not in file.as_posix()}
    texts = {file: file.read_text() for file in files if file.name != "other_names.yaml"}
    assert [(file.name, key) for file, text in texts.items() for key in own if f"inference.{key}" in text] == []
