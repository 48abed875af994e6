"""Adapters in the real DeepSpeed engines: their updates are those of peft in a plain loop, however computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dequantised import dequantised
from peft import LoraConfig, PeftModel, get_peft_model
from rank_specs import cpu_rank
from tests_support import answer_logprobs, pairs_of, ragged_policy_samples  # type: ignore[import-not-found]
from trained_weights import sent_adapters, trained_weights
from transformers import AutoModelForCausalLM

from roll_like.algorithms.kl import KLController
from roll_like.builtin.pipelines.dpo.objective import PairedObjective, PairStep, whole_logprobs
from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.cluster import ResourceManager
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.model import ModelConfig
from roll_like.config.resources import DeviceRange
from roll_like.config.training import TrainingConfig
from roll_like.inference.weight_transfer.fingerprint import fingerprint
from roll_like.models.card import ModelCard
from roll_like.policy_gradient.objective import PolicyObjective
from roll_like.registry import PREFERENCE_LOSSES
from roll_like.run.export import merged_weights
from roll_like.training.engine import TrainingEngine, WithoutAdapters
from roll_like.training.rank import TrainingRank
from roll_like.training.start import start_engine
from roll_like.types import PolicySample, TrainingSample
from roll_like.values import reduce

pytestmark = pytest.mark.integration
LR, EPS, SEED = 3e-2, 1e-3, 5
SPAN = DeviceRange.model_validate("0-1")
LORA = {"rank": 4, "alpha": 8}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def frozen(float_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(float_model, dtype=torch.float32)


def settings(**training: Any) -> TrainingConfig:
    lora = LORA | training.pop("lora", {})
    return TrainingConfig(lora=lora, optimizer={"lr": LR, "max_grad_norm": 1000.0, "eps": EPS}, **training)


def supervised(
    resources: ResourceManager, model: Path, stack: ExitStack, dtype: str = "float32", **training: Any
) -> TrainingEngine[Any]:
    objective = SupervisedObjective(settings=settings(**training), packing=True)
    return start_engine("training", cpu_rank(objective, model, dtype=dtype, seed=SEED), resources, SPAN, stack=stack)


def weights_of(engine: Any) -> Weights:
    return trained_weights(engine.cluster)


def largest_difference(left: Weights, right: Weights) -> float:
    assert list(left) == list(right)
    return max(float((left[name] - right[name]).detach().abs().max()) for name in left)


def plain_loop(model: Path, updates: Sequence[Callable[[Any], torch.Tensor]]) -> tuple[list[float], Weights]:
    """Losses of AdamW steps on peft's own model, and the weights that peft merges at the end."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    names = [name for name, _ in base.named_parameters()]
    torch.manual_seed(SEED)
    peft = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=LR, eps=EPS, weight_decay=0.0)
    losses = []
    for loss_of in updates:
        optimizer.zero_grad()
        loss = loss_of(peft)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    merged = dict(peft.merge_and_unload().named_parameters())
    return losses, {name: merged[name].detach().clone() for name in names}


def batches() -> list[list[PolicySample]]:
    return [ragged_policy_samples(seed=seed) for seed in (0, 1, 2)]


def likelihood(samples: Sequence[PolicySample]) -> Callable[[Any], torch.Tensor]:
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    return lambda model: -sum(answer_logprobs(model, sample).sum() for sample in samples) / tokens


@pytest.fixture(scope="module")
def plain(float_model: Path) -> tuple[list[float], Weights]:
    return plain_loop(float_model, [likelihood(samples) for samples in batches()])


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"workers": 2, "zero_stage": 1, "max_tokens_per_micro_batch": 48}, marks=pytest.mark.slow),
        pytest.param(
            {"zero_stage": 2, "max_tokens_per_micro_batch": 64, "gradient_checkpointing": True},
            marks=pytest.mark.slow,
        ),
        {"workers": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 64, "gradient_checkpointing": True},
        {"workers": 2, "zero_stage": 3, "backend": "fsdp2", "gradient_checkpointing": True},
    ],
)
def test_supervised_updates_are_those_of_peft(
    resources: ResourceManager,
    float_model: Path,
    frozen: Any,
    plain: tuple[list[float], Weights],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    updates_are_those_of_peft(resources, float_model, frozen, plain, options, tmp_path)


def updates_are_those_of_peft(
    resources: ResourceManager,
    model: Path,
    frozen: Any,
    plain: tuple[list[float], Weights],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Compare an engine's losses, weights and checkpoint with those of a plain loop from the weights of `frozen`."""
    losses, weights = plain
    first, second, third = batches()
    with ExitStack() as stack:
        trainer = supervised(resources, model, stack, **options)
        assert largest_difference(weights_of(trainer), dict(frozen.named_parameters())) == 0.0
        found = [reduce(trainer.train_step(samples))["train/loss"] for samples in (first, second)]
        trainer.save(tmp_path)
        trainer.train_step(first)  # away from where the checkpoint was taken, and back
        trainer.load(tmp_path)
        report = reduce(trainer.train_step(third))
        assert [*found, report["train/loss"]] == pytest.approx(losses, rel=1e-5)
        assert report["train/grad_norm"] > 0
        moved = weights_of(trainer)
        adapters, base = sent_adapters(trainer.cluster)
        if trainer.objective.settings.lora.quantization is not None:
            held = trainer.cluster.everywhere(TrainingRank.state_bytes)
            trainer.cluster.everywhere(TrainingRank.offload, "weights")
            assert trainer.cluster.everywhere(TrainingRank.state_bytes) == held
            trainer.cluster.everywhere(TrainingRank.reload, "weights")
            assert largest_difference(weights_of(trainer), moved) == 0.0
    assert largest_difference(moved, weights) < 2e-6
    assert largest_difference(moved, dict(frozen.named_parameters())) > 1e-2
    # what an engine is sent of adapters alone gives the same matrices, and it is told of the weights beside them once
    assert base == {name: fingerprint(weight, 0) for name, weight in frozen.named_parameters()}
    products = {
        down.replace("lora_A.", ""): adapters[down.replace("lora_A", "lora_B")] @ matrix
        for down, matrix in adapters.items()
        if "lora_A" in down
    }
    assert len(products) == len(adapters) / 2 == sum("_proj" in name for name in weights)
    with torch.no_grad():
        merged = {name: weight + products.get(name, 0.0) for name, weight in frozen.named_parameters()}
    assert largest_difference(moved, merged) < 1e-6
    # adapters, their two moments and little else: the frozen model is not written again
    adapters = sum(4 * 4 * sum(weight.shape) for name, weight in weights.items() if "_proj" in name)
    if options.get("backend") == "fsdp2":
        assert all(".lora_" in name for name in merged_weights(tmp_path, "fsdp2"))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.pt")) < 4 * adapters + 100_000 * 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"workers": 2, "zero_stage": 1, "max_tokens_per_micro_batch": 48},
        pytest.param({"workers": 2, "zero_stage": 2, "gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_beside_a_quantised_base_updates_are_those_of_peft_beside_the_dequantised_one(
    resources: ResourceManager, float_model: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    directory = dequantised(float_model, tmp_path / "dequantised")
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    plain = plain_loop(directory, [likelihood(samples) for samples in batches()])
    options = {**options, "lora": {"quantization": "nf4"}}
    (checkpoint := tmp_path / "checkpoint").mkdir()
    updates_are_those_of_peft(resources, float_model, base, plain, options, checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"zero_stage": 1}, "bfloat16"),
        ({"zero_stage": 0, "lora": {"quantization": "nf4"}}, "bfloat16"),
        ({"workers": 2, "zero_stage": 2, "lora": {"quantization": "nf4"}}, "bfloat16"),
        ({"workers": 2, "zero_stage": 3}, "float32"),
        ({"workers": 2, "zero_stage": 3, "backend": "fsdp2"}, "bfloat16"),
    ],
)
def test_a_resumed_engine_goes_on_bit_for_bit_and_its_adapter_is_the_export(
    resources: ResourceManager, float_model: Path, tmp_path: Path, options: dict[str, Any], dtype: str
) -> None:
    first, second, _ = batches()
    options = dict(options)
    lora = {"dropout": 0.3, "init": "gaussian", "rslora": True, "alpha": 6, **options.pop("lora", {})}
    options = {**options, "lora": lora}
    with ExitStack() as stack:
        trainer = supervised(resources, float_model, stack, dtype, **options)
        trainer.train_step(first)
        trainer.save(tmp_path)
        trainer.train_step(second)
        expected = weights_of(trainer)
        card = ModelCard(name="tiny", base_model=str(float_model), pipeline="sft", steps=2)
        model = ModelConfig(path=str(float_model))
        trainer.cluster.everywhere(TrainingRank.export, str(tmp_path / "model"), model, card)
        logprobs = trainer.logprobs(first)
        assert all(np.array_equal(*pair) for pair in zip(logprobs, trainer.logprobs(first), strict=True))  # no dropout
    with ExitStack() as stack:
        trainer = supervised(resources, float_model, stack, dtype, **options)
        trainer.load(tmp_path)
        trainer.train_step(second)
        assert largest_difference(weights_of(trainer), expected) == 0.0

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    if "quantization" in lora:
        float_model = dequantised(float_model, tmp_path / "dequantised", dtype)
    base = AutoModelForCausalLM.from_pretrained(float_model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "model" / "adapter")
    tolerance = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    for sample, mine in zip(first, logprobs, strict=True):
        with torch.no_grad():
            whole, beside = answer_logprobs(merged, sample), answer_logprobs(adapted, sample)
        assert float((whole - beside).abs().max()) < tolerance
        assert float((whole - torch.from_numpy(mine[sample.loss_mask])).abs().max()) < 3 * tolerance


def weighted_advantages(samples: Sequence[PolicySample]) -> Callable[[Any], torch.Tensor]:
    """The policy gradient on its own samples: no ratio is clipped, because there was no update since."""
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples)

    def loss_of(model: Any) -> torch.Tensor:
        loss = torch.zeros(())
        for sample in samples:
            logprobs = answer_logprobs(model, sample)
            advantages = torch.from_numpy(sample.advantages[sample.loss_mask])
            loss = loss - ((logprobs - logprobs.detach()).exp() * advantages).sum() / tokens
        return loss

    return loss_of


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"zero_stage": 1}, marks=pytest.mark.slow),
        {"workers": 2, "zero_stage": 3},
        {"workers": 2, "zero_stage": 3, "backend": "fsdp2"},
    ],
)
def test_policy_updates_are_those_of_peft_and_the_base_stays_within_reach(
    resources: ResourceManager, float_model: Path, frozen: Any, options: dict[str, Any]
) -> None:
    losses, weights = plain_loop(float_model, [weighted_advantages(samples) for samples in batches()])
    algorithm = AlgorithmConfig(correction={"type": "none"})
    objective = PolicyObjective(
        settings=settings(**options), algorithm=algorithm, max_response_tokens=16, kl=KLController(algorithm.kl)
    )
    spec = cpu_rank(objective, float_model, seed=SEED)
    with ExitStack() as stack:
        trainer = start_engine("training", spec, resources, SPAN, stack=stack)
        reference = WithoutAdapters(trainer)
        found = []
        for samples in batches():
            found.append(reduce(trainer.train_step(samples))["train/policy_loss"])
            before = reference.logprobs(samples)  # between updates: adapters learn on afterwards
        assert found == pytest.approx(losses, abs=1e-6)
        assert largest_difference(weights_of(trainer), weights) < 2e-6
        after = trainer.logprobs(samples)
    for sample, mine, moved in zip(samples, before, after, strict=True):
        with torch.no_grad():
            expected = answer_logprobs(frozen, sample).numpy()
        np.testing.assert_allclose(mine[sample.loss_mask], expected, atol=2e-5)
        assert np.abs(moved - mine).max() > 1e-3


def pairs() -> list[TrainingSample]:
    """Two of the three samples of each prompt."""
    return [
        TrainingSample(
            group_id=each.group_id, token_ids=each.token_ids, prompt_length=each.prompt_length, loss_mask=each.loss_mask
        )
        for index, each in enumerate(ragged_policy_samples())
        if index % 3
    ]


def preference(model: Any) -> torch.Tensor:
    """DPO (arXiv:2305.18290) against the model without its adapters."""
    samples = pairs()
    with torch.no_grad(), model.disable_adapter():
        reference = [float(answer_logprobs(model, sample).sum()) for sample in samples]
    margins = [answer_logprobs(model, sample).sum() - base for sample, base in zip(samples, reference, strict=True)]
    losses = [
        -torch.nn.functional.logsigmoid(0.5 * (one - two)) for one, two in zip(margins[::2], margins[1::2], strict=True)
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    "options", [{"workers": 2, "zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 3, "backend": "fsdp2"}]
)
def test_preference_updates_against_the_model_without_adapters(
    resources: ResourceManager, float_model: Path, options: dict[str, Any]
) -> None:
    losses, weights = plain_loop(float_model, [preference] * 3)
    loss = PREFERENCE_LOSSES.get("dpo").Config.model_validate({"type": "dpo", "beta": 0.5})
    objective = PairedObjective(settings=settings(**options), loss_config=loss)
    answers = pairs()
    with ExitStack() as stack:
        spec = cpu_rank(objective, float_model, seed=SEED)
        trainer = start_engine("training", spec, resources, SPAN, stack=stack)
        base = WithoutAdapters(trainer)
        found = []
        for _ in losses:
            step = PairStep(pairs=pairs_of(answers), reference=whole_logprobs(base, answers))
            found.append(reduce(trainer.train_step(step))["train/loss"])
        assert found == pytest.approx(losses, rel=1e-5)
        assert losses[2] < losses[0] - 0.1
        assert largest_difference(weights_of(trainer), weights) < 2e-6
