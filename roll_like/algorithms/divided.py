"""A vocabulary that several ranks divide: each has some rows of the output projection, and all of them the same tokens.

What a rank finds in its part (log-sum-exp, entropy, a target's log-probability) is a few numbers a token, which ranks
tell each other and merge. The gradient of a rank's rows needs nothing of the others; that of hidden states is a sum
over ranks (Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from roll_like.errors import ConfigError


@dataclass(frozen=True, eq=False, slots=True)
class DividedVocabulary:
    """One rank's part of a vocabulary of V tokens.

    Attributes:
        group: The ranks, in the order of their tokens.
        size: V.
        share: Tokens of every rank; the last one may have fewer.
    """

    group: ProcessGroup
    size: int
    share: int

    @classmethod
    def of(cls, group: ProcessGroup, size: int) -> DividedVocabulary:
        """Divide a vocabulary as `Tensor.chunk` does: evenly, and the last rank may have fewer tokens.

        Raises:
            ConfigError: A rank would have none.
        """
        share = -(-size // group.size())
        if share * (group.size() - 1) >= size:
            raise ConfigError(f"a vocabulary of {size} tokens cannot be divided among {group.size()} ranks")
        return cls(group, size, share)

    @property
    def own(self) -> slice:
        """Tokens of this rank."""
        first = self.group.rank() * self.share
        return slice(first, min(first + self.share, self.size))

    def told(self, figures: Tensor) -> list[Tensor]:
        """Return the same figures of every rank; all have the same shape."""
        found = [torch.empty_like(figures) for _ in range(self.group.size())]
        torch.distributed.all_gather(found, figures.contiguous(), group=self.group)
        return found

    def sum(self, figures: Tensor) -> Tensor:
        """Add figures up over the ranks, in place."""
        torch.distributed.all_reduce(figures, group=self.group)
        return figures

    def whole_rows(self, own_CK: Tensor, rows_CV: Tensor) -> Tensor:
        """Fill rows of which each rank has its own columns, and return them, shape [C, V]."""
        padded_CK = torch.nn.functional.pad(own_CK, (0, self.share - own_CK.shape[1]))
        for part_CK, columns_CK in zip(self.told(padded_CK), rows_CV.chunk(self.group.size(), 1), strict=True):
            columns_CK.copy_(part_CK[:, : columns_CK.shape[1]])
        return rows_CV
