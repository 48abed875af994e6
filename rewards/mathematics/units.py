r"""Units of measure, currencies and magnitudes behind a number: `60 km/h`, `5 cm^2`, `$12.50`, `3 million`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache


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
# symbols that take a prefix: scale, dimension
_METRIC: dict[str, tuple[Fraction | int, dict[str, int]]] = {
    "m": (1, {"m": 1}),
    "s": (1, {"s": 1}),
    "g": (1, {"g": 1}),
    "A": (1, {"A": 1}),
    "K": (1, {"K": 1}),
    "mol": (1, {"mol": 1}),
    "N": (1000, {"g": 1, "m": 1, "s": -2}),
    "J": (1000, {"g": 1, "m": 2, "s": -2}),
    "W": (1000, {"g": 1, "m": 2, "s": -3}),
    "Pa": (1000, {"g": 1, "m": -1, "s": -2}),
    "Hz": (1, {"s": -1}),
    "V": (1000, {"g": 1, "m": 2, "s": -3, "A": -1}),
    "C": (1, {"A": 1, "s": 1}),
    "\\Omega": (1000, {"g": 1, "m": 2, "s": -3, "A": -2}),
    "ohm": (1000, {"g": 1, "m": 2, "s": -3, "A": -2}),
    "F": (Fraction(1, 1000), {"g": -1, "m": -2, "s": 4, "A": 2}),
    "T": (1000, {"g": 1, "s": -2, "A": -1}),
    "Wb": (1000, {"g": 1, "m": 2, "s": -2, "A": -1}),
    "H": (1000, {"g": 1, "m": 2, "s": -2, "A": -2}),
    "L": (Fraction(1, 1000), {"m": 3}),
    "l": (Fraction(1, 1000), {"m": 3}),
    "eV": (Fraction(1602176634, 10**25), {"g": 1, "m": 2, "s": -2}),
    "cal": (4184, {"g": 1, "m": 2, "s": -2}),
    "bar": (10**8, {"g": 1, "m": -1, "s": -2}),
    "M": (1000, {"mol": 1, "m": -3}),
    "B": (8, {"bit": 1}),
    "Wh": (3_600_000, {"g": 1, "m": 2, "s": -2}),
    "Ah": (3600, {"A": 1, "s": 1}),
    "lm": (1, {"lm": 1}),
    "lx": (1, {"lm": 1, "m": -2}),
    # of one dimension with others, but not the same quantity
    "Bq": (1, {"decay": 1, "s": -1}),
    "Ci": (37 * 10**9, {"decay": 1, "s": -1}),
    "Gy": (1, {"m": 2, "s": -2}),
    "Sv": (1, {"sievert": 1}),
    "pc": (30_856_775_814_913_673, {"m": 1}),
    "bps": (1, {"bit": 1, "s": -1}),
}
_METRIC_WORDS = {
    "meter": "m",
    "metre": "m",
    "second": "s",
    "gram": "g",
    "gramme": "g",
    "ampere": "A",
    "amp": "A",
    "kelvin": "K",
    "mole": "mol",
    "newton": "N",
    "joule": "J",
    "watt": "W",
    "pascal": "Pa",
    "hertz": "Hz",
    "volt": "V",
    "coulomb": "C",
    "farad": "F",
    "tesla": "T",
    "henry": "H",
    "liter": "L",
    "litre": "L",
    "calorie": "cal",
    "byte": "B",
}
_INCH = Fraction(254, 10_000)
_POUND = Fraction(45359237, 100_000)
_CUP = 231 * _INCH**3 / 16
_MM_OF_MERCURY = Fraction(101_325_000, 760)
# units and words without prefixes
_OTHER: dict[str, tuple[Fraction | int, dict[str, int]]] = {
    "in": (_INCH, {"m": 1}),
    "inch": (_INCH, {"m": 1}),
    "inches": (_INCH, {"m": 1}),
    "ft": (12 * _INCH, {"m": 1}),
    "foot": (12 * _INCH, {"m": 1}),
    "feet": (12 * _INCH, {"m": 1}),
    "yd": (36 * _INCH, {"m": 1}),
    "yard": (36 * _INCH, {"m": 1}),
    "mi": (63360 * _INCH, {"m": 1}),
    "mile": (63360 * _INCH, {"m": 1}),
    "lb": (_POUND, {"g": 1}),
    "lbs": (_POUND, {"g": 1}),
    "pound": (_POUND, {"g": 1}),
    "oz": (_POUND / 16, {"g": 1}),
    "ounce": (_POUND / 16, {"g": 1}),
    "ton": (10**6, {"g": 1}),
    "tonne": (10**6, {"g": 1}),
    "min": (60, {"s": 1}),
    "mins": (60, {"s": 1}),
    "minute": (60, {"s": 1}),
    "h": (3600, {"s": 1}),
    "hr": (3600, {"s": 1}),
    "hour": (3600, {"s": 1}),
    "hrs": (3600, {"s": 1}),
    "sec": (1, {"s": 1}),
    "secs": (1, {"s": 1}),
    "day": (86400, {"s": 1}),
    "week": (604800, {"s": 1}),
    "month": (1, {"month": 1}),
    "year": (12, {"month": 1}),
    "yr": (12, {"month": 1}),
    "decade": (120, {"month": 1}),
    "century": (1200, {"month": 1}),
    "centuries": (1200, {"month": 1}),
    "are": (100, {"m": 2}),
    "hectare": (10**4, {"m": 2}),
    "ha": (10**4, {"m": 2}),
    "acre": (6272640 * _INCH**2, {"m": 2}),
    "gallon": (231 * _INCH**3, {"m": 3}),
    "gal": (231 * _INCH**3, {"m": 3}),
    "quart": (231 * _INCH**3 / 4, {"m": 3}),
    "pint": (231 * _INCH**3 / 8, {"m": 3}),
    "cc": (Fraction(1, 10**6), {"m": 3}),
    "cup": (_CUP, {"m": 3}),
    "tbsp": (_CUP / 16, {"m": 3}),
    "tablespoon": (_CUP / 16, {"m": 3}),
    "tsp": (_CUP / 48, {"m": 3}),
    "teaspoon": (_CUP / 48, {"m": 3}),
    "floz": (_CUP / 8, {"m": 3}),
    "stone": (14 * _POUND, {"g": 1}),
    "carat": (Fraction(1, 5), {"g": 1}),
    "fathom": (72 * _INCH, {"m": 1}),
    "furlong": (7920 * _INCH, {"m": 1}),
    "nmi": (1852, {"m": 1}),
    "knot": (Fraction(1852, 3600), {"m": 1, "s": -1}),
    "ly": (9_460_730_472_580_800, {"m": 1}),
    "AU": (149_597_870_700, {"m": 1}),
    "angstrom": (Fraction(1, 10**10), {"m": 1}),
    "fortnight": (14 * 86400, {"s": 1}),
    "psi": (_POUND * Fraction(980_665, 10**5) / _INCH**2, {"g": 1, "m": -1, "s": -2}),
    "torr": (_MM_OF_MERCURY, {"g": 1, "m": -1, "s": -2}),
    "mmHg": (_MM_OF_MERCURY, {"g": 1, "m": -1, "s": -2}),
    "BTU": (Fraction(105_505_585_262, 10**5), {"g": 1, "m": 2, "s": -2}),
    "erg": (Fraction(1, 10**4), {"g": 1, "m": 2, "s": -2}),
    "dyn": (Fraction(1, 100), {"g": 1, "m": 1, "s": -2}),
    "dyne": (Fraction(1, 100), {"g": 1, "m": 1, "s": -2}),
    "hp": (_POUND * 550 * 12 * _INCH * Fraction(980_665, 10**5), {"g": 1, "m": 2, "s": -3}),
    "horsepower": (_POUND * 550 * 12 * _INCH * Fraction(980_665, 10**5), {"g": 1, "m": 2, "s": -3}),
    "gauss": (Fraction(1, 10), {"g": 1, "s": -2, "A": -1}),
    "sr": (1, {"sr": 1}),
    "steradian": (1, {"sr": 1}),
    "dB": (1, {"decibel": 1}),
    "decibel": (1, {"decibel": 1}),
    "ppm": (1000, {"ppb": 1}),
    "ppb": (1, {"ppb": 1}),
    **{f"{prefix}B": (8 * 10**power, {"bit": 1}) for prefix, power in (("K", 3), ("k", 3), ("M", 6), ("G", 9))},
    **{f"{prefix}b": (10**power, {"bit": 1}) for prefix, power in (("k", 3), ("M", 6), ("G", 9))},
    **{f"{prefix}iB": (8 * 2**power, {"bit": 1}) for prefix, power in (("K", 10), ("M", 20), ("G", 30), ("T", 40))},
    "atm": (101325000, {"g": 1, "m": -1, "s": -2}),
    "mph": (63360 * _INCH / 3600, {"m": 1, "s": -1}),
    "kmh": (Fraction(1000, 3600), {"m": 1, "s": -1}),
    "kph": (Fraction(1000, 3600), {"m": 1, "s": -1}),
    "kmph": (Fraction(1000, 3600), {"m": 1, "s": -1}),
    "rpm": (Fraction(1, 60), {"turn": 1, "s": -1}),
    "rev": (1, {"turn": 1}),
    "revolution": (1, {"turn": 1}),
    "rad": (1, {"rad": 1}),
    "radian": (1, {"rad": 1}),
    "degree": (1, {"degree": 1}),
    "deg": (1, {"degree": 1}),
    "^{\\circ}": (1, {"degree": 1}),
    "$": (1, {"$": 1}),
    "dollar": (1, {"$": 1}),
    "USD": (1, {"$": 1}),
    "usd": (1, {"$": 1}),
    "buck": (1, {"$": 1}),
    "cent": (Fraction(1, 100), {"$": 1}),
    "¢": (Fraction(1, 100), {"$": 1}),
    "nickel": (1, {"nickel": 1}),
    "dime": (1, {"dime": 1}),
    "penny": (Fraction(1, 100), {"$": 1}),
    "pennies": (Fraction(1, 100), {"$": 1}),
    "€": (1, {"€": 1}),
    "euro": (1, {"€": 1}),
    "EUR": (1, {"€": 1}),
    "£": (1, {"£": 1}),
    "GBP": (1, {"£": 1}),
    "pence": (Fraction(1, 100), {"£": 1}),
    "peso": (1, {"peso": 1}),
    "franc": (1, {"franc": 1}),
    "ruble": (1, {"ruble": 1}),
    "rouble": (1, {"ruble": 1}),
    "¥": (1, {"¥": 1}),
    "yuan": (1, {"¥": 1}),
    "RMB": (1, {"¥": 1}),
    "yen": (1, {"yen": 1}),
    "₹": (1, {"₹": 1}),
    "rupee": (1, {"₹": 1}),
    "Rs": (1, {"₹": 1}),
    "INR": (1, {"₹": 1}),
    "rs": (1, {"₹": 1}),
    "元": (1, {"¥": 1}),
    "米": (1, {"m": 1}),
    "厘米": (Fraction(1, 100), {"m": 1}),
    "千米": (1000, {"m": 1}),
    "公里": (1000, {"m": 1}),
    "分米": (Fraction(1, 10), {"m": 1}),
    "毫米": (Fraction(1, 1000), {"m": 1}),
    "平方米": (1, {"m": 2}),
    "平方厘米": (Fraction(1, 10**4), {"m": 2}),
    "立方米": (1, {"m": 3}),
    "立方厘米": (Fraction(1, 10**6), {"m": 3}),
    "千克": (1000, {"g": 1}),
    "公斤": (1000, {"g": 1}),
    "克": (1, {"g": 1}),
    "吨": (10**6, {"g": 1}),
    "升": (Fraction(1, 1000), {"m": 3}),
    "毫升": (Fraction(1, 10**6), {"m": 3}),
    "小时": (3600, {"s": 1}),
    "分钟": (60, {"s": 1}),
    "分": (60, {"s": 1}),
    "秒": (1, {"s": 1}),
    "天": (86400, {"s": 1}),
    "年": (12, {"month": 1}),
    "月": (1, {"month": 1}),
    "度": (1, {"degree": 1}),
    "bit": (1, {"bit": 1}),
    "^{\\circ}C": (1, {"celsius": 1}),
    "^{\\circ}F": (1, {"fahrenheit": 1}),
    "celsius": (1, {"celsius": 1}),
    "fahrenheit": (1, {"fahrenheit": 1}),
}
_MAGNITUDES: dict[str, int | Fraction] = {
    "tens": 10,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
    "lakh": 10**5,
    "crore": 10**7,
    "万": 10**4,
    "亿": 10**8,
    "千": 10**3,
    "百": 10**2,
    # in the plural alone: "7 third graders"
    "halves": Fraction(1, 2),
    "thirds": Fraction(1, 3),
    "fifths": Fraction(1, 5),
    "sixths": Fraction(1, 6),
    "sevenths": Fraction(1, 7),
    "eighths": Fraction(1, 8),
    "ninths": Fraction(1, 9),
    "tenths": Fraction(1, 10),
    "twelfths": Fraction(1, 12),
    "hundredths": Fraction(1, 100),
    "thousandths": Fraction(1, 1000),
}
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
        found = _OTHER.get(one)
        if found is not None:
            return Fraction(found[0]), found[1]
    if name in _METRIC:
        return Fraction(_METRIC[name][0]), _METRIC[name][1]
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


__all__ = ["Unit", "leading_unit", "magnitude", "parse_unit"]
