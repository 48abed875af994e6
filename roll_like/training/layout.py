"""From samples to the tensors of a forward pass: shared prompts, token budgets, balanced ranks.

The samples of a group share their prompt. A row holds it once, followed by every response:

    tokens     p0 p1 p2 | a3 a4 | b3 b4 b5
    positions   0  1  2 |  3  4 |  3  4  5
    branches    0  0  0 |  1  1 |  2  2  2

A token attends to the prompt and to earlier tokens of its own branch, so log-probabilities and
gradients equal those of separate sequences, at a fraction of the tokens. The last token of a
response predicts nothing and is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from roll_like.types import FloatArray, IntArray, PolicySample, ReferencedSample

#: Rows hold a dense attention mask; beyond this many tokens it would cost more than it saves.
MAX_SHARED_ROW_TOKENS = 8192
PADDING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt and one or more of its responses.

    Attributes:
        token_ids: Inputs, shape [L].
        positions: Rotary positions, shape [L].
        branches: 0 for the prompt, 1… for each response, shape [L].
        sources: Index into the row of the token whose output predicts each target, shape [N].
        targets: Tokens to predict, shape [N].
        sample_ids: Which sample each target belongs to, as an index into the batch, shape [N].
        target_ids: Index of each target within its sample's own tokens, shape [N].
    """

    token_ids: IntArray
    positions: IntArray
    branches: IntArray
    sources: IntArray
    targets: IntArray
    sample_ids: IntArray
    target_ids: IntArray

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows padded to one length: what one forward pass of one rank takes.

    `sources` indexes the flattened [B·L] outputs. The float arrays are per target, shape [N];
    `reference_logprobs` is empty where there is no reference model.
    """

    token_ids_BL: IntArray
    positions_BL: IntArray
    branches_BL: IntArray
    sources: IntArray
    targets: IntArray
    sample_ids: IntArray
    target_ids: IntArray
    advantages: FloatArray
    behaviour_logprobs: FloatArray
    reference_logprobs: FloatArray
    weights: FloatArray

    @property
    def tokens(self) -> int:
        """Computed tokens, padding included."""
        return int(self.token_ids_BL.size)

    @property
    def padding(self) -> int:
        """Computed tokens that are padding."""
        return int((self.branches_BL == PADDING).sum())


@dataclass(slots=True)
class _Branches:
    """A row being built."""

    prompt: IntArray
    length: int
    members: list[int] = field(default_factory=list)


def build_rows(samples: Sequence[PolicySample], *, share_prompts: bool, max_row_tokens: int) -> list[Row]:
    """Lay samples out as rows; responses of one group share a row while it has room.

    Args:
        samples: The batch; each sample's `group_id` says whose prompt it shares.
        share_prompts: Whether to compute a group's prompt once.
        max_row_tokens: Largest row, in tokens. A single longer sample makes a row of its own.
    """
    limit = min(max_row_tokens, MAX_SHARED_ROW_TOKENS)
    rows: list[_Branches] = []
    open_rows: dict[str, _Branches] = {}
    for index, sample in enumerate(samples):
        if not sample.sampled.any():
            continue
        prompt = sample.token_ids[: sample.prompt_length]
        response_length = max(len(sample.token_ids) - 1 - sample.prompt_length, 0)
        row = open_rows.get(sample.group_id) if share_prompts else None
        if row is None or row.length + response_length > limit or not np.array_equal(row.prompt, prompt):
            row = _Branches(prompt=prompt, length=len(prompt))
            rows.append(row)
            open_rows[sample.group_id] = row
        row.length += response_length
        row.members.append(index)
    return [_lay_out(row, samples) for row in rows]


def _lay_out(row: _Branches, samples: Sequence[PolicySample]) -> Row:
    prompt_length = len(row.prompt)
    tokens, positions, branches = [row.prompt], [np.arange(prompt_length)], [np.zeros(prompt_length)]
    sources, targets, sample_ids, target_ids = [], [], [], []
    start = prompt_length
    for branch, index in enumerate(row.members, start=1):
        sample = samples[index]
        body = sample.token_ids[prompt_length:-1]
        tokens.append(body)
        positions.append(prompt_length + np.arange(len(body)))
        branches.append(np.full(len(body), branch))
        at = np.flatnonzero(sample.sampled)
        # token t is predicted by t-1, which is in the prompt for the first token of a response
        previous = at - 1
        sources.append(np.where(previous < prompt_length, previous, previous - prompt_length + start))
        targets.append(sample.token_ids[at])
        sample_ids.append(np.full(len(at), index))
        target_ids.append(at)
        start += len(body)

    def joined(parts: Sequence[np.typing.NDArray[np.generic]]) -> IntArray:
        whole: IntArray = np.concatenate(parts).astype(np.int32)
        return whole

    return Row(
        token_ids=joined(tokens),
        positions=joined(positions),
        branches=joined(branches),
        sources=joined(sources),
        targets=joined(targets),
        sample_ids=joined(sample_ids),
        target_ids=joined(target_ids),
    )


def balance(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """Give every rank about as many tokens: longest row first, to the rank with the least."""
    shares: list[list[Row]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(rows, key=len, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += len(row)
    return shares


def split_by_budget(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Cut rows, sorted by length, into micro-batches of at most `max_tokens` padded tokens."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=len, reverse=True):
        # the first row of a batch is its longest and sets the padded length
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0]) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def micro_batches(
    samples: Sequence[PolicySample],
    weights: Sequence[FloatArray],
    *,
    ranks: int,
    max_tokens: int,
    share_prompts: bool,
) -> list[list[MicroBatch]]:
    """Return each rank's micro-batches; all ranks get equally many, because ZeRO's collectives must pair up.

    Args:
        samples: The global batch of one optimizer step.
        weights: Weight of each token in the loss, one array [T] a sample.
        ranks: World size of the training engine.
        max_tokens: Budget of one micro-batch, padding included.
        share_prompts: Whether to compute a group's prompt once.

    A rank that has too few rows repeats one with weight 0, which changes no gradient.
    """
    rows = build_rows(samples, share_prompts=share_prompts, max_row_tokens=max_tokens)
    if not rows:
        return [[] for _ in range(ranks)]
    plans = [split_by_budget(share, max_tokens) for share in balance(rows, ranks)]
    count = max(len(plan) for plan in plans)
    filled = []
    for plan in plans:
        while len(plan) < count and any(len(batch) > 1 for batch in plan):
            largest = max(plan, key=len)
            plan.remove(largest)
            plan += [largest[::2], largest[1::2]]
        batches = [_pad(batch, samples, weights) for batch in plan]
        filler = _pad([min(rows, key=len)], samples, [np.zeros_like(weight) for weight in weights])
        filled.append(batches + [filler] * (count - len(batches)))
    return filled


def _pad(rows: Sequence[Row], samples: Sequence[PolicySample], weights: Sequence[FloatArray]) -> MicroBatch:
    length = max(len(row) for row in rows)
    shape = (len(rows), length)
    token_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    branches = np.full(shape, PADDING, np.int32)
    for index, row in enumerate(rows):
        token_ids[index, : len(row)] = row.token_ids
        positions[index, : len(row)] = row.positions
        branches[index, : len(row)] = row.branches
    sample_ids = np.concatenate([row.sample_ids for row in rows])
    target_ids = np.concatenate([row.target_ids for row in rows])

    # targets of one sample stand together, so a cut wherever the sample changes yields whole runs
    cuts = np.flatnonzero(np.diff(sample_ids)) + 1
    runs = [(int(ids[0]), at) for ids, at in zip(np.split(sample_ids, cuts), np.split(target_ids, cuts), strict=True)]

    def gather(value_of: Callable[[int], FloatArray]) -> FloatArray:
        values: FloatArray = np.concatenate([value_of(index)[at] for index, at in runs]).astype(np.float32)
        return values

    def reference_of(index: int) -> FloatArray:
        sample = samples[index]
        assert isinstance(sample, ReferencedSample)
        return sample.reference_logprobs

    referenced = all(isinstance(sample, ReferencedSample) for sample in samples)
    return MicroBatch(
        token_ids_BL=token_ids,
        positions_BL=positions,
        branches_BL=branches,
        sources=np.concatenate([row.sources + index * length for index, row in enumerate(rows)]).astype(np.int32),
        targets=np.concatenate([row.targets for row in rows]),
        sample_ids=sample_ids,
        target_ids=target_ids,
        advantages=gather(lambda index: samples[index].advantages),
        behaviour_logprobs=gather(lambda index: samples[index].behaviour_logprobs),
        reference_logprobs=gather(reference_of) if referenced else np.zeros(0, np.float32),
        weights=gather(lambda index: weights[index]),
    )
