"""Sandbox: executions per second in isolated workers, beside bare Python processes that isolate nothing.

    python benchmarks/sandbox.py

One side runs a small program in the bubblewrap backend: each execution in process and mount namespaces of its
own, with a fresh file system, system-call filter and limits, and with the zygotes recycled on the way. The other
side starts `python -I -S` for each execution, with the same imports and the same program, and isolates nothing.
Both have the same number of executions under way at a time. Afterwards the benchmark counts what the sandbox has
left: descriptors, processes, mounts, files and memory of this process.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from common import Options, add_common_arguments, finish, interleaved, say

from roll_like.sandbox import Limits, self_test
from roll_like.sandbox.box import Ended, Program
from roll_like.sandbox.bwrap import BwrapBox
from roll_like.sandbox.rootfs import interpreter_path
from roll_like.sandbox.zygote_main import IMPORTS

SOURCE = "values = list(map(int, input().split()))\nprint(sum(values), max(values))\n"
STDIN = " ".join(map(str, range(100))) + "\n"
PRINTED = b"4950 99\n"


def parser() -> Options:
    arguments = Options(__doc__, repetitions=1, executions=4)
    add_common_arguments(arguments, repetitions=5)
    arguments.add_argument("--executions", type=int, default=200, help="of each side in each turn")
    arguments.add_argument("--recycle", type=int, default=64, help="executions of one zygote")
    return arguments


async def sandboxed(box: BwrapBox, executions: int) -> float:
    """Run the program in the sandbox and return the seconds; every execution has to print the right thing."""
    begun = time.perf_counter()
    reports = await asyncio.gather(*(box.run(Program(SOURCE), STDIN, Limits()) for _ in range(executions)))
    took = time.perf_counter() - begun
    assert all(report.ended is Ended.EXITED and report.stdout == PRINTED for report in reports), reports[0]
    return took


def bare(threads: ThreadPoolExecutor, executions: int) -> float:
    """Run the program in a new process each time and return the seconds."""
    code = f"import {', '.join(IMPORTS)}\n{SOURCE}"
    command = [interpreter_path(), "-I", "-S", "-c", code]

    def execute(_: int) -> bytes:
        return subprocess.run(command, input=STDIN.encode(), capture_output=True, check=True, env={}).stdout

    begun = time.perf_counter()
    assert all(printed == PRINTED for printed in threads.map(execute, range(executions)))
    return time.perf_counter() - begun


def left_behind() -> dict[str, int]:
    """Count what an execution could leave: of this process, of the machine, and in folders for temporary files."""
    me = psutil.Process()
    return {
        "descriptors": me.num_fds(),
        "processes": len(me.children(recursive=True)),
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "files": sum(len(os.listdir(folder)) for folder in ("/tmp", "/dev/shm")),
        "resident_kib": me.memory_info().rss // 1024,
    }


def main() -> None:
    options = parser().parse_args()
    say(self_test("bwrap").table().splitlines()[-1])
    loop = asyncio.new_event_loop()
    box = BwrapBox(workers=options.threads, recycle=options.recycle)
    threads = ThreadPoolExecutor(options.threads)
    loop.run_until_complete(sandboxed(box, options.executions))
    before = left_behind()
    seconds = interleaved(
        {
            "sandbox": lambda: loop.run_until_complete(sandboxed(box, options.executions)),
            "bare": lambda: bare(threads, options.executions),
        },
        repetitions=options.repetitions,
    )
    grown = {f"grown_{name}": value - before[name] for name, value in left_behind().items()}
    loop.run_until_complete(box.close())
    loop.close()
    threads.shutdown()
    ours, theirs = (options.executions / seconds[side] for side in ("sandbox", "bare"))
    figures: dict[str, Any] = {
        "benchmark": "sandbox",
        "sandbox_per_second": ours,
        "bare_per_second": theirs,
        "ratio": ours / theirs,
        "executions": options.executions * (options.repetitions + 1),
        **grown,
    }
    finish(options, figures)


if __name__ == "__main__":
    main()
