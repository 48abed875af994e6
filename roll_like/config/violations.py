"""What can be wrong with a configuration, and how it is reported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError


@dataclass(frozen=True, slots=True)
class Violation:
    """A combination that cannot work: the key to change, and why."""

    path: tuple[str | int, ...]
    message: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found: an `error` stops a run, a `warning` may not be meant, a `note` was not checked."""

    level: Literal["error", "warning", "note"]
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.level}: {self.key}: {self.message}"


def raise_violations(title: str, violations: Iterable[Violation]) -> None:
    """Raise one ValidationError that lists `violations`, if there are any."""
    errors = [
        InitErrorDetails(type=PydanticCustomError("rule", violation.message), loc=violation.path, input=None)
        for violation in violations
    ]
    if errors:
        raise ValidationError.from_exception_data(title, errors)
