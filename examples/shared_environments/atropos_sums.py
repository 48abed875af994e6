"""Sums as an environment of Atropos, in the forms that its environments have."""

from __future__ import annotations

import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup, ScoredDataItem

QUESTION = "What is 40 + {}?"


class Sums(BaseEnv):  # type: ignore[misc]
    """Scores a group at once, and drops one in which all have the same score."""

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return BaseEnvConfig(group_size=8, tokenizer_name="nobody/nothing", max_token_length=64), []

    async def setup(self) -> None:
        self.iter = 0
        self.rows = list(range(10))

    async def get_next_item(self) -> int:
        self.iter += 1
        return self.rows[(self.iter - 1) % len(self.rows)]

    async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answers = await managed.chat_completion(
                messages=[{"role": "user", "content": QUESTION.format(item)}],
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup()
        group["tokens"] = [node.tokens for node in nodes]
        group["masks"] = [node.masked_tokens for node in nodes]
        group["scores"] = [1.0 if str(40 + item) in each.message.content else -1.0 for each in answers.choices]
        return (None if len(set(group["scores"])) == 1 else group), []

    async def evaluate(self, *_: Any, **__: Any) -> None:
        """Nothing."""


class Guesses(Sums):
    """An episode of two turns, scored by itself."""

    async def get_next_item(self) -> int:
        return random.randint(0, 9)

    async def collect_trajectory(self, item: int) -> tuple[ScoredDataItem, list[Any]]:
        messages = [{"role": "user", "content": QUESTION.format(item)}]
        async with self.server.dedicated_server() as server:
            for told in ("Again.", "Done."):
                answer = await server.chat_completion(messages=messages, max_tokens=64)
                text = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": told}]
        return ScoredDataItem(tokens=[1], masks=[1], scores=float(str(40 + item) in text)), []

    collect_trajectories = BaseEnv.collect_trajectories
