"""Models of the hub are checked in the cache as local ones are, by the files that a download takes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_files import changed
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check import Report, check
from roll_like.config.model import ModelConfig
from roll_like.errors import ConfigError
from roll_like.models.load import TOKENIZER, cached_copy
from roll_like.models.of_run import download_models, models_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: What a repository has beside what is downloaded of it.
OTHERS = ("README.md", "original/consolidated.00.pth", "onnx/model.onnx")
Cache = Callable[..., Path]


@pytest.fixture
def cache(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """Put files of a model into the cache; `listed` are those that the hub says it has, None if it was not asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(repo: str, *, without: tuple[str, ...] = (), listed: bool = True, revision: str = "main") -> Path:
        folder = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
        snapshot = folder / "snapshots" / COMMIT
        shutil.copytree(tiny_model, snapshot)
        names = [*OTHERS, *(file.name for file in snapshot.iterdir())]
        for name in without:
            (snapshot / name).unlink()
        (folder / "refs").mkdir()
        (folder / "refs" / revision).write_text(COMMIT)
        if listed:
            entries = {name: TreeCacheEntry(size=1, blob_id="0" * 40) for name in names}
            write_tree_cache(str(folder), COMMIT, entries)
        return snapshot

    return put


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> Callable[..., RLVRConfig]:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "Write.", "instructions": [{"kind": "no_commas"}]}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 16)
    base = changed(model={"path": str(tiny_model)}, algorithm={"loss": "reinforce"}, evaluation=None)
    return lambda **changes: RLVRConfig.model_validate(changed(base, **changes))


def checked(config: RLVRConfig) -> Report:
    return check(config, lambda *_: iter(()))


def of(report: Report, key: str) -> list[str]:
    return [str(each) for each in report.findings if each.key == key]


@pytest.mark.parametrize("listed", [True, False])
def test_a_complete_download_is_found_though_the_hub_has_more(cache: Cache, listed: bool) -> None:
    snapshot = cache("org/model", listed=listed)
    assert cached_copy(ModelConfig(path="org/model")).path == snapshot
    assert cached_copy(ModelConfig(path="org/model")).complete


@pytest.mark.parametrize(
    ("without", "listed", "missing"),
    [
        (("model.safetensors",), True, ("model.safetensors",)),
        (("model.safetensors",), False, ("*.safetensors",)),
        (("config.json",), False, ("config.json",)),
        (("tokenizer.json",), True, ("tokenizer.json",)),
    ],
)
def test_a_part_of_a_download_is_told_apart(
    cache: Cache, without: tuple[str, ...], listed: bool, missing: tuple[str, ...]
) -> None:
    snapshot = cache("org/model", without=without, listed=listed)
    found = cached_copy(ModelConfig(path="org/model"))
    assert (found.path, found.missing, found.complete) == (snapshot, missing, False)


def test_a_tokenizer_is_complete_without_weights(cache: Cache) -> None:
    cache("org/tokens", without=("model.safetensors",))
    assert cached_copy(ModelConfig(path="org/tokens"), TOKENIZER).complete
    assert not cached_copy(ModelConfig(path="org/tokens")).complete


def test_a_revision_is_one_of_its_own(cache: Cache) -> None:
    cache("org/model", revision="v2")
    assert cached_copy(ModelConfig(path="org/model", revision="v2")).complete
    assert cached_copy(ModelConfig(path="org/model")).path is None


def test_a_cached_model_is_checked_as_a_local_one(cache: Cache, run: Callable[..., RLVRConfig]) -> None:
    snapshot = cache("org/model")
    report = checked(run(model={"path": "org/model"}))
    assert report.complete
    assert report.errors == []
    assert report.plan.memory
    assert [end.token_id for end in report.ends] == [2]
    (snapshot / "adapter_config.json").write_text("{}")
    assert "holds an adapter" in of(checked(run(model={"path": "org/model"})), "model.path")[0]


def test_config_json_alone_gives_a_plan_and_says_what_is_missing(
    cache: Cache, run: Callable[..., RLVRConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache("org/model", without=("model.safetensors",))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    report = checked(run(model={"path": "org/model"}))
    assert not report.complete
    [said] = of(report, "model.path")
    assert said.startswith("warning: model.path: org/model is not checked: the Hugging Face cache holds a part of it")
    assert "without model.safetensors" in said
    assert "downloaded when the run starts" in said
    assert report.plan.memory
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    [said] = of(checked(run(model={"path": "org/model"})), "model.path")
    assert "HF_HUB_OFFLINE is set" in said
    assert "hf download org/model --local-dir DIR" in said


MORE: dict[str, dict[str, Any]] = {
    "reference.path": {"reference": {"path": "org/other"}, "algorithm": {"kl": {"use": "loss"}}},
    "critic.path": {"critic": {"path": "org/other"}, "algorithm": {"advantage": "gae", "loss": "ppo"}},
    "judge.path": {
        "judge": {"path": "org/other"},
        "rewards": {"use": [{"type": "llm_judge", "judges": [{"url": "judge", "model": "judge"}]}]},
    },
    "rewards.use.0.path": {"rewards": {"use": [{"type": "reward_model", "path": "org/other"}]}},
}


@pytest.mark.parametrize("key", MORE)
def test_every_other_model_is_looked_for(cache: Cache, run: Callable[..., RLVRConfig], key: str) -> None:
    config = run(**MORE[key])
    assert [each.key for each in models_of(config)] == ["model.path", key]
    report = checked(config)
    assert [said for said in of(report, key) if "org/other is not checked" in said]
    assert report.complete == (key == "rewards.use.0.path")  # which loads its own
    cache("org/other")
    report = checked(config)
    assert not [said for said in of(report, key) if "not checked" in said]
    assert report.complete


def test_everything_is_downloaded_before_a_run_starts(run: Callable[..., RLVRConfig], tmp_path: Path) -> None:
    config = run(**MORE["judge.path"])
    with pytest.raises(ConfigError, match=r"judge\.path: org/other is not a local path.*hub cannot be reached"):
        download_models(config)
    download_models(run())
