"""What docs/tools.md says: its code runs, its table of tools is complete, its message is a real one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from chat_templates import renderer

from roll_like.agents.conversation import Conversation
from roll_like.config.base import ConfigModel
from roll_like.tools import CallStyle, read_tool_configs
from roll_like.tools.config import ToolConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.M | re.S)


@pytest.mark.parametrize("block", blocks("python"))
def test_the_pages_code_runs(block: str) -> None:
    # annotations of a function have to be found in a module of its own
    exec(compile(block, "docs/tools.md", "exec", dont_inherit=True), {"__name__": "docs_tools"})


def test_the_pages_tools_are_read() -> None:
    for block in blocks("yaml"):
        tools: Any = yaml.safe_load(block)["tools"]
        assert len(read_tool_configs(tools)) == len(tools)


def test_every_tool_and_setting_is_listed() -> None:
    table = PAGE.partition("| `type` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", table, flags=re.M)
    listed = {kind: set(re.findall(r"`(\w+)`", settings)) for kind, settings in rows}
    models: list[type[ConfigModel]] = [get_args(option)[0] for option in get_args(get_args(ToolConfig)[0])]
    assert listed == {model.model_fields["type"].default: set(model.model_fields) - {"type"} for model in models}


def test_every_call_style_is_listed() -> None:
    table = PAGE.partition("| style | written as |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.M) == [*get_args(CallStyle)[1:], "auto"]


def test_the_quoted_cut_is_a_real_one() -> None:
    conversation = Conversation(renderer("Qwen3"))
    conversation.start([{"role": "user", "content": "Which way?"}])
    ids = conversation.renderer.encode("<think>\nI go left.\n</think>\n\nleft<|im_end|>")
    conversation.sampled(ids, [0.0] * len(ids))
    conversation.observe([{"role": "user", "content": "You hit a wall."}])
    (cut,) = conversation.segments()
    assert f"    {cut.cut}\n" in PAGE
