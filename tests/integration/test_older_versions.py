"""The oldest torch and transformers that the project runs with, in an environment of their own (scripts/older.sh)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDER = ROOT / ".older"
#: What computes with torch and transformers, and needs neither vLLM nor images, for which that wants torchvision.
UNIT = ("test_training*.py", "test_models*.py", "test_algorithms*.py", "test_data*.py", "test_gpu*.py")
ENGINES = ("test_training_engine.py", "test_training_fsdp2.py", "test_training_lora.py", "test_model_gguf.py")

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Return the environment of a process with the older packages."""
    subprocess.run(["bash", "scripts/older.sh"], cwd=ROOT, check=True)
    paths = [str(OLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Triton reads when it is imported, which torch may do at any time, whether to run kernels on the CPU
    own = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}
    return {**os.environ, **own}


def test_they_are_what_is_imported(environment: dict[str, str]) -> None:
    show = "import torch, transformers, numpy; print(torch.__version__, transformers.__version__, numpy.__file__)"
    done = subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, text=True, check=True)
    torch, transformers, numpy = done.stdout.split()
    assert torch.startswith("2.11.0")
    assert transformers == "5.17.0"
    assert not numpy.startswith(str(OLDER))


@pytest.mark.parametrize(
    ("folder", "patterns"), [("tests/unit", UNIT), ("tests/integration", ENGINES)], ids=["unit", "engines"]
)
def test_what_computes_passes_its_tests(environment: dict[str, str], folder: str, patterns: tuple[str, ...]) -> None:
    """Warnings are none of ours there: what is deprecated since may not have had its replacement yet."""
    files = sorted(str(path) for pattern in patterns for path in (ROOT / folder).glob(pattern))
    command = [sys.executable, "-m", "pytest", *files, "-m", "not slow and not gpu", "-W", "default", "--tb=short"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
