"""Model FLOPs: what the work needs, however it is computed.

A forward pass costs 2 · N FLOPs a token, with N the parameters without embeddings, and attention 4 · L · H · Q FLOPs a
pair of query and key (L layers, H heads of width Q); a backward pass costs twice its forward pass: 6 · N a token and
12 · L · H · Q a pair in training (Kaplan et al. 2020, arXiv:2001.08361, section 2.1; Chowdhery et al. 2022,
arXiv:2204.02311, appendix B).

- A prefix that sequences of a step have in common counts once, as in causal models its states are the same.
- A sequence's last token is only a target: its output is not needed.
- The output layer, 2 · V · D FLOPs, counts where a token's probability is needed.
- Of a mixture of experts those count that a token goes to.
- Pairs that the causal mask leaves out, padding, recomputation and optimizer do not count; nor does the gradient of
  weights that are not trained.

Sliding windows are not taken into account: their layers count as if they saw everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from roll_like.models.shape import ModelShape
from roll_like.types import TrainingSample


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """What a causal model has to compute.

    Attributes:
        tokens: Tokens whose states are needed.
        pairs: Pairs of a query and a key that it may attend to.
        targets: Tokens whose probabilities are needed.
    """

    tokens: int
    pairs: int
    targets: int

    def __add__(self, other: ForwardPass) -> ForwardPass:
        return ForwardPass(self.tokens + other.tokens, self.pairs + other.pairs, self.targets + other.targets)

    def flops(self, shape: ModelShape) -> int:
        """Return the floating-point operations of matrix products in a model of this shape."""
        return self._products_with_weights(shape) + self._attention(shape)

    def training_flops(self, shape: ModelShape, adapters: int | None = None) -> int:
        """Return those of this pass and of its backward pass.

        Args:
            adapters: Parameters of low-rank adapters, beside which the model's own weights get no gradient; None where
                all of the model is trained.
        """
        weights, attention = self._products_with_weights(shape), 3 * self._attention(shape)
        if adapters is None:
            return 3 * weights + attention
        return 2 * weights + attention + 3 * 2 * self.tokens * adapters

    def _products_with_weights(self, shape: ModelShape) -> int:
        embedding = shape.vocab_size * shape.hidden_size
        layers = shape.active_parameters - embedding * (1 if shape.tied_embeddings else 2)
        return 2 * (self.tokens * layers + self.targets * embedding)

    def _attention(self, shape: ModelShape) -> int:
        return 2 * self.pairs * shape.layers * shape.heads * shape.head_widths


def training_pass(samples: Sequence[TrainingSample]) -> ForwardPass:
    """Return the forward pass of one optimizer step; forward and backward together cost three times its FLOPs."""
    tokens, pairs = _distinct(sample.token_ids[:-1].tolist() for sample in samples)
    return ForwardPass(tokens, pairs, sum(int(sample.loss_mask[1:].sum()) for sample in samples))


def generation_pass(samples: Iterable[tuple[Sequence[int], int]]) -> ForwardPass:
    """Return what sampling takes.

    Args:
        samples: Prompt tokens, and the number of sampled tokens, at least 1.
    """
    samples = list(samples)
    tokens, pairs = _distinct(prompt for prompt, _ in samples)
    for prompt, sampled in samples:
        tokens += sampled - 1
        pairs += _causal_pairs(len(prompt) + sampled - 1) - _causal_pairs(len(prompt))
    return ForwardPass(tokens, pairs, sum(sampled for _, sampled in samples))


def _distinct(sequences: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Return tokens, and pairs of them, of sequences whose common prefixes count once."""
    tokens = pairs = 0
    former: Sequence[int] = ()
    for sequence in sorted(map(list, sequences)):  # the longest prefix seen so far is the one before's
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(former, sequence, strict=False)))
        tokens += len(sequence) - shared
        pairs += _causal_pairs(len(sequence)) - _causal_pairs(shared)
        former = sequence
    return tokens, pairs


def _causal_pairs(length: int) -> int:
    return length * (length + 1) // 2
