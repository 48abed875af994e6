"""vLLM's own tool parsers on the texts of `tests/data/tool_calls.jsonl`: the same calls, unless the table says not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tool_call_texts import rows
from vllm_tool_parsers import parser_of, read_by_vllm


def _comparable(value: Any) -> str:
    """1 is 1.0, and not True."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_comparable(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_comparable, value)) + "]"
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_vllm_reads_the_same_calls() -> None:
    compared = [row for row in rows() if parser_of(row["name"])]
    found = read_by_vllm(compared)
    differ = {
        row["name"]
        for row in compared
        if _comparable(found[row["name"]]) != _comparable([call[:2] for call in row["calls"] if isinstance(call, list)])
    }
    assert len(compared) > 450
    # vLLM reads a call in reasoning or in what was cut, none in what can be read, or not what the schema says
    assert sorted(differ) == sorted(row["name"] for row in compared if row.get("vllm") == "differs")
