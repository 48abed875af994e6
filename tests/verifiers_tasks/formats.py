"""Harnesses that are small programs: each speaks a format of requests, or asks nothing."""

import json
from typing import Literal

import verifiers.v1 as vf

PROGRAM = """
import json, sys, urllib.request
endpoint, secret, path, body = sys.argv[1:]
for turn in json.loads(body):
    headers = {"Authorization": "Bearer " + secret, "x-api-key": secret, "Content-Type": "application/json"}
    request = urllib.request.Request(endpoint.removesuffix("/v1") + path, json.dumps(turn).encode(), headers)
    print(urllib.request.urlopen(request).read().decode())
"""


class FormatsHarnessConfig(vf.HarnessConfig):
    asks: Literal["responses", "messages", "twice", "nothing"] = "responses"


class FormatsHarness(vf.Harness[FormatsHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime):
        pass

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        prompt = data.prompt_text
        bodies = {
            "responses": ("/v1/responses", [{"model": ctx.model, "input": prompt}]),
            "messages": (
                "/v1/messages",
                [{"model": ctx.model, "max_tokens": 64, "messages": [{"role": "user", "content": prompt}]}],
            ),
            "twice": ("/v1/responses", [{"model": ctx.model, "input": prompt}] * 2),
            "nothing": ("", []),
        }
        path, body = bodies[self.config.asks]
        return await runtime.run(["python3", "-c", PROGRAM, endpoint, secret, path, json.dumps(body)], {})


__all__ = ["FormatsHarness"]
