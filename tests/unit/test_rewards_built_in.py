"""Built-in rewards that score a text by itself or by its row: gold 1, wrong 0, empty 0, hostile no more."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from reward_support import completion, outcomes, row, value

from roll_like import RewardResult
from roll_like.builtin.rewards.exact_match import F1, ExactMatch, ExactMatchConfig, F1Config, _Compared, normalise
from roll_like.builtin.rewards.format import Format, FormatConfig
from roll_like.builtin.rewards.length import Length, LengthConfig
from roll_like.builtin.rewards.multiple_choice import MultipleChoice, MultipleChoiceConfig, choice
from roll_like.builtin.rewards.repetition import Repetition, RepetitionConfig, repeated_share
from roll_like.data.boxed import last_boxed
from roll_like.errors import ConfigError, DataError, RewardError
from roll_like.registry import REWARDS

TAGS = {"tags": ("think", "answer")}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        ("multiple_choice", MultipleChoice),
        ("exact_match", ExactMatch),
        ("f1", F1),
        ("format", Format),
        ("length", Length),
        ("repetition", Repetition),
    ],
)
def test_each_is_registered_by_its_entry_point(name: str, reward: type) -> None:
    assert REWARDS.get(name) is reward


def test_a_comparison_without_its_measure_cannot_be_made() -> None:
    class Unfinished(_Compared):
        pass

    with pytest.raises(TypeError, match=r"abstract method '?compare"):
        Unfinished(ExactMatchConfig())


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{1} then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {x}", "x"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\fbox{7}", "7"),
        (r"\framebox{7}", "7"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{so \boxed{7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxedx{7}", None),
        (r"\boxed 5", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, held: str | None) -> None:
    assert last_boxed(text) == held


# ---- multiple_choice -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"So \boxed{B}.", "B"),
        (r"So \boxed{\text{B}}.", "B"),
        (r"\boxed{(b)}", "B"),
        (r"\boxed{A} — no: \boxed{B}", "B"),
        ("The answer is (B).", "B"),
        ("the answer is (b)", "B"),
        ("The correct answer is: B", "B"),
        ("**Answer:** B", "B"),
        ("Answer: **(B)** Paris", "B"),
        ("The answer is option B because it is in France.", "B"),
        ("The best choice is B, which is in France.", "B"),
        ("The answer is $B$.", "B"),
        ("The answer is A. No, wait: the answer is B.", "B"),
        ("The answer is A because it rains.", "A"),
        ("The answer is A.", "A"),
        ("B", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("b)", "B"),
        # nothing is chosen
        ("A dog barks. Because it can.", None),
        ("Both Berlin and Bonn were capitals.", None),
        ("The answer is A good example of irony.", None),
        ("The answer is not B.", None),
        ("The answer is A or B.", None),
        ("The answer is (A) and (B).", None),
        ("The answer is A/B", None),
        ("The answer is Berlin.", None),
        ("The answer is K.", None),
        ("I think B is right", None),
        (r"\boxed{A, B}", None),
        (r"\boxed{}", None),
        ("A B C D", None),
        ("ABCD", None),
        ("", None),
        ("the answer is a matter of taste", None),
        ("The answer isn't B", None),
    ],
)
def test_the_letter_that_a_response_settles_on(text: str, letter: str | None) -> None:
    assert choice(text, "ABCDEFGHIJ") == letter


def test_options_may_be_named_by_their_text() -> None:
    options = ["Rome", "Paris", "New York"]
    for text in ("Paris", "paris.", "The answer is Paris.", r"\boxed{Paris}", "B) Paris", "The answer is B) Paris"):
        assert choice(text, "ABCDEFGHIJ", options) == "B", text
    for text in ("Paris or Rome", "Paris is where I was born, in Rome.", "B) Rome", "D", "The answer is (D)."):
        assert choice(text, "ABCDEFGHIJ", options) is None, text


def test_boxed_alone_counts_where_it_is_asked_for() -> None:
    assert choice("The answer is B.", "AB", boxed=True) is None
    assert choice(r"The answer is A. \boxed{B}", "AB", boxed=True) == "B"


@pytest.mark.parametrize("answer", ["B", "(B)", "b", "Paris", "1"])
def test_the_reference_answer_is_a_letter_a_text_or_a_number(answer: str) -> None:
    reward = MultipleChoice(MultipleChoiceConfig(options_field="options"))
    options = ["Rome", "Paris"]
    reward.check_row(row(answer, options=options))
    assert value(reward, "The answer is (B).", answer, options=options) == 1.0
    assert value(reward, "The answer is (A).", answer, options=options) == 0.0


@pytest.mark.parametrize(
    ("answer", "options"), [("C", ["a", "b"]), ("London", ["a", "b"]), ("2", ["a", "b"]), ("A", "a"), ("A", None)]
)
def test_a_reference_answer_that_is_no_option_is_refused(answer: str, options: Any) -> None:
    reward = MultipleChoice(MultipleChoiceConfig(options_field="options"))
    with pytest.raises(DataError, match=r"data\.jsonl:7: the (answer|field)"):
        reward.check_row(row(answer, options=options))
    with pytest.raises(RewardError):
        value(reward, "A", answer, options=options)


# ---- exact_match and f1 --------------------------------------------------------------------------


def test_normalising() -> None:
    assert normalise("The  U.S.A., and a “dog”!") == ["usa", "and", "dog"]
    assert normalise("the a an ... !") == []
    assert normalise("theatre") == ["theatre"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Paris", 1.0), ("the PARIS.", 1.0), ("Paris, France", 1.0), ("France Paris", 0.0), ("", 0.0), ("the", 0.0)],
)
def test_exact_match(text: str, expected: float) -> None:
    reward = ExactMatch(ExactMatchConfig(answers_field="answers"))
    assert value(reward, text, answers=["Paris", "Paris France"]) == expected


@pytest.mark.parametrize(
    ("normalize", "text", "gold", "expected"),
    [
        ("words", "31.4", "3.14", 0.0),
        ("words", "42", "42.0", 1.0),
        ("words", "$18", "18", 1.0),
        ("words", "18", "$18", 0.0),
        ("words", "50%", "50", 1.0),
        ("words", "Python 3.10", "Python 3.1", 1.0),
        ("words", "A", "a", 1.0),
        ("squad", "31.4", "3.14", 1.0),
        ("squad", "42", "42.0", 0.0),
        ("squad", "$ 18", "18", 0.0),
        ("squad", "the C.", "C#", 1.0),
        ("none", "Python 3.10", "Python 3.1", 0.0),
        ("none", " Python\n3.10", "Python  3.10 ", 1.0),
        ("none", "paris", "Paris", 0.0),
    ],
)
def test_what_does_not_count(normalize: Any, text: str, gold: str, expected: float) -> None:
    assert value(ExactMatch(ExactMatchConfig(normalize=normalize)), text, gold) == expected


def test_what_is_shared_counts_numbers_by_value() -> None:
    assert value(F1(F1Config()), "1,234.0 km", "1234 miles") == 0.5
    assert value(F1(F1Config()), "-5", "5") == 0.0
    assert value(F1(F1Config()), "北京市", "北京") == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Barack Obama", 1.0),
        ("Obama", 2 / 3),
        ("President Barack Obama", 0.8),
        ("Obama Obama", 0.5),
        ("Trump", 0.0),
        ("", 0.0),
        ("the a", 0.0),
        ("Barack Obama " + "word " * 198, 2 * 2 / 202),
    ],
)
def test_f1(text: str, expected: float) -> None:
    assert value(F1(F1Config()), text, "Barack Obama") == pytest.approx(expected)


def test_what_is_taken_out_of_a_response() -> None:
    last_line = ExactMatch(ExactMatchConfig(take="last_line"))
    assert value(last_line, "Let me see.\nParis\n\n", "Paris") == 1.0
    assert value(last_line, "Paris\nor not", "Paris") == 0.0
    boxed = ExactMatch(ExactMatchConfig(take="boxed"))
    assert value(boxed, "It is \\boxed{Paris}.", "Paris") == 1.0
    assert value(boxed, "Paris", "Paris") == 0.0
    tagged = ExactMatch(ExactMatchConfig(pattern="<answer>(.*?)</answer>"))
    assert value(tagged, "<answer>Rome</answer> no\n<answer>\nParis</answer>", "Paris") == 1.0
    assert value(tagged, "Paris", "Paris") == 0.0


@pytest.mark.parametrize("gold", [None, "", "the", [], ["Paris", ""], [1], 5])
def test_reference_answers_of_which_nothing_is_left_are_refused(gold: Any) -> None:
    reward = ExactMatch(ExactMatchConfig(answers_field="answers"))
    with pytest.raises(DataError, match=r"data\.jsonl:7"):
        reward.check_row(row(answers=gold))
    (outcome,) = outcomes(reward, [completion("", answers=gold)])
    assert isinstance(outcome, RewardError)


def test_a_pattern_that_never_ends_loses_its_sample_alone() -> None:
    reward = ExactMatch(ExactMatchConfig(pattern=r"(?:a|aa)+$"))
    start = time.monotonic()
    good, slow = outcomes(reward, [completion("aaa", "aaa"), completion("a" * 60 + "b", "x")])
    assert time.monotonic() - start < 60  # left alone it would take years
    assert good == RewardResult(1.0, {"parsed": 1.0}, "aaa")
    assert isinstance(slow, RewardError)
    assert "(?:a|aa)+$" in str(slow)


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        ExactMatchConfig(pattern="(")


# ---- format --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>So.</think><answer>42</answer>", 1.0),
        ("\n<think>So\nand so.</think>\n\n<answer>42</answer>\n", 1.0),
        ("<answer>42</answer><think>So.</think>", 0.0),
        ("<think>So.</think>", 0.0),
        ("<think></think><answer>42</answer>", 0.0),
        ("<think> ... </think><answer>42</answer>", 0.0),
        ("<think>a</think><think>b</think><answer>42</answer>", 0.0),
        ("<think>a<answer>b</think>42</answer>", 0.0),
        ("</think>a<think><answer>42</answer>", 0.0),
        ("Sure! <think>So.</think><answer>42</answer>", 0.0),
        ("<think>So.</think><answer>42</answer> Right?", 0.0),
        ("<think>So.</think> hm <answer>42</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags(text: str, expected: float) -> None:
    assert value(Format(FormatConfig(**TAGS)), text) == expected


def test_text_outside_of_tags_where_it_is_allowed() -> None:
    reward = Format(FormatConfig(**TAGS, outside=True))
    assert value(reward, "Sure! <think>So.</think> hm <answer>42</answer> Right?") == 1.0
    assert value(reward, "<answer>42</answer> <think>So.</think>") == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "Ada"}', 1.0),
        ('```json\n{"name": "Ada", "age": 3}\n```', 1.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"age": 3}', 0.0),
        ('{"name": "Ada", "more": 1}', 0.0),
        ('{"name": "Ada", "name": "Bob"}', 0.0),
        ('Here: {"name": "Ada"}', 0.0),
        ('{"name": "Ada"} {"name": "Ada"}', 0.0),
        ('{"name": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_schema(text: str, expected: float) -> None:
    assert value(Format(FormatConfig(json_schema=SCHEMA)), text) == expected


def test_a_fence_may_be_refused_and_the_row_may_hold_the_schema() -> None:
    assert value(Format(FormatConfig(json_schema=SCHEMA, fence=False)), '```json\n{"name": "Ada"}\n```') == 0.0
    reward = Format(FormatConfig(schema_field="schema"))
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        reward.check_row(row(schema=schema))
        assert value(reward, '{"name": "Ada"}', schema=schema) == 1.0
        assert value(reward, "{}", schema=schema) == 0.0
    for schema in (None, "no JSON", {"type": "nothing"}):
        with pytest.raises(DataError, match=r"data\.jsonl:7"):
            reward.check_row(row(schema=schema))
        (outcome,) = outcomes(reward, [completion("{}", schema=schema)])
        assert isinstance(outcome, RewardError)


def test_a_pattern_covers_the_whole_response() -> None:
    reward = Format(FormatConfig(pattern=r"Thought: .+\nAnswer: \d+"))
    assert value(reward, "Thought: one\nand two\nAnswer: 42\n") == 1.0
    assert value(reward, "Well.\nThought: one\nAnswer: 42") == 0.0
    assert value(reward, "Thought: one\nAnswer: 42 or so") == 0.0


def test_several_checks_all_or_in_part() -> None:
    settings = {**TAGS, "pattern": ".*42.*"}
    both, one = "<think>a</think><answer>42</answer>", "<think>a</think><answer>41</answer>"
    assert [value(Format(FormatConfig(**settings)), text) for text in (both, one)] == [1.0, 0.0]
    partial = Format(FormatConfig(**settings, partial=True))
    assert [value(partial, text) for text in (both, one, "")] == [1.0, 0.5, 0.0]
    (result,) = outcomes(partial, [completion(one)])
    assert isinstance(result, RewardResult)
    assert result.details == {"tags": 1.0, "pattern": 0.0}


def test_a_pattern_that_an_empty_response_matches_pays_it_nothing() -> None:
    assert value(Format(FormatConfig(pattern=".*")), "") == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no check is set"),
        ({"tags": ["a", "a"]}, "named twice"),
        ({"tags": ["a b"]}, "tags"),
        ({"json_schema": {"type": "nothing"}}, "not a JSON Schema"),
        ({"json_schema": {}, "schema_field": "s"}, "keep one"),
        ({"pattern": "("}, "not a valid regular expression"),
    ],
)
def test_settings_of_format_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FormatConfig(**settings)


# ---- length and repetition -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, -0.5), (1, 0.0), (60, 0.0), (80, -0.25), (99, -0.4875), (100, -0.5), (5000, -0.5)]
)
def test_length(tokens: int, expected: float) -> None:
    reward = Length(LengthConfig(max_tokens=100, buffer_tokens=40, penalty=0.5))
    assert value(reward, "word " * tokens) == pytest.approx(expected)


def test_length_without_a_buffer_is_a_step() -> None:
    reward = Length(LengthConfig(max_tokens=10, buffer_tokens=0))
    assert [value(reward, "word " * tokens) for tokens in (10, 11)] == [0.0, -1.0]


def test_a_length_that_nothing_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="no length is without penalty"):
        LengthConfig(max_tokens=100, buffer_tokens=90, min_tokens=20)


def test_repeated_share_by_hand() -> None:
    assert repeated_share(["a", "b", "a", "b", "a", "b"], 2) == pytest.approx(3 / 5)  # ab ba ab ba ab
    assert repeated_share(["a", "b", "c", "d"], 2) == 0.0
    assert repeated_share(["a"], 2) == repeated_share([], 2) == 0.0


def test_repetition() -> None:
    reward = Repetition(RepetitionConfig(n=2, free=0.2, penalty=2.0))
    assert value(reward, "A, b! a B a b") == pytest.approx(-2.0 * (0.6 - 0.2) / 0.8)
    assert value(reward, "one two three four") == 0.0
    assert value(reward, "") == 0.0
    by_character = Repetition(RepetitionConfig(n=2, by="characters", free=0.0))
    assert value(by_character, "哈哈哈哈哈") == pytest.approx(-0.75)
    assert value(Repetition(RepetitionConfig()), "ships " * 500) == pytest.approx(-1.0, abs=0.01)
