"""The driver's handle on the ranks of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from roll_like.cluster import Cluster, WorkerDied
from roll_like.cluster.worker_restarts import RestartCallback, WorkerRestarts, to_stderr
from roll_like.config.model import ModelConfig
from roll_like.config.training import CopySection
from roll_like.errors import WorkerError
from roll_like.models.card import ModelCard
from roll_like.training.backend import State
from roll_like.training.interface import BatchT, CopyShare, Objective, Share, StepT, Update
from roll_like.training.layout import Layout, MicroBatch, micro_batches, per_sample
from roll_like.training.rank import TrainingRank
from roll_like.training.skipped import COMPUTE_SECONDS, SkippedUpdates
from roll_like.types import FloatArray, TrainingSample
from roll_like.values import Last, Max, Metric, Sum, merge

Timer = Callable[[str], AbstractContextManager[None]]


def untimed(_: str) -> AbstractContextManager[None]:
    """Time nothing."""
    return nullcontext()


R = TypeVar("R")
ShareT = TypeVar("ShareT")
SampleT_contra = TypeVar("SampleT_contra", bound=TrainingSample, contravariant=True)


class TrainingEngine(Generic[StepT]):
    """Spreads an objective's batches over ranks and runs them.

    Args:
        cluster: Started ranks.
        objective: What they compute.
        timer: Times a named part of a step.
        joined: Whether the ranks join the rows of a micro-batch (`Layout`).
        frozen: Whether the model is only computed with. Its ranks are replaced here when they die, or raise once.
        report: Told about that.
    """

    def __init__(
        self,
        cluster: Cluster[TrainingRank],
        objective: Objective[StepT, Any],
        *,
        timer: Timer = untimed,
        joined: bool = False,
        frozen: bool = False,
        report: RestartCallback = to_stderr,
    ) -> None:
        self.cluster = cluster
        self.frozen = frozen
        self._worker_restarts = WorkerRestarts(cluster.name, "what it was asked is asked again", report)
        self.objective = objective
        self.timer = timer
        #: How often all ranks were started anew.
        self.restarts = 0
        #: Makes room for ranks that start anew, where others use the same memory.
        self.rebuilding: Callable[[], AbstractContextManager[None]] = nullcontext
        #: Called when they have started: what they held beside the model is to be sent again.
        self.on_rebuilt: list[Callable[[], None]] = []
        self.layout = Layout(**{**objective.layout(len(cluster)), "joined": joined})
        #: Holds a model's states in the devices' memory while something is computed with them: others may need it else.
        self.resident: Callable[..., AbstractContextManager[None]] = lambda *states: nullcontext()
        #: Moves the weights by the gradient that was added up; returns each rank's metrics.
        self.optimizer_step = partial(cluster.everywhere, TrainingRank.optimizer_step)
        self._skipped = SkippedUpdates(objective.section, objective.metric_prefix)
        self._copy: str | None = None  # what computes in the place of what is trained

    def rebuild(self) -> None:
        """Start all ranks anew, in the place of those that are there or have died, as they were at their first start.

        Raises:
            RollLikeError: A rank did not start.
        """
        with self.rebuilding():
            self.cluster.rebuild()
            self.restarts += 1
            self._skipped = SkippedUpdates(self.objective.section, self.objective.metric_prefix)
            meet(self.cluster)
        for again in self.on_rebuilt:
            again()

    def end(self) -> None:
        """End the processes of all ranks: without the one that died they are of no use, and hold memory."""
        for rank in range(len(self.cluster)):
            self.cluster.fence(rank)

    def train_step(self, step: StepT) -> dict[str, Metric]:
        """Take the optimizer steps of one training step; none where there is nothing to learn.

        Args:
            step: What the objective learns from.

        Returns:
            The objective's metrics; a loss is that before each optimizer step, and a mean over them.

        Raises:
            NonFiniteGradientError: Too many updates were skipped.
        """
        parts: list[dict[str, Metric]] = []
        with self.resident("weights", "optimizer"):
            for update in self.objective.updates(step, self):
                for phases in self._skipped.attempts(parts):
                    phases.append(self.forward_backward(update))
                    phases.append(merge(self.optimizer_step()))
        if not parts:
            return self.objective.report(step, {}, 0)
        updates = sum(self._skipped.metric not in part for part in parts)
        seconds = sum(part.pop(COMPUTE_SECONDS).value for part in parts)
        metrics = merge([*parts, *self.cluster.everywhere(TrainingRank.speed)])
        metrics[COMPUTE_SECONDS] = Max(seconds)
        for name in self.objective.losses & metrics.keys():
            metrics[name] = Sum(metrics[name].value / updates)
        return self.objective.report(step, metrics, updates)

    def forward_backward(self, update: Update[Any]) -> dict[str, Metric]:
        """Add up the gradient of an optimizer step on the ranks."""
        return merge(self.scatter(TrainingRank.forward_backward, _shares(update)))

    def measure(self, step: StepT) -> dict[str, Metric]:
        """Return the objective's metrics of a step under the current weights, without an optimizer step."""
        return self.objective.measure(step, self)

    def evaluate(self, update: Update[Any]) -> dict[str, Metric]:
        """Return the metrics of one optimizer step's batches under the current weights."""
        with self.resident("weights"):
            return merge(self.scatter(TrainingRank.evaluate, _shares(update)))

    def forward(self, shards: Sequence[Sequence[BatchT]], *, adapters: bool = True) -> list[list[Any]]:
        """Return what the objective's forward pass says of each rank's micro-batches.

        Args:
            shards: Micro-batches of each rank.
            adapters: Whether with the model's adapters, where it has some, or as if it had none.
        """
        return self._passed(TrainingRank.forward if adapters else TrainingRank.forward_without_adapters, shards)

    def teach(self, shards: Sequence[Sequence[BatchT]]) -> list[list[Any]]:
        """Return what the model, as a teacher, says of each rank's micro-batches."""
        return self._passed(TrainingRank.teach, shards)

    @contextmanager
    def computing_with(self, copy: str) -> Iterator[None]:
        """Let `forward`, `logprobs` and `teach` compute with a copy of what is trained (`RankSpec.copies`)."""
        self._copy = copy
        try:
            yield
        finally:
            self._copy = None

    def move_copy(self, copy: str, share: float, *, reset_optimizer: bool = False) -> float:
        """Move a copy to `share` of what is trained, and the rest of itself; 1: it is the same then.

        Args:
            reset_optimizer: Whether the optimizer forgets its moments, too.

        Returns:
            How far they were apart: the root mean square of the differences of weights; what several ranks hold counts
            on each.
        """
        with self.resident("weights", *(("optimizer",) if reset_optimizer else ())):
            found = self.cluster.everywhere(TrainingRank.move_copy, copy, share)
            if reset_optimizer:
                self.cluster.everywhere(TrainingRank.reset_optimizer)
        squared, count = (sum(each) for each in zip(*found, strict=True))
        return math.sqrt(squared / max(count, 1))

    def _passed(
        self, method: Callable[[TrainingRank, Any], list[Any]], shards: Sequence[Sequence[BatchT]]
    ) -> list[list[Any]]:
        """Return what ranks make of their micro-batches; a frozen model's are replaced when they fail."""
        raised = False
        while True:
            try:
                with self.resident("weights"):
                    if self._copy is None:
                        return self.scatter(method, shards)
                    shares = [CopyShare(copy=self._copy, method=method.__name__, batches=each) for each in shards]
                    return self.scatter(TrainingRank.compute_with, shares)
            except WorkerError as error:
                died = isinstance(error, WorkerDied)
                # what is raised twice does not pass by itself; what a trained model has learned its files do not have,
                # so the run brings it back (`run.recovery`)
                if not self.frozen or error.worker is None or (raised and not died):
                    raise
                raised = not died
                self._worker_restarts.replace(f"every rank of {self.cluster.name}", error, self.rebuild)

    def scatter(self, method: Callable[[TrainingRank, ShareT], R], shares: Sequence[ShareT]) -> list[R]:
        """Call a method with a share for each group of ranks with the same rows; all of a group return the same."""
        sharing = self.objective.settings.sharing
        return self.cluster.scatter(method, [share for share in shares for _ in range(sharing)])[::sharing]

    def micro_batches(self, samples: Sequence[TrainingSample]) -> list[list[MicroBatch]]:
        """Return each rank's micro-batches of samples that are only computed."""
        return micro_batches(samples, **self.layout)

    def logprobs(self, samples: Sequence[TrainingSample], *, adapters: bool = True) -> list[FloatArray]:
        """Return each sample's log-probabilities under this engine's weights, shape [T], 0 where not sampled.

        Args:
            samples: What was sampled.
            adapters: Whether with the model's adapters, where it has some, or as if it had none.
        """
        shards = self.micro_batches(samples)
        with self.timer("logprobs"):
            results = self.forward(shards, adapters=adapters)
        return per_sample(samples, shards, results)

    def score_energies(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Return 1 − 2π(y) + Σ_v π(v)² at each sampled token y under this engine's weights, one array [T] a sample."""
        shards = self.micro_batches(samples)
        with self.timer("logprobs"), self.resident("weights"):
            results = self.scatter(TrainingRank.score_energies, shards)
        return per_sample(samples, shards, results)

    def ask(self, method: Callable[..., FloatArray], samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Return what a function makes of each sample's targets, one array [T] a sample, 0 where there is no target.

        Args:
            method: Called in ranks with the objective, the model and a micro-batch; returns an array [N].
            samples: What is computed.
        """
        shards = self.micro_batches(samples)
        with self.timer("logprobs"), self.resident("weights"):
            results = self.scatter(TrainingRank.ask_each, [(method, shard) for shard in shards])
        return per_sample(samples, shards, results)

    def state_bytes(self) -> int:
        """Return about how much memory weights and optimizer take, of all ranks; copies count as often as there are."""
        return sum(self.cluster.everywhere(TrainingRank.state_bytes))

    def save(self, directory: Path) -> None:
        """Write every rank's states under a directory that all ranks see."""
        (directory / self.objective.folder).mkdir(exist_ok=True)
        with self.resident("weights", "optimizer"):
            self.cluster.everywhere(TrainingRank.save, str(directory / self.objective.folder))

    def load(self, directory: Path) -> None:
        """Take back what `save` wrote."""
        with self.resident("weights", "optimizer"):
            self.cluster.everywhere(TrainingRank.load, str(directory / self.objective.folder))

    def offload(self, state: State) -> None:
        """Move the weights, or all else of training, to host memory; nothing that needs them may be called then."""
        self.cluster.everywhere(TrainingRank.offload, state)

    def reload(self, state: State) -> None:
        """Move it back."""
        self.cluster.everywhere(TrainingRank.reload, state)

    def export(self, directory: Path, tokenizer: ModelConfig, card: ModelCard) -> None:
        """Write a Hugging Face directory.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        with self.resident("weights"):
            self.cluster.everywhere(TrainingRank.export, str(directory), tokenizer, card)


def meet(cluster: Cluster[TrainingRank]) -> None:
    """Have new ranks load their model and join their process group.

    Raises:
        EngineError: A rank did not start.
    """
    address = cluster.on(0, TrainingRank.address)
    cluster.everywhere(TrainingRank.start, address)


def _shares(update: Update[BatchT]) -> list[Share[BatchT]]:
    return [Share(batches=batches, shared=update.shared) for batches in update.shards]


class Reference(Protocol[SampleT_contra]):
    """What a policy is compared with: a frozen engine, `WithoutAdapters`, or a `PolicyCopy`."""

    def logprobs(self, samples: Sequence[SampleT_contra]) -> list[FloatArray]:
        """Return each sample's log-probabilities, shape [T], 0 where not sampled."""


class WithoutAdapters:
    """The model that training started from: the policy with its adapters switched off."""

    def __init__(self, policy: TrainingEngine[Any]) -> None:
        self._policy = policy

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Return each sample's log-probabilities, shape [T], 0 where not sampled."""
        return self._policy.logprobs(samples, adapters=False)


class PolicyCopy:
    """A copy of the policy's weights on its own ranks, which follows them: a reference, or a teacher.

    It starts as the policy does, and moves after every `sync_steps` steps: copy ← α·policy + (1 − α)·copy.

    Args:
        policy: The model that is trained.
        name: The copy's, for its ranks and metrics.
        section: How it follows.
    """

    def __init__(self, policy: TrainingEngine[Any], name: str, section: CopySection) -> None:
        self._policy, self._name, self._section = policy, name, section
        self._last_sync = 0

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Return each sample's log-probabilities, shape [T], 0 where not sampled."""
        with self.computing():
            return self._policy.logprobs(samples)

    def computing(self) -> AbstractContextManager[None]:
        """Let the policy's engine compute with the copy."""
        return self._policy.computing_with(self._name)

    def follow(self, finished: int) -> dict[str, Metric]:
        """Move if that is due after so many steps; return metrics.

        Called after the step's optimizer updates and before its checkpoint, also when the step is computed again.
        """
        section, metrics = self._section, dict[str, Metric]()
        if section.sync_steps is not None and finished % section.sync_steps == 0:
            distance = self._policy.move_copy(self._name, section.mixup_alpha, reset_optimizer=section.reset_optimizer)
            metrics[f"{self._name}/distance"] = Last(distance)
            self._last_sync = finished
        return {**metrics, f"{self._name}/last_sync": Last(float(self._last_sync))}

    def state(self) -> dict[str, Any]:
        """Return the step after which it moved last."""
        return {"last_sync": self._last_sync}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; its numbers are on the ranks."""
        self._last_sync = state["last_sync"]


def policy_copies(policy: TrainingEngine[Any], sections: Mapping[str, CopySection]) -> dict[str, PolicyCopy]:
    """Return the copies that a policy's ranks keep (`RunConfig.copies`), by name."""
    return {name: PolicyCopy(policy, name, section) for name, section in sections.items()}


def follow(copies: Mapping[str, PolicyCopy], finished: int) -> dict[str, Metric]:
    """Move the copies that are due after so many steps; return their metrics."""
    return merge(copy.follow(finished) for copy in copies.values())
