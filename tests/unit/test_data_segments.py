"""Tokens of texts by their parts are the tokens of the texts."""

from __future__ import annotations

import pickle
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import make_tiny_tokenizer
from tokenizers import AddedToken

from roll_like.config.model import ModelConfig
from roll_like.data.chat import Renderer
from roll_like.data.segments import Segments
from roll_like.models.load import QUICKSTART_MODEL, load_tokenizer

TINY = make_tiny_tokenizer()
PARTS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|im_",
    "user\n",
    " user",
    "\n\n",
    " ",
    "a",
    "é",
    "e\u0301",
    "日",
    "12",
    "'s",
    "🙂",
    "\u200d",
]


@cache
def tokenizer_and_segments(name: str) -> tuple[Any, Segments]:
    tokenizer: Any = TINY if name == "tiny" else load_tokenizer(ModelConfig(path=QUICKSTART_MODEL))
    segments = Segments.of(tokenizer)
    assert segments is not None
    return tokenizer, segments


@pytest.mark.parametrize("name", ["tiny", "SmolLM2"])
@given(st.lists(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), max_size=6))
def test_any_text(name: str, texts: list[str]) -> None:
    tokenizer, segments = tokenizer_and_segments(name)
    segments._known = {"": []}  # as new ones: to make them takes a while
    expected = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    for _ in range(2):  # the second time with what is remembered
        assert segments.encode(texts) == expected


def test_what_comes_again_is_tokenised_once() -> None:
    tokenizer = TINY
    seen: list[str] = []

    class Counting:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            seen.extend(texts)
            return tokenizer.backend_tokenizer.encode_batch_fast(texts, **options)

    segments = Segments.of(tokenizer)
    assert segments is not None
    segments._tokenizer = Counting()
    draw = random.Random(0)
    texts = [f"<|im_start|>system\nBe brief.<|im_end|>{draw.random()}" for _ in range(20)]
    for begin in range(0, 20, 5):
        segments.encode(texts[begin : begin + 5])
    assert seen.count("system\nBe brief.") == 1
    assert len(seen) == 21


def test_tokenizers_that_look_beyond_a_part_are_left_alone() -> None:
    blanks = make_tiny_tokenizer()
    blanks.add_tokens([AddedToken("<x>", lstrip=True, normalized=False)])
    assert Segments.of(blanks) is None
    split = make_tiny_tokenizer()
    split.split_special_tokens = True
    assert Segments.of(split) is None


def test_a_renderer_can_be_sent_to_another_process() -> None:
    render = Renderer(TINY)
    message = [{"role": "user", "content": "Hi"}]
    pieces = [(render.render(message, ()), True), ("Hi<|im_end|>", False)]
    sent = pickle.loads(pickle.dumps(render))
    assert sent.render(message, ()) == pieces[0][0]
    for one, two in zip(render.encode_pieces(pieces), sent.encode_pieces(pieces), strict=True):
        assert one.tolist() == two.tolist()
