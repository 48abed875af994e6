"""The newest transformers, MLflow, pydantic and NumPy beside vLLM and torch of the lock: `make newest`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_config import write_run

ROOT = Path(__file__).resolve().parents[2]
NEWEST = ROOT / ".newest"
LOCK = ROOT / "requirements" / "newest.txt"
#: What computes with these packages, in portions that end within the time of a test.
PORTIONS = {
    "training": ("test_training*.py", "test_algorithms*.py", "test_inference_hf.py"),
    "models": ("test_models*.py",),
    "data": ("test_data*.py", "test_metrics*.py", "test_config*.py", "test_serving.py"),
}

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Return the environment of a process with the newest packages."""
    subprocess.run(["bash", "scripts/environment.sh", "newest"], cwd=ROOT, check=True)
    paths = [str(NEWEST), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def test_they_are_what_is_imported(environment: dict[str, str]) -> None:
    show = (
        "import sys, importlib.metadata as metadata, transformers, numpy, pydantic, mlflow\n"
        "print(*(module.__file__ for module in (transformers, numpy, pydantic, mlflow)))\n"
        "print(*(f'{name}=={metadata.version(name)}' for name in sys.argv[1:]), sep='\\n')"
    )
    pinned = [line.strip() for line in LOCK.read_text().splitlines() if line.strip() and not line.startswith("#")]
    command = [sys.executable, "-c", show, *(line.partition("==")[0] for line in pinned)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    files, *versions = done.stdout.splitlines()
    assert all(file.startswith(str(NEWEST)) for file in files.split())
    assert versions == pinned


@pytest.mark.parametrize("portion", PORTIONS)
def test_unit_tests_pass_without_a_warning(environment: dict[str, str], portion: str) -> None:
    files = sorted(str(path) for pattern in PORTIONS[portion] for path in (ROOT / "tests" / "unit").glob(pattern))
    command = [sys.executable, "-m", "pytest", *files, "-m", "not slow and not gpu", "--tb=short"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_run_trains_logs_and_exports(
    environment: dict[str, str], engine: str, tmp_path: Path, tiny_model: Path
) -> None:
    config = write_run(
        tmp_path,
        tiny_model,
        steps=2,
        inference={"type": engine, **({"kv_cache_gib": 0.2, "max_running": 32} if engine == "vllm" else {})},
        training={"gradient_checkpointing": True},
        metrics={"trackers": [{"type": "mlflow"}], "console": "plain"},
        checkpoint={"export": True},
    )
    command = [sys.executable, str(ROOT / "run_pipeline.py"), "--config", str(config)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "deprecated" not in done.stdout + done.stderr
    run = tmp_path / "runs" / "tiny"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert (run / "model" / "model.safetensors").is_file()
