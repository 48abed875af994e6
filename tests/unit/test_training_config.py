"""Learning rates by hand, and what DeepSpeed is told."""

import pytest
from tests_support import policy_sample  # type: ignore[import-not-found]

from roll_like.config.sections import OptimizerConfig, TrainingConfig
from roll_like.training.deepspeed_config import deepspeed_config, learning_rate
from roll_like.training.engine import split_by_group


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802]),
    ],
)
def test_learning_rate(schedule: str, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule=schedule, min_lr_ratio=0.1)
    rates = [learning_rate(config, update, 6) for update in range(6)]
    assert rates == pytest.approx(expected, abs=1e-6)
    assert learning_rate(config, 100, 6) == pytest.approx(1.0 if schedule == "constant" else 0.1)


def test_deepspeed_settings() -> None:
    plain = deepspeed_config(TrainingConfig(zero_stage=0), "float32")
    assert "bf16" not in plain
    assert "data_types" not in plain
    sharded = deepspeed_config(TrainingConfig(zero_stage=3, offload="optimizer_and_parameters"), "bfloat16")
    assert sharded["bf16"] == {"enabled": True}
    assert sharded["data_types"] == {"grad_accum_dtype": "fp32"}
    assert sharded["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert sharded["gradient_clipping"] == 1.0
    assert deepspeed_config(TrainingConfig(), "float16")["fp16"]["enabled"]


def test_updates_never_tear_groups_apart() -> None:
    samples = [policy_sample(group=group) for group in "aabbbccd"]
    parts = split_by_group(samples, 2)
    assert [[sample.group_id for sample in part] for part in parts] == [list("aabbb"), list("ccd")]
    assert [len(part) for part in split_by_group(samples[:2], 3)] == [2]
