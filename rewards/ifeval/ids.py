"""The 25 instructions of the IFEval data set, by its own ids and arguments, as kinds of this package.

A row of that set has `instruction_id_list` and, for each id, its arguments in `kwargs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Arguments = Mapping[str, Any]
_ANSWERS = ["My answer is yes.", "My answer is no.", "My answer is maybe."]


def _named(kind: str, fixed: Mapping[str, Any] | None = None, **names: str) -> Callable[[Arguments], dict[str, Any]]:
    """Return a translation that renames arguments, and adds fixed ones."""
    return lambda given: {"kind": kind, **{ours: given[theirs] for ours, theirs in names.items()}, **(fixed or {})}


def _counted(kind: str, count: str, relation: str | None = None, **names: str) -> Callable[[Arguments], dict[str, Any]]:
    """Return a translation whose count is in the argument `count` and its relation in `relation`; else at least."""

    def translate(given: Arguments) -> dict[str, Any]:
        number, how = int(given[count]), "at least" if relation is None else given[relation]
        if how not in ("at least", "less than"):
            raise ValueError(f"the relation should be 'at least' or 'less than', found {how!r}")
        limit = {"count": number - 1, "relation": "at_most"} if how == "less than" else {"count": number}
        return _named(kind, {"relation": "at_least", **limit}, **names)(given)

    return translate


def _words(given: Arguments) -> dict[str, Any]:
    number = int(given["num_words"])
    if given["relation"] == "less than":
        return {"kind": "max_words", "max": number - 1}
    return {"kind": "min_words", "min": number}


TRANSLATIONS: dict[str, Callable[[Arguments], dict[str, Any]]] = {
    "keywords:existence": _named("keywords", words="keywords"),
    "keywords:frequency": _counted("keyword_frequency", "frequency", "relation", word="keyword"),
    "keywords:forbidden_words": _named("forbidden_words", words="forbidden_words"),
    "keywords:letter_frequency": _counted("letter_frequency", "let_frequency", "let_relation", letter="letter"),
    "language:response_language": _named("response_language", language="language"),
    "length_constraints:number_sentences": _counted("number_sentences", "num_sentences", "relation"),
    "length_constraints:number_paragraphs": _named("number_paragraphs", {"divider": "stars"}, count="num_paragraphs"),
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _named(
        "first_word", word="first_word", paragraph="nth_paragraph", paragraphs="num_paragraphs"
    ),
    "detectable_content:number_placeholders": _counted("placeholders", "num_placeholders"),
    "detectable_content:postscript": _named("postscript", marker="postscript_marker"),
    "detectable_format:number_bullet_lists": _named("bullet_list", count="num_bullets"),
    "detectable_format:constrained_response": _named("choose_one", {"options": _ANSWERS}),
    "detectable_format:number_highlighted_sections": _counted("highlights", "num_highlights"),
    "detectable_format:multiple_sections": _counted("sections", "num_sections", splitter="section_spliter"),
    "detectable_format:json_format": _named("json_format"),
    "detectable_format:title": _named("title"),
    "combination:two_responses": _named("two_responses"),
    "combination:repeat_prompt": _named("repeat_prompt", prompt="prompt_to_repeat"),
    "startend:end_checker": _named("ends_with", text="end_phrase"),
    "startend:quotation": _named("quotation"),
    "change_case:capital_word_frequency": _counted("uppercase_words", "capital_frequency", "capital_relation"),
    "change_case:english_capital": _named("uppercase"),
    "change_case:english_lowercase": _named("lowercase"),
    "punctuation:no_comma": _named("no_commas"),
}


def translate_ids(ids: Any, arguments: Any) -> list[dict[str, Any]]:
    """Return the instructions of a row of the IFEval data set, as `parse_instructions` takes them.

    Raises:
        ValueError: An id is unknown, or its arguments are missing.
    """
    lists = all(isinstance(part, Sequence) and not isinstance(part, str) for part in (ids, arguments))
    if not lists or len(ids) != len(arguments):
        raise ValueError("instruction_id_list and kwargs should be lists of one length")
    return [_translate(name, given or {}) for name, given in zip(ids, arguments, strict=True)]


def _translate(name: Any, given: Arguments) -> dict[str, Any]:
    if name not in TRANSLATIONS:
        raise ValueError(f"unknown id of an instruction {name!r}; known: {', '.join(TRANSLATIONS)}")
    try:
        return TRANSLATIONS[name](given)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the instruction {name!r} is missing an argument or has a wrong one: {error}") from error
