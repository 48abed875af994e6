"""A run on two nodes: the trainer on one, the engine on the other, weights over TCP."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from hygiene import TEST_MARKER
from run_config import finish_run, read_lines, start_run, wait_for, write_run

from roll_like.cluster.node_watch import FOLDER_PREFIX
from roll_like.cluster.session import AUTH_MODE
from roll_like.config.inference import OBJECT_STORE, weight_backend
from roll_like.config.load import load_config
from roll_like.config.sampling import SamplingRunConfig
from roll_like.errors import RETRY

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
def cluster(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """Address of two nodes, which ask for a token as the parameter says, and the process whose children they are."""
    monkeypatch.delenv(AUTH_MODE, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 32)
    nodes = subprocess.Popen(
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
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    yield nodes.stdout.readline().strip(), nodes.pid
    nodes.stdin.close()
    nodes.wait(60)
    nodes.stdout.close()


@pytest.fixture
def address(cluster: tuple[str, int]) -> str:
    return cluster[0]


@pytest.mark.parametrize(
    ("cluster", "engine"), [("disabled", "hf"), ("token", "vllm")], indirect=["cluster"], ids=["hf", "vllm"]
)
def test_trainer_and_engine_on_nodes_of_their_own(address: str, tmp_path: Path, tiny_model: Path, engine: str) -> None:
    inference = {"type": "vllm", "kv_cache_gib": 0.2} if engine == "vllm" else {"type": "hf"}
    config = write_run(
        tmp_path,
        tiny_model,
        steps=3,
        inference={**inference, "weight_sync": "delta"},
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
        assert 0 < step["sync/changed_share"] <= 1


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


#: `roll-like run` that does not wait as long for a head that may come back.
IMPATIENT = """
import sys
from roll_like.cli import main
from roll_like.cluster import session

session.LOST_SECONDS = 10
sys.exit(main())
"""


@pytest.mark.parametrize(("part", "said"), [("gcs_server", "the head ("), ("raylet", "this node's raylet of the Ray")])
def test_a_cluster_that_is_lost_ends_the_run_for_another_attempt(
    cluster: tuple[str, int], tmp_path: Path, tiny_model: Path, part: str, said: str
) -> None:
    config = write_run(
        tmp_path,
        tiny_model,
        steps=1000,
        inference={"type": "hf"},
        checkpoint={"at_end": False, "export": False},
        resources={
            "device": "cpu",
            "nodes": 2,
            "devices_per_node": 1,
            "address": cluster[0],
            "device_mapping": {"training": "0", "inference": "1"},
        },
    )
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    process = start_run(config, program="impatient")
    wait_for(process, "step    1/1000")
    for each in psutil.Process(cluster[1]).children():
        if each.name() == part:
            each.kill()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == RETRY, output
    assert said in output
    assert "the run ends, and --resume continues it" in output
    assert not [*Path("/dev/shm").glob(f"{FOLDER_PREFIX}{process.pid}-*")]
