"""Learning rates by hand, and what DeepSpeed is told."""

from typing import Any, Literal

import pytest

from roll_like.config.training import CriticConfig, MuonConfig, OptimizerConfig, StateSizes, TrainingConfig
from roll_like.errors import ConfigError
from roll_like.registry import TRAINING_BACKENDS
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


MUON = OptimizerConfig(muon=MuonConfig())


@pytest.mark.parametrize(
    ("settings", "path", "message"),
    [
        ({"backend": "fsdp2", "zero_stage": 3, "tensor_parallel": 2, "workers": 2}, "tensor_parallel", "puts matrices"),
        ({"zero_stage": 1, "offload": "optimizer"}, "offload", "takes the optimizer's step in host memory"),
        ({}, None, ""),
        ({"backend": "fsdp2", "zero_stage": 3, "expert_parallel": 2, "workers": 2}, None, ""),
    ],
)
def test_muon_is_refused_where_it_has_no_whole_matrices(
    settings: dict[str, Any], path: str | None, message: str
) -> None:
    found = list(TrainingConfig(optimizer=MUON, **settings).violations("training", "cuda"))
    assert [violation.path for violation in found] == ([("training", path)] if path else [])
    assert message in "".join(violation.message for violation in found)
    assert not list(TrainingConfig(**settings).violations("training", "cuda"))


def test_muon_is_refused_by_a_backend_that_does_not_declare_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepSpeedBackend, "orthogonalises", False)
    (found,) = TrainingConfig(optimizer=MUON).violations("training", "cpu")
    assert found.path == ("training", "optimizer", "muon")
    assert "deepspeed steps with AdamW alone; set training.backend: fsdp2" in found.message


@pytest.mark.parametrize(("backend", "stage"), [("deepspeed", 1), ("deepspeed", 0), ("fsdp2", 3)])
def test_muon_keeps_one_moment_of_a_matrix(backend: str, stage: Literal[0, 1, 3]) -> None:
    """Of 900 trained numbers in matrices and 100 others: 4·900 + 8·100 bytes in place of 8·1000."""
    sizes = StateSizes(parameters=1000, trained=1000, largest=100, layer=900, outside=100, width=2, matrices=900)
    settings = TrainingConfig(backend=backend, zero_stage=stage, workers=2)
    kind = TRAINING_BACKENDS.get(backend)
    adamw = kind.state_bytes(settings, sizes)
    muon = kind.state_bytes(settings.model_copy(update={"optimizer": MUON}), sizes)
    assert adamw.optimizer - muon.optimizer == 3600 // (2 if stage else 1)
    assert muon.step - adamw.step == 2 * (4 * 900 + 4 * 100)
    assert (muon.weights, muon.gradients, muon.buffers) == (adamw.weights, adamw.gradients, adamw.buffers)


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
