"""What a model learns: objectives, and what they see of a rank's model and of the engine. Backends: `backend.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from roll_like.config.load import SentPlugin
from roll_like.config.model import ModelTask, Precision
from roll_like.config.run import ALWAYS_SHARED
from roll_like.config.training import TrainerConfig
from roll_like.training.layout import Layout, MicroBatch
from roll_like.training.policy import tensors_of
from roll_like.types import FloatArray, TrainingSample
from roll_like.values import Mean, Metric, Metrics, Sum, merge

#: What an objective learns from in one step.
StepT = TypeVar("StepT")
BatchT = TypeVar("BatchT", bound=MicroBatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """A rank's model, as objectives see it.

    Attributes:
        module: What `Objective.load` returned.
        forward: Runs it through the backend.
        device: Where it is.
        joined: Whether it joins the rows of a micro-batch and computes no padding.
    """

    module: Any
    forward: Callable[..., Any]
    device: torch.device
    joined: bool = False

    def __call__(self, batch: MicroBatch, *more: Any) -> Any:
        """Run the module on a micro-batch; `more` follows its index tensors (`tensors_of`)."""
        return self.forward(*tensors_of(batch, self.device), *more)

    def tensor(self, array: FloatArray) -> Tensor:
        """Return an array on the model's device."""
        return torch.from_numpy(array).to(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(Generic[BatchT]):
    """What one optimizer step learns from.

    Attributes:
        shards: Each rank's micro-batches; all ranks have equally many.
        shared: What objectives need to know of the whole step, on every rank.
    """

    shards: Sequence[Sequence[BatchT]]
    shared: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyShare:
    """What one rank computes with a copy of what it trains in its place.

    Attributes:
        copy: The copy's name.
        method: The name of the rank's method.
        batches: Its argument.
    """

    copy: str
    method: str
    batches: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share(Generic[BatchT]):
    """One rank's part of an `Update`."""

    batches: Sequence[BatchT]
    shared: Any


class Engine(Protocol):
    """What an objective asks of the engine that runs it: a `TrainingEngine`, or a fake."""

    @property
    def layout(self) -> Layout:
        """How samples are laid out for the ranks."""

    @property
    def timer(self) -> Callable[[str], AbstractContextManager[None]]:
        """Times a named part of a step."""

    def forward(self, shards: Sequence[Sequence[Any]], *, adapters: bool = True) -> list[list[Any]]:
        """Return what the objective's forward pass says of each rank's micro-batches."""

    def logprobs(self, samples: Sequence[TrainingSample], *, adapters: bool = True) -> list[FloatArray]:
        """Return each sample's log-probabilities under the engine's weights, shape [T], 0 where not sampled."""

    def evaluate(self, update: Update[Any]) -> dict[str, Metric]:
        """Return the metrics of one optimizer step's batches under the current weights."""


@dataclass(frozen=True, kw_only=True)
class Objective(ABC, Generic[StepT, BatchT]):
    """What a model computes and what it learns: on the driver the layout of a step, on ranks its loss.

    The driver has one and every rank a copy, so it must pickle; what it changes on one side is not seen on the other.
    A model that is never trained needs `load` and `forward` only.

    Attributes:
        settings: The section of the model: ranks, backend, optimizer, token budget.
        packing: Whether samples of several groups share a row; the numbers are the same, with less padding.
    """

    settings: TrainerConfig
    packing: bool = False

    #: The section's name, for messages.
    section: ClassVar[str] = "training"
    #: First part of the names of this model's metrics.
    metric_prefix: ClassVar[str] = "train"
    #: Names the ranks' memory and speed in metrics.
    role_name: ClassVar[str] = "trainer"
    #: Folder of a checkpoint that has the model's files: those of two models are called alike.
    folder: ClassVar[str] = "."
    #: Whether the model drops at random what its config.json says while it is trained. A loss that compares
    #: log-probabilities, scores or values of several passes wants them to be of one model.
    drops: ClassVar[bool] = False
    #: What the exported model is for.
    task: ClassVar[ModelTask] = "text-generation"
    #: Sums over micro-batches and ranks of one optimizer step, and means over the optimizer steps of a training step.
    losses: ClassVar[frozenset[str]] = frozenset({"train/loss"})

    # ---- on ranks ------------------------------------------------------------------------------

    @abstractmethod
    def load(self, spec: RankSpec[Any]) -> nn.Module:
        """Return the module around the model of a spec, on the CPU."""

    def hf_model(self, module: nn.Module) -> Any:
        """Return the part of the module whose weights are handed out, by the names of its parameters."""
        return module

    def forward(self, model: RankModel, batch: BatchT) -> Any:
        """Return what the model says of a micro-batch's targets, without gradient; plain arrays that travel."""
        raise NotImplementedError(f"{type(self).__name__} has a loss only")

    def teach(self, model: RankModel, batch: MicroBatch) -> Any:
        """Return what a teacher says of a micro-batch's targets, without gradient; plain arrays that travel."""
        raise NotImplementedError(f"{type(self).__name__} is no teacher")

    def colder(self, model: RankModel, batch: BatchT) -> FloatArray:
        """Return the log-probability of every target at half of the temperature, shape [N]; of language models."""
        raise NotImplementedError(f"{type(self).__name__} is no language model")

    def bind(self, shared: Any, device: torch.device) -> Any:  # noqa: ARG002 - what objectives may need
        """Return what `loss` gets as `shared`; called once an optimizer step."""
        return shared

    def loss(self, model: RankModel, batch: BatchT, shared: Any) -> tuple[Tensor, Metrics]:
        """Return a micro-batch's share of the loss, and its metrics.

        The loss is a sum over micro-batches and ranks: its weights divide by the whole global batch.
        """
        raise NotImplementedError(f"{type(self).__name__} is not trained")

    @property
    def row_sharing(self) -> str | None:
        """What puts several samples into one row: a key that can be set to false, `ALWAYS_SHARED`, or None.

        With None every sample has a row of its own.
        """
        if self.packing:
            return ALWAYS_SHARED
        return f"{self.section}.share_prompts" if self.settings.share_prompts else None

    # ---- on the driver -------------------------------------------------------------------------

    def layout(self, ranks: int) -> Layout:
        """Return how samples are laid out for the ranks: groups with the same rows count as one.

        Those that divide the tokens of a row have all their budgets for it.
        """
        return Layout(
            ranks=ranks // self.settings.sharing,
            max_tokens=self.settings.max_tokens_per_micro_batch * self.settings.sequence_parallel,
            share_prompts=self.settings.share_prompts and self.row_sharing is not None,
            packing=self.packing,
        )

    def updates(self, step: StepT, engine: Engine) -> Iterator[Update[BatchT]]:
        """Yield the optimizer steps of one training step; each is taken before the next is asked for."""
        raise NotImplementedError(f"{type(self).__name__} is not trained")

    def measure(self, step: StepT, engine: Engine) -> dict[str, Metric]:
        """Return the metrics of a step under the current weights."""
        return merge(engine.evaluate(update) for update in self.updates(step, engine))

    def report(self, step: StepT, metrics: Mapping[str, Metric], updates: int) -> dict[str, Metric]:  # noqa: ARG002
        """Return the metrics of a step that was trained on, completed by what follows from all of them.

        Args:
            step: What was trained on.
            metrics: Of the updates that moved the weights; without one, at most those of skipped ones and of the ranks.
            updates: How many moved the weights.
        """
        counted: dict[str, Metric] = {**metrics, "train/updates": Sum(float(updates))}
        if updates:
            computed = metrics["train/computed_tokens"].value
            fraction = metrics["train/padding_tokens"].value / computed if computed else 0.0
            counted["train/padding_fraction"] = Mean(fraction, computed)
        return counted


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec(Generic[StepT]):
    """What a rank needs to know.

    Attributes:
        objective: What it computes.
        model_path: Local Hugging Face directory.
        dtype: Precision of the forward pass; master weights are float32.
        device: `cpu` or `cuda`.
        threads: Cores of this rank on CPU.
        seed: Seed of everything random.
        total_updates: Optimizer steps of the whole run, for the schedule.
        trust_remote_code: Whether the model may bring code.
        window: Longest sequence of the run, in tokens.
        frozen: Whether the model is not trained; then it has neither optimizer nor adapters.
        imports: Modules to import first; they register plugins.
        plugins: Losses and backends that no module can be imported for (`notebook_plugins`).
        float32_head: Whether a language model's output layer computes in float32.
        copies: Names of copies of what is trained that each rank keeps, and whether in float32.
    """

    objective: Objective[StepT, Any]
    model_path: str
    dtype: Precision
    device: str
    threads: int
    seed: int
    total_updates: int
    trust_remote_code: bool
    window: int
    frozen: bool = False
    imports: tuple[str, ...] = ()
    plugins: tuple[SentPlugin, ...] = ()
    float32_head: bool = False
    copies: Mapping[str, bool] = field(default_factory=dict)


def computed(batch: MicroBatch, model: RankModel) -> Metrics:
    """Return how many tokens a model computes for a micro-batch, and how many of them are padding."""
    padding = 0 if model.joined else batch.padding
    return {
        "train/computed_tokens": Sum(float(batch.tokens - batch.padding + padding)),
        "train/padding_tokens": Sum(float(padding)),
    }
