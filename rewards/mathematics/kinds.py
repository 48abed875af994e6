"""The kinds of readings of an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import sympy
from sympy import Expr

from roll_like.builtin.rewards.mathematics.special import Special
from roll_like.builtin.rewards.mathematics.units import Unit


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
    """Several values.

    Attributes:
        items: The values.
        kind: `list` (`1, 2`: in no order), `set` (`{1, 2}`), `tuple` (`(1, 2)`: in this order) or `row` (`[1, 2]`: a
            list where it is no interval).
    """

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


Reading: TypeAlias = Value | Several | Named | Numbers | Relation | Table | Proportion | Special
#: Reads a part of an answer.
ReadPart: TypeAlias = Callable[[str], list[Reading]]
