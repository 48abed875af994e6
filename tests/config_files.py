"""A small valid configuration for tests, and a pipeline that only records what it is asked to do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from pydantic import ValidationError

from roll_like.builtin.pipelines.agentic.pipeline import AgenticPipeline
from roll_like.builtin.pipelines.distill.pipeline import DistillPipeline
from roll_like.builtin.pipelines.dpo.pipeline import DPOPipeline
from roll_like.builtin.pipelines.on_policy_distill.pipeline import OnPolicyDistillPipeline
from roll_like.builtin.pipelines.online_dpo.pipeline import OnlineDPOPipeline
from roll_like.builtin.pipelines.reward_model.pipeline import RewardModelPipeline
from roll_like.builtin.pipelines.rlvr.pipeline import RLVRPipeline
from roll_like.builtin.pipelines.sft.pipeline import SFTPipeline
from roll_like.check import Report
from roll_like.check.model import role_shapes
from roll_like.check.plan import Plan, plan
from roll_like.config.run import RunConfig
from roll_like.config.sampling import SamplingRunConfig

MINIMAL: dict[str, Any] = {
    "pipeline": "rlvr",
    "steps": 10,
    "model": {"path": "org/model"},
    "data": {"sources": [{"path": "train.jsonl"}], "max_prompt_tokens": 64},
    "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_response_tokens": 32},
    "rewards": {"use": [{"type": "ifeval"}]},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1", "inference": "0-1"}},
}

MINIMAL_AGENTIC: dict[str, Any] = {
    "pipeline": "agentic",
    "steps": 10,
    "model": {"path": "org/model"},
    "environments": [{"id": "roll_like/FrozenLake-v0"}],
    "rollout": {"groups_per_step": 8, "episodes_per_group": 4, "max_response_tokens": 32},
    "resources": {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0-1", "inference": "0-1"}},
}


def planned(config: SamplingRunConfig, shape: Any) -> Plan:
    """Return the plan of a run whose trained model has these sizes."""
    return plan(config, role_shapes(config, shape))


def changed(base: dict[str, Any] = MINIMAL, **changes: Any) -> dict[str, Any]:
    """Return a copy with dotted keys set (`__` for a dot); None removes a key."""
    values = copy.deepcopy(base)
    for key, value in changes.items():
        *path, last = key.split("__")
        section = values
        for part in path:
            section = section.setdefault(part, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return values


def refused(make: Callable[..., Any], *arguments: Any, **changes: Any) -> dict[str, str]:
    """Return the message about each key that a configuration refuses."""
    with pytest.raises(ValidationError) as caught:
        make(*arguments, **changes)
    return {".".join(map(str, error["loc"])): error["msg"] for error in caught.value.errors()}


def write_rows(folder: Path, row: Callable[[int], dict[str, Any]]) -> None:
    """Write `train.jsonl` of rows 0 to 9, and `eval.jsonl` of 10 and 11."""
    for name, numbers in (("train", range(10)), ("eval", range(10, 12))):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row(number))}\n" for number in numbers))


def write(path: Path, values: dict[str, Any] | str) -> Path:
    """Write a YAML file and return its path."""
    text = values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False)
    path.write_text(text, encoding="utf-8")
    return path


class Billion:
    """A model of 2³⁰ parameters, so that figures in GiB are whole, with layers of 2²⁰ inputs and outputs in all."""

    parameters = 2**30
    adapted_width = 2**20
    critic_adapted_width = 2**10
    quantized_parameters = critic_quantized_parameters = 0
    dense_layers = dense_layer_parameters = undivided_parameters = 0
    embedding_parameters = 2**20
    layers, layer_parameters, expert_parameters = 2, 2**28, 0

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        return 100 * bytes_per_value


class RecordingPipeline:
    """Stands in for the real pipelines: the command line is tested without Ray."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    @classmethod
    def launch(cls, config: RunConfig, resume: str | None = None) -> None:
        cls.calls.append(("launch", config, resume))

    @classmethod
    def check(cls, config: Any) -> Report:
        return CHECKS[config.pipeline](config)

    @classmethod
    def evaluate(cls, config: RunConfig, model: str) -> dict[str, float]:
        cls.calls.append(("evaluate", config, model))
        return {"eval/avg": 0.5}


#: What each pipeline's own `check` does.
CHECKS: dict[str, Callable[[Any], Report]] = {
    "rlvr": RLVRPipeline.check,
    "agentic": AgenticPipeline.check,
    "on_policy_distill": OnPolicyDistillPipeline.check,
    "sft": SFTPipeline.check,
    "dpo": DPOPipeline.check,
    "online_dpo": OnlineDPOPipeline.check,
    "distill": DistillPipeline.check,
    "reward_model": RewardModelPipeline.check,
}
