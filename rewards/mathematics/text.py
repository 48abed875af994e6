r"""One spelling for what is written in many ways: characters, LaTeX commands that only format, delimiters.

`tidy` gives the text that `reading` reads: ASCII but for words of other scripts, commands without synonyms, no
delimiters of mathematics (`$…$`, `\[…\]`), no formatting (`\mathbf`, `\color`, `\left`), no full stop at the end.
Text in mathematics stays marked as `\text{…}`, since `\text{m}` is a unit and `m` a variable.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from roll_like.data.numbers import fold_characters

_SYMBOLS = {
    "√": r"\sqrt ", "∛": r"\sqrt[3] ", "∞": r"\infty ", "°": r"^{\circ}", "º": r"^{\circ}", "˚": r"^{\circ}",
    "×": r"\times ", "✕": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "•": r"\cdot ", "∗": "*",
    "÷": "/", "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ", "⩽": r"\le ", "≦": r"\le ", "≥": r"\ge ", "⩾": r"\ge ",
    "≧": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≅": r"\approx ", "≃": r"\approx ", "≒": r"\approx ",
    "≡": r"\equiv ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "∖": r"\setminus ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
    "…": r"\ldots ", "⋯": r"\ldots ", "′": "'", "″": "''", "∶": ":", "、": ",", "。": ".", "｡": ".", "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "〈": r"\langle ", "〉": r"\rangle ", "【": "[", "】": "]", "∣": "|", "∠": r"\angle ", "△": r"\triangle ",
    "∧": r"\text{ and }", "∨": r"\text{ or }", "ⅇ": "e", "ⅈ": "i", "∑": r"\sum ", "∫": r"\int ", "⌊": r"\lfloor ",
    "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "“": '"', "”": '"', "⇒": r"\Rightarrow ",
    "→": r"\to ", "∴": "", "✓": "", "✅": "", "−": "-",
    "Ω": r"\Omega ", "μ": r"\mu ", "µ": r"\mu ", "℃": r"^{\circ}C", "℉": r"^{\circ}F",
}  # fmt: skip
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ":
    "theta", "ι": "iota", "κ": "kappa", "λ": "lambda", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "σ":
    "sigma", "τ": "tau", "υ": "upsilon", "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ":
    "Delta", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "ϕ":
    "phi", "ϵ": "epsilon", "ϑ": "theta",
}  # fmt: skip
_CHARACTERS = str.maketrans(_SYMBOLS | {char: f"\\{name} " for char, name in _GREEK.items()})
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₙₖ", "0123456789+-nk")

# commands that mean the same as another
_SYNONYMS = {
    r"\leq": r"\le", r"\leqslant": r"\le", r"\geq": r"\ge", r"\geqslant": r"\ge", r"\neq": r"\ne", r"\lt": "<",
    r"\gt": ">", r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\dbinom": r"\binom",
    r"\tbinom": r"\binom", r"\div": "/", r"\ast": "*", r"\varnothing": r"\emptyset", r"\backslash": r"\setminus",
    r"\smallsetminus": r"\setminus", r"\dots": r"\ldots", r"\cdots": r"\ldots", r"\dotsc": r"\ldots",
    r"\dotsb": r"\ldots",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]", r"\lparen": "(", r"\rparen": ")",
    r"\colon": ":", r"\mid": "|", r"\vert": "|", r"\lvert": "|", r"\rvert": "|", r"\degree": r"^{\circ}",
    r"\degrees": r"^{\circ}", r"\sim": r"\approx", r"\simeq": r"\approx", r"\cong": r"\approx", r"\doteq": r"\approx",
    r"\varphi": r"\phi", r"\varepsilon": r"\epsilon", r"\vartheta": r"\theta", r"\land": r"\text{ and }",
    r"\wedge": r"\text{ and }", r"\lor": r"\text{ or }", r"\vee": r"\text{ or }", r"\implies": r"\Rightarrow",
    r"\rightarrow": r"\to", r"\reals": r"\mathbb{R}", r"\R": r"\mathbb{R}", r"\Z": r"\mathbb{Z}", r"\prime": "'",
    r"\lg": r"\log_{10}", r"\arcsin": r"\asin", r"\arccos": r"\acos", r"\arctan": r"\atan", r"\tg": r"\tan",
    r"\ctg": r"\cot", r"\cosec": r"\csc", r"\arctg": r"\atan", r"\longrightarrow": r"\to", r"\newline": " ",
}  # fmt: skip
# commands and switches that only format, with what stands for them
_DROPPED = (
    r"\displaystyle|\textstyle|\scriptstyle|\limits|\nolimits|\boldmath|\normalsize|\large|\Large|\LARGE|\huge|\Huge"
    r"|\small|\bf|\rm|\it|\bfseries|\left\.|\right\.|\left|\right|\middle|\mathopen|\mathclose|\mleft|\mright|\bigl|\bigr|\Bigl|\Bigr|\biggl"
    r"|\biggr|\Biggl|\Biggr|\bigg|\Bigg|\big|\Big|\nonumber|\notag|\therefore|\because|\hfill|\centering|\strut|\null|\relax|\allowbreak"
)
_BLANKS = r"\quad|\qquad|\enspace|\thinspace|\space"
_PLAIN_WRAPPERS = (
    "mathbf", "bm", "boldsymbol", "mathit", "mathsf", "mathtt", "mathnormal", "underline", "boxed", "fbox", "framebox",
    "ensuremath", "emph", "textcolor", "colorbox", "pmb", "uline", "mathring", "vphantom",
)  # fmt: skip
_TEXTS = (
    "text", "textbf", "textit", "textrm", "textnormal", "textsf", "texttt", "mathrm", "mbox", "hbox", "operatorname",
    "textup",
)  # fmt: skip

_COMMAND = re.compile(r"\\(?:[A-Za-z]+\*?)")
_DROPPED_COMMAND = re.compile("(?:" + _DROPPED.replace("\\", r"\\").replace(r"\\.", r"\.") + r")(?![A-Za-z])")
_BLANK_COMMAND = re.compile("(?:" + _BLANKS.replace("\\", r"\\") + r")(?![A-Za-z])|(?<!\\)\\[ ,;:>]|(?<!\\)~")
_SPACE_WITH_LENGTH = re.compile(r"\\[hv]space\*?\{[^{}]*\}|\\[hv]?phantom\{[^{}]*\}|\\(?:tag|label)\*?\{[^{}]*\}")
_COLOURED = re.compile(r"\\(?:textcolor|colorbox|color|cellcolor)\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}")
_WRAPPED = re.compile(r"\\(?:" + "|".join(_PLAIN_WRAPPERS) + r")(?![A-Za-z])\s*")
_TEXT = re.compile(r"\\(?:" + "|".join(_TEXTS) + r")\*?(?![A-Za-z])\s*")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{(?:align|aligned|equation|gather|gathered|split|displaymath|math)\*?\}")
_MARKDOWN = re.compile(r"^(?:\*\*|__|`+)|(?:\*\*|__|`+)$")
_LABEL = re.compile(
    r"(?:(?:so|thus|hence|therefore|and)\b,?\s*)?(?:the\s+)?(?:(?:final|correct|right|required)\s+)?"
    r"(?:answer|ans|result|value|solution)\b\s*(?:(?:is|are|equals)\b\s*:?|[:=])\s*"
    r"|(?:最终|正确)?(?:答案|答|结果|解)(?:是|为|[:=])\s*[:]?\s*"
    r"|(?:approximately|approx\.?|about|around|roughly|nearly|exactly|equal\s+to|just|only|约为?|大约)\s+",
    re.IGNORECASE,
)
# a decimal comma is written {,}; so are groups of three
_GROUP_BLANK = re.compile(
    r"(?<![\d.,])(\d{1,3})((?:(?:\\[,;: !]|~|\{\\,\}|\\thinspace\s?|\{,\}|,\\!|\{\s\})\s?\d{3})+)(?!\d)"
)
_END = r"(?:(?!\\c[au]p)[^\[\](),;]|\([^()]*\))+"
_INTERVAL = re.compile(rf"([\[\]])({_END}[,;]{_END})([\[\]])")
_DIGIT_GROUP = re.compile(r"\d{3}")


def tidy(text: str) -> str:
    r"""Return the text in one spelling.

    >>> tidy(r"$\left( 3, \dfrac{\pi}{2} \right)$.")
    '( 3, \\frac{\\pi}{2} )'
    >>> tidy(r"10\,000"), tidy("√2 ≤ x²"), tidy(r"\mathbf{5}\ \mathrm{cm}")
    ('10000', '\\sqrt 2 \\le x^{2}', '5 \\text{cm}')
    """
    text = _marks_over_and_above(_GROUP_BLANK.sub(_joined, fold_characters(_vulgar(_subscripts(text)))))
    text = re.sub(r"\\not\s*=", r"\\ne ", text.translate(_CHARACTERS))
    text = _undelimited(text.strip())
    text = re.sub(r"(?<=\d)\s*\{,\}\s*(?=\d)", ".", text.replace(r"\!", ""))
    text = _COLOURED.sub("", _SPACE_WITH_LENGTH.sub(" ", _ENVIRONMENT.sub("", text)))
    text = _DROPPED_COMMAND.sub("", text)
    text = _COMMAND.sub(lambda match: _SYNONYMS.get(match[0], match[0]), text)
    text = _BLANK_COMMAND.sub(" ", text)
    text = _with_group(text, _WRAPPED, lambda inner: inner)
    text = _with_group(text, _TEXT, _text)
    text = re.sub(r"\^\s*\\circ(?![A-Za-z])", r"^{\\circ}", text)
    text = text.replace(r"\%", "%").replace(r"\#", "#").replace(r"\&", "&").replace(r"\_", "_")
    text = re.sub(r"\s+", " ", text.replace(r"\qed", " ")).strip(" \n\t,;:")
    return _turned(_bare(text))


def strip_label(text: str) -> str:
    r"""Return an answer without what introduces it: `Answer: 5`, `the answer is 5`, `about 5`, `答案是 5`.

    >>> strip_label("Answer: 5")
    '5'
    """
    plain = re.sub(r"^\\text\{([^{}]*)\}\s*", r"\1 ", text) if text.startswith("\\text{") else text
    stripped = plain.strip()
    for _ in range(3):
        match = _LABEL.match(stripped)
        if match is None:
            break
        stripped = stripped[match.end() :].strip()
    return text if stripped == plain.strip() or not stripped else stripped


def closing(text: str, start: int) -> int:
    r"""Return where the bracket at `start` closes; -1 if it does not. `\{` is no brace of a group."""
    depth = 0
    at = start
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
            continue
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return -1


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    r"""Return the parts of a text between separators that stand in no brackets.

    >>> split_top("1, (2, 3)", re.compile(","))
    ['1', ' (2, 3)']
    """
    depth = 0
    parts, start, at = [], 0, 0
    while at < len(text):
        if depth == 0 and (match := separator.match(text, at)) and match.end() > at:
            parts.append(text[start:at])
            at = start = match.end()
            continue
        opened = re.compile(r"\\begin\{|\\langle|\\\{|[(\[{]").match(text, at)
        closed = re.compile(r"\\end\{[^}]*\}|\\rangle|\\\}|[)\]}]").match(text, at)
        if opened is not None:
            depth += 1
            at = opened.end() if not opened[0].startswith("\\begin") else text.find("}", at) + 1 or len(text)
        elif closed is not None:
            depth = max(depth - 1, 0)
            at = closed.end()
        elif text.startswith("\\text{", at):
            end = closing(text, at + 5)
            at = end + 1 if end > 0 else at + 1
        else:
            at += 1
    parts.append(text[start:])
    return parts


def bracketed(text: str) -> tuple[str, str, str] | None:
    """Return the opening bracket, what it holds and the closing one, where they enclose the whole text."""
    for opening, ends in (("\\{", ("\\}",)), ("\\langle", ("\\rangle",)), ("(", (")", "]")), ("[", (")", "]"))):
        for end in ends:
            if text.startswith(opening) and text.endswith(end) and len(text) >= len(opening) + len(end):
                inner = text[len(opening) : len(text) - len(end)]
                return (opening, inner, end) if _balanced(inner) else None
    return None


def _balanced(text: str) -> bool:
    depth = 0
    for bracket in re.findall(r"\\begin|\\end|\\[{}]|[()\[\]{}]|\\langle|\\rangle", text):
        depth += 1 if bracket in ("\\begin", "\\{", "(", "[", "{", "\\langle") else -1
        if depth < 0:
            return False
    return depth == 0


def _vulgar(text: str) -> str:
    r"""Return the text with `½` as `\frac{1}{2}`: after a whole number the two are a mixed number."""
    if text.isascii():
        return text
    return re.sub("[¼-¾⅐-⅞↉]", _fraction, text)


def _fraction(match: re.Match[str]) -> str:
    value = Fraction(unicodedata.numeric(match[0])).limit_denominator(10)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _subscripts(text: str) -> str:
    return (
        text
        if text.isascii()
        else re.sub("[₀-₉₊₋ₙₖ]+", lambda match: "_{" + match[0].translate(_SUBSCRIPTS) + "}", text)
    )


def _marks_over_and_above(text: str) -> str:
    # a line over each digit
    text = re.sub("(?:\\d[\u0304\u0305])+", lambda match: f"\\overline{{{re.sub('[^0-9]', '', match[0])}}}", text)
    for char, name in (("ⁿ", "n"), ("ˣ", "x"), ("ᵏ", "k"), ("ⁱ", "i")):
        text = text.replace(char, f"^{{{name}}}")
    return text


def _joined(match: re.Match[str]) -> str:
    return match[1] + "".join(_DIGIT_GROUP.findall(match[2]))


def _undelimited(text: str) -> str:
    r"""Return the text without `$…$`, `\(…\)`, `\[…\]`; `\$` and a `$` before a number alone are a currency."""
    text = text.replace(r"\$", "\N{CURRENCY SIGN}").replace(r"\textdollar", "\N{CURRENCY SIGN}")
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    if text.count("$") % 2 and re.search(r"(?<![\w$])-?\$\s?-?\d", text):
        text = re.sub(r"\$(?=\s?-?\d)", "\N{CURRENCY SIGN}", text, count=1)
    return text.replace("$", " ").replace("\N{CURRENCY SIGN}", "$")


def _with_group(text: str, command: re.Pattern[str], replace: Callable[[str], str]) -> str:
    """Return the text with each group of a command replaced, innermost groups last."""
    at = 0
    while (match := command.search(text, at)) is not None:
        if match.end() < len(text) and text[match.end()] == "{":
            end = closing(text, match.end())
            if end >= 0:
                inner = replace(text[match.end() + 1 : end])
                text = text[: match.start()] + inner + text[end + 1 :]
                # what a formatting command held may hold another; `\text{…}` stays and is passed over
                at = match.start() + (len(inner) if inner.startswith("\\text{") else 0)
                continue
            text = text[: match.start()] + text[match.end() + 1 :]
            continue
        text = text[: match.start()] + text[match.end() :]
        at = match.start()
    return text


def _text(inner: str) -> str:
    """Return what a command for text holds: mathematics and single letters bare, words marked."""
    if re.fullmatch(r"\s*", inner):
        return " "
    if (
        not re.search(r"[^\W\d_]", inner)
        or re.match(r"\s*[-+]?\d", inner)
        or "\\frac" in inner
        or inner.strip() in ("e", "i", "d")
    ):
        return f" {inner} "
    inner = re.sub(r"\^\s*\{\s*(-?\d)\s*\}", r"^\1", inner)  # so that it holds no braces
    return "\\text{" + re.sub(r"\\text\{([^{}]*)\}", r"\1", inner) + "}"


def _turned(text: str) -> str:
    """Return the text with `]0,1[`, as French notation writes open ends, as `(0,1)`."""
    if not re.search(r"[\[\]]", re.sub(r"\[[^\[\]]*\]", "", text)):
        return text
    return _INTERVAL.sub(lambda match: f"{match[1].replace(']', '(')}{match[2]}{match[3].replace('[', ')')}", text)


def _bare(text: str) -> str:
    """Return the text without Markdown around it, outer braces and punctuation at its end."""
    while True:
        before = text
        text = _MARKDOWN.sub("", text).strip()
        if text.endswith(".") and not text.endswith("..."):
            text = text[:-1].rstrip()
        text = re.sub(r"(?:\\\\)+$", "", text.rstrip(" ,;:")).strip()
        if text.startswith("{") and closing(text, 0) == len(text) - 1:
            text = text[1:-1].strip()
        if text == before:
            return text
