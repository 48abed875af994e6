"""What rollouts for people cost a step: rows in a file, and 16 episodes as MLflow traces in a SQLite store.

    python benchmarks/traces.py                # 128 episodes of 10 turns a step, 16 of them as traces

A step waits for both: from scored episodes to what is on disk. Each turn shows a board of 8 × 8 with a sentence, and
calls one tool. Beside the seconds on the clock are those of this process's own processor time, which other work on the
machine does not lengthen.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from common import Options, finish, repetition_count, say

from roll_like.config.run import MetricsConfig
from roll_like.metrics.manager import MetricsManager
from roll_like.rollout.metrics import rollout_rows
from roll_like.types import Group, Part, Scored, Segment, StopReason, Task, Trajectory, TurnRecord

BOARD = "\n".join(" ".join("#" if {row, column} & {0, 7} else "." for column in range(8)) for row in range(8))
SHOWN = f"You see walls and an empty floor. Push each box onto a target.\n{BOARD}"
CALL = {"name": "look", "arguments": {"direction": "left"}, "result": "a wall", "error": False}
PER_GROUP = 8


def make_groups(episodes: int, turns: int) -> list[Group[Scored]]:
    """Return a step's scored episodes."""
    groups = []
    for index in range(-(-episodes // PER_GROUP)):
        task = Task(
            task_id=f"boxes:{index}",
            source="boxes",
            domain="boxes",
            messages=({"role": "user", "content": SHOWN},),
            prompt_ids=np.zeros(0, np.int32),
            answer=None,
            metadata={"seed": index},
            origin="-",
        )
        members = min(PER_GROUP, episodes - index * PER_GROUP)
        samples = tuple(_episode(task, place, turns) for place in range(members))
        groups.append(Group(task=task, samples=samples, failures=()))
    return groups


def _episode(task: Task, place: int, turns: int) -> Scored:
    began = time.time()
    record = tuple(
        TurnRecord(
            shown=({"role": "user", "content": SHOWN},),
            text=f"I look to the left and go on. <action>move {number}</action>",
            tokens=12,
            prompt_tokens=100 * (number + 1),
            reward=0.1,
            state=BOARD,
            tool_calls=(CALL,),
            began=began + number,
            sampled=began + number + 0.5,
            ended=began + number + 0.6,
        )
        for number in range(turns)
    )
    empty = np.zeros(0, np.int32)
    trajectory = Trajectory(
        task=task,
        sample_index=place,
        token_ids=empty,
        sampled=empty.astype(np.bool_),
        logprobs=empty.astype(np.float32),
        turns=empty,
        parts=(Part(start=0, end=0, prompt_length=0),),
        segments=(Segment(start=0, end=0, policy_version=0),),
        text="",
        stop_reason=StopReason.STOP,
        record=record,
    )
    return Scored(
        trajectory=trajectory,
        reward=0.1 * turns,
        rewards={"return": 0.1 * turns},
        details={"turns": float(turns), "success": 1.0},
        weights={"return": 1.0},
    )


def step_seconds(groups: list[Group[Scored]], traces: int, steps: int, folder: Path) -> tuple[float, float]:
    """Return the median seconds that a step waits, on the clock and of this process's processor time."""
    trackers = ({"type": "mlflow"},) if traces else ()
    config = MetricsConfig.model_validate({"trackers": trackers, "console": "quiet", "traces_per_step": traces})
    clock, processor = [], []
    with MetricsManager(config, folder, folder.name, steps, {"pipeline": "agentic"}) as metrics:
        for step in range(steps + 1):
            metrics.log(step + 1, {})
            started, used = time.perf_counter(), time.process_time()
            metrics.log_rollouts(step + 1, rollout_rows(groups))
            if step:  # the first one opens what is opened once
                clock.append(time.perf_counter() - started)
                processor.append(time.process_time() - used)
    return statistics.median(clock), statistics.median(processor)


def parser() -> Options:
    """Return the options."""
    parser = Options(__doc__, episodes=8, turns=2, traces=2, repetitions=1)
    parser.add_argument("--episodes", type=int, default=128, help="episodes of a step")
    parser.add_argument("--turns", type=int, default=10, help="turns of each")
    parser.add_argument("--traces", type=int, default=16, help="episodes of a step that become traces")
    parser.add_argument("--repetitions", type=repetition_count, default=9, help="steps; the median counts")
    return parser


def main() -> None:
    """Time both and print one line of JSON."""
    arguments = parser().parse_args()
    groups = make_groups(arguments.episodes, arguments.turns)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, traces in (("file", 0), ("file_and_traces", arguments.traces)):
            clock, processor = step_seconds(groups, traces, arguments.repetitions, Path(folder) / name)
            figures |= {f"{name}_seconds": clock, f"{name}_processor_seconds": processor}
            say(f"{name}: {clock:.3f} s a step, {processor:.3f} s of them computing")
        written = sum(path.stat().st_size for path in (Path(folder) / "file" / "rollouts").iterdir())
        store = (Path(folder) / "mlflow.db").stat().st_size
    steps = arguments.repetitions + 1
    finish(
        arguments,
        {
            "benchmark": "traces",
            "episodes": arguments.episodes,
            "turns": arguments.turns,
            "traces": arguments.traces,
            **figures,
            "file_kib_per_episode": written / steps / arguments.episodes / 1024,
            "store_kib_per_trace": store / steps / max(arguments.traces, 1) / 1024,
        },
    )


if __name__ == "__main__":
    main()
