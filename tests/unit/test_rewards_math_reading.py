"""What the `math` reward reads, refuses and finds, part by part."""

import doctest
import importlib
from collections.abc import Iterator

import pytest

from roll_like import Completion, RewardResult
from roll_like.builtin.rewards.math import Math, MathConfig
from roll_like.builtin.rewards.mathematics.grader import grade, read_reference
from roll_like.builtin.rewards.mathematics.response import boxed_answer
from roll_like.builtin.rewards.mathematics.scanner import UnreadableError
from roll_like.builtin.rewards.mathematics.text import tidy
from roll_like.errors import RewardError
from roll_like.types import StopReason


@pytest.mark.parametrize("name", ["response", "text", "special", "units", "writing"])
def test_examples_of_a_module(name: str) -> None:
    module = importlib.import_module(f"roll_like.builtin.rewards.mathematics.{name}")
    tested = doctest.testmod(module)
    assert tested.attempted > 0
    assert tested.failed == 0


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("$\\left( 3, \\dfrac{1}{2} \\right)$.", "( 3, \\frac{1}{2} )"),
        ("10\\,000", "10000"),
        ("10{,}000", "10000"),
        ("10,\\!000", "10000"),
        ("3{,}14", "3.14"),
        ("\\$12.50", "$12.50"),
        ("$12.50", "$12.50"),
        ("$5$", "5"),
        ("\\textcolor{red}{5}", "5"),
        ("\\color{red}{5}", "5"),
        ("\\underline{\\mathbf{5}}", "5"),
        ("\\text{13}", "13"),
        ("\\mathrm{cm}", "\\text{cm}"),
        ("90^\\circ", "90^{\\circ}"),
        ("3\u00bd", "3\\frac{1}{2}"),
        ("\u221a2 \u2264 x\u00b2", "\\sqrt 2 \\le x^{2}"),
        ("x\u2081", "x_{1}"),
        ("0.3\u0305", "0.\\overline{3}"),
        ("\uff58\uff1d\uff15\u3002", "x=5"),
        ("**5**", "5"),
        ("5 \\\\", "5"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ],
)
def test_one_spelling(written: str, text: str) -> None:
    assert tidy(written) == text


REFUSED = (
    "",
    "yes",
    "no idea at all",
    "the answer depends on n",
    "1, 2, \\ldots, n",
    "5 cm by 3 cm",
    "\\begin{cases} x & x > 0 \\\\ -x & x \\le 0 \\end{cases}",
    "x^2 \\equiv 1 \\pmod{8}",
    "\\frac{1}{0}",
    "2 3",
    "1.234,56",
    "\\frac{1",
    "x +",
    "?",
    "(" * 30 + "1" + ")" * 30,
    "1 + " * 1_000 + "1",
)


@pytest.mark.parametrize("reference", REFUSED)
def test_a_reference_answer_that_cannot_be_read_is_refused(reference: str) -> None:
    with pytest.raises(UnreadableError):
        read_reference(reference)
    assert grade(reference, "\\boxed{1}", boxed=False).unreadable


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        ("1", "\\boxed{" + "(" * 900 + "1" + ")" * 900 + "}"),
        ("1", "\\boxed{" + "1+" * 50_000 + "1}"),
        ("1", "\\boxed{" * 10_000),
        ("1", "\\(" * 50_000),
        ("1", "$" * 100_001),
        ("1", "**" * 50_000),
        ("1", "#### " * 20_000),
        ("1", "\\boxed{\\text{" + "a" * 3_000 + "}}"),
        ("1", "\\boxed{" + "\\sqrt{" * 300 + "2" + "}" * 300 + "}"),
    ],
)
def test_an_answer_that_is_none_scores_0(reference: str, response: str) -> None:
    verdict = grade(reference, response, boxed=False)
    assert (verdict.unreadable, verdict.answer, verdict.equal) == ("", "", False)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("\\boxed{4}, so \\boxed{5}", "5"),
        ("\\boxed{5}. Checked: \\boxed{", ""),
        ("\\boxed{}", ""),
        ("\\boxed5", "5"),
        ("\\boxed 5", "5"),
        ("\\fbox{5}", "5"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{5} or \\boxed{6}", "5, 6"),
        ("The answer is 4. No, the answer is 5.", "5"),
        ("The answer is not 4.", ""),
        ("Answer: 4\nChecked again.\nAnswer: 5\nThank you for 3 questions.", "5"),
        ("The answer is:\n\n5", "5"),
        ("The answer is 5 because 2 + 3 = 5.", "5"),
        ("#### 5\nI hope this helps 7 days a week.", "5"),
        ("7 - 2 = 5", "5"),
        ("It is 2^10.", "1024"),
        ("$$\nx = 5\n$$", "5"),
        ("So **5** apples.", "5"),
        ("I cannot tell.", ""),
    ],
)
def test_where_the_final_answer_stands(response: str, answer: str) -> None:
    assert grade("77", response, boxed=False).answer == answer


def test_parts_in_boxes_of_their_own_are_one_answer_if_the_reference_has_as_many() -> None:
    response = "(a) We get \\boxed{3} after a long computation of the first part. (b) And \\boxed{4}."
    assert grade("3, 4", response, boxed=False).equal
    assert not grade("3, 5", response, boxed=False).equal
    assert not grade("3", response, boxed=False).equal


@pytest.mark.parametrize(
    ("reference", "response", "tolerance", "equal"),
    [
        ("9.81", "\\boxed{9.8}", 0.0, False),
        ("9.81", "\\boxed{9.8}", 0.01, True),
        ("9.81", "\\boxed{9.7}", 0.01, False),
        ("\\sqrt{2}", "\\boxed{1.41}", 0.01, True),
        ("100", "\\boxed{101}", 0.05, False),  # neither is a decimal
        ("1.6e-19", "\\boxed{1.6e-20}", 0.05, False),
    ],
)
def test_relative_tolerance(reference: str, response: str, tolerance: float, equal: bool) -> None:
    assert grade(reference, response, True, tolerance).equal is equal


@pytest.fixture(scope="module")
def reward() -> Iterator[Math]:
    made = Math(MathConfig(timeout_seconds=30.0, memory_mib=1024))
    yield made
    made.close()


def completion(text: str, answer: str) -> Completion:
    return Completion(
        text=text, messages=(), answer=answer, metadata={}, stop_reason=StopReason.STOP, response_tokens=1
    )


def test_an_answer_that_sympy_cannot_hold_is_a_failure_and_the_process_stays(reward: Math) -> None:
    reward.score([completion("\\boxed{5}", "5")])
    before = reward._pool.process_ids
    outcomes = reward.score([completion("\\boxed{x^{x^{x^{x^{x}}}}}", "5"), completion("\\boxed{5}", "5")])
    assert isinstance(outcomes[0], RewardError)
    assert "MemoryError" in str(outcomes[0]) or "OverflowError" in str(outcomes[0])
    assert isinstance(outcomes[1], RewardResult)
    assert outcomes[1].value == 1.0
    assert reward._pool.process_ids == before


def test_values_of_thousands_of_digits_are_compared(reward: Math) -> None:
    asked = [completion("\\boxed{\\frac{1}{2006!}}", "\\frac{1}{2004!}"), completion("\\boxed{2004!}", "2004!")]
    assert [outcome.value for outcome in reward.score(asked) if isinstance(outcome, RewardResult)] == [0.0, 1.0]


def test_tolerance_of_the_settings_is_used() -> None:
    reward = Math(MathConfig(relative_tolerance=0.01))
    try:
        (outcome,) = reward.score([completion("\\boxed{9.8}", "9.81")])
        assert isinstance(outcome, RewardResult)
        assert outcome.value == 1.0
    finally:
        reward.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\\boxed{0.5}", "\\boxed{\\frac{2}{4}}"),
        ("\\boxed{x = 41}", "The answer is 41.0 apples."),
        ("\\boxed{2, 1}", "\\boxed{\\{1, 2\\}}"),
        ("\\boxed{\\pm 3}", "\\boxed{-3, 3}"),
        ("\\boxed{x \\le 3}", "\\boxed{(-\\infty, 3]}"),
        ("\\boxed{1{,}234}", "\\boxed{1 234}"),
        ("\\boxed{50\\%}", "\\boxed{0.5}"),
        ("\\boxed{2:4}", "\\boxed{1:2}"),
        ("\\boxed{10:30\\text{ PM}}", "\\boxed{22:30}"),
    ],
)
def test_equal_wrong_answers_have_equal_texts(one: str, other: str) -> None:
    first, second = (grade("77", text, boxed=False) for text in (one, other))
    assert first.answer == second.answer != ""
    assert not first.equal


def test_many_boxes_are_read_in_linear_time() -> None:
    many = " ".join(f"\\boxed{{{number}}}" for number in range(200_000))
    found = boxed_answer(many)  # where looking for repeated ones is quadratic, this takes minutes
    assert found is not None
    assert found.startswith("0, 1, 2, ")
    assert found.endswith(", 199999")
