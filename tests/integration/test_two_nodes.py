"""A run on two nodes: the trainer on one, the engine on the other, weights over TCP."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hygiene import TEST_MARKER
from run_config import finish_run, read_lines, write_run

from roll_like.cluster.session import AUTH_MODE
from roll_like.config.inference import OBJECT_STORE, weight_backend
from roll_like.config.load import load_config
from roll_like.config.policy_gradient import SamplingRunConfig

pytestmark = [pytest.mark.integration, pytest.mark.slow]

#: Two nodes on one machine, each of one core and, as it says, one GPU; prints the address, ends when its input does.
TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=200 * 2**20, include_dashboard=False)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Two nodes, which ask for a token as the parameter says. The run has one either way."""
    monkeypatch.delenv(AUTH_MODE, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 32)
    cluster = subprocess.Popen(
        [sys.executable, "-c", TWO_NODES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            AUTH_MODE: getattr(request, "param", "disabled"),
            "RAY_USAGE_STATS_ENABLED": "0",
            TEST_MARKER: str(os.getpid()),
        },
    )
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    yield cluster.stdout.readline().strip()
    cluster.stdin.close()
    cluster.wait(60)
    cluster.stdout.close()


@pytest.mark.parametrize(
    ("address", "engine"), [("disabled", "hf"), ("token", "vllm")], indirect=["address"], ids=["hf", "vllm"]
)
def test_trainer_and_engine_on_nodes_of_their_own(address: str, tmp_path: Path, tiny_model: Path, engine: str) -> None:
    inference = {"type": "vllm", "kv_cache_gib": 0.2} if engine == "vllm" else {"type": "hf"}
    config = write_run(
        tmp_path,
        tiny_model,
        steps=3,
        inference=inference,
        checkpoint={"at_end": False, "export": False},
        resources={
            "device": "cpu",
            "nodes": 2,
            "devices_per_node": 1,
            "address": address,
            "device_mapping": {"training": "0", "inference": "1"},
        },
    )
    # buckets travel with their content; an engine refuses memory of another node, though it could map it here
    loaded = load_config(config)
    assert isinstance(loaded, SamplingRunConfig)
    assert weight_backend(loaded.inference, loaded.resources) == OBJECT_STORE.name
    code, output = finish_run(config)
    assert code == 0, output
    steps = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert len(steps) == 3
    for step in steps:
        assert step["sync/tensors_checked"] > 10
        assert step["mismatch/logprob_difference"] < 1e-4
        assert step["staleness/max"] == 0


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch may have GPUs here")
def test_nodes_whose_torch_cannot_use_their_gpus_are_named(address: str, tmp_path: Path, tiny_model: Path) -> None:
    config = write_run(
        tmp_path,
        tiny_model,
        inference={"type": "hf"},
        resources={
            "device": "cuda",
            "nodes": 2,
            "devices_per_node": 1,
            "cpus_per_device": 1,
            "address": address,
            "device_mapping": {"training": "0", "inference": "1"},
        },
    )
    code, output = finish_run(config)
    assert code == 1
    assert f"GPU 0 of node 0 cannot be used: torch {torch.__version__} is a build without CUDA" in output
    assert "docs/gpu.md" in output
