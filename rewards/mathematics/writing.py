"""Readings as text: equal for equal answers, where sympy writes them alike. Units and names are left out."""

from __future__ import annotations

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


def written(reading: Reading) -> str:  # noqa: C901, PLR0911, PLR0912 - one case for each kind
    """Return a reading as text.

    >>> from roll_like.builtin.rewards.mathematics.reading import parse_answer
    >>> [written(parse_answer(text)[0]) for text in ("0.5", "2/4", "x = 1/2", "2, 1", "1:00 PM")]
    ['1/2', '1/2', '1/2', '1, 2', '13:00']
    """
    match reading:
        case Value(expr=expression):
            return str(expression)
        case Several(items=parts, kind=kind):
            items = [written(item) for item in parts]
            return f"({', '.join(items)})" if kind == "tuple" else ", ".join(sorted(set(items)))
        case Named(items=((_, value),)):
            return written(value)
        case Named(items=pairs):
            return ", ".join(sorted(f"{name} = {written(value)}" for name, value in pairs))
        case Numbers(numbers=numbers):
            return str(numbers)
        case Relation(left=left, operator=operator, right=right):
            return f"{left} {operator} {right}"
        case Table(rows=rows):
            return "; ".join(", ".join(map(written, row)) for row in rows)
        case Proportion(terms=terms):
            return ":".join([*map(written, terms), "1"])
        case Ratio(terms=numerals):
            return ":".join(map(str, numerals))
        case Clock(seconds=seconds):
            hours, rest = divmod(seconds, 3600)
            return f"{hours}:{rest // 60:02}" + (f":{rest % 60:02}" if rest % 60 else "")
        case Date(year=year, month=month, day=day):
            return f"{year or ''}-{month:02}-{day:02}"
        case Based(digits=digits, base=base):
            return f"{digits}_{base}"
        case Residue(value=residue, modulus=modulus):
            return f"{residue} mod {modulus}"
        case Choice(letter=letter):
            return letter
        case Phrase(kind=phrase):
            return {"empty": "no solution", "infinite": "infinitely many"}.get(phrase, phrase)
        case Word(text=text):
            return text
