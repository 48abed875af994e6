"""Distributions over two vocabularies, compared as distributions over texts.

A student and a teacher with another tokenizer read one text. It is cut into the shortest stretches that begin and end
between two tokens of both (`spans.py`). What a model may write in the place of a stretch are texts: the stretch's
earlier tokens and then any token. By the chain rule

    log P(text) = Σ log p(earlier tokens) + log p(last token)

Two outcomes are one where they spell the same text. Every other text is the outcome "any other", so both models have a
distribution over the same outcomes, and every distillation loss compares them. In a stretch of one token on each side
these are the tokens that both vocabularies have; the stretch's own text is always one.

TRL's GOLD trainer merges stretches by the same product (`uld_token_merge_strategy: bayesian`). It compares tokens by
their name also where the earlier tokens of the two spell different texts, and what only one vocabulary has by its rank:
`rank_distance`, which is off by default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_like.algorithms.blocks import Cut
from roll_like.algorithms.distillation.base import Outcomes
from roll_like.algorithms.distillation.teacher import REST_FLOOR, teacher_topk
from roll_like.algorithms.divided import DividedVocabulary
from roll_like.errors import ConfigError, EngineError

#: Log-probability of outcomes that a row does not have: nothing, and a finite number.
NOTHING = -1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTexts:
    """What a teacher with another tokenizer says of N tokens of a student.

    Attributes:
        ids_NK: Tokens of the student that spell an outcome in the place of each token, −1 for none, distinct within a
            row. The first is the token itself. Only those of a stretch's last token are compared.
        logprobs_NK: The teacher's log-probability of the outcome's text from the stretch's begin, at `temperature`.
            Where the id is −1: that of a text whose last token only the teacher has, else −∞.
        spans_N: The stretch of each token; tokens of one stretch are neighbours.
        entropy_N: Entropy of the teacher's distribution at the stretch's last token, in nats.
        best_N: The student's token that spells what the teacher finds likeliest there, −1 for none.
        temperature: Must be the loss's.
        unmatched_U: The student's tokens whose text no token of the teacher spells; None where they are not compared.
    """

    ids_NK: Tensor
    logprobs_NK: Tensor
    spans_N: Tensor
    entropy_N: Tensor
    best_N: Tensor
    temperature: float = 1.0
    unmatched_U: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids_NK)

    def select(self, rows_N: Tensor) -> TeacherTexts:
        """Return the rows where `rows_N` is true."""
        return TeacherTexts(
            ids_NK=self.ids_NK[rows_N],
            logprobs_NK=self.logprobs_NK[rows_N],
            spans_N=self.spans_N[rows_N],
            entropy_N=self.entropy_N[rows_N],
            best_N=self.best_N[rows_N],
            temperature=self.temperature,
            unmatched_U=self.unmatched_U,
        )

    def check(self, vocabulary: int, temperature: float) -> None:
        """Refuse what cannot be told of a student with this vocabulary, at this temperature.

        Raises:
            EngineError: A token is not in the vocabulary.
            ConfigError: The temperatures differ.
        """
        if self.temperature != temperature:
            raise ConfigError(
                f"the teacher's log-probabilities are at temperature {self.temperature:g}, the loss compares at "
                f"{temperature:g}",
                fix="take the teacher's softmax at the loss's `temperature`",
            )
        if len(self) and (int(self.ids_NK.max()) >= vocabulary or int(self.ids_NK[:, 0].min()) < 0):
            raise EngineError(
                f"outcomes have tokens up to {int(self.ids_NK.max())}, the student's vocabulary has {vocabulary}",
                fix="use the tokenizer that belongs to the student's model.path",
            )


@dataclass(frozen=True, slots=True)
class TextOutcomes:
    """The distributions of L stretches over texts.

    Attributes:
        outcomes: One row a stretch.
        stretch_N: The row of each token.
        last_N: Whether a token is the last of its stretch.
        before_L: The student's log-probability of a stretch's earlier tokens.
    """

    outcomes: Outcomes
    stretch_N: Tensor
    last_N: Tensor
    before_L: Tensor

    def at_last(self, values_L: Tensor) -> Tensor:
        """Return values of stretches at their last tokens and 0 elsewhere, shape [N]: their sum over tokens stays."""
        return values_L.new_zeros(len(self.last_N)).masked_scatter(self.last_N, values_L)

    def everywhere(self, values_L: Tensor) -> Tensor:
        """Return values of stretches at each of their tokens, shape [N]."""
        return values_L[self.stretch_N]


def text_outcomes(chosen_NK: Tensor, rest_N: Tensor, teacher: TeacherTexts, *, rest: bool) -> TextOutcomes:
    """Return both distributions of each stretch over the texts that both can write.

    Without `rest` both are renormalised over these texts; with it, "any other text" is an outcome of at least 2⁻²³.

    Args:
        chosen_NK: The student's logits/T at `teacher.ids_NK`; anything for −1.
        rest_N: Log-sum-exp of its other logits/T.
        teacher: What the teacher says.
        rest: Whether other texts count, as one outcome.
    """
    none_NK = teacher.ids_NK < 0
    logits_NM = torch.cat([chosen_NK.masked_fill(none_NK, -math.inf), rest_N[:, None]], 1)
    logprobs_NM = logits_NM.log_softmax(-1)
    last_N = torch.ones_like(teacher.spans_N, dtype=torch.bool)
    last_N[:-1] = teacher.spans_N[1:] != teacher.spans_N[:-1]
    stretch_N = last_N.cumsum(0) - last_N.long()
    before_N = logprobs_NM[:, 0].masked_fill(last_N, 0.0)
    before_L = before_N.new_zeros(int(last_N.sum())).index_add(0, stretch_N, before_N)
    none_LK, own_LM = none_NK[last_N], logprobs_NM[last_N]
    student_LK = (own_LM[:, :-1].masked_fill(none_LK, 0.0) + before_L[:, None]).masked_fill(none_LK, NOTHING)
    teacher_LK = teacher.logprobs_NK[last_N].to(student_LK.dtype).detach().masked_fill(none_LK, NOTHING)
    if not rest:
        outcomes = Outcomes(student_LK.log_softmax(-1), teacher_LK.log_softmax(-1))
        return TextOutcomes(outcomes, stretch_N, last_N, before_L)
    floor = math.log(REST_FLOOR)
    # other earlier tokens, or these and another last one
    other_L = (own_LM[:, -1] + before_L).clamp(min=floor)
    several_L = before_L < 0
    strayed_L = (-torch.expm1(torch.where(several_L, before_L, -1.0).clamp(max=-REST_FLOOR))).log()
    other_L = torch.where(several_L, torch.logaddexp(other_L, strayed_L), other_L)
    theirs_L = (1 - teacher_LK.double().exp().sum(-1)).clamp(min=REST_FLOOR).log().to(student_LK.dtype)
    outcomes = Outcomes(
        torch.cat([student_LK, other_L[:, None]], 1), torch.cat([teacher_LK, theirs_L[:, None]], 1), rest=True
    )
    return TextOutcomes(outcomes, stretch_N, last_N, before_L)


def rank_distance(ours_LU: Tensor, theirs_LK: Tensor) -> Tensor:
    """Return Σ_i |p_(i) − q_(i)| of each row, shape [L]: the i-th largest probabilities of two lists, 0 where one ends.

    The Wasserstein distance of ULD (Boizard et al. 2024, arXiv:2402.12030), as in TRL's GOLD trainer for
    tokens that only one vocabulary has (`uld_hybrid_unmatched_weight`).

        0.1, 0.4 and 0.3, 0.2, 0.1  →  |0.4 − 0.3| + |0.1 − 0.2| + |0 − 0.1| = 0.3
    """
    width = max(ours_LU.shape[1], theirs_LK.shape[1])
    ours_LW, theirs_LW = (
        torch.nn.functional.pad(each.sort(-1, descending=True).values, (0, width - each.shape[1]))
        for each in (ours_LU, theirs_LK)
    )
    return (ours_LW - theirs_LW).abs().sum(-1)


@torch.no_grad()
def likely_unmatched(
    head: tuple[Tensor, Tensor, Tensor | None],
    teacher: TeacherTexts,
    cut: Cut,
    divided: DividedVocabulary | None,
    vocabulary: int,
) -> Tensor:
    """Return the student's likeliest tokens among `teacher.unmatched_U`, as many as the teacher has, shape [N, ≤ K].

    Those that are outcomes already are −1. `head` is hidden states, weight and bias.
    """
    hidden_ND, weight_VD, bias = head
    assert teacher.unmatched_U is not None, "else they are not compared"
    unmatched_U = teacher.unmatched_U.long()
    wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
    others_V = torch.full((vocabulary,), NOTHING, dtype=wide, device=hidden_ND.device).index_fill(0, unmatched_U, 0.0)
    own_V = others_V if divided is None else others_V[divided.own]
    found_NU = teacher_topk(
        hidden_ND,
        weight_VD,
        min(len(unmatched_U), teacher.ids_NK.shape[1]),
        temperature=cut.temperature,
        chunk_tokens=cut.chunk_tokens,
        chunk_vocab=cut.chunk_vocab,
        bias=own_V if bias is None else own_V + bias,
        logits=cut.logits,
        divided=divided,
    ).ids_NK.long()
    outcomes_NU = (found_NU[:, :, None] == teacher.ids_NK[:, None]).any(-1)
    return found_NU.masked_fill(outcomes_NU, -1)


def unmatched_distance(
    unmatched_NU: Tensor, ids_NU: Tensor, total_N: Tensor, texts: TextOutcomes, teacher: TeacherTexts
) -> Tensor:
    """Return the `rank_distance` of each stretch, over the texts whose last token only one of the two models has, [L].

    Args:
        unmatched_NU: The student's logits/T at `ids_NU`; anything for −1.
        ids_NU: As `likely_unmatched` returns them.
        total_N: Log-sum-exp of all logits/T.
        teacher: What the teacher says.
    """
    last_N = texts.last_N
    ours_NU = (unmatched_NU - total_N[:, None]).masked_fill(ids_NU < 0, NOTHING)
    ours_LU = (ours_NU[last_N] + texts.before_L[:, None]).exp()
    theirs_LK = teacher.logprobs_NK[last_N].masked_fill(teacher.ids_NK[last_N] >= 0, -math.inf).exp()
    return rank_distance(ours_LU, theirs_LK.to(ours_LU.dtype).detach())
