"""The tables of docs/backends.md are what the plugins' own rules and capabilities say."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from roll_like.registry import INFERENCE_ENGINES, TRAINING_BACKENDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("make_backend_tables")


def cells(table: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_the_page_is_up_to_date(script: Any) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.filled(page) == page
    with pytest.raises(SystemExit, match="no place for the table 'training'"):
        script.filled("# Backends")


def test_the_tables_say_what_rules_and_capabilities_say(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    training = cells(script.training_table())
    assert training["training.backend"] == ["`deepspeed`", "`fsdp2`", "`megatron`"]
    assert training["zero_stage"] == ["0, 1, 2, 3", "3", "0, 1"]
    assert training["model.dtype"] == ["`float32`, `bfloat16`, `float16`", *["`float32`, `bfloat16`"] * 2]
    assert training["`offload` during a step"[1:]][1] == "none"
    # 7.62e9 parameters: weights in bfloat16, gradients in float32 and 12 bytes of optimizer, over 8 ranks
    kept = 7.6156e9 * (2 + 4 + 12) / 8 / 2**30
    assert float(training["zero_stage: 3"][0].split(" + ")[0]) == pytest.approx(kept, abs=0.05)
    # FSDP2: master weights, gradients and two moments in float32
    assert float(training["zero_stage: 3"][1].split(" + ")[0]) == pytest.approx(7.6156e9 * 16 / 8 / 2**30, abs=0.05)
    assert script.SIZES.parameters == 7_615_616_512  # as transformers counts Qwen2.5-7B

    inference = cells(script.inference_table())
    assert inference["inference.type"] == ["`hf`", "`sglang`", "`vllm`"]
    assert inference["resources.device"] == ["`cpu`, `cuda`", "`cuda`", "`cpu`, `cuda`"]
    assert inference["tensor parallelism"] == ["no", "yes", "yes"]
    assert set(INFERENCE_ENGINES.names()) == {"hf", "sglang", "vllm"}

    backend = TRAINING_BACKENDS.get("fsdp2")
    monkeypatch.setattr(backend, "violations", staticmethod(lambda settings: iter(())))
    assert cells(script.training_table())["zero_stage"] == ["0, 1, 2, 3", "0, 1, 2, 3", "0, 1"]  # it follows the rule
