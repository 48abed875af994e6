"""Engines that follow a policy while it is trained on something else than their last samples, and its evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.policy_gradient.gpu_sharing import GPUSharing
from roll_like.rollout.collection import Collected
from roll_like.rollout.evaluate import Evaluator
from roll_like.run.state import Evaluates, RunState
from roll_like.training.engine import TrainingEngine
from roll_like.values import Metric, Metrics, merge


@dataclass(kw_only=True)
class PolicyEngines:
    """The engines that sample from the policy that is being trained: they get its weights before they are asked.

    Attributes:
        state: The run.
        weights: Trainer to engines.
        policy: The model that is trained.
        gpu_sharing: Decides what holds the memory of GPUs that engines and models share.
        behind: Whether the policy has moved since the engines got its weights.
    """

    state: RunState
    weights: WeightSync
    policy: TrainingEngine[Any]
    gpu_sharing: GPUSharing
    behind: bool = True

    @property
    def version(self) -> int:
        """Version of the weights that they sample with."""
        return self.weights.version

    def continue_from(self, version: int) -> None:
        """Number the next weights after `version`, which a resumed run has had."""
        self.weights.version = version
        self.behind = True

    @contextmanager
    def sampling(self) -> Iterator[Metrics]:
        """Give the engines the newest weights and the devices; yield the figures of that. SIGTERM may cut it short."""
        figures: Metrics = {}
        if self.behind:
            with self.state.timer("sync"):
                figures = self.gpu_sharing.push(self.weights, self.policy).metrics
            self.behind = False
        self.gpu_sharing.wake()
        with self.state.timer("generate"), self.state.interruptible():
            yield figures
        self.gpu_sharing.sleep()

    def fall_behind(self) -> None:
        """Note that the policy is about to move."""
        self.behind = True
        self.gpu_sharing.policy_moves()


class OnPolicyEvaluator:
    """Measures the policy by rewards, with its newest weights in the engines.

    Args:
        evaluator: Samples and scores.
        engines: What it samples with.
    """

    def __init__(self, evaluator: Evaluator, engines: PolicyEngines) -> None:
        self._evaluator = evaluator
        self._engines = engines

    def due(self, finished: int, total: int) -> bool:
        """Return whether to evaluate after `finished` of `total` steps."""
        return self._evaluator.due(finished, total)

    def evaluate(self) -> tuple[Mapping[str, Metric], Collected]:
        """Return `eval/avg`, `eval/pass@k` and so on, and the scored answers."""
        with self._engines.sampling():
            return self._evaluator.evaluate()

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of: avg@k."""
        return self._evaluator.score(values)


class Evaluators:
    """Several evaluations as one; each has a schedule of its own.

    Args:
        parts: The evaluations; the best checkpoint is chosen by the first that has a score. All are
            run until `due` was asked.
    """

    def __init__(self, parts: Sequence[Evaluates]) -> None:
        self._parts = parts
        self._due = parts

    def due(self, finished: int, total: int) -> bool:
        """Return whether any is due; those are the ones that `evaluate` runs."""
        self._due = [part for part in self._parts if part.due(finished, total)]
        return bool(self._due)

    def evaluate(self) -> tuple[Mapping[str, Metric], Collected | None]:
        """Return the figures of all that are due, and the scored answers where there are any."""
        results = [part.evaluate() for part in self._due]
        answers = [collected for _, collected in results if collected is not None]
        return merge(figures for figures, _ in results), answers[0] if answers else None

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of."""
        return next((score for part in self._parts if (score := part.score(values)) is not None), None)
