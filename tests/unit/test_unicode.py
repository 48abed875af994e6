"""Half surrogate pairs, whatever a policy makes an environment say: no episode, no file and no page fails of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from tiny_model import make_tiny_tokenizer

from roll_like.agents.env_worker import EnvWorker, HostedEnvironment
from roll_like.agents.episode import EnvironmentSpec
from roll_like.content.unicode import DEEPEST, problem_of, whole_text, whole_texts
from roll_like.data.chat import Renderer
from roll_like.data.files import read_json_lines
from roll_like.metrics import files
from roll_like.rewards.cases import read_cases
from roll_like.tools.search import read_corpus
from roll_like.types import Failure

HALF = "\ud83d"


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("plain", "plain"),
        ("é \U0001f600", "é \U0001f600"),
        (HALF, "\ufffd"),
        (f"a{HALF}b", "a\ufffdb"),
        ("\ud83d" + "\ude00", "\U0001f600"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        (f"\ufeff{HALF}", "\ufeff\ufffd"),
    ],
)
def test_a_text_becomes_whole(text: str, whole: str) -> None:
    assert whole_text(text) == whole
    nested = whole_texts({text: [text, (text, 1)], "n": None})
    assert nested == {whole: [whole, (whole, 1)], "n": None}
    assert problem_of(nested) is None


def test_what_is_nested_deeply_is_cut() -> None:
    deep: Any = "x"
    for _ in range(10 * DEEPEST):
        deep = [deep]
    found = whole_texts(deep)
    for _ in range(DEEPEST):
        (found,) = found
    assert found == "…"


class Odd(gymnasium.Env[str, str]):
    """Shows what a policy may make an environment show."""

    system_prompt = f"system {HALF}"
    tools: Sequence[Any] = ({"type": "function", "function": {"name": "f", "description": HALF}},)
    observation_space = gymnasium.spaces.Text(9)
    action_space = gymnasium.spaces.Text(9)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return f"begin {HALF}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "raise":
            raise ValueError(HALF)
        call = {"name": "f", "arguments": {HALF: [HALF]}, "result": HALF, "error": False}
        message = {
            "role": "tool",
            "content": HALF,
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": HALF}}}],
        }
        return HALF, 0.0, False, False, {"state": f"s{HALF}", "tool_calls": [call], "messages": [message]}


def test_what_an_environment_shows_is_text_that_tokenizers_and_files_take(tmp_path: Path) -> None:
    gymnasium.register("Odd-v0", entry_point=Odd, disable_env_checker=True)
    try:
        worker, spec = EnvWorker(), EnvironmentSpec(name="odd", env_id="Odd-v0", kwargs={})
        hosted = HostedEnvironment(spec)
        started, stepped = hosted.reset(0), hosted.step("a")
        asyncio.run(worker.reset("one", spec, 0))
        crashed: Any = asyncio.run(worker.step("one", "raise"))
    finally:
        del gymnasium.registry["Odd-v0"]
    assert [message["content"] for message in started.messages] == ["system \ufffd", "begin \ufffd"]
    assert (started.state, stepped.state) == ("begin \ufffd", "s\ufffd")
    assert problem_of({"messages": stepped.messages, "calls": stepped.tool_calls}) is None
    assert stepped.tool_calls[0]["arguments"] == {"\ufffd": ["\ufffd"]}
    renderer = Renderer(make_tiny_tokenizer())
    assert len(renderer.encode(renderer.render(started.messages, started.tools)))
    failure = Failure(stage="environment", name="odd", error=crashed.error, origin="here")
    assert "ValueError: \ufffd" in failure.error


def test_the_renderer_writes_what_its_tokenizer_takes() -> None:
    renderer = Renderer(make_tiny_tokenizer())
    odd, whole = ([{"role": "user", "content": text}] for text in (HALF, "\ufffd"))
    assert renderer.encode(renderer.render(odd, ())).tolist() == renderer.encode(renderer.render(whole, ())).tolist()


def test_files_are_written(tmp_path: Path) -> None:
    files.replace_text(tmp_path / "page.html", f"a {HALF}")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "a \\ud83d"
    files.replace_text(tmp_path / "summary.json", files.encode_pretty({"text": HALF}))
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == {"text": HALF}
    files.append(tmp_path / "rows.jsonl", [{"text": HALF}])
    assert files.read_jsonl(tmp_path / "rows.jsonl") == [{"text": HALF}]


SEPARATORS = "a\u2028b\u0085c\u2029d"


def test_other_files_of_json_lines_are_read_as_rows_are(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    row = {"text": SEPARATORS, "gold": SEPARATORS, "prompt": "p"}
    path.write_text("\ufeff" + json.dumps(row, ensure_ascii=False) + "\r\n\n", encoding="utf-8")
    assert [record.fields for record in read_json_lines(path, "x")] == [row]
    assert [passage.text for passage in read_corpus(path)] == [SEPARATORS]
    assert [case.gold for case in read_cases(path)] == [(SEPARATORS,)]
    (tmp_path / "cases").write_text(json.dumps(row))
    assert len(read_cases(tmp_path / "cases")) == 1
