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

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from roll_like.errors import EngineError
from roll_like.training.draws import sample_seeds, uniform_draws
from roll_like.types import BoolArray, FloatArray, IntArray, PolicySample, ReferencedSample, TrainingSample

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
    """Rows padded to one length: what one forward pass of one rank takes, whatever the model.

    Attributes:
        token_ids_BL: Inputs.
        positions_BL: Rotary positions.
        branches_BL: 0 for the prompt, 1… for each response of the row, −1 for padding.
        sources: Index into the flattened [B·L] outputs of the state before each target, shape [N].
        targets: Tokens to predict, shape [N].
        sample_ids: Which sample each target belongs to, as an index into the batch, shape [N].
        target_ids: Index of each target within its sample's own tokens, shape [N].
        weights: Weight of each target in the loss, shape [N].
    """

    token_ids_BL: IntArray
    positions_BL: IntArray
    branches_BL: IntArray
    sources: IntArray
    targets: IntArray
    sample_ids: IntArray
    target_ids: IntArray
    weights: FloatArray

    @property
    def tokens(self) -> int:
        """Computed tokens, padding included."""
        return int(self.token_ids_BL.size)

    @property
    def padding(self) -> int:
        """Computed tokens that are padding."""
        return int((self.branches_BL == PADDING).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBatch(MicroBatch):
    """What a policy is trained on, beside the rows: figures of each target, shape [N].

    Attributes:
        advantages: From the advantage estimator.
        behaviour_logprobs: What the inference engine reported.
        reference_logprobs: Of the reference model; empty where there is none.
        draws: A number in [0, 1) that depends on the sample's tokens and the target's place only.
        turns: Index of the turn that sampled each target, within its sample.
    """

    advantages: FloatArray
    behaviour_logprobs: FloatArray
    reference_logprobs: FloatArray
    draws: FloatArray
    turns: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueBatch(MicroBatch):
    """What a critic is trained on, beside the rows: figures of each target, shape [N].

    Attributes:
        old_values: The critic's values before the step.
        returns: What they should have been.
    """

    old_values: FloatArray
    returns: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBatch(MicroBatch):
    """What is learned from pairs, beside the rows: samples 2·i and 2·i + 1 are the answers of pair i.

    Attributes:
        reference_sums: Of the reference model, log-probability of each answer in the batch, in the order of their
            sample ids, shape [R]; empty where there is none.
    """

    reference_sums: FloatArray


BatchT = TypeVar("BatchT", bound=MicroBatch)
#: A row, or what stands for one of that length.
RowT = TypeVar("RowT", bound=Sized)


@dataclass(slots=True)
class _Branches:
    """A row being built."""

    prompt: IntArray
    length: int
    members: list[int] = field(default_factory=list)


def build_rows(samples: Sequence[TrainingSample], *, share_prompts: bool, max_row_tokens: int) -> list[Row]:
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
    return [
        lay_out(row.prompt, [(index, samples[index].token_ids, samples[index].sampled) for index in row.members])
        for row in rows
    ]


def lay_out(prompt: IntArray, members: Sequence[tuple[int, IntArray, BoolArray]]) -> Row:
    """Return a row of sequences that begin with one prompt.

    With an empty prompt these are sequences that have nothing to do with each other: none sees another, and each
    begins at position 0.

    Args:
        prompt: What they begin with, shape [P].
        members: For each, its index in the batch, its tokens [T] with the prompt, and where the loss applies [T]
            (never at the first token).
    """
    prompt_length = len(prompt)
    tokens, positions, branches = [prompt], [np.arange(prompt_length)], [np.zeros(prompt_length)]
    sources, targets, sample_ids, target_ids = [], [], [], []
    start = prompt_length
    for branch, (index, token_ids, trained) in enumerate(members, start=1):
        body = token_ids[prompt_length:-1]
        tokens.append(body)
        positions.append(prompt_length + np.arange(len(body)))
        branches.append(np.full(len(body), branch))
        at = np.flatnonzero(trained)
        # token t is predicted by t-1, which is in the prompt for the first token of a response
        previous = at - 1
        sources.append(np.where(previous < prompt_length, previous, previous - prompt_length + start))
        targets.append(token_ids[at])
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


def balance(rows: Sequence[RowT], ranks: int) -> list[list[RowT]]:
    """Give every rank about as many tokens: longest row first, to the rank with the least."""
    shares: list[list[RowT]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(rows, key=len, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += len(row)
    return shares


def split_by_budget(rows: Sequence[RowT], max_tokens: int) -> list[list[RowT]]:
    """Cut rows, sorted by length, into micro-batches of at most `max_tokens` padded tokens."""
    batches: list[list[RowT]] = []
    for row in sorted(rows, key=len, reverse=True):
        # the first row of a batch is its longest and sets the padded length
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0]) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def micro_batches(
    samples: Sequence[TrainingSample],
    weights: Sequence[FloatArray] | None = None,
    *,
    ranks: int,
    max_tokens: int,
    share_prompts: bool,
) -> list[list[MicroBatch]]:
    """Return each rank's micro-batches.

    All ranks get equally many, because ZeRO's collectives must pair up. A rank that has too few rows
    repeats one, with weight 0.

    Args:
        samples: The global batch.
        weights: Weight of each token in the loss, one array [T] a sample; None for a pass without a loss, where
            weights only tell targets from repeated ones.
        ranks: World size of the engine.
        max_tokens: Budget of one micro-batch, padding included.
        share_prompts: Whether to compute a group's prompt once.
    """
    if weights is None:
        weights = [np.ones(len(sample.token_ids), np.float32) for sample in samples]
    return _spread(
        samples, weights, lambda batch: batch, ranks=ranks, max_tokens=max_tokens, share_prompts=share_prompts
    )


def policy_batches(
    samples: Sequence[PolicySample],
    weights: Sequence[FloatArray],
    *,
    ranks: int,
    max_tokens: int,
    share_prompts: bool,
) -> list[list[PolicyBatch]]:
    """Return each rank's micro-batches of one optimizer step of a policy; all ranks get equally many.

    A rank that has too few rows repeats one with weight 0, which changes no gradient.

    Args:
        samples: The global batch of one optimizer step.
        weights: Weight of each token in the loss, one array [T] a sample.
        ranks: World size of the engine.
        max_tokens: Budget of one micro-batch, padding included.
        share_prompts: Whether to compute a group's prompt once.
    """
    advantages = _PerToken([sample.advantages for sample in samples])
    behaviour = _PerToken([sample.behaviour_logprobs for sample in samples])
    referenced = [sample.reference_logprobs for sample in samples if isinstance(sample, ReferencedSample)]
    reference = _PerToken(referenced) if len(referenced) == len(samples) else None
    turns = _PerToken([sample.turns for sample in samples])
    seeds = sample_seeds([sample.token_ids for sample in samples])

    def make(batch: MicroBatch) -> PolicyBatch:
        return PolicyBatch(
            **_shared(batch),
            advantages=advantages.of(batch),
            behaviour_logprobs=behaviour.of(batch),
            reference_logprobs=np.zeros(0, np.float32) if reference is None else reference.of(batch),
            draws=uniform_draws(seeds[batch.sample_ids], batch.target_ids),
            turns=turns.of(batch).astype(np.int32),  # float32 holds indices up to 2²⁴ exactly
        )

    return _spread(samples, weights, make, ranks=ranks, max_tokens=max_tokens, share_prompts=share_prompts)


def value_batches(
    samples: Sequence[PolicySample],
    weights: Sequence[FloatArray],
    values: Sequence[FloatArray],
    returns: Sequence[FloatArray],
    *,
    ranks: int,
    max_tokens: int,
    share_prompts: bool,
) -> list[list[ValueBatch]]:
    """Return each rank's micro-batches of one optimizer step of a critic, as `policy_batches` does.

    Args:
        samples: The global batch of one optimizer step.
        weights: Weight of each token in the loss, one array [T] a sample.
        values: The critic's values before the step, one array [T] a sample.
        returns: Targets of the values, one array [T] a sample.
        ranks: World size of the engine.
        max_tokens: Budget of one micro-batch, padding included.
        share_prompts: Whether to compute a group's prompt once.
    """
    old, targets = _PerToken(values), _PerToken(returns)

    def make(batch: MicroBatch) -> ValueBatch:
        return ValueBatch(**_shared(batch), old_values=old.of(batch), returns=targets.of(batch))

    return _spread(samples, weights, make, ranks=ranks, max_tokens=max_tokens, share_prompts=share_prompts)


def pair_batches(
    samples: Sequence[TrainingSample], reference_sums: FloatArray | None, *, ranks: int, max_tokens: int
) -> list[list[PairBatch]]:
    """Return each rank's micro-batches of one optimizer step over pairs; both answers of a pair are in one row.

    Args:
        samples: Chosen and rejected answers in turn; those of a pair share their `group_id`.
        reference_sums: Log-probability of each answer under the reference model, shape [len(samples)]; None without.
        ranks: World size of the engine.
        max_tokens: Budget of one micro-batch, padding included.

    Raises:
        EngineError: A pair is longer than a row may be.
    """
    longest = min(max_tokens, MAX_SHARED_ROW_TOKENS)
    for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
        length = len(chosen.token_ids) + len(rejected.token_ids) - chosen.prompt_length - 2
        if length > longest:
            raise EngineError(
                f"a pair takes {length} tokens, and a row {longest} at most",
                fix="raise training.max_tokens_per_micro_batch, or lower data.max_tokens",
            )
    nothing = np.zeros(0, np.float32)
    ones = [np.ones(len(sample.token_ids), np.float32) for sample in samples]

    def make(batch: MicroBatch) -> PairBatch:
        sums = nothing if reference_sums is None else reference_sums[np.unique(batch.sample_ids)]
        return PairBatch(**_shared(batch), reference_sums=sums)

    return _spread(samples, ones, make, ranks=ranks, max_tokens=max_tokens, share_prompts=True)


def per_sample(
    samples: Sequence[TrainingSample],
    shards: Sequence[Sequence[MicroBatch]],
    results: Sequence[Sequence[FloatArray]],
) -> list[FloatArray]:
    """Return what ranks computed for each target as one array [T] a sample, 0 where not sampled."""
    lengths = [len(sample.token_ids) for sample in samples]
    starts = np.cumsum([0, *lengths])
    flat = np.zeros(starts[-1], np.float32)
    for batches, figures in zip(shards, results, strict=True):
        for batch, figure in zip(batches, figures, strict=True):
            flat[starts[batch.sample_ids] + batch.target_ids] = figure
    return [flat[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def update_parts(samples: Sequence[TrainingSample], parts: int) -> list[list[int]]:
    """Cut a step's samples into at most `parts` optimizer batches, as indices, in order of their groups.

    No group is torn apart.
    """
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    ordered = list(groups.values())
    cuts = np.array_split(np.arange(len(ordered)), parts)
    return [[index for group in cut for index in ordered[group]] for cut in cuts if len(cut)]


class _PerToken:
    """One array [T] a sample, laid end to end, so that a micro-batch's figures are one look-up."""

    def __init__(self, arrays: Sequence[FloatArray] | Sequence[IntArray]) -> None:
        self._starts = np.cumsum([0, *map(len, arrays)])
        self._flat = np.concatenate([np.zeros(0, np.float32), *arrays]).astype(np.float32, copy=False)

    def of(self, batch: MicroBatch) -> FloatArray:
        """Return the figures of the batch's targets, shape [N]."""
        return self.at(batch.sample_ids, batch.target_ids)

    def at(self, sample_ids: IntArray, target_ids: IntArray) -> FloatArray:
        """Return the figures of some tokens, shape [N]."""
        figures: FloatArray = self._flat[self._starts[sample_ids] + target_ids]
        return figures


def _shared(batch: MicroBatch) -> dict[str, Any]:
    """Return the fields that a batch of any kind has, for the constructor of another kind."""
    return {each.name: getattr(batch, each.name) for each in fields(MicroBatch)}


def _spread(
    samples: Sequence[TrainingSample],
    weights: Sequence[FloatArray],
    make: Callable[[MicroBatch], BatchT],
    *,
    ranks: int,
    max_tokens: int,
    share_prompts: bool,
) -> list[list[BatchT]]:
    """Lay samples out, spread rows over ranks, cut them by the budget, and have `make` add what a model needs."""
    rows = build_rows(samples, share_prompts=share_prompts, max_row_tokens=max_tokens)
    if not rows:
        return [[] for _ in range(ranks)]
    plans = [split_by_budget(share, max_tokens) for share in balance(rows, ranks)]
    count = max(len(plan) for plan in plans)
    weight_of = _PerToken(weights)
    filled = []
    for plan in plans:
        while len(plan) < count and any(len(batch) > 1 for batch in plan):
            largest = max(plan, key=len)
            plan.remove(largest)
            plan += [largest[::2], largest[1::2]]
        batches = [make(_pad(batch, weight_of)) for batch in plan]
        if len(batches) < count:
            filler = make(_pad([min(rows, key=len)], _PerToken([np.zeros_like(weight) for weight in weights])))
            batches += [filler] * (count - len(batches))
        filled.append(batches)
    return filled


def _pad(rows: Sequence[Row], weight_of: _PerToken) -> MicroBatch:
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
    return MicroBatch(
        token_ids_BL=token_ids,
        positions_BL=positions,
        branches_BL=branches,
        sources=np.concatenate([row.sources + index * length for index, row in enumerate(rows)]).astype(np.int32),
        targets=np.concatenate([row.targets for row in rows]),
        sample_ids=sample_ids,
        target_ids=target_ids,
        weights=weight_of.at(sample_ids, target_ids),
    )
