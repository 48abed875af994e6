"""Single answers in preference runs: from labels to what a step trains on, and what its baseline is made of.

The baseline of `kto` estimates how far the policy is from its reference by answers that stand after prompts that they
do not answer. Within each step, answers are moved on: the prompt of each is followed by the answer before it, as in the
paper (arXiv:2402.01306, section 4.1) and in TRL. Where several answers have one prompt, they move by as many places as
the largest such group has, so that all of them end elsewhere:

    prompts a b c       answers 1 2 3      after them 3 1 2
    prompts a a b b     answers 1 2 3 4    after them 3 4 1 2
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from roll_like.builtin.pipelines.dpo.labelled_data import Preference, labelled_samples
from roll_like.builtin.pipelines.dpo.labelled_objective import LabelledStep
from roll_like.data.images import shift_images
from roll_like.errors import DataError
from roll_like.types import IntArray, Pair, PlacedImage, TrainingSample


def labelled_step(preferences: Sequence[Preference], *, max_tokens: int, baseline: bool) -> LabelledStep:
    """Return what a step trains on, and for a loss with a baseline as many mismatched answers.

    Args:
        preferences: Labelled answers of one step, or pairs of a desirable and an undesirable one.
        max_tokens: Longest sequence. An answer after a longer prompt than its own is cut there.
        baseline: Whether the loss has one.

    Raises:
        DataError: All answers have one prompt, so that none can be mismatched.
    """
    answers = [
        replace(each, group_id=_prompt_id(each), prompt_length=each.first_trained)
        for each in labelled_samples(preferences)
    ]
    pair_places = _pair_places(preferences)
    if not baseline:
        return LabelledStep(answers=answers, pair_places=pair_places)
    mismatched = [_after(answers[prompt], answers[answer], max_tokens) for prompt, answer in _moved_on(answers)]
    if not mismatched:
        raise DataError(
            f"all {len(answers)} answers of a step have one prompt, first {answers[0].origin}; the baseline of the "
            "loss needs answers to other prompts beside them",
            fix="raise data.samples_per_step (or pairs_per_step), or set data.shuffle: true",
        )
    return LabelledStep(answers=answers, pair_places=pair_places, mismatched=mismatched)


def _pair_places(preferences: Sequence[Preference]) -> IntArray:
    """Return the places that each pair's two answers have among all answers, shape [pairs, 2]."""
    first = np.cumsum([0, *(len(each.sequences) for each in preferences)])
    paired = [at for at, each in zip(first, preferences, strict=False) if isinstance(each, Pair)]
    return np.array([(at, at + 1) for at in paired], np.int32).reshape(-1, 2)


def _moved_on(samples: Sequence[TrainingSample]) -> Iterator[tuple[int, int]]:
    """Yield whose prompt is followed by whose answer; each answer at most once, and never after its own prompt."""
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    ordered = [index for members in groups.values() for index in members]
    group_of = {index: group for group, members in groups.items() for index in members}
    places = max(map(len, groups.values()))
    for at, answer in enumerate(ordered):
        prompt = ordered[(at + places) % len(ordered)]
        # a group of more than half of the answers cannot go elsewhere as a whole
        if group_of[prompt] != group_of[answer]:
            yield prompt, answer


def _after(prompt: TrainingSample, answer: TrainingSample, max_tokens: int) -> TrainingSample:
    """Return a prompt with another's answer; there is room for a token at least, because the prompt's own has it."""
    begin, end = prompt.token_ids[: prompt.prompt_length], max_tokens - prompt.prompt_length
    loss_mask = answer.loss_mask[answer.prompt_length :][:end]
    last = int(np.flatnonzero(loss_mask)[-1]) + 1
    later = _within(answer, answer.prompt_length, answer.prompt_length + last)
    return TrainingSample(
        group_id=prompt.group_id,
        token_ids=np.concatenate([begin, answer.token_ids[answer.prompt_length :][:last]]),
        prompt_length=len(begin),
        loss_mask=np.concatenate([np.zeros(len(begin), np.bool_), loss_mask[:last]]),
        images=(*_within(prompt, 0, len(begin)), *shift_images(later, len(begin) - answer.prompt_length)),
    )


def _within(sample: TrainingSample, begin: int, end: int) -> list[PlacedImage]:
    return [image for image in sample.images if begin <= image.start < end]


def _prompt_id(sample: TrainingSample) -> str:
    """Return what samples share that have one prompt."""
    digest = hashlib.blake2b(sample.token_ids[: sample.first_trained].tobytes(), digest_size=16)
    for image in _within(sample, 0, sample.first_trained):
        digest.update(image.picture.digest)
    return digest.hexdigest()
