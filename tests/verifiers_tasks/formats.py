"""Harnesses that are small programs: each speaks a format of requests, or asks nothing."""

import json
from typing import Literal

import verifiers.v1 as vf

PROGRAM = """
import json, sys, urllib.request
endpoint, secret, asked = sys.argv[1:]
for path, turn in json.loads(asked):
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
        messages = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        response = ("/v1/responses", {"model": ctx.model, "input": prompt})
        asked = {
            "responses": [response],
            "messages": [("/v1/messages/count_tokens", messages), ("/v1/messages", {**messages, "max_tokens": 64})],
            "twice": [response] * 2,
            "nothing": [],
        }[self.config.asks]
        return await runtime.run(["python3", "-c", PROGRAM, endpoint, secret, json.dumps(asked)], {})


__all__ = ["FormatsHarness"]
