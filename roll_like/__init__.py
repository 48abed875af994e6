"""Reinforcement learning on language models with Ray, vLLM and DeepSpeed.

Everything public is imported from here. A name is looked up when it is first used, so that `import roll_like` and a
worker process load only what they need; `__init__.pyi` shows the names to type checkers and editors.
"""

from __future__ import annotations

import importlib
from typing import Any

#: Configuration class of each built-in pipeline, by the pipeline's registered name.
_CONFIGS = {
    "AgenticConfig": "agentic",
    "DPOConfig": "dpo",
    "DistillConfig": "distill",
    "OnPolicyDistillConfig": "on_policy_distill",
    "OnlineDPOConfig": "online_dpo",
    "RLVRConfig": "rlvr",
    "RewardModelRunConfig": "reward_model",
    "SFTConfig": "sft",
}
_MODULES = {
    "Completion": "roll_like.rewards.base",
    "Outcome": "roll_like.rewards.base",
    "Reward": "roll_like.rewards.base",
    "RewardCase": "roll_like.rewards.base",
    "RewardConfig": "roll_like.rewards.base",
    "RewardReport": "roll_like.rewards.check",
    "RewardResult": "roll_like.rewards.base",
    "check_reward": "roll_like.rewards.check",
    "register_reward": "roll_like.rewards.base",
}

__all__ = sorted([*_CONFIGS, *_MODULES])  # noqa: PLE0605 - a list of strings, though computed


def __getattr__(name: str) -> Any:
    if name in _CONFIGS:
        from roll_like.registry import PIPELINES

        value = PIPELINES.get(_CONFIGS[name])
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
