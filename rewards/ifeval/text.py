"""How checkers cut text: words, sentences, paragraphs, bullets."""

from __future__ import annotations

import re
import unicodedata

COMMAS = ",，،、﹐﹑"
QUOTES = '"“”„‟«»＂'

# Chinese and Japanese are written without spaces: each character is a word
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_LETTER = rf"[^\W_{_CJK}]"
_WORD = re.compile(rf"[{_CJK}]|\d+(?:[.,:]\d+)*{_LETTER}*|{_LETTER}+(?:['’‑-]{_LETTER}+)*")
_BULLET = re.compile(r"^[ \t]*[*•+–-][ \t]+(?=\S)")
_RULE = re.compile(r"^[ \t]*(?:[*_-][ \t]*){3,}$")
_LIST_MARKER = re.compile(r"^[ \t]*(?:[*•+–-]|\(?(?:\d{1,3}|[a-zA-Z])[.)])[ \t]+")
_TERMINATOR = re.compile(r"([.!?…。！？]+)([\"'”’»)\]*_]*)(?:\s+|$)")

# never end a sentence: a name, a number or an explanation follows
_TITLES = frozenset(
    "mr mrs ms dr prof st gen col lt sgt capt rev hon sen rep gov pres fig no vol pp vs e.g i.e cf".split()  # noqa: SIM905
)
# may end one: they do when a capital letter follows
_ABBREVIATIONS = frozenset(
    "etc jr sr inc ltd co corp approx dept est u.s u.k u.n a.m p.m ph.d al min max".split()  # noqa: SIM905
)


def fold(text: str) -> str:
    """Return `text` composed (NFC) and case-folded, so that equal words compare equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def words(text: str) -> list[str]:
    """Return the words; a number such as `1,000.5`, a contraction and a hyphenated word are one each.

    Each Chinese or Japanese character is one too.
    """
    return _WORD.findall(text)


def occurrences(text: str, phrase: str) -> int:
    """Count `phrase` in `text`, ignoring case, as whole words: `cat` is not in `concatenate`."""
    body = r"\s+".join(re.escape(part) for part in fold(phrase).split())
    return len(re.findall(rf"(?<!\w){body}(?!\w)", fold(text)))


def is_bullet(line: str) -> bool:
    """Return whether a line is a list item: `* item`, but neither `**bold**` nor a rule such as `* * *`."""
    return _BULLET.match(line) is not None and _RULE.match(line) is None


def without_bullet(line: str) -> str:
    """Return the line without its bullet."""
    return _BULLET.sub("", line) if is_bullet(line) else line


def paragraphs(text: str, *, stars: bool = False) -> list[str]:
    """Return the non-blank paragraphs, divided by blank lines, or by lines of `***`."""
    pattern = r"^[ \t]*\*\*\*[ \t]*$" if stars else r"\n[ \t]*\n"
    return [part.strip() for part in re.split(pattern, text, flags=re.MULTILINE) if part.strip()]


def sentences(text: str) -> list[str]:
    """Return the sentences. A line break ends one; decimals, abbreviations and initials do not.

    >>> sentences("Dr. Smith paid $3.50. He left at 5 p.m. and slept.")
    ['Dr. Smith paid $3.50.', 'He left at 5 p.m. and slept.']
    """
    found: list[str] = []
    for line in text.splitlines():
        body = _LIST_MARKER.sub("", line).strip()
        start = 0
        for match in _TERMINATOR.finditer(body):
            if _ends_sentence(body, match):
                found.append(body[start : match.end()].strip())
                start = match.end()
        found.append(body[start:].strip())
    return [sentence for sentence in found if any(char.isalnum() for char in sentence)]


def _ends_sentence(line: str, match: re.Match[str]) -> bool:
    following = line[match.end() :].lstrip("\"'“‘(*_")
    if not following:
        return True
    before = line[: match.start()].rsplit(maxsplit=1)
    last = before[-1].lstrip("\"'“‘([*_") if before else ""
    goes_on = following[0].islower()
    if match[1] == ".":
        if last.lower() in _TITLES or (len(last) == 1 and last.isupper() and last != "I"):
            return False
        if last.lower() in _ABBREVIATIONS:
            return not goes_on and not following[0].isdigit()
    # `"Stop!" he said` and `well… maybe` go on, but a text all in lower case still has sentences
    pauses = bool(match[2]) or match[1] in {"...", "…"}
    return not (goes_on and pauses)
