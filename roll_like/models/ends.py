"""Which tokens end a response, and what says so."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.models.stored import stated_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll_like.data.chat import Renderer

_GENERATION, _CONFIG = "generation_config.json", "config.json"


@dataclass(frozen=True, slots=True)
class EndToken:
    """A token that ends a response.

    Attributes:
        token_id: Its id.
        text: What it stands for.
        sources: What says that it does: `chat template`, `tokenizer`, `generation_config.json`, `config.json`.
    """

    token_id: int
    text: str
    sources: tuple[str, ...]

    def __str__(self) -> str:
        """Return it as `<|im_end|> (151645: chat template, tokenizer)`."""
        return f"{self.text} ({self.token_id}: {', '.join(self.sources)})"


def stated_ends(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the tokens that the files of a model's directory say end a sequence, by the file's name."""
    generation, config = stated_json(path / _GENERATION), stated_json(path / _CONFIG)
    inner = config.get("text_config")
    of_text = inner.get("eos_token_id") if isinstance(inner, dict) else None
    found = {
        _GENERATION: _ids(generation.get("eos_token_id")),
        _CONFIG: (*_ids(config.get("eos_token_id")), *_ids(of_text)),
    }
    return {file: tuple(dict.fromkeys(ids)) for file, ids in found.items() if ids}


def end_tokens(renderer: Renderer, path: Path) -> tuple[EndToken, ...]:
    """Return what ends a response of the model in a directory, in the order of the sources."""
    sources: dict[int, list[str]] = defaultdict(list)
    if renderer.turn_end is not None:
        sources[renderer.turn_end].append("chat template")
    if renderer.tokenizer.eos_token_id is not None:
        sources[int(renderer.tokenizer.eos_token_id)].append("tokenizer")
    for file, ids in stated_ends(path).items():
        for token_id in ids:
            sources[token_id].append(file)
    return tuple(EndToken(each, renderer.decode([each]) or "?", tuple(said)) for each, said in sources.items())


def state_end(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have generation_config.json name what the chat template ends a turn with, so that all engines stop there.

    A base model's names the end of a document, which a model that was trained on conversations does not write.
    """
    from roll_like.data.chat import Renderer

    turn_end = Renderer(tokenizer).turn_end if tokenizer.chat_template else None
    stated = stated_ends(path)
    known = stated.get(_GENERATION) or _ids(tokenizer.eos_token_id)
    if turn_end is None or turn_end in known:
        return
    if _GENERATION not in stated:  # engines read config.json's where this file names none
        known = (*known, *stated.get(_CONFIG, ()))
    settings = stated_json(path / _GENERATION)
    settings["eos_token_id"] = list(dict.fromkeys([*known, turn_end]))
    (path / _GENERATION).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(each for each in values if isinstance(each, int) and not isinstance(each, bool) and each >= 0)
