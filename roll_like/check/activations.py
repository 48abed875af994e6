"""Memory of activations: what a decoder keeps between forward and backward pass.

For one token of width h, with MLPs of width i, H query heads of q elements together, and keys and values of k elements
each, in b bytes a number, a layer of transformers' Llama, Qwen2 or Qwen3 keeps

    two norms, each its input in float32, the normalised and the scaled one   2 · (4 + 2b) · h
    norms of queries and keys, where there are some                           (4 + b) · (q + k)
    flash attention: queries, keys, values, outputs, and log-sum-exps         b · (2q + 2k) + 4 · H
    compressed queries, keys and values of c elements, with norms             (4 + 2b) · c
    gated MLP: gate, its activation, up projection, their product             4b · i

With gradient checkpointing only a layer's input is kept, b · h, and one layer at a time is computed again. Attention
with masks keeps keys and values once for each query head, and the mask. Counted by `benchmarks/memory_plan.py`. Stages
of a pipeline keep that for as many micro-batches as are under way (`models/stages.py`).
"""

from __future__ import annotations

from roll_like.algorithms.blocks import DEVICE_TILE
from roll_like.models.shape import ModelShape


def layer_bytes(shape: ModelShape, *, width: int, keys: float = 1.0, dense: bool = False) -> float:
    """Return what one layer keeps of one token, in bytes.

    Args:
        width: Bytes of a number.
        keys: Keys for each query token: more than 1 where sequences share a prompt, which each gathers.
        dense: Whether attention has masks, and keys and values are repeated for query heads that share them.
    """
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys_of_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    values, outputs = (heads * (shape.value_dim or shape.head_dim) for heads in (shape.kv_heads, shape.heads))
    norms = (4 + 2 * width) * (2 * hidden + shape.query_rank + shape.latent)
    if shape.query_norm:
        norms += (4 + width) * (queries + keys_of_heads)
    kept = queries + outputs if dense else keys * (keys_of_heads + values)
    attention = width * (queries + outputs + kept) + 4 * shape.heads
    mlp = 4 * width * inner
    if shape.experts:  # each has a copy of its tokens, and of its output
        mlp = shape.experts * (mlp + 2 * width * hidden)
    return norms + attention + mlp


def training_bytes(
    shape: ModelShape,
    tokens: int,
    *,
    width: int,
    checkpointing: bool,
    keys: float = 1.0,
    dense_row: int = 0,
    ranks: int = 1,
    layers: int | None = None,
    under_way: int = 1,
) -> int:
    """Return the most that exists of activations in the backward pass of one micro-batch, without logits, in bytes.

    Ranks that divide matrices keep the inputs of attention and MLP of all tokens while a layer is computed, and a part
    of all else.

    Args:
        tokens: Of the micro-batch, padding included.
        width: Bytes of a number.
        checkpointing: Whether layers are computed again in the backward pass.
        keys: Keys for each query token.
        dense_row: Longest row of attention with masks, in tokens; 0 for attention without.
        ranks: Those that divide matrices, and between them the tokens.
        layers: Those that one pass of a pipeline's stage goes through; default: all.
        under_way: Passes of which activations are kept at a time.
    """
    gathered = 2 * width * shape.hidden_size if ranks > 1 else 0
    layer = layer_bytes(shape, width=width, keys=keys, dense=dense_row > 0) / ranks + gathered
    passed = under_way * (shape.layers if layers is None else layers)
    kept = passed * width * shape.hidden_size / ranks + layer if checkpointing else passed * layer
    # the norm before the output layer, and the gradients of one layer's widest tensors
    widest = (4 + 2 * width) * shape.hidden_size + 2 * width * shape.intermediate_size * max(shape.experts, 1)
    passing = widest / ranks + gathered
    if layers is not None:  # what a stage sends on is held until its gradient comes
        kept += under_way * width * shape.hidden_size / ranks
    return round(tokens * (kept + passing)) + _mask_bytes(shape, tokens, dense_row, width)


def _mask_bytes(shape: ModelShape, tokens: int, row: int, width: int) -> int:
    """Return the size of masks: a bool for each pair of a row, and one mask's copy in the precision of the scores."""
    return tokens * row * (shape.masks + width)


def forward_bytes(shape: ModelShape, tokens: int, *, width: int, dense_row: int = 0, ranks: int = 1) -> int:
    """Return what exists at a time in a forward pass without gradients, without logits, in bytes.

    Args:
        tokens: Of the micro-batch, padding included.
        width: Bytes of a number.
        dense_row: Longest row of attention with masks, in tokens; 0 for attention without.
        ranks: Those that divide matrices, and between them the tokens.
    """
    inner = shape.intermediate_size * max(shape.experts, 1)
    gathered = 2 * width * shape.hidden_size if ranks > 1 else 0
    passing = tokens * (((8 + 3 * width) * shape.hidden_size + 3 * width * inner) // ranks + gathered)
    return passing + _mask_bytes(shape, tokens, dense_row, width)


def head_bytes(
    shape: ModelShape,
    tokens: int,
    *,
    width: int,
    chunk_tokens: int,
    chunk_vocab: int,
    trained: bool,
    products: int | None = None,
) -> int:
    """Return what `roll_like.algorithms.logprobs` takes at a time, the gradient of the output layer included, in bytes.

    Args:
        width: Bytes of a number.
        chunk_tokens: Rows of logits that exist at a time.
        chunk_vocab: Columns of logits that exist at a time.
        trained: Whether the output layer gets a gradient.
        products: Bytes of a product, where that is wider.
    """
    block_width = products or width
    rows, columns = min(chunk_tokens, tokens), min(chunk_vocab, shape.vocab_size)
    block = rows * columns * block_width + 2 * 4 * min(rows * columns, DEVICE_TILE)
    if block_width > width:  # hidden states, and one block's part of the weight
        block += (tokens + columns) * shape.hidden_size * block_width
    at_end = 0
    if trained:
        # summed in float32, with one block's part, which is held instead of the weight's where that was widened
        part = width if block_width > width else 4 + width
        block += 4 * shape.embedding_parameters + part * columns * shape.hidden_size
        # and in the end copied to the weight's precision, when there is no block any more
        at_end = (4 + width) * shape.embedding_parameters if width < 4 else 0
    return max(block, at_end) + 2 * tokens * shape.hidden_size * width
