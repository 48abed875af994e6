"""What a value that is none of those expected may mean, and how YAML writes that."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import yaml

#: What some write for "nothing". Where text is expected too, it is taken for that.
NOTHING = ("None", "none", "NONE")

_DIGITS = r"[-+]?\d+(?:\.\d+)?"
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:[, '_]\d{3})+(?:\.\d+)?")
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_PERCENT = re.compile(rf"({_DIGITS})\s*%")
_POWER = re.compile(rf"(?:({_DIGITS})\s*[*x×·]\s*)?10\s*(?:\^|\*\*)\s*\(?([-+]?\d+)\)?")
_SCALED = re.compile(rf"({_DIGITS})\s*([kKmMbB])")
_WITH_UNIT = re.compile(rf"({_DIGITS}(?:[eE][-+]?\d+)?)\s*[^\W\d_]+")
_SCALES = {"k": 1e3, "m": 1e6, "b": 1e9}
#: How people write numbers, and what each is.
_SPELLINGS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], float]], ...] = (
    (_PERCENT, lambda match: float(match[1]) / 100),
    (_THOUSANDS, lambda match: float(re.sub(r"[, '_]", "", match[0]))),
    (_DECIMAL_COMMA, lambda match: float(match[0].replace(",", "."))),
    (_POWER, lambda match: float(f"{match[1] or 1}e{match[2]}")),
    (_SCALED, lambda match: float(match[1]) * _SCALES[match[2].lower()]),
)


def meant_number(text: str) -> str | None:
    """Return how YAML writes the number that a text means; None where it means none.

    >>> [meant_number(text) for text in ("80%", "1,000", "0,5", "10k", "2*10^-5", "1GB", "many")]
    ['0.8', '1000', '0.5', '10000', '2e-05', '1', None]
    """
    text = text.strip()
    for pattern, value in _SPELLINGS:
        if match := pattern.fullmatch(text):
            return _written(value(match))
    match = _WITH_UNIT.fullmatch(text)
    return match[1] if match else None


def _written(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"


def as_list(text: str) -> str:
    """Return a text as YAML's list of what stands between its commas.

    >>> as_list("tensorboard, mlflow"), as_list("(0.9, 0.95)"), as_list("###")
    ('[tensorboard, mlflow]', '[0.9, 0.95]', "['###']")
    """
    inner = text.strip()
    if len(inner) > 1 and inner[0] + inner[-1] in ("()", "[]", "{}"):
        inner = inner[1:-1]
    parts = [part.strip().strip("'\"") for part in inner.split(",")]
    return f"[{', '.join(_as_item(part) for part in parts if part)}]"


def _as_item(text: str) -> str:
    try:
        plain = yaml.safe_load(f"[{text}]") in ([text], [meant := yaml.safe_load(text)]) and not isinstance(meant, dict)
    except yaml.YAMLError:
        plain = False
    return text if plain else "'" + text.replace("'", "''") + "'"


def listed(words: Sequence[str], last: str = "or") -> str:
    """Return words as a sentence lists them: `a, b or c`."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)
