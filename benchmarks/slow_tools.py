"""The tools environment with a calculator that answers as a remote service does: mostly at once, sometimes late.

`benchmarks/async_rollouts.py` imports it into the processes that play episodes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

from roll_like.builtin.envs.tools import Tools

#: Seed → how many episodes of it this process has begun.
EPISODES: dict[int, Iterator[int]] = {}


class SlowTools(Tools):
    """`benchmarks/SlowTools-v0`: each turn with calls takes a lognormal time, and the reward is random.

    With random rewards every episode has an advantage and is trained on: a step's work does not depend on what the
    policy can do.

    The times depend on the seed and on the number of the episode among those of its seed, so that two runs with the
    same seeds wait for the same calls. This holds in one process: keep `env_workers.workers` at 1.

    Args:
        median_seconds: Median time of a call.
        sigma: Standard deviation of its logarithm.
        longest_seconds: Longer times are cut.
        options: Of `roll_like/Tools-v0`.
    """

    def __init__(
        self, path: str, *, median_seconds: float, sigma: float, longest_seconds: float, **options: Any
    ) -> None:
        super().__init__(path, **options)
        self._median, self._sigma, self._longest = median_seconds, sigma, longest_seconds
        self._source = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Set the task of a seed, and the times of this episode's calls."""
        number = next(EPISODES.setdefault(seed or 0, itertools.count()))
        self._source = np.random.default_rng((seed or 0, number))
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the turn; wait if it has a call."""
        observation, _, terminated, truncated, info = super().step(action)
        if info.get("tool_calls"):
            time.sleep(min(self._longest, self._source.lognormal(math.log(self._median), self._sigma)))
        reward = self._source.random() if terminated or truncated else 0.0
        return observation, reward, terminated, truncated, info


gymnasium.register("benchmarks/SlowTools-v0", entry_point=SlowTools, disable_env_checker=True)
