from typing import Any

import pytest
from reward_support import row

from roll_like import Completion, RewardResult
from roll_like.builtin.rewards import guards
from roll_like.builtin.rewards.ifeval import IFEval, IFEvalConfig
from roll_like.builtin.rewards.ifeval.text import words
from roll_like.errors import DataError, RewardError
from roll_like.registry import REWARDS
from roll_like.types import StopReason

PROMPT = "Describe the old lighthouse near the harbour in one sentence without using any commas."
ANSWER = "The old lighthouse has guided ships into the harbour for a hundred years."
NO_COMMAS = {"instructions": [{"kind": "no_commas"}]}
#: The setting that turns each guard off.
OFF: dict[str, dict[str, float]] = {
    "too_short": {"min_words": 0},
    "copied": {"max_copy": 1},
    "repetitive": {"min_distinct": 0},
    "few_letters": {"min_letters": 0},
    "gibberish": {"min_wordlike": 0},
    "word_salad": {"min_function_words": 0},
}


def completion(text: str, metadata: dict[str, Any] = NO_COMMAS, stop: StopReason = StopReason.STOP) -> Completion:
    return Completion(
        text=text,
        messages=({"role": "user", "content": PROMPT},),
        answer=None,
        metadata=metadata,
        stop_reason=stop,
        response_tokens=len(text.split()),
    )


def score_one(
    text: str, metadata: dict[str, Any] = NO_COMMAS, *, stop: StopReason = StopReason.STOP, **s: Any
) -> RewardResult:
    (result,) = IFEval(IFEvalConfig(**s)).score([completion(text, metadata, stop)])
    return result


def test_is_registered_by_its_entry_point() -> None:
    assert REWARDS.get("ifeval") is IFEval


def test_an_answer_in_the_right_form_scores_1() -> None:
    result = score_one(ANSWER)
    assert result.value == 1.0
    assert result.details["strict"] == result.details["loose"] == result.details["kind/no_commas"] == 1.0
    assert result.details["guarded"] == 0.0


def test_an_answer_in_the_wrong_form_scores_0() -> None:
    result = score_one(ANSWER.replace("ships", "ships, boats"))
    assert result.value == result.details["kind/no_commas"] == result.details["guarded"] == 0.0


@pytest.mark.parametrize(
    ("text", "guard"),
    [
        ("Yes.", "too_short"),
        ("Lighthouse.", "too_short"),
        (PROMPT, "copied"),
        ("Describe the old lighthouse near the harbour in one sentence.", "copied"),
        ("the light the light the light the light the light", "repetitive"),
        (ANSWER + " ships" * 20, "repetitive"),
        ("xkqj zvbn qwrt plmk jhgf dszx", "gibberish"),
        ("aaaaaa bbbbbbb cccccccc ddddddd", "gibberish"),
        ("lighthouse apple running blue window seven mountain paper garden summer", "word_salad"),
        ("a - - - / / / ### ??? light !!! house ;;; old", "few_letters"),
    ],
)
def test_nonsense_in_the_right_form_scores_0(text: str, guard: str) -> None:
    result = score_one(text)
    assert result.details["kind/no_commas"] == 1.0
    assert result.details[f"guard/{guard}"] == 1.0
    assert result.details["guarded"] == 1.0
    assert result.value == 0.0
    assert score_one(text, **OFF[guard]).details[f"guard/{guard}"] == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "- Red brick\n- White paint\n- Strong lamp",
        "It is 30 metres tall and was built in 1852 by NASA engineers.",
        "Tall and white it stands.",
        "<<The Light>>\nIt shows the way to sailors at night.",
        "l'été est très agréable près de la mer et le phare est là",
    ],
)
def test_guards_let_answers_pass(text: str) -> None:
    function_words = 0.0 if "été" in text else 0.15
    assert score_one(text, min_function_words=function_words).details["guarded"] == 0.0


def test_json_is_not_expected_to_read_as_prose() -> None:
    text = '{"height": 30, "colour": "white red", "place": "harbour", "lamp": "bright yellow", "built": 1852}'
    assert score_one(text, {"instructions": [{"kind": "json_format"}]}).value == 1.0
    assert score_one(text, {"instructions": [{"kind": "keyword", "word": "harbour"}]}).value == 0.0


def test_a_repeated_prompt_that_was_asked_for_is_no_copy() -> None:
    metadata = {"instructions": [{"kind": "repeat_prompt", "prompt": PROMPT}]}
    assert score_one(f"{PROMPT}\n{ANSWER}", metadata).value == 1.0
    assert score_one(f"{PROMPT}\n{PROMPT}", metadata).value == 0.0


def test_all_or_nothing_and_partial() -> None:
    metadata = {"instructions": [{"kind": "no_commas"}, {"kind": "max_words", "max": 5}]}
    assert score_one(ANSWER, metadata).value == 0.0
    result = score_one(ANSWER, metadata, partial=True)
    assert result.value == 0.5
    assert (result.details["kind/no_commas"], result.details["kind/max_words"]) == (1.0, 0.0)
    assert score_one("Yes.", metadata, partial=True).value == 0.0


def test_a_kind_asked_twice_passes_only_when_both_pass() -> None:
    metadata = {"instructions": [{"kind": "keyword", "word": "ships"}, {"kind": "keyword", "word": "cats"}]}
    assert score_one(ANSWER, metadata).details["kind/keyword"] == 0.0


def test_loose_forgives_a_first_line_that_strict_does_not() -> None:
    text = f"Sure, here it is:\n{ANSWER}"
    assert score_one(text, mode="strict").value == 0.0
    result = score_one(text, mode="loose")
    assert (result.value, result.details["strict"], result.details["loose"]) == (1.0, 0.0, 1.0)


def test_loose_does_not_pass_an_empty_variant() -> None:
    assert score_one("One, two, three, four, five.", mode="loose").value == 0.0


def test_must_finish() -> None:
    assert score_one(ANSWER, stop=StopReason.LENGTH).value == 1.0
    result = score_one(ANSWER, stop=StopReason.LENGTH, must_finish=True)
    assert (result.value, result.details["guard/unfinished"]) == (0.0, 1.0)
    assert score_one(ANSWER, must_finish=True).value == 1.0


@pytest.mark.parametrize(
    ("topic", "expected"),
    [("lighthouses", 1.0), ("the old harbour", 1.0), ("volcanoes", 0.0), ("ship", 1.0), ("years", 1.0), ("sea", 0.0)],
)
def test_topic(topic: str, expected: float) -> None:
    assert score_one(ANSWER, NO_COMMAS | {"topic": topic}, topic_field="topic").value == expected


def test_check_row_names_file_and_line() -> None:
    reward = IFEval(IFEvalConfig())
    reward.check_row(row(**NO_COMMAS))
    with pytest.raises(DataError, match=r"data\.jsonl:7: .*unknown kind of instruction 'rhyme'"):
        reward.check_row(row(instructions=[{"kind": "rhyme"}]))
    with pytest.raises(DataError, match=r"data\.jsonl:7: .*'topic'"):
        IFEval(IFEvalConfig(topic_field="topic")).check_row(row(**NO_COMMAS))


def test_a_broken_row_is_a_failure_and_no_judgement() -> None:
    with pytest.raises(RewardError, match="unknown kind"):
        score_one(ANSWER, {"instructions": [{"kind": "rhyme"}]})


def test_config_refuses_unknown_keys() -> None:
    with pytest.raises(ValueError, match="min_word"):
        IFEvalConfig.model_validate({"type": "ifeval", "min_word": 3})


def test_copied_share() -> None:
    prompt = words("one two three four five")
    assert guards.copied_share(words("one two three four"), prompt) == 1.0
    assert guards.copied_share(words("zero one two three four"), prompt) == 0.5
    assert guards.copied_share(words("two three"), prompt) == 1.0
    assert guards.copied_share([], prompt) == 0.0


def test_distinct_share_sees_a_late_loop() -> None:
    start = [f"w{index}" for index in range(30)]
    assert guards.distinct_share(start) == 1.0
    assert guards.distinct_share(start + ["loop"] * 20) == pytest.approx(1 / 20)
    assert guards.distinct_share([]) == 1.0


@pytest.mark.parametrize(
    ("response", "topic", "expected"),
    [
        ("A fox runs", "foxes", True),
        ("The wolf howls", "wolves", True),
        ("Bees fly", "bee", True),
        ("Volcanic ash", "volcanoes", True),
        ("the bus stops", "buses", True),
        ("he fishes", "fishing", True),
        ("we care", "cars", False),
        ("as is", "ice", False),
        ("", "ice", False),
        ("anything", "the", True),
    ],
)
def test_mentions(response: str, topic: str, expected: bool) -> None:
    assert guards.mentions(words(response), words(topic)) is expected


def test_shares_of_vocabulary() -> None:
    assert guards.function_word_share(words("the cat is on the mat")) == pytest.approx(4 / 6)
    assert guards.function_word_share([]) == 0.0
    assert guards.wordlike_share(["strength", "NASA", "42", "naïve", "xzqt"]) == 0.8
    assert guards.letter_share("a b !") == pytest.approx(2 / 3)
    assert guards.letter_share("") == 0.0
