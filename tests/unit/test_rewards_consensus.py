"""Votes of a group in the place of a reference answer: who wins, ties, what cannot be read, what is reported."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from reward_support import completion, outcomes, row

from roll_like import Completion, Outcome, Reward, RewardResult, register_reward
from roll_like.builtin.rewards.consensus import Consensus, ConsensusConfig
from roll_like.builtin.rewards.math import Math, MathConfig
from roll_like.errors import ConfigError, DataError, RewardError
from roll_like.registry import REWARDS

WORDS = {"type": "exact_match"}


@pytest.fixture(autouse=True)
def own_rewards() -> Iterator[None]:
    REWARDS.names()
    before = dict(REWARDS._plugins)
    register_reward("first_word")(FirstWord)
    register_reward("async_words")(AsyncWords)
    yield
    REWARDS._plugins.clear()
    REWARDS._plugins.update(before)


class FirstWord(Reward):
    """Answers are first words; "broken" cannot be read, and a reference answer "none" not be compared."""

    def start(self) -> None:
        self.started = True

    def answers(self, completions: Sequence[Completion]) -> Sequence[str | RewardError]:
        assert self.started
        words = [item.text.split()[0] if item.text else "" for item in completions]
        return [RewardError("gone") if word == "broken" else word for word in words]

    def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        if completions[0].answer == "none":
            return [RewardError("no comparison")] * len(completions)
        return [float(item.text.split()[0] == item.answer) for item in completions]


class AsyncWords(FirstWord):
    async def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:  # type: ignore[override]
        return super().score(completions)


def vote(texts: Sequence[str], answer: str | None = None, **settings: Any) -> list[RewardResult]:
    reward = Consensus(ConsensusConfig.model_validate({"compare": WORDS, **settings}))
    try:
        found = outcomes(reward, [completion(text, answer) for text in texts])
    finally:
        reward.close()
    return [one if isinstance(one, RewardResult) else pytest.fail(str(one)) for one in found]


def values(texts: Sequence[str], **settings: Any) -> list[float]:
    return [result.value for result in vote(texts, **settings)]


def test_is_registered_by_its_entry_point() -> None:
    assert REWARDS.get("consensus") is Consensus


def test_the_most_frequent_answer_is_right() -> None:
    results = vote(["7", "8", "Seven", "7", "7.0", ""])
    assert [result.value for result in results] == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert [result.answer for result in results] == ["7", "8", "seven", "7", "7", ""]
    assert results[0].details == {"parsed": 1.0, "share": 0.5, "tie": 0.0, "accepted": 1.0}
    assert results[5].details["parsed"] == 0.0


def test_equal_answers_in_other_forms_are_one() -> None:
    texts = [r"\boxed{2(x+1)}", r"\boxed{2x+2}", r"so \boxed{2 + 2x}", r"\boxed{3x}", r"\boxed{3x}", r"\boxed{"]
    assert values(texts, compare={"type": "math"}) == [1, 1, 1, 0, 0, 0]
    texts = [r"\boxed{1/3}", r"\boxed{0.333333}", r"\boxed{0.33}", r"\boxed{0.33}", r"\boxed{\frac{2}{6}}"]
    assert values(texts, compare={"type": "math"}) == [1, 1, 0, 0, 1]
    texts = [r"\boxed{\frac12}", r"\boxed{0.5}", r"\boxed{5}"]
    assert values(texts, compare={"type": "math", "compare": "math_verify"}) == [1, 1, 0]
    choices = {"type": "multiple_choice"}
    assert values(["(A)", "The answer is B.", "**B**", "A or B"], compare=choices) == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "boxes",
    [
        ("HTH", "HHT"),
        ("east", "seat"),
        ("stop", "post", "spot"),
        (r"\text{BAC}", "ABC"),
        ("3 cm", "3 m"),
        ("i", "I"),
        ("A", "a"),
        ("e", "E"),
        ("xy", "2xy"),
    ],
)
def test_different_answers_do_not_vote_together(boxes: tuple[str, ...]) -> None:
    reward = Math(MathConfig())
    found = reward.answers([completion(f"\\boxed{{{box}}}") for box in boxes])
    reward.close()
    assert len(set(found)) == len(boxes)
    assert all(isinstance(one, str) and one for one in found)


@pytest.mark.parametrize(
    ("boxes", "together"),
    [
        (("50", "50\\%", "0.5"), ({"0.5", "50\\%"},)),
        (("0.5", "0.5", "50\\%", "50"), ({"0.5", "50\\%"},)),
        (("3", "3 cm", "3 m"), ({"3", "3 m"},)),
        (("3", "3 m", "3 m", "3 cm"), ({"3", "3 m"},)),
        (("1/3", "0.333333", "2/6", "HHT", "HHT", "xy", "yx"), ({"1/3", "0.333333", "2/6"},)),
    ],
)
def test_answers_vote_together_in_any_order(boxes: tuple[str, ...], together: tuple[set[str], ...]) -> None:
    """An answer that is the same as two others which are not the same joins one of them, whatever the order."""
    reward = Math(MathConfig())
    for seed in range(4):
        order = random.Random(seed).sample(boxes, len(boxes))
        found = reward.answers([completion(f"\\boxed{{{box}}}") for box in order])
        classes: dict[Any, set[str]] = {}
        for box, one in zip(order, found, strict=True):
            classes.setdefault(one, set()).add(box)
        expected = [*together, *({box} for box in set(boxes).difference(*together))]
        assert sorted(map(sorted, classes.values())) == sorted(map(sorted, expected))
    reward.close()


def test_words_are_answers_of_mathematics_in_boxes_alone() -> None:
    """Without a reference answer nothing says that a sentence is one."""
    reward = Math(MathConfig())
    texts = ["I do not know.", "Nobody knows.", r"\boxed{\text{yes}}", "The answer is 4.", r"\boxed{}", "no solution"]
    assert reward.answers([completion(text) for text in texts]) == ["", "", "yes", "4", "", "no solution"]
    reward.close()


def test_a_comparison_that_takes_too_long_loses_its_sample_alone() -> None:
    reward = Consensus(ConsensusConfig.model_validate({"compare": {"type": "math", "timeout_seconds": 1.0}}))
    endless = r"\boxed{9^{9^{9^9}}}"
    found = outcomes(reward, [completion(text) for text in (r"\boxed{4}", endless, r"\boxed{4}", r"\boxed{5}")])
    reward.close()
    assert isinstance(found[1], RewardError)
    assert "raise `timeout_seconds`" in str(found[1])
    kept = [one.value for one in found if isinstance(one, RewardResult)]
    assert kept == [1.0, 0.0] if isinstance(found[2], RewardError) else [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("ties", "expected"), [("none", [0, 0, 0, 0, 0]), ("all", [1, 1, 0, 1, 1]), ("first", [1, 0, 0, 1, 0])]
)
def test_ties(ties: str, expected: list[float]) -> None:
    results = vote(["b", "c", "d", "b", "c"], ties=ties)
    assert [result.value for result in results] == expected
    assert {result.details["tie"] for result in results} == {1.0}


def test_a_share_below_the_minimum_pays_nobody() -> None:
    texts = ["7", "7", "8", ""]  # the share is over all samples, not over those that have an answer
    assert values(texts, min_share=0.5) == [1, 1, 0, 0]
    results = vote(texts, min_share=0.51)
    assert [(result.value, result.details["accepted"], result.details["share"]) for result in results] == [
        (0.0, 0.0, 0.5)
    ] * 4


def test_shares_as_rewards() -> None:
    assert values(["7", "7", "8", "", "7"], reward="share") == [0.75, 0.75, 0.25, 0.0, 0.75]
    assert values(["7", "8"], reward="share") == [0.5, 0.5]


def test_where_nobody_answers_nobody_is_right() -> None:
    (result, _) = vote(["", " "], "7")
    assert result == RewardResult(
        0.0,
        {"parsed": 0.0, "share": 0.0, "tie": 0.0, "accepted": 0.0, "label_accuracy": 0.0, "reward_accuracy": 1.0},
        "",
    )


def test_what_cannot_be_read_is_lost_and_does_not_vote() -> None:
    reward = Consensus(ConsensusConfig.model_validate({"compare": "first_word"}))
    found = outcomes(reward, [completion(text) for text in ("a", "broken", "b", "b")])
    assert isinstance(found[1], RewardError)
    kept = [one for one in found if isinstance(one, RewardResult)]
    assert [one.value for one in kept] == [0.0, 1.0, 1.0]
    assert kept[0].details["share"] == pytest.approx(2 / 3)


def test_a_label_that_cannot_be_compared_leaves_its_figures_out() -> None:
    (result,) = vote(["a"], "none", compare="first_word")
    assert result.value == 1.0
    assert set(result.details) == {"parsed", "share", "tie", "accepted"}
    (result,) = vote(["a"], "b", compare="first_word")
    assert result.details["label_accuracy"] == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_figures_of_labels_are_those_of_plain_loops(seed: int) -> None:
    """Label accuracy and reward accuracy as the paper defines them; a tie counts by its right answers."""
    draw = random.Random(seed)
    texts = [draw.choice(["1", "2", "3", ""]) for _ in range(draw.randint(1, 9))]
    results = vote(texts, "2", ties="all")
    counts = {text: sum(other == text for other in texts) for text in texts if text}
    winners = [text for text in counts if counts[text] == max(counts.values())]
    rewards = [float(text in winners) for text in texts]
    assert [result.value for result in results] == rewards
    label = sum(winner == "2" for winner in winners) / max(len(winners), 1)
    for text, reward, result in zip(texts, rewards, results, strict=True):
        assert result.details["label_accuracy"] == pytest.approx(label)
        assert result.details["reward_accuracy"] == float(reward == float(text == "2"))
        assert result.details["share"] == max(counts.values(), default=0) / len(texts)


def test_rows_need_no_answer_and_a_bad_one_is_found() -> None:
    reward = Consensus(ConsensusConfig())
    reward.check_row(row(None))
    reward.check_row(row("4"))
    with pytest.raises(DataError, match=r"data\.jsonl:7"):
        reward.check_row(row("\\frac{"))
    reward.close()


@pytest.mark.parametrize("settings", [{}, {"reward": "share"}, {"compare": {"type": "multiple_choice"}}])
def test_settings_can_be_written_out(settings: dict[str, Any]) -> None:
    config = ConsensusConfig.model_validate(settings)
    assert ConsensusConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compare": "length"}, "the reward 'length' finds no answers"),
        ({"compare": "async_words"}, "is async"),
        ({"compare": {"type": "math", "weight": 2.0}}, "weight has no effect there"),
        ({"compare": {"type": "math", "name": "other"}}, "name has no effect there"),
        ({"reward": "share", "ties": "all"}, "ties has no effect with reward: share"),
        ({"min_share": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConsensusConfig(**settings)
