"""Stretches of two tokenizers and their merged distributions against TRL 1.16's GOLD trainer, gradients included."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from algorithm_samples import same_cases
from distillation_samples import distillation_loss
from hypothesis import given
from hypothesis import strategies as st
from oracle_imports import references
from torch import Tensor

from roll_like.algorithms.distillation.base import Outcomes
from roll_like.algorithms.distillation.objective import distillation_losses
from roll_like.algorithms.distillation.spans import common_spans
from roll_like.algorithms.distillation.texts import TeacherTexts, TextOutcomes, text_outcomes

with references():
    from trl.experimental.gold.gold_config import GOLDConfig
    from trl.experimental.gold.gold_trainer import ULDLoss

#: Tokens of the student, of the teacher, and those that both have: the first ones, under one id.
OURS, THEIRS, COMMON = 7, 9, 5
#: Bytes after each token of two tokenizations of one text.
ENDS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=4).map(
    lambda cuts: tuple([at for at, cut in enumerate([*cuts, (True, True)], 1) if cut[side]] for side in (0, 1))
)


class Gold(NamedTuple):
    """What TRL makes of a case: groups, both merged distributions [L, V], losses of common and of other tokens."""

    groups: tuple[list[list[int]], list[list[int]]]
    student: Tensor
    teacher: Tensor
    loss: Tensor
    unmatched: Tensor


def gold(
    ends: tuple[list[int], list[int]], ids: tuple[Tensor, Tensor], logits: tuple[Tensor, Tensor], beta: float
) -> Gold:
    """Let TRL align, merge and compare."""
    config = GOLDConfig.__new__(GOLDConfig)
    names = {"crossentropy_weight": 0.0, "distillation_weight": 1.0, "student_temperature": 1.0}
    names |= {"teacher_temperature": 1.0, "skip_student_eos": False, "skip_teacher_eos": False}
    names |= {"token_merge_strategy": "bayesian", "use_hybrid_loss": True}
    names |= {"hybrid_matched_weight": 1.0, "hybrid_unmatched_weight": 0.0}
    for name, value in names.items():
        setattr(config, f"uld_{name}", value)
    config.use_extended_uld, config.beta = True, beta
    loss = ULDLoss(config)
    loss._vocab_mapping = {token: token for token in range(COMMON)}
    loss._teacher_matched_ids = loss._student_matched_ids = set(range(COMMON))
    loss.mapping_tensor = torch.arange(COMMON)
    offsets = [list(zip([0, *side[:-1]], side, strict=True)) for side in ends]
    groups = loss._align_by_byte_offsets(*offsets)
    merged = [
        loss._merge_probabilities_with_alignment_groups(logits_NV.softmax(-1), group, token_ids.tolist())
        for logits_NV, group, token_ids in zip(logits, groups, ids, strict=True)
    ]
    matched = loss._compute_hybrid_uld_loss(*merged)
    return Gold(groups, *merged, matched, loss.last_unmatched_loss)


def told(ends: tuple[list[int], list[int]], ids: tuple[Tensor, Tensor], logits: tuple[Tensor, Tensor]) -> TeacherTexts:
    """What our teacher says: outcomes are the common tokens, the student's own first; then tokens that only it has."""
    spans, their_spans = (torch.from_numpy(each) for each in common_spans(*ends))
    logprobs_NW = logits[1].log_softmax(-1)
    own_N = logprobs_NW.gather(1, ids[1][:, None]).squeeze(1)
    count = len(spans)
    ids_NK = torch.full((count, THEIRS), -1)
    ids_NK[:, 0] = ids[0]
    told_NK = torch.full((count, THEIRS), -torch.inf, dtype=torch.float64)
    for stretch in spans.unique():
        last = int((spans == stretch).nonzero()[-1])
        rows = (their_spans == stretch).nonzero().flatten()
        own = int(ids[0][last])
        order = torch.tensor([own, *(token for token in range(THEIRS) if token != own)])
        ids_NK[last] = order.where(order < COMMON, -1)
        told_NK[last] = own_N[rows[:-1]].sum() + logprobs_NW[rows[-1], order]
    return TeacherTexts(
        ids_NK=ids_NK,
        logprobs_NK=told_NK,
        spans_N=spans,
        entropy_N=torch.zeros(count),
        best_N=ids_NK[:, 0],
        unmatched_U=torch.arange(COMMON, OURS),
    )


def ours(ends: tuple[list[int], list[int]], ids: tuple[Tensor, Tensor], logits: tuple[Tensor, Tensor]) -> TextOutcomes:
    """The same as `gold` by our stretches."""
    texts = told(ends, ids, logits)
    ids_NK = texts.ids_NK
    chosen_NK = logits[0].gather(1, ids_NK.clamp(min=0))
    rest_N = torch.stack(
        [row.index_fill(0, own[own >= 0], -torch.inf).logsumexp(0) for row, own in zip(logits[0], ids_NK, strict=True)]
    )
    return text_outcomes(chosen_NK, rest_N, texts, rest=True)


@pytest.mark.parametrize(("beta", "name"), [(0.0, "forward_kl"), (0.3, "js"), (1.0, "reverse_kl")])
@same_cases
@given(ends=ENDS, seed=st.integers(0, 1000))
def test_common_tokens_are_compared_as_gold_compares_them(
    ends: tuple[list[int], list[int]], seed: int, beta: float, name: str
) -> None:
    draw = torch.Generator().manual_seed(seed)
    spans = common_spans(*ends)
    ids = tuple(torch.randint(0, COMMON, (len(side),), generator=draw) for side in ends)
    logits = tuple(
        torch.randn(len(side), vocabulary, generator=draw, dtype=torch.float64) / 2  # TRL bounds products at 1e-8
        for side, vocabulary in zip(ends, (OURS, THEIRS), strict=True)
    )
    logits[0].requires_grad_()
    theirs = gold(ends, ids, logits, beta)
    for side, groups in enumerate(theirs.groups):
        assert list(accumulate(map(len, groups))) == [
            int((spans[side] <= stretch).sum()) for stretch in range(int(spans[side][-1]) + 1)
        ]
    made = ours(ends, ids, logits)
    student_LK, teacher_LK = made.outcomes.student_NM[:, :COMMON], made.outcomes.teacher_NM[:, :COMMON]
    order_LK = torch.stack(
        [
            torch.tensor([own, *(token for token in range(COMMON) if token != own)])
            for own in ids[0][made.last_N].tolist()
        ]
    )
    torch.testing.assert_close(student_LK.exp(), theirs.student.gather(1, order_LK))
    torch.testing.assert_close(teacher_LK.exp(), theirs.teacher.gather(1, order_LK))
    loss = distillation_loss(name, **({"beta": beta} if name == "js" else {}))
    found = loss.divergence(Outcomes(student_LK, teacher_LK)).mean()
    torch.testing.assert_close(found, theirs.loss, rtol=1e-6, atol=1e-8)
    gradients = [torch.autograd.grad(value, logits[0])[0] for value in (found, theirs.loss)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)


@same_cases
@given(ends=ENDS, seed=st.integers(0, 1000))
def test_what_one_vocabulary_lacks_is_compared_by_rank_as_gold_does(
    ends: tuple[list[int], list[int]], seed: int
) -> None:
    """A teacher that tells its whole vocabulary: GOLD's unmatched loss is ours, with its gradient."""
    draw = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(0, COMMON, (len(side),), generator=draw) for side in ends)
    logits = tuple(
        torch.randn(len(side), vocabulary, generator=draw, dtype=torch.float64)
        for side, vocabulary in zip(ends, (OURS, THEIRS), strict=True)
    )
    logits[0].requires_grad_()
    theirs = gold(ends, ids, logits, 0.5)
    found = []
    for weight in (0.0, 1.0):
        losses = distillation_losses(
            logits[0],
            torch.eye(OURS, dtype=torch.float64),
            told(ends, ids, logits),
            distillation_loss("js", unmatched_weight=weight),
            chunk_tokens=2,
            chunk_vocab=3,
        )
        found.append(losses.losses_N.sum() / len(theirs.student))
    distance = found[1] - found[0]
    torch.testing.assert_close(distance, theirs.unmatched, rtol=1e-6, atol=1e-8)
    gradients = [torch.autograd.grad(value, logits[0])[0] for value in (distance, theirs.unmatched)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)
