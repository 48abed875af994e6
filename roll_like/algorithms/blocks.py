"""Products of hidden states and an output projection, block by block: tokens × vocabulary.

What follows a product (softmax, entropy, divergence) reads a block's final logits in float32, tile by tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

from roll_like.algorithms.lazy import torch
from roll_like.types import PLAIN_LOGITS, LogitTransform

if TYPE_CHECKING:
    from torch import Tensor

    from roll_like.algorithms.divided import DividedVocabulary

#: Elements of a block that are worked on at a time. On CPU two float32 tiles stay within the last
#: cache, which makes the softmax several times faster; on GPUs large kernels are.
CPU_TILE = 1 << 20
DEVICE_TILE = 1 << 27


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work is cut into blocks.

    Attributes:
        temperature: Logits are divided by it.
        chunk_tokens: Rows of a block, at most.
        chunk_vocab: Columns of a block, at most.
        keep: Whether a backward pass may follow.
        logits: What the model does to products before the temperature.
    """

    temperature: float
    chunk_tokens: int
    chunk_vocab: int
    keep: bool = False
    logits: LogitTransform = PLAIN_LOGITS

    def tokens(self, count: int) -> list[slice]:
        """Cut into equal parts, so that the last block, which may be kept, is no small rest."""
        parts = math.ceil(count / self.chunk_tokens)
        return slices(count, math.ceil(count / parts)) if parts else []

    def vocabulary(self, count: int) -> list[slice]:
        """Cut into parts of the chunk's size, the last one smaller."""
        return slices(count, self.chunk_vocab)


def slices(count: int, size: int) -> list[slice]:
    """Return the slices that cut `count` elements into parts of `size`, the last one smaller."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _longest(parts: list[slice]) -> int:
    return max((part.stop - part.start for part in parts), default=0)


@cache
def has_triton() -> bool:
    """Return whether Triton is installed, as it is beside torch's builds for GPUs."""
    return find_spec("triton") is not None


class Blocks:
    """The logits of one block at a time, in `buffer`, and float32 views of them tile by tile.

    Args:
        hidden_ND: Last hidden states.
        weight_VD: Output projection, in the same dtype or in a narrower one.
        bias: Of the output projection, shape [V].
        cut: Sizes of the blocks.
        buffer: Memory of an earlier instance for the same shapes.
        temporaries: Tensors of a tile's size that the work on it makes; tiles are that much smaller.
        divided: The ranks that divide the vocabulary, where blocks are whole rows: each computes its columns, and all
            get all of them. Weight and bias are this rank's.

    Attributes:
        temperature: What products with their bias are divided by: the cut's, over the scale of the model's logits.
        cap: Bound of the final logits: the model's, over the temperature. None without one.
    """

    def __init__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias: Tensor | None,
        cut: Cut,
        buffer: Tensor | None = None,
        *,
        temporaries: int = 1,
        divided: DividedVocabulary | None = None,
    ) -> None:
        self.hidden_ND, self.weight_VD, self.bias, self.divided = hidden_ND, weight_VD, bias, divided
        self._bias_of_rows = bias
        if divided is not None and bias is not None:
            self._bias_of_rows = divided.whole_rows(bias[None], bias.new_empty(1, divided.size))[0]
        self.temperature = cut.temperature / cut.logits.scale
        self.cap = None if cut.logits.cap is None else cut.logits.cap / cut.temperature
        temporaries += self.cap is not None  # the slope
        columns = len(weight_VD) if divided is None else divided.size
        self.tokens, self.vocabulary = cut.tokens(len(hidden_ND)), cut.vocabulary(columns)
        rows, columns = _longest(self.tokens), _longest(self.vocabulary)
        self.buffer = hidden_ND.new_empty(rows * columns) if buffer is None else buffer
        self.wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        elements = CPU_TILE if hidden_ND.device.type == "cpu" else DEVICE_TILE
        self.tile_rows = max(1, min(rows, elements // temporaries // max(columns, 1)))
        self._tile_elements = self.tile_rows * columns

    @cached_property
    def fused(self) -> bool:
        """Whether `head_kernels.py` may read the products: on GPUs where Triton is."""
        return self.hidden_ND.is_cuda and self.wide == torch.float32 and has_triton()

    @cached_property
    def _tiles(self) -> tuple[Tensor, Tensor]:
        """Memory of a tile and of a scratch, which exist only where they are wanted."""
        tile, scratch = (self.hidden_ND.new_empty(self._tile_elements, dtype=self.wide) for _ in range(2))
        return tile, scratch

    def bias_of(self, columns: slice) -> Tensor | None:
        """Return the bias of a part of the vocabulary."""
        return None if self.bias is None else self.bias[columns]

    def weight(self, columns: slice | None = None) -> Tensor:
        """Return a part of the output projection, or all of it, in the products' precision, shape [K, D]."""
        weight_KD = self.weight_VD if columns is None else self.weight_VD[columns]
        return weight_KD.to(self.hidden_ND.dtype)

    def view(self, rows: slice, columns: slice) -> Tensor:
        """Return the buffer as the block `rows × columns`, whatever it holds, shape [C, K]."""
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        return self.buffer[: shape[0] * shape[1]].view(shape)

    def compute(self, rows: slice, columns: slice) -> Tensor:
        """Compute the products of a block, before bias and temperature, shape [C, K]."""
        block_CK = self.view(rows, columns)
        if self.divided is not None:
            return self.divided.whole_rows(self.hidden_ND[rows] @ self.weight().t(), block_CK)
        torch.mm(self.hidden_ND[rows], self.weight(columns).t(), out=block_CK)
        return block_CK

    def tiles(self, block_CK: Tensor, columns: slice) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows within the block, their final logits, and a scratch of the same shape."""
        for rows in slices(len(block_CK), self.tile_rows):
            part = block_CK[rows]
            tile, scratch = (memory[: part.numel()].view(part.shape) for memory in self._tiles)
            tile.copy_(part)
            if self._bias_of_rows is not None:
                tile.add_(self._bias_of_rows[columns])
            if self.temperature != 1.0:
                tile.div_(self.temperature)
            if self.cap is not None:
                tile.div_(self.cap).tanh_().mul_(self.cap)
            yield rows, tile, scratch

    def slope(self, tile: Tensor) -> Tensor | None:
        """Return the derivative of final logits for those without the cap, from the former; None where it is 1.

        y = c · tanh(z / c), so dy/dz = 1 − (y/c)².
        """
        return None if self.cap is None else torch.div(tile, self.cap).square_().neg_().add_(1.0)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add a product in low precision to a sum in float32."""
        if part.is_cuda:
            total.add_(part)
            return
        # tile by tile: the whole would be copied first
        flat_total, flat_part, tile = total.view(-1), part.view(-1), self._tiles[0]
        for piece in slices(part.numel(), tile.numel()):
            flat_total[piece].add_(tile[: piece.stop - piece.start].copy_(flat_part[piece]))
