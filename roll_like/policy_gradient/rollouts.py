"""The source of a run's groups, by its schedule."""

from __future__ import annotations

from roll_like.config.rollout import AsyncSchedule
from roll_like.config.sampling import PolicyGradientConfig
from roll_like.policy_gradient.workers import Workers
from roll_like.rollout.asynchronous import AsyncRollouts
from roll_like.rollout.source import GroupSource, KeptRollouts, RolloutSource, SynchronousRollouts
from roll_like.run.state import RunContext


def start_rollouts(
    config: PolicyGradientConfig, run: RunContext, workers: Workers, source: GroupSource
) -> RolloutSource:
    """Return what brings the groups of each step.

    Args:
        config: The run's configuration.
        run: What it is built on; closes the source before the engines.
        workers: Trainer and engines; asynchronous rollouts follow the versions that they push.
        source: Where groups come from.
    """
    schedule, checkpoint = config.rollout.schedule, config.checkpoint
    written = checkpoint.every > 0 or checkpoint.every_minutes > 0
    if not isinstance(schedule, AsyncSchedule):
        synchronous = SynchronousRollouts(
            source, config.rollout, seed=config.seed, runner=workers.runner, progress=workers.progress
        )
        return KeptRollouts(synchronous, until_checkpoint=written)
    rollouts = AsyncRollouts(
        source,
        config.rollout,
        schedule,
        steps=config.total_steps,
        seed=config.seed,
        runner=workers.runner,
        progress=workers.progress,
    )
    run.stack.callback(rollouts.close)
    mapping = config.resources.device_mapping
    workers.gpu_sharing.takes_turns = mapping.training.overlaps(mapping.inference)
    workers.on_push.append(rollouts.published)
    return KeptRollouts(rollouts, until_checkpoint=written)
