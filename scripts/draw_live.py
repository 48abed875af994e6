"""Draw docs/images/live.svg: the live view of a run in the middle, from what its folder holds.

python scripts/draw_live.py RUN [FILE]
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console as RichConsole

from roll_like.metrics import files
from roll_like.metrics.console import LiveConsole
from roll_like.metrics.progress import Progress
from roll_like.metrics.rollout_text import sample_line
from roll_like.metrics.rollouts import read_rollouts
from roll_like.metrics.runs import read_config

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 108


class Clock:
    """The time that the run's own figures tell."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return it, in seconds."""
        return self.now


def main(run: Path, path: Path) -> None:
    """Write the picture."""
    steps = files.read_jsonl(run / files.METRICS)
    shown = steps[: len(steps) * 2 // 3]
    clock, evaluations = Clock(), files.read_jsonl(run / files.EVALUATIONS)
    progress = Progress(len(steps), [line["step"] for line in evaluations], clock=clock)
    recorder = RichConsole(record=True, force_terminal=True, width=WIDTH, file=io.StringIO(), highlight=False)
    view = LiveConsole(run.name, progress, recorder, elapsed=clock)
    view.evaluation(0, {name: value for name, value in evaluations[0].items() if name != "step"})
    for line in shown:
        clock.now += line["time/step"]
        view.step(line["step"], line)
    view.phase("generating", 3, read_config(run)["rollout"]["prompts_per_step"])
    view.sample(sample_line(read_rollouts(run, shown[-1]["step"], "step")[0]))
    view.close()
    recorder.export_text()  # what was drawn meanwhile
    recorder.print(view.render())
    # a picture in a page loads nothing: the reader's own fonts
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S).replace("Fira Code", "monospace")
    recorder.save_svg(str(path), title="roll-like run", code_format=form, unique_id="live")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs" / "images" / "live.svg")
