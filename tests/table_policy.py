"""A policy of one table that samples, and is trained by the real objective: an agentic step in a second.

The next token follows from the last one alone (`bigram_engine.py`), here over a whole tokenizer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from bigram_engine import BigramBackend, OneRank
from fake_policy import Unqueued
from rank_specs import cpu_rank

from roll_like.algorithms.kl import KLController
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.training import TrainingConfig
from roll_like.data.chat import Renderer
from roll_like.inference.interface import GenerateRequest, Generation
from roll_like.policy_gradient.advantages import Advantages
from roll_like.policy_gradient.objective import PolicyObjective, with_reference
from roll_like.registry import ADVANTAGES
from roll_like.rollout.collection import Collected
from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import TrainingRank
from roll_like.types import FloatArray, Segment, StopReason
from roll_like.values import reduce


class TablePolicy(Unqueued):
    """Samples from the table and learns.

    Args:
        renderer: Tokenizer and chat template.
        likely: Texts of one token that it says more often than others, at first.
        algorithm: The `algorithm` section.
        lr: Step of plain gradient descent.
    """

    def __init__(self, renderer: Renderer, likely: Sequence[str], algorithm: dict[str, Any], *, lr: float) -> None:
        super().__init__()
        self.renderer = renderer
        self._draw = np.random.default_rng(0)
        size = len(renderer.tokenizer)
        table = self._draw.normal(0, 0.1, (size, size))
        table[:, [int(renderer.encode(text)[0]) for text in likely]] += 6.0
        config = AlgorithmConfig.model_validate(algorithm)
        kl = KLController(config.kl)
        settings = TrainingConfig()
        steep = settings.optimizer.model_copy(update={"lr": lr})  # more than a run may have: it is plain descent
        objective = PolicyObjective(
            settings=settings.model_copy(update={"optimizer": steep}), algorithm=config, max_response_tokens=8, kl=kl
        )
        self.backend = BigramBackend(torch.from_numpy(table))
        worker = TrainingRank(cpu_rank(objective, "", total_updates=1000), 0, 1)
        worker._backend = self.backend  # type: ignore[assignment]
        worker.take(torch.nn.Module())
        cluster: Any = OneRank(worker)
        self._trainer: TrainingEngine[Any] = TrainingEngine(cluster, objective)
        estimator = ADVANTAGES.get(config.advantage.type)(config.advantage)
        self._advantages = Advantages(estimator, config, kl, None, max_response_tokens=8)
        self._version = 0

    def logprobs(self, token_id: int) -> FloatArray:
        """Log-probabilities of what follows a token, shape [V]."""
        row: FloatArray = self.backend.table_VV[token_id].detach().log_softmax(-1).numpy()
        return row

    async def generate(self, request: GenerateRequest, affinity_key: Hashable, urgent: bool = False) -> Generation:
        ids, logprobs = [int(request.prompt_ids[-1])], list[float]()
        while len(logprobs) < request.sampling.max_tokens and (not logprobs or ids[-1] not in self.renderer.end_ids):
            row = self.logprobs(ids[-1])
            ids.append(int(self._draw.choice(len(row), p=np.exp(row) / np.exp(row).sum())))
            logprobs.append(float(row[ids[-1]]))
        sampled = np.array(ids[1:], np.int32)
        return Generation(
            request_id=request.request_id,
            token_ids=sampled,
            logprobs=np.array(logprobs, np.float32),
            segments=(Segment(start=0, end=len(sampled), policy_version=self._version),),
            text=self.renderer.decode(sampled),
            stop_reason=StopReason.STOP if ids[-1] in self.renderer.end_ids else StopReason.LENGTH,
        )

    def train(self, collected: Collected) -> dict[str, float]:
        """Take one step on what was sampled; return its figures."""
        assigned = self._advantages.assign(collected.groups)
        report = self._trainer.train_step(with_reference(assigned.samples, None))
        self._version += 1
        return {**reduce(assigned.metrics), **reduce(report)}
