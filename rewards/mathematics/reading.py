r"""What a text is, mathematically: a value, several values, a set of numbers, a relation, a matrix, or something special.

`read` returns every reading that the notation allows: `(1, 3)` is a pair and an interval, `12 m` a length and a
product. Two answers are the same if they are so in one reading of each. A reference answer has fewer: `1,234` is a
number there, while in a response it may also be a list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import sympy
from sympy import Expr, Rational, Symbol

from roll_like.builtin.rewards.mathematics.expression import ExpressionParser, UnreadableError
from roll_like.builtin.rewards.mathematics.special import (
    Clock,
    Phrase,
    Residue,
    Special,
    Word,
    fold_words,
    read_choice,
    read_ratio,
    read_special,
)
from roll_like.builtin.rewards.mathematics.text import closing, strip_label, tidy
from roll_like.builtin.rewards.mathematics.units import MAGNITUDES, Unit, leading_unit, parse_unit
from roll_like.data.numbers import parse_number

MAX_LENGTH = 2_000
MAX_ITEMS = 64
MAX_NESTING = 25
MAX_INTERVALS = 12


@dataclass(frozen=True, slots=True)
class Value:
    """A number or an expression.

    Attributes:
        expr: Its value; of `50%` 1/2, of `5 cm` 5.
        step: Of a decimal one unit in its last place, else None.
        percent: It has a percent sign.
        unit: Its unit, if it has one.
        glued: Its unit is a letter without a blank before it (`12m`), which could be a variable.
        decimals: It is an expression with decimals in it.
    """

    expr: Expr
    step: Fraction | None = None
    percent: bool = False
    unit: Unit | None = None
    glued: bool = False
    decimals: bool = False


@dataclass(frozen=True, slots=True)
class Several:
    """Values in a `list` (`1, 2`: in no order), `set` (`{1, 2}`) or `tuple` (`(1, 2)`: in this order)."""

    items: tuple[Reading, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Named:
    """Values of variables: `x = 1, y = 2`. A single one is an equation `x = 5` or `y = 2x + 1`."""

    items: tuple[tuple[str, Reading], ...]


@dataclass(frozen=True, slots=True)
class Numbers:
    """A set of real numbers: intervals, unions, inequalities in one variable."""

    numbers: sympy.Set
    variable: str | None = None


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation or inequality `left operator right`; operators are `=`, `!=`, `<`, `<=` (`>` is turned round)."""

    left: Expr
    operator: str
    right: Expr


@dataclass(frozen=True, slots=True)
class Table:
    """A matrix or vector, by rows."""

    rows: tuple[tuple[Reading, ...], ...]


@dataclass(frozen=True, slots=True)
class Proportion:
    r"""A ratio with roots or letters in it: `1:\sqrt{3}`, as the quotients of each term but the last by the last."""

    terms: tuple[Value, ...]


Reading = Value | Several | Named | Numbers | Relation | Table | Proportion | Special

_OPERATORS = re.compile(r"<=|>=|=<|=>|!=|<|>|==?|\\(?:le|ge|ne|approx|equiv|in)(?![A-Za-z])")
_TURNED = {">": "<", ">=": "<="}
_SAME = {"\\le": "<=", "=<": "<=", "\\ge": ">=", "=>": ">=", "\\ne": "!=", "==": "="}
_JOINTS = re.compile(
    r",?\s*\\text\{\s*,?\s*(and|or|和|或|以及)\s*\}\s*|,?\s*(?<![A-Za-z\\])(and|or)(?![A-Za-z])\s*|(和|或|以及)|(?:(?<!\d),|,(?!\d{3}(?!\d))|;)\s*"
)
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array|smallmatrix)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)
_CASES = re.compile(r"\\begin\{cases\}(.*)\\end\{cases\}", re.DOTALL)
_FACTORS = r"(?:_(?:\{[^{}]*\}|\w))?'*"
# what an equation may give the value of: x, x_1, f(x), f^{-1}(x), AB, |AB|, \angle A, dy/dx, a word
_NAME = re.compile(
    rf"(?:[A-Za-z]|\\[A-Za-z]+){_FACTORS}(?:\^\{{-1\}})?(?:\s*\([A-Za-z0-9](?:\s*,\s*[A-Za-z0-9])*\))?"
    rf"|[A-Z]{{2,4}}{_FACTORS}|\|[A-Z]+\||(?:sum|max|min|lcm|gcd|area|ans)|[A-Za-z][a-z]{{3,}}(?:\s[a-z]+)*"
    r"|\\(?:angle|triangle|overline|vec|measuredangle|mathbb)\s*(?:\{[^{}]*\}|[A-Z]+)|\\text\{[^{}]*\}(?:\s*\([^()]*\))?"
    r"|\\frac\{d\s*[a-z]?\}\{d\s*[a-z]\}|f\s*\([^()]*\)"
)
_SET_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:)\s*(.*)\\\}", re.DOTALL)
_MEMBERSHIP = re.compile(
    r"(?:\\text\{[^{}]*\}\s*)?(?:for\s+)?[a-zA-Z](?:\s*,\s*[a-z])*\s*\\in\s*\\mathbb\{[ZNQRC]\}.*|\\text\{\s*(?:where|for|with)\b.*",
    re.DOTALL,
)
_NUMBER_HEAD = re.compile(
    r"[-+]?\s?[$€£¥₹]?\s?-?(?:\d[\d,.']*(?:\s\d{3})*|\.\d+)(?:\s+\d+\s?/\s?\d+|\s?/\s?\d+)?(?:[eE][-+]?\d+)?(?:\s?(?:\*|x|\\times|\\cdot)\s?10\s?\^\s?(?:\{-?\d+\}|-?\d+))?\s?%?"
)
_WORDS = re.compile(r"[A-Za-z\u4e00-\u9fff][A-Za-z\u4e00-\u9fff'.\-\s/^{}\d()²³·*]*")
_MATHEMATICAL = re.compile(r"(?:pi|sqrt|sin|cos|tan|log|ln|exp|mod|theta|alpha|x|y|z|n|k)\b")
_DEGREES = re.compile(r"(-?[\d.]+)\s*\^\{\\circ\}\s*(?:([\d.]+)\s*(?:'|\\text\{'\}))?\s*(?:([\d.]+)\s*'')?")
_COMPOUND = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)\.?(?:\s*,?\s*(?:and\s+)?)")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+|-?\d{1,2}(?:,\d{2})+,\d{3}")
_FLOAT_OR_E = re.compile(r"-?\d+e[-+]\d")
_EMPTY = Phrase("empty")


def read(text: str, *, reference: bool = False) -> list[Reading]:
    r"""Return the readings of an answer, the likeliest first.

    Args:
        text: An answer alone: what a box holds, what follows "the answer is", or a row's reference answer.
        reference: It is a reference answer: only the likeliest reading of ambiguous thousands.

    Raises:
        UnreadableError: It has none.
    """
    plain = strip_label(tidy(text))
    if len(plain) > MAX_LENGTH:
        raise UnreadableError(f"longer than {MAX_LENGTH} characters")
    if _depth(plain) > MAX_NESTING:
        raise UnreadableError(f"brackets nested deeper than {MAX_NESTING}")
    readings = _readings(plain, reference=reference)
    if not readings:
        raise UnreadableError("empty")
    return readings


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _readings(text: str, *, reference: bool = False) -> list[Reading]:
    text = text.strip(" ,;")
    if not text:
        return []
    special = read_special(text)
    if special is not None:
        ratio = read_ratio(text) if isinstance(special, Clock) else None
        if ratio is None:
            return [special]
        # a reference 10:30 is no ratio 1:3, since a ratio would be in lowest terms
        if ":0" in text:
            return [special]
        fixed = not all(ratio.written) or (reference and ratio.terms != ratio.written)
        return [special, replace(ratio, terms=ratio.written) if fixed else ratio]
    found: list[Reading] = []
    number = _number(text)
    if number is not None:
        found.append(number)
        if not reference and _THOUSANDS.fullmatch(text):
            found.append(Several(tuple(Value(Rational(part)) for part in text.split(",")), "list"))
        if _FLOAT_OR_E.fullmatch(text):
            found.append(_expression(text.replace("e", " e ")))
        return found
    ratio = read_ratio(text)
    if ratio is not None:
        return [ratio]
    choice = read_choice(text)
    if choice is not None:
        found.append(choice)
        if len(text.strip("() .")) > 1 and not _bracketed(text):
            return found
    try:
        found = found + _structured(text)
        bare = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
        words = _words(text) if bare.isalpha() and len(bare) > 1 else None
        return found if words is None else [*found, words]
    except UnreadableError:
        if found:
            return found
        words = _words(text)
        if words is None:
            raise
        return [words]


def _words(text: str) -> Word | None:
    folded = fold_words(text)
    return (
        Word(folded)
        if folded and re.search(r"[^\W\d_]{2,}", folded) and "\\" not in re.sub(r"\\text\b", "", text)
        else None
    )


def _structured(text: str) -> list[Reading]:
    """Return the readings of a text that is no plain number and nothing special."""
    for attempt in (_builder, _set_operation, _joined, _related, _enclosed, _plus_minus, _proportion, _with_unit):
        found = attempt(text)
        if found:
            return found
    return _expressions(text)


# sets and intervals


def _builder(text: str) -> list[Reading]:
    match = _SET_BUILDER.fullmatch(text)
    return _readings(match[2]) if match is not None else []


def _set_operation(text: str) -> list[Reading]:
    for operator, combine in (("\\cup", sympy.Union), ("\\cap", sympy.Intersection), ("\\setminus", sympy.Complement)):
        parts = split_top(text, re.compile(re.escape(operator) + "(?![A-Za-z])"))
        if len(parts) > MAX_INTERVALS:
            raise UnreadableError("too many intervals")
        if len(parts) > 1:
            sets = [_set(part) for part in parts]
            return [
                Numbers(
                    combine(*sets) if operator != "\\setminus" else sympy.Complement(sets[0], sympy.Union(*sets[1:]))
                )
            ]
    plain = fold_words(text)
    if text in ("\\mathbb{R}", "R") or plain in (
        "all real numbers",
        "all reals",
        "real numbers",
        "all real values",
        "全体实数",
    ):
        return [Numbers(sympy.S.Reals)]
    return []


def _set(text: str) -> sympy.Set:
    for reading in _readings(text):
        if isinstance(reading, Numbers):
            return reading.numbers
        if (
            isinstance(reading, Several)
            and reading.kind != "tuple"
            and all(isinstance(item, Value) for item in reading.items)
        ):
            return sympy.FiniteSet(*(item.expr for item in reading.items if isinstance(item, Value)))
        if reading == _EMPTY:
            return sympy.S.EmptySet
    raise UnreadableError(f"{text!r} is no set of numbers")


def _interval(low: Expr, high: Expr, opening: str, end: str) -> Numbers | None:
    if any(bound.is_extended_real is False for bound in (low, high)) or (high - low).is_negative:
        return None
    return Numbers(sympy.Interval(low, high, opening == "(", end == ")"))


# lists


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    r"""Return the parts of a text between separators that stand in no brackets.

    >>> split_top("1, (2, 3)", re.compile(","))
    ['1', ' (2, 3)']
    """
    depth = 0
    parts, start, at = [], 0, 0
    while at < len(text):
        if depth == 0 and (match := separator.match(text, at)) and match.end() > at:
            parts.append(text[start:at])
            at = start = match.end()
            continue
        opened = re.compile(r"\\begin\{|\\langle|\\\{|[(\[{]").match(text, at)
        closed = re.compile(r"\\end\{[^}]*\}|\\rangle|\\\}|[)\]}]").match(text, at)
        if opened is not None:
            depth += 1
            at = opened.end() if not opened[0].startswith("\\begin") else text.find("}", at) + 1 or len(text)
        elif closed is not None:
            depth = max(depth - 1, 0)
            at = closed.end()
        elif text.startswith("\\text{", at):
            end = closing(text, at + 5)
            at = end + 1 if end > 0 else at + 1
        else:
            at += 1
    parts.append(text[start:])
    return parts


def _joined(text: str) -> list[Reading]:
    """Return the reading of several parts: `1, 2`, `x = 1 or x = 2`, `x > 1 and x < 3`."""
    parts = [part for part in split_top(text, _JOINTS) if part.strip()]
    if len(parts) < 2:
        return []
    kept = [part for part in parts if not _MEMBERSHIP.fullmatch(part.strip())]
    if len(kept) == 1:
        return _structured_or_number(kept[0])
    if len(kept) > MAX_ITEMS or any("\\ldots" in part or "..." in part for part in kept):
        raise UnreadableError("a list with dots, or of too many items")
    if re.search(r"\d\s?[A-Za-z]+\s?,?\s(?:and\s)?\d", text) and (compound := _compound(text)) is not None:
        return [compound]
    items = [_structured_or_number(part)[0] for part in kept]
    if any(isinstance(item, Word) for item in items):
        raise UnreadableError("words in a list")
    return _combined(items, text)


def _combined(items: list[Reading], text: str) -> list[Reading]:
    ranges = [item for item in items if isinstance(item, Numbers) and item.variable]
    if ranges:
        items = [_as_numbers(item, ranges[0].variable) for item in items]
    if all(isinstance(item, Numbers) for item in items):
        sets = [item.numbers for item in items if isinstance(item, Numbers)]
        variables = {item.variable for item in items if isinstance(item, Numbers)}
        if len(variables) == 1 and None not in variables:
            both = sympy.Intersection(*sets)
            either = re.search(r"\bor\b|或", text) is not None
            return [Numbers(sympy.Union(*sets) if either or both is sympy.S.EmptySet else both, variables.pop())]
    if all(isinstance(item, Named) for item in items):
        named = [pair for item in items if isinstance(item, Named) for pair in item.items]
        names = [name for name, _ in named]
        if len({_base(name) for name in names}) > 1 and len(set(names)) == len(names):
            return [Named(tuple(named))]
        return [Several(tuple(_flat([value for _, value in named])), "list")]
    first = items[0]
    if isinstance(first, Named) and not any(isinstance(item, Named) for item in items[1:]):
        items = [first.items[-1][1], *items[1:]]  # x = 1, 2
    # 5 and 7 cm
    last = items[-1]
    if (
        isinstance(last, Value)
        and last.unit is not None
        and all(isinstance(item, Value) and item.unit is None for item in items[:-1])
    ):
        items = [replace(item, unit=last.unit) if isinstance(item, Value) else item for item in items]
    return [Several(tuple(_flat(items)), "list")]


def _as_numbers(item: Reading, variable: str | None) -> Reading:
    """Return `x = 3` as the set {3}, where it stands beside `x < 1`."""
    if isinstance(item, Named) and len(item.items) == 1 and item.items[0][0] == variable:
        value = item.items[0][1]
        if isinstance(value, Value) and not value.expr.free_symbols:
            return Numbers(sympy.FiniteSet(value.expr), variable)
    return item


def _flat(items: Sequence[Reading]) -> list[Reading]:
    """Return the items, those of inner lists (`\\pm 2` beside `0`) among them."""
    return [
        one for item in items for one in (item.items if isinstance(item, Several) and item.kind == "list" else (item,))
    ]


def _base(name: str) -> str:
    return re.sub(r"_.*", "", name)


def _structured_or_number(text: str) -> list[Reading]:
    readings = _readings(text)
    if not readings:
        raise UnreadableError("an empty part")
    return readings


def _compound(text: str) -> Value | None:
    """Return a quantity in several units: `5 feet 6 inches`, `1 hour and 30 minutes`."""
    parts = _COMPOUND.findall(text + " ")
    if len(parts) < 2 or _COMPOUND.sub("", text + " ").strip():
        return None
    units = [parse_unit(name) for _, name in parts]
    first = units[0]
    if first is None or any(unit is None or unit.dimension != first.dimension for unit in units):
        return None
    total = sum(Fraction(count) * unit.scale for (count, _), unit in zip(parts, units, strict=True) if unit is not None)
    return Value(_rational(total / first.scale), unit=first)


# relations


def _related(text: str) -> list[Reading]:
    """Return the reading of equations and inequalities."""
    operators = []
    depth_free = split_top(text, _OPERATORS)
    if len(depth_free) < 2:
        return []
    at = 0
    for part in depth_free[:-1]:
        at += len(part)
        match = _OPERATORS.match(text, at)
        assert match is not None
        operators.append(_SAME.get(match[0], match[0]))
        at = match.end()
    parts = [part.strip() for part in depth_free]
    if "\\in" in operators:
        return _readings(parts[-1]) if operators == ["\\in"] else []
    if "\\equiv" in operators:
        raise UnreadableError("a congruence that is not x ≡ a (mod n)")
    if "\\approx" in operators:
        return _approximated(parts, operators)
    if set(operators) == {"="}:
        return _equation(parts)
    return _inequality(parts, operators)


def _approximated(parts: list[str], operators: list[str]) -> list[Reading]:
    """Return the exact and the rounded value of `x = √2 ≈ 1.41`, if they agree; else the last."""
    last = _structured_or_number(parts[-1])
    before = parts[operators.index("\\approx")]
    if not before or _NAME.fullmatch(before):
        return last
    exact = _structured_or_number(before)
    pair = (exact[0], last[0])
    values = [reading.expr for reading in pair if isinstance(reading, Value) and not reading.expr.free_symbols]
    if len(values) == 2 and abs(complex(values[0]) - complex(values[1])) <= 0.01 * abs(complex(values[0])):
        return [*exact, *last]
    return last


def _equation(parts: list[str]) -> list[Reading]:
    if not all(parts):
        return _structured_or_number(parts[-1]) if parts[-1] else []
    name, value = parts[0], parts[-1]
    if name.startswith("(") and name.endswith(")") and "," in name:
        # (x, y) = (1, 2)
        return _structured_or_number(value)
    if _NAME.fullmatch(name):
        readings = _structured_or_number(value)
        symbol = re.sub(r"\s", "", name)
        if isinstance(readings[0], Several) and readings[0].kind == "list":
            return list(readings)
        return [Named(((symbol, reading),)) for reading in readings]
    if len(parts) > 2:
        return _structured_or_number(value)
    if "\\ldots" in name:
        return _structured_or_number(value)  # 1 + 2 + … + 10 = 55
    left, right = _expression(parts[0]), _expression(parts[1])
    if _NAME.fullmatch(value) and not left.expr.free_symbols:
        return [Named(((value, left),))]  # 5 = x
    if not left.expr.free_symbols and not right.expr.free_symbols:
        return [right]  # 2 + 3 = 5
    return [Relation(left.expr, "=", right.expr)]


def _inequality(parts: list[str], operators: list[str]) -> list[Reading]:
    sides = [_expression(part).expr for part in parts]
    relations = [
        _turned(left, operator, right) for left, operator, right in zip(sides, operators, sides[1:], strict=False)
    ]
    variables = {symbol for relation in relations for symbol in (relation.left - relation.right).free_symbols}
    sets = [_solution(relation) for relation in relations]
    if len(variables) == 1 and all(one is not None for one in sets):
        return [Numbers(sympy.Intersection(*(one for one in sets if one is not None)), str(variables.pop()))]
    named = [index for index, side in enumerate(sides) if isinstance(side, Symbol)]
    if len(sides) == 3 and named == [1] and len(set(operators)) == 1 and operators[0] in ("<", "<=", ">", ">="):
        low, high = (sides[0], sides[2]) if operators[0][0] == "<" else (sides[2], sides[0])
        return [Numbers(sympy.Interval(low, high, "=" not in operators[0], "=" not in operators[0]), str(sides[1]))]
    if len(relations) == 1:
        return [relations[0]]
    return [Several(tuple(relations), "list")]


def _turned(left: Expr, operator: str, right: Expr) -> Relation:
    return Relation(right, _TURNED[operator], left) if operator in _TURNED else Relation(left, operator, right)


def _solution(relation: Relation) -> sympy.Set | None:
    """Return the numbers that satisfy `x < 3`; None unless one side is a variable and the other a number."""
    left, right, strict = relation.left, relation.right, relation.operator == "<"
    if isinstance(left, Symbol) and not right.free_symbols and right.is_extended_real is not False:
        if relation.operator == "!=":
            return sympy.Complement(sympy.S.Reals, sympy.FiniteSet(right))
        return sympy.Interval(-sympy.oo, right, True, strict)
    if isinstance(right, Symbol) and not left.free_symbols and left.is_extended_real is not False:
        return sympy.Interval(left, sympy.oo, strict, True) if relation.operator != "!=" else None
    distance, bound, inside = (left, right, True) if isinstance(left, sympy.Abs) else (right, left, False)
    if isinstance(distance, sympy.Abs) and bound.is_positive and relation.operator in ("<", "<="):
        centre = sum(distance.free_symbols) - distance.args[0]
        if not centre.free_symbols:
            # |x - a| < b
            near = sympy.Interval(centre - bound, centre + bound, strict, strict)
            return (
                near
                if inside
                else sympy.Complement(sympy.S.Reals, sympy.Interval(*near.args[:2], not strict, not strict))
            )
    return None


# brackets


def _bracketed(text: str) -> tuple[str, str, str] | None:
    """Return the opening bracket, what it holds and the closing one, where they enclose the whole text."""
    for opening, ends in (("\\{", ("\\}",)), ("\\langle", ("\\rangle",)), ("(", (")", "]")), ("[", (")", "]"))):
        for end in ends:
            if text.startswith(opening) and text.endswith(end) and len(text) >= len(opening) + len(end):
                inner = text[len(opening) : len(text) - len(end)]
                return (opening, inner, end) if _balanced(inner) else None
    return None


def _balanced(text: str) -> bool:
    depth = 0
    for bracket in re.findall(r"\\begin|\\end|\\[{}]|[()\[\]{}]|\\langle|\\rangle", text):
        depth += 1 if bracket in ("\\begin", "\\{", "(", "[", "{", "\\langle") else -1
        if depth < 0:
            return False
    return depth == 0


def _enclosed(text: str) -> list[Reading]:
    """Return the readings of what stands in brackets: tuples, intervals, sets, matrices."""
    matrix = _MATRIX.fullmatch(text) or _MATRIX.fullmatch(text.strip("()[] "))
    if matrix is not None and matrix[1] not in ("vmatrix", "Vmatrix"):
        return [_table(matrix[2])]
    cases = _CASES.fullmatch(text)
    if cases is not None and "&" not in cases[1]:
        return _structured(re.sub(r"\s*\\\\\s*", ", ", cases[1]).strip(" ,"))
    enclosed = _bracketed(text)
    if enclosed is None:
        return []
    opening, inner, end = enclosed
    parts = [part.strip() for part in split_top(inner, re.compile(r"[,;]")) if part.strip()]
    if opening == "\\{":
        if not parts:
            return [_EMPTY]
        if _THOUSANDS.fullmatch(inner):
            inner = ", ".join(parts)
        listed = _readings(inner)[0] if len(parts) > 1 or "\\pm" in inner else _structured_or_number(inner)[0]
        return [Several(listed.items if isinstance(listed, Several) else (listed,), "set")]
    if len(parts) < 2:
        if opening == "(" and end == ")" and parts:
            return _structured_or_number(parts[0])
        return (
            [Several((_structured_or_number(parts[0])[0],), "list")] if opening == "[" and end == "]" and parts else []
        )
    if len(parts) > MAX_ITEMS or "\\ldots" in inner:
        raise UnreadableError("a tuple with dots, or of too many items")
    items = tuple(_structured_or_number(part)[0] for part in parts)
    low, high = items[0], items[-1]
    interval = None
    if len(items) == 2 and opening != "\\langle" and isinstance(low, Value) and isinstance(high, Value):
        interval = _interval(low.expr, high.expr, opening, end)
    if opening + end in ("(]", "[)"):
        return [interval] if interval is not None else []
    if opening == "[" and interval is not None:
        # [1, 3] is an interval or a list in Python's notation, and no point (1, 3)
        return [interval, Several(items, "set")]
    pair: list[Reading] = [Several(items, "tuple")]
    if opening == "[":
        pair.append(Several(items, "list"))
    return pair if interval is None else [*pair, interval]


def _table(text: str) -> Table:
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr(?![a-z])", text.replace("\\hline", "")) if row.strip()]
    return Table(tuple(tuple(_structured_or_number(cell)[0] for cell in row.split("&")) for row in rows))


# values


def _plus_minus(text: str) -> list[Reading]:
    if "\\pm" not in text and "\\mp" not in text and "+/-" not in text:
        return []
    text = text.replace("+/-", "\\pm ")
    upper = text.replace("\\pm", "+").replace("\\mp", "-")
    lower = text.replace("\\pm", "-").replace("\\mp", "+")
    return [Several((_structured_or_number(upper)[0], _structured_or_number(lower)[0]), "list")]


def _proportion(text: str) -> list[Reading]:
    parts = split_top(text, re.compile(":"))
    if not 2 <= len(parts) <= 4:
        return []
    *terms, last = (_expression(part).expr for part in parts)
    return [Proportion(tuple(Value(term / last) for term in terms))]


def _number(text: str) -> Value | None:
    number = parse_number(re.sub(r"\s?\\(?:times|cdot)\s?", "*", text))
    if number is None:
        return None
    currency = re.match(r"[-+]?\s?([$€£¥₹])", text)
    return Value(_rational(number.value), number.step, number.percent, parse_unit(currency[1]) if currency else None)


def _rational(value: Fraction) -> Rational:
    return Rational(value.numerator, value.denominator)


def _with_unit(text: str) -> list[Reading]:
    r"""Return the reading of a number or expression with a unit or noun behind it."""
    degrees = _DEGREES.fullmatch(text)
    if degrees is not None:
        minutes = Fraction(degrees[2] or 0) / 60 + Fraction(degrees[3] or 0) / 3600
        whole = _number(degrees[1])
        if whole is not None:
            return [replace(whole, expr=whole.expr + _rational(minutes), unit=parse_unit("^{\\circ}"))]
    compound = _compound(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text))
    if compound is not None:
        return [compound]
    text = re.sub(r"\^\{\\circ\}\s*\\text\{\s*([CF])\s*\}", r"^{\\circ}\1", text)
    text = re.sub(r"(?:\\text\{)?\s*degrees?\s+(celsius|fahrenheit)\s*\}?", r"\\text{\1}", text, flags=re.IGNORECASE)
    at = text.find("\\text{")
    if at > 0 and text[at - 1] not in "_^{":
        head, tail = text[:at].strip(), re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text[at:])
        return _measured(head, tail, glued=False)
    circle = re.fullmatch(r"(.*?\S)\s*(\^\{\\circ\}\s*(?:C|F)?)", text)
    if circle is not None and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", circle[1]):
        return _measured(circle[1], circle[2], glued=False)
    symbol = re.fullmatch(r"(.*\S)\s*([$€£¥₹¢])", text)
    if symbol is not None:
        return _measured(symbol[1], symbol[2], glued=False)
    head_match = _NUMBER_HEAD.match(text)
    if head_match is None:
        return []
    head, tail = head_match[0].rstrip(), text[head_match.end() :]
    blank = text[len(head) : head_match.end()] or tail[:1] == " "
    tail = tail.strip()
    if not tail or not _WORDS.fullmatch(tail) or _MATHEMATICAL.match(tail):
        if tail.startswith(("\\mu", "\\Omega")) and parse_unit(tail) is not None:
            return _measured(head, tail, glued=False)
        return []
    single = len(re.match(r"[A-Za-z]*", tail)[0]) == 1 and not tail[1:2].isalpha()  # type: ignore[index]
    if not blank and not (parse_unit(tail) or tail in MAGNITUDES) and not re.match(r"[\u4e00-\u9fff]", tail):
        return []
    if single and not blank:
        # 12m: a product, or metres
        return [*_expressions(text), *_measured(head, tail, glued=True)]
    if single and parse_unit(tail) is None:
        return []
    return _measured(head, tail, glued=False)


def _measured(head: str, tail: str, *, glued: bool) -> list[Reading]:
    tail = tail.strip().rstrip(".")
    factor = 1
    first, _, rest = tail.partition(" ")
    if first.lower() in MAGNITUDES or tail[:1] in MAGNITUDES:
        factor = MAGNITUDES.get(first.lower()) or MAGNITUDES[tail[:1]]
        tail = rest if first.lower() in MAGNITUDES else tail[1:]
    tail = re.sub(r"^(?:(?:sq(?:uare)?|cu(?:bic)?)\.?\s*)?units?\b\s*(?:\^\s*\{?[23]\}?)?$", "", tail)
    if re.match(r"(?:percent|per cent|pct|percentage points?)\b", tail):
        head, tail = head + "%", ""
    values = [reading for reading in _structured_or_number(head) if isinstance(reading, Value | Residue)]
    value = values[0] if values else None
    if not isinstance(value, Value):
        raise UnreadableError(f"{head!r} is no value")
    unit = parse_unit(tail) or leading_unit(tail) if tail else value.unit
    if tail and parse_unit(tail) is None and (re.search(r"[\d\\]", tail) or not re.match(r"[^\W\d_]", tail)):
        raise UnreadableError(f"{tail!r} is no unit")
    step = None if value.step is None else value.step * factor
    return [replace(value, expr=value.expr * factor, step=step, unit=unit or value.unit, glued=glued)]


def _expressions(text: str) -> list[Reading]:
    """Return the value of an expression; two where a logarithm's base is not given."""
    first = ExpressionParser(text)
    values = [Value(first.parse(), decimals=first.decimals)]
    if first.bare_log:
        second = ExpressionParser(text, natural=True)
        values.append(Value(second.parse(), decimals=second.decimals))
    return list(values)


def _expression(text: str) -> Value:
    number = _number(text)
    if number is not None:
        return number
    parser = ExpressionParser(text)
    return Value(parser.parse(), decimals=parser.decimals)


__all__ = [
    "Named",
    "Numbers",
    "Proportion",
    "Reading",
    "Relation",
    "Several",
    "Table",
    "UnreadableError",
    "Value",
    "read",
    "split_top",
]
