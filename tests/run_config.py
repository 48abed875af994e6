"""A whole run on the tiny model: its YAML, its data and its reward, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from hygiene import TEST_MARKER

REWARD = '''
"""A reward that a random model can learn in a few steps: write many letters e."""

from roll_like import Completion, register_reward


@register_reward("letter_e")
def letter_e(completion: Completion) -> float:
    return completion.text.count("e") / max(len(completion.text), 1)


@register_reward("has_letter_e")
def has_letter_e(completion: Completion) -> float:
    return float("e" in completion.text)


@register_reward("broken")
def broken(completion: Completion) -> float:
    raise RuntimeError("this reward is broken on purpose")
'''


def write_run(directory: Path, model_path: Path, **changes: Any) -> Path:
    """Write a YAML file with everything it needs beside it, and return its path; `changes` are whole sections."""
    (directory / "tiny_rewards.py").write_text(REWARD)
    rows = [{"prompt": f"Say something about the number {index}."} for index in range(40)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:32]))
    (directory / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[32:]))
    config: dict[str, Any] = {
        "pipeline": "rlvr",
        "name": "tiny",
        "output_dir": str(directory / "runs"),
        "steps": 4,
        "import": ["tiny_rewards"],
        "model": {"path": str(model_path), "dtype": "float32"},
        "data": {"sources": [{"path": str(directory / "train.jsonl")}], "max_prompt_tokens": 64},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_tokens": 12},
        "inference": {"type": "hf"},
        "training": {"optimizer": {"lr": 1.0e-3}, "max_tokens_per_micro_batch": 512},
        "rewards": {"use": [{"type": "letter_e"}]},
        "resources": {
            "device": "cpu",
            "devices_per_node": 2,
            "spans": {"training": "0-1", "inference": "0-1"},
        },
        "checkpoint": {"every": 1, "keep": 2, "export": False},
        "metrics": {"trackers": [], "console": "plain"},
    }
    config |= changes
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start_run(config: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start `roll-like run` in the config's folder, as a user would."""
    command = [sys.executable, "-m", "roll_like.cli", "run", "--config", str(config), *arguments]
    return subprocess.Popen(
        command,
        cwd=config.parent,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", TEST_MARKER: str(os.getpid())},
        **options,
    )


def finish_run(config: Path, *arguments: str, timeout: float = 300) -> tuple[int, str]:
    """Run to the end; return the exit code and everything that was printed."""
    process = start_run(config, *arguments)
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
