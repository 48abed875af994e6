"""Whether two versions of the code compute the same: every quickstart's metrics and exported weights, to the last bit.

    git worktree add ../before COMMIT
    python scripts/series.py record before.json --tree ../before   # once for each version, on one machine
    python scripts/series.py record after.json
    python scripts/series.py compare before.json after.json

A case is a quickstart of a few steps with the tests' random model in float32; what samples has three seeds, and two
runs are killed with SIGKILL and resumed. Times, memory, rates and loads are not compared: two runs of one version
differ there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
#: Names of what differs between two runs of one version: clocks and loads.
VOLATILE = ("time", "elapsed", "share/", "util/", "memory/", "throughput/", "schedule/", "checkpoint/", "speed/")
SHORT = ("rollout.max_response_tokens=12", "inference.kv_cache_gib=0.3")
#: Differs among the samples of a random model.
REWARD = "rewards.use=[{type: repetition, n: 1, by: characters, free: 0}]"
ANSWERS = (*SHORT, "rollout.prompts_per_step=4")
EPISODES = (*SHORT, REWARD, "rollout.groups_per_step=4", "rollout.episodes_per_group=4", "rollout.episodes_per_step=16")
TEACHER = "teachers.whole.path={model}"
OFFLINE = ("epochs=null", "evaluation.every=2")
#: Overrides of each quickstart, and whether chance has a part in it.
SAMPLED: Mapping[str, Sequence[str]] = {
    "rlvr_quickstart": (*ANSWERS, REWARD, "rollout.samples_per_step=32"),
    "agentic_frozenlake": EPISODES,
    # one request at a time: what else is in a batch, which tools decide by when they answer, changes the last bits
    "agentic_tools": (*EPISODES, "inference.max_running=1"),
    "on_policy_distill": (*ANSWERS, "rollout.samples_per_prompt=2", "model.keep_layers=[0]", TEACHER),
    "online_dpo_quickstart": (
        *SHORT,
        REWARD,
        "rollout.prompts_per_iteration=8",
        "pairs.pairs_per_step=4",
        "pairs.epochs=1",
    ),
}
SUPERVISED: Mapping[str, Sequence[str]] = {
    "sft_quickstart": OFFLINE,
    "sft_lora": OFFLINE,
    "dpo_quickstart": OFFLINE,
    "kto_quickstart": OFFLINE,
    "reward_model_quickstart": OFFLINE,
    "distill_quickstart": (*OFFLINE, "model.keep_layers=[0]", TEACHER),
}
RESUMED = ("rlvr_quickstart", "sft_quickstart")
SEEDS = (0, 1, 2)
STEPS = 3
LIMIT_SECONDS = 1200


@dataclass(frozen=True)
class Case:
    """One run: a configuration's name, its seed, its overrides, and whether it is killed once."""

    config: str
    seed: int
    overrides: Sequence[str]
    killed: bool = False

    @property
    def name(self) -> str:
        """What it is called in the files."""
        return f"{self.config}-seed-{self.seed}" + ("-resumed" if self.killed else "")


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for config, overrides in SUPERVISED.items():
        yield Case(config, 0, overrides)
    for config, overrides in SAMPLED.items():
        for seed in SEEDS:
            yield Case(config, seed, overrides)
    for config in RESUMED:
        yield Case(config, 0, {**SAMPLED, **SUPERVISED}[config], killed=True)


def command(case: Case, folder: Path, model: Path) -> list[str]:
    """Return the command line of a case."""
    return [
        sys.executable,
        "run_pipeline.py",
        "--config",
        f"configs/{case.config}.yaml",
        f"output_dir={folder}",
        f"name={case.name}",
        f"seed={case.seed}",
        f"steps={STEPS}",
        f"model.path={model}",
        "model.dtype=float32",
        "metrics.trackers=[]",
        "checkpoint.every=1",
        "checkpoint.export=true",
        *(each.format(model=model) if each is TEACHER else each for each in case.overrides),
    ]


def run(case: Case, tree: Path, folder: Path) -> dict[str, Any]:
    """Run a case in a version's tree and return what it computed.

    Raises:
        RuntimeError: It did not end as it should; with the end of its output.
    """
    arguments, run_folder = command(case, folder, folder / "model"), folder / case.name
    if case.killed:
        _kill_after_a_checkpoint(arguments, tree, run_folder)
        arguments.append("--resume")
    done = subprocess.run(
        arguments, cwd=tree, env=_environment(tree), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{case.name}: exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
    return {
        "metrics": _lines(run_folder / "metrics.jsonl"),
        "evaluations": _lines(run_folder / "evaluations.jsonl"),
        "weights": _hashes(run_folder / "model"),
    }


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "RAY_USAGE_STATS_ENABLED": "0"}


def _kill_after_a_checkpoint(arguments: Sequence[str], tree: Path, folder: Path) -> None:
    """Start a run and kill its driver when its second step is logged."""
    with subprocess.Popen(
        arguments, cwd=tree, env=_environment(tree), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + LIMIT_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            if len(_lines(folder / "metrics.jsonl")) >= 2:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.02)
        process.wait()
    time.sleep(10)  # its workers end by themselves


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one a line, which may be being written."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")]


def _hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.safetensors"))
    }


def record(output: Path, tree: Path, chosen: str) -> None:
    """Run the cases that a file does not have yet, and write each into it."""
    from tiny_model import make_tiny_model

    known = json.loads(output.read_text("utf-8")) if output.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder) / "model", dtype="float32")
        for case in cases():
            if case.name in known or chosen not in case.name:
                continue
            began = time.monotonic()
            known[case.name] = run(case, tree, Path(folder))
            output.write_text(json.dumps(known, indent=1), "utf-8")
            print(f"{case.name}: {time.monotonic() - began:.0f} s", flush=True)


def compare(before: Path, after: Path) -> int:
    """Print every difference of two files; return how many cases differ."""
    one, other = (json.loads(path.read_text("utf-8")) for path in (before, after))
    different = 0
    for name in sorted({*one, *other}):
        found = list(differences(one.get(name), other.get(name)))
        different += bool(found)
        print(f"{name}: {'equal' if not found else f'{len(found)} differences'}")
        for text in found[:12]:
            print(f"    {text}")
    return different


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield where two values differ, in words.

    >>> list(differences({"loss": [1.0, 2.0]}, {"loss": [1.0, 2.5]}))
    ['loss[1]: 2.0, then 2.5']
    """
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if key.startswith(VOLATILE) or key.endswith("seconds"):
                continue
            yield from differences(one.get(key), other.get(key), f"{where}.{key}" if where else key)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{where}[{index}]")
    elif one != other and str(one) != str(other):  # NaN equals NaN here
        yield f"{where}: {one}, then {other}"


def main() -> int:
    """Record or compare, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the version's folder")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    arguments = parser.parse_args()
    if arguments.what == "compare":
        return min(compare(*arguments.files), 1)
    record(arguments.files[0].resolve(), arguments.tree.resolve(), arguments.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
