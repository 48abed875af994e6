"""Rules of `rollout.schedule`: what cannot be combined with samples of older policies, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from roll_like.config.base import Violation
from roll_like.config.inference import EngineConfig, engines_share_gpus
from roll_like.config.rollout import AsyncSchedule
from roll_like.config.run import Rule
from roll_like.config.sampling import PolicyGradientConfig, SamplingRunConfig
from roll_like.registry import LOSSES


def only_synchronous(reason: str) -> Rule:
    """Return a rule against `schedule: async`, for pipelines that cannot use it.

    Args:
        reason: Why not, and what to do instead.
    """

    def refuse(config: SamplingRunConfig) -> Iterator[Violation]:
        if isinstance(config.rollout.schedule, AsyncSchedule):
            yield Violation(("rollout", "schedule", "type"), reason)

    return refuse


def _asynchronous(
    rule: Callable[[PolicyGradientConfig, AsyncSchedule], Iterator[Violation]],
) -> Callable[[PolicyGradientConfig], Iterator[Violation]]:
    """Return a rule that holds for asynchronous schedules."""

    def when_asynchronous(config: PolicyGradientConfig) -> Iterator[Violation]:
        if isinstance(config.rollout.schedule, AsyncSchedule):
            yield from rule(config, config.rollout.schedule)

    return when_asynchronous


@_asynchronous
def staleness_is_corrected(config: PolicyGradientConfig, schedule: AsyncSchedule) -> Iterator[Violation]:
    """Yield a loss that takes samples of older policies for the current policy's own."""
    algorithm = config.algorithm
    old = f"with rollout.schedule: async samples are up to {schedule.max_staleness} versions old, and"
    if algorithm.old_logprobs == "behaviour" and not LOSSES.get(algorithm.loss.type).uses_old_policy(algorithm.loss):
        yield Violation(
            ("algorithm", "old_logprobs"),
            f"{old} `behaviour` leaves their correction to the loss's ratio, which {algorithm.loss.type} does not use; "
            "set auto with algorithm.correction.type: truncated (or masked)",
        )
    if algorithm.correction.type == "none" and algorithm.old_logprobs != "behaviour":
        yield Violation(
            ("algorithm", "correction", "type"),
            f"{old} `none` treats them as the current policy's own, which is biased; set truncated (or masked), or "
            "algorithm.old_logprobs: behaviour",
        )


@_asynchronous
def shared_devices_can_pause(config: PolicyGradientConfig, schedule: AsyncSchedule) -> Iterator[Violation]:
    """Yield an engine that cannot freeze requests while the trainer works on its devices."""
    del schedule
    mapping = config.resources.device_mapping
    if mapping.training.overlaps(mapping.inference) and not config.inference.capabilities.pause:
        yield Violation(
            ("rollout", "schedule", "type"),
            f"trainer and engines share the devices {mapping.inference}, so requests under way have to pause while it "
            f"trains, and the engine {config.inference.type!r} cannot; give resources.device_mapping.inference devices "
            "of its own, or set type: sync",
        )
    elif engines_share_gpus(config.resources) and not config.inference.sleeps(shares_gpus=True):
        yield Violation(
            ("rollout", "schedule", "type"),
            f"engines share the GPUs {mapping.inference} with models, and keep their memory and requests there while "
            f"these compute ({_awake(config.inference)}); give resources.device_mapping.inference GPUs of its "
            "own, or set type: sync",
        )


def _awake(inference: EngineConfig) -> str:
    if inference.capabilities.sleep:
        return "inference.sleep: false"
    return f"the engine {inference.type!r} cannot free it"


@_asynchronous
def groups_are_whole(config: PolicyGradientConfig, schedule: AsyncSchedule) -> Iterator[Violation]:
    """Yield redundant samples where a slow sample costs nothing."""
    del schedule
    if getattr(config.rollout, "redundant_samples", 0):
        yield Violation(
            ("rollout", "redundant_samples"),
            "keeping the first samples of a group prefers short answers, and with rollout.schedule: async no step "
            "waits for the slow ones; set it to 0",
        )


#: What holds for every run that can be asynchronous.
SCHEDULE_RULES = (staleness_is_corrected, shared_devices_can_pause, groups_are_whole)
