r"""Short answers compared with reference answers: as words, in which numbers count by value, or as numbers.

Number formats are those of `roll_like.data.numbers`, and LaTeX for them: `\frac{1}{2}`, `1.5 \times 10^3`, `50\%`.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import regex

from roll_like.data.numbers import find_numbers, fold_characters

#: Numbers that are not whole are the same if they differ by at most this share of the reference.
TOLERANCE = Fraction(1, 10**6)

#: Signs that an answer may have where its reference has none.
_UNIT_SIGNS = frozenset("$€£¥₹%")
_MAX_POWER_BITS = 40_000
_SCALES = {
    "dozen": 12,
    "score": 20,
    "hundred": 10**2,
    "thousand": 10**3,
    "lakh": 10**5,
    "million": 10**6,
    "crore": 10**7,
    **dict.fromkeys(("billion", "bn"), 10**9),
    "trillion": 10**12,
    "quadrillion": 10**15,
    "千": 10**3,
    **dict.fromkeys("万萬", 10**4),
    **dict.fromkeys("亿億", 10**8),
}

_LATEX = (
    (re.compile(r"\$\$?(?=\S)((?:[^$\\]|\\.)+?)(?<=\S)\$\$?(?!\d)", re.DOTALL), r"\1"),
    (re.compile(r"(\d?)\s*\\[cdt]?frac\s*(\d|\{[^{}]*\})\s*(\d|\{[^{}]*\})"), r"\1 \2/\3"),
    (re.compile(r"\\(?:text\w*|math\w+|mbox|boxed|fbox|operatorname)\s*(\{[^{}]*\})"), r"\1"),
    (re.compile(r"\^\s*\{?\\circ\}?|\\degree\b"), "°"),
    (re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!"), ""),
    (re.compile(r"\\(?:quad|qquad)(?![A-Za-z])|\\[,;: ()\[\]]"), " "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([%$#&_{}])"), r"\1"),
)
_LATEX_SIGNS = {"sqrt": "√", "pi": "π", "times": "×", "cdot": "·", "infty": "∞", "pm": "±", "neq": "≠"}
_LATEX_SIGN = re.compile(rf"\\({'|'.join(_LATEX_SIGNS)})(?![A-Za-z])")
# braces are of use in exponents alone
_BRACES = re.compile(r"(?<!\^)\{([^{}]*)\}")
_UNSPACED = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}]")

_GLUED_BEFORE = regex.compile(r"(?:\w-|\d[./:,']|\^[{(]?|√[{(]?\s?|(?<!\d\s?)±\s?)$")
# 5k and 0x1f are other numbers than 5 and 0
_GLUED_AFTER = regex.compile(
    r"[-./:,']\d|\s?[√π‰‱]|\s?(?:pi|factorial|squared|cubed)\b|[xyzinekKM](?![\p{L}\p{N}'])|(?<=\b0)[xXbBoO][\da-fA-F]+\b"
)
_POWER = re.compile(r"(?:\s?\^\s?|\*\*)(?:\{\s?([-+]?\d+)\s?\}|\(([-+]?\d+)\)|([-+]?\d+))(?![\d.])")
# 千米 is a kilometre
_SCALE = re.compile(rf"\s?({'|'.join(_SCALES)})\b(?!(?<=千)\s*[米克瓦])", re.IGNORECASE)
_CURRENCY_AFTER = re.compile(r"\s?([$€£¥₹])(?!\d)")
# 007 is a name, and 05/01 a date
_LEADING_ZERO = re.compile(r"[^\d.]*0\d|.*/\s?0\d")

_JOINED = regex.compile(r"(?<=\p{L})[.'&-](?=[\p{L}\p{N}])|(?<=\p{N})['-](?=\p{L})|(?<=\p{L})_(?=\p{N})")
_ROOT = re.compile(r"([√∛∜])\s*[({]?\s*")
_WORD = regex.compile(
    r"(?:(?:(?<![^\s(\[=])-(?=[√∛∜\p{N}]|\p{L}(?!\p{L})))?"
    r"[√∛∜]?[\p{L}\p{M}\p{N}]+(?:(?:(?<=\p{N})[-./:*](?=\p{N})|/)[\p{L}\p{M}\p{N}]+)*"
    r"(?:\++|\#|(?:(?<=\b\p{L})|(?<=\b\p{L}\p{L}))-(?![\w-]))?)|-?∞|[\p{S}‰‱]"
)
# -(5), and -5 in words
_SIGNED = re.compile(
    r"([-+])\s?[(\[][(\[\s]*([-+]?)\s?([$€£¥₹]?√?(?:\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)(?:/\d+)?\s?%?)\s*[)\]]+"
)
_SIGN_WORD = regex.compile(
    r"(?i)(?:\bnegative|(?:(?<=^\s*)|(?<=\b(?:is|was|of|to|at|equals)\s|[=:]\s?))minus)\s+(?=[$€£¥₹√\d])"
)
# in a sentence `5!` may be nothing but a lively 5
_FACTORIAL = re.compile(r"(?<=\d)\)?\s?!+(?!\w)")
_SENTENCE = regex.compile(r"\p{L}\p{L}|\p{Lo}")
_PRODUCT = re.compile(r"(?<=\d)(\s?)\*(?=\s?\d)")
_BULLET = re.compile(r"^[ \t]*[-*+•][ \t]+(?=\S)", re.MULTILINE)
_SEVERAL = re.compile(r"\s*(?:[^\W\d]+\s*)?(?:(?:,\s*)?\b(?:and|or|to)\b|[&±和或至到])\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class AnswerNumber:
    """A number in an answer.

    Attributes:
        value: Its value; of `50%` it is 1/2.
        percent: It has a percent sign.
        currency: Its currency sign; empty if there is none.
        start: Where it begins in the text.
        end: Where it ends.
    """

    value: Fraction
    percent: bool
    currency: str
    start: int
    end: int


def answer_words(text: str, *, articles: bool = False) -> list[str]:
    r"""Return the words of a text without case, punctuation and English articles; numbers as their value.

    What tells answers apart is kept: signs, decimal points and the marks of dates, versions and ratios within numbers,
    `+` and `#` behind a word, symbols. Text without blanks (Chinese, Japanese) is divided into characters.

    >>> answer_words("The U.S.A. and a dog"), answer_words("C++, not C#")
    (['usa', 'and', 'dog'], ['c++', 'not', 'c#'])
    >>> answer_words("−5.0"), answer_words("1,234 km"), answer_words(r"\frac{1}{2}"), answer_words("2020-05-01")
    (['-5'], ['1234', 'km'], ['0.5'], ['2020-05-01'])

    Args:
        articles: Keep them. An `a` at the end (vitamin A) is always kept.
    """
    plain = _plain(text)
    words: list[str] = []
    at = 0
    for number in _numbers(plain):
        if _LEADING_ZERO.match(plain[number.start : number.end]):
            continue
        words += _split(plain[at : number.start])
        words += [number.currency] if number.currency else []
        words += [_written(number.value * 100), "%"] if number.percent else [_written(number.value)]
        at = number.end
    words += _split(plain[at:])
    if not articles:
        last = len(words) - 1
        words = [word for i, word in enumerate(words) if word not in ("an", "the") and (word != "a" or i == last)]
    # punctuation alone may be the answer
    return words or ([] if re.search(r"\w", text) else text.split())


def drop_unit_signs(answer: list[str], reference: Sequence[str]) -> list[str]:
    """Return the words of an answer without currency and percent signs, if its reference has none.

    >>> drop_unit_signs(["$", "18"], ["18"]), drop_unit_signs(["$", "18"], ["€", "18"])
    (['18'], ['$', '18'])
    """
    if _UNIT_SIGNS.isdisjoint(reference):
        return [word for word in answer if word not in _UNIT_SIGNS] or answer
    return answer


def same_words(answer: str, reference: str) -> bool:
    """Return whether an answer has the words of a reference, articles too, in their order."""
    wanted = answer_words(reference, articles=True)
    return drop_unit_signs(answer_words(answer, articles=True), wanted) == wanted


def contains_words(answer: str, reference: str) -> bool:
    """Return whether the words of a reference stand in an answer, one behind the other.

    >>> contains_words("There are 5 of them.", "5"), contains_words("There are -5.5 of them.", "5")
    (True, False)
    """
    words, wanted = answer_words(answer, articles=True), answer_words(reference, articles=True)
    return any(words[at : at + len(wanted)] == wanted for at in range(len(words) - len(wanted) + 1))


def last_number(text: str) -> AnswerNumber | None:
    """Return the number that an answer ends with, or that follows the last `####`; None without one.

    A list, a range or a choice of numbers (`1, 2`, `3-5`, `3 or 5`) is no number; neither are dates, times, ratios,
    versions, and numbers that are part of a term (`2π`, `√2`).

    >>> [str(found.value) for found in map(last_number, ("12 of 48 is 25%", "2^10", "3 1/2 miles")) if found]
    ['1/4', '1024', '7/2']
    >>> last_number("1,2,3"), last_number("3 or 5"), last_number("12:30")
    (None, None, None)
    """
    plain, numbers = _numbers_of(text)
    if len(numbers) > 1:
        between = plain[numbers[-2].end : numbers[-1].start]
        outside = "".join(plain[a.end : b.start] for a, b in itertools.pairwise(numbers))
        is_list = not re.search(r"[^\s,;]", outside) and not re.search(r"\w", plain[: numbers[0].start])
        if is_list or _SEVERAL.fullmatch(between):
            return None
    return numbers[-1] if numbers else None


def only_number(text: str) -> AnswerNumber | None:
    """Return the number of a reference answer, which may have words around it; None without one or with several.

    >>> [only_number(text) is None for text in ("12 books", "#### 12", "1,2", "5 of 8", "3.1.4")]
    [False, False, True, True, True]
    """
    _, numbers = _numbers_of(text)
    return numbers[0] if len(numbers) == 1 else None


def same_number(answer: AnswerNumber, reference: AnswerNumber) -> bool:
    """Return whether two numbers are the same: whole ones exactly, others within `TOLERANCE` of the reference.

    The answer `50%` is 0.5, and also 50 where the reference has no percent sign.
    """
    values = [answer.value]
    if answer.percent and not reference.percent:
        values.append(answer.value * 100)
    return any(
        value == reference.value
        if value.denominator == reference.value.denominator == 1
        else abs(value - reference.value) <= TOLERANCE * abs(reference.value)
        for value in values
    )


def _numbers_of(text: str) -> tuple[str, list[AnswerNumber]]:
    _, mark, behind = text.rpartition("####")
    plain = _plain(behind.lstrip().partition("\n")[0] if mark else behind)
    if len(plain.split("\n")) > 1:
        plain = _BULLET.sub("", plain)  # `- 5` in a list is no negative number
    return plain, list(_numbers(plain))


def _plain(text: str) -> str:
    r"""Return the text without LaTeX, and with blanks around characters of scripts that have none."""
    if "\\" in text or "$" in text or "{" in text:
        for pattern, plain in _LATEX:
            text = pattern.sub(plain, text)
        text = _LATEX_SIGN.sub(lambda match: _LATEX_SIGNS[match[1]], text)
        text = _BRACES.sub(r"\1", text)
    text = _SIGN_WORD.sub("-", _PRODUCT.sub(r"\1×", fold_characters(text)))
    text = _SIGNED.sub(lambda match: f"{'-' if (match[1] == '-') != (match[2] == '-') else ''}{match[3]}", text)
    if "!" in text:
        prose = _SENTENCE.search(text)
        alone = len(text) if prose is None else prose.start()
        text = _FACTORIAL.sub(lambda match: " factorial" * match[0].count("!"), text[:alone]) + text[alone:]
    return str(_UNSPACED.sub(r" \g<0> ", text))


def _numbers(plain: str) -> Iterator[AnswerNumber]:
    """Yield the numbers in a text that are no part of something longer, such as a date, a version or a term."""
    for found in find_numbers(plain):
        start, end, value = found.start, found.end, found.number.value
        if _GLUED_BEFORE.search(plain[max(0, start - 4) : start]) or _GLUED_AFTER.match(plain, end):
            continue
        written = plain[start:end]
        power = _POWER.match(plain, end)
        if power is None and plain[end : end + 2].lstrip().startswith("^"):
            continue
        if power is not None:
            raised = _raised(value, int(power[1] or power[2] or power[3]))
            if raised is None or "/" in written:
                continue
            value, end = raised, power.end()
        scale = _SCALE.match(plain, end)
        if scale is not None:
            value, end = value * _SCALES[scale[1].casefold()], scale.end()
        currency = re.search(r"[$€£¥₹]", written)
        after = None if currency else _CURRENCY_AFTER.match(plain, end)
        end = end if after is None else after.end()
        sign = currency[0] if currency else after[1] if after else ""
        yield AnswerNumber(value, found.number.percent, sign, start, end)


def _raised(base: Fraction, exponent: int) -> Fraction | None:
    """Return a power; a minus sign before the base is not raised. None where it has no value or is too long."""
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * size > _MAX_POWER_BITS or (base == 0 and exponent <= 0):
        return None
    power = Fraction(abs(base) ** exponent)
    return -power if base < 0 else power


def _split(text: str) -> list[str]:
    folded = unicodedata.normalize("NFKC", text).casefold()
    return [str(word) for word in _WORD.findall(_ROOT.sub(r"\1", _JOINED.sub("", folded)))]


def _written(value: Fraction) -> str:
    """Return a number as a decimal, or as a fraction where its decimals do not end."""
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    if rest != 1:
        return f"{value.numerator}/{value.denominator}"
    places = max(twos, fives)
    digits = str(abs(value.numerator) * 10**places // value.denominator).zfill(places + 1)
    whole, decimals = digits[: len(digits) - places], digits[len(digits) - places :]
    return f"{'-' if value < 0 else ''}{whole}{'.' if decimals else ''}{decimals}"
