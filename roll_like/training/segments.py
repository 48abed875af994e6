"""Which tokens of a micro-batch see which: as masks, and as sequences for attention without a mask.

A token sees what comes before it in its own sample (`rows.py`). A layer with a sliding window of W tokens sees the last
W of them, itself included. They are counted by positions: between a response and its prompt there may be other
responses in the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from roll_like.errors import ConfigError
from roll_like.training.rows import PADDING, PREFIX_STRIDE
from roll_like.training.sequence_parallel import OwnTargets, SequenceParallel
from roll_like.training.sequences import SampleRows, Sequences


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

    @property
    def changed(self) -> bool:
        """Whether weights are other than the softmax of the scaled products."""
        return self.softcap is not None or self.sinks_H is not None

    def of_heads(self, heads: slice) -> Scores:
        """Return the same for some of the heads."""
        return self if self.sinks_H is None else replace(self, sinks_H=self.sinks_H[heads])


@dataclass(eq=False, slots=True)
class RowSegments:
    """The segments of a micro-batch's rows; goes through the model to every attention layer.

    Attributes:
        segment_ids_BL: 0 for the prompt, 1… for what follows it (`rows.py`), −1 for padding.
        positions_BL: Position of each token in its own sample.
        calls: What attention layers asked for, where a list is given to write it down: width of heads, and scores.
        parallel: The ranks that share these rows; None for this one alone.
        block_masks: Of flex attention, by window, as layers ask for them (`flex.py`).
    """

    segment_ids_BL: Tensor
    positions_BL: Tensor
    calls: list[tuple[int, Scores]] | None = None
    parallel: SequenceParallel | None = None
    block_masks: dict[int | None, Any] = field(default_factory=dict)
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _longest: int | None = None
    _sequences: Sequences | None = None
    _samples: SampleRows | None = None

    def mask(self, window: int | None = None) -> Tensor:
        """Return which token may attend to which: bool, shape [B, 1, L, L].

        Args:
            window: Tokens that a query sees, itself included; default: all.
        """
        if window is not None and window >= self.longest:
            window = None
        if window not in self._masks:
            self._masks[window] = (
                segment_mask(self.segment_ids_BL) if window is None else self.mask() & self._near(window)
            )
        return self._masks[window]

    def note(self, query_BHLD: Tensor, scores: Scores, mask: Tensor | None) -> None:
        """Write down what a layer asks for, where that is wanted.

        Raises:
            ConfigError: It asks for a mask that is more than one: a bias of its own on the scores.
        """
        if self.calls is None:
            return
        if mask is not None and mask.is_floating_point():
            raise ConfigError(
                "layers of the model add a bias of their own to the scores of their attention, and training knows "
                "which tokens see each other alone",
                fix="set model.path to a model without such layers",
            )
        self.calls.append((query_BHLD.shape[-1], scores))

    def padding_mask(self) -> Tensor:
        """Return which tokens are no padding: 1 or 0, shape [B, L]."""
        return (self.segment_ids_BL != PADDING).long()

    @property
    def sequences(self) -> Sequences:
        """The rows joined, as sequences."""
        if self._sequences is None:
            self._sequences = Sequences.of(self.segment_ids_BL)
        return self._sequences

    @property
    def samples(self) -> SampleRows:
        """The samples of the rows, each as a row of its own."""
        if self._samples is None:
            self._samples = self.sequences.as_rows()
        return self._samples

    def own_targets(self, sources_N: Tensor) -> OwnTargets:
        """Return which targets this rank computes: those before which its tokens stand.

        Args:
            sources_N: Flat indices of [B·L] of the tokens before targets.
        """
        if self.parallel is None:
            return OwnTargets()
        own = self.parallel.own(len(self.sequences.kept_T))
        place_N = self.sequences.place_BL[sources_N]
        return OwnTargets(self.parallel, (place_N >= own.start) & (place_N < own.stop))

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        if self._longest is None:
            self._longest = int(self.positions_BL.max()) + 1
        return self._longest

    def _near(self, window: int) -> Tensor:
        """Return which keys are within a window of each query or after it: bool, shape [B, 1, L, L]."""
        positions_BL = self.positions_BL
        near_B1LL: Tensor = positions_BL[:, None, None, :] > positions_BL[:, None, :, None] - window
        return near_B1LL


def segment_mask(segment_ids_BL: Tensor) -> Tensor:
    """Return which token may attend to which: bool, shape [B, 1, L, L].

        segments 0 0 1 2  →  1 0 0 0
                             1 1 0 0
                             1 1 1 0
                             1 1 0 1

    A segment after a prefix sees that too (`rows.py`). A plain causal batch (no segment above 1, padding at the end)
    gives the usual causal mask.
    """
    length = segment_ids_BL.shape[1]
    query_BL1, key_B1L = segment_ids_BL[:, :, None], segment_ids_BL[:, None, :]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=segment_ids_BL.device).tril()
    seen_BLL = (key_B1L == 0) | (key_B1L == query_BL1) | (key_B1L == query_BL1 // PREFIX_STRIDE)
    visible_BLL = seen_BLL & causal_LL & (key_B1L != PADDING)
    # a padding token sees itself: a row without any key would be NaN
    eye_LL = torch.eye(length, dtype=torch.bool, device=segment_ids_BL.device)
    return (visible_BLL | eye_LL)[:, None]
