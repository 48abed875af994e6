r"""Answers that are no expressions: times of day, dates, ratios, numbers of other bases, residues, choices, phrases."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import gcd


@dataclass(frozen=True, slots=True)
class Clock:
    """A time of day or a duration: `10:30 AM`, `22:30`, `3 PM`. `half` is am, pm or None where it is not said."""

    seconds: int
    half: str | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """`3:2` or `3 to 2`, in lowest terms; `written` as it stands."""

    terms: tuple[Fraction, ...]
    written: tuple[Fraction, ...]


@dataclass(frozen=True, slots=True)
class Date:
    """A day; `year` is None where it is not said."""

    year: int | None
    month: int
    day: int


@dataclass(frozen=True, slots=True)
class Based:
    """A number of another base: `1011_2`."""

    digits: str
    base: int

    @property
    def value(self) -> Fraction:
        """Its value."""
        whole, _, decimals = self.digits.partition(".")
        return Fraction(int(whole + decimals, self.base), self.base ** len(decimals))


@dataclass(frozen=True, slots=True)
class Residue:
    r"""A class of integers: `7 \pmod{11}`."""

    value: int
    modulus: int


@dataclass(frozen=True, slots=True)
class Choice:
    """An option by its letter, with what stands behind it: `(C) 12`."""

    letter: str
    rest: str


@dataclass(frozen=True, slots=True)
class Phrase:
    """A statement with a meaning of its own: `empty` (no solution), `undefined`, `infinite` (infinitely many)."""

    kind: str


@dataclass(frozen=True, slots=True)
class Word:
    r"""Words: a reference `\text{Evelyn}`, or a response that is no mathematics. Compared without case and marks."""

    text: str


Special = Clock | Ratio | Date | Based | Residue | Choice | Phrase | Word

_PHRASES = {
    "empty": r"(?:there\s+(?:is|are)\s+)?(?:no|none)(?:\s+(?:real|integer|such|positive|rational|valid|possible))?"
    r"(?:\s+(?:solutions?|roots?|answers?|values?|numbers?|integers?|intersections?|x|exist|exists|real))*|none"
    r"|(?:the\s+)?empty(?:\s+set)?|无解|空集|无实数解|\\emptyset|\\\{\s*\\\}",
    "undefined": r"undefined|not\s+defined|dne|(?:the\s+limit\s+)?does\s+not\s+exist|doesn't\s+exist|indeterminate"
    r"|不存在|无意义",
    "infinite": r"infinitely\s+many(?:\s+solutions?)?|infinite(?:\s+solutions?)?|无穷多(?:个)?(?:解)?",
}
_PHRASE = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _PHRASES.items()}
_CLOCK = re.compile(
    r"(\d{1,2}):(\d{2})(?::(\d{2}))?(?:\s*([ap])\.?\s?m\b\.?|\s*(?:o'?clock|hours|hrs))?"
    r"|(\d{1,2})\s*([ap])\.?\s?m\b\.?",
    re.IGNORECASE,
)
_MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)  # fmt: skip
_MONTH = "|".join(f"{month[:3]}(?:{month[3:]})?" if month != "may" else month for month in _MONTHS)
_DATES = (
    re.compile(r"(?P<year>\d{4})[-/](?P<month>\d{1,2})[-/](?P<day>\d{1,2})"),
    re.compile(
        rf"(?P<name>{_MONTH})\.?\s+(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?:,?\s+(?P<year>\d{{4}}))?", re.IGNORECASE
    ),
    re.compile(
        rf"(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<name>{_MONTH})\.?(?:,?\s+(?P<year>\d{{4}}))?",
        re.IGNORECASE,
    ),
    re.compile(r"(?:(?P<year>\d{4})年)?(?P<month>\d{1,2})月(?P<day>\d{1,2})[日号]"),
)
_TERM = r"-?\d+(?:\.\d+)?(?:/\d+)?"
_RATIO = re.compile(rf"({_TERM})(?:\s*:\s*({_TERM})(?:\s*:\s*({_TERM}))?(?:\s*:\s*({_TERM}))?|\s+to\s+({_TERM}))")
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "sixteen": 16, "bin": 2, "oct": 8, "dec": 10, "hex": 16,
}  # fmt: skip
_BASED = re.compile(
    r"(-?\(?-?)([0-9A-Fa-f]+(?: [0-9A-Fa-f]{4})*(?:\.[0-9A-Fa-f]+)?)\)?\s*"
    r"(?:_\s*(?:\{\s*\(?\s*(?:\\text\{)?\s*(\d{1,2}|[a-z]+)\s*\}?\s*\)?\s*\}|(\d{1,2})|\\text\{\s*([a-z]+)\s*\})"
    r"|\s(?:in\s+)?(?:\(?base[- ](\d{1,2}|[a-z]+)\)?))"
)
_PREFIXED = re.compile(r"(-?)0([box])([0-9A-Fa-f]+)", re.IGNORECASE)
_RESIDUE = re.compile(
    r"(?:[a-zA-Z]\s*\\equiv\s*)?(-?\d+)\s*(?:\\pmod\s*\{?\s*(\d+)\s*\}?|\(?\s*(?:\\bmod|\\text\{\s*mod\s*\}|\\mod|\bmod)\s*\{?\s*(\d+)\s*\}?\s*\)?)"
)
_CHOICE = re.compile(
    r"(?:option\s+|choice\s+)?(?:\(\s*([A-Ja-j])\s*\)|([A-J])\s*[).:](?=\s|$)|([A-J])(?=$))\s*(.*)",
    re.IGNORECASE | re.DOTALL,
)


def read_special(text: str) -> Special | None:
    r"""Return what `text` is if it is one of the kinds of this module but a `Word` or a `Choice`; else None."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip().rstrip(".")
    plain = re.sub(r"\s+", " ", plain)
    for kind, pattern in _PHRASE.items():
        if pattern.fullmatch(plain):
            return Phrase(kind)
    return _clock(plain) or _date(plain) or _residue(text) or _based(text) or None


def read_ratio(text: str) -> Ratio | None:
    """Return the ratio that `text` is, else None."""
    match = _RATIO.fullmatch(re.sub(r"\\text\{\s*to\s*\}", " to ", text).replace("  ", " "))
    if match is None:
        return None
    try:
        written = tuple(Fraction(term) for term in match.groups() if term)
    except ZeroDivisionError:
        return None
    common = 1
    for term in written:
        common = common * term.denominator // gcd(common, term.denominator)
    whole = [int(term * common) for term in written]
    divisor = gcd(*whole) or 1
    return Ratio(tuple(Fraction(term // divisor) for term in whole), written)


def read_choice(text: str) -> Choice | None:
    r"""Return the option that `text` names: `(C)`, `\text{(C)} 12`, `C. 12`; else None."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip()
    match = _CHOICE.fullmatch(plain)
    if match is None or (match[4] and match[4][0] in "^_+*/=-!'"):
        return None
    letter = match[1] or match[2] or match[3]
    if match[3] and not match[3].isupper():
        return None
    return Choice(letter.upper(), match[4].strip())


def fold_words(text: str) -> str:
    r"""Return words without case, marks and `\text`.

    >>> fold_words("\\text{The  Answer!}")
    'the answer'
    """
    plain = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).casefold()
    return " ".join(re.sub(r"[^\w\s]", " ", plain).split())


def _clock(text: str) -> Clock | None:
    match = _CLOCK.fullmatch({"noon": "12:00 PM", "midnight": "12:00 AM"}.get(text.lower(), text))
    if match is None:
        return None
    hours, minutes, seconds = int(match[1] or match[5]), int(match[2] or 0), int(match[3] or 0)
    half = (match[4] or match[6] or "").lower()
    if minutes > 59 or seconds > 59 or hours > 24 or (half and not 1 <= hours <= 12):
        return None
    if half:
        hours = hours % 12 + (12 if half == "p" else 0)
    elif hours == 0 or hours > 12:
        half = "a" if hours < 12 else "p"
    return Clock(3600 * hours + 60 * minutes + seconds, half or None)


def _date(text: str) -> Date | None:
    for pattern in _DATES:
        match = pattern.fullmatch(text)
        if match is not None:
            groups = match.groupdict()
            name = groups.get("name")
            names = [index for index, month in enumerate(_MONTHS, 1) if name and month.startswith(name[:3].lower())]
            month = names[0] if names else int(groups["month"])
            day, year = int(groups["day"]), groups["year"]
            return Date(int(year) if year else None, month, day) if 1 <= month <= 12 and 1 <= day <= 31 else None
    return None


def _based(text: str) -> Based | None:
    if prefixed := _PREFIXED.fullmatch(text.strip()):
        sign, name, digits = prefixed.groups()
        base = {"b": 2, "o": 8, "x": 16}[name.lower()]
    elif match := _BASED.fullmatch(text.strip()):
        sign, digits, *names = match.groups()
        name = next(name for name in names if name)
        base = int(name) if name.isdecimal() else _BASES.get(name, 0)
    else:
        return None
    whole, _, decimals = digits.replace(" ", "").lower().partition(".")
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in whole + decimals):
        return None
    decimals = decimals.rstrip("0")
    return Based(f"{'-' * (sign.count('-') % 2)}{whole.lstrip('0') or '0'}{'.' if decimals else ''}{decimals}", base)


def _residue(text: str) -> Residue | None:
    match = _RESIDUE.fullmatch(text.strip())
    modulus = int(match[2] or match[3]) if match is not None else 0
    return Residue(int(match[1]) % modulus, modulus) if match is not None and modulus else None
