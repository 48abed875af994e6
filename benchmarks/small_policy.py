"""A policy of some thousand parameters that samples and learns in one process: what `recipes.py` compares recipes with.

The policy writes up to `TOKENS` letters. What comes next follows from the task, the letter before and the place. All
between its samples and its gradient is the code of runs: shaping, advantages, masks, layout, loss, correction, critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roll_like.algorithms.kl import KLController
from roll_like.config.run import RunConfig
from roll_like.policy_gradient.advantages import Advantages
from roll_like.policy_gradient.critic import Critic, ValueObjective
from roll_like.policy_gradient.objective import PolicyObjective, with_reference
from roll_like.registry import ADVANTAGES
from roll_like.training.engine import untimed
from roll_like.training.interface import Objective, RankModel
from roll_like.training.layout import MicroBatch, micro_batches, per_sample
from roll_like.types import FloatArray, Group, Part, Scored, Segment, StopReason, Task, TrainingSample, Trajectory
from roll_like.values import Metric, Metrics, merge, reduce

#: Letters, of which the first ends an answer; a token is a letter of a task.
LETTERS = 16
TOKENS = 8
WIDTH = 32
LR = 3e-3


class States(nn.Module):
    """What the policy and the critic see of a token: its task, its letter and its place.

    Args:
        tasks: How many tasks there are.
        outputs: Numbers for each state.
    """

    def __init__(self, tasks: int, outputs: int) -> None:
        super().__init__()
        self.task, self.letter = nn.Embedding(tasks, WIDTH), nn.Embedding(LETTERS, WIDTH)
        self.place, self.out = nn.Embedding(TOKENS + 1, WIDTH), nn.Linear(WIDTH, outputs)
        nn.init.zeros_(self.out.weight if outputs == 1 else self.out.bias)

    def of(self, tokens_N: Tensor, places_N: Tensor) -> Tensor:
        """Return the numbers of states, shape [N, outputs]."""
        sums_ND = self.task(tokens_N // LETTERS) + self.letter(tokens_N % LETTERS) + self.place(places_N)
        found_NV: Tensor = self.out(sums_ND.tanh())
        return found_NV


class SmallPolicy(States):
    """Log-probabilities of letters, as `PolicyModule` gives those of tokens."""

    def __init__(self, tasks: int) -> None:
        super().__init__(tasks, LETTERS)

    def forward(
        self, tokens_BL: Tensor, places_BL: Tensor, _: Tensor, sources_N: Tensor, targets_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of each target, shape [N]."""
        logits_NV = self.of(tokens_BL.flatten()[sources_N], places_BL.flatten()[sources_N])
        logprobs_NV = (logits_NV / temperature).log_softmax(-1)
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        return logprobs_NV.gather(1, targets_N[:, None] % LETTERS)[:, 0], entropy_N

    @torch.no_grad()
    def sample(self, tasks_N: Tensor, draw: torch.Generator, *, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return letters, their log-probabilities and how many count of each answer, shapes [N, TOKENS] and [N]."""
        letters_N, ended_N = torch.zeros_like(tasks_N), torch.zeros_like(tasks_N, dtype=torch.bool)
        lengths_N, letters, logprobs = torch.zeros_like(tasks_N), [], []
        for place in range(TOKENS):
            logprobs_NV = self.of(tasks_N * LETTERS + letters_N, torch.full_like(tasks_N, place)).log_softmax(-1)
            chosen_N1 = torch.multinomial(logprobs_NV.exp(), 1, generator=draw)
            letters_N = logprobs_NV.argmax(-1) if greedy else chosen_N1[:, 0]
            letters.append(letters_N)
            logprobs.append(logprobs_NV.gather(1, letters_N[:, None])[:, 0])
            lengths_N += ~ended_N
            ended_N |= letters_N == 0
        return torch.stack(letters, 1), torch.stack(logprobs, 1), lengths_N


class SmallCritic(States):
    """Values of states, 0 to begin with."""

    def __init__(self, tasks: int) -> None:
        super().__init__(tasks, 1)

    def forward(self, tokens_BL: Tensor, places_BL: Tensor, _: Tensor, sources_N: Tensor, *__: Tensor) -> Tensor:
        """Return the value of the state before each target, shape [N]."""
        return self.of(tokens_BL.flatten()[sources_N], places_BL.flatten()[sources_N])[:, 0]


class LocalEngine:
    """Runs an objective on a network in this process: the `Engine` that objectives ask, without ranks.

    Args:
        objective: What is learned.
        network: The network.
    """

    def __init__(self, objective: Objective[Any, Any], network: nn.Module) -> None:
        self.objective, self.network = objective, network
        self.layout = objective.layout(1)
        self._model = RankModel(module=network, forward=network, device=torch.device("cpu"))
        self._optimizer = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=0.0)

    def timer(self, name: str) -> AbstractContextManager[None]:
        """Time nothing."""
        return untimed(name)

    def micro_batches(self, samples: Sequence[TrainingSample]) -> list[list[MicroBatch]]:
        """Return the samples as one rank's micro-batches."""
        return micro_batches(samples, **self.layout)

    @torch.no_grad()
    def forward(self, shards: Sequence[Sequence[Any]], *, adapters: bool = True) -> list[list[Any]]:
        """Return what the objective says of micro-batches."""
        del adapters
        return [[self.objective.forward(self._model, batch) for batch in shard] for shard in shards]

    def logprobs(self, samples: Sequence[TrainingSample], *, adapters: bool = True) -> list[FloatArray]:
        """Return each sample's log-probabilities, shape [T]."""
        del adapters
        shards = self.micro_batches(samples)
        return per_sample(samples, shards, self.forward(shards))

    def evaluate(self, update: Any) -> dict[str, Metric]:
        """Measure nothing: `recipes.py` samples."""
        raise NotImplementedError(f"{type(update).__name__} is not measured here")

    def train_step(self, step: Any) -> dict[str, Metric]:
        """Take the optimizer steps of one training step."""
        metrics: list[Metrics] = []
        updates = 0
        for update in self.objective.updates(step, self):
            shared = self.objective.bind(update.shared, torch.device("cpu"))
            self._optimizer.zero_grad()
            for batch in update.shards[0]:
                loss, figures = self.objective.loss(self._model, batch, shared)
                loss.backward()
                metrics.append(figures)
            nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self._optimizer.step()
            updates += 1
        return self.objective.report(step, merge(metrics), updates)


class Learner:
    """A policy, with what a configuration says of how it learns.

    Args:
        config: The configuration of a run; its `algorithm`, `critic` and `reference` are used.
        tasks: How many tasks there are.
        seed: Of the networks and of sampling.
    """

    def __init__(self, config: RunConfig, tasks: int, seed: int) -> None:
        given: Any = config
        torch.manual_seed(seed)
        self._draw = torch.Generator().manual_seed(seed)
        self._version = 0
        self.policy = SmallPolicy(tasks)
        kl = KLController(given.algorithm.kl)
        objective = PolicyObjective(
            settings=given.training, algorithm=given.algorithm, max_response_tokens=TOKENS, kl=kl
        )
        self._engine = LocalEngine(objective, self.policy)
        start = SmallPolicy(tasks)
        start.load_state_dict(self.policy.state_dict())
        self._reference: Any = LocalEngine(objective, start) if given.reference is not None else None
        plugin = ADVANTAGES.get(given.algorithm.advantage.type)
        self.baselines = plugin.greedy_baseline
        estimator = plugin(given.algorithm.advantage)
        if plugin.needs_critic:
            critic: Any = LocalEngine(ValueObjective(settings=given.critic), SmallCritic(tasks))
            estimator.use(Critic(critic))
        self._advantages = Advantages(
            estimator,
            given.algorithm,
            kl,
            self._reference,
            max_response_tokens=TOKENS,
            warmup_steps=0 if given.critic is None else given.critic.warmup_steps,
        )
        self._in_loss = given.algorithm.kl.use == "loss"

    def answers(self, tasks: Sequence[Task], per_task: int, *, greedy: bool = False) -> list[list[Trajectory]]:
        """Sample answers to tasks, whose ids are their numbers."""
        numbers = torch.tensor([int(task.task_id) for task in tasks]).repeat_interleave(per_task)
        letters_NT, logprobs_NT, lengths_N = self.policy.sample(numbers, self._draw, greedy=greedy)
        made = [
            _trajectory(tasks[index // per_task], index % per_task, letters, logprobs, self._version)
            for index, (letters, logprobs) in enumerate(
                (letters[:length].numpy(), logprobs[:length].numpy())
                for letters, logprobs, length in zip(letters_NT, logprobs_NT, lengths_N.tolist(), strict=True)
            )
        ]
        return [made[first : first + per_task] for first in range(0, len(made), per_task)]

    def learn(self, groups: Sequence[Group[Scored]]) -> dict[str, float]:
        """Take one step on scored groups; return its metrics."""
        assigned = self._advantages.assign(groups)
        report: Metrics = {}
        if assigned.samples:
            reference = self._reference if self._in_loss else None
            report = self._engine.train_step(with_reference(assigned.samples, reference))
        self._version += 1
        return {**reduce(assigned.metrics), **reduce(report)}


def _trajectory(task: Task, place: int, letters: Any, logprobs: Any, version: int) -> Trajectory:
    count = len(letters)
    tokens = np.concatenate([task.prompt_ids, int(task.task_id) * LETTERS + letters]).astype(np.int32)
    sampled = np.arange(count + 1) >= 1
    return Trajectory(
        task=task,
        sample_index=place,
        token_ids=tokens,
        sampled=sampled,
        logprobs=np.concatenate([[0.0], logprobs]).astype(np.float32),
        turns=np.where(sampled, 0, -1).astype(np.int32),
        parts=(Part(start=0, end=count + 1, prompt_length=1),),
        segments=(Segment(start=1, end=count + 1, policy_version=version),),
        text="",
        stop_reason=StopReason.STOP if letters[-1] == 0 else StopReason.LENGTH,
    )
