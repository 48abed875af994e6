"""Guards: what a checker of form would pass although it is no answer.

An instruction such as "use no commas" is followed by the empty text, by the prompt repeated, by one
word said forty times and by random letters. Each function here measures one such way out, so that a
reward can score it 0. The measures are for prose and lists; those of vocabulary know English only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_LETTERS_ONLY = re.compile(r"[a-z]+")
_CONSONANT_RUN = re.compile(r"[bcdfghjklmnpqrstvwxz]{5}")
_VOWEL = re.compile(r"[aeiouy]")
_WINDOW = 20

FUNCTION_WORDS = frozenset(
    """
    a an the this that these those some any no every each all both many much more most few less other another such
    i you he she it we they me him her us them my your his its our their mine yours who whom whose which what
    myself yourself itself himself herself themselves one someone something everyone everything anyone anything nothing
    am is are was were be been being do does did done have has had having can could will would shall should may might
    must not and or but nor so yet if then than because as while when where why how although though since until unless
    of in on at by for with about against between into through during before after above below to from up down out off
    over under again further once here there also too very just only even still often always never sometimes usually
    own same like near within without across along around behind beyond toward towards upon among per via
    i'm you're it's he's she's we're they're i've you've we've they've don't doesn't didn't isn't aren't can't won't
    """.split()  # noqa: SIM905
)


def copied_share(response: Sequence[str], prompt: Sequence[str]) -> float:
    """Return the share of the response's word n-grams that occur in the prompt, 0 to 1; n is 4.

    A shorter response is one n-gram of its own length.
    """
    size = min(4, len(response))
    if size == 0:
        return 0.0
    known = set(_ngrams(prompt, size))
    grams = _ngrams(response, size)
    return sum(gram in known for gram in grams) / len(grams)


def distinct_share(response: Sequence[str]) -> float:
    """Return the share of distinct words, as the lowest over windows of 20 words, 0 to 1.

    Windows make the measure independent of length; the lowest finds a text that decays into a loop.
    """
    if not response:
        return 1.0
    last = max(len(response) - _WINDOW, 0)
    starts = [*range(0, last + 1, _WINDOW // 2), last]
    windows = [response[start : start + _WINDOW] for start in starts]
    return min(len(set(window)) / len(window) for window in windows)


def letter_share(text: str) -> float:
    """Return the share of letters and digits among the characters that are not blank, 0 to 1."""
    characters = [character for character in text if not character.isspace()]
    return sum(character.isalnum() for character in characters) / len(characters) if characters else 0.0


def wordlike_share(response: Sequence[str]) -> float:
    """Return the share of words that could be English by their shape, 0 to 1.

    Such a word has a vowel, no run of five consonants, no letter three times in a row and at most 20
    letters. Numbers and words with letters outside a-z count as word-like, as do words in capitals of
    up to five letters (abbreviations).
    """
    if not response:
        return 1.0
    return sum(_is_wordlike(word) for word in response) / len(response)


def function_word_share(response: Sequence[str]) -> float:
    """Return the share of English function words (`the`, `of`, `is` …), 0 to 1; prose has 0.35 to 0.6."""
    if not response:
        return 0.0
    return sum(word.lower().replace("’", "'") in FUNCTION_WORDS for word in response) / len(response)


def mentions(response: Sequence[str], topic: Sequence[str]) -> bool:
    """Return whether a content word of `topic` occurs in the response.

    Words count as the same when they begin with the same four letters, or are singular and plural of
    one another: `volcanoes` and `volcanic`, `foxes` and `fox`, `wolves` and `wolf`.
    """
    wanted = [word.lower() for word in topic if word.lower() not in FUNCTION_WORDS]
    found: set[str] = set().union(*(_stems(word.lower()) for word in response))
    return not wanted or any(_stems(word) & found for word in wanted)


def _stems(word: str) -> set[str]:
    singulars = {word.removesuffix("s"), word.removesuffix("es"), word.replace("ves", "f")}
    return {form[:4] for form in (word, *singulars) if len(form) >= 3 or form == word}


def _ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]


def _is_wordlike(word: str) -> bool:
    lower = word.lower()
    if _LETTERS_ONLY.fullmatch(lower) is None:
        return True
    if word.isupper() and len(word) <= 5:
        return True
    return (
        len(lower) <= 20
        and _VOWEL.search(lower) is not None
        and _CONSONANT_RUN.search(lower) is None
        and re.search(r"(.)\1\1", lower) is None
    )
