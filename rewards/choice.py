r"""Reads which option of a choice question a response settles on.

A response has to say that it answers: `\boxed{B}`, `<answer>B</answer>`, "the answer is (B)", "B is correct",
"故选 B", or a line that is nothing but an option. A letter somewhere in prose says nothing: "A dog barks" does not
choose A. Each such place is a claim; the last one counts, unless the one directly before it says otherwise.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roll_like.data.answers import answer_words
from roll_like.data.boxed import outer_boxes

_FOLDED = {
    # full-width ASCII, letters in parentheses and in circles
    **{code: unicodedata.normalize("NFKC", chr(code)) for code in (*range(0xFF01, 0xFF5F), *range(0x249C, 0x24EA))},
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212"), "-"),
    **dict.fromkeys(map(ord, "\u2018\u2019"), "'"),
    **dict.fromkeys(map(ord, '"“”„«»「」『』*`$'), ""),
    **dict.fromkeys(map(ord, "【〔"), "["),
    **dict.fromkeys(map(ord, "】〕"), "]"),
    **dict.fromkeys(map(ord, "_\u00a0\u3000~"), " "),
    **dict.fromkeys(map(ord, "→⇒"), ":"),
    ord("。"): ". ",
    ord("、"): ", ",
}
_ANSWER_TAG = r"(?:final[ _]?)?(?:answer|choice|option)"
_MARKUP = (
    (re.compile(rf"[<\[]{_ANSWER_TAG}[>\]]", re.IGNORECASE), "\nanswer: "),
    (re.compile(rf"[<\[]/{_ANSWER_TAG}[>\]]", re.IGNORECASE), "\n.\n"),
    (re.compile(r"<br\s*/?>|</(?:p|div|li)>", re.IGNORECASE), "\n"),
    (re.compile(r"</?(?:b|strong|i|em|u|p|div|li|span|code|mark)\b[^>]*>", re.IGNORECASE), ""),
    (
        re.compile(
            r"\\(?:text\w*|math\w+|operatorname|mbox|bf|rm|it|[Ll]arge|LARGE|[Hh]uge|displaystyle|left|right)(?![A-Za-z])"
        ),
        "",
    ),
    (re.compile(r"\\(?:quad|qquad)(?![A-Za-z])|\\[ ,;:!()\[\]\\]"), " "),
    (re.compile(r"[{}]"), ""),
    (re.compile(r"'(\w*)'"), r"\1"),
    (re.compile(r"^[ \t]*(?:(?:[-+•]|#{1,6})[ \t]+|>[ \t]*)+(?=\S)", re.MULTILINE), ""),
)
#: Stands where a box was; private use.
_BOX = "\ue000"

_END = r"(?![A-Za-z0-9À-ɏͰ-ӿ'#+]|-\w|&\w)"
_LETTER = re.compile(rf"(?P<open>[(\[]\s*)?(?P<letter>[A-Za-z])(?:(?P<close>\s*[)\]])|{_END})")
#: What may follow a small letter without parentheses, and `A` or `I` without them: both are words too.
_SENTENCE_ENDS = re.compile(r"[ \t]*(?:[.,;:!]*[ \t]*(?:\n|$)|[.,;!][ \t]|because\b)")
_L = rf"(?:[(\[]\s*[A-Za-z]\s*[)\]]|(?-i:[A-Z])(?:\s*[)\]]|{_END}))"
_NAME = r"(?:answer\s+)?(?:option|choice|letter|alternative|statement)"
_FILL = re.compile(
    r"(?:(?:therefore|thus|hence|clearly|obviously|definitely|indeed|simply|just|still|then|actually|in fact|surely|"
    r"of course|probably|most likely|likely|certainly|evidently|undoubtedly|I (?:think|believe|would say)|rather|"
    rf"the (?:letter|one|correct one)|la|opción|opzione|opção|lettre|lettera|"
    rf"letra|labell?ed|marked|{_NAME}|answer)\s*[:,]?\s+|选项|選項|[:,]\s*){{0,6}}",
    re.IGNORECASE,
)
_CUE = (
    r"\b(?:answers?|ans|choice|option|selection|pick|alternative|statement|response|solution|"
    r"(?:correct|right) (?:one|letter)|"
    r"antwort|lösung|réponse|respuesta|resposta|risposta|ответ|svar|antwoord|odpowiedź|cevap|jawaban|đáp án)\b"
)
_COPULA = (
    r"(?:\b(?:is|was|ist|est|es|é|è|would be|must be|should be|has to be|will be|can only be)\b|'s\b|:|=>?|->?|-)\s*:?"
)
_STATEMENT = re.compile(
    rf"(?:{_CUE}(?:\s+(?:choice|option|letter|correct[eao]?|corretta|correta|finale?|exacte))*"
    r"(?:\s+(?:to|for|of|among|from|in|on|here|that|which|I|we)\b[^.\n:;!?,]{0,50}?|,[^,.\n]{1,40},)?\.?\s*"
    rf"{_COPULA}|^(?:the\s+)?(?:final\s+|correct\s+|right\s+)?answer\W*\n|^correct\s*:|"
    r"(?:答え|正解|解答|回答|정답|답)\s*(?:は|은|는|:)+|^A\s*:(?=\s*\(?[A-Z]\)?\W*$))\s*",
    re.IGNORECASE | re.MULTILINE,
)
_VERB = re.compile(
    r"\b(?:choose|chose|choosing|picks?|picking|select|selecting|selected|going with|go with|opt for|opting for|"
    r"settle on|vote for|(?:would|'d) say)\s+",
    re.IGNORECASE,
)
_MATCHING = re.compile(
    r"\b(?:match(?:es)?|corresponds? to|i\.e\.|namely|leads? to|points? to|equals?|gives?|which is|that is|it is|it's|"
    rf"that's|this is|it must be)\s*,?\s*(?=(?:{_NAME}|answer)\s|[(\[])"
    r"|\bis\s+(?=(?:option|choice)\s)"
    r"|\b(?:so|thus|hence|therefore),?\s+(?=(?-i:[A-Z])\s*(?:[.!\n]|$))"
    r"|\b(?:which is|that is|it is|it's|that's|this is|it must be)\s+(?=(?-i:[A-Z])\s*(?:[.!,;\n]|$))",
    re.IGNORECASE,
)
_HEDGED = re.compile(
    r"(?:\b(?:could|might|may)\s+(?:also\s+|well\s+)*be|\bor\s+(?:maybe|perhaps|possibly)|\b(?:maybe|perhaps|possibly))"
    r"\s*,?\s+",
    re.IGNORECASE,
)
_CHINESE = re.compile(
    r"(?:答案\s*\]?\s*(?:应该|應該|应|應)?\s*(?:是|为|為|[选選][择擇]?(?![项項])|:)*|"
    r"(?:选项|選項|正确的|正確的)\s*(?:是|为|為|:)+|[选選][择擇]?(?![项項]))\s*:?\s*"
)
_CORRECT = re.compile(
    rf"(?:^|[.!?;:,\n(-]\s*|\b(?:option|choice|answer|so|therefore|thus|hence|clearly|then|and|or|means|only|that|"
    rf"statement|alternative|letter|both|but)\s+|[选選][项項]\s*)(?P<letter>{_L})\s*(?:选项|選項|项|項)?\s*"
    r"(?:\b(?:(?P<singular>is)|must be|are)\b(?P<not>\s+not\b|n't\b)?\s*(?:(?:therefore|thus|also|clearly|indeed|"
    r"definitely|hence|both|then|the|our|my|only|most|single)\s+){0,4}(?P<verdict>"
    r"(?:(?:best|better|final|most (?!unlikely|improbable|implausible|in(?:appropriate|accurate|correct))\w+)\s+)?"
    r"(?:answer|option|choice)|"
    r"correct|right|true|best|incorrect|wrong|false)\b"
    r"|\s*[:.-]\s*(?P<mark>(?:correct|true|incorrect|false|wrong)\b)\s*(?=[.,;!\n]|$)"
    r"|\s*[:.-]?\s*(?P<sign>[✓✅✔✗❌✘])"
    r"|(?:是|为)?\s*(?P<chinese>正确|正確|对|错误|錯誤|不正确|不对))",
    re.IGNORECASE | re.MULTILINE,
)
_WRONG = {"incorrect", "wrong", "false", "✗", "❌", "✘", "错误", "錯誤", "不正确", "不对"}

_ALTERNATIVE = re.compile(
    r"[ \t]*\(?(?:[,/&;+|和或与及]|\b(?:or|and)\b)[ \t]*"
    r"(?:(?:and|or|maybe|perhaps|possibly|either)\s+)*(?:(?:option|choice)\s+)?"
    rf"(?P<letter>{_L})(?!\s+(?:is|was|isn't|are|would|can|cannot|does|has)\b)",
    re.IGNORECASE,
)
_SEVERAL = re.compile(rf"([A-Z]{{2,}}){_END}")
_REASON = re.compile(
    r"[ \t]+(?:because|since|as|which|with|for|due|given|based|in this|is|and not|not|but|from|here|so|\(|-)",
    re.IGNORECASE,
)
_NO_CLAIM_AFTER = re.compile(r"[ \t]*(?:\?|[=^<>×÷|]|[*+]\s|\b(?:if|unless|only if|only when)\b)", re.IGNORECASE)
_WRONG_AFTER = re.compile(
    r"[ \t]*(?:\b(?:is|was)(?:n't|\s+(?:wrong|incorrect|false|not))\b|是?[错錯]|(?:では|じゃ)(?:な|あ)|[이가]\s*아니"
    r"|,?\s*(?:but|although|though)\s+(?:it|this|that)\s*(?:'s|\s+is)\s+(?:wrong|incorrect|false|not\s+(?:correct|right|true))\b)",
    re.IGNORECASE,
)
_WORD_FOLLOWS = re.compile(r"[ \t]+\w")
_NOT = re.compile(r"(?:not|n't|neither)\s+", re.IGNORECASE)
_BUT = re.compile(
    rf"(?:\s*,?\s*(?:not|nor|or)\s+{_L})*\s*[,;.]?\s*(?:but|instead|it is|it's|rather)\s+"
    r"(?:rather\s+|instead\s+|it is\s+|it's\s+)*",
    re.IGNORECASE,
)

#: What says that an option is not the one that is wanted, unless the question asks for that.
_BAD = (
    r"\b(?:wrong|false|worst|weakest|poorest|incorrect|inappropriate|inaccurate|unlikely|unsuitable|unreasonable|"
    r"improbable|implausible|(?:least|less)[- ](?:likely|probable|plausible|appropriate|suitable|accurate|correct|"
    r"reasonable|convincing|fitting|good|relevant|consistent|helpful|useful|effective|desirable|true))\b|"
    r"(?:最?不(?:可能|正确|正確|恰当|合适|适合|符合|属于|对|包括)|最差|最坏|[错錯][误誤]?)的?"
)
_ASKED = re.compile(rf"{_BAD}|\bnot\b|n't\b", re.IGNORECASE)
_DENIED = re.compile(
    r"(?:\b(?:not|never|cannot|wrong|incorrect|false|doubt|trap|tempting|tempted|mistake|pitfall|distractor|"
    r"(?:second|next|third)[- ]best)\b|n't\b|不)\W*(?:\w+\W+){0,4}$|不\w{0,2}$"
    rf"|(?:{_BAD})\s*(?:single\s+|remaining\s+|possible\s+|given\s+|of (?:the|these)\s+)?$",
    re.IGNORECASE,
)
_REJECTED = re.compile(
    r"\b(?:eliminate|avoid|reject|exclude|discard|rule out)\b|\b(?:that|which)\s+(?:\w+\s+)?"
    rf"(?:not\b|never\b|(?:the\s+)?(?:{_BAD}))|\b(?:that|which)\s+\w+n't\b",
    re.IGNORECASE,
)
_CONTRAST = re.compile(r"\b(?:not|than|unlike|instead)\b|n't\b", re.IGNORECASE)
_DOUBTLESS = re.compile(r"\b(?:no|without(?: a)?) doubt\b|\bnot (?:mistaken|wrong|only)\b", re.IGNORECASE)
_SAID_BY_OTHERS = re.compile(
    r"\b(?:if|whether|suppose|assume|assuming)\s+(?:that\s+)?(?:\w+\s+){0,3}$|\b(?:could|might|may|perhaps|maybe|possibly|"
    r"initially|at first|originally|previously|thought)\b|\b(?:some|people|others|they|students?|someone|many|one)\b.*"
    r"\b(?:says?|thinks?|claims?|argues?|believes?|choose|pick|select)\b",
    re.IGNORECASE,
)
_UNREAL = re.compile(r"(?:^\s*|,\s*)had\b|\bhad\s+(?:\w+\s+)?been\b|\bwere\b", re.IGNORECASE)
_OTHERWISE = re.compile(r"\b(?:otherwise|else)\s*,?\s*(?:\w+\s+){0,3}$", re.IGNORECASE)
_EITHER = re.compile(r"\beither\b", re.IGNORECASE)
_CONNECTING = frozenset((
    "the", "a", "correct", "right", "best", "answer", "option", "choice", "is", "my", "and", "or", "also", "but", "so",
    "thus", "therefore", "hence", "otherwise", "else", "as", "well", "both", "答案", "选", "故选", "是", "为",
))  # fmt: skip
_LAST_SENTENCE = re.compile(r"(?<=[.!?])\s+([^.!?]+[.!]?\s*)$")
_LISTED_BEFORE = re.compile(r"(?:^|[\s(\[])[A-Z]\s*[)\]]?\s*(?P<between>[,/&]|,?\s*\band|,?\s*\bor)\s*$")
_LABELLED = re.compile(
    r"(?:(?:option|choice)\s+)?(?P<label>[(\[]\s*[A-Za-z]\s*[)\]]\s*[.:]?|(?-i:[A-Z])\s*[).:\]]|[a-z][).]|"
    r"(?-i:[A-Z])\s+-(?=\s.*[^\W\d]{2}))\s*(?P<text>\S.*)",
    re.IGNORECASE | re.DOTALL,
)
_LABEL_INSIDE = re.compile(r"[(\[][A-Z][)\]]|(?:^|\s)[A-Z][.)](?=\s|$)")
_LIST = re.compile(rf"{_L}(?:\s*(?:[,/&;+、]|\band\b|\bor\b|[和或与及]|\s)\s*{_L})+[.!]?", re.IGNORECASE)
_CORRECTION = re.compile(r"(?:(?:wait|no|actually|sorry|hmm+)\b\s*[:,.]?\s*)+", re.IGNORECASE)
_LEAD = re.compile(
    rf"(?:{_CORRECTION.pattern})?(?:=>\s*|->\s*|:\s*)?"
    rf"(?:(?:so|thus|therefore|hence|clearly|definitely|obviously|conclusion|verdict|okay|ok|final)\b\s*[:,]?\s*|"
    rf"(?:{_NAME}|answer)\s+){{0,6}}",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A place where a response says which option is right, or which is not; `letter` is None for several."""

    start: int
    end: int
    letter: str | None
    denied: bool = False


def choice(
    text: str, letters: str, options: Sequence[str] = (), *, question: str = "", boxed: bool = False
) -> str | None:
    r"""Return the letter that a response settles on; None where it settles on none or on several.

    >>> choice("A is tempting, but the answer is (B).", "ABCD"), choice("The answer is A or B.", "ABCD")
    ('B', None)

    Args:
        options: The options' texts, in order; then a text counts as its letter.
        question: What was asked. "The worst option is D" answers D only to a question for the worst.
        boxed: Only `\boxed{…}` counts.
    """
    return _Response(text, letters[: len(options) or None], options, question).choice(boxed=boxed)


class _Response:
    """A response to one question."""

    def __init__(self, text: str, letters: str, options: Sequence[str], question: str = "") -> None:
        self._letters = letters
        asked = {match[0].casefold() for match in _ASKED.finditer(question)}
        #: Words that deny nothing, as the question asks for such an option.
        self._asked = re.compile("|".join(map(re.escape, asked)) or r"(?!)", re.IGNORECASE)
        self._options = [answer_words(_plain(option), articles=True) for option in options]
        #: Longer texts are no option's. Characters.
        self._longest = 40 + 2 * max(map(len, options), default=0)
        self._boxes = []
        at, parts = 0, []
        for box in outer_boxes(text):
            if box.closed:
                parts += [text[at : box.start], _BOX]
                self._boxes.append(box.held)
                at = box.end
        self._text = _plain("".join([*parts, text[at:]]))

    def choice(self, *, boxed: bool) -> str | None:
        """Return the letter of the last claim; None without one, or if the one directly before it has another."""
        claims = list(self._boxed_claims())
        if not boxed:
            claims += [*self._stated_claims(), *self._correct_claims(), *self._line_claims()]
            if all(claim.denied for claim in claims):
                claims += self._labelled_claims()
        current: _Claim | None = None
        conflict = False
        for claim in sorted(claims, key=lambda claim: (claim.start, -claim.end)):
            if current is not None and claim.denied:
                current = None if current.letter == claim.letter else current
            elif claim.denied or (current is not None and claim.start < current.end):
                continue
            else:
                follows = current is not None and self._directly(current, claim)
                differs = current is not None and current.letter not in (None, claim.letter)
                conflict = follows and (conflict or differs)
                current = claim
        return None if current is None or conflict else current.letter

    def _boxed_claims(self) -> Iterator[_Claim]:
        at = -1
        for held in self._boxes:
            at = self._text.index(_BOX, at + 1)
            plain = _plain(held).strip()
            found = self._whole(plain) or self._labelled(plain)
            if found is not None:
                yield _Claim(at, at + 1, found.letter)
            elif _STATEMENT.search(plain) and (letter := _Response(plain, self._letters, ()).choice(boxed=False)):
                yield _Claim(at, at + 1, letter)

    def _stated_claims(self) -> Iterator[_Claim]:
        """Yield claims of the form "the answer is B", "I choose B", "it might be B"."""
        for cue in (_STATEMENT, _VERB, _MATCHING, _CHINESE, _HEDGED):
            for match in cue.finditer(self._text):
                claim = self._read(match.end(), or_text=cue is _STATEMENT)
                if claim is not None:
                    yield from self._in_context(match.start(), claim, hedged=cue is _HEDGED)

    def _correct_claims(self) -> Iterator[_Claim]:
        """Yield claims of the form "B is correct"."""
        for match in _CORRECT.finditer(self._text):
            letter = match["letter"].strip("()[] ").upper()
            if letter not in self._letters or _NO_CLAIM_AFTER.match(self._text, match.end()):
                continue
            start = match.start("letter")
            listed = _LISTED_BEFORE.search(self._text[max(0, start - 20) : start])
            # "unlike A, B is correct"
            several = listed is not None and (listed["between"] != "," or match["singular"] is None)
            verdict = match["verdict"] or match["mark"] or match["sign"] or match["chinese"]
            wrong = (match["not"] is not None) != (verdict.casefold() in _WRONG)
            if not (several and wrong):
                claim = _Claim(start, match.end(), None if several else letter, denied=wrong)
                yield from self._in_context(start, claim)

    def _in_context(self, start: int, claim: _Claim, *, hedged: bool = False) -> Iterator[_Claim]:
        """Yield the claim that begins at `start` as the sentence before it makes it: denied, unsure or another's."""
        sentence = re.split(r"[.!?\n]", self._text[max(0, start - 200) : start])[-1]
        clause = re.split(r"[,;:]|\bbut\b", sentence)[-1]
        if hedged or _OTHERWISE.search(sentence) or _EITHER.search(clause):
            yield _Claim(start, claim.end, None)
        elif _DENIED.search(self._asked.sub("", _DOUBTLESS.sub("", clause))) or _REJECTED.search(
            self._asked.sub("", self._text[start : claim.start])
        ):
            yield _Claim(start, claim.end, claim.letter, denied=True)
        elif not (
            _SAID_BY_OTHERS.search(clause)
            # "had x been 2, the answer would be B"
            or (_UNREAL.search(sentence) and re.search(r"\bwould\b", self._text[start : claim.end]))
        ):
            yield _Claim(start, claim.end, claim.letter, claim.denied)

    def _lines(self) -> list[re.Match[str]]:
        return [match for match in re.finditer(r"[^\n]+", self._text) if match[0].strip(" .")]

    def _line_claims(self) -> Iterator[_Claim]:
        """Yield lines that are nothing but an option, and the last sentence if it is."""
        lines = self._lines()
        for line in lines:
            found = self._whole(line[0].strip())
            if found is not None:
                yield _Claim(line.start(), line.end(), found.letter)
        start = max(lines[-1].start(), lines[-1].end() - self._longest) if lines else 0
        last = _LAST_SENTENCE.search(self._text[start : lines[-1].end()]) if lines else None
        # the last of "1. A\n2. B" is an item of a list
        numbered = last is not None and len(lines) > 1 and re.fullmatch(r"\s*\d+\.\s+", lines[-1][0][: -len(last[1])])
        if last is not None and not numbered and (found := self._whole(last[1].strip())) is not None:
            at = start + _end(_CORRECTION, last.string, last.start(1))
            yield _Claim(at, lines[-1].end(), found.letter)

    def _labelled_claims(self) -> Iterator[_Claim]:
        """Yield the first or last line if it is the only one that begins with an option's label."""
        lines = self._lines()
        labelled = [line for line in lines if self._labelled(line[0].strip()) is not None]
        if len(labelled) == 1 and labelled[0] in (lines[0], lines[-1]):
            found = self._labelled(labelled[0][0].strip())
            yield _Claim(labelled[0].start(), labelled[0].end(), found.letter if found else None)

    def _labelled(self, text: str) -> _Claim | None:
        """Return the option of `B) Paris`; without a letter if Paris is another option or the text has more labels."""
        match = _LABELLED.fullmatch(text)
        letter = "" if match is None else match["label"].strip("()[].:- ").upper()
        if match is None or letter not in self._letters or (letter == "A" and match["label"].endswith(":")):
            return None
        named = self._named(match["text"])
        clear = named in (None, letter) and not _LABEL_INSIDE.search(match["text"])
        if re.fullmatch(r"[A-Za-z]\W*", match["text"]):
            return None
        return _Claim(0, len(text), letter if clear else None)

    def _named(self, text: str) -> str | None:
        """Return the letter of the option whose text this is."""
        words = answer_words(text, articles=True) if self._options and len(text) <= self._longest else []
        return self._letters[self._options.index(words)] if self._options.count(words) == 1 else None

    def _whole(self, text: str) -> _Claim | None:
        """Return the option if the text is nothing else: `B`, `So (b).`, `Paris`; without a letter for `A and B`."""
        bare = _LEAD.sub("", text, count=1)
        match = _LETTER.match(bare)
        if match is not None and match["letter"].upper() in self._letters and not bare[match.end() :].strip(" .,;:!)"):
            return _Claim(0, len(text), match["letter"].upper())
        if _LIST.fullmatch(bare) or ((several := _SEVERAL.fullmatch(bare)) and self._are_letters(several[1])):
            return _Claim(0, len(text), None)
        named = self._named(text)
        labelled = self._labelled(text) if named is None and self._options else None
        if labelled is not None and self._named(_LABELLED.fullmatch(text)["text"]) is None:  # type: ignore[index]
            return None
        return labelled if named is None else _Claim(0, len(text), named)

    def _are_letters(self, text: str) -> bool:
        return set(text) <= set(self._letters) and list(text) == sorted(set(text))

    def _read(self, at: int, *, or_text: bool) -> _Claim | None:
        """Return the claim that what follows a cue such as "the answer is" makes."""
        at = _end(_FILL, self._text, at)
        negated = _NOT.match(self._text, at)
        if negated is not None:
            denied = self._letter(_end(_FILL, self._text, negated.end()))
            if denied is None:
                return None
            but = _BUT.match(self._text, denied.end)
            other = None if but is None else self._letter(_end(_FILL, self._text, but.end()))
            return other or _Claim(at, denied.end, denied.letter, denied=True)
        found = self._letter(at)
        text = self._text_claim(at) if or_text else None
        # "the answer is E. coli", where that is an option's text
        longer = found is not None and text is not None and text.end > found.end and self._text[found.end] in ". "
        return text if found is None or (longer and not found.denied) else found

    def _letter(self, at: int) -> _Claim | None:
        """Return the claim of a letter at a place: the letter, its denial, or several."""
        text = self._text
        several = _SEVERAL.match(text, at)
        if several is not None and self._are_letters(several[1]):
            return _Claim(at, several.end(), None)
        match = _LETTER.match(text, at)
        if match is None or match["letter"].upper() not in self._letters or _NO_CLAIM_AFTER.match(text, match.end()):
            return None
        letter, end = match["letter"].upper(), match.end()
        denied = _WRONG_AFTER.match(text, end) is not None
        other = None if denied else _ALTERNATIVE.match(text, end)
        if other is not None and other["letter"] in ("A", "I") and _WORD_FOLLOWS.match(text, other.end()):
            other = None
        if other is not None and other["letter"].strip("()[] ").upper() in set(self._letters) - {letter}:
            return _Claim(at, other.end(), None)
        if not denied and not match["close"] and self._is_word(match):
            return None
        rest = re.split(r"\n|\.\s", text[end : end + self._longest], maxsplit=1)[0]
        named = self._named(rest.lstrip(" ).:-"))
        return _Claim(at, end, letter if named in (None, letter) else None, denied)

    def _is_word(self, match: re.Match[str]) -> bool:
        """Return whether a letter without parentheses is a word, as in "the answer is A matter of taste"."""
        if match["letter"].islower():
            return _SENTENCE_ENDS.match(self._text, match.end()) is None
        begins_phrase = match["letter"] in "AI" and _WORD_FOLLOWS.match(self._text, match.end())
        return bool(begins_phrase and not _REASON.match(self._text, match.end()))

    def _text_claim(self, at: int) -> _Claim | None:
        """Return the option that is named by its text, or in parentheses behind a text: `the answer is 12 (B)`."""
        line = self._text[at : at + 200 + self._longest].partition("\n")[0]
        for pattern in (r"$", r"[.!?](?:\s|$)", r"[,;(]", r"\s+(?:because|since|as|which)\b"):
            part = re.split(pattern, line, maxsplit=1)[0]
            if (named := self._named(part)) is not None:
                return _Claim(at, at + len(part), named)
        sentence = re.split(r"[.!?](?:\s|$)", line, maxsplit=1)[0]
        behind = re.findall(r"\(\s*(?:(?:option|choice)\s+)?([A-Z])\s*\)", sentence)
        if _CONTRAST.search(sentence) or _BOX in sentence:
            return None
        if len(behind) == 1 and behind[0] in self._letters and sentence.rstrip(" .").endswith(")"):
            return _Claim(at, at + len(sentence), behind[0])
        return None

    def _directly(self, one: _Claim, other: _Claim) -> bool:
        """Return whether nothing is said between two claims."""
        words = re.findall(r"\w+", self._text[one.end : other.start].casefold())
        return all(word in _CONNECTING for word in words)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _plain(text: str) -> str:
    text = re.sub(r"\n\s*\n", "\n\n", re.sub(r"[ \t]+", " ", text.translate(_FOLDED)))
    for pattern, plain in _MARKUP:
        text = pattern.sub(plain, text)
    return text
