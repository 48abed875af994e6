"""Single answers: what a step trains on, and which answers stand after which prompts for the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_like.builtin.pipelines.dpo.labelled_data import LabelledSample, Preference
from roll_like.builtin.pipelines.dpo.labelled_objective import labelled_step
from roll_like.errors import DataError
from roll_like.types import Pair, Picture, PlacedImage, TrainingSample

PROMPT = 5


def sequence(prompt: int, answer: list[int]) -> TrainingSample:
    """A prompt of so many tokens, all of that number, and an answer."""
    tokens = np.array([*[PROMPT + prompt] * (prompt + 1), *answer], np.int32)
    return TrainingSample(
        token_ids=tokens, loss_mask=np.arange(len(tokens)) > prompt, origin=f"rows.jsonl:{prompt + 1}"
    )


def verdict(prompt: int, answer: list[int], label: bool = True) -> LabelledSample:
    return LabelledSample(**sequence(prompt, answer).shared_fields, desirable=label)


def mismatched(labelled: Sequence[Preference], max_tokens: int = 99) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each mismatched sample."""
    made = labelled_step(labelled, max_tokens=max_tokens, baseline=True)
    assert made.trained == made.answers
    found = []
    for sample in made.sequences[len(made.answers) :]:
        tokens, prompt = sample.token_ids.tolist(), sample.prompt_length
        assert sample.loss_mask.tolist() == [False] * prompt + [True] * (len(tokens) - prompt)
        found.append((tokens[:prompt], tokens[prompt:]))
    return found


def test_answers_keep_their_tokens_and_verdicts() -> None:
    labelled = [verdict(0, [60, 61]), verdict(1, [62], label=False)]
    step = labelled_step(labelled, max_tokens=99, baseline=False)
    first, second = step.answers
    assert not step.mismatched
    assert step.pair_places.shape == (0, 2)
    assert (first.token_ids.tolist(), first.prompt_length, first.desirable) == ([5, 60, 61], 1, True)
    assert (second.token_ids.tolist(), second.prompt_length, second.desirable) == ([6, 6, 62], 2, False)
    assert first.group_id != second.group_id
    both = labelled_step(labelled, max_tokens=99, baseline=True)
    assert [id(each) for each in both.trained] == [id(each) for each in both.sequences[:2]]


def test_answers_keep_their_images() -> None:
    image = PlacedImage(picture=Picture(data=b"", label="a.png"), start=0, length=1)
    labelled = [replace(verdict(at, [60 + at]), images=(image,)) for at in range(2)]
    step = labelled_step(labelled, max_tokens=99, baseline=True)
    assert [each.images for each in step.sequences] == [(image,)] * 4


def test_each_prompt_is_followed_by_the_answer_before_it() -> None:
    found = mismatched([verdict(0, [60]), verdict(1, [61, 62]), verdict(2, [63])])
    assert sorted(found) == [([5], [63]), ([6, 6], [60]), ([7, 7, 7], [61, 62])]


def test_both_answers_of_a_pair_go_to_another_prompt() -> None:
    pairs = [Pair(chosen=sequence(at, [60 + at]), rejected=sequence(at, [70 + at])) for at in range(3)]
    found = mismatched(pairs)
    assert sorted(answer for _, answer in found) == [[60], [61], [62], [70], [71], [72]]
    assert sorted(found) == sorted(
        [([5], [62]), ([5], [72]), *(([6] * 2, [60 + k]) for k in (0, 10)), *(([7] * 3, [61 + k]) for k in (0, 10))]
    )
    step = labelled_step(pairs, max_tokens=99, baseline=False)
    assert step.answers[0].group_id == step.answers[1].group_id  # computed with one prompt
    assert step.pair_places.tolist() == [[0, 1], [2, 3], [4, 5]]


@given(st.lists(st.integers(0, 4), min_size=2, max_size=20))
def test_no_answer_stays_with_its_prompt_and_as_few_as_can_be_are_left_out(prompts: list[int]) -> None:
    labelled = [verdict(prompt, [100 + at]) for at, prompt in enumerate(prompts)]
    most = max(prompts.count(prompt) for prompt in prompts)
    if most == len(prompts):
        with pytest.raises(DataError, match=rf"all {len(prompts)} answers of a step have one prompt, first rows.jsonl"):
            mismatched(labelled)
        return
    found = mismatched(labelled)
    answers = [answer - 100 for _, (answer,) in found]
    assert len(set(answers)) == len(answers) == min(len(prompts), 2 * (len(prompts) - most))
    for prompt, (answer,) in found:
        assert prompt != [PROMPT + prompts[answer - 100]] * (prompts[answer - 100] + 1)
    if most == 1:
        assert sorted(found) == sorted(
            ([PROMPT + prompt] * (prompt + 1), [100 + (at - 1) % len(prompts)]) for at, prompt in enumerate(prompts)
        )


def test_what_is_too_long_after_a_longer_prompt_is_cut() -> None:
    found = mismatched([verdict(0, [60, 61, 62]), verdict(2, [63])], max_tokens=4)
    assert sorted(found) == [([5], [63]), ([7, 7, 7], [60])]


def test_untrained_tokens_of_an_answer_are_scored_as_context_only() -> None:
    tokens = np.array([5, 60, 61, 62, 63], np.int32)  # a call, what a tool said, the answer
    mask = np.array([False, True, False, False, True])
    labelled = [LabelledSample(token_ids=tokens, loss_mask=mask, desirable=True), verdict(1, [70])]
    made = labelled_step(labelled, max_tokens=99, baseline=True)
    (moved,) = [each for each in made.mismatched if 60 in each.token_ids]
    assert moved.token_ids.tolist() == [6, 6, 60, 61, 62, 63]
    assert moved.loss_mask.tolist() == [False, False, True, False, False, True]
    made = labelled_step(labelled, max_tokens=4, baseline=True)
    (moved,) = [each for each in made.mismatched if 60 in each.token_ids]
    assert moved.token_ids.tolist() == [6, 6, 60]  # nothing after it would be trained
