"""Writes the quickstart's data: short prompts that ask for a form, and the checks of that form.

    python scripts/make_quickstart_data.py                      # configs/data/quickstart_{train,eval}.jsonl
    python scripts/make_quickstart_data.py --kinds title short --train 256 --seed 1

Every row is one topic × one kind of request × one wording. The topics of the two files are
disjoint. The same arguments always write the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_like.builtin.rewards.ifeval.kinds import parse_instructions

TOPICS = tuple(
    """
    apples bananas bread butter cheese chocolate coffee honey lemons milk noodles olives onions oranges pancakes pasta
    pizza potatoes rice salad salt soup spinach strawberries sugar tea tomatoes water wheat yogurt
    ants bears bees birds butterflies camels cats chickens cows crabs crows deer dogs dolphins ducks eagles elephants
    fish foxes frogs goats horses kangaroos lions lizards monkeys mosquitoes octopuses owls parrots penguins pigs
    rabbits sharks sheep snails snakes spiders squirrels swans tigers turtles whales wolves zebras
    autumn beaches caves clouds deserts earthquakes fire flowers fog forests glaciers grass ice islands lakes lightning
    meadows moonlight mountains oceans planets rain rainbows rivers roses sand snow spring stars storms summer sunlight
    sunsets thunder trees tulips valleys volcanoes waterfalls waves wind winter
    airplanes airports backpacks balloons bicycles boats books bottles bridges buses cameras candles cars castles chairs
    clocks coins computers curtains doors elevators engines factories fences glasses gloves guitars hammers hats houses
    keys kitchens kites ladders lamps libraries lighthouses magnets maps markets mirrors museums newspapers painters
    paper parks pencils pens phones pianos pillows pottery radios robots roofs ropes satellites scarves schools
    scissors ships shoes soap stairs statues tables telescopes tents tickets towers toys trains tunnels umbrellas
    violins watches wheels windmills windows
    archery baking baseball basketball camping chess cycling dancing drawing farming fishing football friendship
    gardening hiking jogging juggling knitting kindness laughter magic medicine music painting patience photography
    poetry reading recycling sailing singing skating skiing sleep sports stories surfing swimming teamwork tennis
    theater travel walking weddings writing yoga
    astronauts bakers carpenters dentists doctors farmers firefighters judges mechanics musicians nurses pilots
    plumbers poets sailors scientists singers tailors teachers
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Request:
    """One kind of request: wordings with `{topic}`, what the response is checked for, one that passes."""

    wordings: tuple[str, ...]
    instructions: tuple[dict[str, Any], ...]
    example: str


REQUESTS = {
    "no_commas": Request(
        (
            "Describe {topic} in one sentence without using any commas.",
            "Tell me about {topic} in one sentence. Do not use commas.",
            "Write one sentence about {topic} with no commas.",
        ),
        ({"kind": "no_commas"},),
        "There is a lot to say about {topic} and most of it is good.",
    ),
    "short": Request(
        (
            "Describe {topic} in under 20 words with no commas.",
            "Tell me about {topic}. Use fewer than 20 words and no commas.",
            "Explain {topic} with at most 19 words and without commas.",
        ),
        ({"kind": "max_words", "max": 19}, {"kind": "no_commas"}),
        "Many people know {topic} and use them every day.",
    ),
    "title": Request(
        (
            "Describe {topic} in one short sentence with a title in double angular brackets such as <<title>>.",
            "Write one short sentence about {topic}. Put a title in double angular brackets such as <<title>> above.",
            "Write one short sentence about {topic} with a title in double angular brackets such as <<title>>.",
        ),
        ({"kind": "title"},),
        "<<All about {topic}>>\nMany people think that {topic} are part of a good life.",
    ),
    "ten_words": Request(
        (
            "Describe {topic} in at most ten words.",
            "Tell me about {topic} in ten words or fewer.",
            "Write one sentence about {topic} with at most ten words.",
        ),
        ({"kind": "max_words", "max": 10},),
        "Many people around the world like {topic} very much.",
    ),
    "no_and": Request(
        (
            'Describe {topic} in one sentence without the word "and".',
            'Tell me about {topic} in one sentence. Do not use the word "and".',
            'Write one sentence about {topic} that never says "and".',
        ),
        ({"kind": "forbidden_words", "words": ["and"]},),
        "There is a lot to say about {topic} because people like them.",
    ),
    "numbered": Request(
        (
            "Write a numbered list of two short facts about {topic}.",
            "List two short facts about {topic} with numbers.",
            "Give two short facts about {topic} as a numbered list.",
        ),
        ({"kind": "numbered_list", "count": 2},),
        "1. Many people know {topic} well.\n2. They are easy to find in a city.",
    ),
    "bullets": Request(
        (
            "List three short facts about {topic}. Start each line with a dash.",
            "Write three short bullet points about {topic}.",
            "Give exactly three short bullet points about {topic}.",
        ),
        ({"kind": "bullet_list", "count": 3},),
        "- Many people know {topic}\n- They are easy to find\n- Children like them too",
    ),
    "two_sentences": Request(
        (
            "Tell me about {topic} in exactly two short sentences.",
            "Describe {topic}. Use exactly two short sentences.",
            "Write exactly two short sentences about {topic}.",
        ),
        ({"kind": "number_sentences", "count": 2},),
        "Most people know {topic} very well. They are a part of our lives.",
    ),
    "keyword": Request(
        (
            'Write one short sentence about {topic} with the word "people".',
            'Describe {topic} in one short sentence. Use the word "people".',
            'Tell me about {topic} in one short sentence with the word "people".',
        ),
        ({"kind": "keyword", "word": "people"},),
        "Most people in the world like {topic} for good reasons.",
    ),
    "lowercase": Request(
        (
            "Describe {topic} in one short sentence. Use only lowercase letters.",
            "Write one short sentence about {topic} in all lowercase letters.",
            "tell me about {topic} in one short sentence. use no capital letters.",
        ),
        ({"kind": "lowercase"},),
        "people all over the world like {topic} for many reasons.",
    ),
    "begin": Request(
        (
            'Describe {topic} in one short sentence. Start with the word "Well".',
            'Write one short sentence about {topic} that begins with "Well".',
            'Begin with "Well" and tell me one thing about {topic}.',
        ),
        ({"kind": "starts_with", "text": "Well"},),
        "Well, {topic} are known to people all over the world.",
    ),
}
DEFAULT_KINDS = ("no_commas", "short", "title", "keyword", "ten_words")
FOLDER = Path(__file__).resolve().parent.parent / "configs" / "data"


def make_rows(kinds: Sequence[str], *, train: int, evaluation: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Return the rows of both files.

    Args:
        kinds: Names from `REQUESTS`; each gets an equal share, up to one row.
        train: Training rows.
        evaluation: Evaluation rows, about topics that no training row has.
        seed: Seed of the split and of all draws.

    Raises:
        ValueError: A kind is unknown, or there are fewer combinations than rows asked for.
    """
    unknown = sorted(set(kinds) - set(REQUESTS))
    if unknown or not kinds:
        raise ValueError(f"unknown kind {', '.join(unknown) or '(none given)'}; known: {', '.join(REQUESTS)}")
    generator = random.Random(seed)
    topics = list(TOPICS)
    generator.shuffle(topics)
    share = max(round(len(topics) * evaluation / (train + evaluation)), 8)
    return (
        _draw(topics[share:], kinds, count=train, generator=generator),
        _draw(topics[:share], kinds, count=evaluation, generator=generator),
    )


Row = dict[str, Any]


def _draw(topics: Sequence[str], kinds: Sequence[str], *, count: int, generator: random.Random) -> list[Row]:
    """Return `count` different rows; consecutive ones go through the kinds and through shuffled topics."""
    decks: dict[str, list[tuple[str, str]]] = {}
    for kind in kinds:
        rounds = []
        wordings = REQUESTS[kind].wordings
        for shift in range(len(wordings)):  # each topic once per round, each time in another wording
            order = generator.sample(list(enumerate(topics)), k=len(topics))
            rounds += [(topic, wordings[(index + shift) % len(wordings)]) for index, topic in order]
        decks[kind] = rounds[::-1]
    available = min(map(len, decks.values())) * len(kinds)
    if count > available:
        raise ValueError(f"{count} rows asked for, but {len(topics)} topics give {available} different ones")
    return [_row(kind, *decks[kind].pop()) for kind in (kinds[index % len(kinds)] for index in range(count))]


def _row(kind: str, topic: str, wording: str) -> Row:
    row = {
        "prompt": wording.format(topic=topic),
        "instructions": [dict(instruction) for instruction in REQUESTS[kind].instructions],
        "topic": topic,
    }
    parse_instructions(row["instructions"])
    return row


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the quickstart's training and evaluation prompts.")
    parser.add_argument("--kinds", nargs="+", choices=REQUESTS, default=DEFAULT_KINDS, help="kinds of request")
    parser.add_argument("--train", type=int, default=512, help="training rows")
    parser.add_argument("--eval", type=int, default=32, help="evaluation rows, on other topics", dest="evaluation")
    parser.add_argument("--seed", type=int, default=0, help="seed of topics, wordings and order")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to")
    options = parser.parse_args(arguments)
    train, evaluation = make_rows(options.kinds, train=options.train, evaluation=options.evaluation, seed=options.seed)
    for name, rows in (("train", train), ("eval", evaluation)):
        path = options.out / f"quickstart_{name}.jsonl"
        write_rows(path, rows)
        print(f"{path}: {len(rows)} rows, {len({row['topic'] for row in rows})} topics")


if __name__ == "__main__":
    main()
