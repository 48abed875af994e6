r"""Numbers as people and models write them: the one place that reads a number out of text.

`read_number` reads a text that is nothing but a number; `find_numbers` finds the numbers in prose. Both know

- characters: digits of any script and full width, `−` and `–` as minus, no-break and thin spaces, `½`, `10³`
- thousands: `1,234,567`, `12,34,567` (Indian), `1 234 567`, `1'234'567`, `1_234_567`
- fractions `3/4`, mixed numbers `3 1/2` and `3½`, recurring decimals `0.(3)`
- powers of ten: `1.5e-3`, `1.5 × 10^-3`, `1.5·10⁻³`
- a currency sign before it, a percent sign behind it

A comma separates thousands or the items of a list; it is never a decimal comma. LaTeX is not read here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

#: Larger exponents and longer numbers are not read: nobody means them, and their digits would fill the memory.
MAX_EXPONENT = 10_000
MAX_DIGITS = 4_000


@dataclass(frozen=True, slots=True)
class Number:
    """A number that was read.

    Attributes:
        value: Its exact value; of `50%` it is 1/2.
        step: The value of one unit in the last place of a decimal (0.01 of `3.14`, 1e-20 of `1.6e-19`); None where the
            number is written exactly, as an integer, a fraction or a recurring decimal.
        percent: It has a percent sign.
    """

    value: Fraction
    step: Fraction | None = None
    percent: bool = False


@dataclass(frozen=True, slots=True)
class FoundNumber:
    """A number in a text, which stands at `text[start:end]` of the text as `fold_characters` writes it."""

    number: Number
    start: int
    end: int


_MINUS = "\u2212\u2013\u2012\u2010\u2011\ufe63\u207b\u208b"
_SPACES = "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_INVISIBLE = "\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u2064\ufeff\u00ad"
_FOLDED = {
    **dict.fromkeys(map(ord, _MINUS), "-"),
    **dict.fromkeys(map(ord, _SPACES), " "),
    **dict.fromkeys(map(ord, _INVISIBLE), ""),
    # full-width ASCII
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    ord("\u066b"): ".",  # Arabic decimal separator
    ord("\u066c"): ",",  # Arabic thousands separator
    ord("\u066a"): "%",
    ord("\u2019"): "'",
    ord("\u2044"): "/",  # fraction slash
    ord("\u2215"): "/",
}
_SUPERSCRIPT = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-", strict=True))
_SUPERSCRIPTS = re.compile(f"[{''.join(_SUPERSCRIPT)}]+")
_PLAIN = re.compile(r"[\x20-\x7e\n]*")
_VULGAR = "".join(
    chr(code) for code in (*range(0xBC, 0xBF), *range(0x2150, 0x215F), 0x2189) if unicodedata.numeric(chr(code), None)
)

_DIGITS = r"""
    (?: [1-9]\d{0,2} (?P<separator>[,'_ ]) \d{3} (?:(?P=separator)\d{3})*+ (?!\d)   # thousands, one kind of separator
      | [1-9]\d? (?:,\d{2})+ ,\d{3} (?!\d)                                          # Indian: lakhs and crores
      | \d++ )
"""
_NUMBER = rf"""
    (?P<sign>[-+]\ ?)?+ (?P<currency>[$€£¥₹]\ ?)? (?P<sign_2>-)?
    (?: (?P<whole>{_DIGITS})
        (?: \.(?P<decimals>\d*) (?:\((?P<recurring>\d+)\))? (?!\d)
          | \ ?(?P<vulgar>[{_VULGAR}])
          | (?:\ |\ ?\+\ ?|-) (?P<mixed>\d+\ ?/\ ?\d+) (?![\d/.,]\d)
          | \ ?/\ ? (?P<denominator>\d+) (?![/\d]) )?
      | \.(?P<decimals_2>\d+)
      | (?P<vulgar_2>[{_VULGAR}]) )
    (?: [eE] (?P<exponent>[-+]?\d+)
      | \ ?[×*·⋅x]\ ?10 (?: \^ | \*\* ) (?P<power>[-+]?\d+ | \{{[-+]?\d+\}} | \([-+]?\d+\)) )?
    (?P<percent>\ ?(?:%|\b(?:percent|per\ cent|pct)\b))?
"""
_WHOLE_TEXT = re.compile(_NUMBER, re.VERBOSE)
# a sign is one only where nothing stands before it that it could be subtracted from
_IN_PROSE = re.compile(rf"(?<![\w.]) (?:(?<![)\]])|(?![-+])) {_NUMBER} (?!\d|(?:st|nd|rd|th)\b)", re.VERBOSE)


def fold_characters(text: str) -> str:
    r"""Return the text with one character for each digit, minus, space, apostrophe and full-width letter.

    Superscript digits become powers, since `10³` is no 103.

    >>> fold_characters("−５ × 10⁻³")
    '-5 × 10^{-3}'
    """
    if _PLAIN.fullmatch(text):
        return text
    text = text.translate(_FOLDED) if not _SUPERSCRIPTS.search(text) else _powers(text).translate(_FOLDED)
    return "".join(_ascii_digit(char) for char in text)


def parse_number(text: str) -> Number | None:
    """Return the number that the whole of `text` is, with its precision; None if it is anything else.

    >>> parse_number("3.14")
    Number(value=Fraction(157, 50), step=Fraction(1, 100), percent=False)
    >>> parse_number("$1,200")
    Number(value=Fraction(1200, 1), step=None, percent=False)
    >>> parse_number("1,2") is None  # two numbers
    True
    """
    if len(text) > 2 * MAX_DIGITS:
        return None
    match = _WHOLE_TEXT.fullmatch(fold_characters(text).strip())
    return None if match is None else _number(match)


def read_number(text: str) -> Fraction | None:
    """Return the value of a text that is nothing but a number; None if it is anything else.

    >>> [str(read_number(text)) for text in ("42.0", "−5", "1,234", "3 1/2", "3½", "1.5 × 10³", "5e-05", "50%")]
    ['42', '-5', '1234', '7/2', '7/2', '1500', '1/20000', '1/2']
    >>> [read_number(text) for text in ("", "12 books", "1,2", "12:30", "3.1.4")]
    [None, None, None, None, None]
    """
    number = parse_number(text)
    return None if number is None else number.value


def find_numbers(text: str) -> Iterator[FoundNumber]:
    """Yield the numbers in a text, in order. `-` is a sign only where nothing stands before it to subtract from.

    Digits in words (`H2O`) and ordinals (`3rd`) are no numbers; letters behind a number (`7km`) are a unit.

    >>> [str(found.number.value) for found in find_numbers("From 3–5 apples, -7 (or 1,234.50).")]
    ['3', '5', '-7', '2469/2']
    >>> [str(found.number.value) for found in find_numbers("x2 and 3rd of H2O")]
    []
    """
    for match in _IN_PROSE.finditer(fold_characters(text)):
        number = _number(match)
        if number is not None:
            yield FoundNumber(number, match.start(), match.end())


def _powers(text: str) -> str:
    return _SUPERSCRIPTS.sub(
        lambda match: "^{" + "".join(_SUPERSCRIPT[char] for char in match[0]) + "}",
        text,
    )


def _ascii_digit(char: str) -> str:
    return str(unicodedata.decimal(char)) if char > "\x7f" and char.isdecimal() else char


def _number(match: re.Match[str]) -> Number | None:
    """Return the number that a match of `_NUMBER` stands for; None where it has no value or is too long."""
    groups = match.groupdict()
    if match.end() - match.start() > MAX_DIGITS:
        return None
    exponent = int((groups["exponent"] or groups["power"] or "0").strip("{}()"))
    if abs(exponent) > MAX_EXPONENT:
        return None
    value = Fraction(int(re.sub(r"\D", "", groups["whole"] or "") or 0))
    step: Fraction | None = None
    decimals, recurring = groups["decimals"] or groups["decimals_2"] or "", groups["recurring"]
    if decimals:
        step = Fraction(1, 10 ** len(decimals))
        value += int(decimals) * step
    if recurring:
        value += Fraction(int(recurring), 10 ** len(decimals) * (10 ** len(recurring) - 1))
        step = None
    if vulgar := groups["vulgar"] or groups["vulgar_2"]:
        value += Fraction(unicodedata.numeric(vulgar)).limit_denominator(10)
    fraction = groups["mixed"] or (groups["denominator"] and f"1/{groups['denominator']}")
    if fraction:
        numerator, denominator = (int(part) for part in fraction.split("/"))
        if denominator == 0:
            return None
        value = value + Fraction(numerator, denominator) if groups["mixed"] else value / denominator
    exponent -= 2 if groups["percent"] else 0
    if exponent:
        scale = Fraction(10) ** exponent
        value, step = value * scale, None if step is None else step * scale
    negative = ((groups["sign"] or "").startswith("-")) != bool(groups["sign_2"])
    return Number(-value if negative else value, step, bool(groups["percent"]))
