"""How the attention of a layer scores keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What turns products of queries and keys into weights; heads H.

    Attributes:
        scale: Factor of the products.
        window: Keys that a query sees, that of its own token included; None for all before it.
        softcap: Largest score; None for no bound (Gemma 2).
        sinks_H: A score of each head that takes weight and has no value; None for none (gpt-oss).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    def of_heads(self, heads: slice) -> Scores:
        """Return the same for some of the heads."""
        return self if self.sinks_H is None else replace(self, sinks_H=self.sinks_H[heads])
