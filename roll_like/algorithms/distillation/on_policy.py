"""On-policy distillation: the student samples, the teacher scores the sampled tokens; no other logits are needed.

The reverse KL of a trajectory, KL(π‖π_teacher) = E[Σ_t log π(y_t) − log π_teacher(y_t)], is estimated on the tokens
that the student itself sampled (Agarwal et al. 2023, arXiv:2306.13649; Gu et al. 2023, arXiv:2306.08543; Thinking
Machines 2025, "On-Policy Distillation"). It is used in one of two ways:

- as a **loss** (`kl.divergence`, with `straight_through`): its gradient is (log π − log π_teacher)·∇ log π, that of
  k2, which is unbiased where the tokens are the current student's;
- as an **advantage** (`teacher_advantages`): −Σ_{j≥t} γ^(j−t)·k_j, for any policy loss with its ratios and clipping,
  alone or added to the advantage of a reward (`with_teacher_advantages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from roll_like.algorithms.advantages.returns import discounted_returns
from roll_like.algorithms.kl import KLEstimator, check_logprobs, divergence
from roll_like.data.kept import joined_kept, kept_within
from roll_like.types import FloatArray, IntArray, PolicySample, TrainingSample

SampleT = TypeVar("SampleT", bound=PolicySample)


def with_prompt(sample: PolicySample, prompt_ids: IntArray) -> TrainingSample:
    """Return a sample's response after another prompt, for a teacher that reads more than the student.

    Self-distillation (SDFT, arXiv:2601.19897; OPSD, arXiv:2601.18734; as in prime-rl and TRL) has a policy teach
    itself: with a demonstration in the prompt, it says of the tokens that it sampled without how likely it finds them.
    The response's tokens are the same, and what they were drawn from; images and routes of the prompt are left out.
    """
    response = (sample.prompt_length, len(sample))
    own = slice(*response)
    return TrainingSample(
        token_ids=np.concatenate([prompt_ids, sample.token_ids[own]]).astype(np.int32),
        loss_mask=np.concatenate([np.zeros(len(prompt_ids), bool), sample.loss_mask[own]]),
        group_id=sample.group_id,
        prompt_length=len(prompt_ids),
        kept=joined_kept([(None, len(prompt_ids)), (kept_within(sample.kept, *response), response[1] - response[0])]),
        origin=sample.origin,
    )


def after_own_prompt(sample: PolicySample, other: TrainingSample, logprobs_T: FloatArray) -> FloatArray:
    """Return log-probabilities of `with_prompt(sample, …)`, at the places that the tokens have in the sample."""
    own_T = np.zeros(len(sample.token_ids), np.float32)
    own_T[sample.prompt_length :] = logprobs_T[other.prompt_length :]
    return own_T


def teacher_advantages(
    samples: Sequence[PolicySample],
    teacher_logprobs: Sequence[FloatArray],
    *,
    spans: Sequence[IntArray] | None = None,
    estimator: KLEstimator = "k1",
    discount: float = 0.0,
) -> list[FloatArray]:
    """Return −Σ_{j≥t} γ^(j−t)·k_j of every sampled token, one array [T] a sample, 0 elsewhere.

    k_j estimates KL(π‖π_teacher) at the j-th sampled token, from the log-probabilities that the inference engine
    reported. With γ = 0 only the token's own term counts, with γ = 1 all that follow. Tokens that the student did not
    sample are skipped, without discount.

        log π − log π_teacher = 1, 0, 2 and γ = ½  →  −1.5, −1, −2

    With `spans` the terms are those of stretches of tokens, whose log-probabilities are sums over their tokens: what a
    teacher with another tokenizer can be compared in (`spans.py`). All tokens of a stretch get its advantage.

    Args:
        teacher_logprobs: The teacher's log-probabilities of the same tokens, one array [T] a sample.
        spans: The stretch of each sampled token, from 0 on, shape [S] a sample; default: each token is one.
        estimator: As in `algorithm.kl.estimator`; k1 is unbiased.
        discount: γ, in [0, 1]; of a stretch.

    Raises:
        EngineError: The arrays do not fit the samples, or hold infinities or NaN.
    """
    fix = "score with a teacher whose vocabulary has every token that the student may sample"
    check_logprobs(samples, teacher_logprobs, "teacher", fix)
    advantages = []
    for index, (sample, teacher_T) in enumerate(zip(samples, teacher_logprobs, strict=True)):
        span_S = np.arange(sample.trained_tokens) if spans is None else spans[index]
        ours, theirs = (
            torch.from_numpy(np.bincount(span_S, weights=array[sample.loss_mask]))
            for array in (sample.behaviour_logprobs, teacher_T)
        )
        costs = divergence(ours, theirs, estimator).numpy()
        advantages_T = np.zeros(sample.token_ids.shape, np.float32)
        advantages_T[sample.loss_mask] = -discounted_returns([costs], discount)[0][span_S]
        advantages.append(advantages_T)
    return advantages


def with_teacher_advantages(
    samples: Sequence[SampleT],
    teacher_logprobs: Sequence[FloatArray],
    *,
    teacher_weight: float = 1.0,
    reward_weight: float = 0.0,
    spans: Sequence[IntArray] | None = None,
    estimator: KLEstimator = "k1",
    discount: float = 0.0,
) -> list[SampleT]:
    """Return the samples with advantages `reward_weight`·A + `teacher_weight`·A_teacher.

    A is the advantage that a sample comes with, from an estimator over rewards; 0 leaves it out. Other arguments and
    errors are those of `teacher_advantages`.
    """
    ours = teacher_advantages(samples, teacher_logprobs, spans=spans, estimator=estimator, discount=discount)
    return [
        replace(
            sample,
            advantages=(reward_weight * sample.advantages + teacher_weight * advantages_T).astype(np.float32),
        )
        for sample, advantages_T in zip(samples, ours, strict=True)
    ]
