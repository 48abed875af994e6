"""The critic: the value function that an advantage estimator learns with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from roll_like.algorithms.aggregation import token_weights
from roll_like.algorithms.value_loss import explained_variance, value_loss
from roll_like.config.training import CriticConfig
from roll_like.errors import EngineError
from roll_like.training.engine import TrainingEngine
from roll_like.training.interface import Engine, Objective, RankModel, RankSpec, Update
from roll_like.training.language_model import load_language_model, prepared
from roll_like.training.layout import Layout, MicroBatch, PerToken, per_sample, spread, update_parts
from roll_like.training.policy import RowModule
from roll_like.types import FloatArray, PolicySample
from roll_like.values import Mean, Metric, Metrics, Sum, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueStep:
    """What a critic learns from in one step; arrays [T], one a sample, 0 where not sampled.

    Attributes:
        samples: A step's samples.
        values: Of the critic before the step.
        returns: Targets of the values.
    """

    samples: Sequence[PolicySample]
    values: Sequence[FloatArray]
    returns: Sequence[FloatArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueBatch(MicroBatch):
    """What a critic is trained on, beside the rows: figures of each target, shape [N].

    Attributes:
        old_values: The critic's values before the step.
        returns: What they should have been.
    """

    old_values: FloatArray
    returns: FloatArray


class Critic:
    """A value function in the ranks of an engine."""

    def __init__(self, engine: TrainingEngine[ValueStep]) -> None:
        self.engine = engine

    def values(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        """Return the value of the state before each token of each sample, shape [T], 0 where not sampled."""
        shards = self.engine.micro_batches(samples)
        with self.engine.timer("critic"):
            return per_sample(samples, shards, self.engine.forward(shards))

    def learn(
        self, samples: Sequence[PolicySample], values: Sequence[FloatArray], returns: Sequence[FloatArray]
    ) -> dict[str, Metric]:
        """Take `updates_per_step` optimizer steps over a step's samples.

        Args:
            values: What `values` returned for them before the step, one array [T] a sample.
            returns: Targets of the values, one array [T] a sample.

        Returns:
            `critic/…`; figures of values and returns are over the step's sampled tokens, before the update.
        """
        with self.engine.timer("critic"):
            return self.engine.train_step(ValueStep(samples=samples, values=values, returns=returns))


@dataclass(frozen=True, kw_only=True)
class ValueObjective(Objective[ValueStep, ValueBatch]):
    """Moves values towards returns: a mean over the sampled tokens of an update, of all ranks.

    Attributes:
        settings: The `critic` section.
    """

    settings: CriticConfig

    section: ClassVar[str] = "critic"
    metric_prefix: ClassVar[str] = "critic"
    role_name: ClassVar[str] = "critic"
    folder: ClassVar[str] = "critic"
    losses: ClassVar[frozenset[str]] = frozenset({"critic/loss"})

    def load(self, spec: RankSpec[Any]) -> nn.Module:
        """Return a language model's backbone, with adapters where it has some, and a value head."""
        return ValueModule(prepared(load_language_model(spec, self.settings), spec, self.settings))

    def forward(self, model: RankModel, batch: MicroBatch) -> FloatArray:
        """Return the value of the state before every target, shape [N].

        Raises:
            EngineError: A value is not finite.
        """
        values_N: Tensor = model(batch)
        if not values_N.isfinite().all():
            raise EngineError(
                "the critic's values hold infinities or NaN; finite numbers were expected",
                fix="lower critic.optimizer.lr, or check critic.path",
            )
        found: FloatArray = values_N.cpu().numpy()
        return found

    def updates(self, step: ValueStep, engine: Engine) -> Iterator[Update[ValueBatch]]:
        """Yield `updates_per_step` optimizer steps."""
        for part in update_parts(step.samples, self.settings.updates_per_step):
            samples = [step.samples[index] for index in part]
            shards = value_batches(
                samples,
                token_weights(samples, "token_mean", max_response_tokens=1),
                [step.values[index] for index in part],
                [step.returns[index] for index in part],
                **engine.layout,
            )
            if shards[0]:
                yield Update(shards=shards)

    def loss(self, model: RankModel, batch: ValueBatch, shared: None) -> tuple[Tensor, Metrics]:  # noqa: ARG002
        """Return a micro-batch's share of the loss."""
        weights_N = model.tensor(batch.weights)
        losses_N, clipped_N = value_loss(
            model(batch), model.tensor(batch.old_values), model.tensor(batch.returns), self.settings.value_clip
        )
        loss = (losses_N * weights_N).sum()
        counted = weights_N != 0
        count = int(counted.sum())
        clipped = float(clipped_N[counted].float().mean()) if count else 0.0
        return loss, {"critic/loss": Sum(float(loss.detach())), "critic/clip_fraction": Mean(clipped, count)}

    def report(self, step: ValueStep, metrics: Mapping[str, Metric], updates: int) -> dict[str, Metric]:
        """Return the critic's own metrics; of values and returns only where something was learned."""
        own = {name: metric for name, metric in metrics.items() if not name.startswith("time/")}
        return merge([_fit(step), own]) if updates else own


class ValueHead(nn.Module):
    """A linear map from a hidden state to its value, computed in float32; every value is 0 to begin with.

    Args:
        width: Size of a hidden state, D.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Return values, shape [N], float32."""
        values_N1 = nn.functional.linear(hidden_ND.float(), self.weight.float(), self.bias.float())
        return values_N1.squeeze(1)


class ValueModule(RowModule):
    """A Hugging Face causal model without its language-model head, and a value head instead.

    Args:
        causal_lm: The model. Only its backbone is kept: what nothing computes with must not be in the
            optimizer. A tied embedding stays, as the backbone's own.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.backbone = causal_lm.base_model
        self.head = ValueHead(causal_lm.get_output_embeddings().in_features)

    def forward(
        self, token_ids_BL: Tensor, positions_BL: Tensor, segment_ids_BL: Tensor, sources_N: Tensor, *_: Tensor
    ) -> Tensor:
        """Return the value of the state at each flat index `sources_N` of [B·L], shape [N], float32."""
        rows = (token_ids_BL, positions_BL, segment_ids_BL, sources_N)
        hidden_ND, own = self.states_before(self.backbone, *rows)
        values_N: Tensor = own.whole(self.head(hidden_ND))
        return values_N


def value_batches(
    samples: Sequence[PolicySample],
    weights: Sequence[FloatArray],
    values: Sequence[FloatArray],
    returns: Sequence[FloatArray],
    **layout: Unpack[Layout],
) -> list[list[ValueBatch]]:
    """Return each rank's micro-batches of one optimizer step of a critic, as `micro_batches` does.

    Args:
        weights: Weight of each token in the loss, one array [T] a sample.
        values: The critic's values before the step, one array [T] a sample.
        returns: Targets of the values, one array [T] a sample.
    """
    old, targets = PerToken(values), PerToken(returns)

    def make(batch: MicroBatch) -> ValueBatch:
        return ValueBatch(**batch.shared_fields, old_values=old.of(batch), returns=targets.of(batch))

    return spread(samples, weights, make, **layout)


def _fit(step: ValueStep) -> dict[str, Metric]:
    """Return how well values foretold returns, over the sampled tokens."""
    loss_masks = [sample.loss_mask for sample in step.samples]
    values_N = np.concatenate([array[mask] for array, mask in zip(step.values, loss_masks, strict=True)])
    returns_N = np.concatenate([array[mask] for array, mask in zip(step.returns, loss_masks, strict=True)])
    tokens = float(len(values_N))
    explained = explained_variance(values_N, returns_N)
    metrics: dict[str, Metric] = {
        "critic/value_mean": Mean(float(values_N.mean(dtype=np.float64)), tokens),
        "critic/return_mean": Mean(float(returns_N.mean(dtype=np.float64)), tokens),
    }
    if not math.isnan(explained):  # returns that are all equal have no variance to explain
        metrics["critic/explained_variance"] = Mean(explained, tokens)
    return metrics
