"""One process of the reward pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from roll_like.config.load import import_plugins
from roll_like.config.rewards import RewardsConfig
from roll_like.registry import REWARDS
from roll_like.rewards.base import Reward, RewardConfig
from roll_like.rewards.scorer import Scorer
from roll_like.types import Group, Scored, Trajectory


class RewardWorker:
    """Scores groups in a process of its own; made to be an actor, usable without one.

    Any number of groups may be scored at a time. A reward that holds Python's interpreter lock (a
    runaway regular expression) stops the whole process, its time-outs too: whoever waits for a
    worker should give a group `timeout_seconds` for each attempt, and replace the process then.

    Args:
        config: The `rewards` section.
        imports: Modules to import first; they register plugins.
        plugins: Rewards to register that no module can be imported for (see `notebook_rewards`).
        domains: Names of the rewards of each domain that names its own.

    Raises:
        PluginError: A module cannot be imported, or a reward is unknown.
        ConfigError: Two rewards have the same name.
        RewardError: A reward cannot be built.
    """

    def __init__(
        self,
        config: RewardsConfig,
        imports: tuple[str, ...] = (),
        plugins: Mapping[str, type[Reward]] | None = None,
        domains: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        import_plugins(imports)
        for name, plugin in (plugins or {}).items():
            REWARDS.register(name)(plugin)
        configs = cast(Sequence[RewardConfig], config.use)  # `register_reward` takes no other
        self._scorer = Scorer(configs, timeout_seconds=config.timeout_seconds, retries=config.retries, domains=domains)

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        """Return the group with its results; samples that could not be scored are in its failures.

        Raises:
            ConfigError: No reward is for this group's source.
        """
        return await self._scorer.score_group(group)

    async def healthy(self) -> bool:
        """Return False when a reward hangs in a thread, so that this process should be replaced."""
        return self._scorer.hung == 0

    def close(self) -> None:
        """Free what the rewards hold."""
        self._scorer.close()


def notebook_rewards(configs: Sequence[RewardConfig]) -> dict[str, type[Reward]]:
    """Return the used rewards that are defined in `__main__`: other processes cannot import them.

    They can be sent to a `RewardWorker` as `plugins`, because cloudpickle (as Ray uses it) sends
    classes of `__main__` by value.
    """
    used = {config.type: REWARDS.get(config.type) for config in configs}
    return {name: plugin for name, plugin in used.items() if plugin.__module__ == "__main__"}
