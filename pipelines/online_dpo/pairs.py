"""From scored groups of answers to pairs of a better and a worse one, and back from a checkpoint.

A pair's sequences are the tokens that the engine was given and sampled; nothing is decoded and tokenised again.
"""

from __future__ import annotations

import base64
import binascii
import io
import zipfile
from collections.abc import Sequence

import numpy as np

from roll_like.builtin.pipelines.online_dpo.config import PairsConfig
from roll_like.errors import CheckpointError
from roll_like.types import FloatArray, Group, Pair, Scored, StopReason, TrainingSample, Trajectory
from roll_like.values import Mean, Metrics, Sum, reward_noise


def pair_groups(groups: Sequence[Group[Scored]], rule: PairsConfig, seed: int) -> tuple[tuple[Pair, ...], Metrics]:
    """Make pairs of scored answers to the same prompt.

    Samples that infrastructure lost are no samples of a group, so they count as no reward.

    Worked example: rewards 0.2, 0.9, 0.9 and 0.5 with `min_margin: 0.5` give (1, 0) by `best_worst`, one of (1, 0) and
    (2, 0) by `random`, and both by `all`; the numbers are places in the group.

    Args:
        rule: Which answers become pairs: the `pairs` section.

    Returns:
        The pairs, in the order of their groups, and `iteration/…`; every mean is over pairs or groups.
    """
    random = np.random.default_rng(seed)
    chosen: list[tuple[Scored, Scored]] = []
    without_pair = 0
    for group in groups:
        found = _eligible(group.samples, rule)
        draw = random.random()  # of every group, so that one group's samples do not decide about the next
        if not found:
            without_pair += 1
        elif rule.select == "best_worst":
            chosen.append(max(found, key=_margin))  # the first of equal ones
        elif rule.select == "random":
            chosen.append(found[int(draw * len(found))])
        else:
            chosen += found
    count, cut = len(chosen), sum(_is_cut(better) for better, _ in chosen)
    unscored = sum(len(group.samples) < 2 for group in groups)  # the others were lost
    metrics: Metrics = {
        "iteration/pairs": Sum(float(count)),
        "iteration/without_pair": Mean(without_pair / len(groups) if groups else 0.0, len(groups)),
        "iteration/unscored": Sum(float(unscored)),
        "iteration/margin": Mean(float(np.mean([*map(_margin, chosen)])) if count else 0.0, count),
        "iteration/chosen_truncated": Mean(cut / count if count else 0.0, count),
    }
    return tuple(_pair(better.trajectory, worse.trajectory) for better, worse in chosen), metrics


def _eligible(samples: Sequence[Scored], rule: PairsConfig) -> list[tuple[Scored, Scored]]:
    """Return every pair of answers, the better one first, that may be trained on."""
    paired = [one for one in samples if one.trajectory.response_length]
    if rule.truncated == "drop":
        paired = [one for one in paired if not _is_cut(one)]
    return [
        (better, worse)
        for better in paired
        for worse in paired
        if _is_better(better.reward, worse.reward, rule.min_margin)
        and not (rule.truncated == "never_chosen" and _is_cut(better))
        and not np.array_equal(
            better.trajectory.token_ids, worse.trajectory.token_ids
        )  # an unstable judge scored one text twice
    ]


def _is_better(reward: float, other: float, margin: float) -> bool:
    noise = reward_noise([reward, other])
    return reward - other > max(margin - noise, noise)


def _margin(pair: tuple[Scored, Scored]) -> float:
    return pair[0].reward - pair[1].reward


def _is_cut(sample: Scored) -> bool:
    return sample.trajectory.stop_reason is StopReason.LENGTH


def _pair(better: Trajectory, worse: Trajectory) -> Pair:
    chosen, rejected = (
        TrainingSample(token_ids=one.token_ids, loss_mask=one.sampled, origin=one.task.origin)
        for one in (better, worse)
    )
    return Pair(chosen=chosen, rejected=rejected)


def encode_pairs(pairs: Sequence[Pair], reference_logprobs: FloatArray | None) -> str:
    """Return pairs as text that JSON takes: a compressed NumPy archive in base 64.

    Args:
        pairs: At least one.
        reference_logprobs: Log-probability of each answer under the reference, chosen and rejected in turn; None
            without.
    """
    answers = [answer for pair in pairs for answer in pair.sequences]
    archive = io.BytesIO()
    np.savez_compressed(
        archive,
        token_ids=np.concatenate([answer.token_ids for answer in answers]),
        trained=np.concatenate([answer.loss_mask for answer in answers]),
        lengths=np.array([len(answer) for answer in answers]),
        origins=np.array([pair.origin for pair in pairs]),
        reference_sums=np.zeros(0, np.float32) if reference_logprobs is None else reference_logprobs,
    )
    return base64.b64encode(archive.getvalue()).decode("ascii")


def decode_pairs(text: str) -> tuple[tuple[Pair, ...], FloatArray | None]:
    """Return the pairs and the reference's log-probabilities of what `encode_pairs` wrote.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        with np.load(io.BytesIO(base64.b64decode(text, validate=True))) as kept:
            ends_P2 = np.cumsum(kept["lengths"]).reshape(-1, 2)  # of each pair's chosen and rejected answer
            lengths_P2 = kept["lengths"].reshape(-1, 2)
            token_ids, loss_mask = kept["token_ids"], kept["trained"]
            origins, logprobs = kept["origins"], kept["reference_sums"]
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, binascii.Error) as error:
        raise CheckpointError(f"the checkpoint's sampled pairs are damaged: {error!r}") from error
    pairs: list[Pair] = []
    for ends_2, lengths_2, origin in zip(ends_P2, lengths_P2, origins, strict=True):
        chosen, rejected = (
            TrainingSample(
                token_ids=token_ids[end - length : end], loss_mask=loss_mask[end - length : end], origin=str(origin)
            )
            for end, length in zip(ends_2, lengths_2, strict=True)
        )
        pairs.append(Pair(chosen=chosen, rejected=rejected))
    return tuple(pairs), logprobs if logprobs.size else None
