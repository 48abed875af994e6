"""A gradient that is not finite leaves every rank as it was, whatever the backend, its stage and its precision."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import on_ranks
from tests_support import ragged_policy_samples  # type: ignore[import-not-found]

from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.config.sections import TrainingConfig
from roll_like.registry import TRAINING_BACKENDS
from roll_like.training.interface import RankSpec, Share
from roll_like.training.rank import TrainingRank, seed_everything
from roll_like.values import reduce

pytestmark = pytest.mark.integration
FSDP2 = {"backend": "fsdp2", "zero_stage": 3}
DROPOUT = {"lora": {"rank": 4, "dropout": 0.3}}
#: Settings of `training` and the precision of each case.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "ZeRO 0, float32": ({"zero_stage": 0}, "float32"),
    "ZeRO 0, bfloat16": ({"zero_stage": 0}, "bfloat16"),
    "ZeRO 1, float32": ({"zero_stage": 1}, "float32"),
    "ZeRO 1, bfloat16": ({"zero_stage": 1}, "bfloat16"),
    "ZeRO 2, float32": ({"zero_stage": 2}, "float32"),
    "ZeRO 2, bfloat16": ({"zero_stage": 2}, "bfloat16"),
    "ZeRO 3, float32": ({"zero_stage": 3}, "float32"),
    "ZeRO 3, bfloat16": ({"zero_stage": 3}, "bfloat16"),
    "fsdp2, float32": (FSDP2, "float32"),
    "fsdp2, bfloat16": (FSDP2, "bfloat16"),
    "dropout, ZeRO 0, float32": ({"zero_stage": 0, **DROPOUT}, "float32"),
    "dropout, fsdp2, bfloat16": ({**FSDP2, **DROPOUT}, "bfloat16"),
    "offload, ZeRO 1, bfloat16": ({"zero_stage": 1, "offload": "optimizer"}, "bfloat16"),
    "offload, ZeRO 2, bfloat16": ({"zero_stage": 2, "offload": "optimizer"}, "bfloat16"),
    "offload, ZeRO 2, float32": ({"zero_stage": 2, "offload": "optimizer"}, "float32"),
    "offload, ZeRO 3, bfloat16": ({"zero_stage": 3, "offload": "optimizer_and_parameters"}, "bfloat16"),
}
#: Weights of the loss's tokens in a micro-batch that spoil the gradient: of one, or by an overflow.
SPOILT = {"nan": np.nan, "inf": 1e38}


def trainer_of(rank: int, ranks: int, model: str, settings: dict[str, Any], dtype: Any) -> TrainingRank:
    """A rank in this process, whose backend has met the others already."""
    seed_everything(rank)
    section = TrainingConfig(
        workers=ranks,
        max_tokens_per_micro_batch=64,
        optimizer={"lr": 1e-2, "max_grad_norm": 0.5, "warmup_steps": 4, "weight_decay": 0.01},
        **settings,
    )
    spec: RankSpec[Any] = RankSpec(
        objective=SupervisedObjective(settings=section, packing=True),
        model_path=model,
        dtype=dtype,
        device="cpu",
        threads=1,
        seed=0,
        total_updates=10,
        trust_remote_code=False,
    )
    trainer = TrainingRank(spec, rank, ranks)
    trainer._backend = TRAINING_BACKENDS.get(section.backend)(section, dtype=dtype, device="cpu", world_size=ranks)
    trainer.take(spec.objective.load(spec))
    return trainer


def learn(trainer: TrainingRank, seed: int, spoilt: float | None = None) -> dict[str, float]:
    """Take an update; the loss of the last rank's first micro-batch may be spoilt."""
    engine: Any = SimpleNamespace(layout=trainer._objective.layout(trainer.world_size))
    (update,) = trainer._objective.updates(ragged_policy_samples(seed=seed), engine)
    first, *others = update.shards[trainer.rank]
    assert others
    if spoilt is not None and trainer.rank == trainer.world_size - 1:
        first = replace(first, weights=np.where(first.weights != 0, np.float32(spoilt), np.float32(0)))
    trainer.forward_backward(Share(batches=[first, *others], shared=update.shared))
    return reduce(trainer.optimizer_step())


def tensors_of(backend: Any) -> Iterator[torch.Tensor]:
    """This rank's shares of weights, master weights and moments."""
    yield from backend.tensors("weights")
    optimizer = backend._optimizer if hasattr(backend, "_optimizer") else backend._engine.optimizer
    while hasattr(optimizer, "optimizer"):  # DeepSpeed's are around torch's
        optimizer = optimizer.optimizer
    assert len(optimizer.state)
    for master, states in optimizer.state.items():
        yield from (master, *states.values())


def fingerprint(backend: Any) -> str:
    """Of every bit of them."""
    digest = hashlib.sha256()
    for tensor in tensors_of(backend):
        local = tensor.detach()
        local = local.to_local() if isinstance(local, torch.distributed.tensor.DTensor) else local
        digest.update(local.float().numpy().tobytes())
    return digest.hexdigest()


def all_of(trainer: TrainingRank) -> tuple[str, int, list[int]]:
    """What later updates depend on."""
    return fingerprint(trainer._backend), trainer.updates, torch.get_rng_state().tolist()


class TwoExperts(torch.nn.Module):
    """Two matrices, of which an update may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, inputs: torch.Tensor, used: int) -> torch.Tensor:
        return torch.stack([expert(inputs) for expert in self.experts[:used]]).float().square().sum()


def use_experts(ranks: int, settings: dict[str, Any], dtype: Any, *updates: tuple[int, float]) -> str:
    """Take an update with each number of experts and factor of the loss on the last rank; return what came of it."""
    section = TrainingConfig(workers=ranks, optimizer={"lr": 1e-3}, **settings)
    backend: Any = TRAINING_BACKENDS.get(section.backend)(section, dtype=dtype, device="cpu", world_size=ranks)
    seed_everything(0)
    backend.wrap(TwoExperts().to(getattr(torch, dtype)))
    inputs = torch.randn(4, 64).to(getattr(torch, dtype))
    for used, spoilt in updates:
        factor = spoilt if torch.distributed.get_rank() == ranks - 1 else 1.0
        for last in (False, True):
            backend.forward_backward(partial(_scaled, backend, inputs, used, factor), last=last)
        backend.optimizer_step(1e-3)
    return fingerprint(backend)


def _scaled(backend: Any, inputs: torch.Tensor, used: int, factor: float) -> torch.Tensor:
    scaled: torch.Tensor = backend.forward(inputs, used) * factor
    return scaled


def undisturbed_and_disturbed(
    rank: int, ranks: int, address: Any, model: str, names: list[str]
) -> dict[str, dict[str, Any]]:
    """Of each case: what spoilt updates changed, and what later ones made of the model, with them and without."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
    TRAINING_BACKENDS.get("deepspeed")(TrainingConfig(), dtype="float32", device="cpu", world_size=ranks).join()
    found = {}
    for name in names:
        settings, dtype = CASES[name]
        trainer = trainer_of(rank, ranks, model, settings, dtype)
        reports = [learn(trainer, seed) for seed in (0, 1, 2)]
        expected = all_of(trainer)
        trainer = trainer_of(rank, ranks, model, settings, dtype)
        learn(trainer, 0)
        between = [all_of(trainer)]
        skipped = []
        for kind in ("nan", "inf"):
            skipped.append(learn(trainer, 7, SPOILT[kind]))
            between.append(all_of(trainer))
        learn(trainer, 1)
        after = learn(trainer, 2)
        found[name] = {
            "between": between,
            "skipped": skipped,
            "expected": (expected, reports[2]["train/grad_norm"], reports[2]["train/lr"]),
            "found": (all_of(trainer), after["train/grad_norm"], after["train/lr"]),
        }
        if "lora" not in settings:  # it adapts only layers of language models
            found[name]["one expert"] = use_experts(ranks, settings, dtype, (1, 1.0))
            found[name]["none left"] = use_experts(ranks, settings, dtype, (2, np.nan), (1, 1.0))
    torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["one rank", "two ranks"])
def outcomes(request: pytest.FixtureRequest, float_model: Path) -> list[dict[str, dict[str, Any]]]:
    return on_ranks(undisturbed_and_disturbed, str(float_model), list(CASES), ranks=request.param)


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_that_is_not_finite_changes_nothing(outcomes: list[dict[str, dict[str, Any]]], case: str) -> None:
    for of_rank in outcomes:
        found = of_rank[case]
        assert [report["train/skipped_updates"] for report in found["skipped"]] == [1.0, 1.0]
        assert not any(np.isfinite(report["train/grad_norm"]) for report in found["skipped"])
        before, *after = found["between"]
        assert after == [before, before], "weights, moments, random states or the count of updates have changed"
        assert found["found"] == found["expected"]


@pytest.mark.parametrize("case", [case for case in CASES if "dropout" not in case])
def test_nothing_is_left_of_it_for_parameters_without_a_gradient(
    outcomes: list[dict[str, dict[str, Any]]], case: str
) -> None:
    for of_rank in outcomes:
        assert of_rank[case]["none left"] == of_rank[case]["one expert"]
