"""Names of runs, resumption by name, and one process per folder."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from config_files import MINIMAL, changed

from roll_like import cli
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.config.load import dump_config
from roll_like.errors import CheckpointError, ConfigError
from roll_like.models.precision import settled
from roll_like.run import checkpoint, launch
from roll_like.run.checkpoint import save_checkpoint
from roll_like.run.folder import announcement, as_begun, locked, resolve_run_folder
from roll_like.run.signals import StopRequested, StopSignal


def config(output_dir: Path, name: str = "demo") -> SimpleNamespace:
    return SimpleNamespace(runs_dir=output_dir, name=name)


def begun(directory: Path) -> Path:
    (directory / "config.yaml").write_text("")
    return directory


def test_a_new_run_never_writes_into_an_old_ones_folder(tmp_path: Path) -> None:
    for expected in ("demo", "demo-2", "demo-3"):
        directory, resumed = resolve_run_folder(config(tmp_path), None)
        assert (directory.name, resumed) == (expected, False)
        begun(directory)
    assert resolve_run_folder(config(tmp_path, "demo-x"), None)[0].name == "demo-x"


def test_resume_takes_the_latest_or_the_one_that_is_named(tmp_path: Path) -> None:
    directory, resumed = resolve_run_folder(config(tmp_path), "")
    assert not resumed  # there is nothing to resume: the run starts
    begun(directory)
    begun(resolve_run_folder(config(tmp_path), None)[0])
    assert resolve_run_folder(config(tmp_path), "") == (tmp_path / "demo-2", True)
    assert resolve_run_folder(config(tmp_path), "demo") == (tmp_path / "demo", True)
    assert resolve_run_folder(config(tmp_path), str(tmp_path / "demo")) == (tmp_path / "demo", True)
    with pytest.raises(ConfigError, match="there is no run in") as caught:
        resolve_run_folder(config(tmp_path), "demmo")
    assert "demo, demo-2" in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "resume", "kept"),
    [("auto", "", "float32"), ("auto", None, "auto"), ("bfloat16", "", "bfloat16")],
)
def test_a_resumed_run_keeps_its_precision(stated: str, resume: str | None, kept: str, tmp_path: Path) -> None:
    run = RLVRConfig.model_validate(changed(MINIMAL, model__dtype=stated, output_dir=str(tmp_path), name="demo"))
    assert as_begun(run, "") == run  # there is no run yet
    directory, _ = resolve_run_folder(run, None)
    (directory / "config.yaml").write_text("model: {dtype: float32}\n")  # of a version without dates
    assert as_begun(run, resume).model.dtype == kept


@pytest.mark.parametrize(
    ("stated", "resume", "kept"),
    [(None, "", date(2026, 1, 2)), (None, None, None), (date(2025, 5, 5), "", date(2025, 5, 5))],
)
def test_a_resumed_run_keeps_its_date(
    stated: date | None, resume: str | None, kept: date | None, tmp_path: Path
) -> None:
    run = RLVRConfig.model_validate(changed(MINIMAL, model__date=stated, output_dir=str(tmp_path), name="demo"))
    directory, _ = resolve_run_folder(run, None)
    begun = settled(run.model_copy(update={"model": run.model.model_copy(update={"date": date(2026, 1, 2)})}))
    (directory / "config.yaml").write_text(dump_config(begun))
    assert as_begun(run, resume).model.date == kept


@pytest.mark.parametrize("section", ["training", "critic"])
def test_checkpoints_of_another_backend_are_refused_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    values = {"algorithm__advantage": "gae", "critic": {"backend": "deepspeed"}} if section == "critic" else {}
    run = RLVRConfig.model_validate(changed(MINIMAL, output_dir=str(tmp_path), name="demo", **values))
    directory, _ = resolve_run_folder(run, None)
    dated = run.model_copy(update={"model": run.model.model_copy(update={"date": date(2026, 1, 2)})})
    text = dump_config(settled(dated))
    (directory / "config.yaml").write_text(text)
    other = yaml.safe_dump(changed(yaml.safe_load(text), **{f"{section}__backend": "fsdp2"}))

    def save(path: Path) -> None:
        (path / "config.yaml").write_text(other)

    (directory / "checkpoints").mkdir()

    def rescue() -> None:
        """What a killed run left in memory comes to disk only now."""
        save_checkpoint(directory / "checkpoints" / "step_000020", 20, save, {}, score=None, healthy=True)

    monkeypatch.setattr(launch, "clear_up_orphans", rescue)
    written = rf"step_000020 was written with {section}\.backend: fsdp2, and deepspeed cannot"
    with pytest.raises(CheckpointError, match=written) as caught, launch.running(as_begun(run, ""), ""):
        raise AssertionError("it was started")
    assert f"set {section}.backend: fsdp2" in str(caught.value)
    assert "checkpoints/step_000020 -o MODEL" in str(caught.value)
    assert (directory / "config.yaml").read_text() == text  # the next try is refused, too
    for named in ("", "auto", "demo"):  # as `--check --resume` says it
        (found,) = launch.check_resumption(as_begun(run, named), named)
        assert (found.level, found.key) == ("error", "--resume")
        assert re.search(written, found.message)
        assert f"set {section}.backend: fsdp2" in found.message


@pytest.mark.parametrize(
    ("schedule", "steps", "expected"),
    [
        (
            "cosine",
            40,
            "the run had 30 steps and now has 40: with training.optimizer.schedule: cosine its learning rates",
        ),
        ("cosine", 30, None),
        ("constant", 40, None),
    ],
)
def test_another_number_of_steps_changes_rates_and_says_so(
    schedule: str, steps: int, expected: str | None, tmp_path: Path
) -> None:
    optimizer = {"lr": 1e-6, "schedule": schedule}
    before = RLVRConfig.model_validate(changed(MINIMAL, steps=30, training__optimizer=optimizer))
    (tmp_path / "config.yaml").write_text(dump_config(before))
    now = RLVRConfig.model_validate(changed(MINIMAL, steps=steps, training__optimizer=optimizer))
    said = launch.other_rates(now, checkpoint.Checkpoint(path=tmp_path, step=20, state={}))
    assert [text[: len(expected or "")] for text in said] == ([expected] if expected else [])


@pytest.fixture
def resumed(tmp_path: Path) -> tuple[RLVRConfig, Path]:
    """A run with checkpoints of steps 10 and 20, and their folder."""
    run = settled(RLVRConfig.model_validate(changed(MINIMAL, output_dir=str(tmp_path), name="demo")))
    directory, _ = resolve_run_folder(run, None)
    (directory / "config.yaml").write_text(dump_config(run))

    def save(path: Path) -> None:
        (path / "config.yaml").write_text(dump_config(run))
        (path / "rank_0.pt").write_bytes(b"weights")

    (directory / "checkpoints").mkdir()
    for step in (10, 20):
        save_checkpoint(directory / "checkpoints" / f"step_{step:06}", step, save, {}, score=None, healthy=True)
    return run, directory / "checkpoints"


def test_a_check_of_a_resumption_reads_no_weights(
    resumed: tuple[RLVRConfig, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, checkpoints = resumed
    read: list[str] = []
    checksum = checkpoint._checksum
    monkeypatch.setattr(checkpoint, "_checksum", lambda path: read.append(path.name) or checksum(path))
    assert launch.check_resumption(run, "") == []
    assert sorted(read) == ["config.yaml", "state.json"]
    (checkpoints / "step_000020" / "rank_0.pt").write_bytes(b"weight")  # the disk was full
    (found,) = launch.check_resumption(run, "")
    assert (found.level, found.key) == ("warning", "--resume")
    assert found.message.endswith("rank_0.pt has 6 bytes; 7 were written; the checkpoint before it is used")
    (checkpoints / "step_000010" / "config.yaml").write_text("pipeline: sft")
    levels = [(found.level, found.message) for found in launch.check_resumption(run, "")]
    assert [level for level, _ in levels] == ["error", "warning", "warning"]
    assert levels[0][1].startswith(f"every checkpoint in {checkpoints} is damaged; restore one")
    (checkpoints.parent / "again.yaml").write_text(dump_config(run))
    assert cli.main(["run", "--config", str(checkpoints.parent / "again.yaml"), "--check", "--resume"]) == 1
    told = capsys.readouterr().err
    assert f"error: --resume: every checkpoint in {checkpoints} is damaged; restore one" in told
    assert "rank_0.pt has 6 bytes; 7 were written; the checkpoint before it is used" in told


@pytest.mark.parametrize("moment", ["manifest", "configuration"])
def test_a_check_of_a_resumption_may_see_a_checkpoint_go(
    moment: str, resumed: tuple[RLVRConfig, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that goes on writes another one and removes the one that is looked at."""
    run, checkpoints = resumed
    looked_at: list[str] = []

    def going(name: str) -> None:
        looked_at.append(name)
        if len(looked_at) == 1:
            (checkpoints / "step_000010").rename(checkpoints / "step_000030")
            text = (checkpoints / "step_000030" / "manifest.json").read_text()
            (checkpoints / "step_000030" / "manifest.json").write_text(text.replace('"step": 10', '"step": 30'))
            shutil.rmtree(checkpoints / "step_000020")

    manifest, refuse = checkpoint._manifest, launch.refuse_other_run

    def read_manifest(path: Path) -> Any:
        if moment == "manifest":
            going(path.name)
        return manifest(path)

    def refuse_other_run(config: RLVRConfig, found: checkpoint.Checkpoint) -> None:
        if moment == "configuration":
            going(found.path.name)
        refuse(config, found)

    monkeypatch.setattr(checkpoint, "_manifest", read_manifest)
    monkeypatch.setattr(launch, "refuse_other_run", refuse_other_run)
    assert launch.check_resumption(run, "") == []
    assert looked_at == ["step_000020", "step_000030"]


def test_where_a_run_will_be_is_said_before_anything_is_made(tmp_path: Path) -> None:
    demo, second = tmp_path / "demo", tmp_path / "demo-2"
    follow = "; follow it with: roll-like watch"
    assert announcement(config(tmp_path), None) == f"run {demo}{follow} {demo}"
    assert not demo.exists()
    begun(resolve_run_folder(config(tmp_path), None)[0])
    assert announcement(config(tmp_path), None) == f"run {second} ({demo} exists){follow} {second}"
    assert announcement(config(tmp_path), "") == f"continuing {demo}{follow} {demo}"


def test_one_process_per_folder(tmp_path: Path) -> None:
    with locked(tmp_path):
        code = (
            "from roll_like.run.folder import locked\nfrom pathlib import Path\n"
            f"with locked(Path({str(tmp_path)!r})): pass"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "another process is running in" in result.stderr
        with pytest.raises(CheckpointError, match="another process is running"), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


def exiting_on_sigterm() -> None:
    """Handle SIGTERM as `ray.init` does."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))


def test_sigterm_during_a_library_that_exits_on_it_is_a_request_to_stop() -> None:
    with StopSignal() as stop, pytest.raises(StopRequested, match="SIGTERM"), stop.lent():  # noqa: PT012
        exiting_on_sigterm()
        signal.raise_signal(signal.SIGTERM)
    with StopSignal() as stop:
        with stop.lent():
            exiting_on_sigterm()
        signal.raise_signal(signal.SIGTERM)
        assert (stop.requested, stop.name) == (True, "SIGTERM")


def test_sigterm_waits_until_nothing_is_lost() -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        with pytest.raises(StopRequested), stop.interruptible():
            pass
    with StopSignal() as stop, pytest.raises(StopRequested), stop.interruptible():
        signal.raise_signal(signal.SIGTERM)
