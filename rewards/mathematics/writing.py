"""Readings as text: equal for equal answers, where sympy writes them alike. Units and names are left out."""

from __future__ import annotations

from functools import singledispatch

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
from roll_like.builtin.rewards.mathematics.special import Based, Choice, Clock, Date, Phrase, Ratio, Residue, Word


@singledispatch
def written(reading: Reading) -> str:
    """Return a reading as text.

    >>> from roll_like.builtin.rewards.mathematics.reading import parse_answer
    >>> [written(parse_answer(text)[0]) for text in ("0.5", "2/4", "x = 1/2", "2, 1", "1:00 PM")]
    ['1/2', '1/2', '1/2', '1, 2', '13:00']
    """
    raise AssertionError(f"no text for {reading}")


@written.register
def _(reading: Value) -> str:
    return str(reading.expr)


@written.register
def _(reading: Several) -> str:
    items = [written(item) for item in reading.items]
    return f"({', '.join(items)})" if reading.kind == "tuple" else ", ".join(sorted(set(items)))


@written.register
def _(reading: Named) -> str:
    if len(reading.items) == 1:
        return written(reading.items[0][1])
    return ", ".join(sorted(f"{name} = {written(value)}" for name, value in reading.items))


@written.register
def _(reading: Numbers) -> str:
    return str(reading.numbers)


@written.register
def _(reading: Relation) -> str:
    return f"{reading.left} {reading.operator} {reading.right}"


@written.register
def _(reading: Table) -> str:
    return "; ".join(", ".join(map(written, row)) for row in reading.rows)


@written.register
def _(reading: Proportion) -> str:
    return ":".join([*map(written, reading.terms), "1"])


@written.register
def _(reading: Ratio) -> str:
    return ":".join(map(str, reading.terms))


@written.register
def _(reading: Clock) -> str:
    hours, rest = divmod(reading.seconds, 3600)
    return f"{hours}:{rest // 60:02}" + (f":{rest % 60:02}" if rest % 60 else "")


@written.register
def _(reading: Date) -> str:
    return f"{reading.year or ''}-{reading.month:02}-{reading.day:02}"


@written.register
def _(reading: Based) -> str:
    return f"{reading.digits}_{reading.base}"


@written.register
def _(reading: Residue) -> str:
    return f"{reading.value} mod {reading.modulus}"


@written.register
def _(reading: Choice) -> str:
    return reading.letter


@written.register
def _(reading: Phrase) -> str:
    return {"empty": "no solution", "infinite": "infinitely many"}.get(reading.kind, reading.kind)


@written.register
def _(reading: Word) -> str:
    return reading.text


__all__ = ["written"]
