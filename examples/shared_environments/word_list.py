"""Writes the NLTK data that TextArena's word games load, from a file with a word a line: for machines without network.

    python word_list.py words.txt ~/nltk_data

NLTK reads the folder that NLTK_DATA names. All words are taken as nouns of the basic list, which Wordle draws from.
"""

import json
import sys
from pathlib import Path


def write_nltk_data(words: list[str], folder: Path) -> None:
    """Write the corpus `words` and the tagger `averaged_perceptron_tagger_eng`."""
    corpus, tagger = folder / "corpora" / "words", folder / "taggers" / "averaged_perceptron_tagger_eng"
    corpus.mkdir(parents=True, exist_ok=True)
    tagger.mkdir(parents=True, exist_ok=True)
    for name in ("en", "en-basic"):
        (corpus / name).write_text("".join(f"{word}\n" for word in words))
    parts = {"weights": {}, "tagdict": dict.fromkeys(words, "NN"), "classes": ["NN"]}
    for name, part in parts.items():
        (tagger / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(part))


if __name__ == "__main__":
    write_nltk_data(Path(sys.argv[1]).read_text().split(), Path(sys.argv[2]).expanduser())
