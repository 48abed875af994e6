from __future__ import annotations

import pytest
from my_rewards import uses_words

from roll_like import Completion, Message, StopReason

PROMPT = 'Write one short sentence with the words "dog" and "river".'


def score(text: str, stop_reason: StopReason = StopReason.STOP) -> float:
    completion = Completion(
        text=text,
        messages=(Message(role="user", content=PROMPT),),
        answer=None,
        metadata={"words": ["dog", "river"]},
        stop_reason=stop_reason,
        response_tokens=len(text.split()),
    )
    return float(uses_words(completion))


def test_a_right_answer() -> None:
    assert score("The dog swims across the cold river.") == 1.0


def test_one_of_two_words() -> None:
    assert score("The dog sleeps on the warm sofa.") == 0.5


@pytest.mark.parametrize(
    "text",
    [
        "The cat sleeps on the warm sofa.",  # none of the words
        "A dog. A river.",  # too short to be a sentence
        "dog river dog river dog river",  # the words, again and again
        PROMPT,
        "",
        " \n",
    ],
)
def test_wrong_and_empty_answers(text: str) -> None:
    assert score(text) == 0.0


def test_an_answer_that_was_cut_off() -> None:
    assert score("The dog swims across the cold river.", StopReason.LENGTH) == 0.0
