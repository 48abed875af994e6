"""Hardware for the integration tests, on the Ray that the test session has; writes pages of docs/ if asked."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import compatibility
import parallel_cells
import pytest
from engine_thread import EngineThread, float_spec
from tiny_model import make_tiny_model
from warm_workers import RESOURCES

from roll_like.cluster import ResourceManager
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compatibility", type=Path, help="page to write what engines and backends have shown to")
    parser.addoption("--parallel", type=Path, help="page to write what layouts of ranks have shown to")


def pytest_configure(config: pytest.Config) -> None:
    compatibility.PAGE.refuse_workers(config)
    parallel_cells.PAGE.refuse_workers(config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    compatibility.PAGE.finish(terminalreporter, exitstatus, config, lambda: compatibility.tables(compatibility.RESULTS))
    cells = parallel_cells.RESULTS
    parallel_cells.PAGE.finish(terminalreporter, exitstatus, config, lambda: parallel_cells.table(cells))


@pytest.fixture(scope="session")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in float32. Tests only read it."""
    return make_tiny_model(tmp_path_factory.mktemp("float-model"), dtype="float32")


@pytest.fixture(scope="session")
def vllm(float_model: Path) -> Iterator[EngineThread]:
    """A real vLLM engine in float32 that tests leave as they found it: idle, and with the model's own weights."""
    spec = replace(float_spec(float_model), returns_kept=True)
    with EngineThread(VLLMEngine(VLLMConfig(kv_cache_gib=0.1, max_running=16), spec)) as engine:
        yield engine


@pytest.fixture(scope="session")
def speculating(float_model: Path) -> Iterator[EngineThread]:
    """The same, which guesses what followed the last token before; it does not say what it kept."""
    config = VLLMConfig(kv_cache_gib=0.1, max_running=16, speculative={"method": "ngram", "prompt_lookup_min": 1})
    with EngineThread(VLLMEngine(config, float_spec(float_model))) as engine:
        yield engine


@pytest.fixture(scope="module")
def resources(warm_ray: None) -> Iterator[ResourceManager]:
    """Its two cores, reserved."""
    with ResourceManager(RESOURCES) as manager:
        manager.allocate()
        yield manager


@pytest.fixture(scope="session")
def mini_swe_agent() -> None:
    """What verifiers' harness of mini-swe-agent installs, from PyPI or out of uv's cache."""
    want = [
        "--with",
        "mini-swe-agent==2.4.6",
        "--with",
        "litellm[proxy]==1.102.0",
        "python",
        "-c",
        "import minisweagent",
    ]
    uv = Path(__file__).resolve().parents[2] / ".verifiers" / "bin" / "uv"
    done = subprocess.run([uv, "run", "--quiet", "--no-project", *want], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"uv cannot install mini-swe-agent: {done.stderr[-500:]}")
