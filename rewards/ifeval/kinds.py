"""The kinds of verifiable instruction: each says whether a response follows it.

The idea and most kinds are those of IFEval (Zhou et al. 2023, arXiv:2311.07911); the checkers are
written anew. A blank response follows no instruction.
"""

from __future__ import annotations

import json
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from roll_like.builtin.rewards.ifeval.language import LANGUAGES, language_of
from roll_like.builtin.rewards.ifeval.text import (
    COMMAS,
    QUOTES,
    fold,
    is_bullet,
    occurrences,
    paragraphs,
    sentences,
    without_bullet,
    words,
)

CountRelation = Literal["exactly", "at_least", "at_most"]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
NonBlank = Annotated[str, Field(min_length=1, pattern=r"\S")]
NonBlanks = Annotated[tuple[NonBlank, ...], Field(min_length=1)]

KINDS: dict[str, type[Instruction]] = {}


class Instruction(BaseModel, ABC):
    """One instruction of a row: `{"kind": "max_words", "max": 20}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: ClassVar[str]
    #: False where the right form is not made of sentences; then no function words are expected.
    prose: ClassVar[bool] = True

    def __init_subclass__(cls, *, kind: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if kind:
            cls.kind = kind
            KINDS[kind] = cls

    def follows(self, text: str) -> bool:
        """Return whether `text` follows the instruction; a blank text never does."""
        return bool(text.strip()) and self._check(text)

    @abstractmethod
    def _check(self, text: str) -> bool:
        """Return whether a text that is not blank follows the instruction."""

    def own_words(self, text: str) -> str:
        """Return the part of the response that is the policy's own, for the copy guard."""
        return text


class Counted(Instruction):
    """An instruction about how often something occurs."""

    count: Count
    relation: CountRelation = "exactly"

    def _check(self, text: str) -> bool:
        found = self._number(text)
        if self.relation == "exactly":
            return found == self.count
        return found >= self.count if self.relation == "at_least" else found <= self.count

    @abstractmethod
    def _number(self, text: str) -> int:
        """Return how often it occurs in `text`."""


class NoCommas(Instruction, kind="no_commas"):
    """No comma of any script, also not inside a number."""

    def _check(self, text: str) -> bool:
        return not any(comma in text for comma in COMMAS)


class BulletList(Counted, kind="bullet_list"):
    """`count` lines that begin with a bullet (`*`, `-`, `+` or `•`) and a space."""

    def _number(self, text: str) -> int:
        return sum(is_bullet(line) for line in text.splitlines())


class NumberedList(Counted, kind="numbered_list"):
    """`count` lines that begin with 1., 2., 3. … in order."""

    def _number(self, text: str) -> int:
        found = [int(number) for number in re.findall(r"^[ \t]*(\d{1,4})[.)][ \t]+\S", text, flags=re.MULTILINE)]
        return len(found) if found == list(range(1, len(found) + 1)) else 0


class Title(Instruction, kind="title"):
    """A title in double angular brackets: `<<Joy>>`, but not the placeholder `<<title>>` of the usual request."""

    def _check(self, text: str) -> bool:
        titles = re.findall(r"<<([^<>\n]+)>>", text)
        return any(re.search(r"\w", title) and fold(title).strip() != "title" for title in titles)


class MaxWords(Instruction, kind="max_words"):
    """At most `max` words."""

    max: Positive

    def _check(self, text: str) -> bool:
        return 0 < len(words(text)) <= self.max


class MinWords(Instruction, kind="min_words"):
    """At least `min` words."""

    min: Positive

    def _check(self, text: str) -> bool:
        return len(words(text)) >= self.min


class WordCount(Instruction, kind="word_count"):
    """Between `min` and `max` words, both included."""

    min: Positive
    max: Positive

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is above max: {self.max}")
        return self

    def _check(self, text: str) -> bool:
        return self.min <= len(words(text)) <= self.max


class Keyword(Instruction, kind="keyword"):
    """The word or phrase occurs, as a whole word, in any case."""

    word: NonBlank

    def _check(self, text: str) -> bool:
        return occurrences(text, self.word) > 0


class Keywords(Instruction, kind="keywords"):
    """All the words occur."""

    words: NonBlanks

    def _check(self, text: str) -> bool:
        return all(occurrences(text, word) for word in self.words)


class ForbiddenWords(Instruction, kind="forbidden_words"):
    """None of the words occurs."""

    words: NonBlanks

    def _check(self, text: str) -> bool:
        return not any(occurrences(text, word) for word in self.words)


class KeywordFrequency(Counted, kind="keyword_frequency"):
    """The word occurs `count` times."""

    word: NonBlank

    def _number(self, text: str) -> int:
        return occurrences(text, self.word)


class LetterFrequency(Counted, kind="letter_frequency"):
    """The letter occurs `count` times, in either case."""

    letter: Annotated[str, Field(min_length=1, max_length=1)]

    def _number(self, text: str) -> int:
        return fold(text).count(fold(self.letter))


class Lowercase(Instruction, kind="lowercase"):
    """Letters, none of them a capital."""

    def _check(self, text: str) -> bool:
        return _has_letters(text) and not any(unicodedata.category(char) in {"Lu", "Lt"} for char in text)


class Uppercase(Instruction, kind="uppercase"):
    """Letters, all of them capitals."""

    def _check(self, text: str) -> bool:
        return _has_letters(text) and not any(unicodedata.category(char) in {"Ll", "Lt"} for char in text)


class UppercaseWords(Counted, kind="uppercase_words"):
    """`count` words of two or more letters in capitals only."""

    def _number(self, text: str) -> int:
        return sum(len(word) > 1 and word.isupper() for word in words(text))


class NumberSentences(Counted, kind="number_sentences"):
    """`count` sentences."""

    def _number(self, text: str) -> int:
        return len(sentences(text))


class NumberParagraphs(Counted, kind="number_paragraphs"):
    """`count` paragraphs, divided by blank lines or by lines of `***`."""

    divider: Literal["blank_line", "stars"] = "blank_line"

    def _number(self, text: str) -> int:
        return len(paragraphs(text, stars=self.divider == "stars"))


class FirstWord(Instruction, kind="first_word"):
    """Paragraph `paragraph` (from 1) begins with `word`."""

    word: NonBlank
    paragraph: Positive = 1
    paragraphs: Positive | None = Field(default=None, description="How many paragraphs there must be.")

    def _check(self, text: str) -> bool:
        parts = paragraphs(text)
        if len(parts) < self.paragraph or (self.paragraphs is not None and len(parts) != self.paragraphs):
            return False
        found = words(parts[self.paragraph - 1])[:1]
        return [fold(word) for word in found] == [fold(self.word)]


class StartsWith(Instruction, kind="starts_with"):
    """The response begins with `text`, in any case."""

    text: NonBlank

    def _check(self, text: str) -> bool:
        begin = _squeezed(self.text)
        found = _squeezed(text.lstrip().lstrip(QUOTES))
        return found.startswith(begin) and not (begin[-1].isalnum() and found[len(begin) : len(begin) + 1].isalnum())


class EndsWith(Instruction, kind="ends_with"):
    """The response ends with `text` and nothing after it, in any case."""

    text: NonBlank

    def _check(self, text: str) -> bool:
        end = _squeezed(self.text)
        found = _squeezed(text.rstrip().rstrip(QUOTES))
        return found.endswith(end) and not (end[0].isalnum() and found[: len(found) - len(end)][-1:].isalnum())


class Quotation(Instruction, kind="quotation"):
    """The whole response is wrapped in double quotation marks."""

    def _check(self, text: str) -> bool:
        found = text.strip()
        return len(found) > 2 and found[0] in QUOTES and found[-1] in QUOTES and bool(words(found))


class JsonFormat(Instruction, kind="json_format"):
    """The whole response is one JSON object or array, with or without a code fence."""

    prose = False

    def _check(self, text: str) -> bool:
        found = re.sub(r"^```(?:json|JSON)?[ \t]*\n|\n?```$", "", text.strip())
        try:
            return isinstance(json.loads(found, parse_constant=_refuse_constant), dict | list)
        except (ValueError, RecursionError):
            return False


class Highlights(Counted, kind="highlights"):
    """`count` passages highlighted as `*passage*` or `**passage**`."""

    relation: CountRelation = "at_least"

    def _number(self, text: str) -> int:
        body = "\n".join(without_bullet(line) for line in text.splitlines())
        found = re.findall(r"(?<!\*)(\*{1,2})([^*\n]+)\1(?!\*)", body)
        return sum(bool(re.search(r"\w", passage)) for _, passage in found)


class Sections(Counted, kind="sections"):
    """`count` sections, each begun by `splitter` and a number: `Section 1`."""

    splitter: NonBlank = "Section"
    relation: CountRelation = "at_least"

    def _number(self, text: str) -> int:
        head = re.escape(self.splitter.strip())
        found = re.findall(rf"^[ \t#*_]*{head}[ \t]+(\d+|[IVX]+)\b", text, flags=re.MULTILINE | re.IGNORECASE)
        return len({number.upper() for number in found})


class Placeholders(Counted, kind="placeholders"):
    """`count` placeholders in square brackets: `[address]`."""

    relation: CountRelation = "at_least"

    def _number(self, text: str) -> int:
        return sum(bool(re.search(r"\w", name)) for name in re.findall(r"\[([^\[\]\n]+)\]", text))


class Postscript(Instruction, kind="postscript"):
    """A line that begins with `marker`, with something after it."""

    marker: Literal["P.S.", "P.P.S"] = "P.S."

    def _check(self, text: str) -> bool:
        pattern = r"p\.[ ]?p\.[ ]?s\b\.?" if self.marker == "P.P.S" else r"p\.[ ]?s\b\.?"
        return bool(re.search(rf"^[ \t*_]*{pattern}[:*_ \t]*\w", text, flags=re.MULTILINE | re.IGNORECASE))


class ChooseOne(Instruction, kind="choose_one"):
    """Exactly one of the options is named."""

    options: Annotated[tuple[NonBlank, ...], Field(min_length=2)]

    def _check(self, text: str) -> bool:
        # the longest option first, so that "yes and no" is not also a "no"
        options = sorted((re.escape(fold(option).strip()) for option in self.options), key=len, reverse=True)
        return len(set(re.findall(rf"(?<!\w)(?:{'|'.join(options)})(?!\w)", fold(text)))) == 1


class RepeatPrompt(Instruction, kind="repeat_prompt"):
    """The response begins with `prompt`, word for word, and then answers."""

    prompt: NonBlank

    def _check(self, text: str) -> bool:
        return _squeezed(text).startswith(_squeezed(self.prompt)) and bool(words(self.own_words(text)))

    def own_words(self, text: str) -> str:
        """Return what comes after the repeated prompt."""
        repeated, found = _squeezed(self.prompt), _squeezed(text)
        return found[len(repeated) :] if found.startswith(repeated) else text


class TwoResponses(Instruction, kind="two_responses"):
    """Two different answers, divided by `******`."""

    def _check(self, text: str) -> bool:
        parts = [_squeezed(part) for part in re.split(r"(?<!\*)\*{6}(?!\*)", text)]
        return len(parts) == 2 and all(words(part) for part in parts) and parts[0] != parts[1]


class ResponseLanguage(Instruction, kind="response_language"):
    """The response is in the language of that ISO 639-1 code."""

    language: str
    prose = False  # function words are known for English only

    @field_validator("language")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in LANGUAGES:
            raise ValueError(
                f"{value!r} is not one of the languages that can be detected: {', '.join(sorted(LANGUAGES))}"
            )
        return value

    def _check(self, text: str) -> bool:
        return language_of(text) == self.language


def parse_instructions(value: Any) -> tuple[Instruction, ...]:
    """Build the instructions of a row.

    Args:
        value: A list of mappings, each with its `kind`. Keys that hold None count as absent: tables
            such as Arrow's give every row the keys of all others.

    Raises:
        ValueError: The value is no such list; names the entry, its kind and what was expected.
    """
    if isinstance(value, str) or not hasattr(value, "__iter__") or isinstance(value, Mapping):
        raise ValueError(f'expected a list such as [{{"kind": "no_commas"}}], found {value!r}')
    entries = list(value)
    if not entries:
        raise ValueError("the list of instructions is empty; give at least one")
    return tuple(_parse(entry) for entry in entries)


def _parse(entry: Any) -> Instruction:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("kind"), str):
        raise ValueError(f"expected a mapping with a `kind`, found {entry!r}")
    kind = entry["kind"]
    if kind not in KINDS:
        raise ValueError(f"unknown kind of instruction {kind!r}; known: {', '.join(sorted(KINDS))}")
    settings = {key: value for key, value in entry.items() if key != "kind" and value is not None}
    try:
        return KINDS[kind].model_validate(settings)
    except ValueError as error:
        raise ValueError(f"instruction {kind!r}: {_problems(error)}") from error


def _problems(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}".lstrip(": ") for item in error.errors())


def _squeezed(text: str) -> str:
    return " ".join(fold(text).split())


def _has_letters(text: str) -> bool:
    return any(unicodedata.category(char) in {"Lu", "Ll", "Lt"} for char in text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
