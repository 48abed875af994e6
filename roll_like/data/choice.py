"""Which rows of a source become tasks, of which domain, and how often tasks of a domain are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

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
        """Check that a row was chosen, of all that are read.

        Raises:
            DataError: None was; names the values that were found.
        """
        if not self.rows:
            raise DataError(f"{self.source.place} holds no rows", fix=f"correct {self.key}.path or {self.key}.split")
        if sum(count for count, _ in self._left.values()) < self.rows:
            return
        field = max(self._left, key=lambda field: self._left[field][0])
        streamed = self.source.streaming
        raise DataError(
            f"{self.source.place}: `where` keeps none of {'the first ' if streamed else ''}{self.rows} rows; in "
            f"{field!r} there are {counted(self._found[field])}",
            fix=f"correct {self.key}.where"
            + ("; if later rows are meant, put them first: the others are not read before a run" if streamed else ""),
        )

    def _matches(self, row: Row, field: str, wanted: RowFilter) -> bool:
        value = row.fields[field]
        if value is None:
            return False
        if not isinstance(wanted, Band):
            options = wanted if isinstance(wanted, tuple) else (wanted,)
            return any(_equal(value, option) for option in options)
        number = as_number(value)
        if number is None:
            raise DataError(
                f"{row.origin}: expected a number in {field!r}, for the band in `where`, found {short(value)}",
                fix=f"correct the row, or {self.key}.where",
            )
        return (wanted.low is None or number >= wanted.low) and (wanted.high is None or number <= wanted.high)


def _equal(value: Any, option: str | bool | int | float) -> bool:
    """Return whether a field holds a value; a number and a text are equal if the text is that number, as in CSV.

    >>> _equal("3", 3), _equal(3.0, "3"), _equal("3", "3.0"), _equal(True, 1)
    (True, True, False, False)
    """
    if isinstance(value, bool) or isinstance(option, bool):
        return value is option
    if isinstance(value, str) == isinstance(option, str):
        return bool(value == option)
    number = as_number(value)
    return number is not None and number == as_number(option)


def counted(values: Mapping[str, int]) -> str:
    """Return values with how often each was found, the most frequent first.

    >>> counted({"math": 3, "code": 12})
    'code (12), math (3)'
    """
    ordered = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{value} ({count})" for value, count in ordered[:_SHOWN])
    return shown + (f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else "")


def refuse_weights(source: DataSource, tasks: Sequence[Task], domains: Mapping[str, int], key: str) -> None:
    """Check that the weights of domains are those of the domains that there are.

    Args:
        domains: Rows of each domain, those too that are left out for their length.

    Raises:
        DataError: A domain has no weight, or a weight has no rows.
    """
    if not source.domain_weights:
        return
    found = Counter(task.domain for task in tasks)
    for domain in source.domain_weights:
        if domain in found:
            continue
        if domain in domains:
            raise DataError(
                f"{source.place}: all {domains[domain]} prompts of the domain {domain!r} are longer than "
                "data.max_prompt_tokens",
                fix=f"raise that, or remove the domain from {key}.domain_weights",
            )
        kept = " that `where` keeps" if source.where else ""
        raise DataError(
            f"{source.place}: no row{kept} is of the domain {domain!r}; there are {counted(found)}",
            fix=f"remove it from {key}.domain_weights, or correct its name",
        )
    without = {domain: count for domain, count in found.items() if domain not in source.domain_weights}
    if without:
        raise DataError(
            f"{source.place}: there is no weight for the domains {counted(without)}",
            fix=f"add them to {key}.domain_weights, or leave their rows out by {key}.where",
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
