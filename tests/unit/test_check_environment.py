"""Variables of the environment that keep a run from working: each is named, or of no consequence."""

from __future__ import annotations

import errno
import locale
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from roll_like import cli
from roll_like.check.machine import check_environment
from roll_like.cluster.session import LONGEST_TEMPORARY, use_short_temporary_paths
from roll_like.errors import ConfigError
from roll_like.run.checkpoint import CheckpointStore
from roll_like.run.folder import locked


@pytest.fixture(autouse=True)
def usable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_usable_environment_has_no_findings() -> None:
    assert list(check_environment()) == []


def test_an_address_of_ray_that_is_not_heeded_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    (found,) = check_environment()
    assert (found.level, found.key) == ("warning", "resources.address")
    assert "RAY_ADDRESS is 10.0.0.1:6379" in found.message


@pytest.mark.parametrize(("size", "count"), [("8", 1), ("1", 0), ("", 0)])
def test_one_of_several_processes_of_a_launcher(size: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    assert not list(check_environment())  # as a job's template has it in a pod
    monkeypatch.setenv("LOCAL_RANK", "0")
    found = list(check_environment())
    assert [(one.level, one.key) for one in found] == [("error", "WORLD_SIZE")] * count
    assert all("as one of 8" in one.message for one in found)


def test_a_python_without_docstrings() -> None:
    program = "from roll_like.check.machine import check_environment; print(*(one.key for one in check_environment()))"
    found = subprocess.run([sys.executable, "-OO", "-c", program], capture_output=True, check=True, text=True)
    assert found.stdout == "PYTHONOPTIMIZE\n"


def test_a_home_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    (found,) = check_environment()
    assert (found.level, found.key) == ("error", "HOME")
    assert f"found {tmp_path / 'nowhere'}, which cannot be written to" in found.message


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a number that /etc/passwd does not have
    (found,) = check_environment()
    assert found.message.startswith("not set, and this user has no home folder")


def test_a_locale_of_another_encoding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locale, "getpreferredencoding", lambda _: "ISO-8859-1")
    (found,) = check_environment()
    assert (found.level, found.key) == ("error", "PYTHONUTF8")
    assert "ISO-8859-1" in found.message


def test_the_command_line_starts_anew_in_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    monkeypatch.setattr("os.execv", lambda _, command: started.append(command))
    cli._use_utf_8()
    assert not started
    monkeypatch.setattr(locale, "getpreferredencoding", lambda _: "ISO-8859-1")
    cli._use_utf_8()
    assert started == [[sys.executable, *sys.orig_argv[1:]]]
    assert os.environ["PYTHONUTF8"] == "1"
    cli._use_utf_8()  # where that does not help, the check says so
    assert len(started) == 1


def test_a_stream_of_another_encoding_loses_what_it_has_not() -> None:
    program = "import sys; from roll_like.cli import _use_utf_8; _use_utf_8(); print('\\u2026')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert found.stdout == b"?\n"


@pytest.mark.parametrize("length", [LONGEST_TEMPORARY, LONGEST_TEMPORARY + 1])
def test_a_long_folder_for_temporary_files_is_not_used(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/" + "x" * (length - 1))
    monkeypatch.setattr(tempfile, "tempdir", "as it was")
    use_short_temporary_paths()
    if length > LONGEST_TEMPORARY:
        assert (os.environ["TMPDIR"], tempfile.gettempdir()) == ("/tmp", "/tmp")
    else:
        assert tempfile.tempdir == "as it was"


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ConfigError, match="cannot be locked: No locks available") as caught, locked(tmp_path):
        pass
    assert "set output_dir" in str(caught.value.fix)


def test_a_file_system_without_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def symlink_to(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    CheckpointStore(tmp_path / "checkpoints", keep=1, keep_best=True, warn=print).require_links()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Path, "symlink_to", symlink_to)
    CheckpointStore(tmp_path / "checkpoints", keep=1, keep_best=False, warn=print).require_links()
    with pytest.raises(ConfigError, match="takes no symbolic link") as caught:
        CheckpointStore(tmp_path / "checkpoints", keep=1, keep_best=True, warn=print).require_links()
    assert "checkpoint.keep_best: false" in str(caught.value.fix)
