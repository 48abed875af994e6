"""What a model in training holds: the sizes that it follows from, and its parts."""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes of a weight in 4 bits: with an 8-bit scale for 64 of them, and a float32 one for 256 scales.
QUANTIZED_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """What the memory of a model in training follows from.

    Attributes:
        parameters: Number of parameters, adapters included.
        trained: How many of them are trained.
        largest: Elements of the largest tensor.
        layer: Parameters of one layer.
        experts: Those of them that are of experts which its router chooses from.
        outside: Parameters outside of the layers: embedding, final norm, and the head where it is not the embedding.
        width: Bytes of a weight in the forward pass.
    """

    parameters: int
    trained: int
    largest: int
    layer: int
    outside: int
    width: int
    experts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Memory of one rank between and during forward passes, apart from activations.

    Attributes:
        weights: What the forward pass computes with.
        gradients: What is added up until an optimizer step.
        optimizer: Moments, and master weights where the forward pass has less precise ones.
        buffers: What the backend gathers, reduces and copies through while it trains.
        step: What an optimizer step takes beside all of these; no activations exist then.
    """

    weights: int
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    step: int = 0
