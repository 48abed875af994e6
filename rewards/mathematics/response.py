r"""Where a response's final answer stands.

In the last `\boxed{…}` (or `\fbox{…}`); without a box after the last `#### `; without that after the last "the answer
is …", in any of some languages; without that it is the last line that has mathematics: all of it, its last
`$…$`, or its last number. Boxes that stand together (`\boxed{1} and \boxed{2}`) are one answer. A last box that is not
closed was cut off and is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from roll_like.data.boxed import outer_boxes
from roll_like.data.numbers import find_numbers, fold_characters

_TOGETHER = re.compile(
    r"[\s$,;&*()\[\]\\]*(?:(?:\\text\{\s*)?(?:and|or|und|oder|et|ou|y|e|и|或|和)\s*\}?)?[\s$,;&*()\[\]\\]*"
)
# GSM8K's mark of a final answer; `#### 1. Introduction` and `#### Step 2` are Markdown headings
_MARKED = re.compile(r"^[ \t]*####[ \t]*(?!\d+[.)][ \t]+[A-Za-z])([-+−$\\(\[{.\d√π€£½].*)$", re.MULTILINE)
_STATED = re.compile(
    r"(?:\b(?:answer|solution|result|value)s?(?:\s+(?:to|of|for|here|therefore|then)\b[^.\n:=]{0,80}?)?[\s*_]*"
    r"(?:\b(?:is|are|would\s+be|must\s+be|should\s+be|equals|will\s+be)\b|[:=])"
    r"|(?:答案|答え|答|结果|正解)\s*(?:是|为|為|は|[::])|故?选|故填|所以答案"
    r"|\b(?:Antwort|Ergebnis|Lösung)(?:\s+(?:ist|lautet)|\s*:)|\b(?:réponse|résultat)(?:\s+(?:est|finale\s+est)|\s*:)"
    r"|\b(?:respuesta|resultado|resposta|risposta)(?:\s+(?:es|final\s+es|é|final\s+é|è)|\s*:)|\bответ\s*[::—-]|정답(?:은|\s*:)"
    r")[\s*_]*[::]?[\s*_]*",
    re.IGNORECASE,
)
_STRONG = re.compile(r"\banswer|答|Antwort|réponse|respuesta|resposta|risposta|ответ|정답|故选|正解", re.IGNORECASE)
# a bound is no value
_BOUND = (
    r"(?:(?:strictly\s+)?(?:less|fewer|more|greater|larger|smaller|higher|lower|bigger)\s+than(?:\s+or\s+equal\s+to)?"
    r"|no\s+(?:more|less|fewer|greater)\s+than|between|bounded\s+by)"
)
_LIMIT = r"(?:at\s+(?:least|most)|up\s+to)"
_NEGATED = re.compile(
    rf"\s*(?:(?:not|n['’]t|never|wrong|unknown|unclear)\b|[$*_(]*(?:{_BOUND}|{_LIMIT})\b)", re.IGNORECASE
)
# nor is what has a subscript, a base that cannot be read
_BOUND_BEHIND = re.compile(
    r"[$*_\\)\s]*(?:\w+\s+)?or\s+(?:more|less|fewer|greater|higher|lower|above|below)\b|\)?_[{\w\\]", re.IGNORECASE
)
# "she needs at least 42" may be how a line gives the answer
_DENIED_BEFORE = re.compile(
    rf"(?:(?:\b(?:not|never|cannot)|n['’]t)(?:\s+(?:be|equal|equals|to|exactly|the\s+answer|it))*|\b{_BOUND})[\s$*_(\\]*$",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\.(?=\s|$)(?<!\d\.(?=\d))|[。!?](?=\s|$)|(?<=\S)[;](?=\s)")
_MATH = re.compile(r"\$\$[^$]+\$\$|\$[^$\n]+\$|\\\((?:[^\\]|\\(?![()]))+\\\)|\\\[(?:[^\\]|\\(?![\[\]]))+\\\]")
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_JOINT = re.compile(r"\s*(?:,|;|,?\s*(?:and|or)|和|或)\s*")
_CONJUNCTION = re.compile(r"\b(?:and|or)\b")
_PROSE = re.compile(r"[^\W\d_]{2,}")
_REASON = re.compile(
    r"\s*(?:,?\s*\b(?:because|since|as|which|where|so|when|after|by|using|in\s+total|per\s+the)\b|\().*", re.DOTALL
)
_LINES = 6


def boxes(text: str) -> list[str] | None:
    r"""Return what the boxes hold, in order; None if the last one is not closed.

    >>> boxes(r"\boxed{1} and \boxed 2")
    ['1', '2']
    >>> boxes(r"\boxed{1}, so \boxed{2") is None
    True
    """
    found = outer_boxes(text, bare=True)
    return [box.held for box in found] if all(box.closed for box in found) else None


def boxed_answer(text: str) -> str | None:
    r"""Return the answer in the last box, or in the last boxes that stand together, with commas between."""
    found = outer_boxes(text, bare=True)
    if not found or not all(box.closed for box in found):
        return None
    apart = (
        at for at in range(len(found) - 1, 0, -1) if not _TOGETHER.fullmatch(text[found[at - 1].end : found[at].start])
    )
    return ", ".join(dict.fromkeys(box.held for box in found[next(apart, 0) :] if box.held.strip()))


def candidates(text: str) -> Iterator[str]:
    """Yield texts that may be the final answer of a response without a box, the likeliest first.

    The first that can be read is the answer.
    """
    marked = _MARKED.findall(text)
    if marked:
        yield from _in_phrase(marked[-1])
    statements = list(_STATED.finditer(text))
    for strong in (True, False):
        for statement in reversed(statements):
            if bool(_STRONG.search(statement[0])) == strong and not _NEGATED.match(text, statement.end()):
                yield from _stated(text[statement.end() : statement.end() + 2_000])
                break
    end = _MATH.sub(lambda match: match[0].replace("\n", " "), text[-20_000:])
    lines = [line for line in end.splitlines() if line.strip()]
    for line in lines[: -_LINES - 1 : -1]:
        yield from _in_line(line.strip())


def _stated(rest: str) -> Iterator[str]:
    """Yield what may be meant by what follows "the answer is"."""
    display = re.match(r"\s*(?:\$\$|\\\[|\\begin\{)", rest)
    line = rest if display else rest.lstrip().partition("\n")[0]
    if display:
        line = _MATH.match(rest.lstrip())[0] if _MATH.match(rest.lstrip()) else line  # type: ignore[index]
    yield from _in_phrase(line)


def _in_phrase(phrase: str) -> Iterator[str]:
    """Yield the answer of a phrase: all of it to the end of the sentence, its first mathematics, its first number."""
    sentence = _sentence(phrase)
    yield sentence
    yield _REASON.sub("", sentence)
    bold = _BOLD.search(phrase)
    if bold is not None:
        yield bold[1]
    yield from _joined_mathematics(phrase)
    number, folded = next(find_numbers(phrase), None), fold_characters(phrase)
    if number is not None and not _BOUND_BEHIND.match(folded, number.end):
        yield folded[number.start : number.end]


def _sentence(phrase: str) -> str:
    """Return the phrase up to the end of its first sentence outside of `$…$`."""
    protected = _MATH.sub(lambda match: "\0" * len(match[0]), phrase)
    end = _SENTENCE_END.search(protected)
    return phrase[: end.start()] if end is not None else phrase


def _joined_mathematics(phrase: str) -> Iterator[str]:
    """Yield the first pieces of mathematics that stand together, with what joins them."""
    first = _MATH.search(phrase)
    if first is None:
        return
    end = first.end()
    while (joint := _JOINT.match(phrase, end)) and (following := _MATH.match(phrase, joint.end())):
        end = following.end()
    yield phrase[first.start() : end]


def _in_line(line: str) -> Iterator[str]:
    """Yield what may be the answer in a line that does not say so."""
    denied = next((match for match in _STATED.finditer(line) if _NEGATED.match(line, match.end())), None)
    sentences = re.split(r"(?<=[.!?])\s+", line)
    if "?" in line:
        sentences = [part for part in sentences if not part.rstrip("*_ ").endswith("?")]
        line = " ".join(sentences)
    if line.startswith(("---", "```")) or denied is not None:
        return
    if not _PROSE.search(_MATH.sub("", _CONJUNCTION.sub(" ", line))) or re.fullmatch(r"\*\*[^*]+\*\*\.?", line):
        yield line
    mathematics = list(_MATH.finditer(line))
    if mathematics:
        if _DENIED_BEFORE.search(line[: mathematics[-1].start()]):
            return
        yield mathematics[-1][0]
    bold = list(_BOLD.finditer(line))
    if bold:
        if _DENIED_BEFORE.search(line[: bold[-1].start()]):
            return
        yield bold[-1][1]
    sentence = next((part for part in reversed(sentences) if re.search(r"\d|[π√∞]|\be\b", part)), line)
    numbers, folded = list(find_numbers(sentence)), fold_characters(sentence)
    if numbers and (_DENIED_BEFORE.search(folded[: numbers[-1].start]) or _BOUND_BEHIND.match(folded, numbers[-1].end)):
        return
    words = list(_PROSE.finditer(sentence))
    if words:
        yield sentence[words[-1].end() :]
    yield sentence.rpartition("=")[2]
    if numbers:
        start = folded.rfind(" ", 0, numbers[-1].start) + 1
        yield _REASON.sub("", _sentence(folded[start:]))
        yield folded[numbers[-1].start : numbers[-1].end]
