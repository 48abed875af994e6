"""A gradient that is not finite leaves every rank as it was, whatever the backend, its stage and its precision."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import on_ranks
from hygiene import nothing_left
from rank_specs import cpu_rank
from run_config import read_lines, run_here, write_sft_run
from tests_support import ragged_policy_samples  # type: ignore[import-not-found]

from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.config.training import TrainingConfig
from roll_like.registry import TRAINING_BACKENDS
from roll_like.run.checkpoint import read_checkpoint
from roll_like.training.interface import RankSpec, Share
from roll_like.training.rank import TrainingRank, seed_everything
from roll_like.values import reduce

pytestmark = pytest.mark.integration
FSDP2 = {"backend": "fsdp2", "zero_stage": 3}
DROPOUT = {"lora": {"rank": 4, "dropout": 0.3}}
#: Settings of `training` and precisions; one of each way in which a gradient is summed up and forgotten.
CASES: list[tuple[dict[str, Any], str]] = [
    ({"zero_stage": 0}, "float32"),
    ({"zero_stage": 1}, "bfloat16"),
    ({"zero_stage": 1, "offload": "optimizer"}, "bfloat16"),
    ({"zero_stage": 3}, "float32"),
    (FSDP2, "bfloat16"),
]
FURTHER_CASES: list[tuple[dict[str, Any], str]] = [
    ({"zero_stage": 0}, "bfloat16"),
    ({"zero_stage": 1}, "float32"),
    ({"zero_stage": 2}, "bfloat16"),
    ({"zero_stage": 2}, "float32"),
    ({"zero_stage": 2, "offload": "optimizer"}, "bfloat16"),
    ({"zero_stage": 2, "offload": "optimizer"}, "float32"),
    ({"zero_stage": 3}, "bfloat16"),
    ({"zero_stage": 3, "offload": "optimizer_and_parameters"}, "bfloat16"),
    (FSDP2, "float32"),
    ({"zero_stage": 0, **DROPOUT}, "float32"),
    ({**FSDP2, **DROPOUT}, "bfloat16"),
]
#: Weights of the loss's tokens in a micro-batch that spoil the gradient: at once, or by an overflow.
SPOILT = (np.nan, 1e38)


def trainer_of(rank: int, ranks: int, model: str, settings: dict[str, Any], dtype: Any) -> TrainingRank:
    """A rank in this process, whose backend has met the others already."""
    seed_everything(rank)
    section = TrainingConfig(
        workers=ranks,
        max_tokens_per_micro_batch=64,
        optimizer={"lr": 1e-2, "max_grad_norm": 0.5, "warmup_steps": 4, "weight_decay": 0.01},
        **settings,
    )
    spec: RankSpec[Any] = cpu_rank(SupervisedObjective(settings=section, packing=True), model, dtype=dtype)
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


def states_of(backend: Any) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """This rank's master weights, and their moments."""
    optimizer = backend._optimizer if hasattr(backend, "_optimizer") else backend._engine.optimizer
    while hasattr(optimizer, "optimizer"):  # DeepSpeed's are around torch's
        optimizer = optimizer.optimizer
    return dict(optimizer.state)


def tensors_of(backend: Any) -> Iterator[torch.Tensor]:
    """Its shares of weights, and those."""
    yield from backend.tensors("weights")
    for master, states in states_of(backend).items():
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


def left_out_expert_stays(ranks: int, settings: dict[str, Any], dtype: Any) -> bool:
    """Take an update with two experts that is spoilt on the last rank, then one with the first; look at the second."""
    section = TrainingConfig(workers=ranks, optimizer={"lr": 1e-3}, **settings)
    backend: Any = TRAINING_BACKENDS.get(section.backend)(section, dtype=dtype, device="cpu", world_size=ranks)
    seed_everything(0)
    module = TwoExperts().to(getattr(torch, dtype))
    before = [expert.weight.detach().float().clone() for expert in module.experts]
    backend.wrap(module)
    inputs = torch.randn(4, 64).to(getattr(torch, dtype))
    for used, spoilt in ((2, np.nan), (1, 1.0)):
        factor = spoilt if torch.distributed.get_rank() == ranks - 1 else 1.0
        backend.forward_backward([inputs, inputs], partial(_scaled, backend, used, factor))
        backend.optimizer_step(1e-3)
    weights = [expert.weight for expert in backend.module.experts]
    with backend.gathered(weights) if backend.sharded else nullcontext(weights) as whole:
        first, second = (torch.equal(now.float(), old) for now, old in zip(whole, before, strict=True))
    return second and not first


def _scaled(backend: Any, used: int, factor: float, inputs: torch.Tensor) -> torch.Tensor:
    scaled: torch.Tensor = backend.forward(inputs, used) * factor
    return scaled


def disturbed(
    rank: int, ranks: int, address: Any, model: str, cases: list[tuple[dict[str, Any], str]]
) -> list[dict[str, Any]]:
    """Of each case: what spoilt updates changed, and what later ones made of the model, with them and without."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
    TRAINING_BACKENDS.get("deepspeed")(TrainingConfig(), dtype="float32", device="cpu", world_size=ranks).join()
    outcomes = []
    for settings, dtype in cases:
        trainer = trainer_of(rank, ranks, model, settings, dtype)
        _, expected = learn(trainer, 0), learn(trainer, 1)
        weights = all_of(trainer)
        trainer = trainer_of(rank, ranks, model, settings, dtype)
        learn(trainer, 0)
        assert states_of(trainer._backend)
        before = all_of(trainer)
        skipped, changed = [], []
        for spoilt in SPOILT:
            skipped.append(learn(trainer, 7, spoilt))
            changed.append(all_of(trainer) != before)
        found = learn(trainer, 1)
        outcome = {
            "skipped": [each.get("train/skipped_updates") for each in skipped],
            "finite": [bool(np.isfinite(each["train/grad_norm"])) for each in skipped],
            "changed": changed,
            "next is the same": all_of(trainer) == weights
            and all(found[name] == expected[name] for name in ("train/grad_norm", "train/lr")),
        }
        if "lora" not in settings:  # that needs a language model
            outcome["nothing is left"] = left_out_expert_stays(ranks, settings, dtype)
        outcomes.append(outcome)
    torch.distributed.destroy_process_group()
    return outcomes


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, CASES),
        pytest.param(2, FURTHER_CASES[:6], marks=pytest.mark.slow),
        pytest.param(2, FURTHER_CASES[6:], marks=pytest.mark.slow),
        pytest.param(1, CASES, marks=pytest.mark.slow),
    ],
    ids=["two ranks", "two ranks, ZeRO 0 to 2", "two ranks, sharded and dropout", "one rank"],
)
def test_a_gradient_that_is_not_finite_changes_nothing(
    float_model: Path, ranks: int, cases: list[tuple[dict[str, Any], str]]
) -> None:
    """Not weights, moments, random states and the schedule; and the next update's bits, also of parameters left out."""
    for rank, outcomes in enumerate(on_ranks(disturbed, str(float_model), cases, ranks=ranks)):
        for case, outcome in zip(cases, outcomes, strict=True):
            expected = {"skipped": [1.0, 1.0], "finite": [False] * 2, "changed": [False] * 2, "next is the same": True}
            if "nothing is left" in outcome:
                expected["nothing is left"] = True
            assert outcome == expected, f"rank {rank}: {case}"


def alternating(rank: int, ranks: int, address: Any, cases: list[tuple[dict[str, Any], str]]) -> list[list[float]]:
    """Of each case: the norms of updates with both experts and with one in turn, beside those of plain gradients."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
    TRAINING_BACKENDS.get("deepspeed")(TrainingConfig(), dtype="float32", device="cpu", world_size=ranks).join()
    ratios = []
    for settings, dtype in cases:
        section = TrainingConfig(workers=ranks, optimizer={"lr": 1e-3, "max_grad_norm": 1e9}, **settings)
        backend: Any = TRAINING_BACKENDS.get(section.backend)(section, dtype=dtype, device="cpu", world_size=ranks)
        seed_everything(0)
        backend.wrap(TwoExperts().to(getattr(torch, dtype)))
        inputs = torch.randn(4, 64).to(getattr(torch, dtype))
        of_case = []
        for used in (2, 1, 2, 1):
            weights = [expert.weight for expert in backend.module.experts]
            with backend.gathered(weights) if backend.sharded else nullcontext(weights) as whole:
                plain = TwoExperts()
                for expert, weight in zip(plain.experts, whole, strict=True):
                    expert.weight.data = weight.detach().float().clone()
            plain(inputs.float(), used).backward()
            norm = torch.stack([expert.weight.grad.norm() for expert in plain.experts[:used]]).norm()
            backend.forward_backward([inputs], partial(_scaled, backend, used, 1.0))
            of_case.append(backend.optimizer_step(1e-3) / float(norm))
        ratios.append(of_case)
    torch.distributed.destroy_process_group()
    return ratios


def test_a_parameter_that_an_update_leaves_out_has_none_of_the_gradient_before() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"zero_stage": 1}, "float32"),
        ({"zero_stage": 3}, "float32"),
        (FSDP2, "float32"),
    ]
    (ratios,) = on_ranks(alternating, cases, ranks=1)
    for case, found in zip(cases, ratios, strict=True):
        assert found == pytest.approx([1.0] * 4, rel=1e-3), case


#: A training backend of the user's, whose gradients are NaN in some attempts of its first process, and of its second.
SPOILING = """
from pathlib import Path

from roll_like.registry import TRAINING_BACKENDS
from roll_like.training.deepspeed import DeepSpeedBackend

STARTED = Path(__file__).with_name("started")


@TRAINING_BACKENDS.register("spoiling")
class Spoiling(DeepSpeedBackend):
    attempt = 0

    def wrap(self, module):
        super().wrap(module)
        self.bad = (3, 4, 5, 6) if STARTED.exists() else (1, 4, 5, 7, 8, 9, 10)
        STARTED.touch()

    def forward_backward(self, batches, loss_of):
        factor = float("nan") if self.attempt in self.bad else 1.0
        super().forward_backward(batches, lambda batch: loss_of(batch) * factor)
        self.attempt += 1
"""


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ray")
def test_a_run_computes_again_skips_goes_back_and_ends(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "spoiling.py").write_text(SPOILING)
    training = {"backend": "spoiling", "optimizer": {"lr": 1e-3}, "max_tokens_per_micro_batch": 256}
    changes = {"import": ["spoiling"], "checkpoint": {"every": 3, "keep": 9}}
    config = write_sft_run(tmp_path, tiny_model, training=training, steps=20, **changes)
    with nothing_left():
        code, output = run_here(config)
    assert code == 1
    assert "the training engine has skipped 2 updates in a row, because the norms" in output
    assert "fix: lower training.optimizer.lr or training.optimizer.max_grad_norm" in output
    assert "already rolled back at step 7; it did not help" in " ".join(output.split())
    run = tmp_path / "runs" / "tiny"
    lines = read_lines(run / "metrics.jsonl")
    # attempts 0 | 1 2 | 3 | 4 5 | 6 | 7 8, which is logged, and 9 10: back to step 6, without step 7
    # of the second process: 0 | 1 | 2 | 3 4, which is logged, and 5 6, which ends the run
    assert [line.get("train/updates") for line in lines] == [1, 1, 1, 0, 1, 0, None, 1, 1, 1, 0]
    assert [line["step"] for line in lines if "train/recomputed_updates" in line] == [2]
    assert [line["step"] for line in lines if "train/skipped_updates" in line] == [4, 6, 11]
    assert [line["step"] for line in lines if "health/rewinds" in line] == [7]
    events = read_lines(run / "events.jsonl")
    warnings = [event["text"] for event in events if event["kind"] == "warning"]
    assert [
        text.partition(": the gradient was not finite")[0] for text in warnings if "skipped_updates is" in text
    ] == [
        "step 4: train/skipped_updates is 1",
        "step 6: train/skipped_updates is 1",
        "step 11: train/skipped_updates is 1",
    ]
    (back,) = [text for text in warnings if "left out" in text]
    assert "the models are where they were after step 6, step 7 is left out, and the run goes on with new sam" in back
    assert [(event["step"], event["to"]) for event in events if event["kind"] == "rewind"] == [(7, 6)]
    assert read_checkpoint(run / "checkpoints" / "step_000007").healthy
