r"""An expression as sympy's, from LaTeX or plain notation: `\frac{1}{2}`, `1/2`, `sqrt(2)`, `2x^2`, `exp(16)`.

A recursive-descent parser for what answers hold. Its readings where notation is ambiguous:

- letters that stand together are a product, with or without a sign between; case matters (`R` is not `r`)
- a whole number before a fraction of two whole numbers is a mixed number: `2\frac{3}{4}`, `2 3/4`
- `a/bc` is read from the left: `(a/b)·c`
- `e` and `i` are the constants, `f(x)`, `g(x)`, `h(x)` values of functions; other letters before a bracket are factors
- `\log` is to base 10 unless `natural` is set

Sums, integrals, limits and derivatives are parsed by math-verify's parser (latex2sympy2).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, LatexNormalizationConfig, parse
from sympy import Expr, Integer, Symbol

from roll_like.builtin.rewards.mathematics.scanner import Scanner, UnreadableError
from roll_like.builtin.rewards.mathematics.text import closing

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "exp")},
    **{name: getattr(sympy, name) for name in ("sinh", "cosh", "tanh", "coth")},
    **{f"{arc}{name}": getattr(sympy, f"a{name}") for name in ("sin", "cos", "tan", "cot") for arc in ("a", "arc")},
    **{f"a{name}": getattr(sympy, f"a{name}") for name in ("sinh", "cosh", "tanh", "sec", "csc")},
    "ln": sympy.log, "log": sympy.log, "sqrt": sympy.sqrt, "cbrt": sympy.cbrt,
    "abs": sympy.Abs, "floor": sympy.floor, "ceil": sympy.ceiling, "sgn": sympy.sign, "sign": sympy.sign,
    "Re": sympy.re, "Im": sympy.im, "det": sympy.Determinant, "gcd": sympy.gcd, "lcm": sympy.lcm, "max": sympy.Max,
    "min": sympy.Min, "binom": sympy.binomial, "binomial": sympy.binomial, "factorial": sympy.factorial,
}  # fmt: skip
_SEVERAL = {"gcd", "lcm", "max", "min", "binom", "binomial"}
_TRIGONOMETRIC = {"sin", "cos", "tan", "cot", "sec", "csc"}
_GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu",
    "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega", "Gamma", "Delta", "Theta",
    "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega", "ell", "hbar", "aleph",
}  # fmt: skip
_CONSTANTS = {"pi": sympy.pi, "infty": sympy.oo, "infinity": sympy.oo, "oo": sympy.oo, "inf": sympy.oo}
_ACCENTS = {"vec", "hat", "bar", "overline", "tilde", "widehat", "overrightarrow", "dot", "widetilde", "angle"}
_ACCENTS |= {"triangle"}
_LEFT_TO_MATH_VERIFY = re.compile(r"\\(?:sum|int|iint|oint|prod|lim|partial|nabla)(?![A-Za-z])|\\frac\{d\}\{d")
_INFIX = re.compile(r"\\(?:over|choose)(?![A-Za-z])")
_WORD = re.compile(r"[A-Za-z]+")
_PROSE = re.compile(r"(?:(?<=\s)(?<!frac )|^)[A-Za-z]{2,}(?=\s|$)")
_NAMES = sorted(
    {*_FUNCTIONS, "pi", "theta", "alpha", "beta", "gamma", "lambda", "infinity", "infty", "phi", "omega"}
    | {"sigma", "mod"},
    key=len,
    reverse=True,
)
_KNOWN_NAMES = set(_NAMES) | {"oo", "inf", "rho", "delta"}
_COMBINATIONS = re.compile(r"([CPA])\s*_\s*\{?(\d+)\}?\s*\^\s*\{?(\d+)\}?(?![\w^])")


class ExpressionParser(Scanner):
    r"""Parses one expression.

    Args:
        text: The expression, as `tidy` writes it.
        natural: `\\log` without a base is the natural logarithm.

    Attributes:
        decimals: The expression has decimals, so its value is only as precise as they are.
        bare_log: It has a `\\log` without a base.
    """

    def __init__(self, text: str, *, natural: bool = False) -> None:
        super().__init__(text)
        self.natural = natural
        self.bare_log = False

    def parse(self) -> Expr:
        """Return the expression; UnreadableError if the text is none."""
        if _LEFT_TO_MATH_VERIFY.search(self.text):
            return _by_math_verify(self.text)
        words = [word for word in _PROSE.findall(self.text) if word not in _KNOWN_NAMES]
        if words and words != [self.text]:
            raise UnreadableError(f"{words[0]!r} is a word")
        if _INFIX.search(self.text) and not self.text.startswith("{"):
            self.text = f"{{{self.text}}}"
        value = self._sum()
        self._blank()
        if self.at < len(self.text):
            raise UnreadableError(f"cannot read {self.text[self.at : self.at + 20]!r}")
        if not isinstance(value, Expr):
            raise UnreadableError("not an expression")
        return value

    # grammar

    def _sum(self) -> Expr:
        self._deeper()
        value = self._product()
        while True:
            if self._take("+"):
                value = value + self._product()
            elif self._take("-"):
                value = value - self._product()
            else:
                return self._leave(value)

    def _product(self) -> Expr:
        value = self._signed()
        while True:
            self._blank()
            if self._take("\\cdot", "\\times", "*"):
                value = value * self._signed()
            elif self._take("/"):
                value = _divided(value, self._signed())
            elif self._take("\\bmod", "\\mod", "\\text{mod}", "mod "):
                value = value % self._signed()
            elif self._factor_follows():
                value = value * self._power()
            else:
                return value

    def _signed(self) -> Expr:
        self._blank()
        if self._take("-"):
            self._deeper()
            return -self._leave(self._signed())
        if self._take("+"):
            self._deeper()
            return self._leave(self._signed())
        return self._power()

    def _power(self) -> Expr:
        value = self._postfix(self._primary())
        self._blank()
        if self._take("**", "^"):
            value = value ** self._exponent()
            value = self._postfix(value)
        return value

    def _exponent(self) -> Expr:
        self._blank()
        self._deeper()
        if self._take("-"):
            return -self._leave(self._exponent())
        if self._take("+"):
            return self._leave(self._exponent())
        value = self._postfix(self._primary(), primes=False)
        self._blank()
        if self._take("**", "^"):
            value = value ** self._exponent()
        return self._leave(value)

    def _postfix(self, value: Expr, *, primes: bool = True) -> Expr:
        while True:
            if self._take("!!"):
                value = sympy.factorial2(value)
            elif self._take("!"):
                value = sympy.factorial(value)
            elif self._take("%"):
                value = value / 100
            elif self._take("^{\\circ}"):
                value = value * sympy.pi / 180
            elif primes and self._take("'"):
                value = Symbol(f"{value}'")
            else:
                return value

    def _primary(self) -> Expr:
        self._blank()
        if self.at >= len(self.text):
            raise UnreadableError("it ends where a value should stand")
        char = self.text[self.at]
        if char.isdigit() or (char == "." and self.text[self.at + 1 : self.at + 2].isdigit()):
            return self._number()
        if char == "\\":
            return self._command()
        if char == "{":
            return self._group()
        if char in "([":
            return self._bracketed(char)
        if char == "|":
            self.at += 1
            return self._until("|", sympy.Abs)
        if char.isalpha() and char.isascii():
            return self._letters()
        raise UnreadableError(f"cannot read {self.text[self.at : self.at + 20]!r}")

    # parts

    def _command(self) -> Expr:
        match = re.compile(r"\\[A-Za-z]+").match(self.text, self.at)
        if match is None:
            if self._take("\\{"):
                return self._until("\\}", _unchanged)
            raise UnreadableError(f"cannot read {self.text[self.at : self.at + 20]!r}")
        name = match[0][1:]
        self.at = match.end()
        if name in _COMMANDS:
            return _COMMANDS[name](self)
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in _FUNCTIONS:
            return self._applied(name)
        if name in _GREEK:
            return self._symbol(name)
        return self._accented(name)

    def _fraction(self) -> Expr:
        return _divided(self._argument(), self._argument())

    def _binomial(self) -> Expr:
        return sympy.binomial(self._argument(), self._argument())

    def _root(self) -> Expr:
        self._blank()
        degree = self._until("]", _unchanged) if self._take("[") else Integer(2)
        return self._argument(whole_number=True) ** (1 / degree)

    def _floor(self) -> Expr:
        return self._until("\\rfloor", sympy.floor)

    def _ceiling(self) -> Expr:
        return self._until("\\rceil", sympy.ceiling)

    def _text(self) -> Expr:
        end = closing(self.text, self.at)
        held = self.text[self.at + 1 : end].strip()
        if end >= 0 and held in _FUNCTIONS:
            self.at = end + 1
            return self._applied(held)
        if end >= 0 and held in _CONSTANTS:
            self.at = end + 1
            return _CONSTANTS[held]
        if end >= 0 and re.fullmatch(r"[A-Za-z]{1,3}", held):
            self.at = end + 1
            return self._symbol(held)
        raise UnreadableError(f"text {held!r} in an expression")

    def _accented(self, name: str) -> Expr:
        if name not in _ACCENTS:
            raise UnreadableError(f"cannot read \\{name}")
        self._blank()
        if self.text[self.at : self.at + 1] == "{":
            end = closing(self.text, self.at)
            held, self.at = self.text[self.at + 1 : end], end + 1
        else:
            match = re.compile(r"[A-Za-z]+" if name in ("angle", "triangle") else r"[A-Za-z]").match(self.text, self.at)
            if match is None:
                raise UnreadableError(f"nothing after \\{name}")
            held, self.at = match[0], match.end()
        return self._symbol(f"{name}{{{held.replace(' ', '')}}}")

    def _group(self) -> Expr:
        end = closing(self.text, self.at)
        if end < 0:
            raise UnreadableError("a brace is not closed")
        held, self.at = self.text[self.at + 1 : end], end + 1
        for infix, make in (("\\over", _divided), ("\\choose", sympy.binomial)):
            above, found, below = held.partition(infix)
            if found and not below[:1].isalpha():
                return make(self._inner(above), self._inner(below))
        return self._inner(held)

    def _inner(self, text: str) -> Expr:
        parser = ExpressionParser(text, natural=self.natural)
        parser.depth = self.depth + 1
        value = parser.parse()
        self.decimals |= parser.decimals
        self.bare_log |= parser.bare_log
        return value

    def _bracketed(self, opening: str) -> Expr:
        self.at += 1
        return self._until(")" if opening == "(" else "]", _unchanged)

    def _until(self, end: str, make: Callable[[Expr], Any]) -> Expr:
        value = self._sum()
        self._blank()
        if not self._take(end):
            raise UnreadableError(f"{end} is missing")
        return make(value)

    def _argument(self, *, whole_number: bool = False) -> Expr:
        r"""Return the argument of a command: a group, or one character as in `\frac12` (`\sqrt12` takes the number)."""
        self._blank()
        char = self.text[self.at : self.at + 1]
        if char.isdigit() and not whole_number:
            self.at += 1
            return Integer(int(char))
        if char == "(" or not char.isalpha():
            return self._primary()
        if whole_number and (word := _WORD.match(self.text, self.at)) and word[0] in _KNOWN_NAMES:
            return self._letters()
        self.at += 1
        return self._letter(char)

    def _letters(self) -> Expr:
        combination = _COMBINATIONS.match(self.text, self.at)
        if combination is not None:
            self.at = combination.end()
            count = sympy.binomial if combination[1] == "C" else sympy.ff
            return count(Integer(int(combination[2])), Integer(int(combination[3])))
        match = _WORD.match(self.text, self.at)
        assert match is not None
        run = match[0]
        name = (
            run if run in _KNOWN_NAMES else next((one for one in _NAMES if len(one) > 1 and run.startswith(one)), None)
        )
        if name is None:
            known = any(one in run for one in _NAMES if len(one) > 2 or one in ("pi", "ln"))
            if len(run) > 4 and not known:
                raise UnreadableError(f"{run!r} is a word")
            self.at += 1
            return self._letter(run[0])
        self.at += len(name)
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in _FUNCTIONS:
            return self._applied(name)
        return self._symbol(name)

    def _letter(self, letter: str) -> Expr:
        if letter in "CP" and self.text[self.at : self.at + 1] == "(" and (pair := self._pair()) is not None:
            return (sympy.binomial if letter == "C" else sympy.ff)(*pair)
        if letter in "fghFG" and self.text[self.at : self.at + 1] == "(":
            self.at += 1
            return self._until(")", lambda value: Symbol(f"{letter}({value})"))
        symbol = self._symbol(letter)
        return {Symbol("e"): sympy.E, Symbol("i"): sympy.I}.get(symbol, symbol)

    def _pair(self) -> list[Expr] | None:
        """Return the two arguments of `C(10, 3)`; None, and nothing is read, if there are not two."""
        start = self.at
        try:
            values = self._arguments()
        except UnreadableError:
            values = []
        if len(values) == 2:
            return values
        self.at = start
        return None

    def _symbol(self, name: str) -> Symbol:
        match = re.compile(r"\s*_\s*(?:\{([^{}]*)\}|([A-Za-z0-9]))").match(self.text, self.at)
        if match is not None:
            self.at = match.end()
            name = f"{name}_{(match[1] or match[2] or '').replace(' ', '')}"
        return Symbol(name)

    def _applied(self, name: str) -> Expr:
        """Return a function's value; `sin 2x` takes the factors up to the next sign or function."""
        base = self._subscript(name)
        power: Expr | None = None
        self._blank()
        if self._take("^"):
            power = self._exponent()
        if name in _SEVERAL:
            values = self._arguments()
            if not values or (name.startswith("binom") and len(values) != 2):
                raise UnreadableError(f"arguments of {name}")
            return _FUNCTIONS[name](*values)
        argument = self._function_argument()
        function = _FUNCTIONS[name]
        if power == -1 and name in _TRIGONOMETRIC:
            return _FUNCTIONS[f"a{name}"](argument)
        value = sympy.log(argument, base) if base is not None else function(argument)
        return value if power is None else value**power

    def _subscript(self, name: str) -> Expr | None:
        """Return the base of a logarithm; None for other functions and the natural one."""
        self._blank()
        base: Expr | None = None
        if name == "log":
            if self._take("_"):
                return self._number() if self.text.startswith("10", self.at) else self._argument()
            self.bare_log = True
            base = None if self.natural else Integer(10)
        return base

    def _function_argument(self) -> Expr:
        self._blank()
        char = self.text[self.at : self.at + 1]
        if char in ("(", "[", "{"):
            return self._postfix(self._primary())
        value = self._signed() if char == "-" else self._power()
        while self._factor_follows(functions=False):
            value = value * self._power()
        return value

    def _arguments(self) -> list[Expr]:
        self._blank()
        if not self._take("("):
            raise UnreadableError("brackets are missing")
        values = [self._sum()]
        while self._blank() or self._take(","):
            values.append(self._sum())
        if not self._take(")"):
            raise UnreadableError(") is missing")
        return values

    # scanning

    def _factor_follows(self, *, functions: bool = True) -> bool:
        """Tell whether a factor follows without a sign between."""
        self._blank()
        rest = self.text[self.at : self.at + 16]
        if rest[:1].isdigit() and self.text[self.at - 1] != "!":
            raise UnreadableError("two numbers beside each other")
        if not rest or rest[0] in "+-*/^_=<>,;:!%)]}&|'\"$":
            return False
        if rest.startswith("\\"):
            name = re.match(r"\\([A-Za-z]+)", rest)
            if name is None:
                return False
            if name[1] in _FUNCTIONS:
                return functions or name[1] == "sqrt"
            return name[1] in {"frac", "binom", "sqrt", "text", "lfloor", "lceil"} | _GREEK | set(_CONSTANTS) | _ACCENTS
        if not functions and any(rest.startswith(name) for name in _FUNCTIONS if len(name) > 2):
            return False
        return functions or rest[0] not in "(["


_COMMANDS: dict[str, Callable[[ExpressionParser], Expr]] = {
    "frac": ExpressionParser._fraction,
    "binom": ExpressionParser._binomial,
    "sqrt": ExpressionParser._root,
    "lfloor": ExpressionParser._floor,
    "lceil": ExpressionParser._ceiling,
    "text": ExpressionParser._text,
}


def _unchanged(value: Expr) -> Expr:
    return value


def _divided(above: Expr, below: Expr) -> Expr:
    if below.is_zero:
        raise UnreadableError("division by zero")
    return above / below


def _by_math_verify(text: str) -> Expr:
    config = LatexNormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none")
    target = LatexExtractionConfig(normalization_config=config, boxed_match_priority=-1)
    found = parse(f"${text}$", extraction_config=[target], fallback_mode="no_fallback", parsing_timeout=None)
    if not found or not isinstance(found[0], Expr):
        raise UnreadableError("math-verify cannot read it")
    value = found[0].doit()
    if not isinstance(value, Expr):
        raise UnreadableError("not an expression")
    return value.xreplace({symbol: _renamed(symbol) for symbol in value.free_symbols})


def _renamed(symbol: Symbol) -> Expr:
    return {"e": sympy.E, "i": sympy.I}.get(symbol.name, Symbol(symbol.name))
