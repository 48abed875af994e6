r"""Equations and inequalities: what they give a value of, the numbers that satisfy them, or the relation itself."""

from __future__ import annotations

import re

import sympy
from sympy import Expr, Symbol

from roll_like.builtin.rewards.mathematics.kinds import Named, Numbers, Reading, ReadPart, Relation, Several, Value
from roll_like.builtin.rewards.mathematics.quantities import expression, rational
from roll_like.builtin.rewards.mathematics.scanner import UnreadableError
from roll_like.builtin.rewards.mathematics.special import Based, read_special
from roll_like.builtin.rewards.mathematics.text import split_top

_OPERATORS = re.compile(r"<=|>=|=<|=>|!=|<|>|==?|\\(?:le|ge|ne|approx|equiv|in)(?![A-Za-z])")
_TURNED = {">": "<", ">=": "<="}
_SAME = {"\\le": "<=", "=<": "<=", "\\ge": ">=", "=>": ">=", "\\ne": "!=", "==": "="}
_FACTORS = r"(?:_(?:\{[^{}]*\}|\w))?'*"
# what an equation may give the value of: x, x_1, f(x), f^{-1}(x), AB, |AB|, \angle A, dy/dx, a word
_NAME = re.compile(
    rf"(?:[A-Za-z]|\\[A-Za-z]+){_FACTORS}(?:\^\{{-1\}})?(?:\s*\([A-Za-z0-9](?:\s*,\s*[A-Za-z0-9])*\))?"
    rf"|[A-Z]{{2,4}}{_FACTORS}|\|[A-Z]+\||(?:sum|max|min|lcm|gcd|area|ans)|[A-Za-z][a-z]{{3,}}(?:\s[a-z]+)*"
    r"|\\(?:angle|triangle|overline|vec|measuredangle|mathbb)\s*(?:\{[^{}]*\}|[A-Z]+)|\\text\{[^{}]*\}(?:\s*\([^()]*\))?"
    r"|\\frac\{d\s*[a-z]?\}\{d\s*[a-z]\}|f\s*\([^()]*\)"
)


def related(text: str, read_part: ReadPart) -> list[Reading]:
    """Return the readings of equations and inequalities; none if the text is neither.

    Raises:
        UnreadableError: It is one that cannot be read.
    """
    parts, operators = _sides(text)
    if not operators:
        return []
    if "\\in" in operators:
        return read_part(parts[-1]) if operators == ["\\in"] else []
    if "\\equiv" in operators:
        raise UnreadableError("a congruence that is not x ≡ a (mod n)")
    if "\\approx" in operators:
        return _approximated(parts, operators, read_part)
    if set(operators) == {"="}:
        return _in_bases(parts, read_part) or _equation(parts, read_part)
    return _inequality(parts, operators)


def _sides(text: str) -> tuple[list[str], list[str]]:
    """Return the sides of a chain of relations, and the operators between them."""
    parts = split_top(text, _OPERATORS)
    operators, at = [], 0
    for part in parts[:-1]:
        match = _OPERATORS.match(text, at + len(part))
        assert match is not None
        operators.append(_SAME.get(match[0], match[0]))
        at = match.end()
    return [part.strip() for part in parts], operators


def _approximated(parts: list[str], operators: list[str], read_part: ReadPart) -> list[Reading]:
    """Return the exact and the rounded value of `x = √2 ≈ 1.41`, if they agree; else the last."""
    last = read_part(parts[-1])
    before = parts[operators.index("\\approx")]
    if not before or _NAME.fullmatch(before):
        return last
    exact = read_part(before)
    pair = (exact[0], last[0])
    values = [reading.expr for reading in pair if isinstance(reading, Value) and not reading.expr.free_symbols]
    if len(values) == 2 and abs(complex(values[0]) - complex(values[1])) <= 0.01 * abs(complex(values[0])):
        return [*exact, *last]
    return last


def _in_bases(parts: list[str], read_part: ReadPart) -> list[Reading]:
    """Return both sides of `1010_2 = 10`; none if no side is a number with its base."""
    if len(parts) != 2 or not any(isinstance(read_special(part), Based) for part in parts) or _NAME.fullmatch(parts[0]):
        return []
    sides = [read_part(part)[0] for part in parts]
    values = [rational(side.value) if isinstance(side, Based) else getattr(side, "expr", None) for side in sides]
    if values[0] != values[1]:
        raise UnreadableError("numbers of two bases that are not equal")
    return sides


def _equation(parts: list[str], read_part: ReadPart) -> list[Reading]:
    name, value = parts[0], parts[-1]
    pair = name.startswith("(") and name.endswith(")") and "," in name  # (x, y) = (1, 2)
    # a chain gives its last value; so does 1 + 2 + … + 10 = 55
    if not all(parts) or pair or (len(parts) > 2 and not _NAME.fullmatch(name)) or "\\ldots" in name:
        return read_part(value)
    if _NAME.fullmatch(name):
        readings = read_part(value)
        if isinstance(readings[0], Several) and readings[0].kind == "list":
            return readings
        return [Named(((re.sub(r"\s", "", name), reading),)) for reading in readings]
    left, right = expression(name), expression(value)
    if left.expr.free_symbols:
        return [Relation(left.expr, "=", right.expr)]
    if _NAME.fullmatch(value):
        return [Named(((value, left),))]  # 5 = x
    return [Relation(left.expr, "=", right.expr)] if right.expr.free_symbols else [right]  # 2 + 3 = 5


def _inequality(parts: list[str], operators: list[str]) -> list[Reading]:
    sides = [expression(part).expr for part in parts]
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


def as_numbers(item: Reading, variable: str | None) -> Reading:
    """Return `x = 3` as the set {3}, where it stands beside `x < 1`."""
    if isinstance(item, Named) and len(item.items) == 1 and item.items[0][0] == variable:
        value = item.items[0][1]
        if isinstance(value, Value) and not value.expr.free_symbols:
            return Numbers(sympy.FiniteSet(value.expr), variable)
    return item
