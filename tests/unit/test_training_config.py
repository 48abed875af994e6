"""Learning rates by hand, and what DeepSpeed is told."""

from typing import Literal

import pytest

from roll_like.config.training import CriticConfig, OptimizerConfig, TrainingConfig
from roll_like.errors import ConfigError
from roll_like.training.deepspeed import DeepSpeedBackend, deepspeed_config
from roll_like.training.optimizer import learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802]),
    ],
)
def test_learning_rate(schedule: str, expected: list[float]) -> None:
    config = OptimizerConfig(lr=0.1, warmup_steps=2, schedule=schedule, min_lr_ratio=0.1)
    rates = [10 * learning_rate(config, update, 6) for update in range(6)]
    assert rates == pytest.approx(expected, abs=1e-6)
    assert learning_rate(config, 100, 6) == pytest.approx(0.1 if schedule == "constant" else 0.01)


def test_deepspeed_settings() -> None:
    plain = deepspeed_config(TrainingConfig(zero_stage=0), "float32", 1000)
    assert "bf16" not in plain
    assert "data_types" not in plain
    sharded = deepspeed_config(TrainingConfig(zero_stage=3, offload="optimizer_and_parameters"), "bfloat16", 1000)
    assert sharded["bf16"] == {"enabled": True}
    assert sharded["data_types"] == {"grad_accum_dtype": "fp32"}
    assert sharded["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert sharded["gradient_clipping"] == 1.0
    # else DeepSpeed refuses any optimizer but its own, which has to be compiled
    assert sharded["zero_force_ds_cpu_optimizer"] is False
    assert deepspeed_config(TrainingConfig(), "float16", 1000)["fp16"]["enabled"]


@pytest.mark.parametrize(
    ("parameters", "elements"), [(0, 128), (1001, 1024), (7_615_616_512, 2**26)], ids=["frozen", "small", "7B"]
)
def test_deepspeeds_buckets_follow_the_models_size(parameters: int, elements: int) -> None:
    """Its defaults of 5 · 10⁸ elements take gigabytes, whatever the model, and move to host memory with it."""
    zero = deepspeed_config(TrainingConfig(zero_stage=2), "bfloat16", parameters)["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (elements, elements)


@pytest.mark.parametrize(
    ("stage", "divided"),
    [(0, ()), (1, ("optimizer",)), (2, ("optimizer", "gradients")), (3, ("optimizer", "gradients", "weights"))],
)
def test_deepspeeds_rules_follow_the_zero_stage(stage: Literal[0, 1, 2, 3], divided: tuple[str, ...]) -> None:
    settings = TrainingConfig(zero_stage=stage, offload="optimizer_and_parameters")
    assert DeepSpeedBackend.divided(settings) == set(divided)
    assert [violation.path for violation in DeepSpeedBackend.violations(settings)] == [("offload",)] * (stage < 3)


def test_a_critic_has_the_engines_options_and_its_own() -> None:
    critic = CriticConfig(zero_stage=2, optimizer={"lr": 1e-5}, value_clip=None)
    assert (critic.workers, critic.path, critic.warmup_steps, critic.updates_per_step) == (1, None, 0, 1)
    assert critic.value_clip is None
    assert CriticConfig().value_clip == 0.2
    assert deepspeed_config(critic, "float32", 1000)["zero_optimization"]["stage"] == 2
    with pytest.raises(ConfigError, match="logprob_chunk_tokens"):
        CriticConfig(logprob_chunk_tokens=7)
    for wrong in ({"value_clip": 0}, {"warmup_steps": -1}, {"updates_per_step": 0}):
        with pytest.raises(ConfigError):
            CriticConfig(**wrong)
