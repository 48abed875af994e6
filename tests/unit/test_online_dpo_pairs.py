"""Which answers of a scored group become pairs, token by token, and what a checkpoint keeps of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests_support import scored, task

from roll_like.builtin.pipelines.online_dpo.config import PairsConfig
from roll_like.builtin.pipelines.online_dpo.pairs import decode_pairs, encode_pairs, pair_groups
from roll_like.errors import CheckpointError
from roll_like.types import Failure, Group, Pair, Scored, StopReason
from roll_like.values import Metrics, reduce

CUT = StopReason.LENGTH


def group(rewards: list[float], *, index: int = 0, cut: tuple[int, ...] = (), lost: int = 0) -> Group[Scored]:
    """A group whose sample i has 3 + i sampled tokens, all of them `100 + i`."""
    owner = task(index)
    samples = []
    for place, reward in enumerate(rewards):
        sample = scored(owner, reward, sample=place, response=3 + place)
        tokens = np.concatenate([owner.prompt_ids, np.full(3 + place, 100 + place)]).astype(np.int32)
        stop = CUT if place in cut else StopReason.STOP
        samples.append(replace(sample, trajectory=replace(sample.trajectory, token_ids=tokens, stop_reason=stop)))
    failures = (Failure(stage="reward", name="r", error="gone", origin=owner.origin),) * lost
    return Group(task=owner, samples=tuple(samples), failures=failures)


def paired(*groups: Group[Scored], seed: int = 0, **changes: Any) -> tuple[tuple[Pair, ...], Metrics]:
    rule: dict[str, Any] = {"select": "best_worst", "min_margin": 0.0, "truncated": "keep"}
    return pair_groups(groups, PairsConfig(pairs_per_step=1, **(rule | changes)), seed)


def places(found: tuple[tuple[Pair, ...], Metrics]) -> list[tuple[int, int]]:
    """Which samples of their groups the pairs are made of."""
    return [tuple(int(one.token_ids[-1]) - 100 for one in pair.sequences) for pair in found[0]]  # type: ignore[misc]


def test_the_best_is_chosen_and_the_worst_rejected_token_by_token() -> None:
    found = paired(group([0.5, 0.9, 0.1, 0.9]), group([1.0, 0.0], index=7))
    assert places(found) == [(1, 2), (0, 1)]  # the first of equally good ones
    assert reduce(found[1])["iteration/margin"] == pytest.approx((0.8 + 1.0) / 2)
    pair = found[0][1]
    assert pair.chosen.token_ids.tolist() == [7, 7, 100, 100, 100]
    assert pair.chosen.loss_mask.tolist() == [False, False, True, True, True]
    assert pair.rejected.token_ids.tolist() == [7, 7, 101, 101, 101, 101]
    assert (pair.chosen.first_trained, pair.origin) == (2, "fake.jsonl:8")


@pytest.mark.parametrize(
    ("select", "expected"),
    [("best_worst", [(1, 0)]), ("all", [(1, 0), (2, 0)])],
)
def test_other_ways_to_pair(select: str, expected: list[tuple[int, int]]) -> None:
    assert places(paired(group([0.2, 0.9, 0.9, 0.5]), select=select, min_margin=0.5)) == expected


def test_pairs_at_random_are_eligible_repeatable_and_not_always_the_same() -> None:
    groups = [group([0.2, 0.9, 0.9, 0.5], index=index) for index in range(30)]
    found = places(paired(*groups, select="random", min_margin=0.5))
    assert set(found) == {(1, 0), (2, 0)}
    assert places(paired(*groups, select="random", min_margin=0.5)) == found
    assert places(paired(*groups, select="random", min_margin=0.5, seed=1)) != found


def test_groups_that_give_no_pair_are_counted_and_a_lost_sample_is_no_reward() -> None:
    found = paired(
        group([0.5, 0.5]),  # equal
        group([0.5], lost=1),  # were the lost one 0, this would be a pair
        group([], lost=2),
        group([0.1 + 0.2, 0.3]),  # equal but for rounding
        group([0.4, 0.1]),
    )
    assert places(found) == [(0, 1)]
    figures = reduce(found[1])
    assert figures["iteration/without_pair"] == pytest.approx(0.8)
    assert (figures["iteration/pairs"], figures["iteration/unscored"]) == (1, 2)
    assert figures["iteration/margin"] == pytest.approx(0.3)
    nothing = reduce(paired(group([1.0, 1.0]))[1])
    assert "iteration/margin" not in nothing
    assert nothing["iteration/without_pair"] == 1.0


def test_a_margin_is_met_in_spite_of_rounding() -> None:
    assert len(paired(group([0.3, 0.2]), min_margin=0.1)[0]) == 1
    assert len(paired(group([0.3, 0.2001]), min_margin=0.1)[0]) == 0


@pytest.mark.parametrize(
    ("truncated", "expected"), [("keep", [(0, 3)]), ("never_chosen", [(1, 3)]), ("drop", [(1, 2)])]
)
def test_answers_that_the_limit_cut(truncated: str, expected: list[tuple[int, int]]) -> None:
    found = paired(group([0.9, 0.8, 0.3, 0.1], cut=(0, 3)), truncated=truncated)
    assert places(found) == expected
    assert reduce(found[1])["iteration/chosen_truncated"] == (truncated == "keep")


def test_answers_that_cannot_be_told_apart_or_learned_from_are_in_no_pair() -> None:
    twins = group([0.9, 0.1])
    same = tuple(replace(one, trajectory=twins.samples[0].trajectory) for one in twins.samples)
    assert paired(replace(twins, samples=same))[0] == ()
    silent = group([0.9, 0.5, 0.1])
    empty = silent.samples[0].trajectory
    empty = replace(empty, token_ids=empty.token_ids[:2], sampled=empty.sampled[:2])
    found = paired(replace(silent, samples=(replace(silent.samples[0], trajectory=empty), *silent.samples[1:])))
    assert places(found) == [(1, 2)]


def same_pairs(left: tuple[Pair, ...], right: tuple[Pair, ...]) -> bool:
    return [(p.content(), p.origin) for p in left] == [(p.content(), p.origin) for p in right]


def test_a_checkpoint_holds_pairs_as_they_are() -> None:
    pairs = paired(group([0.2, 0.9, 0.5]), group([0.1, 0.7], index=3), select="all")[0]
    sums = -np.arange(8, dtype=np.float32) / 3
    read, told = decode_pairs(encode_pairs(pairs, sums))
    assert same_pairs(read, pairs)
    assert told is not None
    assert told.tolist() == sums.tolist()
    assert [answer.loss_mask.dtype for pair in read for answer in pair.sequences] == [np.bool_] * 8
    assert decode_pairs(encode_pairs(pairs, None))[1] is None


@pytest.mark.parametrize("damage", [lambda text: text[:-40], lambda text: "…" + text, lambda text: ""])
def test_damaged_pairs_are_refused(damage: Any) -> None:
    text = encode_pairs(paired(group([0.2, 0.9]))[0], None)
    with pytest.raises(CheckpointError, match="sampled pairs are damaged"):
        decode_pairs(damage(text))
