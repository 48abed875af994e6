"""Datasets: whether rows are there, fit, and suit the rewards that score them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from roll_like.check.domains import check_domains
from roll_like.check.findings import Finding, Report, failed, is_repo_id
from roll_like.config.data import DataSource, SourceConfig
from roll_like.config.sampling import PromptRunConfig, RewardedRunConfig
from roll_like.data.benchmark_tasks import benchmark_tasks
from roll_like.data.chat import ChatMessage, Renderer
from roll_like.data.streamed import FIRST_ROWS
from roll_like.data.tasks import TOO_LONG, TaskSource, load_task_source
from roll_like.errors import FOREIGN_ERRORS, RollLikeError
from roll_like.registry import CURRICULA, REWARDS
from roll_like.rewards.base import Reward, RewardConfig
from roll_like.rewards.scorer import scores_task
from roll_like.rewards.trial import TRIAL_SECONDS, is_cheap, try_reward
from roll_like.rollout.demonstrations import TaskDemonstrations
from roll_like.rollout.replay import recorded_stems
from roll_like.types import IntArray, Picture, Task

#: Pixels of a source's images that are decoded, in about two seconds. That images begin as such, and that they have
#: their end, was found when their rows were read.
DECODED_PIXELS = 200_000_000
_SHOWN = 5  # damaged images of a source that are named


def prompt_findings(
    config: PromptRunConfig,
    renderer: Renderer | None,
    report: Report,
    further: Callable[[Mapping[str, Sequence[TaskSource]]], Iterator[Finding]] = lambda _: iter(()),
) -> Iterator[Finding]:
    """Yield what is wrong with tasks and rewards; add to the report what became of each source's rows.

    Args:
        renderer: The model's tokenizer, where it can be had.
        further: What a pipeline finds wrong with the tasks of `data` and `evaluation`.
    """
    findings: list[Finding] = []
    tasks = load_all(config, renderer, findings)
    sources = [*tasks["data"], *tasks["evaluation"]]
    report.sources += [source.report for source in sources]
    yield from findings
    yield from check_tasks(config, tasks)
    yield from check_demonstrations(config, renderer, tasks["data"])
    yield from check_experience(config)
    yield from further(tasks)
    yield from check_curriculum(config, tasks["data"])
    yield from check_domains(config, sources)
    yield from check_rewards(config, sources)
    yield from check_benchmarks(config, renderer)
    yield from redundant_samples(config)


def check_demonstrations(
    config: PromptRunConfig, renderer: Renderer | None, sources: Sequence[TaskSource]
) -> Iterator[Finding]:
    """Yield, of each source, the first row without a demonstration that can be used."""
    section = config.given_answers
    if section is None:
        return
    found = TaskDemonstrations(renderer, section, config.rollout.max_response_tokens)
    for source in sources:
        wrong = [(task, bad) for task in source.items if (bad := found.problem(task)) is not None]
        if not wrong:
            continue
        task, bad = wrong[0]
        message = f"{task.origin}: {bad.message}"
        if section.unusable == "refuse":
            more = f" (and {len(wrong) - 1} more rows)" if len(wrong) > 1 else ""
            yield Finding.error(source.key, f"{message}; {bad.fix}{more}")
        elif len(wrong) == len(source.items):
            yield Finding.error(source.key, f"none of {len(wrong)} rows has a demonstration; {message}; {bad.fix}")
        else:
            count = f"{len(wrong)} of {len(source.items)} prompts are trained on without a demonstration"
            yield Finding.warning(source.key, f"{count}; first {message}")


def check_experience(config: PromptRunConfig) -> Iterator[Finding]:
    """Yield that a run whose right answers are to be replayed has recorded none."""
    section = config.replayed_answers
    if section is not None and section.initial is not None and not recorded_stems(Path(section.initial)):
        yield Finding.error(
            "experience_replay.initial",
            f"{section.initial} has no rollouts with tokens; name the folder of a run with rollout.save_tokens: true",
        )


def redundant_samples(config: PromptRunConfig) -> Iterator[Finding]:
    """Yield that the first answers to finish are the short ones."""
    kept, further = config.rollout.samples_per_prompt, config.rollout.redundant_samples
    if further:
        yield Finding.warning(
            "rollout.redundant_samples",
            f"of {kept + further} answers to a prompt the first {kept} to finish are kept, which prefers short ones: "
            "what is trained on is not distributed as the policy's answers are; set it to 0, unless waiting for the "
            "longest answers costs too much",
        )


def load_all(
    config: PromptRunConfig, renderer: Renderer | None, findings: list[Finding]
) -> dict[str, list[TaskSource]]:
    """Return the tasks of `data` and `evaluation`, as far as they can be read here; the rest becomes findings."""
    sections = {"data": config.data.sources, "evaluation": config.evaluation.sources if config.evaluation else ()}
    loaded: dict[str, list[TaskSource]] = {"data": [], "evaluation": []}
    for section, sources in sections.items():
        for index, source in enumerate(sources):
            tasks = _load_one(source, f"{section}.sources.{index}", config.data.max_prompt_tokens, renderer, findings)
            if tasks is not None:
                loaded[section].append(tasks)
    return loaded


class RowsOnly(Renderer):
    """Stands in where there is no tokenizer: rows are checked, lengths are not."""

    def __init__(self) -> None:
        """Without a tokenizer."""
        self.tokenizer = None
        self._reasoning = None

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool = True,
        foreign_answers: bool = False,
    ) -> str:
        """Return nothing."""
        del messages, tools, generation_prompt, foreign_answers
        return ""

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[IntArray]:
        """Return no token of each."""
        return [np.zeros(0, np.int32) for _ in pieces]


def _load_one(
    source: DataSource, key: str, limit: int, renderer: Renderer | None, findings: list[Finding]
) -> TaskSource | None:
    if is_out_of_reach(source):
        message = (
            f"{source.path} is not checked: it is not a local path, and was never read on this machine, so it needs "
            "network; rows and fields are checked when the run starts"
        )
        findings.append(Finding.warning(key, message))
        return None
    try:
        tasks = load_task_source(source, renderer or RowsOnly(), limit, key)
    except RollLikeError as error:
        findings.append(failed(key, error))
        return None
    findings += only_first_rows(source, key, max(FIRST_ROWS, tasks.report.rows))
    findings += damaged_images(((task.origin, image.picture) for task in tasks.items for image in task.images), key)
    report = tasks.report
    for left in report.left_out:
        if left.problem != TOO_LONG:
            findings.append(
                Finding.note(f"{key}.where", f"{left.count} of {report.rows} rows {left.problem} are left out")
            )
            continue
        message = (
            f"{left.count} of {report.rows} prompts are longer than data.max_prompt_tokens ({limit}) and are left "
            f"out; first: {left.first}; the longest has {report.longest} tokens"
        )
        findings.append(Finding.warning(key, message))
    return tasks


def is_out_of_reach(source: SourceConfig) -> bool:
    """Return whether a check cannot read a source: a hub dataset that was never read here."""
    if not is_repo_id(source.path):
        return False
    from roll_like.data.hub import is_cached

    return not is_cached(source)


def only_first_rows(source: SourceConfig, key: str, rows: int = FIRST_ROWS) -> Iterator[Finding]:
    """Yield that a check has read the first rows of a source only, where it did."""
    if source.streaming:
        yield Finding.note(
            f"{key}.streaming",
            f"the first {rows:,} rows of {source.label!r} were checked; what is wrong with later ones is found "
            "when they are read",
        )


def damaged_images(images: Iterable[tuple[str, Picture]], key: str) -> Iterator[Finding]:
    """Yield images that cannot be decoded: of all, or of some from everywhere in a source that has many."""
    different = list({picture.digest: (origin, picture) for origin, picture in images}.values())
    sizes = [picture.size() for _, picture in different]
    every = -(-sum(width * height for width, height in sizes) // DECODED_PIXELS) or 1
    found = 0
    for origin, picture in different[::every]:
        try:
            picture.image()
        except OSError as error:
            found += 1
            if found <= _SHOWN:
                message = f"{origin}: {picture.label} is damaged: {error}; replace it"
                yield Finding.error(key, message)
    if found > _SHOWN:
        yield Finding.error(key, f"{found - _SHOWN} more images are damaged")


def check_tasks(config: PromptRunConfig, tasks: dict[str, list[TaskSource]]) -> Iterator[Finding]:
    """Yield what is odd about the number of tasks and about those in both training and evaluation."""
    count, rollout = sum(len(source.items) for source in tasks["data"]), config.rollout
    streamed = any(source.stream is not None for source in tasks["data"])
    if len(tasks["data"]) == len(config.data.sources) and count < rollout.groups and not streamed:
        unit = rollout.groups_key.rpartition("_")[2]
        yield Finding.warning(
            f"rollout.{rollout.groups_key}",
            f"one {unit} takes {rollout.groups} prompts, and the data has {count}, so one {unit} has some of them "
            "twice; use fewer, or more data",
        )
    trained = {str(task.messages) for source in tasks["data"] for task in source.items}
    if len(trained) * 2 < count:
        yield Finding.warning(
            "data.sources",
            f"the data has {count} prompts, and only {len(trained)} different ones; each is drawn as often as it "
            "stands there: remove the repetitions, unless they are meant",
        )
    for source in tasks["evaluation"]:
        shared = sum(str(task.messages) in trained for task in source.items)
        if shared:
            yield Finding.warning(
                "evaluation.sources",
                f"{shared} of {len(source.items)} prompts of {source.name!r} are trained on too, so the evaluation "
                "says little about unseen tasks",
            )
        for index, section in enumerate(config.rewards.use):
            used = cast(RewardConfig, section)
            scores = any(scores_task(used, task, config.domain_rewards) for task in source.items)
            if scores and REWARDS.get(section.type).relative:
                yield Finding.warning(
                    f"rewards.use.{index}",
                    f"{section.type!r} compares the samples of a group with each other, so of {source.name!r} eval/avg "
                    "says how far they agree, not how many are right; give the reward `sources` that are trained on, "
                    "and the evaluation one that knows the answers",
                )


def check_curriculum(config: PromptRunConfig, sources: Sequence[TaskSource]) -> Iterator[Finding]:
    """Yield the first row of each source that lacks what the curriculum reads."""
    section = config.data.curriculum
    if section is None:
        return
    for source in sources:
        try:
            curriculum = CURRICULA.get(section.type)(section)
            for task in source.items:
                curriculum.check_row(task)
        except FOREIGN_ERRORS as error:
            yield failed(
                "data.curriculum", error, f"curriculum {section.type!r} cannot take the rows of {source.name!r}"
            )


def check_benchmarks(config: PromptRunConfig, renderer: Renderer | None) -> Iterator[Finding]:
    """Yield benchmarks whose rows are not here, or are others than theirs, and the first row that a grader refuses."""
    for index, use in enumerate(config.benchmarks):
        key = f"evaluation.benchmarks.{index}"
        if is_out_of_reach(use.data()):
            message = f"{use.data().path} was never read on this machine, so it needs network; it is read at the start"
            yield Finding.warning(key, message)
            continue
        if renderer is None:
            continue
        try:
            tasks = benchmark_tasks(use, renderer, key)
        except RollLikeError as error:
            yield failed(key, error)
            continue
        for section in use.rewards():
            with closing(REWARDS.get(section.type)(section)) as grader:
                found = (finding for task in tasks for finding in task_suits(grader, section.type, key, task))
                yield from islice(found, 1)


def check_rewards(config: PromptRunConfig, sources: Sequence[TaskSource]) -> Iterator[Finding]:
    """Yield, for each reward and source, the first row that the reward cannot score."""

    def rows(reward: Any, section: RewardConfig, key: str) -> Iterator[Finding]:
        for source in sources:
            tasks = [task for task in source.items if scores_task(section, task, config.domain_rewards)]
            if tasks:
                yield from _rows_suit(reward, section.type, key, source, tasks)

    yield from each_reward(config, rows)


def each_reward(
    config: RewardedRunConfig, suits: Callable[[Any, RewardConfig, str], Iterator[Finding]]
) -> Iterator[Finding]:
    """Make each reward, without starting it; yield why that fails, or what `suits` yields of it.

    Args:
        suits: Given the reward, its settings and their key.
    """
    for index, section in enumerate(config.rewards.use):
        key = f"rewards.use.{index}"
        try:
            reward = REWARDS.get(section.type)(section)
        except FOREIGN_ERRORS as error:
            yield failed(key, error, f"reward {section.type!r} cannot be made")
            continue
        try:
            yield from suits(reward, cast(RewardConfig, section), key)
        except FOREIGN_ERRORS as error:
            yield failed(key, error, f"reward {section.type!r} cannot be tried")
        try:
            reward.close()
        except FOREIGN_ERRORS as error:
            yield failed(key, error, f"reward {section.type!r} cannot be closed")


def _rows_suit(reward: Any, name: str, key: str, source: TaskSource, tasks: Sequence[Task]) -> Iterator[Finding]:
    """Yield the first row of a source that the reward cannot score, among those that it has to."""
    try:
        source.require(reward.required_fields, f"reward {name!r}", tasks)
    except RollLikeError as error:
        yield failed(key, error)
        return
    for task in tasks:
        for finding in task_suits(reward, name, key, task):
            yield finding
            return
    if is_cheap(reward):
        yield from _scores(reward, name, key, tasks[0])


def _scores(reward: Reward, name: str, key: str, task: Task) -> Iterator[Finding]:
    """Yield what goes wrong when the reward scores answers to a task: an error if it scores none of them."""
    trial = try_reward(reward, task)
    if trial.late is not None:  # on a busy machine this is no fault: a reward may start a process first
        slow = f"reward {name!r} did not score {trial.late} within {TRIAL_SECONDS:g} s, so it was not tried"
        yield Finding.warning(key, f"{task.origin}: {slow}")
    if not trial.failures:
        return
    answer, problem = next(iter(trial.failures.items()))
    if len(trial.failures) == len(trial.tried):
        yield Finding.error(key, f"{task.origin}: reward {name!r} cannot score {answer}: {problem}")
    else:
        consequence = "samples that end so are left out of training"
        yield Finding.warning(key, f"{task.origin}: reward {name!r} cannot score {answer}: {problem}; {consequence}")


def task_suits(reward: Any, name: str, key: str, task: Task) -> Iterator[Finding]:
    """Yield why a reward cannot score a task, beside fields that are missing."""
    try:
        reward.check_row(task)
    except FOREIGN_ERRORS as error:
        yield failed(key, error, f"{task.origin}: reward {name!r} fails")
