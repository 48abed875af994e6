"""Everything about a configuration that can be known without starting Ray, in seconds.

Problems are collected, so that one attempt shows all of them. What depends on the network or on hardware that
another machine has is a warning or a note, not an error: a configuration for GPUs is checked on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias, TypeVar

from roll_like.check.disk import DiskUse
from roll_like.check.findings import DEBUG, Finding, Report, show
from roll_like.check.gpu_plan import check_gpus, gpu_report, no_gpu_here
from roll_like.check.hub import all_here, check_judge
from roll_like.check.machine import (
    check_engine,
    check_environment,
    check_hardware,
    check_output,
    check_replay,
    check_settings,
    doubtful_rates,
    idle_devices,
    long_masks,
    seeds_across_updates,
    sleep_without_effect,
    traces_without_effect,
)
from roll_like.check.model import (
    check_adapters,
    check_critic,
    check_draft,
    check_engines,
    check_images,
    check_kept,
    check_model,
    check_reference,
    check_routes,
    check_tokenizer,
    check_window,
    role_shapes,
)
from roll_like.check.plan import Plan, plan
from roll_like.check.tokens import check_reasoning, check_tokens, ends_of
from roll_like.config.run import RunConfig
from roll_like.config.sampling import PolicyGradientConfig, SamplingRunConfig
from roll_like.data.chat import Renderer
from roll_like.errors import ConfigError, shortened
from roll_like.models.load import renderer_of
from roll_like.models.precision import auto_precision, settled
from roll_like.models.shape import ModelShape

ConfigT = TypeVar("ConfigT", bound=RunConfig)
SamplingT = TypeVar("SamplingT", bound=SamplingRunConfig)

#: What a pipeline checks besides: given the configuration, what renders messages (None where it cannot be had) and the
#: report.
Further: TypeAlias = "Callable[[SamplingT, Renderer | None, Report], Iterator[Finding]]"


def check(
    config: SamplingT,
    further: Further[SamplingT],
    planned: Callable[[SamplingT, Mapping[str, ModelShape]], Plan] = plan,
) -> Report:
    """Return every problem of a run that samples, as far as it can be known before, and its plan."""

    def of_policies(
        config: SamplingT, renderer: Renderer | None, shape: ModelShape | None, report: Report
    ) -> Iterator[Finding]:
        yield from check_window(config, shape, "rollout")
        yield from check_engines(config, shape)
        yield from check_reference(config, getattr(config, "reference", None), shape)
        if isinstance(config, PolicyGradientConfig):
            yield from check_critic(config, shape)
        yield from check_judge(config)
        if config.replay is None:
            yield from further(config, renderer, report)
            yield from check_engine(config)
        else:
            yield from check_replay(config, config.replay)
        yield from check_settings(config, report.plan)

    return check_run(config, planned, of_policies)


def check_run(
    config: ConfigT,
    planned: Callable[[ConfigT, Mapping[str, ModelShape]], Plan],
    further: Callable[[ConfigT, Renderer | None, ModelShape | None, Report], Iterator[Finding]],
) -> Report:
    """Return every problem of any run that can be known before it, and its plan.

    Args:
        planned: Makes its plan; given the sizes of the models, by role.
        further: Yields what is wrong beside model, tokenizer, disk and hardware.
    """
    precision, config = auto_precision(config), settled(config)
    findings: list[Finding] = [*check_environment()]
    model, shape = check_model(config, findings)
    tokenizer = check_tokenizer(config, model, findings)
    renderer, ends = None, None
    if tokenizer is not None:
        images = check_images(config, model, findings)
        path = Path((model or config.model).path)
        renderer = renderer_of(config.model, tokenizer, path, images=images)
        ends = ends_of(config, renderer, None if model is None else path)
        findings += check_tokens(config, renderer, ends)
    here = model is not None and all_here(config)
    shapes = role_shapes(config, shape)
    report = Report(planned(config, shapes), findings, complete=here, precision=precision, ends=ends or ())
    report.sized = shape is not None
    findings += check_draft(config, model, shapes)
    findings += further(config, renderer, shape, report)
    if isinstance(config, SamplingRunConfig):
        if renderer is not None:
            findings += check_reasoning(config, renderer)
        findings += check_routes(config, model)
        findings += check_kept(config)
        if config.replay is None:
            findings += check_adapters(config, model)
    report.disk = None if shape is None else DiskUse.of(config, shape)
    # a machine without the weights is not the one that will write checkpoints
    findings += check_output(config, None if model is None else report.disk)
    findings += check_hardware(config, report.plan)
    report.gpus = gpu_report(config, report.plan, shapes)
    if report.gpus is not None:
        findings += check_gpus(config, report.gpus)
    findings += no_gpu_here(config, report.gpus)
    findings += idle_devices(report.plan)
    findings += doubtful_rates(config, report.plan)
    findings += long_masks(config)
    findings += sleep_without_effect(config)
    findings += traces_without_effect(config)
    findings += seeds_across_updates(config)
    return report


def refuse_errors(report: Report) -> Report:
    """Return a report without errors as it is.

    Raises:
        ConfigError: Every error, in one message.
    """
    errors = [shortened(f"{error.key}: {error.message}", DEBUG) for error in report.errors]
    if len(errors) == 1:
        raise ConfigError(errors[0])
    if errors:
        listed = (f"  {number}. {error}" for number, error in enumerate(errors, 1))
        raise ConfigError("\n".join([f"{len(errors)} problems; nothing was started:", *listed]))
    return report


__all__ = ["Finding", "Report", "check", "check_run", "refuse_errors", "show"]
