r"""Values: numbers, expressions, and both with units, nouns or magnitudes behind them."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

from sympy import Rational

from roll_like.builtin.rewards.mathematics.expression import ExpressionParser
from roll_like.builtin.rewards.mathematics.kinds import Value
from roll_like.builtin.rewards.mathematics.scanner import UnreadableError
from roll_like.builtin.rewards.mathematics.units import leading_unit, magnitude, parse_unit
from roll_like.data.numbers import parse_number

_NUMBER_HEAD = re.compile(
    r"[-+]?\s?[$€£¥₹]?\s?-?(?:\d[\d,.']*(?:\s\d{3})*|\.\d+)(?:\s+\d+\s?/\s?\d+|\s?/\s?\d+)?(?:[eE][-+]?\d+)?"
    r"(?:\s?(?:\*|x|\\times|\\cdot)\s?10\s?\^\s?(?:\{-?\d+\}|-?\d+))?\s?%?"
)
_WORDS = re.compile(r"[A-Za-z\u4e00-\u9fff][A-Za-z\u4e00-\u9fff'.\-\s/^{}\d()²³·*]*")
_MATHEMATICAL = re.compile(r"(?:pi|sqrt|sin|cos|tan|log|ln|exp|mod|theta|alpha|x|y|z|n|k)\b")
_DEGREES = re.compile(r"(-?[\d.]+)\s*\^\{\\circ\}\s*(?:([\d.]+)\s*(?:'|\\text\{'\}))?\s*(?:([\d.]+)\s*'')?")
_COMPOUND = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)\.?(?:\s*,?\s*(?:and\s+)?)")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_CELSIUS = re.compile(
    r"(?:\^\{\\circ\}\s*)?\\text\{\s*([CF])(?:elsius|ahrenheit)\s*\}|\^\{\\circ\}\s*\\text\{\s*([CF])\s*\}",
    re.IGNORECASE,
)
_DEGREES_OF = re.compile(r"(?:\\text\{)?\s*degrees?\s+(Celsius|Fahrenheit)\s*\}?", re.IGNORECASE)
_CURRENCY_BEFORE = re.compile(r"(USD|EUR|GBP|RMB|INR|Rs\.?)\s*(-?\d.*)", re.IGNORECASE)
_UNIT_BEHIND = re.compile(r"(.*[\d})\]])\s+([A-Za-z]{2,}.*)")
_MICRO = re.compile(r"\\mu\s*\\text\{\s*")
_CIRCLE = re.compile(r"(.*?\S)\s*(\^\{\\circ\}\s*[CF]?)")
_CURRENCY_BEHIND = re.compile(r"(.*\S)\s*([$€£¥₹¢])")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_UNITS = re.compile(r"(?:(?:sq(?:uare)?|cu(?:bic)?)\.?\s*)?units?\b\s*(?:\^\s*\{?[23]\}?)?")
#: Words behind a number with which it is another number, a bound, or no answer.
_ALTERING = re.compile(
    r"(?:squared|cubed|factorial|pi|plus|minus|(?:times|over|choose|mod)\s+\S)\b|.*(?:\bor\s+(?:more|less|fewer|over|under|above|"
    r"below|up|greater|higher|lower|so)|\band\s+(?:a|one)[\s-](?:half|third|quarter|fourth)|\bnot|n't|\bnever|\bwrong|"
    r"\bincorrect|\bimpossible|\bundefined|\bif|\bunless)\b",
    re.IGNORECASE | re.DOTALL,
)
_PERCENT = re.compile(r"(?:percent|per cent|pct|percentage points?)\b")


def number(text: str) -> Value | None:
    """Return the number that the whole text is; None if it is none."""
    found = parse_number(re.sub(r"\s?\\(?:times|cdot)\s?", "*", text))
    if found is None:
        return None
    currency = re.match(r"[-+]?\s?([$€£¥₹])", text)
    return Value(rational(found.value), found.step, found.percent, parse_unit(currency[1]) if currency else None)


def rational(value: Fraction) -> Rational:
    """Return a fraction as sympy's."""
    return Rational(value.numerator, value.denominator)


def expression(text: str) -> Value:
    """Return the number or expression that the text is.

    Raises:
        UnreadableError: It is none.
    """
    found = number(text)
    return expressions(text)[0] if found is None else found


def expressions(text: str) -> list[Value]:
    """Return the value of an expression; two where a logarithm's base is not given.

    Raises:
        UnreadableError: It is no expression.
    """
    first = ExpressionParser(text)
    values = [Value(first.parse(), decimals=first.decimals)]
    if first.bare_log:
        second = ExpressionParser(text, natural=True)
        values.append(Value(second.parse(), decimals=second.decimals))
    return values


def with_unit(text: str) -> list[Value]:
    r"""Return the readings of a number or expression with a unit or noun behind it; none if it has none.

    Raises:
        UnreadableError: What stands behind it is neither.
    """
    whole = _in_degrees(text) or compound(_TEXT.sub(r" \1 ", text))
    if whole is not None:
        return [whole]
    currency = _CURRENCY_BEFORE.fullmatch(text)
    if currency is not None:
        return [_measured(currency[2], currency[1])]
    text = _MICRO.sub(r"\\text{\\mu ", text)
    text = _CELSIUS.sub(
        lambda match: "^{\\circ}" + (match[1] or match[2]).upper(), _DEGREES_OF.sub(r"\\text{\1}", text)
    )
    at = text.find("\\text{")
    if at > 0 and text[at - 1] not in "_^{":
        return [_measured(text[:at].strip(), _TEXT.sub(r" \1 ", text[at:]))]
    for pattern in (_CIRCLE, _CURRENCY_BEHIND):
        match = pattern.fullmatch(text)
        if match is not None and not _TRIGONOMETRIC.search(match[1]):
            return [_measured(match[1], match[2])]
    behind = _UNIT_BEHIND.fullmatch(text)
    if behind is not None and not _NUMBER_HEAD.match(text) and parse_unit(behind[2]) is not None:
        return [_measured(behind[1], behind[2])]
    return _plain(text)


def compound(text: str) -> Value | None:
    """Return a quantity in several units: `5 feet 6 inches`, `1 hour and 30 minutes`."""
    parts = _COMPOUND.findall(text + " ")
    if len(parts) < 2 or _COMPOUND.sub("", text + " ").strip():
        return None
    units = [parse_unit(name) for _, name in parts]
    first = units[0]
    if first is None or any(unit is None or unit.dimension != first.dimension for unit in units):
        return None
    total = sum(Fraction(count) * unit.scale for (count, _), unit in zip(parts, units, strict=True) if unit is not None)
    return Value(rational(total / first.scale), unit=first)


def _in_degrees(text: str) -> Value | None:
    match = _DEGREES.fullmatch(text)
    whole = None if match is None else number(match[1])
    if match is None or whole is None:
        return None
    minutes = Fraction(match[2] or 0) / 60 + Fraction(match[3] or 0) / 3600
    return replace(whole, expr=whole.expr + rational(minutes), unit=parse_unit("^{\\circ}"))


def _plain(text: str) -> list[Value]:
    """Return the readings of a number with words behind it: `12 books`, `60 km/h`, `12m`."""
    match = _NUMBER_HEAD.match(text)
    if match is None:
        return []
    head, tail = match[0].rstrip(), text[match.end() :].strip()
    blank = text[len(head) : len(head) + 1] == " "
    unit = parse_unit(tail) if tail else None
    if not tail or not _WORDS.fullmatch(tail) or _MATHEMATICAL.match(tail):
        return [_measured(head, tail)] if tail.startswith(("\\mu", "\\Omega")) and unit is not None else []
    letter = re.match(r"[A-Za-z](?![A-Za-z])", tail) is not None
    known = unit is not None or magnitude(tail) is not None or re.match(r"[\u4e00-\u9fff]", tail) is not None
    if letter and not blank and known:
        # 12m: a product, or metres
        return [*expressions(text), replace(_measured(head, tail), glued=True)]
    return [_measured(head, tail)] if known or (blank and not letter) else []


def _measured(head: str, tail: str) -> Value:
    tail = tail.strip().rstrip(".")
    first, _, rest = tail.partition(" ")
    factor = Fraction(1)
    for sign, behind in ((first, rest), (tail[:1], tail[1:])):
        if (found := magnitude(sign)) is not None:
            factor, tail = Fraction(found), behind
            break
    if _UNITS.fullmatch(tail):
        tail = ""
    if _PERCENT.match(tail):
        head, tail = f"{head}%", ""
    if _ALTERING.match(tail):
        raise UnreadableError(f"{tail!r} alters the number before it")
    value = expression(head)
    unit = parse_unit(tail) if tail else None
    if tail and unit is None:
        if re.search(r"[\d\\]", tail) or not re.match(r"[^\W\d_]", tail):
            raise UnreadableError(f"{tail!r} is no unit")
        unit = leading_unit(tail)
    step = None if value.step is None else value.step * factor
    return replace(value, expr=value.expr * rational(factor), step=step, unit=unit or value.unit)
