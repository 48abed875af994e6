"""`examples/minimal_rl.py` computes what the pipeline computes from the same rollouts."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_samples import make_task
from bigram_engine import OneRank
from loose_modules import load_module
from plain_backend import PlainBackend
from rank_specs import cpu_rank

from roll_like.algorithms.kl import KLController
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.training import TrainingConfig
from roll_like.policy_gradient.objective import PolicyObjective, with_logprobs
from roll_like.registry import ADVANTAGES
from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import TrainingRank
from roll_like.types import FloatArray, Group, Part, PolicySample, Scored, Segment, StopReason, Trajectory

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "minimal_rl.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_module(SCRIPT)


def groups_of(rollouts: Any, logprobs_BT: FloatArray) -> list[Group[Scored]]:
    """The script's rollouts as the pipeline's groups, with the log-probabilities that they were sampled with."""
    members = rollouts.rewards_PG.shape[1]
    groups = []
    for place, rewards in enumerate(rollouts.rewards_PG):
        rows = slice(place * members, (place + 1) * members)
        task = make_task(f"digit/{place}", prompt=rollouts.tokens_BT[place * members, :1].tolist())
        samples = []
        for index, (tokens_T, sampled_T) in enumerate(
            zip(rollouts.tokens_BT[rows], rollouts.sampled_BT[rows], strict=True)
        ):
            length = 1 + int(sampled_T.sum())
            sampled = np.arange(length) > 0
            trajectory = Trajectory(
                task=task,
                sample_index=index,
                token_ids=tokens_T[:length].numpy().astype(np.int32),
                sampled=sampled,
                logprobs=np.where(sampled, logprobs_BT[rows.start + index, :length], 0).astype(np.float32),
                turns=np.where(sampled, 0, -1).astype(np.int32),
                parts=(Part(start=0, end=length, prompt_length=1),),
                segments=(Segment(start=1, end=length, policy_version=0),),
                text="",
                stop_reason=StopReason.STOP,
            )
            reward = float(rewards[index])
            samples.append(Scored(trajectory=trajectory, reward=reward, rewards={}, details={}, weights={}))
        groups.append(Group(task=task, samples=tuple(samples), failures=()))
    return groups


def engine_of(
    script: ModuleType, model: Any, folder: Path
) -> tuple[PlainBackend, TrainingEngine[Any], AlgorithmConfig]:
    """The pipeline's objective and engine around a copy of the model, with the YAML of the script's docstring."""
    algorithm = AlgorithmConfig(
        loss={"type": "ppo", "dual_clip": None},
        updates_per_step=script.UPDATES_PER_STEP,
        kl={"use": "loss", "coefficient": script.KL_COEFFICIENT},
    )
    optimizer = {"lr": script.LEARNING_RATE, "warmup_steps": 0, "schedule": "constant", "weight_decay": 0.0}
    objective = PolicyObjective(
        settings=TrainingConfig(optimizer=optimizer),
        algorithm=algorithm,
        max_response_tokens=script.MAX_RESPONSE_TOKENS,
        kl=KLController(algorithm.kl),
    )
    model.save_pretrained(folder)
    spec = cpu_rank(objective, folder)
    worker = TrainingRank(spec, 0, 1)
    worker._backend = backend = PlainBackend(objective.settings, dtype="float32", device="cpu", world_size=1)
    worker.take(objective.load(spec))
    cluster: Any = OneRank(worker)
    return backend, TrainingEngine(cluster, objective), algorithm


def test_the_pipeline_computes_the_same(script: ModuleType, tmp_path: Path) -> None:
    model = script.make_model()
    reference = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():  # the policy has moved away from the reference, so that its KL counts
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    rollouts = script.sample(model, torch.arange(script.PROMPTS_PER_STEP) % script.END)
    with torch.no_grad():
        policy_BT, reference_BT = (script.logprobs(each, rollouts.tokens_BT).numpy() for each in (model, reference))
    backend, engine, algorithm = engine_of(script, model, tmp_path)
    samples: list[PolicySample] = ADVANTAGES.get("grpo")(algorithm.advantage).assign(groups_of(rollouts, policy_BT))
    expected = [sample.advantages[-1] for sample in samples]
    assert script.advantages(rollouts.rewards_PG).numpy() == pytest.approx(expected, rel=1e-6)
    assert np.std(expected) > 0.5

    referenced = with_logprobs(
        samples,
        [
            np.where(sample.loss_mask, row[: len(sample.token_ids)], 0).astype(np.float32)
            for sample, row in zip(samples, reference_BT, strict=True)
        ],
    )
    metrics = engine.train_step(referenced)
    optimizer = torch.optim.AdamW(model.parameters(), lr=script.LEARNING_RATE, weight_decay=0.0)
    losses, norms = zip(*script.train_step(model, reference, optimizer, rollouts), strict=True)

    assert len(losses) == script.UPDATES_PER_STEP
    assert np.mean(losses) == pytest.approx(metrics["train/loss"].value, rel=1e-4, abs=1e-6)
    assert np.mean(norms) == pytest.approx(metrics["train/grad_norm"].value, rel=1e-4)
    assert metrics["train/kl"].value > 1e-3
    moved = [(new - old).abs().max() for new, old in zip(model.parameters(), backend.module.parameters(), strict=True)]
    assert max(moved) < 0.1 * script.LEARNING_RATE


def test_it_learns(script: ModuleType) -> None:
    model = script.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=script.LEARNING_RATE, weight_decay=0.0)
    reference = copy.deepcopy(model).requires_grad_(False)
    rewards = []
    for _ in range(15):
        rollouts = script.sample(model, torch.randint(0, 10, (script.PROMPTS_PER_STEP,)))
        script.train_step(model, reference, optimizer, rollouts)
        rewards.append(rollouts.rewards_PG.mean())
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
