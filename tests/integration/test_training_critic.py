"""The real critic in Ray actors: its values and updates equal a plain PyTorch loop, however they are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dequantised import dequantised
from peft import LoraConfig, get_peft_model
from rank_specs import cpu_rank
from tests_support import ragged_policy_samples  # type: ignore[import-not-found]
from trained_weights import largest_difference, trained_weights
from transformers import AutoModelForCausalLM

from roll_like.cluster import ResourceManager
from roll_like.config.resources import DeviceRange
from roll_like.config.training import CriticConfig
from roll_like.errors import EngineError
from roll_like.policy_gradient.critic import Critic, ValueObjective
from roll_like.training.start import start_engine
from roll_like.types import FloatArray, PolicySample
from roll_like.values import reduce

pytestmark = pytest.mark.integration
# the large eps keeps Adam's first steps from being the sign of the gradient's last bits
OPTIMIZER = {"lr": 1e-2, "max_grad_norm": 1000.0, "eps": 1e-2, "weight_decay": 0.01}
CLIP = 0.05


@contextmanager
def critic_engine(
    resources: ResourceManager, model: Path, *, dtype: str = "float32", **options: Any
) -> Iterator[Critic]:
    config = CriticConfig(optimizer=OPTIMIZER, value_clip=CLIP, **options)
    spec = cpu_rank(ValueObjective(settings=config), model, dtype=dtype)
    with ExitStack() as stack:
        yield Critic(start_engine("critic", spec, resources, DeviceRange.model_validate("0-1"), stack=stack))


def returns_of(samples: Sequence[PolicySample], seed: int = 0) -> list[FloatArray]:
    random = np.random.default_rng(seed)
    return [
        np.where(sample.loss_mask, random.normal(0.5, 1.0, len(sample.token_ids)), 0).astype(np.float32)
        for sample in samples
    ]


def learn(critic: Critic, seed: int = 0) -> dict[str, float]:
    """One step: values first, then an update towards returns."""
    samples = ragged_policy_samples(seed=seed)
    return reduce(critic.learn(samples, critic.values(samples), returns_of(samples, seed)))


def parameters(critic: Critic) -> dict[str, torch.Tensor]:
    return trained_weights(critic.engine.cluster)


class PlainCritic:
    """A critic as one writes it by hand: one sequence at a time, torch's own optimizer."""

    def __init__(self, model: Path) -> None:
        self.backbone = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model
        self.head = torch.nn.Linear(self.backbone.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.optimizer = torch.optim.AdamW(
            [*self.backbone.parameters(), *self.head.parameters()], lr=1e-2, eps=1e-2, weight_decay=0.01
        )

    def values(self, sample: PolicySample) -> torch.Tensor:
        """V of the state before each sampled token."""
        hidden = self.backbone(torch.from_numpy(sample.token_ids).long()[None]).last_hidden_state[0]
        return self.head(hidden[np.flatnonzero(sample.loss_mask) - 1])[:, 0]

    def step(self, seed: int = 0) -> None:
        samples = ragged_policy_samples(seed=seed)
        targets = returns_of(samples, seed)
        tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        with torch.no_grad():
            old = [self.values(sample) for sample in samples]
        self.optimizer.zero_grad()
        for sample, before, target in zip(samples, old, targets, strict=True):
            goal = torch.from_numpy(target[sample.loss_mask])
            values = self.values(sample)
            bounded = before + torch.clamp(values - before, -CLIP, CLIP)
            loss = 0.5 * torch.maximum((values - goal) ** 2, (bounded - goal) ** 2)
            (loss.sum() / tokens).backward()
        self.optimizer.step()

    def parameters(self) -> dict[str, torch.Tensor]:
        named = {f"backbone.{name}": weight for name, weight in self.backbone.named_parameters()}
        named |= {f"head.{name}": weight for name, weight in self.head.named_parameters()}
        return {name: weight.detach() for name, weight in named.items()}


@pytest.fixture(scope="module")
def plain(float_model: Path) -> PlainCritic:
    """After two steps: in the first, a head of zeros gives the backbone no gradient."""
    critic = PlainCritic(float_model)
    critic.step(seed=0)
    critic.step(seed=1)
    return critic


@pytest.mark.parametrize(
    ("workers", "zero_stage", "options"),
    [
        (1, 0, {"share_prompts": False}),
        pytest.param(1, 1, {"max_tokens_per_micro_batch": 48}, marks=pytest.mark.slow),
        pytest.param(1, 2, {"max_tokens_per_micro_batch": 48}, marks=pytest.mark.slow),
        (1, 3, {"max_tokens_per_micro_batch": 96}),
        pytest.param(2, 0, {"max_tokens_per_micro_batch": 48}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"share_prompts": False, "max_tokens_per_micro_batch": 64}, marks=pytest.mark.slow),
        (2, 2, {"max_tokens_per_micro_batch": 48, "gradient_checkpointing": True}),
        (2, 3, {"max_tokens_per_micro_batch": 96, "attention": "varlen", "gradient_checkpointing": True}),
        pytest.param(2, 3, {"max_tokens_per_micro_batch": 48}, marks=pytest.mark.slow),
        (2, 3, {"max_tokens_per_micro_batch": 48, "sequence_parallel": 2}),
        (2, 3, {"max_tokens_per_micro_batch": 48, "backend": "fsdp2"}),
    ],
)
def test_values_and_updates_equal_a_plain_loop(
    resources: ResourceManager,
    float_model: Path,
    plain: PlainCritic,
    workers: int,
    zero_stage: int,
    options: dict[str, Any],
) -> None:
    with critic_engine(resources, float_model, workers=workers, zero_stage=zero_stage, **options) as critic:
        first = learn(critic, seed=0)
        second = learn(critic, seed=1)
        assert largest_difference(parameters(critic), plain.parameters()) < 1e-6
        samples = ragged_policy_samples(seed=2)
        values = critic.values(samples)
    for sample, mine in zip(samples, values, strict=True):
        with torch.no_grad():
            expected = plain.values(sample).numpy()
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(mine[sample.loss_mask], expected, atol=1e-5)
        assert not mine[~sample.loss_mask].any()
    assert first["critic/value_mean"] == 0.0, "a critic begins with values of 0"
    assert first["critic/explained_variance"] == pytest.approx(0.0)
    assert second["critic/lr"] == 1e-2
    assert second["critic/grad_norm"] > 0


@pytest.mark.parametrize(
    ("dtype", "workers", "zero_stage"),
    [
        pytest.param("bfloat16", 1, 1, marks=pytest.mark.slow),
        ("bfloat16", 1, 0),
        pytest.param("float32", 2, 3, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_critic_goes_on_bit_for_bit(
    resources: ResourceManager, float_model: Path, tmp_path: Path, dtype: str, workers: int, zero_stage: int
) -> None:
    options: dict[str, Any] = {
        "dtype": dtype,
        "workers": workers,
        "zero_stage": zero_stage,
        "max_tokens_per_micro_batch": 64,
    }
    with critic_engine(resources, float_model, **options) as critic:
        learn(critic, seed=0)
        critic.engine.save(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["critic"]
        learn(critic, seed=1)
        expected = parameters(critic)
    with critic_engine(resources, float_model, **options) as critic:
        critic.engine.load(tmp_path)
        learn(critic, seed=1)
        assert largest_difference(parameters(critic), expected) == 0.0


def test_a_critic_learns_to_explain_returns(resources: ResourceManager, float_model: Path) -> None:
    samples = ragged_policy_samples()
    # a return that can be read off the prompt
    targets = [np.where(sample.loss_mask, float(sample.token_ids[0]) / 400, 0).astype(np.float32) for sample in samples]
    with critic_engine(resources, float_model, updates_per_step=2) as critic:
        explained = [
            reduce(critic.learn(samples, critic.values(samples), targets))["critic/explained_variance"]
            for _ in range(15)
        ]
    assert explained[0] == pytest.approx(0.0)
    assert explained[-1] > 0.8


LORA = {"rank": 4, "alpha": 8}


def adapted(model: Path) -> PlainCritic:
    """A critic as one writes it by hand with peft: its adapters and its head learn."""
    plain = PlainCritic(model)
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    get_peft_model(causal_lm, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    plain.backbone = causal_lm.model  # its layers are peft's now
    trained = [*(each for each in plain.backbone.parameters() if each.requires_grad), *plain.head.parameters()]
    plain.optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-2, weight_decay=0.01)
    return plain


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 48}, marks=pytest.mark.slow),
        {"workers": 2, "zero_stage": 3, "backend": "fsdp2", "gradient_checkpointing": True},
        pytest.param({"lora": {**LORA, "quantization": "nf4"}}, marks=pytest.mark.slow),
    ],
)
def test_a_critic_with_adapters_learns_as_with_peft_and_goes_on_where_it_was(
    resources: ResourceManager, float_model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = {"lora": LORA, **options}
    base = dequantised(float_model, tmp_path / "base") if "quantization" in options["lora"] else float_model
    plain = adapted(base)
    frozen = {name: weight.clone() for name, weight in PlainCritic(base).parameters().items()}
    for seed in (0, 1, 2):
        plain.step(seed)
    with critic_engine(resources, float_model, **options) as critic:
        learn(critic, seed=0)
        learn(critic, seed=1)
        (saved := tmp_path / "saved").mkdir()
        critic.engine.save(saved)
        learn(critic, seed=3)  # away from where the checkpoint was taken
    with critic_engine(resources, float_model, **options) as critic:
        critic.engine.load(saved)
        learn(critic, seed=2)
        merged = parameters(critic)  # adapters are merged into what is read
        samples = ragged_policy_samples(seed=2)
        values = critic.values(samples)
    for sample, mine in zip(samples, values, strict=True):
        with torch.no_grad():
            expected = plain.values(sample).numpy()
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(mine[sample.loss_mask], expected, atol=1e-5)
    moved = {name for name, weight in merged.items() if float((weight - frozen[name]).abs().max()) > 1e-7}
    assert moved == {name for name in merged if "_proj" in name or name.startswith("head.")}
    # adapters, head and two moments each: the frozen backbone is in no checkpoint
    trained = sum(4 * sum(weight.shape) for name, weight in merged.items() if "_proj" in name) + 65
    assert sum(file.stat().st_size for file in saved.rglob("*.pt")) < 4 * 4 * trained + 200_000


def test_a_layer_that_the_critic_lacks_is_named_with_its_key(resources: ResourceManager, float_model: Path) -> None:
    with (
        pytest.raises(EngineError, match=r"critic\.lora\.target_modules: the model has no linear layer 'qkv'"),
        critic_engine(resources, float_model, lora={"target_modules": ["qkv"]}),
    ):
        pass
