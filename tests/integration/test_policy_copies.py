"""A reference that follows the policy on its own ranks: TR-DPO as in plain PyTorch, and the same run after a resume."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks
from megatron_installed import FOLDER, INSTALLED
from rank_specs import cpu_rank
from run_config import losses, read_lines, run_here, write_dpo_run, write_run
from spmd_engine import spmd_engine
from test_preference_engine import pairs
from tests_support import (
    answer_logprobs,
    pairs_of,  # type: ignore[import-not-found]
)
from trained_weights import largest_difference, trained_weights
from transformers import AutoModelForCausalLM

from roll_like.builtin.pipelines.dpo.objective import PairedObjective, PairStep, whole_logprobs
from roll_like.config.model import Precision
from roll_like.config.training import CopySection, TrainingConfig
from roll_like.registry import PREFERENCE_LOSSES
from roll_like.training.engine import PolicyCopy, TrainingEngine, WithoutAdapters
from roll_like.training.interface import RankSpec
from roll_like.values import reduce

pytestmark = pytest.mark.integration
LR, EPS, BETA, ALPHA, STEPS = 1e-2, 1e-2, 0.5, 0.6, 5
FOLLOWING = CopySection(sync_steps=2, mixup_alpha=ALPHA)
BATCHES = [pairs(seed=seed) for seed in range(STEPS)]


def spec_of(model: Path, section: CopySection, options: dict[str, Any], dtype: Precision = "float32") -> RankSpec[Any]:
    config = TrainingConfig(optimizer={"lr": LR, "max_grad_norm": 1000.0, "eps": EPS}, **options)
    loss = PREFERENCE_LOSSES.get("dpo").Config.model_validate({"type": "dpo", "beta": BETA})
    objective = PairedObjective(settings=config, loss_config=loss)
    return cpu_rank(objective, model, dtype=dtype, copies={"reference": section.mixup_alpha < 1.0})


def train(trainer: TrainingEngine[PairStep], reference: PolicyCopy, steps: range) -> list[dict[str, float]]:
    reports = []
    for step in steps:
        samples = BATCHES[step]
        batch = PairStep(pairs=pairs_of(samples), reference=whole_logprobs(reference, samples))
        report = trainer.train_step(batch)
        reports.append(reduce({**report, **reference.follow(step + 1)}))
    return reports


def plain(model: Path, section: CopySection) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """TR-DPO written from its paper (arXiv:2404.09656): losses, distances when the reference moves, and weights."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    losses, distances = [], []
    for step, samples in enumerate(BATCHES, start=1):
        loss = torch.tensor(0.0)
        for at in range(0, len(samples), 2):
            answers = samples[at], samples[at + 1]
            chosen, rejected = (answer_logprobs(policy, each).sum() for each in answers)
            with torch.no_grad():
                held = [answer_logprobs(reference, each).sum() for each in answers]
            margin = (chosen - held[0]) - (rejected - held[1])
            loss = loss - torch.nn.functional.logsigmoid(BETA * margin) / (len(samples) // 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if section.sync_steps is not None and step % section.sync_steps == 0:
            weights = [*zip(reference.parameters(), policy.parameters(), strict=True)]
            apart = torch.cat([(theirs - ours).detach().flatten() for theirs, ours in weights])
            distances.append(float(apart.square().mean().sqrt()))
            with torch.no_grad():
                for theirs, ours in weights:
                    theirs.mul_(1 - section.mixup_alpha).add_(ours, alpha=section.mixup_alpha)
            if section.reset_optimizer:
                optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, eps=EPS, weight_decay=0.0)
    return losses, distances, {name: each.detach() for name, each in policy.named_parameters()}


@dataclass(frozen=True)
class Learned:
    """What ranks found in some steps: figures, weights, and what the reference says of the first answers then."""

    figures: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    reference: list[float]
    state: dict[str, Any]


def learn(
    rank: int,
    world_size: int,
    address: tuple[str, int],
    spec: RankSpec[Any],
    section: CopySection,
    steps: range,
    folder: Path,
    state: dict[str, Any] | None,
) -> Learned:
    """Train some steps from a checkpoint, if there is one, or else write one."""
    if spec.objective.settings.backend == "megatron":
        sys.path.append(str(FOLDER))
    trainer = spmd_engine(spec, rank, world_size, address)
    reference = PolicyCopy(trainer, "reference", section)
    if state is not None:
        trainer.load(folder)
        reference.load_state(state)
    figures = train(trainer, reference, steps)
    before = trained_weights(trainer.cluster)
    said = whole_logprobs(reference, BATCHES[0]).tolist()
    # what was in the policy's place is out of it again
    assert largest_difference(trained_weights(trainer.cluster), before) == 0
    if state is None:
        trainer.save(folder)
    return Learned(figures, before, said, reference.state())


def learned(
    model: Path, folder: Path, options: dict[str, Any], section: CopySection, steps: range, state: Any = None
) -> Learned:
    spec = spec_of(model, section, options)
    found: Learned = on_ranks(learn, spec, section, steps, folder, state, ranks=options.get("workers", 1))[0]
    return found


MEGATRON: dict[str, Any] = {"backend": "megatron", "workers": 2, "max_tokens_per_micro_batch": 64}
RESETTING = FOLLOWING.model_copy(update={"reset_optimizer": True})


@pytest.mark.parametrize(
    ("options", "section"),
    [
        ({}, FOLLOWING),
        ({"zero_stage": 3}, RESETTING),
        ({"workers": 2, "zero_stage": 3, "backend": "fsdp2"}, RESETTING.model_copy(update={"mixup_alpha": 1.0})),
        pytest.param({"workers": 2, "zero_stage": 1}, FOLLOWING, marks=pytest.mark.slow),
        pytest.param({"workers": 2, "zero_stage": 2, "offload": "optimizer"}, RESETTING, marks=pytest.mark.slow),
        ({"workers": 2, "zero_stage": 3}, FOLLOWING),
        pytest.param(
            {"workers": 2, "zero_stage": 3, "offload": "optimizer_and_parameters"}, FOLLOWING, marks=pytest.mark.slow
        ),
        pytest.param({**MEGATRON, "zero_stage": 1}, RESETTING, marks=(pytest.mark.slow, INSTALLED)),
        pytest.param(
            {**MEGATRON, "pipeline_parallel": 2, "zero_stage": 0}, RESETTING, marks=(pytest.mark.slow, INSTALLED)
        ),
        pytest.param(
            {**MEGATRON, "tensor_parallel": 2, "zero_stage": 1}, FOLLOWING, marks=(pytest.mark.slow, INSTALLED)
        ),
    ],
)
def test_a_policy_learns_as_in_plain_pytorch_and_a_resumed_one_as_well(
    float_model: Path, tmp_path: Path, options: dict[str, Any], section: CopySection
) -> None:
    expected, distances, weights = plain(float_model, section)
    whole = learned(float_model, tmp_path, options, section, range(STEPS))
    assert [each["train/loss"] for each in whole.figures] == pytest.approx(expected, rel=1e-4)
    moved = [each["reference/distance"] for each in whole.figures if "reference/distance" in each]
    # tied embeddings count on the first stage and on the last one
    assert moved == pytest.approx(distances, rel=0.05 if "pipeline_parallel" in options else 1e-3)
    assert [each["reference/last_sync"] for each in whole.figures] == [0, 2, 2, 4, 4]
    for name, parameter in weights.items():
        assert whole.weights[name].sub(parameter).abs().max() < 1e-5, name

    half = learned(float_model, tmp_path, options, section, range(3))
    rest = learned(float_model, tmp_path, options, section, range(3, STEPS), half.state)
    found = [each["train/loss"] for each in half.figures + rest.figures]
    assert found == [each["train/loss"] for each in whole.figures]
    assert largest_difference(rest.weights, whole.weights) == 0
    assert (rest.reference, rest.state) == (whole.reference, whole.state)


def says(
    rank: int, world_size: int, address: tuple[str, int], spec: RankSpec[Any], section: CopySection
) -> list[list[list[float]]]:
    """Return what policy and reference say of the first answers before each step; and the model without adapters."""
    trainer = spmd_engine(spec, rank, world_size, address)
    reference, said = PolicyCopy(trainer, "reference", section), []
    for step in range(3):
        said.append([whole_logprobs(each, BATCHES[0]).tolist() for each in (trainer, reference)])
        train(trainer, reference, range(step, step + 1))
    adapted = spec.objective.settings.lora is not None
    return [*said, [whole_logprobs(WithoutAdapters(trainer), BATCHES[0]).tolist() if adapted else []]]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"workers": 2, "zero_stage": 3}, "bfloat16"), ({"lora": {"rank": 4, "alpha": 8}}, "float32")],
)
def test_after_a_hard_reset_the_reference_says_what_the_policy_says(
    float_model: Path, options: dict[str, Any], dtype: Precision
) -> None:
    """To the bit: also in 16 bits, and with adapters, of which the copy has the two matrices alone."""
    section = CopySection(sync_steps=2)
    spec = spec_of(float_model, section, options, dtype)
    start, moved, reset, (base,) = on_ranks(says, spec, section, ranks=options.get("workers", 1))[0]
    assert start[0] == start[1] == moved[1] != moved[0]
    assert reset[0] == reset[1]
    assert reset[0] not in (start[0], moved[0])
    if base:
        assert base == pytest.approx(start[1], abs=1e-4)  # new adapters change nothing


def test_ranks_with_whole_weights_share_one_file_and_divided_ones_refuse_it(float_model: Path, tmp_path: Path) -> None:
    half = learned(float_model, tmp_path, {"workers": 2, "zero_stage": 1}, FOLLOWING, range(3))
    assert [each.name for each in tmp_path.glob("copy_*")] == ["copy_reference_0.pt"]
    rest = learned(float_model, tmp_path, {"zero_stage": 2}, FOLLOWING, range(3, STEPS), half.state)
    expected = plain(float_model, FOLLOWING)[0]
    assert [each["train/loss"] for each in rest.figures] == pytest.approx(expected[3:], rel=1e-4)
    with pytest.raises(AssertionError, match="divide weights otherwise"):
        learned(float_model, tmp_path, {"zero_stage": 3}, FOLLOWING, range(3, STEPS), half.state)


@pytest.mark.usefixtures("warm_ray")
def test_a_runs_kl_is_zero_after_each_reset(tmp_path: Path, tiny_model: Path) -> None:
    config = write_run(
        tmp_path,
        tiny_model,
        steps=5,
        algorithm={"kl": {"use": "loss", "coefficient": 0.01}},
        reference={"mode": "copy", "sync_steps": 2, "reset_optimizer": True},
    )
    code, output = run_here(config)
    assert code == 0, output
    steps = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert [step["train/kl"] > 1e-7 for step in steps] == [False, True, False, True, False]
    assert [step["reference/last_sync"] for step in steps] == [0, 2, 2, 4, 4]


@pytest.mark.usefixtures("warm_ray")
def test_a_stopped_run_goes_on_with_the_reference_that_it_had(tmp_path: Path, tiny_model: Path) -> None:
    found = {}
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
        config = write_dpo_run(
            tmp_path / name,
            tiny_model,
            steps=6,
            training={"optimizer": {"lr": 1.0e-3}, "max_tokens_per_micro_batch": 256, "lora": {"rank": 4}},
            reference={"mode": "copy", "sync_steps": 2, "mixup_alpha": 0.6},
        )
        if name == "halves":
            code, output = run_here(config, "steps=3")
            assert code == 0, output
        code, output = run_here(config, *(["--resume"] if name == "halves" else []))
        assert code == 0, output
        run = tmp_path / name / "runs" / "tiny"
        distances = [step.get("reference/distance") for step in read_lines(run / "metrics.jsonl")]
        assert [each is not None for each in distances] == [False, True] * 3
        found[name] = (losses(run), [each for each in distances if each])
    assert found["halves"][0] == pytest.approx(found["whole"][0], rel=1e-4)
    assert found["halves"][1] == pytest.approx(found["whole"][1], rel=1e-4)
