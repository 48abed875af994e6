"""The real training backends in Ray actors: one update is the same update however it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_specs import cpu_rank
from tensor_memory import tensor_bytes
from tests_support import policy_sample  # type: ignore[import-not-found]
from tests_support import ragged_policy_samples as batch
from trained_weights import largest_difference, trained_weights
from transformers import AutoModelForCausalLM
from warm_workers import HOSTS

from roll_like.algorithms.kl import KLController
from roll_like.cluster import ResourceManager
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.resources import DeviceRange
from roll_like.config.training import TrainingConfig
from roll_like.policy_gradient.objective import PolicyObjective
from roll_like.run.export import merged_weights
from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import TrainingRank
from roll_like.training.start import start_engine
from roll_like.values import reduce

pytestmark = pytest.mark.integration
LR = 1e-2


@contextmanager
def engine(
    resources: ResourceManager,
    model: Path,
    *,
    workers: int = 1,
    dtype: str = "float32",
    algorithm: dict[str, Any] | None = None,
    max_tokens: int = 4096,
    share_prompts: bool = True,
    **training: Any,
) -> Iterator[TrainingEngine[Any]]:
    config = TrainingConfig(
        workers=workers,
        max_tokens_per_micro_batch=max_tokens,
        share_prompts=share_prompts,
        optimizer={"lr": LR, "max_grad_norm": 1000.0, "eps": 1e-2},
        **training,
    )
    settings = AlgorithmConfig(**(algorithm or {}))
    objective = PolicyObjective(
        settings=config, algorithm=settings, max_response_tokens=16, kl=KLController(settings.kl)
    )
    spec = cpu_rank(objective, model, dtype=dtype)
    with ExitStack() as stack:
        yield start_engine("training", spec, resources, DeviceRange.model_validate("0-1"), stack=stack)


def weights(trainer: TrainingEngine[Any]) -> dict[str, torch.Tensor]:
    return trained_weights(trainer.cluster)


#: A loss and a correction over turns, away from the policy that sampled: what is put together wrongly shows.
OF_TURNS = {
    "loss": {"type": "gspo", "unit": "turn", "clip_low": 0.5, "clip_high": 1.0},
    "old_logprobs": "behaviour",
    "correction": {"type": "none", "reject": {"level": "turn_max", "high": 3.0}},
}


@pytest.fixture(scope="module")
def reference_update(resources: ResourceManager, float_model: Path) -> tuple[dict[str, torch.Tensor], float]:
    """One step by the plainest path: one rank, one padded sequence a row, everything in one micro-batch."""
    with engine(resources, float_model, share_prompts=False, algorithm=OF_TURNS) as trainer:
        report = reduce(trainer.train_step(batch()))
        assert report["train/ratio"] != pytest.approx(1.0, abs=0.01)
        return weights(trainer), report["train/grad_norm"]


CHUNKS = {"logprob_chunk_tokens": 7, "logprob_chunk_vocab": 100}


@pytest.mark.parametrize(
    ("workers", "zero_stage", "options"),
    [
        (1, 0, {}),
        pytest.param(1, 1, {"max_tokens": 48}, marks=pytest.mark.slow),
        pytest.param(1, 2, {"max_tokens": 48}, marks=pytest.mark.slow),
        (1, 3, {"max_tokens": 96}),
        pytest.param(2, 0, {"max_tokens": 48}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"share_prompts": False, "max_tokens": 64}, marks=pytest.mark.slow),
        (2, 2, {"max_tokens": 48, "gradient_checkpointing": True}),
        (2, 3, {"max_tokens": 96, "attention": "varlen", "gradient_checkpointing": True}),
        pytest.param(2, 0, {"max_tokens": 48, "sequence_parallel": 2}, marks=pytest.mark.slow),
        (2, 3, {"max_tokens": 48, "sequence_parallel": 2, "gradient_checkpointing": True}),
        pytest.param(2, 3, {"max_tokens": 48, **CHUNKS}, marks=pytest.mark.slow),
        pytest.param(1, 3, {"max_tokens": 96, "backend": "fsdp2"}, marks=pytest.mark.slow),
        (2, 3, {"max_tokens": 96, "backend": "fsdp2", "attention": "varlen", "gradient_checkpointing": True}),
        (2, 3, {"max_tokens": 48, "backend": "fsdp2", **CHUNKS}),
        # what a GPU would give up is in host memory here already; DeepSpeed takes the same paths
        pytest.param(1, 1, {"max_tokens": 48, "offload": "optimizer"}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"max_tokens": 48, "offload": "optimizer"}, marks=pytest.mark.slow),
        pytest.param(2, 3, {"max_tokens": 48, "offload": "optimizer"}, marks=pytest.mark.slow),
        (2, 3, {"max_tokens": 48, "offload": "optimizer_and_parameters"}),
    ],
)
def test_one_update_is_the_same_however_it_is_computed(
    resources: ResourceManager,
    float_model: Path,
    reference_update: tuple[dict[str, torch.Tensor], float],
    workers: int,
    zero_stage: int,
    options: dict[str, Any],
) -> None:
    expected, norm = reference_update
    options = {**options, "algorithm": OF_TURNS}
    with engine(resources, float_model, workers=workers, zero_stage=zero_stage, **options) as trainer:
        report = reduce(trainer.train_step(batch()))
        # the large eps keeps Adam's first step from being the sign of the gradient's last bits
        assert largest_difference(weights(trainer), expected) < 1e-6
        assert report["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
def test_a_row_of_32k_tokens_divided_between_two_ranks(
    resources: ResourceManager, float_model: Path, backend: str
) -> None:
    """Two responses to one long prompt: a mask of all tokens would take 4 GiB."""
    random = np.random.default_rng(0)
    prompt = random.integers(5, 400, 20_000)
    samples = []
    for length, advantage in ((8_768, 1.0), (4_000, -0.5)):
        sample = policy_sample(group="long", prompt=len(prompt), response=length, advantage=advantage)
        tokens = np.concatenate([prompt, random.integers(5, 400, length)]).astype(np.int32)
        samples.append(replace(sample, token_ids=tokens))
    options = {"max_tokens": 32_768, "attention": "varlen", "gradient_checkpointing": True, "zero_stage": 3}
    with engine(resources, float_model, **{**options, "zero_stage": 0}) as trainer:
        expected = reduce(trainer.train_step(samples))
        assert expected["train/computed_tokens"] > 32_000
        plain = weights(trainer)
    with engine(resources, float_model, workers=2, sequence_parallel=2, backend=backend, **options) as trainer:
        report = reduce(trainer.train_step(samples))
        assert report["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-4)
        assert report["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
        assert largest_difference(weights(trainer), plain) < 1e-5


@pytest.mark.parametrize(
    ("workers", "zero_stage", "dtype", "backend"),
    [
        (1, 0, "float32", "deepspeed"),
        (1, 0, "bfloat16", "deepspeed"),
        pytest.param(2, 1, "bfloat16", "deepspeed", marks=pytest.mark.slow),
        pytest.param(2, 2, "bfloat16", "deepspeed", marks=pytest.mark.slow),
        (2, 3, "bfloat16", "deepspeed"),
        pytest.param(1, 3, "float32", "deepspeed", marks=pytest.mark.slow),
        (2, 3, "bfloat16", "fsdp2"),
        pytest.param(1, 3, "float32", "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_bit_for_bit_after_states_were_in_host_memory(
    resources: ResourceManager, float_model: Path, workers: int, zero_stage: int, dtype: str, backend: str
) -> None:
    options = {"workers": workers, "zero_stage": zero_stage, "dtype": dtype, "backend": backend}

    def trained(*, moves: bool) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
        reports = []
        with engine(resources, float_model, **options) as trainer:
            for _ in range(3):
                reports.append(reduce(trainer.train_step(batch())))
                if moves:
                    trainer.offload("optimizer")
                    trainer.logprobs(batch())  # computed while the optimizer is away
                    trainer.offload("weights")
                    trainer.reload("weights")
                    trainer.reload("optimizer")
            return weights(trainer), reports

    (moved, moved_reports), (stayed, reports) = trained(moves=True), trained(moves=False)
    assert all(torch.equal(moved[name], stayed[name]) for name in stayed)
    assert [report["train/grad_norm"] for report in moved_reports] == [report["train/grad_norm"] for report in reports]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "backend"), [(2, "deepspeed"), (1, "fsdp2")])
def test_a_frozen_base_moves_with_its_adapters(
    resources: ResourceManager,
    float_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    backend: str,
) -> None:
    """Of a base that is not sharded, a CPU maps the files, which a GPU does not: it has a copy."""
    monkeypatch.delitem(HOSTS, TrainingRank)  # processes that have had no other engine before
    options = {"workers": workers, "zero_stage": 3, "backend": backend, "lora": {"rank": 4}}
    with engine(resources, float_model, **options) as trainer:
        trainer.train_step(batch())
        before = trainer.logprobs(batch())
        trainer.offload("optimizer")
        trainer.offload("weights")
        assert trainer.cluster.everywhere(TrainingRank.ask, tensor_bytes) == [0] * workers
        trainer.reload("weights")
        trainer.reload("optimizer")
        assert all(np.array_equal(*pair) for pair in zip(trainer.logprobs(batch()), before, strict=True))
        trainer.train_step(batch())


@pytest.mark.parametrize(
    ("workers", "zero_stage", "backend"),
    [
        pytest.param(1, 0, "deepspeed", marks=pytest.mark.slow),
        pytest.param(2, 3, "deepspeed", marks=pytest.mark.slow),
        (2, 3, "fsdp2"),
    ],
)
def test_no_tensor_holds_memory_while_states_are_in_host_memory(
    resources: ResourceManager,
    float_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    zero_stage: int,
    backend: str,
) -> None:
    monkeypatch.delitem(HOSTS, TrainingRank)  # processes that have had no other engine before
    options = {"workers": workers, "zero_stage": zero_stage, "dtype": "bfloat16", "backend": backend}
    with engine(resources, float_model, **options) as trainer:
        trainer.train_step(batch())
        held = trainer.cluster.everywhere(TrainingRank.ask, tensor_bytes)
        trainer.offload("optimizer")
        between = trainer.cluster.everywhere(TrainingRank.ask, tensor_bytes)
        assert all(0 < left < 0.5 * before for left, before in zip(between, held, strict=True))
        trainer.offload("weights")
        assert trainer.cluster.everywhere(TrainingRank.ask, tensor_bytes) == [0] * workers


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
def test_log_probabilities_equal_a_plain_forward_pass(
    resources: ResourceManager, float_model: Path, backend: str
) -> None:
    samples = batch()
    model = AutoModelForCausalLM.from_pretrained(float_model, dtype=torch.float32)
    with engine(resources, float_model, workers=2, zero_stage=3, max_tokens=64, backend=backend) as trainer:
        computed = trainer.logprobs(samples)
    for sample, mine in zip(samples, computed, strict=True):
        ids = torch.from_numpy(sample.token_ids).long()[None]
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        expected = np.concatenate([[0.0], logprobs.numpy()])
        np.testing.assert_allclose(mine, np.where(sample.loss_mask, expected, 0), atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "sharding"),
    [
        ("bfloat16", {"zero_stage": 1}),
        ("float32", {"zero_stage": 1}),
        ("bfloat16", {"zero_stage": 3, "backend": "fsdp2", "workers": 2}),
        pytest.param("float32", {"zero_stage": 3, "backend": "fsdp2"}, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_engine_goes_on_bit_for_bit(
    resources: ResourceManager, float_model: Path, tmp_path: Path, dtype: str, sharding: dict[str, Any]
) -> None:
    options = {"dtype": dtype, "max_tokens": 64, **sharding}
    with engine(resources, float_model, **options) as trainer:
        trainer.train_step(batch(seed=1))
        trainer.save(tmp_path)
        trainer.train_step(batch(seed=2))
        expected = weights(trainer)
    with engine(resources, float_model, **options) as trainer:
        trainer.load(tmp_path)
        trainer.train_step(batch(seed=2))
        assert largest_difference(weights(trainer), expected) == 0.0


@pytest.mark.parametrize(
    ("workers", "zero_stage", "dtype", "backend"),
    [(1, 1, "bfloat16", "deepspeed"), (2, 3, "float32", "deepspeed"), (2, 3, "float32", "fsdp2")],
)
def test_a_checkpoints_shards_merge_to_the_engines_weights(
    resources: ResourceManager,
    float_model: Path,
    tmp_path: Path,
    workers: int,
    zero_stage: int,
    dtype: str,
    backend: str,
) -> None:
    options = {"workers": workers, "zero_stage": zero_stage, "dtype": dtype, "backend": backend}
    with engine(resources, float_model, **options) as trainer:
        trainer.train_step(batch())
        trainer.save(tmp_path)
        expected = weights(trainer)
    found = merged_weights(tmp_path, backend)  # of the optimizer, in float32
    merged = {name: found[name].to(getattr(torch, dtype)).float() for name in found if name in expected}
    assert largest_difference(merged, expected) == 0.0


#: Leaves out a part of the tokens whose advantage goes with their log-probability.
CLIP_COV = {"loss": {"type": "clip_cov", "fraction": 0.1, "low": 0.0, "high": 100.0}}


@pytest.fixture(scope="module")
def whole_batch_update(resources: ResourceManager, float_model: Path) -> dict[str, torch.Tensor]:
    with engine(resources, float_model, share_prompts=False, algorithm=CLIP_COV) as trainer:
        report = reduce(trainer.train_step(batch()))
        assert 0.05 < report["train/covariance_fraction"] <= 0.1
        return weights(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "zero_stage", "max_tokens"), [(1, 0, 48), (2, 0, 48), (2, 3, 96)])
def test_a_loss_over_the_whole_batch_sees_all_of_it(
    resources: ResourceManager,
    float_model: Path,
    reference_update: tuple[dict[str, torch.Tensor], float],
    whole_batch_update: dict[str, torch.Tensor],
    workers: int,
    zero_stage: int,
    max_tokens: int,
) -> None:
    options = {"workers": workers, "zero_stage": zero_stage, "max_tokens": max_tokens, "algorithm": CLIP_COV}
    with engine(resources, float_model, **options) as trainer:
        trainer.train_step(batch()[::-1])
        assert largest_difference(weights(trainer), whole_batch_update) < 1e-6
        assert largest_difference(weights(trainer), reference_update[0]) > 1e-4


def test_several_updates_use_the_old_policy(resources: ResourceManager, float_model: Path) -> None:
    samples = batch()[:12]
    with engine(resources, float_model, algorithm={"updates_per_step": 2}) as trainer:
        metrics = reduce(trainer.train_step(samples))
    assert metrics["train/updates"] == 2
    # the second update's ratios compare with the policy before the first
    assert metrics["train/old_kl"] > 0


def test_a_model_that_cannot_load_says_why(resources: ResourceManager, tmp_path: Path) -> None:
    from roll_like.errors import RollLikeError

    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(RollLikeError, match="nonsense"), engine(resources, tmp_path):
        pass
