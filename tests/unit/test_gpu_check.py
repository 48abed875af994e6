"""`make gpu-check` without a GPU: what it says here, what its runner does with checks of every kind, its own checks."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll_like.check.gpu_memory import gpu_plans
from roll_like.check.gpu_plan import GPUReport, check_gpus
from roll_like.config.inference import weight_backend
from roll_like.config.load import load_config
from roll_like.models.shape import ModelShape, load_model_shape

#: Shape of the quickstart's model.
SMOLLM = ModelShape(
    parameters=134_515_008,
    layers=30,
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=49_152,
    heads=9,
    kv_heads=3,
    head_dim=64,
    max_positions=8192,
    tied_embeddings=True,
)
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"
BUDGET = 1500.0


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    module = importlib.import_module("check_runner")
    monkeypatch.setattr(module, "GRACE", 0.5)
    monkeypatch.setattr(module, "MEMORY_SECONDS", 0.0)
    return module


@pytest.fixture
def gpu_check(runner: Any) -> Any:
    return importlib.import_module("gpu_check")


def fake(runner: Any, name: str, code: str, seconds: float = 20.0, **options: Any) -> Any:
    def figures(folder: Path, printed: str) -> dict[str, Any]:
        return {"printed": len(printed.splitlines()), **json.loads((folder / "found.json").read_text())}

    code = f"import json, pathlib, sys\nout = pathlib.Path(sys.argv[1])\n{code}"
    return runner.Check(name, seconds, f"about {name}", ((sys.executable, "-c", code, "{out}"),), figures, **options)


GOOD = "print('fine'); (out / 'found.json').write_text('{\"speed\": 2.5}')"
#: Starts a process that would outlive it, says which, and ignores SIGINT as vLLM's processes may.
HANGING = """
import os, signal, subprocess, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(out / "child").write_text(str(child.pid))
(out / "found.json").write_text('{"so_far": 1}')
print("waiting for a rank", flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_every_kind_of_check_ends_in_the_report(runner: Any, tmp_path: Path) -> None:
    checks = [
        fake(runner, "passes", GOOD, bounds={"speed": (2.0, 3.0)}),
        fake(runner, "raises", "print('start'); raise RuntimeError('CUDA error: no kernel')"),
        fake(runner, "hangs", HANGING, seconds=3.0),
        fake(runner, "slow", GOOD, bounds={"speed": (3.0, None), "ratio": (None, 1.0)}),
        fake(runner, "lacks", GOOD, needs=("json", "a_package_that_is_not_there")),
        fake(runner, "quiet", "print('nothing was written')"),
        fake(runner, "too long", GOOD, seconds=600.0),
    ]
    memory = iter([1.0])
    said: list[str] = []
    began = time.monotonic()
    results = runner.run_checks(
        checks,
        tmp_path,
        100.0,
        machine={"gpu": "none"},
        say=said.append,
        used_gib=lambda: next(memory, 3.25),
    )
    assert time.monotonic() - began < 60
    by_name = {result.name: result for result in results}
    assert [result.status for result in results] == [
        "passed", "failed", "out of time", "failed", "skipped", "failed", "skipped",
    ]  # fmt: skip
    assert by_name["passes"].figures == {"printed": 1, "speed": 2.5}
    assert by_name["passes"].left_gib == pytest.approx(2.25)  # 3.25 GiB after it, 1 before
    assert "CUDA error: no kernel" in by_name["raises"].reason
    assert "found.json" in by_name["raises"].reason
    assert by_name["hangs"].figures["so_far"] == 1
    assert "waiting for a rank" in by_name["hangs"].reason
    assert not alive(int((tmp_path / "hangs" / "child").read_text()))
    assert by_name["slow"].reason == ("speed is 2.5, at least 3 was expected; no figure ratio (at most 1 was expected)")
    assert by_name["lacks"].reason == "not installed: a_package_that_is_not_there; see docs/gpu.md"
    assert "of the budget are left, and it may take 600" in by_name["too long"].reason
    assert len([line for line in said if line.startswith("passes")]) == 2
    report = json.loads((tmp_path / "report.json").read_text())
    assert [check["status"] for check in report["checks"]] == [result.status for result in results]
    assert report["not_run"] == []
    table = (tmp_path / "report.md").read_text()
    assert "| passes | passed |" in table
    assert "| hangs | out of time |" in table
    assert "speed 2.5" in table
    assert "waiting for a rank" in (tmp_path / "logs" / "hangs.txt").read_text()


def test_an_interrupted_run_leaves_what_it_found(runner: Any, tmp_path: Path) -> None:
    checks = [fake(runner, "first", GOOD), fake(runner, "second", GOOD)]

    def interrupt(line: str) -> None:
        if line.startswith("second"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run_checks(checks, tmp_path, 60.0, machine={}, say=interrupt)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [check["name"] for check in report["checks"]] == ["first"]
    assert report["not_run"] == ["second"]
    assert "| second | not run |" in (tmp_path / "report.md").read_text()


def test_the_last_check_has_what_is_left_of_the_budget(runner: Any, tmp_path: Path) -> None:
    check = fake(runner, "long", "import time; time.sleep(600)", seconds=4.0)
    began = time.monotonic()
    (result,) = runner.run_checks([check], tmp_path, 3.0, machine={}, say=lambda line: None)
    assert result.status == "out of time"
    assert 2.4 < time.monotonic() - began < 3.5  # its process is ended within the budget too


def test_figures_that_are_no_number_are_outside_of_all_bounds(runner: Any) -> None:
    assert runner.outside({"loss": float("nan")}, {"loss": (None, 1.0)}) == ["loss is nan, at most 1 was expected"]
    assert runner.outside({"loss": 1.0}, {"loss": (1.0, 1.0)}) == []


def test_figures_of_tests_are_those_that_they_recorded(gpu_check: Any, tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite><testcase name="a"><properties><property name="asleep_gib" value="0.75"/></properties>'
        '</testcase><testcase name="b"><failure message="no"/></testcase><testcase name="c">'
        '<skipped message="needs compute capability 8.0"/></testcase></testsuite></testsuites>'
    )
    assert gpu_check.figures_of_tests(tmp_path, "") == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "asleep_gib": 0.75,
        "first_failure": "b",
        "skipped_because": "needs compute capability 8.0",
    }


def test_figures_of_runs_are_changes_of_evaluations_and_medians_of_steps(gpu_check: Any, tmp_path: Path) -> None:
    run = tmp_path / "rlvr_1gpu"
    run.mkdir()
    summary = {"steps": 3, "failures": 0, "before_after": {"eval/avg": [0.25, 0.75], "train/entropy": [1, 2]}}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "metrics.jsonl").write_text("".join(f'{{"time/step": {s}, "sync/probe": 0.03}}\n' for s in (60, 4, 5, 9)))
    assert gpu_check.figures_of_run(tmp_path, "") == {
        "steps": 3,
        "failures": 0,
        "eval/avg before": 0.25,
        "eval/avg after": 0.75,
        "eval/avg change": 0.5,
        "time/step": 5,  # the first step warms up
        "sync/probe": 0.03,
    }


def test_figures_of_benchmarks_are_their_last_line(gpu_check: Any, tmp_path: Path) -> None:
    printed = (
        '{"benchmark": "training", "ratio": 0.1}\n[load 1.0] engine: 3 s\n{"benchmark": "training", "ratio": 0.9}\n'
    )
    assert gpu_check.figures_of_benchmark(tmp_path, printed)["ratio"] == 0.9
    assert gpu_check.figures_of_benchmark(tmp_path, "Traceback") == {}


def test_the_checks_fit_into_25_minutes_and_name_files_that_exist(gpu_check: Any) -> None:
    assert gpu_check.BUDGET == BUDGET
    assert 0.9 * BUDGET < gpu_check.longest(gpu_check.CHECKS) <= BUDGET
    assert not [check.name for check in gpu_check.CHECKS if {"vllm", "sglang"} <= set(check.needs)]
    for check in gpu_check.CHECKS:
        files = [word for command in check.commands for word in command[1:] if word.endswith((".py", ".yaml"))]
        assert files
        assert all((ROOT / file).is_file() for file in files), files
    tested = {word for check in gpu_check.CHECKS for command in check.commands for word in command}
    assert {f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py")} <= tested


@pytest.mark.usefixtures("recording_pipeline")
def test_its_runs_are_valid_configurations_of_one_gpu(gpu_check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    runs = {check.name: command for check in gpu_check.CHECKS for command in check.commands if "--config" in command}
    assert set(runs) == {"rlvr", "sglang", "sft", "dpo", "zero3", "fsdp2", "hf", "lora", "offload"}
    configs: dict[str, Any] = {}
    for name, command in runs.items():
        at = command.index("--config")
        overrides = [word.replace("{out}", "folder") for word in command[at + 2 :]]
        config = configs[name] = load_config(ROOT / command[at + 1], overrides)
        assert (config.resources.device, config.resources.devices_per_node) == ("cuda", 1)
        assert config.model.dtype == "bfloat16"
        assert {str(role.devices) for role in config.roles} == {"0"}
        # as on an H100, and a small GPU
        for memory in (80, 24):
            plans = gpu_plans(config, dict.fromkeys(("training", "inference", "reference"), SMOLLM), memory * 2**30)
            report = GPUReport(plans=plans, memory=memory * 2**30, floor=None)
            assert [found for found in check_gpus(config, report) if found.level == "error"] == []
    hf, lora, offload = (configs[name] for name in ("hf", "lora", "offload"))
    assert (hf.inference.type, weight_backend(hf.inference, hf.resources)) == ("hf", "shared_memory")
    assert lora.may_send_adapters
    assert (offload.training.offload, offload.training.zero_stage) == ("optimizer", 2)


def test_the_benchmarks_take_the_options_that_it_gives_them(gpu_check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.chdir(ROOT)
    for name in ("training", "rollout"):
        (check,) = (check for check in gpu_check.CHECKS if check.name == name)
        words = [word.replace("{out}", "folder") for word in check.commands[1][2:]]
        options = importlib.import_module(name).parser().parse_args(words)
        assert options.device == "cuda"
        common = importlib.import_module("common")
        config = common.quickstart(*common.device_overrides(options, "training", "inference"), *options.overrides)
        assert config.model.path == "folder/model"
        assert config.context_window > (options.longest if name == "training" else options.tokens)


def test_random_models_load_with_their_tokenizer(
    runner: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module("make_random_model")
    place = SimpleNamespace(tokenizer_path=tiny_model)
    monkeypatch.setattr(script, "resolve_model", lambda config: place)  # the quickstart's takes half a minute
    monkeypatch.setattr(sys, "argv", ["make_random_model.py", str(tmp_path / "model"), "--shape", "tiny"])
    script.main()
    shape = load_model_shape(tmp_path / "model")
    assert (shape.hidden_size, shape.layers, shape.heads, shape.kv_heads) == (64, 2, 4, 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template
    assert model(torch.tensor([tokenizer.encode("a river")])).logits.shape[-1] == len(tokenizer)


def test_random_models_fit_the_gpu(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module("make_random_model")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gib, shape in ((140, "large"), (80, "small")):
        properties = SimpleNamespace(total_memory=gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, found=properties: found)
        assert script.shape_for_this_machine() == shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"gpu-check: torch {torch.__version__} sees no CUDA device; ")
    assert sentence.endswith("; nothing was run")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_tests_of_gpus_are_skipped_without_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-rs", "-p", "no:cacheprovider", "-m", "gpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    summary = done.stdout.splitlines()[-1]
    assert "skipped" in summary
    assert "passed" not in summary
    assert "deselected" not in summary  # all of them are marked
    assert "needs a GPU: torch" in done.stdout
