"""Arithmetic, without `eval`."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

from roll_like.tools.base import Tool, ToolError, text_tool

_Number: TypeAlias = int | float

_MAX_LENGTH = 1000  # characters of an expression
_MAX_BITS = 4096  # of a whole number, in between too

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_CONSTANTS: dict[str, _Number] = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin")},
    **{name: getattr(math, name) for name in ("acos", "atan", "floor", "ceil", "gcd", "lcm", "degrees", "radians")},
    **{function.__name__: function for function in (abs, round, min, max)},
}


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression, as text: whole numbers exactly, others with 12 digits.

    >>> calculate("(2 + 3) * 7 / 5")
    '7'

    Args:
        expression: Numbers, + - * / // % ** ( ), `^` for a power, and functions such as sqrt, round, gcd.

    Raises:
        ToolError: It is no such expression, has no value, or one too large.
    """
    if len(expression) > _MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters; at most {_MAX_LENGTH} are read")
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    try:
        tree = ast.parse(text, mode="eval")
        value = _value(tree.body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ToolError(f"{expression!r} is not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("the value is too large") from error
    except (ValueError, TypeError) as error:
        if isinstance(error, ToolError):
            raise
        raise ToolError(f"{expression!r} has no value: {error}") from error
    return _written(value)


def calculator() -> Tool:
    """Return the tool `calculator(expression)`."""

    async def call(expression: str) -> str:
        return calculate(expression)

    description = "Compute an arithmetic expression."
    return text_tool("calculator", description, "expression", "Such as (2 + 3) * 7 or sqrt(2).", call)


def _value(node: ast.expr) -> _Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _bounded(_UNARY[type(sign)](_value(operand)))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _bounded(_BINARY[type(sign)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
    raise ToolError(f"{ast.unparse(node)!r} is not arithmetic; numbers, + - * / // % ** ( ), {', '.join(_FUNCTIONS)}")


def _power(base: _Number, exponent: _Number) -> _Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) * base.bit_length() > _MAX_BITS:
        raise OverflowError
    return _bounded(base**exponent)


def _bounded(value: Any) -> _Number:
    if isinstance(value, complex):
        raise ToolError("the value is not a real number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverflowError
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError
    number: _Number = value
    return number


def _written(value: _Number) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.12g}"
