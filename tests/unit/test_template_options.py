"""`model.template_options` reach the chat template wherever messages become tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from config_files import CHECKS, MINIMAL, MINIMAL_AGENTIC, changed
from test_config_distill import ON_POLICY
from tiny_model import CHAT_TEMPLATE

from roll_like.builtin.pipelines.agentic.environments import EnvironmentWorkers
from roll_like.builtin.pipelines.distill.pipeline import DistillPipeline
from roll_like.builtin.pipelines.dpo.pipeline import DPOPipeline
from roll_like.builtin.pipelines.reward_model.pipeline import RewardModelPipeline
from roll_like.builtin.pipelines.sft.pipeline import SFTPipeline
from roll_like.models.load import load_renderer
from roll_like.policy_gradient.reward_workers import tasks_of
from roll_like.registry import PIPELINES

TRAINER = {"device": "cpu", "devices_per_node": 1, "device_mapping": {"training": "0"}}
CONVERSATIONS = {"steps": 1, "data": {"sources": [{"path": "rows.jsonl"}], "samples_per_step": 1}, "resources": TRAINER}
PAIRS = {
    "steps": 1,
    "data": {"sources": [{"path": "rows.jsonl"}], "pairs_per_step": 1},
    "evaluation": {"sources": [{"path": "rows.jsonl", "name": "evaluated"}]},
    "resources": TRAINER,
}
PROMPTS = changed(MINIMAL, data__sources=[{"path": "rows.jsonl"}], rewards__use=[{"type": "repetition"}])


def sequences(samples: Iterable[Any]) -> list[Any]:
    return [sequence.token_ids for sample in samples for sequence in sample.sequences]


#: What each pipeline reads, and how its first sequence of tokens is had.
READERS: dict[str, tuple[dict[str, Any], Callable[[Any], list[Any]]]] = {
    "rlvr": (PROMPTS, lambda config: [task.prompt_ids for task in tasks_of(config)]),
    "on_policy_distill": (
        changed(ON_POLICY, data__sources=[{"path": "rows.jsonl"}]),
        lambda config: [task.prompt_ids for task in tasks_of(config)],
    ),
    "sft": (CONVERSATIONS, lambda config: sequences(SFTPipeline.trained_on(config))),
    "distill": (
        CONVERSATIONS | {"teachers": {"one": {"path": "t"}}},
        lambda config: sequences(DistillPipeline.trained_on(config)),
    ),
    "dpo": (
        PAIRS | {"reference": {}},
        lambda config: sequences([*DPOPipeline.trained_on(config), *(DPOPipeline.evaluated_on(config) or ())]),
    ),
    "reward_model": (PAIRS, lambda config: sequences(RewardModelPipeline.trained_on(config))),
}


@pytest.fixture
def marked(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A `model` section whose template begins with its option `mark`, in a folder with one row of every kind."""
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "Say x", "completion": "x", "chosen": "x", "rejected": "y"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "marked.jinja").write_text("{{ mark | default('') }}" + CHAT_TEMPLATE)
    return {
        "path": str(tiny_model),
        "chat_template": str(tmp_path / "marked.jinja"),
        "template_options": {"mark": "zebra zebra"},
    }


@pytest.mark.parametrize("pipeline", READERS)
def test_what_is_trained_on_and_evaluated(pipeline: str, marked: dict[str, Any]) -> None:
    values, read = READERS[pipeline]
    config = PIPELINES.get(pipeline).model_validate(values | {"pipeline": pipeline, "model": marked})
    tokens = read(config)
    assert tokens
    decode = load_renderer(config.model).decode
    assert all(decode(each).startswith("zebra zebra") for each in tokens)


def test_conversations_with_environments(marked: dict[str, Any]) -> None:
    config = PIPELINES.get("agentic").model_validate(changed(MINIMAL_AGENTIC) | {"model": marked})
    resources: Any = SimpleNamespace(report=None)
    environments: Any = EnvironmentWorkers(config, resources, None)  # type: ignore[arg-type]
    environments._workers = ()
    environments.connect(SimpleNamespace(router=lambda *sections: None), None)
    assert environments._manager.renderer.render([{"role": "user", "content": "Hi"}], ()).startswith("zebra zebra")


def test_a_check_counts_the_tokens_of_the_options(marked: dict[str, Any]) -> None:
    def longest(**options: Any) -> int:
        model = {**marked, "template_options": options}
        config = PIPELINES.get("rlvr").model_validate(PROMPTS | {"model": model})
        (source,) = CHECKS["rlvr"](config).sources
        length: int = source.longest  # type: ignore[union-attr]
        return length

    assert longest(mark="zebra zebra") > longest()
