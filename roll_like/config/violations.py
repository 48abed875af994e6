"""Combinations of settings that cannot work, and how they are reported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError


@dataclass(frozen=True, slots=True)
class Violation:
    """A combination that cannot work: the key to change, and why."""

    path: tuple[str | int, ...]
    message: str


def raise_violations(title: str, violations: Iterable[Violation]) -> None:
    """Raise one ValidationError that lists `violations`, if there are any."""
    errors = [
        InitErrorDetails(type=PydanticCustomError("rule", violation.message), loc=violation.path, input=None)
        for violation in violations
    ]
    if errors:
        raise ValidationError.from_exception_data(title, errors)
