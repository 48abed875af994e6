"""How fast a rank trains: model FLOPs over time, and over its GPU's peak rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from roll_like.config.gpus import GPU_KINDS, gpu_named
from roll_like.models.flops import ForwardPass
from roll_like.models.lora import adapter_parameters
from roll_like.models.shape import ModelShape, load_model_shape
from roll_like.training.layout import MicroBatch
from roll_like.training.rows import PADDING
from roll_like.values import Mean, Metric

if TYPE_CHECKING:
    from roll_like.training.interface import RankSpec


@dataclass(slots=True, kw_only=True)
class Speed:
    """Counts what was trained in how much time, by `roll_like.models.flops`.

    CPUs have no utilisation: no peak rate of theirs is documented, and a measured one depends on what else they do.

    Attributes:
        shape: The model's sizes.
        adapters: Parameters of its low-rank adapters; None where all of it is trained.
        sharing: Ranks that compute the same rows together.
        peak: Documented rate of matrix products in the model's precision, in FLOP/s; None where it is not known.
    """

    shape: ModelShape
    adapters: int | None
    peak: float | None
    sharing: int = 1
    _flops: float = 0.0
    _seconds: float = 0.0

    @classmethod
    def of(cls, model: Any, spec: RankSpec[Any]) -> Self:
        """Return the counter of a model in training.

        Args:
            model: The Hugging Face model; its adapters may be sharded.
            spec: Says where it is from, device and precision.
        """
        adapters = None
        if spec.objective.settings.lora is not None:
            adapters = sum(getattr(each, "ds_numel", each.numel()) for _, each in adapter_parameters(model))
        kind = gpu_named(torch.cuda.get_device_name()) if spec.device == "cuda" else None
        peak = None if kind is None else GPU_KINDS[kind].peak(spec.dtype)
        return cls(
            shape=load_model_shape(Path(spec.model_path)),
            adapters=adapters,
            peak=peak,
            sharing=spec.objective.settings.sharing,
        )

    def add(self, seconds: float, batches: Sequence[MicroBatch] = ()) -> None:
        """Count time that training took, and the micro-batches whose gradient was computed in it."""
        self._seconds += seconds
        needed = sum((pass_of(batch) for batch in batches), ForwardPass(0, 0, 0))
        self._flops += needed.training_flops(self.shape, self.adapters) / self.sharing

    def metrics(self, role: str) -> dict[str, Metric]:
        """Return the rate since the last call, and its share of the peak rate where that is known.

        Args:
            role: `trainer` or `critic`.
        """
        flops, seconds = self._flops, self._seconds
        self._flops = self._seconds = 0.0
        if not seconds:
            return {}
        found: dict[str, Metric] = {f"throughput/{role}_tflops": Mean(flops / seconds / 1e12, seconds)}
        if self.peak is not None:
            found[f"util/{role}_mfu"] = Mean(flops / seconds / self.peak, seconds)
        return found


def pass_of(batch: MicroBatch) -> ForwardPass:
    """Return what a micro-batch needs; one that only fills up a rank's turn (all weights 0) needs nothing.

    A token sees those before it in its own sample, and its position is their number.
    """
    if not batch.weights.any():
        return ForwardPass(0, 0, 0)
    kept = batch.segment_ids_BL != PADDING
    pairs = int((batch.positions_BL[kept] + 1).sum(dtype="int64"))
    return ForwardPass(int(kept.sum()), pairs, len(batch.targets))
