"""Given data of every kind: whether rows are there, fit, and can be trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from roll_like.check.data import damaged_images, is_out_of_reach, only_first_rows
from roll_like.check.findings import Finding, Report, failed
from roll_like.check.machine import warm_up_that_never_ends
from roll_like.check.plan import Plan, memory_lines
from roll_like.config.offline import OfflineRunConfig
from roll_like.data.chat import Renderer
from roll_like.data.packed import viewed
from roll_like.data.reader import SampleT
from roll_like.data.samples import SampleSet
from roll_like.errors import RollLikeError
from roll_like.models.shape import ModelShape
from roll_like.types import TrainingSample


def offline_plan(config: OfflineRunConfig, shapes: Mapping[str, ModelShape]) -> Plan:
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
        roles=config.roles,
        processes=(),
        placement="colocated",
        device=config.resources.device,
        devices=config.resources.nodes * config.resources.devices_per_node,
        memory=memory_lines(config, shapes),
    )


def data_findings(
    config: OfflineRunConfig,
    load: Callable[..., SampleSet[SampleT]],
    renderer: Renderer | None,
    report: Report,
) -> Generator[Finding, None, dict[str, SampleSet[SampleT]]]:
    """Yield what is wrong with given data; tell the report what became of each source's rows, and the run's steps.

    Args:
        load: Reads `data` or `evaluation`: the section, a renderer, and the section's key.
        renderer: Turns messages into tokens; None where there is no tokenizer.
        report: Told about sources and steps.

    Returns:
        What could be read, by section.
    """
    sections = {"data": config.data, "evaluation": config.evaluated_rows}
    loaded = yield from load_findings(sections, load, renderer, report)
    if "data" not in loaded:
        return loaded
    items, (count, what) = len(loaded["data"]), config.items_per_step
    report.plan = replace(report.plan, steps=config.steps_for(items))
    for violation in config.profile.violations(report.plan.steps):
        yield Finding.error(".".join(map(str, violation.path)), violation.message)
    yield from warm_up_that_never_ends("training", config.training, report.plan.updates)
    streamed = any(source.stream is not None for source in loaded["data"].sources)
    if items < count and not streamed:
        yield Finding.warning(
            f"data.{what}_per_step",
            f"one step takes {count} {what} and the data has {items}, so that a step holds some of them several times; "
            "lower it, or add data",
        )
    if not streamed:
        yield from _unread(config, loaded["data"], report.plan.steps * count)
    if "evaluation" in loaded:
        yield from _no_overlap(loaded["data"], loaded["evaluation"])
    return loaded


def _unread(config: OfflineRunConfig, data: SampleSet[Any], drawn: int) -> Iterator[Finding]:
    """Yield data of which a run that draws so many items reads less than half."""
    what = config.items_per_step[1]
    if drawn < len(data) / 2:
        yield Finding.warning(
            "epochs" if config.steps is None else "steps",
            f"the run reads {drawn} of {len(data)} {what}, and the others never; raise it"
            + ("" if config.steps is None else ", or set epochs: 1 and steps: null, which reads each of them once"),
        )
        return
    total = sum(source.weight for source in data.sources)
    for index, source in enumerate(data.sources):
        read = round(drawn * source.weight / total)
        if read < len(source.items) / 2:
            yield Finding.warning(
                f"data.sources.{index}.weight",
                f"the run reads about {read} of {len(source.items)} {what} of {source.name!r}, and the others never: "
                f"{source.weight:g} is {source.weight / total:.2g} of all weights; raise it, or the run's steps",
            )


def load_findings(
    sections: Mapping[str, Any],
    load: Callable[..., SampleSet[SampleT]],
    renderer: Renderer | None,
    report: Report,
) -> Generator[Finding, None, dict[str, SampleSet[SampleT]]]:
    """Yield why sections cannot be read; return those that can, and tell the report about their sources."""
    loaded: dict[str, SampleSet[SampleT]] = {}
    for section, data in sections.items():
        found = None if data is None else _load(data, section, load, renderer)
        if isinstance(found, Finding):
            yield found
        elif found is not None:
            loaded[section] = found
            # samples in columns have no images
            samples = chain.from_iterable(each.items for each in found.sources if isinstance(each.items, tuple))
            sequences = (sequence for sample in samples for sequence in sample.sequences)
            images = ((each.origin, image.picture) for each in sequences for image in each.images)
            yield from damaged_images(images, f"{section}.sources")
            report.sources += found.report
            for index, source in enumerate(data.sources):
                yield from only_first_rows(source, f"{section}.sources.{index}")
    return loaded


def _no_overlap(data: SampleSet[Any], evaluation: SampleSet[Any]) -> Iterator[Finding]:
    trained = {
        _short_hash(sequence) for source in data.sources for item in viewed(source.items) for sequence in item.sequences
    }
    both = [item for item in evaluation if all(_short_hash(sequence) in trained for sequence in item.sequences)]
    if both:
        what = "pairs" if len(both[0].sequences) > 1 else "samples"
        yield Finding.warning(
            "evaluation.sources",
            f"{len(both)} of {len(evaluation)} {what} are also trained on, first {both[0].sequences[0].origin}; the "
            "evaluation will look better than it is",
        )


def _short_hash(sequence: TrainingSample) -> bytes:
    return hashlib.blake2b(TrainingSample.content(sequence), digest_size=16).digest()


def _load(
    data: Any, section: str, load: Callable[..., SampleSet[SampleT]], renderer: Renderer | None
) -> SampleSet[SampleT] | Finding | None:
    """Return the samples or pairs, or why they cannot be had here."""
    remote = [source.path for source in data.sources if is_out_of_reach(source)]
    if remote:
        return Finding.note(
            f"{section}.sources",
            f"{', '.join(remote)}: not checked, because it is on the hub and was never read on this machine; it is "
            "read when the run starts",
        )
    if renderer is None:
        return None  # a finding of its own
    try:
        return load(data, renderer, section=section)
    except RollLikeError as error:
        return failed(f"{section}.sources", error)
