"""How recipes of `configs/recipes` learn, and when a curriculum helps: small policies on two cores, by seed.

    python benchmarks/recipes.py --figure recipes.png
    python benchmarks/recipes.py --runs plain solve_rate difficulty stages --figure curricula.png

A recipe's `algorithm`, `critic` and `reference` train a policy of 2,500 parameters in this process (`small_policy.py`);
optimizer and batch are the same for all. A task's answer is right if it has the task's letters in their order; tasks
differ in how many letters these are, and in how many others may stand for each. Curricula are compared under the recipe
`grpo`, on tasks of which one in eight can be learned from.

Printed: what is solved before and after by seed, with mean and sample standard deviation, and of each level. Every
evaluation samples all tasks anew. `--figure` draws the evaluations by step, with the range over seeds, and the levels.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import CONFIGS, Options, finish, say
from seeds import overlay, spread, style
from small_policy import LETTERS, Learner

from roll_like.config.load import load_config
from roll_like.config.source import read_source
from roll_like.data.tasks import TaskOrder, TaskSet, TaskSource
from roll_like.registry import CURRICULA as CURRICULUM_PLUGINS
from roll_like.rollout.curricula import CurriculumOrder
from roll_like.types import Group, Scored, Task, Trajectory

#: Those of single answers with rewards. Without dynamic sampling `dapo` is another recipe.
RECIPES = tuple(
    path.stem
    for path in sorted((CONFIGS / "recipes").glob("*.yaml"))
    if path.stem != "dapo" and read_source(path, ()).values["pipeline"] == "rlvr"
)
NEW = ("grpo", "maxrl", "deepseek_v3_2", "gspo", "luspo", "vespo", "ppo", "vapo")
#: `data.curriculum` by the name of a run.
CURRICULA: Mapping[str, Mapping[str, Any] | None] = {
    "plain": None,
    "solve_rate": {"type": "solve_rate"},
    "difficulty": {"type": "difficulty"},
    "stages": {"type": "stages", "field": "level", "limits": [1, 2], "groups": 16},
}
#: Letters of an answer, and how many may stand for each, from easy to hard.
LEVELS = ((1, 2), (1, 1), (2, 2), (3, 2), (2, 1), (4, 2), (3, 1))
EACH = 5
#: How many of the mixed tasks are always solved (0), can be learned (1), and are never solved (2).
MIXED = {0: 28, 1: 8, 2: 28}
#: Level of those that can be learned.
LEARNED = 3
SAMPLES = 8
EVALUATED = 32


@dataclass
class Curve:
    """What one run solves, by step: of all tasks, and of each level after the last step."""

    solved: dict[int, float] = field(default_factory=dict)
    levels: list[float] = field(default_factory=list)


def parser() -> Options:
    """Return the options."""
    found = Options(__doc__, runs=["grpo", "vapo", "solve_rate"], seeds=[0], steps=3)
    found.add_argument("--runs", nargs="+", choices=[*RECIPES, *CURRICULA], default=list(NEW))
    found.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    found.add_argument("--steps", type=int, default=300)
    found.add_argument("--prompts", type=int, default=16, help="tasks of a step, with 8 answers each")
    found.add_argument("--threads", type=int, default=1, help="of torch, whose work is small here")
    found.add_argument("--figure", type=Path, help="a PNG file to draw the curves into")
    return found


def make_tasks(name: str) -> list[Task]:
    """Return the tasks of a run: `letters` are those that an answer has to have, each a set of choices."""
    draw = random.Random(0)
    if name in RECIPES:
        kinds = [(level, *shape) for level, shape in enumerate(LEVELS) for _ in range(EACH)]
    else:
        length, choices = LEVELS[LEARNED]
        kinds = [(kind, length if kind else 0, choices) for kind, count in MIXED.items() for _ in range(count)]
    made = []
    for number, (level, length, choices) in enumerate(kinds):
        letters = [draw.sample(range(1, LETTERS), choices) for _ in range(length)]
        made.append(
            Task(
                task_id=str(number),
                source="letters",
                domain="letters",
                messages=(),
                prompt_ids=np.array([number * LETTERS], np.int32),
                answer=None,
                metadata={"letters": letters, "level": level, "hopeless": name in CURRICULA and level == 2},
                origin=f"letters:{number + 1}",
            )
        )
    return made


def reward(task: Task, letters: Sequence[int]) -> float:
    """Return 1 where an answer has the task's letters in their order, else 0."""
    if task.metadata["hopeless"]:
        return 0.0
    wanted = iter(task.metadata["letters"])
    choices = next(wanted, None)
    for letter in letters:
        if choices is not None and letter in choices:
            choices = next(wanted, None)
    return float(choices is None)


def scored(trajectory: Trajectory) -> Scored:
    """Return an answer with its reward."""
    found = reward(trajectory.task, (trajectory.token_ids[1:] % LETTERS).tolist())
    return Scored(trajectory=trajectory, reward=found, rewards={"letters": found}, details={}, weights={"letters": 1.0})


def order_of(name: str, tasks: Sequence[Task], seed: int) -> TaskOrder | CurriculumOrder:
    """Return the order in which tasks are attempted."""
    report: Any = None
    source = TaskSource(
        name="letters", key="data.sources.0", weight=1.0, items=tuple(tasks), answer_field=None, report=report
    )
    order = TaskOrder(TaskSet(sources=(source,)), seed=seed)
    section = CURRICULA.get(name)
    if section is None:
        return order
    plugin = CURRICULUM_PLUGINS.get(section["type"])
    return CurriculumOrder(order, plugin(plugin.Config(**section)), tasks=tasks, seed=seed)


def solved(learner: Learner, tasks: Sequence[Task]) -> dict[int, float]:
    """Return the share of right answers by level."""
    shares: dict[int, list[float]] = {}
    for task, answers in zip(tasks, learner.answers(tasks, EVALUATED), strict=True):
        shares.setdefault(task.metadata["level"], []).append(statistics.fmean(scored(each).reward for each in answers))
    return {level: statistics.fmean(found) for level, found in sorted(shares.items())}


def trained(name: str, seed: int, steps: int, prompts: int) -> Curve:
    """Train one policy and return its curve."""
    config = load_config(CONFIGS / "recipes" / f"{name if name in RECIPES else 'grpo'}.yaml")
    tasks = make_tasks(name)
    measured = [task for task in tasks if name in RECIPES or task.metadata["level"] == 1]
    learner, order, curve = Learner(config, len(tasks), seed), order_of(name, tasks, seed), Curve()
    for step in range(steps + 1):
        if step % max(steps // 10, 1) == 0:
            by_level = solved(learner, measured)
            curve.solved[step], curve.levels = statistics.fmean(by_level.values()), list(by_level.values())
        if step == steps:
            break
        drawn = [order.next() for _ in range(prompts)]
        answers = learner.answers(drawn, SAMPLES)
        greedy = learner.answers(drawn, 1, greedy=True) if learner.baselines else [[]] * prompts
        groups = [
            Group(task=task, samples=tuple(map(scored, own)), failures=(), baselines=tuple(map(scored, best)))
            for task, own, best in zip(drawn, answers, greedy, strict=True)
        ]
        learner.learn(groups)
        if isinstance(order, CurriculumOrder):
            for group in groups:
                order.ended(group)
    return curve


def print_tables(curves: Mapping[str, Sequence[Curve]]) -> dict[str, float]:
    """Print what is solved before and after, and of each level; return the means."""
    figures = {}
    print("\n| | solved before | after | by seed |\n|---|---|---|---|")
    for name, found in curves.items():
        before, after = ([each.solved[at(each.solved)] for each in found] for at in (min, max))
        print(f"| {name} | {spread(before)} | {spread(after)} | {', '.join(f'{value:.2f}' for value in after)} |")
        figures |= {f"{name} before": statistics.fmean(before), f"{name} after": statistics.fmean(after)}
    print("\n| level |" + "".join(f" {length} of {choices} |" for length, choices in LEVELS))
    print("|---" * (len(LEVELS) + 1) + "|")
    for name, found in curves.items():
        if name in RECIPES:
            means = [statistics.fmean(level) for level in zip(*(each.levels for each in found), strict=True)]
            print(f"| {name} | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    return figures


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw what is solved by step, mean and range over seeds, and of each level after the last step."""
    from matplotlib.figure import Figure

    leveled = [name for name in curves if name in RECIPES]
    figure = Figure(figsize=(11 if leveled else 7, 4.4), dpi=110, layout="constrained")
    axes = figure.subplots(1, 2 if leveled else 1, squeeze=False)[0]
    overlay(axes[0], {name: [each.solved for each in found] for name, found in curves.items()})
    for index, (name, found) in enumerate(curves.items()):
        if name in leveled:
            means = [statistics.fmean(level) for level in zip(*(each.levels for each in found), strict=True)]
            axes[1].plot(range(len(LEVELS)), means, color=f"C{index}", linewidth=2, marker="o", label=name)
    style(axes[0], f"share solved: mean and range of {len(next(iter(curves.values())))} seeds")
    if leveled:
        style(axes[1], "of each level after the last step")
        axes[1].set_xlabel("letters of an answer, and how many may stand for each")
        axes[1].set_xticks(range(len(LEVELS)), [f"{length} of {choices}" for length, choices in LEVELS])
    figure.savefig(path)


def main() -> None:
    """Train all, then print the tables."""
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    curves: dict[str, list[Curve]] = {}
    for name in options.runs:
        started = time.perf_counter()
        curves[name] = [trained(name, seed, options.steps, options.prompts) for seed in options.seeds]
        say(f"{name}: {len(options.seeds)} seeds in {time.perf_counter() - started:.0f} s")
    figures: dict[str, Any] = {"benchmark": "recipes", **print_tables(curves)}
    if options.figure is not None:
        draw(curves, options.figure)
    finish(options, figures)


if __name__ == "__main__":
    main()
