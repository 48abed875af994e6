"""The same number in any notation is one number, and another number in any notation is another."""

import random
from collections.abc import Callable
from fractions import Fraction

import pytest

from roll_like.builtin.rewards.mathematics.grader import grade

PAIRS = 300
# an exact value has these notations; each is given the numerator and the denominator
EXACT: tuple[Callable[[int, int], str], ...] = (
    lambda p, q: f"\\frac{{{p}}}{{{q}}}",
    lambda p, q: f"\\dfrac{{{3 * p}}}{{{3 * q}}}",
    lambda p, q: f"{p}/{q}",
    lambda p, q: f"\\frac{{{-p}}}{{{-q}}}",
    lambda p, q: f"{{{p} \\over {q}}}",
    lambda p, q: f"x = \\frac{{{p}}}{{{q}}}",
    lambda p, q: _mixed(p, q, "\\frac{{{}}}{{{}}}"),
    lambda p, q: _mixed(p, q, " {}/{}"),
    lambda p, q: _recurring(p, q, "\\overline{{{}}}"),
    lambda p, q: _recurring(p, q, "({})"),
    lambda p, q: f"\\left(\\frac{{{p}}}{{{q}}}\\right)",
)
WHOLE: tuple[Callable[[int], str], ...] = (
    str,
    lambda n: f"{n}.0",
    lambda n: f"{n:,}",
    lambda n: f"{n:,}".replace(",", "\\,"),
    lambda n: f"{n:,}".replace(",", "{,}"),
    lambda n: f"{n:,}".replace(",", " "),
    lambda n: f"{n:,}".replace(",", "\u202f"),
    lambda n: f"{n:,}".replace(",", "'"),
    lambda n: f"{n}.".replace("-", "\u2212"),
    lambda n: "".join(chr(ord(char) + 0xFEE0) for char in str(n)),
    lambda n: f"\\text{{{n}}}",
    lambda n: f"\\mathbf{{{n}}}",
    lambda n: f"x = {n}",
    lambda n: f"{n} \\text{{ units}}",
    lambda n: f"{Fraction(n, 1000).numerator / Fraction(n, 1000).denominator!r} \\times 10^{{3}}" if n % 10 else str(n),
    lambda n: f"\\frac{{{n * 7}}}{{7}}",
)


def _mixed(p: int, q: int, form: str) -> str:
    whole, rest = divmod(abs(p), q)
    sign = "-" if p < 0 else ""
    return f"{sign}{whole}{form.format(rest, q)}" if whole and rest else f"{p}/{q}"


def _recurring(p: int, q: int, form: str) -> str:
    """Return the decimal with what recurs marked, by long division."""
    if q > 1_000:
        return f"{p}/{q}"  # its period may be as long as q
    whole, rest = divmod(abs(p), q)
    seen: dict[int, int] = {}
    digits = ""
    while rest and rest not in seen:
        seen[rest] = len(digits)
        digit, rest = divmod(rest * 10, q)
        digits += str(digit)
    sign = "-" if p < 0 else ""
    if not rest:
        return f"{sign}{whole}.{digits}" if digits else f"{sign}{whole}"
    return f"{sign}{whole}.{digits[: seen[rest]]}{form.format(digits[seen[rest] :])}"


def _notation(value: Fraction, generator: random.Random) -> str:
    if value.denominator == 1 and generator.random() < 0.8:
        return generator.choice(WHOLE)(value.numerator)
    return generator.choice(EXACT)(value.numerator, value.denominator)


def _value(generator: random.Random) -> Fraction:
    if generator.random() < 0.5:
        return Fraction(generator.randint(-9_999_999, 9_999_999))
    return Fraction(generator.randint(-999, 999), generator.randint(2, 99))


def _another(value: Fraction, generator: random.Random) -> Fraction:
    """Return a number that a careless answer gives: another sign, digit, decimal point or inverse."""
    candidates = [-value, value * 10, value / 10, value + 1, value - 1, value + Fraction(1, value.denominator)]
    candidates += [1 / value] if value else []
    return generator.choice([one for one in candidates if one != value])


@pytest.mark.parametrize("seed", range(PAIRS))
def test_equal_numbers_are_equal_and_others_are_not(seed: int) -> None:
    generator = random.Random(seed)
    value = _value(generator)
    reference, same = (_notation(value, generator) for _ in range(2))
    other = _notation(_another(value, generator), generator)
    assert grade(reference, f"\\boxed{{{same}}}", boxed=True).equal
    wrong = grade(reference, f"\\boxed{{{other}}}", boxed=True)
    assert not wrong.equal
    assert wrong.answer, other
