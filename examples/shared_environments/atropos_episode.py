"""Plays one episode of an Atropos environment as an agent program: `python atropos_episode.py MODULE:CLASS TOKENIZER`.

The run samples, and records what it sampled, so the environment needs no tokens and no trainer of Atropos. It plays a
group of one. Many environments drop groups with equal scores, as those of one are: their scores are taken nevertheless.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import sys
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

os.environ["ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"] = "1"  # its tokens are not trained on
from atroposlib.envs.server_handling.server_baseline import APIServerConfig


class ScoredGroup(dict[str, Any]):
    """What an environment calls `ScoredDataGroup`; remembers the latest."""

    latest: ScoredGroup | None = None

    def __init__(self, *parts: Any, **fields: Any) -> None:
        super().__init__(*parts, **fields)
        ScoredGroup.latest = self


async def score(module: str, name: str, tokenizer: str, seed: int) -> float:
    """Play an episode and return its score.

    Raises:
        ValueError: The environment did not score it.
    """
    kind = getattr(importlib.import_module(module), name)
    for home in {sys.modules[each.__module__] for each in kind.__mro__}:
        if hasattr(home, "ScoredDataGroup"):
            vars(home)["ScoredDataGroup"] = ScoredGroup
    config, _ = kind.config_init()
    config = config.model_copy(update={"group_size": 1, "use_wandb": False, "tokenizer_name": tokenizer})
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    # its health check would ask the policy something once a second
    server = APIServerConfig(base_url=url, api_key=key, model_name="policy", health_check=False)
    env = kind(config, [server], slurm=False)
    await env.setup()
    random.seed(seed)
    env.iter = seed  # of those that walk through a dataset
    group, _ = await env.collect_trajectories(await env.get_next_item())
    scores = (group or ScoredGroup.latest or {}).get("scores", [])
    if len(scores) != 1:
        raise ValueError(f"the environment gave {len(scores)} scores to one episode")
    return float(scores[0])


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    reward = asyncio.run(score(module, name, sys.argv[2], int(os.environ["ROLL_LIKE_SEED"])))
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({"reward": reward}).encode()
    build_opener(ProxyHandler({})).open(Request(os.environ["OPENAI_BASE_URL"] + "/reward", body, headers))
