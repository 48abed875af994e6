"""From hidden states to the loss of a micro-batch: what a trainer's rank calls.

losses = distillation_losses(hidden_ND, head.weight, teacher, loss, weights_N=weights_N, …)   # inside the head
objective, metrics = distillation_objective(losses, weights_N)
engine.backward(objective)
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll_like.algorithms.base import item_metrics
from roll_like.algorithms.blocks import Cut
from roll_like.algorithms.distillation.base import DistillationLoss, Outcomes
from roll_like.algorithms.distillation.divergences import kl
from roll_like.algorithms.distillation.student import ChosenLogits, FullDivergence, entropy
from roll_like.algorithms.distillation.teacher import REST_FLOOR, Teacher, TeacherHead, TeacherTopK
from roll_like.algorithms.distillation.texts import (
    NOTHING,
    TeacherTexts,
    likely_unmatched,
    text_outcomes,
    unmatched_distance,
)
from roll_like.algorithms.divided import DividedVocabulary
from roll_like.algorithms.losses.base import TokenLosses
from roll_like.errors import ConfigError, EngineError
from roll_like.types import PLAIN_LOGITS, LogitTransform
from roll_like.values import Metric


def distillation_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    teacher: Teacher | TeacherTexts,
    loss: DistillationLoss,
    *,
    chunk_tokens: int,
    chunk_vocab: int,
    bias: Tensor | None = None,
    targets_N: Tensor | None = None,
    weights_N: Tensor | None = None,
    logits: LogitTransform = PLAIN_LOGITS,
    divided: DividedVocabulary | None = None,
) -> TokenLosses:
    """Return the loss of each token, (1 − c)·T²·D(teacher, student) + c·CE, before weights, shape [N].

    D is the loss's divergence at its temperature T, c its `ce_weight`, and CE the cross-entropy with `targets_N` at
    temperature 1. Of texts, `unmatched_weight` × the rank distance of unmatched tokens is added to D. Gradients flow
    to `hidden_ND`, `weight_VD` and `bias`; the teacher has none. Products run in the dtype of `hidden_ND`, everything
    else in float32 (float64 for float64).

    At most `chunk_tokens` × `chunk_vocab` logits exist at a time, of each model, or those of one token where a whole
    row is larger; besides them the gradient of the weight, in float32, and K numbers a token.

    Args:
        hidden_ND: Last hidden states of the student, after the final norm.
        weight_VD: Its output projection. With ZeRO-3 call this inside the module that owns it.
        teacher: What the teacher says of the same N positions.
        chunk_tokens: `training.logprob_chunk_tokens`.
        chunk_vocab: `training.logprob_chunk_vocab`.
        bias: Of the output projection, shape [V].
        targets_N: The token that the data has next at each position; needed with `ce_weight`.
        weights_N: Weight of each token; those of weight 0 are not computed and have loss 0.
        divided: The ranks that divide the student's vocabulary, as `token_logprobs` takes it.

    Returns:
        Losses, and figures of each token: `distill/divergence` (without T²), `distill/kl` (forward),
        `distill/top1_agreement`, `distill/teacher_entropy`, with a top-k `distill/teacher_mass`, with an
        `unmatched_weight` `distill/unmatched`, and with targets `distill/cross_entropy`.

    Raises:
        ConfigError: A cross-entropy without targets, or a teacher at another temperature.
        EngineError: Shapes or vocabularies do not fit, or a teacher's top-k is none.
    """
    if targets_N is None and loss.config.ce_weight:
        raise ConfigError(
            f"ce_weight is {loss.config.ce_weight:g}, and there are no target tokens",
            fix="give the data's own tokens, or set ce_weight to 0",
        )
    cut = Cut(loss.config.temperature, chunk_tokens, chunk_vocab, logits=logits)
    vocabulary = len(weight_VD) if divided is None else divided.size
    _check_shapes(hidden_ND, weight_VD, teacher, targets_N, weights_N, vocabulary)
    kept_N = None if weights_N is None or bool((weights_N != 0).all()) else weights_N != 0
    if kept_N is not None:
        hidden_ND, teacher = hidden_ND[kept_N], teacher.select(kept_N)
        targets_N = None if targets_N is None else targets_N[kept_N]
    head = (hidden_ND, weight_VD.to(hidden_ND.dtype), bias)  # mixed precision: a master weight in float32
    labels_N = None if targets_N is None else targets_N.long()
    if isinstance(teacher, TeacherTopK):
        teacher.check(vocabulary, loss.config.temperature)
        divergence_N, logprob_N, figures = _of_top_k(head, labels_N, teacher, loss, cut, divided, vocabulary)
    elif isinstance(teacher, TeacherTexts):
        teacher.check(vocabulary, loss.config.temperature)
        divergence_N, logprob_N, figures = _of_texts(head, labels_N, teacher, loss, cut, divided, vocabulary)
    else:
        divergence_N, logprob_N, rows_FN, best_2N = FullDivergence.apply(  # type: ignore[no-untyped-call]
            *head, labels_N, teacher, loss, cut, divided
        )
        figures = {
            "distill/kl": rows_FN[0],
            "distill/top1_agreement": best_2N[0] == best_2N[1],
            "distill/teacher_entropy": rows_FN[1],
        }
    losses_N = loss.divergence_factor * divergence_N
    figures = {"distill/divergence": divergence_N.detach(), **figures}
    if loss.config.ce_weight:
        losses_N = losses_N - loss.config.ce_weight * logprob_N
    if targets_N is not None:
        figures["distill/cross_entropy"] = -logprob_N.detach()
    if kept_N is None:
        return TokenLosses(losses_N, figures)
    return TokenLosses(_spread(losses_N, kept_N), {name: _spread(each, kept_N) for name, each in figures.items()})


def top_k_outcomes(chosen_NK: Tensor, rest_N: Tensor, teacher: TeacherTopK, *, rest: bool) -> Outcomes:
    """Return both distributions over the teacher's top-k, and over "any other token" with `rest`.

    Without `rest` both are renormalised over the top-k. With it, the mass of "any other token" is at least 2⁻²³ in both
    distributions: a smaller one would be rounding error of log-probabilities in float32.

    Args:
        chosen_NK: The student's logits/T at the teacher's tokens.
        rest_N: Log-sum-exp of its other logits/T.
        teacher: The teacher's top-k.
        rest: Whether to count other tokens, as one outcome.
    """
    teacher_NK = teacher.logprobs_NK.to(chosen_NK.dtype).detach()
    if not rest:
        return Outcomes(chosen_NK.log_softmax(-1), teacher_NK.log_softmax(-1))
    student_NM = torch.cat([chosen_NK, rest_N[:, None]], 1).log_softmax(-1)
    floor = student_NM.new_tensor(REST_FLOOR).log()
    student_NM = torch.cat([student_NM[:, :-1], student_NM[:, -1:].clamp(min=floor)], 1)
    other_N1 = (1 - teacher.mass()).clamp(min=REST_FLOOR).log()[:, None].to(chosen_NK.dtype)
    return Outcomes(student_NM, torch.cat([teacher_NK, other_N1], 1), rest=True)


def distillation_objective(losses: TokenLosses, weights_N: Tensor) -> tuple[Tensor, dict[str, Metric]]:
    """Return Σ_t w_t·ℓ_t over a micro-batch, and its metrics.

    Weights divide by the global batch (`algorithms.aggregation.token_weights`), so that micro-batches and ranks add
    up. Tokens of weight 0 are ignored, even if their losses are not finite.

    Returns:
        The scalar to run `backward` on, and `train/loss` as a Sum, each figure of a token as a Mean over tokens.

    Raises:
        EngineError: A loss is infinite or NaN.
    """
    counted_N = weights_N != 0
    losses_C, seen_N = losses.losses_N[counted_N], losses.losses_N.detach()
    if not bool(seen_N[counted_N].isfinite().all()):
        bad = (counted_N & ~seen_N.isfinite()).nonzero().flatten()
        raise EngineError(
            f"the distillation loss is {float(seen_N[bad[0]]):g} at token {int(bad[0])} of this micro-batch "
            f"({len(bad)} of {len(weights_N)} tokens); finite numbers were expected",
            fix="where the teacher excludes tokens (logits of −∞), use forward_kl, js or skewed_reverse_kl; "
            "else lower training.optimizer.lr",
        )
    objective = (weights_N[counted_N] * losses_C).sum()
    figures = {name: (figure_N, counted_N) for name, figure_N in losses.metrics.items()}
    return objective, item_metrics({"train/loss": objective}, figures, {})


def _of_top_k(
    head: tuple[Tensor, Tensor, Tensor | None],
    labels_N: Tensor | None,
    teacher: TeacherTopK,
    loss: DistillationLoss,
    cut: Cut,
    divided: DividedVocabulary | None,
    vocabulary: int,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return divergence, log-probability and figures of each token; `head` is hidden states, weight and bias."""
    ids_NK = teacher.ids_NK.long()
    chosen_NK, rest_N, logprob_N, best_N = ChosenLogits.apply(  # type: ignore[no-untyped-call]
        *head, ids_NK, labels_N, cut, divided
    )
    rest = loss.config.tail == "rest" and ids_NK.shape[1] < vocabulary
    outcomes = top_k_outcomes(chosen_NK, rest_N, teacher, rest=rest)
    with torch.no_grad():
        theirs_N = ids_NK.gather(1, teacher.logprobs_NK.argmax(1, keepdim=True)).squeeze(1)
        known = entropy(outcomes.teacher_NM) if teacher.entropy_N is None else teacher.entropy_N
        figures = {
            "distill/kl": kl(outcomes.teacher_NM, outcomes.student_NM),
            "distill/top1_agreement": best_N == theirs_N,
            "distill/teacher_entropy": known,
            "distill/teacher_mass": teacher.mass().clamp(max=1.0),
        }
    return loss.divergence(outcomes), logprob_N, figures


def _of_texts(
    head: tuple[Tensor, Tensor, Tensor | None],
    labels_N: Tensor | None,
    teacher: TeacherTexts,
    loss: DistillationLoss,
    cut: Cut,
    divided: DividedVocabulary | None,
    vocabulary: int,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the same as `_of_top_k` for texts; the divergence of a stretch is at its last token."""
    ids_NK, weight = teacher.ids_NK.long(), loss.config.unmatched_weight
    unmatched_NU = likely_unmatched(head, teacher, cut, divided, vocabulary) if weight else ids_NK[:, :0]
    logits_NM, rest_N, logprob_N, best_N = ChosenLogits.apply(  # type: ignore[no-untyped-call]
        *head, torch.cat([ids_NK, unmatched_NU], 1), labels_N, cut, divided
    )
    chosen_NK, more_NU = logits_NM.tensor_split([ids_NK.shape[1]], 1)
    if weight:  # they are other texts, too
        rest_N = torch.cat([rest_N[:, None], more_NU.masked_fill(unmatched_NU < 0, NOTHING)], 1).logsumexp(-1)
    texts = text_outcomes(chosen_NK, rest_N, teacher, rest=loss.config.tail == "rest")
    outcomes = texts.outcomes
    with torch.no_grad():
        mass_N = teacher.logprobs_NK.masked_fill(teacher.ids_NK < 0, -torch.inf).exp().sum(-1)
        figures = {
            "distill/kl": texts.at_last(kl(outcomes.teacher_NM, outcomes.student_NM)),
            "distill/top1_agreement": texts.everywhere((best_N == teacher.best_N)[texts.last_N]),
            "distill/teacher_entropy": texts.everywhere(teacher.entropy_N[texts.last_N]),
            "distill/teacher_mass": texts.everywhere(mass_N[texts.last_N].clamp(max=1.0)),
        }
    divergence_N = texts.at_last(loss.divergence(outcomes))
    if weight:
        total_N = torch.cat([chosen_NK.masked_fill(ids_NK < 0, NOTHING), rest_N[:, None]], 1).logsumexp(-1)
        distance_N = texts.at_last(unmatched_distance(more_NU, unmatched_NU, total_N, texts, teacher))
        figures |= {"distill/divergence": divergence_N.detach(), "distill/unmatched": distance_N.detach()}
        divergence_N = divergence_N + weight * distance_N
    return divergence_N, logprob_N, figures


def _spread(values: Tensor, kept_N: Tensor) -> Tensor:
    """Return values of the kept tokens at their places, 0 elsewhere, shape [N]."""
    return values.new_zeros(len(kept_N)).masked_scatter(kept_N, values)


def _check_shapes(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    teacher: Teacher | TeacherTexts,
    targets_N: Tensor | None,
    weights_N: Tensor | None,
    vocabulary: int,
) -> None:
    count = len(hidden_ND)
    lengths = {"teacher": len(teacher)}
    lengths |= {
        name: len(array) for name, array in (("targets", targets_N), ("weights", weights_N)) if array is not None
    }
    wrong = {name: length for name, length in lengths.items() if length != count}
    if wrong or hidden_ND.shape[1:] != weight_VD.shape[1:]:
        raise EngineError(
            f"student's hidden states of shape {tuple(hidden_ND.shape)} and output projection {tuple(weight_VD.shape)} "
            f"with {lengths} tokens do not fit; [N, D], [V, D] and N of each were expected"
        )
    if isinstance(teacher, TeacherHead) and teacher.vocabulary != vocabulary:
        raise EngineError(
            f"the teacher has {teacher.vocabulary} logits a token, the student {vocabulary}",
            fix="distil between models of one tokenizer; where only the padding of the vocabulary differs, use top-k",
        )
    if targets_N is not None and count:
        low, high = (int(value) for value in targets_N.aminmax())
        if low < 0 or high >= vocabulary:
            raise EngineError(
                f"target tokens run from {low} to {high}, the student's vocabulary has {vocabulary} tokens",
                fix="use the tokenizer that belongs to the student's model.path",
            )
