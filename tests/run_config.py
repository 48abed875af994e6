"""A whole run on the tiny model: its YAML, its data and its reward, in a folder of its own."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from hygiene import TEST_MARKER


def write_run(directory: Path, model_path: Path, **changes: Any) -> Path:
    """Write a YAML file with everything it needs beside it, and return its path; `changes` are whole sections."""
    _copy("tiny_rewards.py", directory)
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
    _copy("tiny_envs.py", directory)
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


def asynchronous(
    *, groups: int = 4, samples: int = 2, tokens: int = 8, schedule: dict[str, Any] | None = None, **rollout: Any
) -> dict[str, Any]:
    """Changes of `write_run`: asynchronous rollouts, the trainer and the engine have a core each, tokens are kept."""
    return {
        "rollout": {
            "prompts_per_step": groups,
            "samples_per_prompt": samples,
            "max_response_tokens": tokens,
            "save_tokens": True,
            "schedule": {"type": "async", "max_staleness": 2, "ahead": 1.0} if schedule is None else schedule,
            **rollout,
        },
        "resources": {
            "device": "cpu",
            "devices_per_node": 2,
            "device_mapping": {"training": "0", "inference": "1"},
        },
    }


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


def write_on_policy_distill_run(directory: Path, model_path: Path, teacher_path: Path, **changes: Any) -> Path:
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


def labelled_rows(directory: Path) -> dict[str, Any]:
    """Write the pairs of `write_dpo_run` as single answers, two in three of them desirable; return a `data` section."""
    lines = []
    for at, pair in enumerate(read_lines(directory / "train.jsonl")):
        side = "rejected" if at % 3 == 0 else "chosen"
        row = {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        lines.append(json.dumps(row) + "\n")
    (directory / "labels.jsonl").write_text("".join(lines))
    source = {"path": str(directory / "labels.jsonl")}
    return {"type": "labels", "sources": [source], "samples_per_step": 8, "max_tokens": 64}


def write_online_dpo_run(directory: Path, model_path: Path, **changes: Any) -> Path:
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


def scored_rows(directory: Path) -> dict[str, Any]:
    """Write the pairs of `write_dpo_run` as single answers, wrong ones in capitals; return the sections that differ."""
    sections: dict[str, Any] = {}
    for part, section in (("train", "data"), ("eval", "evaluation")):
        pairs = read_lines(directory / f"{part}.jsonl")
        answers = [(pair, right) for pair in pairs for right in (True, False)]
        rows = [
            {
                "prompt": pair["prompt"],
                "completion": pair["chosen"] if right else pair["rejected"].upper(),
                "score": right,
            }
            for pair, right in answers
        ]
        path = directory / f"scores_{part}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sections[section] = {"type": "scores", "sources": [{"path": str(path)}]}
    sections["data"] |= {"samples_per_step": 16, "max_tokens": 64}
    return {**sections, "algorithm": {"loss": "bce"}}


def step_rows(directory: Path) -> dict[str, Any]:
    """Write answers in three steps, of which some say something else and are wrong; return the sections that differ."""
    words = ("abc", "moon", "hello", "xyz", "tea", "zebra", "quick", "dog")
    sections: dict[str, Any] = {}
    for section, some in (("data", words[:6]), ("evaluation", words[6:])):
        rows = [
            {
                "prompt": f"Say {word} 3 times",
                "completions": ["NOT THIS" if wrong >> at & 1 else word for at in range(3)],
                "labels": [not wrong >> at & 1 for at in range(3)],
            }
            for word in some
            for wrong in range(8)
        ]
        path = directory / f"steps_{section}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sections[section] = {"type": "steps", "sources": [{"path": str(path)}]}
    sections["data"] |= {"samples_per_step": 16, "max_tokens": 64, "step_separator": "\n"}
    return {**sections, "algorithm": {"loss": "bce"}}


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


def _copy(module: str, directory: Path) -> None:
    """Put a module where a command that is started in `directory` finds it."""
    shutil.copy(Path(__file__).with_name(module), directory)


def _write(directory: Path, config: dict[str, Any]) -> Path:
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start_run(config: Path, *arguments: str, program: str = "roll_like.cli", **options: Any) -> subprocess.Popen[str]:
    """Start `roll-like run` in the config's folder, as a user would, or a module there that does the same."""
    command = [sys.executable, "-m", program, "run", "--config", str(config), *arguments]
    return subprocess.Popen(
        command,
        cwd=config.parent,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", TEST_MARKER: str(os.getpid())},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options},
    )


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read the run's output up to a line that holds `text`."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"the run ended without saying {text!r}:\n{seen}")


def finish_run(config: Path, *arguments: str, timeout: float = 300) -> tuple[int, str]:
    """Run to the end; return the exit code and everything that was printed."""
    process = start_run(config, *arguments)
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def run_here(config: Path, *arguments: str, curves: bool = False) -> tuple[int, str]:
    """Do as `finish_run` in this process, on the Ray that is up: seconds less, and the same output and exit code.

    Args:
        config: The run's file.
        arguments: Further ones of `roll-like run`.
        curves: Whether `curves.png` is drawn at the end, which takes a second.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not curves:
            patch.setattr("roll_like.metrics.summary.draw_curves", lambda *_: None)
        return command_here(config.parent, "run", "--config", str(config), *arguments)


def command_here(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a command of `roll-like` in this process, started in a folder."""
    from roll_like.cli import main

    printed, path = io.StringIO(), list(sys.path)
    with chdir(folder), redirect_stdout(printed), redirect_stderr(printed):
        code = main(arguments)
    sys.path[:] = path
    return code, printed.getvalue()


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
    """Return what `roll-like eval` says of a model, in this process."""
    code, output = command_here(config.parent, "eval", "--config", str(config), "--model", str(model))
    assert code == 0, output
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def exported(checkpoint: Path, directory: Path) -> None:
    """Run `roll-like export` in this process."""
    code, output = command_here(directory.parent, "export", "--checkpoint", str(checkpoint), "-o", str(directory))
    assert code == 0, output


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """Return the training loss of each step of a run."""
    return [line["train/loss"] for line in read_lines(run / "metrics.jsonl")]
