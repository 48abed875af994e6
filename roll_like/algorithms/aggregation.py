"""Aggregation of token losses: the weight of each token in the loss of an optimizer step.

The loss of an optimizer step is Σ_t w_t·ℓ_t over its whole batch. Denominators are taken over that batch, never over a
micro-batch or a rank, so that packing, the token budget and the world size do not change the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from roll_like.types import FloatArray, PolicySample

Aggregation: TypeAlias = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "token_sum_norm"]


def trajectory_numbers(samples: Sequence[PolicySample]) -> list[int]:
    """Return a number of each sample's trajectory, from 0 on; the parts of an episode that was cut share one."""
    known: dict[tuple[int, int | None], int] = {}
    return [
        known.setdefault((index, None) if sample.trajectory is None else (-1, sample.trajectory), len(known))
        for index, sample in enumerate(samples)
    ]


def observation_weights(samples: Sequence[PolicySample], coefficient: float) -> list[FloatArray]:
    """Return the weight of every token of an observation in the loss, one array [T] a sample, 0 elsewhere.

    ECHO (arXiv:2605.24517; as in prime-rl): coefficient·mean of −log π over what the policy read after its first turn
    and did not write, whatever became of the episode. With M such tokens in the batch each weighs coefficient/M. The
    chat template's own tokens between turns are among them. Where it renders the history again, what follows the last
    turn was read for the first time, and stands in the prompt of the next sample.

    Args:
        samples: The whole batch of one optimizer step, of all ranks.
        coefficient: `algorithm.observation_coefficient`.
    """
    masks = []
    for sample in samples:
        mask = ~sample.loss_mask
        mask[: sample.prompt_length if sample.observed_from is None else sample.observed_from] = False
        masks.append(mask)
    weight = np.float32(coefficient / max(sum(int(mask.sum()) for mask in masks), 1))
    return [mask.astype(np.float32) * weight for mask in masks]


def token_weights(samples: Sequence[PolicySample], how: Aggregation, *, max_response_tokens: int) -> list[FloatArray]:
    """Return the weight of every token in the loss, one array [T] a sample, 0 where not sampled.

    With N trained tokens in the batch, S trajectories that have any, and n_i of them in trajectory i:

    | `how`                 | weight             | source                                   |
    |-----------------------|--------------------|------------------------------------------|
    | `token_mean`          | 1/N                | DAPO, arXiv:2503.14476                   |
    | `seq_mean_token_sum`  | 1/S                | the policy gradient itself               |
    | `seq_mean_token_mean` | 1/(S·n_i)          | GRPO, arXiv:2402.03300                   |
    | `token_sum_norm`      | 1/(S·max_response) | Dr. GRPO, arXiv:2503.20783               |

    The samples of an episode that was cut are one trajectory: it counts once, however often its history was
    rewritten. What has no trained token has weights 0 and is not counted in S.

    Args:
        samples: The whole batch of one optimizer step, of all ranks.
        how: `algorithm.aggregation`.
        max_response_tokens: The constant of `token_sum_norm`: most sampled tokens of a trajectory whose history is not
            rewritten.
    """
    numbers, lengths = trajectory_numbers(samples), Counter[int]()
    for number, sample in zip(numbers, samples, strict=True):
        lengths[number] += int(sample.loss_mask.sum())
    tokens, sequences = lengths.total(), sum(length > 0 for length in lengths.values())
    weights = []
    for number, sample in zip(numbers, samples, strict=True):
        length = lengths[number]
        denominators: dict[Aggregation, int] = {
            "token_mean": tokens,
            "seq_mean_token_sum": sequences,
            "seq_mean_token_mean": sequences * length,
            "token_sum_norm": sequences * max_response_tokens,
        }
        weight = 1 / denominators[how] if length else 0.0
        weights.append(sample.loss_mask.astype(np.float32) * np.float32(weight))
    return weights
