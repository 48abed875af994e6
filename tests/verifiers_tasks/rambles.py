"""A harness without a program: it talks to the endpoint itself, shortens its history and asks sub-agents."""

import asyncio

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class RamblesHarnessConfig(vf.HarnessConfig):
    turns: int = 3
    sums_up_after: int = 0
    sub_agents: int = 0
    seconds: float = 0.0
    replies: str = "go on"


class RamblesHarness(vf.Harness[RamblesHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime):
        pass

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as client:

            async def ask(messages):
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                return answer.raise_for_status().json()["choices"][0]["message"]

            messages = [{"role": "user", "content": data.prompt_text}]
            for turn in range(self.config.turns):
                said = await ask(messages)
                messages += [
                    {"role": "assistant", "content": said["content"]},
                    {"role": "user", "content": self.config.replies},
                ]
                if self.config.sub_agents:
                    asked = [
                        [
                            {"role": "system", "content": f"You help {index}."},
                            {"role": "user", "content": f"turn {turn}"},
                        ]
                        for index in range(self.config.sub_agents)
                    ]
                    answers = await asyncio.gather(*map(ask, asked))
                    messages[-1]["content"] = "; ".join(answer["content"] for answer in answers)
                if self.config.sums_up_after and (turn + 1) % self.config.sums_up_after == 0:
                    messages = [{"role": "user", "content": f"So far you said: {said['content']}. Go on."}]
                await asyncio.sleep(self.config.seconds)
        return ProgramResult(0, "", "")


__all__ = ["RamblesHarness"]
