"""Conversations to learn from: whether rows are there, fit, and can be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from roll_like.check.findings import Finding, failed, is_hub_id
from roll_like.check.machine import warm_up_that_never_ends
from roll_like.check.model import check_window
from roll_like.config.plan import Plan, roles, trainer_memory
from roll_like.config.sft import SFTConfig
from roll_like.config.training_data import ConversationData
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.samples import ConversationSample, SampleSet
from roll_like.errors import RollLikeError
from roll_like.models.shape import ModelShape
from roll_like.teaching import steps_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll_like.check import Report


def supervised_plan(config: SFTConfig, model: ModelShape | None) -> Plan:
    """Return the plan of a supervised run; the steps of `epochs` are 0 until the data was read."""
    return Plan(
        name=config.name,
        steps=config.steps or 0,
        groups_per_step=config.data.samples_per_step,
        samples_per_group=1,
        units=("samples", "samples"),
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
    """Yield what is wrong with the data; tell the report what became of each source's rows, and the steps."""
    yield from check_window(config, shape, "data")
    sections: dict[str, ConversationData] = {"data": config.data}
    if config.evaluation is not None:
        sections["evaluation"] = config.data.model_copy(update={"sources": config.evaluation.sources})
    loaded: dict[str, SampleSet[ConversationSample]] = {}
    for section, data in sections.items():
        found = _load(data, section, tokenizer)
        if isinstance(found, Finding):
            yield found
        elif found is not None:
            loaded[section] = found
            report.sources += found.report
    if "data" not in loaded:
        return
    report.plan = replace(report.plan, steps=steps_of(config, len(loaded["data"])))
    yield from warm_up_that_never_ends("training", config.training, report.plan.updates)
    samples = len(loaded["data"])
    if samples < config.data.samples_per_step:
        yield Finding(
            "warning",
            "data.samples_per_step",
            f"one step takes {config.data.samples_per_step} samples and the data has {samples}, so that a step holds "
            "some of them several times; lower it, or add data",
        )
    if "evaluation" in loaded:
        trained = {sample.content() for sample in loaded["data"]}
        both = [sample for sample in loaded["evaluation"] if sample.content() in trained]
        if both:
            yield Finding(
                "warning",
                "evaluation.sources",
                f"{len(both)} of {len(loaded['evaluation'])} samples are also trained on, first {both[0].origin}; the "
                "evaluation will look better than it is",
            )


def _load(
    data: ConversationData, section: str, tokenizer: PreTrainedTokenizerBase | None
) -> SampleSet[ConversationSample] | Finding | None:
    """Return the samples, or why they cannot be had here."""
    remote = [source.path for source in data.sources if is_hub_id(source.path)]
    if remote:
        return Finding(
            "note",
            f"{section}.sources",
            f"{', '.join(remote)}: not checked, because it is on the hub; it is read later",
        )
    if tokenizer is None:
        return None  # a finding of its own
    try:
        return load_conversations(data, Renderer(tokenizer), section=section)
    except RollLikeError as error:
        return failed(f"{section}.sources", error)
