"""From the data of a request to the micro-batches of ranks, and the losses that clients name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from roll_like.service.types import Datum
from roll_like.training.interface import RankModel
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.layout import Layout, MicroBatch, PerToken, even_out, padded
from roll_like.training.rows import TokenRow, balance, split_by_budget
from roll_like.types import FloatArray

#: Given the log-probabilities of a datum's targets and its inputs, both shaped as the targets, the losses of each.
TargetLosses = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatumBatch(MicroBatch):
    """Rows of data, each with the inputs of its loss.

    Attributes:
        data: The inputs of each datum in the batch, in the order of its targets, by its index in the request.
        counts: Whether they count; a batch that only fills up a rank's work repeats some that do not.
    """

    data: Mapping[int, Mapping[str, npt.NDArray[Any]]] = field(default_factory=dict)
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DatumOutput:
    """What a rank tells of one datum.

    Attributes:
        index: Its place in the request.
        loss: The sum of the losses of its targets.
        logprobs: Of its targets, shaped as these are.
    """

    index: int
    loss: float
    logprobs: FloatArray


@dataclass(frozen=True, kw_only=True)
class RequestObjective(LanguageModelObjective[Any, DatumBatch]):
    """A language model that learns what requests say."""

    @property
    def row_sharing(self) -> str | None:
        """None: every datum has a row of its own."""
        return None

    def outputs(self, model: RankModel, batch: DatumBatch, losses: TargetLosses) -> tuple[Tensor, list[DatumOutput]]:
        """Return a micro-batch's share of the loss, a sum over targets, and what is told of each datum."""
        logprobs_N, _ = self.logprobs(model, batch)
        total, outputs = logprobs_N.new_zeros(()), list[DatumOutput]()
        for index, own, inputs in batch_parts(batch):
            targets = inputs["target_tokens"]
            logprobs = logprobs_N[own].reshape(targets.shape)
            loss = losses(logprobs, tensors_of_inputs(inputs, model.device)).sum()
            total = total + (loss if batch.counts else 0 * loss)
            if batch.counts:
                outputs.append(
                    DatumOutput(
                        index=index, loss=float(loss.detach()), logprobs=logprobs.detach().float().cpu().numpy()
                    )
                )
        return total, outputs


def batch_parts(batch: DatumBatch) -> Iterator[tuple[int, slice, Mapping[str, npt.NDArray[Any]]]]:
    """Yield each datum of a batch: its index, where its targets are among the batch's, and its inputs."""
    start = 0
    for index, inputs in batch.data.items():
        end = start + inputs["target_tokens"].size
        yield index, slice(start, end), inputs
        start = end


def tensors_of_inputs(inputs: Mapping[str, npt.NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Return a datum's inputs as tensors; numbers that are no tokens as float32."""
    found = {}
    for name, values in inputs.items():
        kept = np.int64 if name == "target_tokens" else np.float32
        found[name] = torch.from_numpy(np.array(values, kept)).to(device)
    return found


def datum_batches(data: Sequence[Datum], layout: Layout) -> list[list[DatumBatch]]:
    """Return each rank's micro-batches of a request's data; all ranks have equally many."""
    rows = [_row(index, datum) for index, datum in enumerate(data)]
    weights = PerToken([np.ones(datum.inputs["target_tokens"].size, np.float32) for datum in data])
    joined = layout.get("joined", False)
    plans = [split_by_budget(own, layout["max_tokens"], joined=joined) for own in balance(rows, layout["ranks"])]
    count = even_out(plans)
    shards = []
    for plan in plans:
        batches = [_batch(own, data, weights) for own in plan]
        if len(batches) < count:
            filler = _batch([min(rows, key=len)], data, weights, counts=False)
            batches += [filler] * (count - len(batches))
        shards.append(batches)
    return shards


def _batch(rows: Sequence[TokenRow], data: Sequence[Datum], weights: PerToken, *, counts: bool = True) -> DatumBatch:
    indices = [int(row.sample_ids[0]) for row in rows]
    return DatumBatch(
        **padded(rows, weights).shared_fields, data={index: data[index].inputs for index in indices}, counts=counts
    )


def _row(index: int, datum: Datum) -> TokenRow:
    """Return a datum as a row; each position has as many targets as the request has candidates for it."""
    length, targets = len(datum.tokens), datum.inputs["target_tokens"]
    count = targets.size
    return TokenRow(
        token_ids=datum.tokens.astype(np.int32),
        positions=np.arange(length, dtype=np.int32),
        segment_ids=np.ones(length, np.int32),
        sources=np.repeat(np.arange(length, dtype=np.int32), count // length),
        targets=targets.reshape(-1).astype(np.int32),
        sample_ids=np.full(count, index, np.int32),
        target_ids=np.arange(count, dtype=np.int32),
    )


def in_order(outputs: Sequence[Sequence[DatumOutput]]) -> list[DatumOutput]:
    """Return what ranks told, in the order of the request's data."""
    return sorted((each for rank in outputs for each in rank), key=lambda output: output.index)
