"""The training backend `fsdp2` on ranks without Ray: updates of a plain PyTorch loop, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks
from rank_specs import cpu_rank
from tests_support import (
    answer_logprobs,
    ragged_policy_samples,  # type: ignore[import-not-found]
)
from tiny_families import make_family
from trained_weights import largest_difference
from transformers import AutoModelForCausalLM

from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.config.training import TrainingConfig
from roll_like.errors import CheckpointError
from roll_like.models.checkpoint_names import converted
from roll_like.models.modules import persistent_buffers
from roll_like.run.export import merged_weights
from roll_like.training.backend import COLLECTIVE_TIMEOUT
from roll_like.training.interface import RankSpec, Share
from roll_like.training.rank import TrainingRank
from roll_like.values import reduce

pytestmark = pytest.mark.integration
OPTIMIZER = {"lr": 1e-2, "max_grad_norm": 0.5, "eps": 1e-2, "weight_decay": 0.01}
Weights = dict[str, torch.Tensor]


def start(rank: int, ranks: int, address: Any, model: str, dtype: str, options: dict[str, Any]) -> TrainingRank:
    settings = TrainingConfig(backend="fsdp2", workers=ranks, zero_stage=3, optimizer=OPTIMIZER, **options)
    spec: RankSpec[Any] = cpu_rank(SupervisedObjective(settings=settings, packing=True), model, dtype=dtype)
    trainer = TrainingRank(spec, rank, ranks)
    trainer.start(address)
    return trainer


def share_of(trainer: TrainingRank, seed: int) -> Share[Any]:
    engine: Any = SimpleNamespace(layout=trainer._objective.layout(trainer.world_size))
    (update,) = trainer._objective.updates(ragged_policy_samples(seed=seed), engine)
    place = trainer.rank // trainer._settings.sharing
    return Share(batches=update.shards[place], shared=update.shared)


def learn(trainer: TrainingRank, seed: int) -> dict[str, float]:
    share = share_of(trainer, seed)
    assert trainer.world_size > 1 or len(share.batches) > 1
    report = reduce(trainer.forward_backward(share))
    return {**report, **reduce(trainer.optimizer_step())}


def weights_of(trainer: TrainingRank) -> Weights:
    return {name: tensor.float().clone() for name, tensor in trainer.full_weights()}


def train(
    rank: int, ranks: int, address: Any, model: str, dtype: str, folder: str, options: dict[str, Any]
) -> tuple[list[dict[str, float]], Weights, Weights]:
    """Three steps, with a checkpoint after the second; return reports, and weights after the second and the third."""
    trainer = start(rank, ranks, address, model, dtype, options)
    reports = [learn(trainer, 0), learn(trainer, 1)]
    trainer.save(folder)
    between = weights_of(trainer)
    for state in ("optimizer", "weights"):
        trainer.offload(state)  # type: ignore[arg-type]
    assert not any(each.untyped_storage().nbytes() for each in trainer._backend.tensors("weights") if each.numel() > 32)
    for state in ("weights", "optimizer"):
        trainer.reload(state)  # type: ignore[arg-type]
    reports.append(learn(trainer, 2))
    found = weights_of(trainer)
    trainer.close()
    return reports, between, found


def resume(
    rank: int, ranks: int, address: Any, model: str, dtype: str, folder: str, options: dict[str, Any]
) -> tuple[dict[str, float], Weights]:
    trainer = start(rank, ranks, address, model, dtype, options)
    trainer.load(folder)
    report, found = learn(trainer, 2), weights_of(trainer)
    trainer.close()
    return report, found


def plain_loop(model: Path) -> tuple[list[float], list[float], Weights]:
    """Losses and gradient norms of three steps of plain PyTorch, and the weights after them."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rate, eps, decay = OPTIMIZER["lr"], OPTIMIZER["eps"], OPTIMIZER["weight_decay"]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, eps=eps, weight_decay=decay)
    losses, norms = [], []
    for seed in range(3):
        samples = ragged_policy_samples(seed=seed)
        tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        loss = -sum(answer_logprobs(policy, sample).sum() for sample in samples) / tokens
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), OPTIMIZER["max_grad_norm"])))
        optimizer.step()
        losses.append(float(loss.detach()))
    tensors = converted(policy, [*policy.named_parameters(), *persistent_buffers(policy)])
    return losses, norms, {name: tensor.detach().clone() for name, tensor in tensors}


def close(left: Sequence[float], right: Sequence[float]) -> bool:
    return list(left) == pytest.approx(list(right), rel=1e-4)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {"max_tokens_per_micro_batch": 96}, marks=pytest.mark.slow),
        (2, {"max_tokens_per_micro_batch": 64, "gradient_checkpointing": True}),
    ],
)
def test_updates_are_those_of_a_plain_loop_and_resume_on_any_number_of_ranks(
    float_model: Path, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    losses, norms, expected = plain_loop(float_model)
    arguments = (str(float_model), "float32", str(tmp_path), options)
    (reports, between, found), *others = on_ranks(train, *arguments, ranks=ranks)
    assert close([sum(each[0][step]["train/loss"] for each in ((reports,), *others)) for step in range(3)], losses)
    assert close([report["train/grad_norm"] for report in reports], norms)
    assert min(norms) > OPTIMIZER["max_grad_norm"], "clipped"
    assert largest_difference(found, expected) < 2e-6
    merged = {name: tensor for name, tensor in merged_weights(tmp_path, "fsdp2").items() if name in between}
    assert largest_difference(merged, between) == 0.0
    for again in (ranks, 3 - ranks):
        (_, resumed), *_ = on_ranks(resume, *arguments, ranks=again)
        difference = largest_difference(resumed, found)
        assert difference == 0.0 if again == ranks else difference < 1e-6


def save_another(rank: int, ranks: int, address: Any, model: str, folder: str) -> None:
    """Save a checkpoint of which one moment is changed after its sums were taken."""
    trainer = start(rank, ranks, address, model, "float32", {"max_tokens_per_micro_batch": 64})
    learn(trainer, 0)
    backend: Any = trainer._backend
    sums, states = backend._sums(), backend._states()
    name = next(name for name in states if name.startswith("optimizer.exp_avg_sq."))
    states[name].mul_(2.0)
    backend._sums = lambda: sums
    trainer.save(folder)
    trainer.close()


def refused(rank: int, ranks: int, address: Any, model: str, folder: str) -> str:
    trainer = start(rank, ranks, address, model, "float32", {"max_tokens_per_micro_batch": 64})
    try:
        trainer.load(folder)
    except CheckpointError as error:
        return str(error)
    finally:
        trainer.close()
    return "loaded"


@pytest.mark.slow
def test_what_arrives_on_other_ranks_is_compared_with_what_was_written(float_model: Path, tmp_path: Path) -> None:
    on_ranks(save_another, str(float_model), str(tmp_path), ranks=2)
    for ranks in (1, 2):
        for said in on_ranks(refused, str(float_model), str(tmp_path), ranks=ranks):
            assert "what was loaded is not what was written: the sum of exp_avg_sq is" in said


@pytest.mark.parametrize(
    ("ranks", "dtype", "options"),
    [(1, "bfloat16", {}), (2, "bfloat16", {"lora": {"rank": 4, "dropout": 0.3}})],
)
@pytest.mark.slow
def test_a_resumed_rank_goes_on_bit_for_bit(
    float_model: Path, tmp_path: Path, ranks: int, dtype: str, options: dict[str, Any]
) -> None:
    arguments = (str(float_model), dtype, str(tmp_path), {"max_tokens_per_micro_batch": 64, **options})
    (reports, between, found), *_ = on_ranks(train, *arguments, ranks=ranks)
    assert largest_difference(between, found) > 1e-3
    assert reports[2]["train/loss"] < reports[0]["train/loss"] + 0.5
    (report, resumed), *_ = on_ranks(resume, *arguments, ranks=ranks)
    assert largest_difference(resumed, found) == 0.0
    assert report["train/grad_norm"] == reports[2]["train/grad_norm"]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {}),
        ("gpt_oss", {}),
        ("qwen3", {"sequence_parallel": 2}),
    ],
)
@pytest.mark.slow
def test_mixtures_and_ranks_that_share_rows(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    model = make_family(family, tmp_path / "model")
    _, norms, expected = plain_loop(model)
    arguments = (str(model), "float32", str(tmp_path), {"max_tokens_per_micro_batch": 64, **options})
    for reports, _, found in on_ranks(train, *arguments):
        assert close([report["train/grad_norm"] for report in reports], norms)
        assert largest_difference(found, expected) < 5e-6


def held_experts(
    rank: int, ranks: int, address: Any, model: str, options: dict[str, Any]
) -> tuple[list[list[int]], set[timedelta]]:
    """What a rank holds of each tensor of experts, and the time-outs of its process groups."""
    trainer = start(rank, ranks, address, model, "float32", options)
    found = [
        list(parameter.to_local().shape)
        for name, parameter in trainer._backend.module.named_parameters()
        if ".experts." in name
    ]
    groups = torch.distributed.distributed_c10d._world.pg_map
    limits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    trainer.close()
    return found, limits


@pytest.mark.parametrize(
    ("family", "ranks", "options"),
    [
        ("qwen3_moe", 2, {"expert_parallel": 2, "gradient_checkpointing": True}),
        pytest.param("gpt_oss", 4, {"expert_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", 2, {"expert_parallel": 2, "sequence_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 4, {"expert_parallel": 4}, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_divide_experts_learn_as_one_does_and_resume_on_others(
    tmp_path: Path, family: str, ranks: int, options: dict[str, Any]
) -> None:
    model = make_family(family, tmp_path / "model")
    losses, norms, expected = plain_loop(model)
    options = {"max_tokens_per_micro_batch": 64, **options}
    arguments = (str(model), "float32", str(tmp_path), options)
    results = on_ranks(train, *arguments, ranks=ranks)
    sharing = options.get("sequence_parallel", 1)
    for step, loss in enumerate(losses):
        assert sum(reports[step]["train/loss"] for reports, *_ in results[::sharing]) == pytest.approx(loss, rel=1e-4)
    for reports, _, found in results:
        assert close([report["train/grad_norm"] for report in reports], norms)
        # a bias of the router is a buffer, which is sent as well
        assert largest_difference({name: found[name] for name in expected}, expected) < 5e-6
    _, between, found = results[0]
    policy = AutoModelForCausalLM.from_pretrained(model)
    merged = dict(converted(policy, merged_weights(tmp_path, "fsdp2").items()))
    assert largest_difference(merged, between) == 0.0
    whole = (str(model), "float32", str(tmp_path), {"max_tokens_per_micro_batch": 96})
    for again, own in ((1, whole), (ranks, arguments)):
        (_, resumed), *_ = on_ranks(resume, *own, ranks=again)
        assert largest_difference(resumed, found) < (1e-6 if again == 1 else 1e-30)


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2)])
@pytest.mark.slow
def test_a_rank_holds_its_share_of_the_experts(tmp_path: Path, ranks: int, size: int) -> None:
    model = make_family("qwen3_moe", tmp_path / "model")
    experts, width, inner = 4, 64, 64
    for found, limits in on_ranks(held_experts, str(model), {"expert_parallel": size}, ranks=ranks):
        others = ranks // size
        assert limits == {COLLECTIVE_TIMEOUT}
        assert found == 2 * [[experts // size, 2 * inner // others, width], [experts // size, width // others, inner]]


def stubborn(rank: int, ranks: int, address: Any, model: str, folder: str) -> list[str]:
    """Load what does not fit, and save what no step was taken for."""
    trainer = start(rank, ranks, address, model, "float32", {"max_tokens_per_micro_batch": 96})
    before = weights_of(trainer)
    trainer.save(f"{folder}/fresh")
    learn(trainer, 0)
    trainer.load(f"{folder}/fresh")
    assert largest_difference(weights_of(trainer), before) == 0.0
    assert not trainer._backend._states()  # type: ignore[attr-defined]
    found = []
    for name in ("nothing", "adapters"):
        try:
            trainer.load(f"{folder}/{name}")
        except CheckpointError as error:
            found.append(str(error))
    trainer.close()
    return found


def save_adapters(rank: int, ranks: int, address: Any, model: str, folder: str) -> None:
    trainer = start(rank, ranks, address, model, "float32", {"lora": {"rank": 2}})
    trainer.save(folder)
    trainer.close()


@pytest.mark.slow
def test_checkpoints_that_do_not_fit_say_so(float_model: Path, tmp_path: Path) -> None:
    for name in ("fresh", "adapters"):
        (tmp_path / name).mkdir()
    on_ranks(save_adapters, str(float_model), str(tmp_path / "adapters"), ranks=1)
    ((nothing, adapters),) = on_ranks(stubborn, str(float_model), str(tmp_path), ranks=1)
    assert "cannot read its checkpoint" in nothing
    assert (
        "of another model or of other adapters, or of another optimizer: missing tensors: weight.causal_lm" in adapters
    )
