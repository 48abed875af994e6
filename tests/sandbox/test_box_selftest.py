"""The self-test passes where a box isolates, fails where it does not, and nothing is used without it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from roll_like.errors import ConfigError
from roll_like.sandbox import SandboxUnavailable, backends, bwrap, rootfs, self_test
from roll_like.sandbox.__main__ import main
from roll_like.sandbox.backends import examine
from roll_like.sandbox.box import BoxReport, Ended, Program
from roll_like.sandbox.bwrap import BwrapBox
from roll_like.sandbox.selftest import SelfTestReport, run_probes
from roll_like.sandbox.types import Limits

PROPERTIES = {
    "a program runs",
    "files outside are out of reach",
    "no network",
    "dangerous system calls refused",
    "not root",
    "no capability, none to be had",
    "environment empty",
    "no inherited descriptor",
    "no other process in sight",
    "memory limit holds",
    "process limit holds",
    "no process outlives its program",
    "nothing stays for the next program",
    "time limit holds",
    "output limit holds",
}


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the self-test run again in this process."""
    monkeypatch.setattr(backends, "_passed", {})


class Hole:
    """A box with a hole: what looks around does so on this machine. The other programs are not run at all.

    Of the machine's files only those beside the canary are listed: all of them take half a minute.
    """

    name = "hole"

    async def run(self, program: Program, stdin: str, limits: Limits) -> BoxReport:
        report = BoxReport(Ended.EXITED, 0, b"200", "", 0.0, 0, "")
        if "canary" not in program.source:
            return report
        assert 'os.walk("/")' in program.source
        source = program.source.replace('os.walk("/")', "os.walk(os.path.dirname(canary))")
        command = [sys.executable, "-c", source]
        ran = await asyncio.to_thread(subprocess.run, command, input=stdin, capture_output=True, text=True, check=True)
        return replace(report, stdout=ran.stdout.encode())

    async def open(self, program: Program, limits: Limits):
        raise NotImplementedError

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("backend", ["auto", "bwrap"])
def test_the_box_isolates_here(untested, backend: str):
    report = self_test(backend)
    assert report.passed, report.table()
    assert {found.name for found in report.probes} == PROPERTIES
    assert self_test(backend) is report  # once in a process


async def test_without_nested_namespaces_it_isolates_too():
    box = BwrapBox(workers=1, nest=False)
    try:
        report = await run_probes(box)
        assert report.passed, report.table()
    finally:
        await box.close()


async def test_a_box_that_does_not_isolate_is_found_out():
    report = await run_probes(Hole())
    passed = {found.name for found in report.probes if found.passed}
    # as an ordinary user that test is passed without walls, and the others of these two depend on what started it
    assert passed <= {"a program runs", "not root", "no inherited descriptor", "no process outlives its program"}
    assert {found.name for found in report.probes} == PROPERTIES
    assert "files outside are out of reach: read possible, write possible" in report.failures()
    assert "DOES NOT ISOLATE" in report.table()


async def test_a_box_that_fails_a_probe_is_not_opened(untested, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "make_box", lambda backend, **_: Hole())
    with pytest.raises(SandboxUnavailable, match=r"does not isolate here:\n.*files outside"):
        await backends.open_box("auto")
    with pytest.raises(SandboxUnavailable, match=r"python -m roll_like\.sandbox"):
        self_test()


def test_without_bubblewrap_the_reason_and_the_command_are_given(untested, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(SandboxUnavailable, match=r"bwrap\) is not installed\n  fix: apt-get install bubblewrap"):
        self_test()
    report = examine()
    assert not report.passed
    assert "apt-get install bubblewrap" in report.table()


def test_where_bubblewrap_is_refused_its_own_words_are_given(untested, monkeypatch: pytest.MonkeyPatch):
    command, uid = bwrap.box_command()
    broken = [word if word != "--unshare-net" else "--unshare-nothing" for word in command]
    monkeypatch.setattr(bwrap, "box_command", lambda **_: (broken, uid))
    with pytest.raises(SandboxUnavailable, match="Unknown option --unshare-nothing"):
        self_test()


def test_there_is_no_other_backend_and_none_without_walls():
    for name in ("none", "local", "subprocess", "unsandboxed", ""):
        with pytest.raises(ConfigError, match="no sandbox backend is called"):
            backends.make_box(name)


def test_the_command_prints_a_table_and_says_it_with_its_status(capsys: pytest.CaptureFixture[str]):
    assert main(["bwrap"]) == 0
    table = capsys.readouterr().out
    assert table.count("\n  ok  ") == len(PROPERTIES)
    assert "bwrap isolates on this machine" in table
    with pytest.raises(SystemExit) as caught:
        main(["none"])
    assert caught.value.code == 2


def test_the_command_fails_where_a_probe_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(
        "roll_like.sandbox.__main__.examine", lambda backend: SelfTestReport(backend, (), "nothing there")
    )
    assert main([]) == 1
    assert "nothing there" in capsys.readouterr().out


def test_no_ray_comes_with_the_sandbox():
    source = "import sys, roll_like.sandbox.oneshot; print('ray' in sys.modules, 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]


def test_an_interpreter_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    private = tmp_path / "python"
    private.write_text("no program")
    monkeypatch.setattr(rootfs, "interpreter_path", lambda: str(private))
    with pytest.raises(SandboxUnavailable, match=r"cannot be started by user \d+") as caught:
        rootfs.interpreter_mounts.__wrapped__()
    assert "may read and execute" in (caught.value.fix or "")
