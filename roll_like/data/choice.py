"""Which rows of a source become tasks, of which domain, and how often tasks of a domain are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from roll_like.config.data import Band, DataSource, RowFilter
from roll_like.data.bad_rows import LeftOut
from roll_like.data.fields import as_number
from roll_like.data.messages import require_fields, short
from roll_like.data.order import ItemSource, exact_weight
from roll_like.data.rows import Row
from roll_like.errors import DataError
from roll_like.types import Task

SourceT = TypeVar("SourceT", bound=ItemSource[Task])
#: Values or domains that a message names.
_SHOWN = 12


class RowChoice:
    """Chooses rows by a source's `where`, and counts them.

    Args:
        key: Place of the source in the configuration, for messages.

    Attributes:
        rows: Rows that were looked at.
    """

    def __init__(self, source: DataSource, key: str) -> None:
        self.source = source
        self.key = key
        self.rows = 0
        self._left: dict[str, tuple[int, str]] = {}
        self._found: dict[str, Counter[str]] = {field: Counter() for field in source.where}

    def keeps(self, row: Row) -> bool:
        """Return whether a row becomes a task. One without a value (null) is left out as one with another value is.

        Raises:
            DataError: A field is missing, or holds no number where `where` has a band.
        """
        self.rows += 1
        for field, wanted in self.source.where.items():
            require_fields(row, {field: f"{self.key}.where"})
            value = row.fields[field]
            self._found[field][short(value)] += 1
            if not self._matches(row, field, wanted):
                count, first = self._left.get(field, (0, f"{row.origin} ({short(value)})"))
                self._left[field] = (count + 1, first)
                return False
        return True

    def domain(self, row: Row) -> str:
        """Return a row's domain.

        Raises:
            DataError: `domain_field` names it, and the row has no text there.
        """
        label, field = self.source.domain_label, self.source.domain_field
        if field is None or label is not None:
            return label or self.source.label
        require_fields(row, {field: f"{self.key}.domain_field"})
        value = row.fields[field]
        if not isinstance(value, str) or not value.strip():
            raise DataError(
                f"{row.origin}: expected a text in {field!r}, the row's domain, found {short(value)}",
                fix=f"correct the row, or {self.key}.domain_field (`{field}.0` is the first item of a list)",
            )
        return value

    def left_out(self) -> tuple[LeftOut, ...]:
        """Return the rows that were not chosen, by the field for which they were not."""
        return tuple(
            LeftOut(problem=f"with a {field!r} that `where` does not keep", count=count, first=first)
            for field, (count, first) in sorted(
                self._left.items(), key=lambda item: [*self.source.where].index(item[0])
            )
        )

    def refuse_none(self) -> None:
        """Check that a row was chosen.

        Raises:
            DataError: None was; names the values that were found.
        """
        if sum(count for count, _ in self._left.values()) < self.rows:
            return
        field = max(self._left, key=lambda field: self._left[field][0])
        raise DataError(
            f"{self.source.place}: `where` keeps none of {self.rows} rows; in {field!r} there are "
            f"{counted(self._found[field])}",
            fix=f"correct {self.key}.where",
        )

    def _matches(self, row: Row, field: str, wanted: RowFilter) -> bool:
        value = row.fields[field]
        if value is None:
            return False
        if not isinstance(wanted, Band):
            options = wanted if isinstance(wanted, tuple) else (wanted,)
            return any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in options)
        number = as_number(value)
        if number is None:
            raise DataError(
                f"{row.origin}: expected a number in {field!r}, for the band in `where`, found {short(value)}",
                fix=f"correct the row, or {self.key}.where",
            )
        return (wanted.low is None or number >= wanted.low) and (wanted.high is None or number <= wanted.high)


def counted(values: Mapping[str, int]) -> str:
    """Return values with how often each was found, the most frequent first.

    >>> counted({"math": 3, "code": 12})
    'code (12), math (3)'
    """
    ordered = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{value} ({count})" for value, count in ordered[:_SHOWN])
    return shown + (f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else "")


def refuse_weights(source: DataSource, tasks: Sequence[Task], key: str) -> None:
    """Check that the weights of domains are those of the domains that there are.

    Raises:
        DataError: A domain has no weight, or a weight has no rows.
    """
    if not source.domain_weights:
        return
    found = Counter(task.domain for task in tasks)
    for domain in source.domain_weights:
        if domain not in found:
            raise DataError(
                f"{key}.domain_weights has {domain!r}, and no row is of this domain; there are {counted(found)}",
                fix="remove it, or correct its name",
            )
    without = {domain: count for domain, count in found.items() if domain not in source.domain_weights}
    if without:
        raise DataError(
            f"{key}.domain_weights has no weight for {counted(without)}",
            fix=f"name each of these, or leave their rows out by {key}.where",
        )


def by_domain(source: SourceT, weights: Mapping[str, float]) -> Iterator[SourceT]:
    """Yield a source in parts, one for each domain with a weight; whole, where none has one.

    The source's own weight is divided among the parts, so that other sources are drawn as often as before.
    """
    if not weights:
        yield source
        return
    total = sum(map(exact_weight, weights.values()))
    for domain, weight in weights.items():
        yield replace(
            source,
            name=f"{source.name} ({domain})",
            weight=exact_weight(source.weight) * exact_weight(weight) / total,
            items=tuple(task for task in source.items if task.domain == domain),
        )
