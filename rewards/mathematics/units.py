r"""Units of measure, currencies and magnitudes behind a number: `60 km/h`, `5 cm^2`, `$12.50`, `3 million`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit as a multiple of base units.

    Attributes:
        scale: How many base units it is: 1000 for `km`.
        dimension: Base units and their powers, sorted; metres per second are `(("m", 1), ("s", -1))`.
    """

    scale: Fraction
    dimension: tuple[tuple[str, int], ...]


_PREFIXES = {
    "Y": 24, "Z": 21, "E": 18, "P": 15, "T": 12, "G": 9, "M": 6, "k": 3, "h": 2, "d": -1, "c": -2, "m": -3, "u": -6,
    "\\mu": -6, "n": -9, "p": -12, "f": -15,
    "giga": 9, "mega": 6, "kilo": 3, "centi": -2, "milli": -3, "micro": -6, "nano": -9, "deci": -1,
}  # fmt: skip
_INCH = Fraction(254, 10_000)
_POUND = Fraction(45359237, 100_000)
_CUP = 231 * _INCH**3 / 16
_MM_OF_MERCURY = Fraction(101_325_000, 760)
_HORSEPOWER = _POUND * 550 * 12 * _INCH * Fraction(980_665, 10**5)
_Measures: TypeAlias = dict[str, tuple[Fraction, dict[str, int]]]


def _measures(by_dimension: dict[str, dict[str, Fraction | int]]) -> _Measures:
    """Return units by name, of a table by dimension (`g m2 s-2`): names with one meaning, and how many base units."""
    found: _Measures = {}
    for dimension, measures in by_dimension.items():
        powers = {base: int(power or 1) for base, power in re.findall(r"([^\s\d-]+)(-?\d+)?", dimension)}
        for names, scale in measures.items():
            found |= dict.fromkeys(names.split(), (Fraction(scale), powers))
    return found


# symbols that take a prefix
_METRIC = _measures({
    "m": {"m": 1, "pc": 30_856_775_814_913_673},
    "s": {"s": 1}, "g": {"g": 1}, "A": {"A": 1}, "K": {"K": 1}, "mol": {"mol": 1}, "lm": {"lm": 1},
    "g m s-2": {"N": 1000},
    "g m2 s-2": {"J": 1000, "eV": Fraction(1602176634, 10**25), "cal": 4184, "Wh": 3_600_000},
    "g m2 s-3": {"W": 1000},
    "g m-1 s-2": {"Pa": 1000, "bar": 10**8},
    "s-1": {"Hz": 1},
    "g m2 s-3 A-1": {"V": 1000},
    "A s": {"C": 1, "Ah": 3600},
    "g m2 s-3 A-2": {"\\Omega ohm": 1000},
    "g-1 m-2 s4 A2": {"F": Fraction(1, 1000)},
    "g s-2 A-1": {"T": 1000},
    "g m2 s-2 A-1": {"Wb": 1000},
    "g m2 s-2 A-2": {"H": 1000},
    "m3": {"L l": Fraction(1, 1000)},
    "mol m-3": {"M": 1000},
    "bit": {"B": 8}, "bit s-1": {"bps": 1},
    "lm m-2": {"lx": 1},
    # of one dimension with others, but not the same quantity
    "decay s-1": {"Bq": 1, "Ci": 37 * 10**9},
    "m2 s-2": {"Gy": 1}, "sievert": {"Sv": 1},
})  # fmt: skip
_METRIC_WORDS = {
    "meter": "m", "metre": "m", "second": "s", "gram": "g", "gramme": "g", "ampere": "A", "amp": "A", "kelvin": "K",
    "mole": "mol", "newton": "N", "joule": "J", "watt": "W", "pascal": "Pa", "hertz": "Hz", "volt": "V",
    "coulomb": "C", "farad": "F", "tesla": "T", "henry": "H", "liter": "L", "litre": "L", "calorie": "cal", "byte": "B",
}  # fmt: skip
# units and words without prefixes
_OTHER = _measures({
    "m": {
        "in inch inches": _INCH, "ft foot feet": 12 * _INCH, "yd yard": 36 * _INCH, "mi mile": 63360 * _INCH,
        "fathom": 72 * _INCH, "furlong": 7920 * _INCH, "nmi": 1852, "ly": 9_460_730_472_580_800, "AU": 149_597_870_700,
        "angstrom": Fraction(1, 10**10), "米": 1, "厘米": Fraction(1, 100), "千米 公里": 1000, "分米": Fraction(1, 10),
        "毫米": Fraction(1, 1000),
    },
    "m2": {
        "are": 100, "hectare ha": 10**4, "acre": 6272640 * _INCH**2, "平方米": 1, "平方厘米": Fraction(1, 10**4),
    },
    "m3": {
        "gallon gal": 231 * _INCH**3, "quart": 231 * _INCH**3 / 4, "pint": 231 * _INCH**3 / 8, "cup": _CUP,
        "floz": _CUP / 8, "tbsp tablespoon": _CUP / 16, "tsp teaspoon": _CUP / 48, "cc": Fraction(1, 10**6),
        "立方米": 1, "立方厘米": Fraction(1, 10**6), "升": Fraction(1, 1000), "毫升": Fraction(1, 10**6),
    },
    "g": {
        "lb lbs pound": _POUND, "oz ounce": _POUND / 16, "stone": 14 * _POUND, "carat": Fraction(1, 5),
        "ton tonne": 10**6, "千克 公斤": 1000, "克": 1, "吨": 10**6,
    },
    "s": {
        "sec secs 秒": 1, "min mins minute 分钟 分": 60, "h hr hour hrs 小时": 3600, "day 天": 86400, "week": 604800,
        "fortnight": 14 * 86400,
    },
    "month": {"month 月": 1, "year yr 年": 12, "decade": 120, "century centuries": 1200},
    "m s-1": {
        "mph": 63360 * _INCH / 3600, "kmh kph kmph": Fraction(1000, 3600), "knot": Fraction(1852, 3600),
    },
    "g m-1 s-2": {
        "psi": _POUND * Fraction(980_665, 10**5) / _INCH**2, "torr mmHg": _MM_OF_MERCURY, "atm": 101325000,
    },
    "g m2 s-2": {"BTU": Fraction(105_505_585_262, 10**5), "erg": Fraction(1, 10**4)},
    "g m s-2": {"dyn dyne": Fraction(1, 100)},
    "g m2 s-3": {"hp horsepower": _HORSEPOWER},
    "g s-2 A-1": {"gauss": Fraction(1, 10)},
    "bit": {
        "bit": 1, "kb": 10**3, "Mb": 10**6, "Gb": 10**9, "KB kB": 8 * 10**3, "MB": 8 * 10**6, "GB": 8 * 10**9,
        "KiB": 8 * 2**10, "MiB": 8 * 2**20, "GiB": 8 * 2**30, "TiB": 8 * 2**40,
    },
    "turn": {"rev revolution": 1}, "turn s-1": {"rpm": Fraction(1, 60)},
    "rad": {"rad radian": 1}, "degree": {"degree deg ^{\\circ} 度": 1}, "sr": {"sr steradian": 1},
    "celsius": {"^{\\circ}C celsius": 1}, "fahrenheit": {"^{\\circ}F fahrenheit": 1},
    "decibel": {"dB decibel": 1}, "ppb": {"ppm": 1000, "ppb": 1},
    "$": {"$ dollar USD usd buck": 1, "cent ¢ penny pennies": Fraction(1, 100)}, "nickel": {"nickel": 1},
    "dime": {"dime": 1}, "€": {"€ euro EUR": 1}, "£": {"£ GBP": 1, "pence": Fraction(1, 100)}, "peso": {"peso": 1},
    "franc": {"franc": 1}, "ruble": {"ruble rouble": 1}, "¥": {"¥ yuan RMB 元": 1}, "yen": {"yen": 1},
    "₹": {"₹ rupee Rs INR rs": 1},
})  # fmt: skip
_MAGNITUDES: dict[str, int | Fraction] = {
    "tens": 10, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12, "lakh": 10**5, "crore": 10**7, "万": 10**4, "亿": 10**8, "千": 10**3, "百": 10**2,
    # in the plural alone: "7 third graders"
    "halves": Fraction(1, 2), "thirds": Fraction(1, 3), "fifths": Fraction(1, 5), "sixths": Fraction(1, 6),
    "sevenths": Fraction(1, 7), "eighths": Fraction(1, 8), "ninths": Fraction(1, 9), "tenths": Fraction(1, 10),
    "twelfths": Fraction(1, 12), "hundredths": Fraction(1, 100), "thousandths": Fraction(1, 1000),
}  # fmt: skip
_LONG_NAMES = (
    (re.compile(r"\bnautical\s+miles?\b", re.IGNORECASE), "nmi"),
    (re.compile(r"\b(?:fl\.?|fluid)\s*(?:oz\b|ounces?\b)", re.IGNORECASE), "floz"),
    (re.compile(r"\blight[-\s]years?\b", re.IGNORECASE), "ly"),
    (re.compile(r"\bmetric\s+(?=tons?\b)", re.IGNORECASE), ""),
)
_PART = re.compile(
    r"\s*(\*|\\cdot|\\times|/|\bper\b)?\s*(?:(square|sq|cubic|cu)\.?\s*)?((?:\\(?:Omega|mu)\s*)?\^\{\\circ\}\s?[CF]?|[kMG]?\\(?:Omega|mu)\s*[A-Za-z]*|[A-Za-z]+|[$€£¥₹¢]|[\u4e00-\u9fff]+)"
    r"\.?\s*(?:\^\s*\{?\s*(-?\d)\s*\}?|\b(squared|cubed)\b|(?<=[a-z])([23])(?!\d))?"
)


@lru_cache(maxsize=4096)
def parse_unit(text: str) -> Unit | None:
    """Return the unit that `text` is; None if it is none.

    >>> parse_unit("km/h") == parse_unit("kilometers per hour") == parse_unit("km h^{-1}")
    True
    >>> parse_unit("books") is None
    True
    """
    scale = Fraction(1)
    dimension: dict[str, int] = {}
    for long, short in _LONG_NAMES:
        text = long.sub(short, text)
    # J/(mol·K) is J/mol/K
    text = re.sub(r"/\s*\(([^()]*)\)", lambda match: "/" + re.sub(r"\*|\\cdot\s|\\times\s", "/", match[1]), text)
    text = re.sub(r"([kMGm])\s+\\Omega", r"\1\\Omega", re.sub(r"[()]", "", text)).strip().rstrip(".")
    at = 0
    inverse = False
    while at < len(text):
        match = _PART.match(text, at)
        if match is None or match.end() == at:
            return None
        operator, shape, name, power, word, digit = match.groups()
        known = _named(re.sub(r"\s", "", name))
        if known is None:
            return None
        exponent = int(power or digit or {"squared": 2, "cubed": 3}.get(word or "", 1))
        exponent *= {"square": 2, "sq": 2, "cubic": 3, "cu": 3}.get(shape or "", 1)
        inverse = operator in ("/", "per") or (inverse and operator is None)
        exponent = -exponent if inverse else exponent
        scale *= known[0] ** exponent
        for base, times in known[1].items():
            dimension[base] = dimension.get(base, 0) + times * exponent
        at = match.end()
    return Unit(scale, tuple(sorted((base, times) for base, times in dimension.items() if times))) if at else None


def magnitude(word: str) -> int | Fraction | None:
    """Return the factor that a word or sign behind a number is (million, dozens, 万, tenths); None if it is none.

    An answer may not leave it out.
    """
    word = word.lower()
    return _MAGNITUDES.get(word) or _MAGNITUDES.get(word.removesuffix("s"))


def leading_unit(words: str) -> Unit | None:
    """Return the unit that a phrase begins with: years for `years old`; None if it begins with none."""
    parts = words.split()
    for count in range(min(len(parts), 5), 0, -1):
        if (count > 1 or len(parts) == 1 or len(parts[0]) > 2) and (
            unit := parse_unit(" ".join(parts[:count]))
        ) is not None:
            return unit
    return None


def _named(name: str) -> tuple[Fraction, dict[str, int]] | None:
    for one in (name, name.rstrip("s") if len(name) > 2 else name, name.lower(), name.lower().rstrip("s")):
        if one in _OTHER:
            return _OTHER[one]
    if name in _METRIC:
        return _METRIC[name]
    for prefix, power in _PREFIXES.items():
        rest = name[len(prefix) :] if name.startswith(prefix) else None
        if rest in _METRIC and (rest not in ("bar", "cal", "M", "C") or len(prefix) == 1) and rest != "M":
            return Fraction(10) ** power * _METRIC[rest][0], _METRIC[rest][1]
    word = name.lower()
    for prefix, power in (
        ("", 0),
        *((one, power) for one, power in _PREFIXES.items() if len(one) > 3 and one.isalpha()),
    ):
        singular = word.removeprefix(prefix).removesuffix("s")
        symbol = _METRIC_WORDS.get(singular) if word.startswith(prefix) else None
        if symbol is not None:
            return Fraction(10) ** power * _METRIC[symbol][0], _METRIC[symbol][1]
    return None
