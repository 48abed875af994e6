"""Each kind: responses that follow it, responses that do not, and the field's known checker bugs."""

from typing import Any

import pytest

from roll_like.builtin.rewards.ifeval import loose_variants
from roll_like.builtin.rewards.ifeval.kinds import KINDS, parse_instructions

PASS, FAIL = True, False

CASES: list[tuple[dict[str, Any], str, bool]] = [
    ({"kind": "no_commas"}, "A cat sleeps.", PASS),
    ({"kind": "no_commas"}, "A cat, a dog.", FAIL),
    ({"kind": "no_commas"}, "It costs 1,000 dollars.", FAIL),
    ({"kind": "no_commas"}, "猫，狗", FAIL),
    ({"kind": "bullet_list", "count": 2}, "* one\n* two", PASS),
    ({"kind": "bullet_list", "count": 2}, "Here:\n- one\n• two\nDone.", PASS),
    ({"kind": "bullet_list", "count": 2}, "  - one\n    + two", PASS),
    ({"kind": "bullet_list", "count": 2}, "* one\n* two\n* three", FAIL),
    ({"kind": "bullet_list", "count": 2, "relation": "at_least"}, "* one\n* two\n* three", PASS),
    ({"kind": "bullet_list", "count": 2, "relation": "at_most"}, "* one\n* two\n* three", FAIL),
    ({"kind": "bullet_list", "count": 2}, "**bold** one\n**bold** two", FAIL),
    ({"kind": "bullet_list", "count": 2}, "* **bold** one\n* **bold** two", PASS),
    ({"kind": "bullet_list", "count": 2}, "* one\n* * *\n* two\n---", PASS),
    ({"kind": "bullet_list", "count": 2}, "-5 degrees\n-6 degrees", FAIL),
    ({"kind": "numbered_list", "count": 3}, "1. a\n2. b\n3) c", PASS),
    ({"kind": "numbered_list", "count": 3}, "1. a\n1. b\n1. c", FAIL),
    ({"kind": "title"}, "<<Joy>>\nText.", PASS),
    ({"kind": "title"}, "<Joy>\nText.", FAIL),
    ({"kind": "title"}, "<<>> text", FAIL),
    ({"kind": "title"}, "with a title such as <<Title>>", FAIL),
    ({"kind": "title"}, "<<title>> <<Title of the year>>", PASS),
    ({"kind": "title"}, "<< >> text", FAIL),
    ({"kind": "title"}, "<<Joy\nand more>>", FAIL),
    ({"kind": "max_words", "max": 3}, "one two three", PASS),
    ({"kind": "max_words", "max": 3}, "one two three four", FAIL),
    ({"kind": "max_words", "max": 3}, "one,two,three,four", FAIL),
    ({"kind": "max_words", "max": 4}, "It's 1,000.5 well-known things.", PASS),
    ({"kind": "max_words", "max": 3}, "...", FAIL),
    ({"kind": "min_words", "min": 3}, "one two three", PASS),
    ({"kind": "min_words", "min": 3}, "one - two", FAIL),
    ({"kind": "word_count", "min": 2, "max": 3}, "one two", PASS),
    ({"kind": "word_count", "min": 2, "max": 3}, "one two three four", FAIL),
    ({"kind": "word_count", "min": 2, "max": 3}, "one", FAIL),
    ({"kind": "keyword", "word": "cat"}, "The Cat sat.", PASS),
    ({"kind": "keyword", "word": "cat"}, "Concatenate the cats.", FAIL),
    ({"kind": "keyword", "word": "New York"}, "I love new\nyork!", PASS),
    ({"kind": "keyword", "word": "C++"}, "I write C++.", PASS),
    ({"kind": "keyword", "word": "straße"}, "STRASSE", PASS),
    ({"kind": "keyword", "word": "café"}, "cafe\u0301 noir", PASS),
    ({"kind": "keyword", "word": "a.c"}, "abc", FAIL),
    ({"kind": "keywords", "words": ["cat", "dog"]}, "A dog and a cat.", PASS),
    ({"kind": "keywords", "words": ["cat", "dog"]}, "A dog and a dogma.", FAIL),
    ({"kind": "forbidden_words", "words": ["cat"]}, "A category of its own.", PASS),
    ({"kind": "forbidden_words", "words": ["cat"]}, "CAT!", FAIL),
    ({"kind": "keyword_frequency", "word": "cat", "count": 2}, "Cat, cat.", PASS),
    ({"kind": "keyword_frequency", "word": "cat", "count": 2}, "Cat, cat, cat.", FAIL),
    ({"kind": "keyword_frequency", "word": "cat", "count": 2}, "dog", FAIL),
    ({"kind": "keyword_frequency", "word": "cat", "count": 2, "relation": "at_least"}, "cat category", FAIL),
    ({"kind": "keyword_frequency", "word": "cat", "count": 1, "relation": "at_most"}, "cat cat", FAIL),
    ({"kind": "letter_frequency", "letter": "a", "count": 3}, "Anna and", PASS),
    ({"kind": "letter_frequency", "letter": "a", "count": 4}, "Anna and", FAIL),
    ({"kind": "lowercase"}, "all in lower case, even ß and é.", PASS),
    ({"kind": "lowercase"}, "é is fine but É is not", FAIL),
    ({"kind": "lowercase"}, "123 !", FAIL),
    ({"kind": "uppercase"}, "ÉTÉ IN 2020!", PASS),
    ({"kind": "uppercase"}, "ÉTé", FAIL),
    ({"kind": "uppercase"}, "42", FAIL),
    ({"kind": "uppercase_words", "count": 2}, "NASA and ESA are agencies. I agree.", PASS),
    ({"kind": "uppercase_words", "count": 2, "relation": "at_most"}, "NASA ESA JAXA", FAIL),
    ({"kind": "number_sentences", "count": 2}, "Dr. Smith paid $3.50. He left.", PASS),
    ({"kind": "number_sentences", "count": 1}, "Bring fruit, e.g. apples, at 5 p.m. today.", PASS),
    ({"kind": "number_sentences", "count": 2}, "He left at 5 p.m. She stayed.", PASS),
    ({"kind": "number_sentences", "count": 1}, "J. R. R. Tolkien wrote it.", PASS),
    ({"kind": "number_sentences", "count": 2}, "all lower case. still two of them.", PASS),
    ({"kind": "number_sentences", "count": 1}, "“Stop!” he said.", PASS),
    ({"kind": "number_sentences", "count": 3}, "Really?! Yes. No", PASS),
    ({"kind": "number_sentences", "count": 1}, "Well... maybe.", PASS),
    ({"kind": "number_sentences", "count": 2}, "1. First thing\n2. Second thing", PASS),
    ({"kind": "number_sentences", "count": 2}, "One. Two. Three.", FAIL),
    ({"kind": "number_sentences", "count": 1}, "Visit example.com for version 2.0 now.", PASS),
    ({"kind": "number_paragraphs", "count": 2}, "One.\n\nTwo.\n", PASS),
    ({"kind": "number_paragraphs", "count": 2}, "One.\nStill one.", FAIL),
    ({"kind": "number_paragraphs", "count": 2}, "One.\n \n\n\nTwo.", PASS),
    ({"kind": "number_paragraphs", "count": 2, "divider": "stars"}, "One.\n\nStill.\n***\nTwo.", PASS),
    ({"kind": "number_paragraphs", "count": 2, "divider": "stars"}, "One **bold***.", FAIL),
    ({"kind": "first_word", "word": "well", "paragraph": 2}, "One.\n\nWell, two.", PASS),
    ({"kind": "first_word", "word": "well", "paragraph": 2}, "Well.\n\nTwo.", FAIL),
    ({"kind": "first_word", "word": "well", "paragraph": 2}, "Well.", FAIL),
    ({"kind": "first_word", "word": "well", "paragraphs": 2}, "Well.\n\nTwo.\n\nThree.", FAIL),
    ({"kind": "first_word", "word": "well"}, "Wellness is good.", FAIL),
    ({"kind": "starts_with", "text": "Well"}, "“Well, yes.", PASS),
    ({"kind": "starts_with", "text": "Well"}, "Wellness.", FAIL),
    ({"kind": "starts_with", "text": "Dear  friend,"}, "dear friend, hello", PASS),
    ({"kind": "ends_with", "text": "Any questions?"}, "That is all. any questions?\n", PASS),
    ({"kind": "ends_with", "text": "Any questions?"}, "Any questions? No.", FAIL),
    ({"kind": "ends_with", "text": "end"}, "My friend", FAIL),
    ({"kind": "quotation"}, '"All of it."', PASS),
    ({"kind": "quotation"}, "“All of it.”", PASS),
    ({"kind": "quotation"}, '"Part" of it.', FAIL),
    ({"kind": "quotation"}, '""', FAIL),
    ({"kind": "json_format"}, '{"a": [1, 2]}', PASS),
    ({"kind": "json_format"}, '```json\n{"a": 1}\n```', PASS),
    ({"kind": "json_format"}, "5", FAIL),
    ({"kind": "json_format"}, "[NaN]", FAIL),
    ({"kind": "json_format"}, 'Sure: {"a": 1}', FAIL),
    ({"kind": "json_format"}, "[" * 100_000, FAIL),
    ({"kind": "highlights", "count": 2}, "*one* and **two**", PASS),
    ({"kind": "highlights", "count": 1}, "* one\n* two", FAIL),
    ({"kind": "highlights", "count": 1}, "2 * 3 = 6", FAIL),
    ({"kind": "highlights", "count": 1}, "****", FAIL),
    ({"kind": "highlights", "count": 1, "relation": "exactly"}, "* item with *one* highlight", PASS),
    ({"kind": "sections", "count": 2}, "Section 1\na\n## SECTION 2: b", PASS),
    ({"kind": "sections", "count": 2}, "Section 1\nas Section 2 says", FAIL),
    ({"kind": "sections", "count": 2, "splitter": "PART"}, "Part I\nx\nPart II\ny", PASS),
    ({"kind": "placeholders", "count": 2}, "[name] lives at [street address].", PASS),
    ({"kind": "placeholders", "count": 1}, "[] and [ ]", FAIL),
    ({"kind": "postscript"}, "Bye.\nP.S. I love you", PASS),
    ({"kind": "postscript"}, "Bye.\nP.S.", FAIL),
    ({"kind": "postscript"}, "The ps command", FAIL),
    ({"kind": "postscript", "marker": "P.P.S"}, "Bye.\nP.P.S. again", PASS),
    ({"kind": "postscript", "marker": "P.P.S"}, "Bye.\nP.S. again", FAIL),
    ({"kind": "choose_one", "options": ["yes", "no"]}, "My answer is yes.", PASS),
    ({"kind": "choose_one", "options": ["yes", "no"]}, "Yes and no.", FAIL),
    ({"kind": "choose_one", "options": ["yes", "no"]}, "I know nothing.", FAIL),
    ({"kind": "choose_one", "options": ["my answer is no", "my answer is no way"]}, "My answer is no way.", PASS),
    ({"kind": "repeat_prompt", "prompt": "What is  up?"}, "what is up?\nThe sky.", PASS),
    ({"kind": "repeat_prompt", "prompt": "What is up?"}, "What is up?", FAIL),
    ({"kind": "repeat_prompt", "prompt": "What is up?"}, "The sky.", FAIL),
    ({"kind": "response_language", "language": "fr"}, "Le chat est sur la table et il dort.", PASS),
    ({"kind": "response_language", "language": "fr"}, "The cat is on the table and it sleeps.", FAIL),
    ({"kind": "response_language", "language": "fr"}, "chat", FAIL),
    ({"kind": "two_responses"}, "One.\n******\nTwo.", PASS),
    ({"kind": "two_responses"}, "One.\n******\nOne.", FAIL),
    ({"kind": "two_responses"}, "One.\n******\n", FAIL),
    ({"kind": "two_responses"}, "One.\n******\nTwo.\n******\nThree.", FAIL),
]


@pytest.mark.parametrize(("entry", "text", "expected"), CASES)
def test_kind(entry: dict[str, Any], text: str, expected: bool) -> None:
    (instruction,) = parse_instructions([entry])
    assert instruction.follows(text) is expected


def test_every_kind_is_tested_both_ways() -> None:
    assert len(KINDS) >= 20
    assert {(entry["kind"], expected) for entry, _, expected in CASES} == {
        (kind, expected) for kind in KINDS for expected in (PASS, FAIL)
    }


@pytest.mark.parametrize("entry", [entry for entry, _, expected in CASES if expected])
@pytest.mark.parametrize("text", ["", "  \n"])
def test_a_blank_response_follows_nothing(entry: dict[str, Any], text: str) -> None:
    (instruction,) = parse_instructions([entry])
    assert not instruction.follows(text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "expected a list"),
        ("no_commas", "expected a list"),
        ({"kind": "no_commas"}, "expected a list"),
        ([], "empty"),
        ([{"max": 3}], "`kind`"),
        ([{"kind": "no_comma"}], "unknown kind of instruction 'no_comma'; known: .*no_commas"),
        ([{"kind": "max_words"}], "'max_words': max: Field required"),
        ([{"kind": "max_words", "max": "many"}], "'max_words': max: .*integer"),
        ([{"kind": "max_words", "max": 3, "min": 2}], "'max_words': min: Extra"),
        ([{"kind": "word_count", "min": 5, "max": 2}], "min: 5 is above max: 2"),
        ([{"kind": "keyword", "word": " "}], "'keyword': word"),
        ([{"kind": "bullet_list", "count": 2, "relation": "about"}], "'bullet_list': relation"),
    ],
)
def test_wrong_instructions_say_what_is_wrong(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_instructions(value)


def test_keys_that_hold_none_count_as_absent() -> None:
    (instruction,) = parse_instructions([{"kind": "max_words", "max": 3, "word": None, "count": None}])
    assert instruction.follows("one two")


def test_loose_mode_reads_eight_variants() -> None:
    variants = loose_variants("Sure!\n*a*\nBye.")
    assert set(variants) == {
        "Sure!\n*a*\nBye.",
        "*a*\nBye.",
        "Sure!\n*a*",
        "*a*",
        "Sure!\na\nBye.",
        "a\nBye.",
        "Sure!\na",
        "a",
    }
