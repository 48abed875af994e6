"""A whole run on the tiny model: its YAML, its data and its reward, in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
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


ENVIRONMENTS = '''
"""Environments that a random model can learn in a few steps: write many letters e, turn by turn."""

import gymnasium

from roll_like.envs import FreeText


class Letters(gymnasium.Env):
    observation_space = FreeText()
    action_space = FreeText()

    def __init__(self, turns: int = 2, failing: int = 0) -> None:
        self.turns, self.failing = turns, failing

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.failing and seed is not None and seed % self.failing == self.failing - 1:
            raise RuntimeError(f"seed {seed} is broken on purpose")
        self.at = 0
        return f"Say something about the number {self.np_random.integers(40)}.", {"state": "begun"}

    def step(self, action):
        self.at += 1
        share = action.count("e") / max(len(action), 1)
        over = self.at == self.turns
        info = {"state": f"turn {self.at}"} | ({"success": share > 0.4} if over else {})
        return f"And about {self.at}?", share, over, False, info


gymnasium.register("tiny/Letters-v0", entry_point=Letters)
'''


def write_run(directory: Path, model_path: Path, **changes: Any) -> Path:
    """Write a YAML file with everything it needs beside it, and return its path; `changes` are whole sections."""
    (directory / "tiny_rewards.py").write_text(REWARD)
    rows = [{"prompt": f"Say something about the number {index}."} for index in range(40)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:32]))
    (directory / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[32:]))
    config: dict[str, Any] = {
        "pipeline": "rlvr",
        **_shared(directory, model_path),
        "import": ["tiny_rewards"],
        "data": {"sources": [{"path": str(directory / "train.jsonl")}], "max_prompt_tokens": 64},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_tokens": 12},
        "rewards": {"use": [{"type": "letter_e"}]},
    }
    return _write(directory, config | changes)


def write_episodes_run(directory: Path, model_path: Path, **changes: Any) -> Path:
    """The same for an agentic run, with environments of its own."""
    (directory / "tiny_envs.py").write_text(ENVIRONMENTS)
    config: dict[str, Any] = {
        "pipeline": "agentic",
        **_shared(directory, model_path),
        "import": ["tiny_envs"],
        "environments": [{"id": "tiny/Letters-v0"}],
        "rollout": {
            "groups_per_step": 4,
            "episodes_per_group": 4,
            "max_turns": 4,
            "max_response_tokens": 12,
            "max_episode_tokens": 160,
        },
        "algorithm": {"advantage": "gigpo"},
    }
    return _write(directory, config | changes)


def write_sft_run(directory: Path, model_path: Path, **changes: Any) -> Path:
    """The same for a supervised run, with conversations of its own."""
    words = ("abc", "moon", "hello", "x1y2", "tea", "zebra", "quick", "dog")
    rows = [
        json.dumps({"prompt": f"Say {word} {n} times", "completion": word * n}) for word in words for n in (1, 2, 3)
    ]
    (directory / "train.jsonl").write_text("".join(f"{row}\n" for row in rows[:20]))
    (directory / "eval.jsonl").write_text("".join(f"{row}\n" for row in rows[20:]))
    config = _shared(directory, model_path)
    config["resources"]["device_mapping"] = {"training": "0-1"}
    del config["inference"]
    config |= {
        "pipeline": "sft",
        "data": {"sources": [{"path": str(directory / "train.jsonl")}], "samples_per_step": 8, "max_tokens": 64},
        "evaluation": {"sources": [{"path": str(directory / "eval.jsonl")}]},
        "training": {"optimizer": {"lr": 3.0e-3}, "max_tokens_per_micro_batch": 256},
    }
    return _write(directory, config | changes)


def write_distill_run(directory: Path, model_path: Path, teacher_path: Path, **changes: Any) -> Path:
    """The same for a student that follows a teacher on the conversations of a supervised run."""
    path = write_sft_run(directory, model_path)
    config = yaml.safe_load(path.read_text())
    config |= {"pipeline": "distill", "teachers": {"tiny": {"path": str(teacher_path)}}, "algorithm": {"top_k": 32}}
    return _write(directory, config | changes)


def write_tutored_run(directory: Path, model_path: Path, teacher_path: Path, **changes: Any) -> Path:
    """The same for a student that follows a teacher on its own answers, to the prompts of an RLVR run."""
    path = write_run(directory, model_path)
    config = yaml.safe_load(path.read_text())
    del config["rewards"]
    config |= {
        "pipeline": "on_policy_distill",
        "teachers": {"tiny": {"path": str(teacher_path)}},
        "evaluation": {"sources": [{"path": str(directory / "eval.jsonl")}], "samples_per_prompt": 4},
    }
    return _write(directory, config | changes)


def write_dpo_run(directory: Path, model_path: Path, **changes: Any) -> Path:
    """The same for a preference run, with pairs of its own: what is chosen repeats a word as it is."""
    words = ("abc", "moon", "hello", "x1y2", "tea", "zebra", "quick", "dog")
    pairs = [(f"Say {word} {times} times", word * times, word[::-1] * 3) for word in words for times in (1, 2, 3)]
    rows = [json.dumps({"prompt": prompt, "chosen": chosen, "rejected": other}) for prompt, chosen, other in pairs]
    (directory / "train.jsonl").write_text("".join(f"{row}\n" for row in rows[:20]))
    (directory / "eval.jsonl").write_text("".join(f"{row}\n" for row in rows[20:]))
    config = _shared(directory, model_path)
    config["resources"]["device_mapping"] = {"training": "0-1"}
    del config["inference"]
    config |= {
        "pipeline": "dpo",
        "data": {"sources": [{"path": str(directory / "train.jsonl")}], "pairs_per_step": 8, "max_tokens": 64},
        "evaluation": {"sources": [{"path": str(directory / "eval.jsonl")}]},
        "training": {"optimizer": {"lr": 1.0e-3}, "max_tokens_per_micro_batch": 256},
        "reference": {},
    }
    return _write(directory, config | changes)


def verdict_rows(directory: Path) -> dict[str, Any]:
    """Write the pairs of `write_dpo_run` as single answers, two in three of them liked; return a `data` section."""
    lines = []
    for at, pair in enumerate(read_lines(directory / "train.jsonl")):
        side = "rejected" if at % 3 == 0 else "chosen"
        row = {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        lines.append(json.dumps(row) + "\n")
    (directory / "verdicts.jsonl").write_text("".join(lines))
    source = {"path": str(directory / "verdicts.jsonl")}
    return {"type": "labels", "sources": [source], "samples_per_step": 8, "max_tokens": 64}


def write_iterations_run(directory: Path, model_path: Path, **changes: Any) -> Path:
    """The same for a preference run on the policy's own answers: those with more letters e are preferred."""
    write_run(directory, model_path)  # prompts and reward
    config: dict[str, Any] = {
        "pipeline": "online_dpo",
        **_shared(directory, model_path),
        "import": ["tiny_rewards"],
        "data": {"sources": [{"path": str(directory / "train.jsonl")}], "max_prompt_tokens": 64},
        "rollout": {"prompts_per_iteration": 16, "samples_per_prompt": 4, "max_response_tokens": 12},
        "rewards": {"use": [{"type": "letter_e"}]},
        "pairs": {"pairs_per_step": 8, "epochs": 2},
        "reference": {},
        "evaluation": {"sources": [{"path": str(directory / "eval.jsonl")}], "samples_per_prompt": 4},
    }
    return _write(directory, config | changes)


def write_reward_model_run(directory: Path, model_path: Path, **changes: Any) -> Path:
    """The same for a run that trains a reward model, on pairs like those."""
    path = write_dpo_run(directory, model_path, **changes)
    config = yaml.safe_load(path.read_text()) | {"pipeline": "reward_model"}
    del config["reference"]
    return _write(directory, config)


def _shared(directory: Path, model_path: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "output_dir": str(directory / "runs"),
        "steps": 4,
        "model": {"path": str(model_path), "dtype": "float32"},
        "inference": {"type": "hf"},
        "training": {"optimizer": {"lr": 1.0e-3}, "max_tokens_per_micro_batch": 512},
        "resources": {
            "device": "cpu",
            "devices_per_node": 2,
            "device_mapping": {"training": "0-1", "inference": "0-1"},
        },
        "checkpoint": {"every": 1, "keep": 2, "export": False},
        "metrics": {"trackers": [], "console": "plain"},
    }


def _write(directory: Path, config: dict[str, Any]) -> Path:
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


def kill_run(config: Path, said: str) -> None:
    """Start a run and end its driver by SIGKILL as soon as it prints something."""
    process = start_run(config, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if said in line:
            break
    else:
        raise AssertionError(f"the run ended by itself, without {said!r}")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def evaluated(config: Path, model: Path) -> dict[str, float]:
    """Return what `roll-like eval` says of a model."""
    command = [sys.executable, "-m", "roll_like.cli", "eval", "--config", str(config), "--model", str(model)]
    done = subprocess.run(command, cwd=config.parent, text=True, capture_output=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
