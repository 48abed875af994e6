r"""Whether two values are equal.

Numbers:

- Numbers written exactly (integers, fractions, roots, π) are equal if their values are.
- A decimal reference `r` with last place `u` is equal to every value that rounds to it and is at most 0.25 % away:
  `|a - r| < u/2` and `|a - r| <= |a|/400`. So 3.14 takes π and 3.1416, not 3.1 or 3.15; 12.5 does not take 12.46.
- A decimal answer to an exact reference needs six significant digits, all of them right (rounded or cut off), unless
  it is exact: 0.333333 is 1/3 and 0.333 is not; 0.5 is 1/2.
- Floating-point noise is no difference: both are decimals of 15 digits or more, and differ by less than 1e-12 of it.

Expressions are equal if they have equal values at several random points, computed to 50 digits. Differences are
relative throughout, so 1e-20 is not 1e-21.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import sympy
from sympy import Expr, Integer, Rational, Symbol

from roll_like.builtin.rewards.mathematics.kinds import Value
from roll_like.builtin.rewards.mathematics.quantities import rational

_DIGITS = 50
_EXACT = sympy.Float(10) ** -35
_POINTS = 8
_NOT_FINITE = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)


class ValueComparison:
    """Compares values with their units.

    Args:
        tolerance: Relative difference up to which numbers count as equal where one of them is a decimal; 0 for the
            rules above alone.
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        self.tolerance = Fraction(tolerance)

    def equal(self, reference: Value, answer: Value) -> bool:
        """Compare values with their units and percent signs."""
        unit, other = reference.unit, answer.unit
        if answer.glued and (unit is None or other is None or unit.dimension != other.dimension):
            return False
        if unit is not None and other is not None:
            if unit.dimension != other.dimension:
                return False
            return self._scalar(reference, _scaled(answer, other.scale / unit.scale))
        degrees = {(("degree", 1),): True}
        if (unit is not None and unit.dimension in degrees) != (other is not None and other.dimension in degrees):
            # 90° is π/2, and 90 where the question asks for degrees
            turned = sympy.pi / 180
            if unit is not None and self._scalar(Value(reference.expr * turned), answer) and answer.expr.has(sympy.pi):
                return True
            if other is not None and reference.expr.has(sympy.pi):
                return self._scalar(reference, Value(answer.expr * turned))
        return self._percent(reference, answer)

    def _percent(self, reference: Value, answer: Value) -> bool:
        if self._scalar(reference, answer):
            return True
        if reference.percent and not answer.percent:
            return self._scalar(_scaled(reference, Fraction(100)), answer)
        if answer.percent and not reference.percent and _at_least_one(reference.expr):
            return self._scalar(reference, _scaled(answer, Fraction(100)))
        return False

    def _scalar(self, reference: Value, answer: Value) -> bool:
        one, other = reference.expr, answer.expr
        if one == other:
            return True
        if one.has(*_NOT_FINITE) or other.has(*_NOT_FINITE):
            return False
        if one.free_symbols or other.free_symbols:
            return self._everywhere(reference, answer)
        exact = reference.step is None and answer.step is None and not (reference.decimals or answer.decimals)
        if one.is_Rational and other.is_Rational:
            return not exact and self._rounded(reference, answer, _fraction(one), _fraction(other))
        return self._constants(reference, answer, exact=exact)

    def _constants(self, reference: Value, answer: Value, *, exact: bool) -> bool:
        one, other = _evaluated(reference.expr), _evaluated(answer.expr)
        if one is None or other is None:
            return False
        if _close(one, other, _EXACT):
            return True
        if exact or not (one.is_real and other.is_real):
            return False
        return self._rounded(reference, answer, _fraction(Rational(one)), _fraction(Rational(other)))

    def _rounded(self, reference: Value, answer: Value, one: Fraction, other: Fraction) -> bool:
        """Compare two numbers of which one at least is a decimal."""
        difference, largest = abs(one - other), max(abs(one), abs(other))
        if difference <= self.tolerance * largest:
            return True
        if reference.step is not None:
            return difference < reference.step / 2 and difference * 400 <= largest
        if answer.step is not None:
            digits = abs(other) / answer.step
            noise = digits >= 10**14 and difference * 10**12 <= largest
            return noise or (digits >= 10**5 and one.denominator != 1 and difference < answer.step)
        return difference * 10**6 <= largest

    def _everywhere(self, reference: Value, answer: Value) -> bool:
        """Compare expressions in variables by their values at random points."""
        one, other = _same_constant(reference.expr, answer.expr)
        symbols = sorted(one.free_symbols | other.free_symbols, key=str)
        inexact = reference.decimals or answer.decimals or reference.step is not None or answer.step is not None
        tolerance = sympy.Float("1e-6") if inexact else _EXACT
        generator = random.Random(0)
        real, others = 0, []
        for attempt in range(3 * _POINTS):
            point = {symbol: _number_near(generator, negative=attempt % 3 == 2) for symbol in symbols}
            left, right = _evaluated(one, point), _evaluated(other, point)
            if left is None or right is None or bool(left.is_real) != bool(right.is_real):
                continue
            close = _close(left, right, tolerance)
            if left.is_real:
                if not close:
                    return False
                real += 1
                if real == _POINTS:
                    return True
            else:
                others.append(close)
        # complex values decide only where there are no real ones: ln x^3 and 3 ln x are equal for x > 0
        return real >= 4 or (real == 0 and len(others) >= 4 and all(others))


def _scaled(value: Value, factor: Fraction) -> Value:
    step = None if value.step is None else value.step * factor
    return Value(value.expr * rational(factor), step, decimals=value.decimals)


def _fraction(value: Any) -> Fraction:
    return Fraction(int(value.p), int(value.q))


def _at_least_one(expr: Expr) -> bool:
    return bool(expr.is_Rational) and abs(expr) >= 1


def _evaluated(expr: Expr, point: dict[Symbol, Rational] | None = None) -> Expr | None:
    """Return the value of an expression at a point to 50 digits; None where it has none."""
    if expr.has(*_NOT_FINITE):
        return None
    value = expr.evalf(_DIGITS, subs=point, maxn=400)
    real, imaginary = value.as_real_imag()
    if not (real.is_Number and imaginary.is_Number) or real.has(*_NOT_FINITE):
        return None
    # sympy gives one bit of precision to what it cannot tell from zero
    real, imaginary = (Integer(0) if getattr(part, "_prec", 53) == 1 else part for part in (real, imaginary))
    return real if imaginary == 0 else real + sympy.I * imaginary


def _close(one: Expr, other: Expr, tolerance: Expr) -> bool:
    return bool(abs(one - other) <= tolerance * abs(one)) if one != other else True


def _number_near(generator: random.Random, *, negative: bool) -> Rational:
    value = Rational(generator.randint(101, 997), generator.choice((211, 307, 401)))
    return -value if negative and generator.random() < 0.6 else value


def _same_constant(one: Expr, other: Expr) -> tuple[Expr, Expr]:
    """Return both with one name for a constant of integration, which may be called C, c or K."""
    return _with_constant(one), _with_constant(other)


def _with_constant(expr: Expr) -> Expr:
    constants = [symbol for symbol in expr.free_symbols if symbol.name in ("C", "c", "K", "C_1", "c_1")]
    if len(constants) != 1 or expr.coeff(constants[0]) != 1 or (expr - constants[0]).has(constants[0]):
        return expr
    return expr.xreplace({constants[0]: Symbol("C")})
