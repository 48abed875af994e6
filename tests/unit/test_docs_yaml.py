"""The YAML and the rows of data that pages show are valid: those of tutorials as they are, others as part of a file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_model import make_tiny_tokenizer

from roll_like import make_env
from roll_like.builtin.pipelines.dpo.labelled_data import load_labelled
from roll_like.builtin.pipelines.reward_model.scored_answers import load_scored_answers
from roll_like.builtin.pipelines.reward_model.scored_pairs import load_scored_pairs
from roll_like.config.load import load_config
from roll_like.config.source import read_source
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.pairs import load_pairs
from roll_like.data.tasks import load_tasks
from roll_like.errors import RollLikeError
from roll_like.registry import PIPELINES, REWARDS
from roll_like.service.config import load_service_config
from roll_like.training import megatron

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
STARTS = sorted((ROOT / "configs").glob("*.yaml"))

pytestmark = pytest.mark.usefixtures("recording_pipeline")


def fences(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def names(page: Path) -> str:
    return str(page.relative_to(DOCS))


BLOCKS = [(page, block) for page in sorted(DOCS.rglob("*.md")) for block in fences(page, "yaml")]
FILES = [(page, block) for page, block in BLOCKS if re.match(r"# \w+\.yaml", block)]
TUTORIALS = [page for page in sorted((DOCS / "tutorials").glob("*.md")) if page.stem not in {"serving", "verifiers"}]
#: Blocks of something else: the kwargs of an environment, manifests of Kubernetes, a line of comment.
NOT_CONFIGURATIONS = {
    "title: Capitals",
    "path: tasks.jsonl",
    "tools:",
    "apiVersion:",
    "- type: math",
    "# yaml-language-server",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the repository's root, as far as configurations refer to it; every backend is installed."""
    monkeypatch.setattr(megatron, "find_spec", lambda _: object())
    monkeypatch.setattr(megatron, "version", lambda _: ".".join(map(str, megatron.NEEDED)))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "block"), FILES, ids=[names(page) for page, _ in FILES])
def test_a_file_that_a_page_shows_is_valid(page: Path, block: str, folder: Path) -> None:
    (name,) = re.findall(r"^# (\w+\.yaml), in the repository's root$", block, flags=re.M)
    (folder / name).write_text(block, encoding="utf-8")
    load: Callable[[Path], Any] = load_service_config if page.stem == "service" else load_config
    config = load(folder / name)
    assert config.name == name.removesuffix(".yaml")
    text = page.read_text(encoding="utf-8")
    assert f"--config {name}" in text or page.stem == "dpo"
    assert f"runs/{config.name}/model" in text or page.stem in {"dpo", "reward_model", "quickstart", "service"}


@cache
def start_values(start: Path) -> Mapping[str, Any]:
    return read_source(start).values


PARTS = [
    (page, block)
    for page, block in BLOCKS
    if (page, block) not in FILES and not block.startswith(tuple(NOT_CONFIGURATIONS))
]


@pytest.mark.parametrize(("page", "block"), PARTS, ids=[names(page) for page, _ in PARTS])
def test_a_part_of_a_file_that_a_page_shows_is_valid(page: Path, block: str, folder: Path) -> None:
    """With what it leaves out taken from one of the files in configs/, or from one for eight GPUs."""
    values = yaml.safe_load(block)
    assert isinstance(values, Mapping)
    reasons = []
    for start in STARTS:
        given = start_values(start)
        if values.get("pipeline", given["pipeline"]) != given["pipeline"]:
            continue
        fields = PIPELINES.get(given["pipeline"]).model_fields
        if unknown := set(values) - {field.alias or name for name, field in fields.items()} - {"extends"}:
            reasons.append(f"{start.name}: {', '.join(unknown)} is no key")
            continue
        for further in ({}, EIGHT_GPUS):
            file = folder / "part.yaml"
            file.write_text(yaml.safe_dump(merged(merged(given, {**ROOM, **further}), values)), encoding="utf-8")
            try:
                load_config(file)
            except RollLikeError as error:
                reasons.append(f"{start.name}: {error}")
            else:
                return
    pytest.fail("\n".join(reasons))


ROOM = {"training": {"max_tokens_per_micro_batch": 65536}}
EIGHT_GPUS = {
    "resources": {"device": "cuda", "devices_per_node": 8, "device_mapping": {"training": "0", "inference": "0"}}
}


def merged(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Lay values over what is given: key by key, but a section that has a `type` or names of one's own replaces."""
    sections = {key: value for key, value in values.items() if isinstance(value, Mapping) and "type" not in value}
    parts = {key: value for key, value in sections.items() if key not in {"teachers", "domains"}}
    return {**given, **values, **{key: merged(given.get(key) or {}, value) for key, value in parts.items()}}


def test_every_pipeline_has_a_tutorial() -> None:
    shown = set()
    for page in TUTORIALS:
        for block in fences(page, "yaml"):
            extended = yaml.safe_load(block)["extends"]
            shown.add(load_config(ROOT / extended).pipeline)
    assert shown == set(PIPELINES.names())


LOADERS: dict[str, Callable[[Any, Renderer], Any]] = {
    "sft": load_conversations,
    "distill": load_conversations,
    "pairs": load_pairs,
    "labels": load_labelled,
    "reward_model": load_scored_pairs,
    "scores": partial(load_scored_answers, loss="bce"),
}


RUNS = [(page, block) for page, block in FILES if page.stem != "service"]


@pytest.mark.parametrize(("page", "block"), RUNS, ids=[names(page) for page, _ in RUNS])
def test_the_rows_that_a_tutorial_shows_are_read(page: Path, block: str, folder: Path) -> None:
    """By the loader and with the settings of the YAML below them."""
    before = page.read_text(encoding="utf-8").partition(block)[0]
    rows = re.findall(r"^```json\n(.*?)^```$", before, flags=re.M | re.S)
    (folder / "file.yaml").write_text(block, encoding="utf-8")
    config: Any = load_config(folder / "file.yaml")
    render = Renderer(make_tiny_tokenizer())
    if config.pipeline == "agentic":
        (folder / "corpus.jsonl").write_text(rows[-1])
        (folder / "tasks.jsonl").write_text(rows[0])
        kwargs = config.environments[0].kwargs
        tools = [{**tool, "corpus": str(folder / "corpus.jsonl")} for tool in kwargs["tools"]]
        env = make_env(config.environments[0].id, **{**kwargs, "path": str(folder / "tasks.jsonl"), "tools": tools})
        observation, _ = env.reset(seed=0)
        assert "bridge" in str(observation)
        env.close()
        return
    path = Path(config.data.sources[0].path)
    if path.parts[0] == "configs":  # of the file that is extended
        return
    (source,) = config.data.sources
    path.write_text(rows[-1])
    count = len(rows[-1].splitlines())
    assert all(json.loads(row) for row in rows[-1].splitlines())
    loader = LOADERS.get(getattr(config.data, "type", None) or config.pipeline)
    if loader is None:
        tasks = load_tasks((source,), render, limit := config.data.max_prompt_tokens)
        assert len(tasks) == count, limit
        for setting in config.rewards.use if config.rewards else ():
            tasks.sources[0].require(REWARDS.get(setting.type)(setting).required_fields, setting.type)
        return
    assert sum(report.kept for report in loader(config.data, render).report) == count
