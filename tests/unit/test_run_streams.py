"""Standard streams that are lost while a run goes on, or that were closed before."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roll_like.errors import STOPPING
from roll_like.run.signals import StopSignal, heeded
from roll_like.run.streams import lasting_streams

TALK = """
import sys
from roll_like.run.streams import lasting_streams
with lasting_streams():
    print("first", flush=True)
    sys.stdin.readline()
    for stream in (sys.stdout, sys.stderr):
        print("x" * 70_000, file=stream, flush=True)
open(sys.argv[1], "w").write("done")
"""


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"])
def talk(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    def start(**options: Any) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONUNBUFFERED": request.param}
        command = [sys.executable, "-c", TALK, str(tmp_path / "end")]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, **options)

    return start


def test_what_reads_a_pipe_may_end(talk: Any, tmp_path: Path) -> None:
    with talk(stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0
    assert (tmp_path / "end").read_text() == "done"


def test_a_terminal_may_be_closed(talk: Any, tmp_path: Path) -> None:
    main, child = pty.openpty()
    with talk(stdout=child, stderr=child) as process:
        os.close(child)
        assert os.read(main, 5) == b"first"
        os.close(main)
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0
    assert (tmp_path / "end").read_text() == "done"


def test_a_full_disk_loses_what_is_printed_only(talk: Any, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full, talk(stdout=full, stderr=full) as process:
        process.stdin.close()
        assert process.wait(60) == 0
    assert (tmp_path / "end").read_text() == "done"


def test_a_pipe_that_another_program_made_non_blocking_loses_nothing(talk: Any) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with talk(stdout=writing, stderr=subprocess.DEVNULL) as process:
        os.close(writing)
        process.stdin.close()
        with open(reading, "rb") as stream:
            assert stream.read() == b"first\n" + b"x" * 70_000 + b"\n"
        assert process.wait(60) == 0


def test_a_notebooks_stream_stays(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with lasting_streams():
        assert sys.stdout is before
        print("seen")
    assert capsys.readouterr().out == "seen\n"


def test_closed_streams_are_opened(tmp_path: Path) -> None:
    code = (
        "import os, sys; from roll_like.run.streams import open_standard_streams; open_standard_streams(); "
        "print('lost'); print('lost', file=sys.stderr); "
        f"file = open({str(tmp_path / 'file')!r}, 'w'); assert file.fileno() > 2; "
        "os.write(1, b'lost'); os.write(2, b'lost'); "
        "print([os.get_inheritable(number) for number in range(3)], file=file)"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(command, check=False).returncode == 0
    assert (tmp_path / "file").read_text() == "[True, True, True]\n"


def test_output_that_was_lost_before_is_no_error(tmp_path: Path) -> None:
    code = (
        "import sys; from roll_like.run.streams import lasting_streams\n"
        "sys.stdin.readline(); print('before')\n"
        f"with lasting_streams(): print('within', flush=True)\nopen({str(tmp_path / 'end')!r}, 'w').write('done')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0
    assert (tmp_path / "end").read_text() == "done"


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopSignal() as stop:
            assert heeded() == [signal.SIGTERM, signal.SIGUSR1]
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
            with stop.lent():
                pass
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGUSR1)
            assert (stop.requested, stop.name) == (True, "SIGUSR1")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
