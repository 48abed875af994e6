"""Calls as the models of many families write them: `tests/data/tool_calls.jsonl`, whose calls were written by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tool_call_texts import TOOLS, rows

from roll_like.tools import MalformedCall, parse_tool_calls

ROWS = rows()


@pytest.mark.parametrize("own_style", [False, True], ids=["auto", "own style"])
@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_calls_of_many_families_are_read(row: dict[str, Any], own_style: bool) -> None:
    rest, calls = parse_tool_calls(row["text"], row["style"] if own_style else "auto", TOOLS)
    assert len(calls) == len(row["calls"]), calls
    for number, (call, wanted) in enumerate(zip(calls, row["calls"], strict=True)):
        if isinstance(wanted, dict):
            assert isinstance(call, MalformedCall)
            assert wanted["problem"] in call.problem
            continue
        name, arguments, call_id = [*wanted, f"call_{number}"][:3]
        assert not isinstance(call, MalformedCall), call.problem
        # as JSON: 1 is not True, and 5 is not 5.0
        assert (call.name, json.dumps(dict(call.arguments), sort_keys=True), call.call_id) == (
            name, json.dumps(arguments, sort_keys=True), call_id,
        )  # fmt: skip
    if "rest" in row:
        assert rest == row["rest"]
    if not row["calls"]:
        assert rest == row["text"].strip()
