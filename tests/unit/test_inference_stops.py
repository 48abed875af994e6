"""What ends a response: token ids of every source, stop strings, and special tokens as stop strings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_model import make_tiny_tokenizer

from roll_like.agents.conversation import Conversation
from roll_like.check.tokens import check_tokens
from roll_like.config.model import ModelConfig
from roll_like.data.chat import Renderer
from roll_like.errors import DataError, EnvError
from roll_like.inference.interface import GenerateRequest, Sampling
from roll_like.inference.stops import Stops, before
from roll_like.inference.vllm.engine import _sampling_params
from roll_like.models.ends import end_tokens, stated_ends
from roll_like.models.load import load_renderer
from roll_like.types import THINK, ReasoningTags, StopReason

#: Of families: their special tokens, template and end-of-sequence token → what ends a turn, and an answered turn.
TEMPLATES: dict[str, tuple[str, str | None, str, str]] = {
    "ChatML of a base model": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|endoftext|>",
        "<|im_end|>",
        "<|im_end|>",
    ),
    "Llama 3": (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eot_id|>",
    ),
    "GLM: the next header ends a turn": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|endoftext|>",
        "<|user|>",
        "<|user|>",
    ),
    "harmony: the last turn ends otherwise": (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|return|>",
        "<|return|>",
        "<|end|>",
    ),
}
SPECIAL = (
    "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|user|>", "<|assistant|>", "<|observation|>", "<|start|>", "<|message|>", "<|return|>", "<|end|>",
)  # fmt: skip


@pytest.fixture
def tokenizer() -> Any:
    found = make_tiny_tokenizer()
    found.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return found


def ids(tokenizer: Any, *tokens: str) -> tuple[int, ...]:
    return tuple(tokenizer.convert_tokens_to_ids(list(tokens)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_says_what_ends_a_turn(name: str, tokenizer: Any) -> None:
    template, eos, ends, answered = TEMPLATES[name]
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    render = Renderer(tokenizer)
    assert (render.turn_end, render.end_of_turn) == ids(tokenizer, ends, answered)
    assert render.stop_ids == {*ids(tokenizer, ends), tokenizer.eos_token_id}
    assert render.end_ids == {*render.stop_ids, *ids(tokenizer, answered)}


def test_every_source_is_named(tokenizer: Any, tmp_path: Path) -> None:
    template, tokenizer.eos_token, *_ = TEMPLATES["Llama 3"]
    tokenizer.chat_template = template
    text, turn, call = ids(tokenizer, "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [text, call, turn]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": text, "text_config": {"eos_token_id": turn}}))
    assert stated_ends(tmp_path) == {"generation_config.json": (text, call, turn), "config.json": (text, turn)}
    assert list(map(str, end_tokens(Renderer(tokenizer), tmp_path))) == [
        f"<|eot_id|> ({turn}: chat template, generation_config.json, config.json)",
        f"<|end_of_text|> ({text}: tokenizer, generation_config.json, config.json)",
        f"<|eom_id|> ({call}: generation_config.json)",
    ]


@pytest.mark.parametrize("value", [None, True, -1, "2", [None, -1], {}, 1.5])
def test_what_is_no_token_is_none(tmp_path: Path, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    (tmp_path / "config.json").write_text("[]")
    assert stated_ends(tmp_path) == {}


def test_a_models_own_files_are_read_with_its_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "model")
    (copy / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert load_renderer(ModelConfig(path=str(copy))).stop_ids == {0, 2}


def test_special_tokens_are_stops_by_their_ids(tokenizer: Any) -> None:
    stops = Stops(tokenizer, ids(tokenizer, "<|eot_id|>"))
    eos = tokenizer.eos_token_id
    turn, call = ids(tokenizer, "<|eot_id|>", "<|eom_id|>")
    found = stops.of(("<|eom_id|>", "</answer>"))
    assert (found.ids, found.strings, found.special) == (tuple(sorted({eos, turn, call})), ("</answer>",), False)
    found = stops.of(("<|eom_id|>\n",))
    assert (found.ids, found.strings, found.special) == (tuple(sorted({eos, turn})), ("<|eom_id|>\n",), True)


@pytest.mark.parametrize(
    ("text", "strings", "reason", "expected"),
    [
        ("one two<|eot_id|>", (), StopReason.STOP, "one two"),
        ("one two<|eom_id|>", ("<|eom_id|>",), StopReason.STOP, "one two"),
        ("one two one", ("two", "ne t"), StopReason.STOP, "o"),
        ("one two", ("two",), StopReason.LENGTH, "one two"),
        ("one<|user|> two<|eom_id|>\nx", ("<|eom_id|>\n",), StopReason.STOP, "one two"),
        ("one<|user|> two", (), StopReason.LENGTH, "one two"),
    ],
)
def test_the_text_is_without_what_ended_it(
    tokenizer: Any, text: str, strings: tuple[str, ...], reason: StopReason, expected: str
) -> None:
    stops = Stops(tokenizer, ids(tokenizer, "<|eot_id|>"))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert stops.text(tokens, strings, reason) == expected
    assert stops.found(tokens, strings) or reason is StopReason.LENGTH


def test_an_end_that_is_no_special_token_is_no_part_of_the_text(tokenizer: Any) -> None:
    tokens = tokenizer("one two", add_special_tokens=False)["input_ids"]
    assert Stops(tokenizer, tokens[-1:]).text(tokens, (), StopReason.STOP) == tokenizer.decode(tokens[:-1])


def test_ids_that_the_tokenizer_lacks_have_no_text(tokenizer: Any) -> None:
    tokens = tokenizer("one two", add_special_tokens=False)["input_ids"]
    assert Stops(tokenizer).text([*tokens, 9999], (), StopReason.LENGTH) == "one two"


def test_vllm_is_given_all_of_it(tokenizer: Any) -> None:
    stops = Stops(tokenizer, ids(tokenizer, "<|eot_id|>"))
    sampling = Sampling(max_tokens=4, stop=("<|eom_id|>", "x<|user|>"))
    request = GenerateRequest(request_id="a", prompt_ids=np.zeros(1, np.int32), sampling=sampling, seed=None)
    spec: Any = SimpleNamespace(returns_kept=False, device="cpu")
    params = _sampling_params(request, stops.of(sampling.stop), spec)
    assert set(params.stop_token_ids) == {tokenizer.eos_token_id, *ids(tokenizer, "<|eot_id|>", "<|eom_id|>")}
    assert (params.stop, params.skip_special_tokens, params.detokenize) == (["x<|user|>"], False, True)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("<|user|>", "<|user|>\ngo<|assistant|>hm<|user|><|observation|>\n4<|assistant|>"),
        ("<|observation|>", "<|user|>\ngo<|assistant|>hm<|observation|>\n4<|assistant|>"),
    ],
)
def test_a_header_that_the_policy_has_written_is_not_written_again(tokenizer: Any, end: str, expected: str) -> None:
    template, tokenizer.eos_token, *_ = TEMPLATES["GLM: the next header ends a turn"]
    tokenizer.chat_template = template
    conversation = Conversation(Renderer(tokenizer, stated_ends=ids(tokenizer, "<|user|>", "<|observation|>")))
    conversation.start([{"role": "user", "content": "go"}])
    sampled = np.asarray(tokenizer(f"hm{end}", add_special_tokens=False)["input_ids"])
    conversation.sampled(sampled, np.zeros(len(sampled)))
    prompt = conversation.observe([{"role": "observation", "content": "4"}])
    found = tokenizer.decode(prompt).replace("\nhm", "hm")
    assert found == expected


def test_texts_with_tokens_that_the_model_lacks_are_refused(tokenizer: Any) -> None:
    last = len(tokenizer) - 1
    render = Renderer(tokenizer, vocabulary=last)
    assert render.encode("plain").max() < last
    with pytest.raises(EnvError, match=rf"the token '<\|end\|>' \({last}\), and the model's embedding has {last} rows"):
        render.encode("one <|end|>")
    assert render.unknown(render.encode_pieces([("one <|end|>", True)])[0])
    assert issubclass(DataError, ValueError)


@pytest.mark.parametrize(("rows", "level"), [(512, "error"), (515, "note"), (600, None)])
def test_a_tokenizer_that_is_larger_than_the_embedding(tokenizer: Any, rows: int, level: str | None) -> None:
    tokenizer.eos_token = "<|endoftext|>"  # token 512, then <|eot_id|>, …
    config: Any = type("Config", (), {"model": ModelConfig(path="m")})()
    findings = list(check_tokens(config, Renderer(tokenizer, vocabulary=rows), None))
    assert [finding.level for finding in findings] == ([level] if level else [])
    assert all(f"no row in the embedding, which has {rows}" in finding.message for finding in findings)


def test_an_end_that_is_ordinary_text_is_told(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 40}))
    render = Renderer(tokenizer)
    config: Any = type("Config", (), {"model": ModelConfig(path="m")})()
    [finding] = check_tokens(config, render, end_tokens(render, tmp_path))
    assert f"{tokenizer.decode([40])!r} (40), with which config.json says that a response ends" in finding.message


OPENED = ReasoningTags(open="<think>", close="</think>", opened=True)


@pytest.mark.parametrize(
    ("text", "tags", "expected"),
    [
        ("<think>Q: 1</think>\n5. Q: 2", THINK, "<think>Q: 1</think>\n5. "),
        ("<think>Q: 1", THINK, "<think>Q: 1"),  # it is still going on
        ("Q: 1</think>5 Q: 2", OPENED, "Q: 1</think>5 "),
        ("Q: 1", OPENED, "Q: 1"),
        ("5. Q: 1", THINK, "5. "),  # a response without reasoning
        ("5. Q: 1", None, "5. "),
        ("<think>Q: 1</think>5", None, "<think>"),
    ],
)
def test_a_stop_string_in_reasoning_ends_nothing(text: str, tags: Any, expected: str, tokenizer: Any) -> None:
    assert before(text, ("Q:",), tags) == expected
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(tokens) == text
    stops = Stops(tokenizer)
    assert stops.found(tokens, ("Q:",), None, tags) == (expected != text)
    assert stops.text(tokens, ("Q:",), StopReason.STOP, None, tags) == expected
    assert stops.found([*tokens, tokenizer.eos_token_id], ("Q:",), None, tags)  # the end of the turn ends all
