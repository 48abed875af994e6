"""A policy of one table behind the training rank's own code: whole optimizer steps in milliseconds.

`BigramBackend` is a training backend: a forward pass, a backward pass that adds up, a step of plain gradient descent.
Everything above it
(shaping, estimator, masks, weights, layout, correction, loss) is the real code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from algorithm_samples import make_task
from rank_specs import cpu_rank
from torch import Tensor

from roll_like.algorithms.kl import KLController
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.load import load_config
from roll_like.config.training import TrainingConfig
from roll_like.policy_gradient.advantages import Advantages
from roll_like.policy_gradient.objective import PolicyObjective, with_reference
from roll_like.registry import ADVANTAGES
from roll_like.training.backend import BatchT
from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import TrainingRank
from roll_like.types import FloatArray, Group, Part, PolicySample, Scored, Segment, StopReason, Trajectory
from roll_like.values import Metrics, reduce

R = TypeVar("R")
VOCABULARY = 12
LIMIT = 24
LR = 2.0


class BigramBackend:
    """The next token's distribution follows from the last token alone: one row of logits for each."""

    def __init__(self, table_VV: Tensor) -> None:
        self.table_VV = table_VV.clone().requires_grad_()
        self.module: Any = None
        self._summed = False

    def wrap(self, module: Any) -> None:
        self.module = module

    def of_last_layers(self, found: list[Any]) -> list[Any]:
        return found

    def forward(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        segment_ids_BL: Tensor,
        sources_N: Tensor,
        targets_N: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        logprobs_NV = self.table_VV[tokens_BL.flatten()[sources_N]].div(temperature).log_softmax(-1)
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        return logprobs_NV.gather(1, targets_N[:, None])[:, 0], entropy_N

    def forward_backward(self, batches: Sequence[BatchT], loss_of: Callable[[BatchT], Tensor]) -> None:
        assert not self._summed, "the gradient of one step is added up at once"
        for batch in batches:
            loss_of(batch).backward()
        self._summed = True

    def forward_only(self, batches: Sequence[BatchT], result_of: Callable[[BatchT], R]) -> list[R]:
        return [result_of(batch) for batch in batches]

    def optimizer_step(self, learning_rate: float) -> float:
        assert self._summed
        assert self.table_VV.grad is not None
        norm = float(self.table_VV.grad.norm())
        if math.isfinite(norm):
            with torch.no_grad():
                self.table_VV -= learning_rate * self.table_VV.grad
        self.table_VV.grad, self._summed = None, False
        return norm


class OneRank:
    """A cluster of one worker in this process."""

    name = "training"

    def __init__(self, worker: TrainingRank) -> None:
        self.worker = worker

    def __len__(self) -> int:
        return 1

    def scatter(self, method: Callable[..., Any], shards: Sequence[Any]) -> list[Any]:
        return [method(self.worker, *shards)]

    def everywhere(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [method(self.worker, *arguments)]


class FakeCritic:
    """Values that follow from the tokens; it never learns."""

    def values(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        return [np.sin(sample.token_ids).astype(np.float32) * sample.loss_mask for sample in samples]

    def learn(
        self, samples: Sequence[PolicySample], values: Sequence[FloatArray], returns: Sequence[FloatArray]
    ) -> Metrics:
        return {}


@dataclass(frozen=True)
class Outcome:
    """What two steps did: the policy's table after each, and all figures."""

    tables: tuple[np.ndarray[Any, Any], ...]
    metrics: tuple[dict[str, float], ...]

    @property
    def movement(self) -> np.ndarray[Any, Any]:
        """How the table moved, both steps in a row."""
        return np.concatenate([table.flatten() for table in np.diff(np.stack([start_table(), *self.tables]), axis=0)])


def start_table() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(0, 1, (VOCABULARY, VOCABULARY))


def table_logprobs(table: np.ndarray[Any, Any], token_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Log-probability of each token after the first under a table, 0 for the first."""
    rows = table[token_ids[:-1]]
    logprobs = rows[np.arange(len(rows)), token_ids[1:]] - np.log(np.exp(rows).sum(-1))
    return np.concatenate([[0.0], logprobs])


class NoisyReference:
    """A reference model near the policy."""

    def logprobs(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        table = start_table() + np.random.default_rng(9).normal(0, 0.3, (VOCABULARY, VOCABULARY))
        return [
            np.where(sample.loss_mask, table_logprobs(table, sample.token_ids), 0).astype(np.float32)
            for sample in samples
        ]


def fixed_groups(noise: float = 0.2, step: int = 0) -> list[Group[Scored]]:
    """Five groups of four: ragged, some cut, two with zero reward variance, two rewards, tokens of a tool in some.

    The engine that sampled them is `noise` away from the policy; every `step` has others.
    """
    draw = np.random.default_rng([1, step])
    table = start_table() + noise * np.random.default_rng(2).normal(0, 1, (VOCABULARY, VOCABULARY))
    groups = []
    for index in range(5):
        task = make_task(f"toy/{index}", prompt=[index, 1])
        members = [_member(task, place, draw, table, silent=index >= 3) for place in range(5)]
        groups.append(Group(task=task, samples=tuple(members[:4]), failures=(), baselines=(members[4],)))
    return groups


def _member(task: Any, place: int, draw: np.random.Generator, table: Any, *, silent: bool) -> Scored:
    cut = place == 3
    length = LIMIT if cut else int(draw.integers(2, LIMIT - 2))
    token_ids = np.concatenate([task.prompt_ids, draw.integers(0, VOCABULARY, length)]).astype(np.int32)
    sampled = np.arange(len(token_ids)) >= 2
    if place == 1:
        sampled[3] = False  # a tool's token
    logprobs = np.where(sampled, table_logprobs(table, token_ids), 0).astype(np.float32)
    two_turns = place in (1, 2)
    turns = np.where(sampled, np.where(two_turns & (np.arange(len(token_ids)) > 3), 1, 0), -1)
    trajectory = Trajectory(
        task=task,
        sample_index=place,
        token_ids=token_ids,
        sampled=sampled,
        logprobs=logprobs,
        turns=turns.astype(np.int32),
        parts=(Part(start=0, end=len(token_ids), prompt_length=2),),
        segments=(Segment(start=2, end=len(token_ids), policy_version=1),),
        text="",
        stop_reason=StopReason.LENGTH if cut else StopReason.STOP,
    )
    rewards = {"right": float(draw.integers(0, 2)), "style": float(draw.uniform(-1, 1))}
    if silent:
        rewards = {"right": 1.0, "style": 0.5}
    weights = {"right": 1.0, "style": 0.5}
    total = sum(weights[name] * rewards[name] for name in rewards)
    return Scored(
        trajectory=trajectory,
        reward=total,
        rewards=rewards,
        details={},
        weights=weights,
        turn_rewards=(0.25 * total, 0.75 * total) if two_turns else (),
        turn_states=("start", "later") if two_turns else ("start",),
    )


def _raised(group: Group[Scored]) -> Group[Scored]:
    """The group with rewards that are higher by 1, so that none is below 0."""
    return replace(group, samples=tuple(replace(sample, reward=sample.reward + 1) for sample in group.samples))


def bigram_engine(
    algorithm: AlgorithmConfig, kl: KLController, *, max_response_tokens: int, **training: Any
) -> tuple[BigramBackend, TrainingEngine[Sequence[PolicySample]]]:
    """A backend with the table, and an engine of one rank that trains it by the real objective."""
    training_config = TrainingConfig(optimizer={"lr": 0.1}, **training)
    steep = training_config.optimizer.model_copy(update={"lr": LR})  # more than a run may have: it is plain descent
    objective = PolicyObjective(
        settings=training_config.model_copy(update={"optimizer": steep}),
        algorithm=algorithm,
        max_response_tokens=max_response_tokens,
        kl=kl,
    )
    spec = cpu_rank(objective, "", dtype="bfloat16")
    worker, backend = TrainingRank(spec, 0, 1), BigramBackend(torch.from_numpy(start_table()))
    worker._backend = backend  # type: ignore[assignment]
    worker.take(torch.nn.Module())
    cluster: Any = OneRank(worker)
    return backend, TrainingEngine(cluster, objective)


def train_two_steps(
    algorithm: AlgorithmConfig,
    *,
    noise: float = 0.2,
    max_response_tokens: int = LIMIT,
    max_tokens: int = 4096,
    share_prompts: bool = True,
    reverse: bool = False,
    warmup_steps: int = 0,
) -> Outcome:
    """Train two steps, so that what the first leaves behind (statistics, coefficients) shows in the second."""
    steps = [fixed_groups(noise, step) for step in range(2)]
    if reverse:
        steps = [
            [replace(group, samples=tuple(reversed(group.samples))) for group in reversed(groups)] for groups in steps
        ]
    controller = KLController(algorithm.kl)
    backend, trainer = bigram_engine(
        algorithm,
        controller,
        max_response_tokens=max_response_tokens,
        max_tokens_per_micro_batch=max_tokens,
        share_prompts=share_prompts,
    )
    plugin = ADVANTAGES.get(algorithm.advantage.type)
    if plugin.nonnegative_rewards:
        steps = [[_raised(group) for group in groups] for groups in steps]
    estimator = plugin(algorithm.advantage)
    if plugin.needs_critic:
        estimator.use(FakeCritic())
    if plugin.needs_policy:
        estimator.observe(trainer)
    reference: Any = NoisyReference()
    advantages = Advantages(
        estimator,
        algorithm,
        controller,
        reference,
        max_response_tokens=max_response_tokens,
        warmup_steps=warmup_steps,
    )
    tables, metrics = [], []
    for groups in steps:
        assigned = advantages.assign(groups)
        referenced = with_reference(assigned.samples, reference if algorithm.kl.use == "loss" else None)
        report = trainer.train_step(referenced)
        tables.append(backend.table_VV.detach().numpy().copy())
        metrics.append({**reduce(assigned.metrics), **reduce(report)})
    return Outcome(tuple(tables), tuple(metrics))


def recipes() -> dict[str, AlgorithmConfig]:
    """The algorithm of every recipe that trains on rewards of single answers alone, by name."""
    paths = sorted((Path(__file__).resolve().parents[1] / "configs" / "recipes").glob("*.yaml"))
    configs = {path.stem: load_config(path) for path in paths}
    of_samples = {name: config for name, config in configs.items() if config.pipeline == "rlvr"}
    return {name: config.algorithm for name, config in of_samples.items() if config.given_answers is None}


def distances() -> tuple[list[str], np.ndarray[Any, Any]]:
    """Names of the recipes, and the distance of every two directions in which they move the policy, in [0, 2]."""
    directions = {}
    for name, algorithm in recipes().items():
        movement = train_two_steps(algorithm).movement
        directions[name] = movement / np.linalg.norm(movement)
    together = np.stack(list(directions.values()))
    return list(directions), np.linalg.norm(together[:, None] - together[None], axis=-1)


if __name__ == "__main__":  # from the repository's root: .venv/bin/python tests/bigram_engine.py
    names, matrix = distances()
    print(f"{'':20}" + "".join(f"{name[:7]:>8}" for name in names))
    for name, row in zip(names, matrix, strict=True):
        print(f"{name:20}" + "".join(f"{distance:8.3f}" for distance in row))
