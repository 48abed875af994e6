"""`roll-like push` against a hub on this machine, with the hub's own client."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fake_hub import TOKEN, FakeHub, Repository, fake_hub
from run_folders import make_run

from roll_like import cli
from roll_like.models.card import ModelCard, render_model_card


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as started:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", started.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield started


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path / "runs" / "sums")
    shutil.copytree(tiny_model, folder / "model")
    card = ModelCard(name="sums", base_model="org/base", base_id="org/base", pipeline="rlvr", steps=4)
    (folder / "model" / "README.md").write_text(render_model_card(card))
    return folder


def test_the_model_is_in_a_private_repository_of_the_account(
    hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["push", "sums"]) == 0
    assert f"{run}/model is at {hub.url}/ada/sums" in capsys.readouterr().out
    ((name, made),) = hub.repositories.items()
    assert (name, made.private) == ("ada/sums", True)
    assert made.files == {
        str(file.relative_to(run / "model")): file.read_bytes() for file in (run / "model").rglob("*") if file.is_file()
    }
    assert "README.md" in made.files


def test_a_public_repository_of_an_organisation_and_one_that_exists(hub: FakeHub, run: Path) -> None:
    assert cli.main(["push", "sums", "org/adder", "--public"]) == 0
    assert not hub.repositories["org/adder"].private
    hub.repositories["org/old"] = Repository(private=True, files={"kept.txt": b"kept"})
    assert cli.main(["push", str(run), "org/old", "--public"]) == 0
    old = hub.repositories["org/old"]
    assert old.private  # as it was
    assert old.files["kept.txt"] == b"kept"
    assert "config.json" in old.files


def test_a_model_that_scores_can_be_pushed_too(hub: FakeHub, run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text()) | {"pipeline": "reward_model"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert cli.main(["push", "sums"]) == 0
    assert "ada/sums" in hub.repositories


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    assert cli.main(["push", *(words or ("sums",))]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_what_stands_in_the_way_is_said(
    hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no run in runs/suns" in refused(capsys, 2, "suns")
    error = refused(capsys, 2, "sums", "a/b/c")
    assert "push a/b/c:" in error
    assert "write OWNER/NAME" in error
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    error = refused(capsys, 2)
    assert "the hub refuses the token (Client error '401" in error
    assert "hf auth login" in error
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "push sums: there is no token for the hub" in refused(capsys, 2)
    monkeypatch.undo()
    assert hub.repositories == {}


def test_a_hub_that_fails_or_is_not_there(
    hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fail_with = 500
    assert "the hub answers 500" in refused(capsys, 1)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "the hub at http://127.0.0.1:9 cannot be reached" in refused(capsys, 1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "unset HF_HUB_OFFLINE" in refused(capsys, 2)


def test_a_card_that_the_hub_would_refuse_is_not_sent(
    hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = run / "model" / "README.md"
    card.write_text("---\ntags: [a\n---\n")
    assert f"the header of {card} is not valid" in refused(capsys, 1)
    card.write_text("---\nmodel-index: 5\n---\n")
    assert f"the header of {card} is not valid" in refused(capsys, 1)
    card.unlink()
    assert "has no model card (README.md)" in refused(capsys, 1)
    shutil.rmtree(run / "model")
    assert "push sums: there is no model in" in refused(capsys, 2)
    assert hub.repositories == {}
