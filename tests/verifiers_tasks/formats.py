"""Harnesses that are small programs: each speaks a format of requests, or asks nothing."""

import json
from typing import Literal

import verifiers.v1 as vf

PROGRAM = """
import json, socket, sys, time, urllib.request
endpoint, secret, asked, port, seconds = sys.argv[1:]
if port != "0":  # of a server beside the container, at the address of its gateway
    routes = [line.split() for line in open("/proc/net/route")]
    gateway = next(bytes.fromhex(route[2])[::-1] for route in routes if route[1] == "00000000")
    try:
        socket.create_connection((socket.inet_ntoa(gateway), int(port)), timeout=2).close()
    except OSError as error:
        print(error)
for path, turn in json.loads(asked):
    headers = {"Authorization": "Bearer " + secret, "x-api-key": secret, "Content-Type": "application/json"}
    request = urllib.request.Request(endpoint.removesuffix("/v1") + path, json.dumps(turn).encode(), headers)
    print(urllib.request.urlopen(request).read().decode())
    time.sleep(float(seconds))
"""


class FormatsHarnessConfig(vf.HarnessConfig):
    asks: Literal["responses", "messages", "twice", "nothing", "gateway", "slowly"] = "responses"
    port: int = 0


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
            "gateway": [response],
            "slowly": [response],
            "nothing": [],
        }[self.config.asks]
        seconds = "100" if self.config.asks == "slowly" else "0"
        program = ["python3", "-c", PROGRAM, endpoint, secret, json.dumps(asked), str(self.config.port), seconds]
        return await runtime.run(program, {})


__all__ = ["FormatsHarness"]
