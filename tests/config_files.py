"""A small valid configuration for tests, and a pipeline that only records what it is asked to do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import yaml

from roll_like.builtin.pipelines.agentic.check import environment_findings
from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.check import Report, check, check_run
from roll_like.check.data import prompt_findings
from roll_like.check.teachers import tutored_findings
from roll_like.offline.check import (
    conversation_findings,
    given_plan,
    lesson_findings,
    preference_findings,
    scored_pair_findings,
)

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


def write(path: Path, values: dict[str, Any] | str) -> Path:
    """Write a YAML file and return its path."""
    text = values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False)
    path.write_text(text, encoding="utf-8")
    return path


class RecordingPipeline:
    """Stands in for the real pipeline: the command line is tested without Ray."""

    Config: ClassVar[type[RLVRConfig]] = RLVRConfig
    calls: ClassVar[list[tuple[Any, ...]]] = []

    @classmethod
    def launch(cls, config: RLVRConfig, resume: str | None = None) -> None:
        cls.calls.append(("launch", config, resume))

    @classmethod
    def check(cls, config: RLVRConfig) -> Report:
        return check(config, prompt_findings)

    @classmethod
    def evaluate(cls, config: RLVRConfig, model: str) -> dict[str, float]:
        cls.calls.append(("evaluate", config, model))
        return {"eval/avg": 0.5}


class RecordingDPOPipeline:
    """The same for `pipeline: dpo`."""

    Config: ClassVar[type[DPOConfig]] = DPOConfig

    @classmethod
    def launch(cls, config: DPOConfig, resume: str | None = None) -> None:
        RecordingPipeline.calls.append(("launch", config, resume))

    @classmethod
    def check(cls, config: DPOConfig) -> Report:
        return check_run(config, given_plan, preference_findings)

    @classmethod
    def evaluate(cls, config: DPOConfig, model: str) -> dict[str, float]:
        RecordingPipeline.calls.append(("evaluate", config, model))
        return {"eval/loss": 0.5}


class RecordingRewardModelPipeline:
    """The same for `pipeline: reward_model`."""

    Config: ClassVar[type[RewardModelRunConfig]] = RewardModelRunConfig

    @classmethod
    def launch(cls, config: RewardModelRunConfig, resume: str | None = None) -> None:
        RecordingPipeline.calls.append(("launch", config, resume))

    @classmethod
    def check(cls, config: RewardModelRunConfig) -> Report:
        return check_run(config, given_plan, scored_pair_findings)

    @classmethod
    def evaluate(cls, config: RewardModelRunConfig, model: str) -> dict[str, float]:
        RecordingPipeline.calls.append(("evaluate", config, model))
        return {"eval/loss": 0.5}


class RecordingSFTPipeline:
    """The same for `pipeline: sft`."""

    Config: ClassVar[type[SFTConfig]] = SFTConfig

    @classmethod
    def launch(cls, config: SFTConfig, resume: str | None = None) -> None:
        RecordingPipeline.calls.append(("launch", config, resume))

    @classmethod
    def check(cls, config: SFTConfig) -> Report:
        return check_run(config, given_plan, conversation_findings)

    @classmethod
    def evaluate(cls, config: SFTConfig, model: str) -> dict[str, float]:
        RecordingPipeline.calls.append(("evaluate", config, model))
        return {"eval/loss": 0.5}


class RecordingDistillPipeline:
    """The same for `pipeline: distill`."""

    Config: ClassVar[type[DistillConfig]] = DistillConfig

    @classmethod
    def launch(cls, config: DistillConfig, resume: str | None = None) -> None:
        RecordingPipeline.calls.append(("launch", config, resume))

    @classmethod
    def check(cls, config: DistillConfig) -> Report:
        return check_run(config, given_plan, lesson_findings)

    @classmethod
    def evaluate(cls, config: DistillConfig, model: str) -> dict[str, float]:
        RecordingPipeline.calls.append(("evaluate", config, model))
        return {"eval/loss": 0.5}


class RecordingOnPolicyDistillPipeline:
    """The same for `pipeline: on_policy_distill`."""

    Config: ClassVar[type[OnPolicyDistillConfig]] = OnPolicyDistillConfig

    @classmethod
    def launch(cls, config: OnPolicyDistillConfig, resume: str | None = None) -> None:
        RecordingPipeline.calls.append(("launch", config, resume))

    @classmethod
    def check(cls, config: OnPolicyDistillConfig) -> Report:
        return check(config, tutored_findings)

    @classmethod
    def evaluate(cls, config: OnPolicyDistillConfig, model: str) -> dict[str, float]:
        RecordingPipeline.calls.append(("evaluate", config, model))
        return {"eval/reverse_kl": 0.5}


class RecordingAgenticPipeline:
    """The same for `pipeline: agentic`; both keep one list."""

    Config: ClassVar[type[AgenticConfig]] = AgenticConfig

    @classmethod
    def launch(cls, config: AgenticConfig, resume: str | None = None) -> None:
        RecordingPipeline.calls.append(("launch", config, resume))

    @classmethod
    def check(cls, config: AgenticConfig) -> Report:
        return check(config, environment_findings)

    @classmethod
    def evaluate(cls, config: AgenticConfig, model: str) -> dict[str, float]:
        RecordingPipeline.calls.append(("evaluate", config, model))
        return {"eval/avg": 0.5}
