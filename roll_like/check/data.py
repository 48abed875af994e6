"""Datasets: whether rows are there, fit, and suit the rewards that judge them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from roll_like.check.findings import Finding, failed, is_hub_id
from roll_like.config.domains import domain_rewards
from roll_like.config.prompts import PromptConfig
from roll_like.config.sections import DataSource
from roll_like.data.tasks import TaskSet, TaskSource, load_source
from roll_like.errors import RollLikeError
from roll_like.registry import REWARDS
from roll_like.rewards.base import RewardConfig
from roll_like.rewards.scorer import judges

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll_like.check import Report


def prompt_findings(
    config: PromptConfig, tokenizer: PreTrainedTokenizerBase | None, report: Report
) -> Iterator[Finding]:
    """Yield what is wrong with tasks and rewards; tell the report what became of each source's rows."""
    findings: list[Finding] = []
    tasks = load_all(config, tokenizer, findings)
    sources = [*tasks["data"], *tasks["evaluation"]]
    report.sources += [source.report for source in sources]
    yield from findings
    yield from check_tasks(config, tasks)
    yield from check_rewards(config, sources)


def load_all(
    config: PromptConfig, tokenizer: PreTrainedTokenizerBase | None, findings: list[Finding]
) -> dict[str, list[TaskSource]]:
    """Return the tasks of `data` and `evaluation`, as far as they can be read here; the rest becomes findings."""
    sections = {"data": config.data.sources, "evaluation": config.evaluation.sources if config.evaluation else ()}
    loaded: dict[str, list[TaskSource]] = {"data": [], "evaluation": []}
    for section, sources in sections.items():
        for index, source in enumerate(sources):
            tasks = _load_one(source, f"{section}.sources.{index}", config.data.max_prompt_tokens, tokenizer, findings)
            if tasks is not None:
                loaded[section].append(tasks)
    return loaded


class _RowsOnly:
    """Stands in for a tokenizer that cannot be had: rows are checked, lengths are not."""

    def apply_chat_template(self, _messages: list[Any], **_: Any) -> str:
        return ""

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[] for _ in texts]}


def _load_one(
    source: DataSource,
    key: str,
    limit: int,
    tokenizer: PreTrainedTokenizerBase | None,
    findings: list[Finding],
) -> TaskSource | None:
    if is_hub_id(source.path):
        message = (
            f"{source.path} is not checked: it is not a local path, so it needs network; rows and fields are checked "
            "when the run starts"
        )
        findings.append(Finding("note", key, message))
        return None
    try:
        tasks = load_source(source, tokenizer or cast("PreTrainedTokenizerBase", _RowsOnly()), limit, key)
    except RollLikeError as error:
        findings.append(failed(key, error))
        return None
    report = tasks.report
    if report.too_long:
        message = (
            f"{report.too_long} of {report.rows} prompts are longer than data.max_prompt_tokens ({limit}) and are left "
            f"out; first: {report.first_too_long}; the longest has {report.longest} tokens"
        )
        findings.append(Finding("warning", key, message))
    return tasks


def check_tasks(config: PromptConfig, tasks: dict[str, list[TaskSource]]) -> Iterator[Finding]:
    """Yield what is odd about the number of tasks and about those in both training and evaluation."""
    count = sum(len(source.tasks) for source in tasks["data"])
    if len(tasks["data"]) == len(config.data.sources) and count < config.rollout.prompts_per_step:
        yield Finding(
            "warning",
            "rollout.prompts_per_step",
            f"a step takes {config.rollout.prompts_per_step} prompts, and the data has {count}, so a step has some "
            "of them twice; use fewer, or more data",
        )
    trained = {str(task.messages) for source in tasks["data"] for task in source.tasks}
    for source in tasks["evaluation"]:
        shared = sum(str(task.messages) in trained for task in source.tasks)
        if shared:
            yield Finding(
                "warning",
                "evaluation.sources",
                f"{shared} of {len(source.tasks)} prompts of {source.name!r} are trained on too, so the evaluation "
                "says little about unseen tasks",
            )


def check_rewards(config: PromptConfig, sources: Sequence[TaskSource]) -> Iterator[Finding]:
    """Yield, for each reward and source, the first row that the reward cannot judge."""
    for index, section in enumerate(config.rewards.use):
        key = f"rewards.use.{index}"
        try:
            reward = REWARDS.get(section.type)(section)
        except RollLikeError as error:
            yield failed(key, error)
            continue
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything; it becomes a finding
            yield Finding("error", key, f"reward {section.type!r} cannot be made: {type(error).__name__}: {error}")
            continue
        try:
            for source in sources:
                if judges(cast(RewardConfig, section), source.tasks[0], domain_rewards(config)):
                    yield from _rows_suit(reward, section.type, key, source)
        finally:
            reward.close()


def _rows_suit(reward: Any, name: str, key: str, source: TaskSource) -> Iterator[Finding]:
    """Yield the first row that the reward cannot judge."""
    try:
        TaskSet(sources=(source,)).require(reward.required_fields, f"reward {name!r}")
    except RollLikeError as error:
        yield failed(key, error)
        return
    for task in source.tasks:
        try:
            reward.check_row(task)
        except RollLikeError as error:
            yield failed(key, error)
            return
        except Exception as error:  # noqa: BLE001 - as above
            yield Finding("error", key, f"{task.origin}: reward {name!r} fails: {type(error).__name__}: {error}")
            return
