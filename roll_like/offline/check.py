"""Given data, conversations and preferences: whether rows are there, fit, and can be trained on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.dpo.check import label_findings
from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.online_dpo.check import iteration_findings
from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.check.findings import Finding, failed, is_hub_id
from roll_like.check.machine import warm_up_that_never_ends
from roll_like.check.model import check_score, check_vocabulary, check_window
from roll_like.check.teachers import teacher_findings
from roll_like.config.offline import GivenDataConfig
from roll_like.config.plan import Plan, roles, trainer_memory
from roll_like.config.training_data import RowLimits
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.pairs import load_preferences
from roll_like.data.samples import SampleSet
from roll_like.data.scored_pairs import load_scored_pairs
from roll_like.errors import RollLikeError
from roll_like.models.shape import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll_like.check import Report


def given_plan(config: GivenDataConfig, model: ModelShape | None) -> Plan:
    """Return the plan of a run on given data; the steps of `epochs` are 0 until the data was read."""
    count, what = config.items_per_step
    return Plan(
        name=config.name,
        steps=config.steps or 0,
        groups_per_step=count,
        samples_per_group=1,
        units=(what, what),
        updates_per_step=1,
        max_sample_tokens=config.longest_sample,
        roles=roles(config),
        processes=(),
        placement="colocated",
        device=config.resources.device,
        devices=config.resources.nodes * config.resources.devices_per_node,
        memory=() if model is None else (trainer_memory(config, model),),
    )


def conversation_findings(
    config: SFTConfig, tokenizer: PreTrainedTokenizerBase | None, shape: ModelShape | None, report: Report
) -> Iterator[Finding]:
    """Yield what is wrong with conversations; tell the report what became of each source's rows, and the steps."""
    yield from check_window(config, shape, "data")
    yield from _findings(config, _sections(config), load_conversations, tokenizer, report)


def lesson_findings(
    config: DistillConfig, tokenizer: PreTrainedTokenizerBase | None, shape: ModelShape | None, report: Report
) -> Iterator[Finding]:
    """Yield what is wrong with teachers and conversations; tell the report the same as of supervised runs."""
    yield from check_window(config, shape, "data")
    yield from teacher_findings(config, config.teachers, tokenizer, shape, top_k=config.algorithm.top_k)
    yield from _findings(config, _sections(config), load_conversations, tokenizer, report)


def preference_findings(
    config: DPOConfig, tokenizer: PreTrainedTokenizerBase | None, shape: ModelShape | None, report: Report
) -> Iterator[Finding]:
    """Yield what is wrong with preferences and the reference model; tell the report the same as of conversations."""
    yield from check_window(config, shape, "data")
    yield from check_vocabulary(config, shape, None if config.reference is None else config.reference.path)
    data = {"data": config.data if config.iterations is None else None, "evaluation": config.evaluated_rows}
    present = {section: rows for section, rows in data.items() if rows is not None}
    loaded = yield from _findings(config, present, load_preferences, tokenizer, report)
    yield from label_findings(config, loaded)
    if config.iterations is not None:
        yield from iteration_findings(config, tokenizer, shape, report)


def scored_pair_findings(
    config: RewardModelRunConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    shape: ModelShape | None,
    report: Report,
) -> Iterator[Finding]:
    """Yield what is wrong with pairs and with the model to start from; tell the report the same as of conversations."""
    yield from check_window(config, shape, "data")
    yield from check_score(config, shape)
    yield from _findings(config, _sections(config), load_scored_pairs, tokenizer, report)


def _sections(config: SFTConfig | DistillConfig | RewardModelRunConfig) -> dict[str, RowLimits]:
    evaluated = {} if config.evaluation is None else {"evaluation": config.data.reading(config.evaluation.sources)}
    return {"data": config.data, **evaluated}


def _findings(
    config: GivenDataConfig,
    sections: dict[str, Any],
    load: Callable[..., SampleSet[Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    report: Report,
) -> Generator[Finding, None, dict[str, SampleSet[Any]]]:
    loaded: dict[str, SampleSet[Any]] = {}
    for section, data in sections.items():
        found = _load(data, section, load, tokenizer)
        if isinstance(found, Finding):
            yield found
        elif found is not None:
            loaded[section] = found
            report.sources += found.report
    if "data" not in loaded:
        return loaded
    items, (count, what) = len(loaded["data"]), config.items_per_step
    report.plan = replace(report.plan, steps=config.steps_for(items))
    yield from warm_up_that_never_ends("training", config.training, report.plan.updates)
    if items < count:
        yield Finding(
            "warning",
            f"data.{what}_per_step",
            f"one step takes {count} {what} and the data has {items}, so that a step holds some of them several times; "
            "lower it, or add data",
        )
    if "evaluation" in loaded:
        yield from _no_overlap(loaded["data"], loaded["evaluation"])
    return loaded


def _no_overlap(data: SampleSet[Any], evaluation: SampleSet[Any]) -> Iterator[Finding]:
    trained = {sequence.content() for item in data for sequence in item.sequences}
    both = [item for item in evaluation if all(sequence.content() in trained for sequence in item.sequences)]
    if both:
        what = "pairs" if len(both[0].sequences) > 1 else "samples"
        yield Finding(
            "warning",
            "evaluation.sources",
            f"{len(both)} of {len(evaluation)} {what} are also trained on, first {both[0].origin}; the evaluation will "
            "look better than it is",
        )


def _load(
    data: Any, section: str, load: Callable[..., SampleSet[Any]], tokenizer: PreTrainedTokenizerBase | None
) -> SampleSet[Any] | Finding | None:
    """Return the samples or pairs, or why they cannot be had here."""
    remote = [source.path for source in data.sources if is_hub_id(source.path)]
    if remote:
        return Finding(
            "note",
            f"{section}.sources",
            f"{', '.join(remote)}: not checked, because it is on the hub; it is read when the run starts",
        )
    if tokenizer is None:
        return None  # a finding of its own
    try:
        return load(data, Renderer(tokenizer), section=section)
    except RollLikeError as error:
        return failed(f"{section}.sources", error)
