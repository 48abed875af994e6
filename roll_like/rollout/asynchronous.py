"""Asynchronous rollouts behind the same `collect`: groups are sampled and scored while the policy is trained."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from roll_like.cluster.driver_loop import DriverLoop
from roll_like.config.rollout import AsyncSchedule, GroupRolloutConfig
from roll_like.inference.interface import derived_seed
from roll_like.rollout.collection import Collected, GroupStream, SampleProgress
from roll_like.rollout.source import GroupSource
from roll_like.rollout.staleness import StalenessManager
from roll_like.rollout.storage import read_groups, write_groups
from roll_like.types import Group, Scored
from roll_like.values import Last, Mean, Metric, Sum

#: Where a checkpoint has the groups that wait to be trained.
BUFFER = "rollouts"


class AsyncRollouts:
    """Brings a step's groups out of a stream that never stops; waits only for those that are missing.

    The stream runs on the driver's event loop. Every call from the pipeline's thread goes through the loop, so that one
    thread changes the stream.

    Args:
        source: Where groups come from.
        config: The `rollout` section.
        schedule: Its `schedule`.
        steps: Steps of the whole run.
        seed: Seed of the run.
        progress: Called with (samples that are ready, samples of a step) while a step waits for them.
    """

    def __init__(
        self,
        source: GroupSource,
        config: GroupRolloutConfig,
        schedule: AsyncSchedule,
        *,
        steps: int,
        seed: int,
        runner: DriverLoop,
        progress: SampleProgress,
    ) -> None:
        self._order = source.order
        self._figures = source.step_figures
        self._begin_step = source.begin_step
        self._config = config
        self._seed = seed
        self._runner = runner
        self._progress = progress
        self._staleness = StalenessManager(
            groups=config.groups,
            max_staleness=schedule.max_staleness,
            ahead=schedule.ahead,
            batches=steps,
            max_filtered=math.floor(config.groups * config.max_oversampling) - config.groups,
        )
        self._stream = GroupStream(
            source.make_runner(seed if config.seeded else None, self._show),
            source.tasks(),
            self._staleness,
            source.accept,
            stall_seconds=schedule.stall_seconds,
        )
        self._discarded = 0
        self._restored: Mapping[str, Any] | None = None
        self._buffer: list[Group[Scored]] = []
        self._engines = source.engines
        self._replicas = self._engines.replicas
        self._began, self._busy = time.monotonic(), 0.0

    def collect(self, step: int) -> Collected:
        """Return the groups of a step, in an order that depends on the step's seed only.

        Raises:
            GenerationError: More samples were lost to failures than `rollout.max_failure_fraction`, or nothing has
                ended for `stall_seconds`. What a group raised meanwhile is raised here.
        """
        collected = self._runner.wait_for(self._collect(step))
        collected.refuse_too_many_failures(self._config.max_failure_fraction, f"step {step + 1}")
        return collected

    def published(self, version: int) -> None:
        """Note that the engines sample with a new version, and start the groups it makes room for."""
        self._runner.run(_call(partial(self._publish, version)))

    def state(self) -> dict[str, Any]:
        """Return the data position, the groups that run, and which are ready; `save` writes those."""
        return self._runner.run(_call(self._snapshot))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, as soon as `load` has brought the groups that were ready."""
        self._order.load_state(state["order"])
        self._restored = state

    def save(self, directory: Path) -> None:
        """Write the groups that were ready when `state` was last called."""
        write_groups(directory / BUFFER, self._buffer)

    def load(self, directory: Path) -> None:
        """Read what `save` wrote; a checkpoint of a synchronous run has no groups."""
        assert self._restored is not None, "`load_state` comes first"
        stream = self._restored.get("stream")
        if stream is None:
            stream = StalenessManager.beginning(self._restored["returned"])
            groups: list[Group[Scored]] = []
        else:
            groups = read_groups(directory / BUFFER)
        late = self._runner.run(_call(partial(self._stream.restore, stream, groups, self._order.find)))
        self._discarded += len(late)

    def close(self) -> None:
        """Stop every group that runs."""
        self._runner.run(self._stream.close())

    def _publish(self, version: int) -> None:
        if self._staleness.version == 0:  # the first version of this process: a step was trained from each before it
            self._staleness.taken = version - 1
        self._stream.published(version)

    async def _collect(self, step: int) -> Collected:
        began = time.monotonic()
        self._begin_step(step)
        groups = [entry.group for entry in await self._stream.batch() if entry.group is not None]
        order = np.random.default_rng(derived_seed(self._seed, step)).permutation(len(groups))
        collected = self._stream.collected(groups[index] for index in order)
        return replace(collected, metrics=self._metrics(collected, began))

    def _metrics(self, collected: Collected, began: float) -> dict[str, Metric]:
        """Return the figures of the time since the last step's groups were there."""
        now, busy = time.monotonic(), self._engines.busy_seconds()
        seconds, engines = max(now - self._began, 1e-9), (busy - self._busy) / self._replicas
        self._began, self._busy = now, busy
        discarded, self._discarded = self._discarded, 0
        return {
            **self._figures(),
            "schedule/ready": Last(float(self._stream.ready)),
            "schedule/open": Last(float(self._stream.running)),
            "schedule/filtered": Sum(float(sum(bool(group.samples) for group in collected.rejected))),
            "schedule/discarded": Sum(float(discarded)),
            "time/blocked": Sum(self._stream.blocked_seconds()),
            "time/engines": Sum(engines),
            "util/engines": Mean(min(engines / seconds, 1.0)),  # both clocks are read one after the other
            "util/trainer_wait": Mean((now - began) / seconds),
        }

    def _snapshot(self) -> dict[str, Any]:
        stream, self._buffer = self._stream.snapshot()
        return {
            "order": self._order.state(),
            "returned": [task.task_id for task in self._stream.left()],  # a synchronous run continues with these
            "acceptance": 1.0,
            "stream": stream,
        }

    def _show(self, done: int, total: int) -> None:
        del done, total  # of all groups since the start of the run
        if self._stream.waiting:
            samples, groups = self._config.samples_per_group, self._config.groups
            self._progress(min(self._stream.ready, groups) * samples, groups * samples)


async def _call(function: Callable[[], Any]) -> Any:
    """Run a function on the event loop."""
    return function()
