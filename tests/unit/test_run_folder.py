"""Names of runs, resumption by name, and one process per folder."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from config_files import MINIMAL, changed

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.config.load import dump_config
from roll_like.errors import CheckpointError, ConfigError
from roll_like.models.precision import settled
from roll_like.run import launch
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
        with pytest.raises(CheckpointError, match=written):
            launch.refuse_other_checkpoint(as_begun(run, named), named)


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
