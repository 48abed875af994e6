"""The kinds of verifiable instruction: each says whether a response follows it.

The idea and most kinds are those of IFEval (Zhou et al. 2023, arXiv:2311.07911); the checkers are
written anew. A kind is a function: its name is the kind's, its arguments after the response are the settings in a row.
A blank response follows no instruction.
"""

# ruff: noqa: A002 - settings of rows are called `min` and `max`

from __future__ import annotations

import inspect
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, create_model

from roll_like.builtin.rewards.ifeval.language import LANGUAGES, language_of
from roll_like.builtin.rewards.ifeval.text import (
    COMMAS,
    QUOTES,
    fold,
    is_bullet,
    occurrences,
    sentences,
    without_bullet,
)
from roll_like.builtin.rewards.ifeval.text import paragraphs as split_paragraphs
from roll_like.builtin.rewards.ifeval.text import words as split_words

CountRelation: TypeAlias = Literal["exactly", "at_least", "at_most"]
Positive = Annotated[int, Field(ge=1)]
NonBlank = Annotated[str, Field(min_length=1, pattern=r"\S")]
NonBlanks = Annotated[tuple[NonBlank, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class InstructionKind:
    """A kind of instruction.

    Attributes:
        check: Takes a response that is not blank, and the settings.
        settings: Reads the settings of a row.
        prose: False where the right form is not made of sentences; then no function words are expected.
    """

    check: Callable[..., bool]
    settings: type[BaseModel]
    prose: bool


KINDS: dict[str, InstructionKind] = {}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a row: `{"kind": "max_words", "max": 20}`."""

    kind: str
    settings: Mapping[str, Any]

    @property
    def prose(self) -> bool:
        """Whether sentences follow it."""
        return KINDS[self.kind].prose

    def follows(self, response: str) -> bool:
        """Return whether a response follows the instruction; a blank one never does."""
        return bool(response.strip()) and KINDS[self.kind].check(response, **self.settings)

    def own_words(self, response: str) -> str:
        """Return the part of a response that is the policy's own, for the copy guard."""
        return _after_prompt(response, self.settings["prompt"]) if self.kind == "repeat_prompt" else response


def _add(function: Callable[..., Any], check: Callable[..., bool], prose: bool, **more: Any) -> None:
    name = function.__name__.removeprefix("_")
    hints = get_type_hints(function, include_extras=True)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    fields: dict[str, Any] = {
        each.name: (hints[each.name], ... if each.default is each.empty else each.default) for each in parameters
    }
    settings = create_model(name, __config__=ConfigDict(extra="forbid", frozen=True), **fields, **more)
    KINDS[name] = InstructionKind(check, settings, prose)


def _kind(*, prose: bool = True) -> Callable[[Callable[..., bool]], None]:
    """Register a kind by what says whether a response follows it."""
    return lambda function: _add(function, function, prose)


def _counted(relation: CountRelation = "exactly") -> Callable[[Callable[..., int]], None]:
    """Register a kind by what counts; a row sets `count` and, where it is not this one, `relation`."""

    def add(function: Callable[..., int]) -> None:
        def check(response: str, *, count: int, relation: CountRelation, **settings: Any) -> bool:
            found = function(response, **settings)
            return {"exactly": found == count, "at_least": found >= count, "at_most": found <= count}[relation]

        _add(function, check, True, count=(Annotated[int, Field(ge=0)], ...), relation=(CountRelation, relation))

    return add


@_kind()
def _no_commas(response: str) -> bool:
    """No comma of any script, also not inside a number."""
    return not any(comma in response for comma in COMMAS)


@_counted()
def _bullet_list(response: str) -> int:
    """`count` lines that begin with a bullet (`*`, `-`, `+` or `•`) and a space."""
    return sum(is_bullet(line) for line in response.splitlines())


@_counted()
def _numbered_list(response: str) -> int:
    """`count` lines that begin with 1., 2., 3. … in order."""
    found = [int(number) for number in re.findall(r"^[ \t]*(\d{1,4})[.)][ \t]+\S", response, flags=re.MULTILINE)]
    return len(found) if found == list(range(1, len(found) + 1)) else 0


@_kind()
def _title(response: str) -> bool:
    """A title in double angular brackets: `<<Joy>>`, but not the placeholder `<<title>>` of the usual request."""
    titles = re.findall(r"<<([^<>\n]+)>>", response)
    return any(re.search(r"\w", title) and fold(title).strip() != "title" for title in titles)


@_kind()
def _max_words(response: str, max: Positive) -> bool:
    """At most `max` words."""
    return 0 < len(split_words(response)) <= max


@_kind()
def _min_words(response: str, min: Positive) -> bool:
    """At least `min` words."""
    return len(split_words(response)) >= min


def _not_below_min(value: int, others: ValidationInfo) -> int:
    if others.data.get("min", 0) > value:
        raise ValueError(f"min: {others.data['min']} is above max: {value}")
    return value


@_kind()
def _word_count(response: str, min: Positive, max: Annotated[Positive, AfterValidator(_not_below_min)]) -> bool:
    """Between `min` and `max` words, both included."""
    return min <= len(split_words(response)) <= max


@_kind()
def _keyword(response: str, word: NonBlank) -> bool:
    """The word or phrase occurs, as a whole word, in any case."""
    return occurrences(response, word) > 0


@_kind()
def _keywords(response: str, words: NonBlanks) -> bool:
    """All the words occur."""
    return all(occurrences(response, word) for word in words)


@_kind()
def _forbidden_words(response: str, words: NonBlanks) -> bool:
    """None of the words occurs."""
    return not any(occurrences(response, word) for word in words)


@_counted()
def _keyword_frequency(response: str, word: NonBlank) -> int:
    """The word occurs `count` times."""
    return occurrences(response, word)


@_counted()
def _letter_frequency(response: str, letter: Annotated[str, Field(min_length=1, max_length=1)]) -> int:
    """The letter occurs `count` times, in either case."""
    return fold(response).count(fold(letter))


@_kind()
def _lowercase(response: str) -> bool:
    """Letters, none of them a capital."""
    categories = _letters(response)
    return bool(categories) and not categories & {"Lu", "Lt"}


@_kind()
def _uppercase(response: str) -> bool:
    """Letters, all of them capitals."""
    categories = _letters(response)
    return bool(categories) and not categories & {"Ll", "Lt"}


@_counted()
def _uppercase_words(response: str) -> int:
    """`count` words of two or more letters in capitals only."""
    return sum(len(word) > 1 and word.isupper() for word in split_words(response))


@_counted()
def _number_sentences(response: str) -> int:
    """`count` sentences."""
    return len(sentences(response))


@_counted()
def _number_paragraphs(response: str, divider: Literal["blank_line", "stars"] = "blank_line") -> int:
    """`count` paragraphs, divided by blank lines or by lines of `***`."""
    return len(split_paragraphs(response, stars=divider == "stars"))


@_kind()
def _first_word(response: str, word: NonBlank, paragraph: Positive = 1, paragraphs: Positive | None = None) -> bool:
    """Paragraph `paragraph` (from 1) of `paragraphs`, where that is set, begins with `word`."""
    parts = split_paragraphs(response)
    if len(parts) < paragraph or (paragraphs is not None and len(parts) != paragraphs):
        return False
    return [fold(found) for found in split_words(parts[paragraph - 1])[:1]] == [fold(word)]


@_kind()
def _starts_with(response: str, text: NonBlank) -> bool:
    """The response begins with `text`, in any case."""
    begin, found = _squeezed(text), _squeezed(response.lstrip().lstrip(QUOTES))
    return found.startswith(begin) and not (begin[-1].isalnum() and found[len(begin) : len(begin) + 1].isalnum())


@_kind()
def _ends_with(response: str, text: NonBlank) -> bool:
    """The response ends with `text` and nothing after it, in any case."""
    end, found = _squeezed(text), _squeezed(response.rstrip().rstrip(QUOTES))
    return found.endswith(end) and not (end[0].isalnum() and found[: len(found) - len(end)][-1:].isalnum())


@_kind()
def _quotation(response: str) -> bool:
    """The whole response is wrapped in double quotation marks."""
    found = response.strip()
    return len(found) > 2 and found[0] in QUOTES and found[-1] in QUOTES and bool(split_words(found))


@_kind(prose=False)
def _json_format(response: str) -> bool:
    """The whole response is one JSON object or array, with or without a code fence."""
    found = re.sub(r"^```(?:json|JSON)?[ \t]*\n|\n?```$", "", response.strip())
    try:
        return isinstance(json.loads(found, parse_constant=_refuse_constant), dict | list)
    except (ValueError, RecursionError):
        return False


@_counted("at_least")
def _highlights(response: str) -> int:
    """`count` passages highlighted as `*passage*` or `**passage**`."""
    body = "\n".join(without_bullet(line) for line in response.splitlines())
    found = re.findall(r"(?<!\*)(\*{1,2})([^*\n]+)\1(?!\*)", body)
    return sum(bool(re.search(r"\w", passage)) for _, passage in found)


@_counted("at_least")
def _sections(response: str, splitter: NonBlank = "Section") -> int:
    """`count` sections, each begun by `splitter` and a number: `Section 1`."""
    head = re.escape(splitter.strip())
    found = re.findall(rf"^[ \t#*_]*{head}[ \t]+(\d+|[IVX]+)\b", response, flags=re.MULTILINE | re.IGNORECASE)
    return len({number.upper() for number in found})


@_counted("at_least")
def _placeholders(response: str) -> int:
    """`count` placeholders in square brackets: `[address]`."""
    return sum(bool(re.search(r"\w", name)) for name in re.findall(r"\[([^\[\]\n]+)\]", response))


@_kind()
def _postscript(response: str, marker: Literal["P.S.", "P.P.S"] = "P.S.") -> bool:
    """A line that begins with `marker`, with something after it."""
    pattern = r"p\.[ ]?p\.[ ]?s\b\.?" if marker == "P.P.S" else r"p\.[ ]?s\b\.?"
    return bool(re.search(rf"^[ \t*_]*{pattern}[:*_ \t]*\w", response, flags=re.MULTILINE | re.IGNORECASE))


@_kind()
def _choose_one(response: str, options: Annotated[tuple[NonBlank, ...], Field(min_length=2)]) -> bool:
    """Exactly one of the options is named."""
    # the longest option first, so that "yes and no" is not also a "no"
    known = sorted((re.escape(fold(option).strip()) for option in options), key=len, reverse=True)
    return len(set(re.findall(rf"(?<!\w)(?:{'|'.join(known)})(?!\w)", fold(response)))) == 1


@_kind()
def _repeat_prompt(response: str, prompt: NonBlank) -> bool:
    """The response begins with `prompt`, word for word, and then answers."""
    return _squeezed(response).startswith(_squeezed(prompt)) and bool(split_words(_after_prompt(response, prompt)))


@_kind()
def _two_responses(response: str) -> bool:
    """Two different answers, divided by `******`."""
    parts = [_squeezed(part) for part in re.split(r"(?<!\*)\*{6}(?!\*)", response)]
    return len(parts) == 2 and all(split_words(part) for part in parts) and parts[0] != parts[1]


def _known_language(value: str) -> str:
    if value not in LANGUAGES:
        raise ValueError(f"{value!r} is not one of the languages that can be detected: {', '.join(sorted(LANGUAGES))}")
    return value


@_kind(prose=False)  # function words are known for English only
def _response_language(response: str, language: Annotated[str, AfterValidator(_known_language)]) -> bool:
    """The response is in the language of that ISO 639-1 code."""
    return language_of(response) == language


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
        return Instruction(kind, dict(KINDS[kind].settings.model_validate(settings)))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ValueError(f"instruction {kind!r}: {problems}") from error


def _squeezed(text: str) -> str:
    return " ".join(fold(text).split())


def _after_prompt(response: str, prompt: str) -> str:
    """Return what comes after the repeated prompt; all, where it is not repeated."""
    repeated, found = _squeezed(prompt), _squeezed(response)
    return found[len(repeated) :] if found.startswith(repeated) else response


def _letters(text: str) -> set[str]:
    """Return the categories of the letters that have a case."""
    return set(map(unicodedata.category, text)) & {"Lu", "Ll", "Lt"}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
