"""`make gpu-check` without a GPU: what it says here, what its runner does with checks of every kind, its own checks."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hygiene import ended
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
    monkeypatch.setattr(module, "GRACE", 2.0)
    monkeypatch.setattr(module, "MEMORY_SECONDS", 0.0)
    monkeypatch.setattr(module, "STAGGER", 0.0)
    monkeypatch.setattr(module, "LOOK", 0.1)
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
#: Starts a process that would outlive it, in a group of its own as Ray's workers are, says which, and ignores SIGINT as
#: vLLM's processes may.
HANGING = '''
import os, signal, subprocess, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
code = """import time
def waiting_for_the_driver():
    print("up", flush=True)
    time.sleep(600)
waiting_for_the_driver()"""
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
if (forked := os.fork()) == 0:
    waiting_for_its_parent = lambda: time.sleep(600)
    waiting_for_its_parent()
no_python = subprocess.Popen(["sleep", "600"], start_new_session=True)
(out / "children").write_text(f"{child.pid} {forked} {no_python.pid}")
(out / "found.json").write_text('{"so_far": 1}')
def hanging_here():
    print("waiting for a rank", flush=True)
    time.sleep(600)
hanging_here()
'''


def test_every_kind_of_check_ends_in_the_report(runner: Any, tmp_path: Path) -> None:
    checks = [
        fake(runner, "passes", GOOD, bounds={"speed": (2.0, 3.0)}),
        fake(runner, "raises", "print('start'); raise RuntimeError('CUDA error: no kernel')"),
        fake(runner, "hangs", HANGING),
        fake(runner, "slow", GOOD, bounds={"speed": (3.0, None), "ratio": (None, 1.0)}),
        fake(runner, "lacks", GOOD, needs=("json", "a_package_that_is_not_there")),
        fake(runner, "quiet", "print('nothing was written')"),
        fake(runner, "too long", GOOD, seconds=600.0),
    ]
    memory = iter([1.0])
    said: list[str] = []

    def used_gib() -> float:
        """Return memory; the time of what hangs is over once it hangs."""
        log = tmp_path / "logs" / "hangs.txt"
        if log.exists() and "waiting for a rank" in log.read_text():
            object.__setattr__(checks[2], "seconds", 0.0)
        return next(memory, 3.25)

    schedule = runner.Schedule(checks, tmp_path, 200.0, {"gpu": "none"}, said.append, used_gib)
    by_name = {result.name: result for result in schedule.run()}
    statuses = [by_name[check.name].status for check in checks]
    assert statuses == ["passed", "failed", "out of time", "failed", "skipped", "failed", "skipped"]
    assert by_name["passes"].figures == {"printed": 1, "speed": 2.5}
    assert by_name["passes"].left_gib == pytest.approx(2.25)  # 3.25 GiB after it, 1 before
    assert "CUDA error: no kernel" in by_name["raises"].reason
    assert "found.json" in by_name["raises"].reason
    assert by_name["hangs"].figures["so_far"] == 1
    assert "waiting for a rank" in by_name["hangs"].reason
    assert re.search(r"it was in <string>:\d+ in hanging_here \[\d+ ", by_name["hangs"].reason)
    assert re.search(r"; <string>:4 in waiting_for_the_driver \[\d+ ", by_name["hangs"].reason)
    assert ended(*map(int, (tmp_path / "hangs" / "children").read_text().split()))
    assert by_name["slow"].reason == ("speed is 2.5, at least 3 was expected; no figure ratio (at most 1 was expected)")
    assert by_name["lacks"].reason == "not installed: a_package_that_is_not_there; see docs/gpu.md"
    assert "of the budget are left, and it may take 600" in by_name["too long"].reason
    at = said.index(runner.line_of(by_name["passes"]))
    assert json.loads(said[at + 1]) == {"check": "passes", "printed": 1, "speed": 2.5}  # figures as soon as it ended
    assert said[at + 2].startswith("raises: about raises (at most 20 s)")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [check["status"] for check in report["checks"]] == statuses
    assert report["not_run"] == []
    table = (tmp_path / "report.md").read_text()
    assert "| passes | passed |" in table
    assert "| hangs | out of time |" in table
    assert "speed 2.5" in table
    log = (tmp_path / "logs" / "hangs.txt").read_text()
    assert "waiting for a rank" in log
    assert len(re.findall("^---- Python stacks of process", log, re.MULTILINE)) == 3  # not of `sleep`
    assert "in <lambda>" in log
    assert not list((tmp_path / "logs").glob(".*"))


def test_an_interrupted_run_leaves_what_it_found(runner: Any, tmp_path: Path) -> None:
    checks = [fake(runner, "first", GOOD), fake(runner, "second", GOOD)]

    def interrupt(line: str) -> None:
        if line.startswith("second"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.Schedule(checks, tmp_path, 60.0, {}, interrupt).run()
    report = json.loads((tmp_path / "report.json").read_text())
    assert [check["name"] for check in report["checks"]] == ["first"]
    assert report["not_run"] == ["second"]
    assert "| second | not run |" in (tmp_path / "report.md").read_text()


def test_an_interrupt_ends_what_runs(runner: Any, tmp_path: Path) -> None:
    children = tmp_path / "first" / "children"

    def interrupt(line: str) -> None:
        if line.startswith("second"):
            while not (children.exists() and len(children.read_text().split()) == 3):
                time.sleep(0.05)
            raise KeyboardInterrupt

    checks = [fake(runner, "first", HANGING), fake(runner, "second", GOOD)]
    with pytest.raises(KeyboardInterrupt):
        runner.Schedule(checks, tmp_path, 60.0, {}, interrupt, beside=2).run()
    assert ended(*map(int, children.read_text().split()))


def test_a_small_budget_is_for_the_first_checks_and_what_nothing_waits_for_has_the_rest(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GRACE", 0.0)
    began: list[tuple[str, float]] = []
    given: list[float] = []

    def carry_out(run: Any) -> Any:
        began.append((run.check.name, run.began))
        while run.check.name == "last" and len(given) < 3:  # until it has been given the rest
            given.append(run.until - run.began)
            time.sleep(0.2)
        return runner.Result(run.check.name, "passed")

    monkeypatch.setattr(runner.Run, "carry_out", carry_out)
    names = {"first": 60.0, "long": 300.0, "second": 90.0, "last": 40.0, "longer": 400.0}
    checks = [fake(runner, name, GOOD, seconds=seconds, alone=runner.ALWAYS) for name, seconds in names.items()]
    results = runner.Schedule(checks, tmp_path, 100.0, {}, lambda line: None).run()
    assert [name for name, _ in sorted(began, key=lambda pair: pair[1])] == ["first", "second", "last"]
    assert {result.name for result in results if result.status == "skipped"} == {"long", "longer"}
    assert given[-1] > 40  # not its own limit
    report = json.loads((tmp_path / "report.json").read_text())
    assert [check["name"] for check in report["checks"]] == list(names)


#: Two of them end only if they run at the same time, and it notes when it ran.
MEETS = """
import time
began = time.monotonic()
(out / "here").touch()
while not (out.parent / "{other}" / "here").exists():
    time.sleep(0.02)
(out / "found.json").write_text(json.dumps({{"began": began, "ended": time.monotonic()}}))
"""
STAMPS = """
import time
began = time.monotonic()
time.sleep(0.3)
(out / "found.json").write_text(json.dumps({"began": began, "ended": time.monotonic()}))
"""


def test_checks_run_side_by_side_but_for_those_that_are_alone(runner: Any, tmp_path: Path) -> None:
    checks = [
        fake(runner, "before", STAMPS, alone=runner.ALWAYS),
        fake(runner, "a while alone", STAMPS, alone=0.5),
        fake(runner, "left", MEETS.format(other="right")),
        fake(runner, "right", MEETS.format(other="left")),
        fake(runner, "third", STAMPS),
        fake(runner, "after", STAMPS, alone=runner.ALWAYS),
    ]
    results = runner.Schedule(checks, tmp_path, 100.0, {}, lambda line: None, beside=2).run()
    assert {result.status for result in results} == {"passed"}, results
    times = {result.name: result.figures for result in results}
    left, right = times["left"], times["right"]
    assert max(left["began"], right["began"]) < min(left["ended"], right["ended"])
    assert times["before"]["ended"] < min(times[name]["began"] for name in times if name != "before")
    assert times["after"]["began"] > max(times[name]["ended"] for name in times if name != "after")
    assert times["third"]["began"] > min(left["ended"], right["ended"])  # two at a time
    by_name = {result.name: result for result in results}
    assert by_name["after"].left_gib is None  # nothing told the memory


@pytest.mark.slow
def test_two_that_hang_are_ended_together_within_the_budget(runner: Any, tmp_path: Path) -> None:
    checks = [fake(runner, name, HANGING, seconds=10.0) for name in ("one", "other")]
    results = runner.Schedule(checks, tmp_path, 12.0, {}, lambda line: None, beside=2).run()
    assert [result.status for result in results] == ["out of time", "out of time"]
    for result in results:
        assert "hanging_here" in result.reason
        assert "waiting_for_the_driver" in result.reason  # each one's own child, and not the other's
        assert (tmp_path / "logs" / f"{result.name}.txt").read_text().count("hanging_here") == 1
        assert ended(*map(int, (tmp_path / result.name / "children").read_text().split()))


def test_the_report_has_what_running_checks_have_found(runner: Any, tmp_path: Path) -> None:
    # each ends when it reads its own figure in the report
    code = """
import time
(out / "found.json").write_text(json.dumps({"speed": len(out.name)}))
while True:
    report = json.loads((out.parent / "report.json").read_text())
    mine = [check for check in report["checks"] if check["name"] == out.name]
    if mine and mine[0]["status"] == "running" and mine[0]["figures"].get("speed") == len(out.name):
        break
    time.sleep(0.02)
assert f"| {out.name} | running |" in (out.parent / "report.md").read_text()
"""
    checks = [fake(runner, name, code) for name in ("one", "other")]
    results = runner.Schedule(checks, tmp_path, 60.0, {}, lambda line: None, beside=2).run()
    assert {(result.name, result.status) for result in results} == {("one", "passed"), ("other", "passed")}, results


def test_where_a_process_is(runner: Any) -> None:
    of_ray = 'File "/x/site-packages/ray/worker.py", line 9 in main_loop'
    thread = f'Thread 0x1 (most recent call first):\n  File "{ROOT}/roll_like/cluster/progress.py", line 7 in beat\n'
    main = 'Current thread 0x2 (most recent call first):\n  File "/usr/lib/threading.py", line 5 in wait\n'
    ours = f'  File "{ROOT}/roll_like/run/launch.py", line 3 in run\n'
    assert runner.place_of(thread + main + ours) == "roll_like/run/launch.py:3 in run"
    assert runner.place_of(thread + main) == "roll_like/cluster/progress.py:7 in beat"
    assert runner.place_of(main + of_ray) == "ray/worker.py:9 in main_loop"
    assert runner.place_of(main) == "/usr/lib/threading.py:5 in wait"
    assert runner.place_of("") == ""


def test_figures_that_are_no_number_are_outside_of_all_bounds(runner: Any) -> None:
    assert runner.outside({"loss": float("nan")}, {"loss": (None, 1.0)}) == ["loss is nan, at most 1 was expected"]
    assert runner.outside({"loss": 1.0}, {"loss": (1.0, 1.0)}) == []


def test_figures_of_tests_are_those_that_they_recorded(gpu_check: Any, tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\npytestmark = pytest.mark.gpu\n"
        "def test_a(record_property):\n    record_property('asleep_gib', 0.75)\n"
        "def test_b(record_property):\n    record_property('left_gib', 1.5)\n    assert False\n"
        "@pytest.mark.skip(reason='needs compute capability 8.0')\ndef test_c(): pass\n"
        'def test_d(): print(\'{"test": "captured"}\'); raise KeyboardInterrupt\n'
    )
    conftest = (ROOT / "tests" / "gpu" / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest.replace("if not torch.cuda.is_available()", "if False"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: of a GPU\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    environment = {**os.environ, "GPU_CHECK_RUN": "a"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    expected = {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "asleep_gib": 0.75,
        "left_gib": 1.5,
        "first_failure": "test_b",
        "skipped_because": "Skipped: needs compute capability 8.0",
    }
    assert gpu_check.figures_of_tests(tmp_path, done.stdout) == expected, done.stdout
    assert gpu_check.figures_of_tests(tmp_path, done.stdout + '{"test": "half a li') == expected


def test_figures_of_runs_are_changes_of_evaluations_and_medians_of_steps(gpu_check: Any, tmp_path: Path) -> None:
    run = tmp_path / "rlvr_1gpu"
    run.mkdir()
    summary = {"steps": 3, "failures": 0, "before_after": {"eval/avg": [0.25, 0.75], "train/entropy": [1, 2]}}
    (run / "summary.json").write_text(json.dumps(summary))
    lines = "".join(f'{{"time/step": {s}, "sync/probe": 0.03}}\n' for s in (60, 4, 5, 9))
    (run / "metrics.jsonl").write_text(lines + '{"time/step": 7, "sy')  # it is just being written
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
    for other in ("vllm", "sglang"):
        assert (
            gpu_check.longest(gpu_check.CHECKS, other) <= BUDGET - 3 * 5.0 - 3 * 20.0
        )  # ending them, memory that stays
    assert not [check.name for check in gpu_check.CHECKS if {"vllm", "sglang"} <= set(check.needs)]
    for check in gpu_check.CHECKS:
        files = [word for command in check.commands for word in command[1:] if word.endswith((".py", ".yaml"))]
        assert files
        assert all((ROOT / file).is_file() for file in files), files
    tested = {word for check in gpu_check.CHECKS for command in check.commands for word in command}
    assert {f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py")} <= tested


def test_the_page_and_the_list_agree_on_order_and_time_limits(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--list"])
    assert gpu_check.main() == 0
    *lines, total = capsys.readouterr().out.splitlines()
    listed = [re.split(r" {2,}", line.replace(" s  ", "  ", 1), maxsplit=3)[:3] for line in lines]
    table = re.findall(r"^\| (`.*`) \| (\d+) \| (.+?) \|", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE)
    rows = [[name.strip("`"), limit, order] for names, limit, order in table for name in names.split(", ")]
    assert rows == listed
    assert [name for name, _, order in rows if order == "alone"] == ["rlvr", "sglang", "engine", "training", "rollout"]
    assert f" {max(gpu_check.longest(gpu_check.CHECKS, other) for other in ('vllm', 'sglang')):.0f} s, " in total


@pytest.mark.usefixtures("recording_pipeline")
def test_its_runs_are_valid_configurations_of_one_gpu(gpu_check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    runs = {check.name: command for check in gpu_check.CHECKS for command in check.commands if "--config" in command}
    assert set(runs) == {
        "rlvr",
        "sglang",
        "sft",
        "dpo",
        "zero3",
        "fsdp2",
        "hf",
        "lora",
        "offload",
        "fp8",
        "speculative",
    }
    beside = {check.name for check in gpu_check.CHECKS if not check.alone}
    configs: dict[str, Any] = {}
    for name, command in runs.items():
        at = command.index("--config")
        overrides = [word.replace("{out}", "folder") for word in command[at + 2 :]]
        config = configs[name] = load_config(ROOT / command[at + 1], overrides)
        assert (config.resources.device, config.resources.devices_per_node) == ("cuda", 1)
        assert config.model.dtype == "bfloat16"
        assert config.resources.start_timeout_seconds == 240
        if name in beside and getattr(getattr(config, "inference", None), "type", None) == "vllm":
            assert config.inference.engine_args == {"kv_cache_memory_bytes": 3 * 2**30}
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
    assert configs["fp8"].inference.quantizes == "fp8"
    assert configs["speculative"].inference.speculates


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


#: Every Python process imports it: torch sees a GPU then.
STAND_IN = """
from types import SimpleNamespace
import torch
torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.nccl.version = lambda: (2, 28, 9)
properties = SimpleNamespace(name="Stand-in", total_memory=80 * 2**30, major=9, minor=0)
torch.cuda.get_device_properties = lambda index: properties
"""
#: Its own checks need a real GPU; this one does not.
CHEAP = """
import json, pathlib, sys
import gpu_check
code = "import torch; print('{\\"benchmark\\": \\"cheap\\", \\"gpus\\": %d}' % torch.cuda.device_count())"
command = (sys.executable, "-c", code)
figures, bounds = gpu_check.figures_of_benchmark, {"gpus": (1, 1)}
gpu_check.CHECKS = (gpu_check.Check("cheap", 60, "a GPU is there", (command,), figures, bounds=bounds),)
sys.exit(gpu_check.main())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.slow
def test_it_runs_where_torch_sees_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    own = filter(None, [os.environ.get("PYTHONPATH")])  # another torch may be there
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "scripts"), str(ROOT), *own])
    command = [sys.executable, "-c", CHEAP, "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    machine, (check,) = report["machine"], report["checks"]
    assert (machine["gpu"], machine["gpu_gib"], machine["compute_capability"]) == ("Stand-in", 80.0, "9.0")
    assert (machine["torch"], machine["cuda"], machine["nccl"]) == (torch.__version__, "13.0", "2.28.9")
    assert (check["status"], check["figures"]["gpus"]) == ("passed", 1)
    assert '{"check": "cheap", "benchmark": "cheap", "gpus": 1}' in done.stdout.splitlines()


@pytest.mark.slow
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
