"""A proxy with one open episode and an `openai` client of it, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import httpx
from chat_templates import renderer
from fake_policy import FakePolicy, episode_settings
from openai import AsyncOpenAI

from roll_like.agents.proxy import Proxy
from roll_like.agents.proxy_episode import ProxyEpisode
from roll_like.data.chat import Renderer
from roll_like.inference.interface import GenerateRequest

CHATML = renderer("chatml")
HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass
class Rig:
    """A proxy, one open episode, and a client of it."""

    proxy: Proxy
    policy: FakePolicy
    episode: ProxyEpisode
    client: AsyncOpenAI
    http: httpx.AsyncClient

    async def ask(self, *history: str, **more: Any) -> Any:
        """Ask with a history of user, assistant, user, …."""
        messages: Any = [
            {"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(history)
        ]
        return await self.client.chat.completions.create(model="any", messages=messages, **more)

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Send a request by hand."""
        headers = {"Authorization": f"Bearer {self.episode.key}", **headers}
        return await self.http.post(f"{self.episode.base_url}/{path}", json=body, headers=headers)

    async def reward(self, value: float, **more: Any) -> Any:
        return (await self.post("reward", {"reward": value, **more})).raise_for_status().json()


@asynccontextmanager
async def rig(
    *says: str | Exception | Callable[[GenerateRequest], str],
    render: Renderer = CHATML,
    retries: int = 0,
    shown: Any = None,
    apart: bool = False,
    models: tuple[str, ...] = (),
    **settings: Any,
) -> AsyncIterator[Rig]:
    policy = FakePolicy(render, says[0] if says and callable(says[0]) else cast(Any, says))
    # the clients' own timeouts are shorter than the test's
    async with Proxy(policy, render) as proxy, httpx.AsyncClient(trust_env=False, timeout=10) as http:
        episode = proxy.open(episode_settings(**settings), shown, reasoning_apart=apart, models=models)
        client = AsyncOpenAI(
            base_url=episode.base_url, api_key=episode.key, max_retries=retries, http_client=http, timeout=10
        )
        yield Rig(proxy, policy, episode, client, http)
        await episode.close()


async def until(true: Any) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)
