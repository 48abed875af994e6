"""A teacher with another tokenizer: stretches of text that both divide alike, and what it says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from algorithm_samples import same_cases
from chat_templates import renderer as renderer_of
from hypothesis import given
from hypothesis import strategies as st
from tests_support import policy_sample, task  # type: ignore[import-not-found]

from roll_like.algorithms.distillation.on_policy import teacher_advantages
from roll_like.algorithms.distillation.spans import character_ends, common_spans
from roll_like.builtin.pipelines.on_policy_distill.teacher_views import OtherTokens
from roll_like.data.chat import Renderer
from roll_like.errors import ConfigError
from roll_like.types import PolicySample

TEXTS = [
    "The answer is 42.",
    "  def f(x):\n\treturn x ** 2  # naïve\n\n",
    "日本語の文章 and 🦜🏳️‍🌈 emoji, then Ünïcödé",
    "12345678901234567890",
    "",
    "a",
    "<think>\nhm\n</think>\n\n\\boxed{7}",
]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([7, 12], [1, 12], ([0, 0], [0, 0])),
        ([1, 2, 3], [2, 3], ([0, 0, 1], [0, 1])),
        # the first and the third of ours end within a character
        ([None, 2, None, 3], [2, 3], ([0, 0, 1, 1], [0, 1])),
        # a token that writes nothing belongs to what ended before it
        ([2, 2, 4], [2, 4], ([0, 0, 1], [0, 1])),
        # what no token of theirs ends together with is a part of the last stretch
        ([1, 3, None], [1, 2], ([0, 0, 0], [0, 0])),
        ([None, None], [None], ([0, 0], [0])),
        ([], [], ([], [])),
    ],
)
def test_stretches_by_hand(ours: list[Any], theirs: list[Any], expected: tuple[list[int], list[int]]) -> None:
    found = common_spans(ours, theirs)
    assert (found[0].tolist(), found[1].tolist()) == expected


@same_cases
@given(st.text(max_size=60))
def test_every_stretch_is_the_same_text_in_both(text: str) -> None:
    one, other = renderer_of("SmolLM2"), renderer_of("Qwen3")
    ids = [renderer.encode(text).tolist() for renderer in (one, other)]
    if any(renderer.decode(own) != text for renderer, own in zip((one, other), ids, strict=True)):
        return  # a text that a tokenizer changes
    ends = [character_ends(own, renderer.decode) for own, renderer in zip(ids, (one, other), strict=True)]
    spans = common_spans(*ends)
    assert all(own == sorted(own) for own in (spans[0].tolist(), spans[1].tolist()))
    count = max((int(own.max()) + 1 for own in spans if len(own)), default=0)
    pieces = [
        [renderer.decode(np.array(own)[span == stretch]) for stretch in range(count)]
        for renderer, own, span in zip((one, other), ids, spans, strict=True)
    ]
    assert pieces[0] == pieces[1]
    assert "".join(pieces[0]) == text


def answered(student: Renderer, text: str, *, ends: bool) -> PolicySample:
    """What a student sampled, each token with −1 nat."""
    ids = student.encode(text).tolist() + ([student.turn_end] if ends else [])
    base = policy_sample(prompt=2, response=len(ids))
    return replace(base, token_ids=np.array([1, 1, *ids], np.int32))


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_a_teacher_is_compared_over_stretches(text: str, ends: bool) -> None:
    student, teacher = renderer_of("SmolLM2"), renderer_of("Qwen3, thinking off")
    view, sample = OtherTokens(student, teacher), answered(student, text, ends=ends)
    found = view.shown(sample, task())
    shown, spans, _ = found
    prompt = teacher.render(task().messages, ())
    end = teacher.decode([teacher.turn_end]) if ends else ""
    assert teacher.decode(shown.token_ids) == prompt + text + end
    assert shown.prompt_length == len(teacher.encode(prompt))
    # the teacher gives the n-th token of the answer −n nats
    response = len(shown.token_ids) - shown.prompt_length
    logprobs = np.concatenate([np.zeros(shown.prompt_length), -np.arange(1, response + 1)]).astype(np.float32)
    told = view.told(sample, found, logprobs)
    assert told.sum() == pytest.approx(-response * (response + 1) / 2)
    assert not told[:2].any()
    advantages = teacher_advantages([sample], [told], spans=[spans])[0][2:]
    for stretch in range(int(spans.max()) + 1):
        ours = -int((spans == stretch).sum())
        theirs = told[2:][spans == stretch].sum()
        assert advantages[spans == stretch] == pytest.approx(theirs - ours, abs=1e-4)
    if ends:  # the end is a stretch of one token on both sides
        assert (spans == spans[-1]).sum() == 1
        assert told[-1] == -response


def test_a_teacher_with_the_same_tokens_is_compared_token_by_token() -> None:
    student = renderer_of("SmolLM2")
    view, sample = OtherTokens(student, student), answered(student, TEXTS[2], ends=True)
    found = view.shown(sample, task())
    shown, spans, _ = found
    assert shown.token_ids[shown.prompt_length :].tolist() == sample.token_ids[2:].tolist()
    logprobs = np.random.default_rng(0).normal(-2, 1, len(shown.token_ids)).astype(np.float32)
    told = view.told(sample, found, logprobs)
    # several tokens of one character are one stretch
    assert teacher_advantages([sample], [told], spans=[spans])[0].sum() < 0
    assert told.sum() == pytest.approx(logprobs[shown.prompt_length :].sum(), abs=1e-3)
    single = [stretch for stretch in range(int(spans.max()) + 1) if (spans == stretch).sum() == 1]
    at = np.flatnonzero(np.isin(spans, single))
    assert told[2:][at] == pytest.approx(logprobs[shown.prompt_length :][at], abs=1e-5)


def test_stretches_by_hand_with_a_discount() -> None:
    sample = policy_sample(prompt=2, response=3)
    told = np.array([0, 0, 0, -5, -3], np.float32)
    # log-ratios: −2 + 5 = 3 of the first stretch, −1 + 3 = 2 of the second
    plain = teacher_advantages([sample], [told], spans=[np.array([0, 0, 1], np.int32)])[0]
    assert plain.tolist() == [0, 0, -3, -3, -2]
    half = teacher_advantages([sample], [told], spans=[np.array([0, 0, 1], np.int32)], discount=0.5)[0]
    assert half.tolist() == [0, 0, -4, -4, -2]


def test_a_teacher_whose_answers_have_no_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"teachers\.large\.path: its chat template writes no token after an answer"):
        OtherTokens(renderer_of("SmolLM2"), renderer_of("no special token"), name="large")
