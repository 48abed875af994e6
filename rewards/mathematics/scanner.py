"""Scanning an expression: positions, depth, and the numbers in it."""

from __future__ import annotations

import re

from sympy import Expr, Integer, Rational

MAX_LENGTH = 2_000
MAX_DEPTH = 60
MAX_DIGITS = 4_000

_NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+")
_RECURRING = re.compile(
    r"(\d+)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{(\d+)\}(?:(\d*)\\dot\s*\{(\d)\})?|\\(?:bar|overline|dot)\s*(\d)|\((\d+)\))"
)
_ELLIPSIS = re.compile(r"(\d*)\.(\d*?)(\d+?)\3+(?:\\ldots|\.\.\.)")
_EXPONENT = re.compile(r"[eE]([-+]?\d{1,4})(?![\d.])")
_MIXED = re.compile(
    r"\s*(?:\\frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)\s*(\d)|\{(\d+)\}\s*(\d)|(\d)\s*\{(\d+)\})|(?<=\s)(\d+)/(\d+)(?![\d^]))"
)


class UnreadableError(ValueError):
    """The text is no expression that can be read."""


class Scanner:
    """A place in a text, with the numbers that can be read from it.

    Attributes:
        decimals: A number with decimals was read.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise UnreadableError(f"longer than {MAX_LENGTH} characters")
        self.text = text
        self.at = 0
        self.depth = 0
        self.decimals = False

    def _number(self) -> Expr:
        recurring = _RECURRING.match(self.text, self.at) or _ELLIPSIS.match(self.text, self.at)
        if recurring is not None:
            self.at = recurring.end()
            return _recurring(recurring)
        match = _NUMBER.match(self.text, self.at)
        assert match is not None
        if len(match[0]) > MAX_DIGITS:
            raise UnreadableError(f"a number of more than {MAX_DIGITS} digits")
        self.at = match.end()
        value: Expr = Rational(match[0].replace(",", ""))
        self.decimals = self.decimals or "." in match[0]
        exponent = _EXPONENT.match(self.text, self.at)
        if exponent is not None:
            self.at = exponent.end()
            return value * Integer(10) ** int(exponent[1])
        mixed = _MIXED.match(self.text, self.at)
        if mixed is not None and "." not in match[0]:
            numerator, denominator = (int(part) for part in mixed.groups() if part is not None)
            if 0 < numerator < denominator:
                self.at = mixed.end()
                return value + Rational(numerator, denominator)
        return value

    def _blank(self) -> bool:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1
        return False

    def _take(self, *tokens: str) -> bool:
        self._blank()
        for token in tokens:
            if self.text.startswith(token, self.at):
                end = self.at + len(token)
                if token[0] == "\\" and token[-1].isalpha() and self.text[end : end + 1].isalpha():
                    continue
                self.at = end
                return True
        return False

    def _deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnreadableError("nested too deeply")

    def _leave(self, value: Expr) -> Expr:
        self.depth -= 1
        return value


def _recurring(match: re.Match[str]) -> Rational:
    """Return the value of a decimal with a mark over, brackets around or an ellipsis behind what recurs."""
    if match.re is _ELLIPSIS:
        whole, fixed, recurs = match[1] or "0", match[2], match[3]
    else:
        whole, fixed = match[1], match[2]
        recurs = match[3] + (match[4] or "") + (match[5] or "") if match[3] else match[6] or match[7]
    scale = 10 ** len(fixed)
    return Rational(int(whole + fixed), scale) + Rational(int(recurs), scale * (10 ** len(recurs) - 1))
