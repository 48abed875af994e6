"""Rows of a run's own data, for `roll-like check-reward --config`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import cast

from roll_like.check.data import RowsOnly, is_out_of_reach
from roll_like.config.base import PipelineConfig
from roll_like.config.sampling import PromptRunConfig
from roll_like.data.tasks import first_tasks
from roll_like.registry import REWARDS
from roll_like.rewards.base import RewardCase, RewardConfig
from roll_like.rewards.scorer import reward_name, scores_task
from roll_like.types import Task

#: Rows that are taken of each source, the first ones that the reward scores.
ROWS = 4


def reward_cases(config: PipelineConfig, name: str) -> list[RewardCase]:
    """Return the first rows that a reward scores of each source, with the fields that the sources name.

    Where the reward needs a reference answer, that is a right answer, and those of the other rows are wrong ones;
    other rewards are tried on empty and hostile answers alone, because what they pay for is not known.

    Args:
        config: A run's configuration; one without data sources has no rows.
        name: The reward's type, or the `name` that it has there.

    Raises:
        DataError: A source cannot be read.
    """
    if not isinstance(config, PromptRunConfig):
        return []
    use = cast(Sequence[RewardConfig], config.rewards.use)
    section = next(each for each in use if name in (reward_name(each), each.type))
    tasks: list[Task] = []
    for index, source in enumerate(config.data.sources):
        if is_out_of_reach(source):
            continue
        scored = (
            task
            for task in first_tasks(source, RowsOnly(), f"data.sources.{index}")
            if scores_task(section, task, config.domain_rewards)
        )
        tasks += islice(scored, ROWS)
    compares = "answer" in REWARDS.get(section.type).required_fields
    return [_case(task, tasks, compares=compares) for task in tasks]


def _case(task: Task, others: Sequence[Task], *, compares: bool) -> RewardCase:
    answers = {other.answer for other in others if other.answer is not None and other.source == task.source}
    return RewardCase(
        prompt=str(task.messages[-1]["content"]),
        answer=task.answer,
        metadata=task.metadata,
        gold=(task.answer,) if compares and task.answer is not None else (),
        wrong=tuple(sorted(answers - {task.answer})) if compares else (),
    )
