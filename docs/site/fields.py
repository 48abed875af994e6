"""An extension of griffe: keys whose type is written `Annotated[int, Field(ge=0)] = Field(default=0, description=…)`.

griffe_pydantic reads only the first `Field` of such a key and would lose its default and its description.
"""

from __future__ import annotations

from typing import Any

from griffe import Attribute, ExprCall, ExprSubscript, ExprTuple, Extension


class Annotated(Extension):
    """Show the plain type of a key that has both."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Take `int` for `Annotated[int, …]`."""
        kind, value = attr.annotation, attr.value
        if (
            isinstance(kind, ExprSubscript)
            and kind.canonical_name == "Annotated"
            and isinstance(kind.slice, ExprTuple)
            and isinstance(value, ExprCall)
            and str(value.function) == "Field"
        ):
            attr.annotation = kind.slice.elements[0]
