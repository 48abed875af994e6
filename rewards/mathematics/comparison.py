r"""Whether an answer is the reference answer, whatever kind of reading the two are. Values: `values`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import sympy
from sympy import Symbol

from roll_like.builtin.rewards.mathematics.kinds import (
    Named,
    Numbers,
    Proportion,
    Reading,
    Relation,
    Several,
    Table,
    Value,
)
from roll_like.builtin.rewards.mathematics.quantities import rational
from roll_like.builtin.rewards.mathematics.reading import parse_answer
from roll_like.builtin.rewards.mathematics.scanner import UnreadableError
from roll_like.builtin.rewards.mathematics.special import (
    Based,
    Choice,
    Clock,
    Date,
    Phrase,
    Ratio,
    Residue,
    Word,
    fold_words,
)
from roll_like.builtin.rewards.mathematics.values import ValueComparison

_FUNCTION_NAMES = re.compile(r"y|[fgh](?:\([a-z]\))?|y\([a-z]\)")


class AnswerComparison:
    """Compares answers with one reference answer.

    Args:
        tolerance: Relative difference up to which numbers count as equal where one of them is a decimal; 0 for the
            rules above alone.
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        self.values = ValueComparison(tolerance)

    def any_equal(self, reference: Sequence[Reading], answer: Sequence[Reading]) -> bool:
        """Return whether a reading of the answer is one of the reference's."""
        return any(self.equal(one, other) for one in reference for other in answer)

    def equal(self, reference: Reading, answer: Reading) -> bool:
        """Return whether an answer is the reference answer, each in one reading."""
        reference, answer = _single(reference), _single(answer)
        if isinstance(answer, Named) and not isinstance(reference, Named | Relation | Several):
            # x = 5 for 5
            return len(answer.items) == 1 and self.equal(reference, answer.items[0][1])
        for kind, compare in self._comparisons():
            if isinstance(reference, kind):
                return compare(reference, answer)
        raise AssertionError(f"no comparison of {reference}")

    def _comparisons(self) -> tuple[tuple[type, Callable[[Any, Any], bool]], ...]:
        return (
            (Value, self._value),
            (Several, self._several),
            (Named, self._named),
            (Numbers, self._numbers),
            (Relation, self._relation),
            (Table, self._table),
            (Ratio, self._ratio),
            (Proportion, self._proportion),
            (Clock, self._clock),
            (Date, _date),
            (Based, _based),
            (Residue, _residue),
            (Choice, self._choice),
            (Phrase, _phrase),
            (Word, _word),
        )

    # values

    def _value(self, reference: Value, answer: Reading) -> bool:
        if isinstance(answer, Ratio) and len(answer.terms) == 2 and answer.terms[1]:
            return self._value(reference, Value(rational(answer.terms[0] / answer.terms[1])))
        if isinstance(answer, Proportion):
            return len(answer.terms) == 1 and self._value(reference, answer.terms[0])
        if isinstance(answer, Based):
            return bool(reference.expr == rational(answer.value))
        if isinstance(answer, Residue):
            return bool(reference.expr == answer.value)
        if isinstance(answer, Choice):
            return False
        return isinstance(answer, Value) and self.values.equal(reference, answer)

    # several values

    def _several(self, reference: Several, answer: Reading) -> bool:
        if isinstance(answer, Named):
            # (x, y) are in the order of the alphabet; (r, θ) as they are written
            letters = all(len(name) == 1 for name, _ in answer.items)
            values = [value for _, value in (sorted(answer.items, key=_name) if letters else answer.items)]
            if reference.kind == "tuple":
                return self._in_order(reference.items, values)
            return reference.kind == "list" and self._in_any_order(reference.items, values)
        if isinstance(answer, Table):
            cells = answer.rows[0] if len(answer.rows) == 1 else [row[0] for row in answer.rows if len(row) == 1]
            return reference.kind == "tuple" and self._in_order(reference.items, cells)
        if not isinstance(answer, Several):
            distinct = _distinct(reference.items, self)
            return reference.kind != "tuple" and len(distinct) == 1 and self.equal(distinct[0], answer)
        kinds = {reference.kind, answer.kind}
        if "tuple" in kinds:
            return kinds <= {"tuple", "list"} and self._in_order(reference.items, answer.items)
        return kinds != {"row", "set"} and self._in_any_order(reference.items, answer.items)

    def _in_order(self, one: Sequence[Reading], other: Sequence[Reading]) -> bool:
        return len(one) == len(other) and all(map(self.equal, one, other))

    def _in_any_order(self, one: Sequence[Reading], other: Sequence[Reading]) -> bool:
        left = list(_distinct(other, self))
        wanted = _distinct(one, self)
        if len(wanted) != len(left):
            return False
        for item in wanted:
            match = next((index for index, candidate in enumerate(left) if self.equal(item, candidate)), None)
            if match is None:
                return False
            left.pop(match)
        return True

    def _named(self, reference: Named, answer: Reading) -> bool:
        if isinstance(answer, Named):
            return self._same_names(reference, answer)
        if len(reference.items) == 1:
            if isinstance(answer, Relation):
                implicit = _implicit(reference)
                return implicit is not None and self._relation(implicit, answer)
            return self.equal(reference.items[0][1], answer)
        return isinstance(answer, Several) and self._in_order([value for _, value in reference.items], answer.items)

    def _same_names(self, reference: Named, answer: Named) -> bool:
        if len(reference.items) == len(answer.items) == 1:
            (name, value), (other_name, other) = reference.items[0], answer.items[0]
            if name == other_name or (_FUNCTION_NAMES.fullmatch(name) and _FUNCTION_NAMES.fullmatch(other_name)):
                return self.equal(value, other)
            one, two = _implicit(reference), _implicit(answer)
            if len(name) > 1 and len(other_name) > 1 and "_" not in name + other_name:
                return self.equal(value, other)  # "AB = 5" and "Area = 5" name the quantity that was asked for
            return one is not None and two is not None and bool(two.right.free_symbols) and self._relation(one, two)
        wanted, found = dict(reference.items), dict(answer.items)
        return wanted.keys() == found.keys() and all(self.equal(value, found[name]) for name, value in wanted.items())

    # sets of numbers, relations, matrices

    def _numbers(self, reference: Numbers, answer: Reading) -> bool:
        if isinstance(answer, Phrase):
            return answer.kind == "empty" and reference.numbers is sympy.S.EmptySet
        if isinstance(answer, Several) and answer.kind != "tuple":
            return isinstance(reference.numbers, sympy.FiniteSet) and self._in_any_order(
                [Value(item) for item in reference.numbers.args], answer.items
            )
        if not isinstance(answer, Numbers):
            return False
        if reference.variable and answer.variable and reference.variable != answer.variable:
            return False
        one, other = reference.numbers, answer.numbers
        return one == other or self._same_pieces(one, other)

    def _same_pieces(self, one: sympy.Set, other: sympy.Set) -> bool:
        pieces = [item.args if isinstance(item, sympy.Union) else (item,) for item in (one, other)]
        left, right = (sorted(items, key=_lower_end) for items in pieces)
        return len(left) == len(right) and all(map(self._same_piece, left, right))

    def _same_piece(self, one: sympy.Set, other: sympy.Set) -> bool:
        if isinstance(one, sympy.Interval) and isinstance(other, sympy.Interval):
            return (one.left_open, one.right_open) == (other.left_open, other.right_open) and all(
                self.values.equal(Value(a), Value(b)) for a, b in ((one.start, other.start), (one.end, other.end))
            )
        if isinstance(one, sympy.FiniteSet) and isinstance(other, sympy.FiniteSet):
            return self._in_any_order([Value(item) for item in one.args], [Value(item) for item in other.args])
        return False

    def _relation(self, reference: Relation, answer: Reading) -> bool:
        """Compare equations and inequalities: left minus right is the same up to a factor (positive for `<`)."""
        if isinstance(answer, Named):
            implicit = _implicit(answer)
            if implicit is None:
                return False
            answer = implicit
        if not isinstance(answer, Relation) or reference.operator != answer.operator:
            return False
        one, other = reference.left - reference.right, answer.left - answer.right
        if one.free_symbols != other.free_symbols:
            return False
        if reference.operator in ("=", "!="):
            # y = 6/x is xy = 6
            one, other = (sympy.fraction(sympy.together(side))[0] for side in (one, other))
        ratio = sympy.cancel(sympy.together(one / other)) if other != 0 else sympy.nan
        if ratio.free_symbols:
            ratio = sympy.simplify(ratio)
        if ratio.free_symbols or not ratio.is_finite or ratio.is_zero:
            return False
        return reference.operator in ("=", "!=") or bool(ratio.is_positive)

    def _table(self, reference: Table, answer: Reading) -> bool:
        if isinstance(answer, Several) and answer.kind != "set":
            cells = (
                reference.rows[0] if len(reference.rows) == 1 else [row[0] for row in reference.rows if len(row) == 1]
            )
            return self._in_order(cells, answer.items)
        if not isinstance(answer, Table) or len(answer.rows) != len(reference.rows):
            return False
        return all(map(self._in_order, reference.rows, answer.rows))

    # what is no expression

    def _ratio(self, reference: Ratio, answer: Reading) -> bool:
        if isinstance(answer, Clock):
            hours, rest = divmod(answer.seconds, 3600)
            return reference.written == (Fraction(hours), Fraction(rest // 60)) and not rest % 60
        if isinstance(answer, Value) and len(reference.terms) == 2 and reference.terms[1] and answer.unit is None:
            return self._value(Value(rational(reference.terms[0] / reference.terms[1])), answer)
        return isinstance(answer, Ratio) and reference.terms == answer.terms

    def _proportion(self, reference: Proportion, answer: Reading) -> bool:
        if isinstance(answer, Value):
            return len(reference.terms) == 1 and self._value(reference.terms[0], answer)
        return isinstance(answer, Proportion) and self._in_order(reference.terms, answer.terms)

    def _clock(self, reference: Clock, answer: Reading) -> bool:
        if isinstance(answer, Clock):
            noon = 12 * 3600
            if reference.half and answer.half:
                return reference.seconds == answer.seconds
            return reference.seconds % noon == answer.seconds % noon
        return False

    def _choice(self, reference: Choice, answer: Reading) -> bool:
        if isinstance(answer, Choice):
            return answer.letter == reference.letter and not self._contradicts(reference.rest, answer.rest)
        if not reference.rest:
            return False
        return self.any_equal(_readings(reference.rest), [answer])

    def _contradicts(self, reference: str, answer: str) -> bool:
        if not reference or not answer:
            return False
        return not self.any_equal(_readings(reference), _readings(answer)) and fold_words(reference) != fold_words(
            answer
        )


def _readings(text: str) -> list[Reading]:
    try:
        return parse_answer(text)
    except UnreadableError:
        return [Word(fold_words(text))]


def _date(reference: Date, answer: Reading) -> bool:
    if not isinstance(answer, Date) or (reference.month, reference.day) != (answer.month, answer.day):
        return False
    return None in (reference.year, answer.year) or reference.year == answer.year


def _based(reference: Based, answer: Reading) -> bool:
    if isinstance(answer, Value):
        # the base is often left out, since the question names it
        decimal = reference.digits.lstrip("-").replace(".", "").isdecimal()
        return decimal and answer.unit is None and bool(answer.expr == sympy.Rational(reference.digits))
    return isinstance(answer, Based) and reference == answer


def _residue(reference: Residue, answer: Reading) -> bool:
    if isinstance(answer, Residue):
        return reference == answer
    return isinstance(answer, Value) and bool(answer.expr == reference.value)


def _phrase(reference: Phrase, answer: Reading) -> bool:
    if isinstance(answer, Numbers):
        return reference.kind == "empty" and answer.numbers is sympy.S.EmptySet
    return isinstance(answer, Phrase) and reference.kind == answer.kind


def _word(reference: Word, answer: Reading) -> bool:
    return isinstance(answer, Word) and reference.text == answer.text


def _name(item: tuple[str, Reading]) -> str:
    return item[0]


def _single(reading: Reading) -> Reading:
    """Return the item of a list or set of one."""
    if isinstance(reading, Several) and reading.kind != "tuple" and len(reading.items) == 1:
        return reading.items[0]
    return reading


def _distinct(items: Sequence[Reading], comparison: AnswerComparison) -> list[Reading]:
    kept: list[Reading] = []
    for item in items:
        if not any(item == other or comparison.equal(item, other) for other in kept):
            kept.append(item)
    return kept


def _implicit(named: Named) -> Relation | None:
    """Return `y = 2x + 1` as an equation; None where the name is no variable or the value no expression."""
    name, value = named.items[0]
    if len(named.items) > 1 or not isinstance(value, Value) or not value.expr.free_symbols:
        return None
    return Relation(Symbol(name), "=", value.expr)


def _lower_end(piece: sympy.Set) -> float:
    """Return the lower end of an interval, to sort by; 0 where it is no number."""
    low = piece.start if isinstance(piece, sympy.Interval) else next(iter(piece.args), sympy.nan)
    return float(low) if getattr(low, "is_extended_real", False) and not low.free_symbols else 0.0
