r"""What a text is, mathematically: a value, several values, a set of numbers, a relation, a matrix, or special.

`parse_answer` returns every reading that the notation allows: `(1, 3)` is a pair and an interval, `12 m` a length and a
product. Two answers are the same if they are so in one reading of each. A reference answer has fewer: `1,234` is a
number there, while in a response it may also be a list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import sympy
from sympy import Expr, Rational

from roll_like.builtin.rewards.mathematics.kinds import Named, Numbers, Proportion, Reading, Several, Table, Value
from roll_like.builtin.rewards.mathematics.quantities import compound, expression, expressions, number, with_unit
from roll_like.builtin.rewards.mathematics.relations import as_numbers, related
from roll_like.builtin.rewards.mathematics.scanner import MAX_LENGTH, UnreadableError
from roll_like.builtin.rewards.mathematics.special import (
    Clock,
    Phrase,
    Special,
    Word,
    fold_words,
    read_choice,
    read_ratio,
    read_special,
)
from roll_like.builtin.rewards.mathematics.text import bracketed, split_top, strip_label, tidy

MAX_ITEMS = 64
MAX_NESTING = 25
MAX_INTERVALS = 12

_JOINTS = re.compile(
    r",?\s*\\text\{\s*,?\s*(?:and|or|和|或|以及)\s*\}\s*|,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*|和|或|以及"
    r"|(?:(?<!\d),|,(?!\d{3}(?!\d))|;)\s*"
)
_COMMAS = re.compile(r"[,;]")
_SET_OPERATORS = re.compile(r"\\(cup|cap|setminus)(?![A-Za-z])")
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array|smallmatrix)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)
_CASES = re.compile(r"\\begin\{cases\}([^&]*)\\end\{cases\}", re.DOTALL)
_SET_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:)\s*(.*)\\\}", re.DOTALL)
_MEMBERSHIP = re.compile(
    r"(?:\\text\{[^{}]*\}\s*)?(?:for\s+)?[a-zA-Z](?:\s*,\s*[a-z])*\s*\\in\s*\\mathbb\{[ZNQRC]\}.*"
    r"|\\text\{\s*(?:where|for|with)\b.*",
    re.DOTALL,
)
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+|-?\d{1,2}(?:,\d{2})+,\d{3}")
_DECIMAL_COMMA = re.compile(r"-?\d{1,3}(?:\.\d{3})+,\d+")
_FLOAT_OR_E = re.compile(r"-?\d+e[-+]\d")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_REALS = ("all real numbers", "all reals", "real numbers", "all real values", "全体实数")
_EMPTY = Phrase("empty")


def parse_answer(text: str, *, reference: bool = False) -> list[Reading]:
    r"""Return the readings of an answer, the likeliest first.

    Args:
        text: An answer alone: what a box holds, what follows "the answer is", or a row's reference answer.
        reference: It is a reference answer: only the likeliest reading of ambiguous thousands.

    Raises:
        UnreadableError: It has none.
    """
    plain = strip_label(tidy(text)).strip(" ,;")
    if not plain:
        raise UnreadableError("empty")
    if len(plain) > MAX_LENGTH:
        raise UnreadableError(f"longer than {MAX_LENGTH} characters")
    if _depth(plain) > MAX_NESTING:
        raise UnreadableError(f"brackets nested deeper than {MAX_NESTING}")
    if reference and _DECIMAL_COMMA.fullmatch(plain):
        raise UnreadableError("a decimal comma; write a point")
    return _readings(plain, reference=reference)


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _part(text: str) -> list[Reading]:
    """Return the readings of a part of an answer."""
    text = text.strip(" ,;")
    if not text:
        raise UnreadableError("an empty part")
    return _readings(text)


def _readings(text: str, *, reference: bool = False) -> list[Reading]:
    special = read_special(text)
    if special is not None:
        return _special(special, text, reference=reference)
    whole = number(text)
    if whole is not None:
        return _number(whole, text, reference=reference)
    ratio = read_ratio(text)
    if ratio is not None:
        return [ratio]
    choice = read_choice(text)
    if choice is not None and len(text.strip("() .")) > 1 and not bracketed(text):
        return [choice]
    found: list[Reading] = [] if choice is None else [choice]
    words = _words(text)
    try:
        found = found + _structured(text)
    except UnreadableError:
        if not found and words is None:
            raise
        return found or [words] if words is not None else found
    # `no` may be a word or a product
    bare = _TEXT.sub(r"\1", text)
    return [*found, words] if words is not None and bare.isalpha() and len(bare) > 1 else found


def _special(special: Special, text: str, *, reference: bool) -> list[Reading]:
    ratio = read_ratio(text) if isinstance(special, Clock) else None
    if ratio is None or ":0" in text:
        return [special]
    # a reference 10:30 is no ratio 1:3, since a ratio would be in lowest terms
    fixed = not all(ratio.written) or (reference and ratio.terms != ratio.written)
    return [special, replace(ratio, terms=ratio.written) if fixed else ratio]


def _number(whole: Value, text: str, *, reference: bool) -> list[Reading]:
    """Return the readings of a number: of `1,234` also as a list, of `2e-1` also as 2·e - 1."""
    found: list[Reading] = [whole]
    if not reference and _THOUSANDS.fullmatch(text):
        found.append(Several(tuple(Value(Rational(part)) for part in text.split(",")), "list"))
    if _FLOAT_OR_E.fullmatch(text):
        found.append(expression(text.replace("e", " e ")))
    return found


def _words(text: str) -> Word | None:
    folded = fold_words(text)
    commands = "\\" in _TEXT.sub("", text)
    return Word(folded) if re.search(r"[^\W\d_]{2,}", folded) and not commands else None


def _structured(text: str) -> list[Reading]:
    """Return the readings of a text that is no plain number and nothing special."""
    attempts = (
        _builder,
        _set_operation,
        _joined,
        _related,
        _environment,
        _enclosed,
        _plus_minus,
        _proportion,
        with_unit,
    )
    for attempt in attempts:
        found = attempt(text)
        if found:
            return list(found)
    return list(expressions(text))


def _related(text: str) -> list[Reading]:
    return related(text, _part)


# sets and intervals


def _builder(text: str) -> list[Reading]:
    match = _SET_BUILDER.fullmatch(text)
    return [] if match is None else _part(match[2])


def _set_operation(text: str) -> list[Reading]:
    if text in ("\\mathbb{R}", "R") or fold_words(text) in _REALS:
        return [Numbers(sympy.S.Reals)]
    parts = split_top(text, _SET_OPERATORS)
    if len(parts) > MAX_INTERVALS:
        raise UnreadableError("too many intervals")
    if len(parts) < 2:
        return []
    operators = set(_SET_OPERATORS.findall(text))
    first, *others = map(_set, parts)
    if operators == {"cup"}:
        return [Numbers(sympy.Union(first, *others))]
    if operators == {"cap"}:
        return [Numbers(sympy.Intersection(first, *others))]
    if operators == {"setminus"}:
        return [Numbers(sympy.Complement(first, sympy.Union(*others)))]
    raise UnreadableError("several operators of sets")


def _set(text: str) -> sympy.Set:
    for reading in _part(text):
        if isinstance(reading, Numbers):
            return reading.numbers
        if isinstance(reading, Several) and reading.kind != "tuple":
            values = [item.expr for item in reading.items if isinstance(item, Value)]
            if len(values) == len(reading.items):
                return sympy.FiniteSet(*values)
        if reading == _EMPTY:
            return sympy.S.EmptySet
    raise UnreadableError(f"{text!r} is no set of numbers")


# lists


def _joined(text: str) -> list[Reading]:
    """Return the reading of several parts: `1, 2`, `x = 1 or x = 2`, `x > 1 and x < 3`."""
    parts = [part for part in split_top(text, _JOINTS) if part.strip()]
    if len(parts) < 2:
        return []
    kept = [part for part in parts if not _MEMBERSHIP.fullmatch(part.strip())]
    if len(kept) == 1:
        return _part(kept[0])
    if len(kept) > MAX_ITEMS or any("\\ldots" in part or "..." in part for part in kept):
        raise UnreadableError("a list with dots, or of too many items")
    quantity = compound(_TEXT.sub(r" \1 ", text))
    if quantity is not None:
        return [quantity]
    items = [_part(part)[0] for part in kept]
    if any(isinstance(item, Word) for item in items):
        raise UnreadableError("words in a list")
    return [_combined(items, either=re.search(r"\bor\b|或", text) is not None)]


def _combined(items: list[Reading], *, either: bool) -> Reading:
    ranges = [item for item in items if isinstance(item, Numbers) and item.variable]
    if ranges:
        variable = ranges[0].variable
        sets = [item for item in (as_numbers(item, variable) for item in items) if isinstance(item, Numbers)]
        if len(sets) == len(items) and all(item.variable == variable for item in sets):
            both = sympy.Intersection(*(item.numbers for item in sets))
            all_of_them = sympy.Union(*(item.numbers for item in sets))
            return Numbers(all_of_them if either or both is sympy.S.EmptySet else both, variable)
    pairs = [pair for item in items if isinstance(item, Named) for pair in item.items]
    if len(pairs) == len(items):
        names = [name for name, _ in pairs]
        if len({name.partition("_")[0] for name in names}) > 1 and len(set(names)) == len(names):
            return Named(tuple(pairs))
        return _list([value for _, value in pairs])
    first, last = items[0], items[-1]
    if isinstance(first, Named) and len(pairs) == 1:
        return _list([first.items[0][1], *items[1:]])  # x = 1, 2
    if isinstance(last, Value) and all(isinstance(item, Value) and item.unit is None for item in items[:-1]):
        # 5 and 7 cm
        return _list([replace(item, unit=last.unit) if isinstance(item, Value) else item for item in items])
    return _list(items)


def _list(items: Sequence[Reading]) -> Several:
    r"""Return a list of items, with those of inner lists (`\pm 2` beside `0`) among them."""
    inner = [item.items if isinstance(item, Several) and item.kind == "list" else (item,) for item in items]
    return Several(tuple(one for part in inner for one in part), "list")


# brackets


def _environment(text: str) -> list[Reading]:
    """Return the readings of matrices and of systems of equations."""
    matrix = _MATRIX.fullmatch(text) or _MATRIX.fullmatch(text.strip("()[] "))
    if matrix is not None:
        return [_table(matrix[2])]
    cases = _CASES.fullmatch(text)
    return [] if cases is None else _part(re.sub(r"\s*\\\\\s*", ", ", cases[1]))


def _enclosed(text: str) -> list[Reading]:
    """Return the readings of what stands in brackets: tuples, intervals, sets."""
    enclosed = bracketed(text)
    if enclosed is None:
        return []
    opening, inner, end = enclosed
    parts = [part.strip() for part in split_top(inner, _COMMAS) if part.strip()]
    if len(parts) > MAX_ITEMS or "\\ldots" in inner:
        raise UnreadableError("dots, or too many items")
    if opening == "\\{":
        return [_braced(inner, parts)]
    if len(parts) > 1:
        return _tuple(opening, tuple(_part(part)[0] for part in parts), end)
    if opening + end == "[]" and parts:
        return [Several((_part(parts[0])[0],), "list")]
    return _part(parts[0]) if opening + end == "()" and parts else []


def _braced(inner: str, parts: list[str]) -> Reading:
    if not parts:
        return _EMPTY
    if _THOUSANDS.fullmatch(inner):
        inner = ", ".join(parts)
    listed = _part(inner)[0]
    return Several(listed.items if isinstance(listed, Several) and listed.kind == "list" else (listed,), "set")


def _tuple(opening: str, items: tuple[Reading, ...], end: str) -> list[Reading]:
    low, high = items[0], items[-1]
    interval: list[Reading] = []
    if len(items) == 2 and opening != "\\langle" and isinstance(low, Value) and isinstance(high, Value):
        interval = _interval(low.expr, high.expr, opening, end)
    if opening + end in ("(]", "[)"):
        return interval
    if opening == "[":
        # [1, 3] is an interval or a list in Python's notation, and no point (1, 3)
        lists: list[Reading] = [Several(items, "tuple"), Several(items, "list")]
        return [*interval, Several(items, "row")] if interval else lists
    return [Several(items, "tuple"), *interval]


def _interval(low: Expr, high: Expr, opening: str, end: str) -> list[Reading]:
    if any(bound.is_extended_real is False for bound in (low, high)) or (high - low).is_negative:
        return []
    return [Numbers(sympy.Interval(low, high, opening == "(", end == ")"))]


def _table(text: str) -> Table:
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr(?![a-z])", text.replace("\\hline", "")) if row.strip()]
    return Table(tuple(tuple(_part(cell)[0] for cell in row.split("&")) for row in rows))


# values


def _plus_minus(text: str) -> list[Reading]:
    text = text.replace("+/-", "\\pm ")
    if "\\pm" not in text and "\\mp" not in text:
        return []
    upper = text.replace("\\pm", "+").replace("\\mp", "-")
    lower = text.replace("\\pm", "-").replace("\\mp", "+")
    return [Several((_part(upper)[0], _part(lower)[0]), "list")]


def _proportion(text: str) -> list[Reading]:
    parts = split_top(text, re.compile(":"))
    if not 2 <= len(parts) <= 4:
        return []
    *terms, last = (expression(part).expr for part in parts)
    return [Proportion(tuple(Value(term / last) for term in terms))]
