"""A harness whose program runs what the policy says as a shell command, where the task is."""

import verifiers.v1 as vf

PROGRAM = """
import json, subprocess, sys, urllib.request
endpoint, secret, model, prompt = sys.argv[1:]
body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
headers = {"Authorization": "Bearer " + secret, "Content-Type": "application/json"}
request = urllib.request.Request(endpoint + "/chat/completions", json.dumps(body).encode(), headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
subprocess.run(["sh", "-c", said])
"""


class ShellsHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False

    async def setup(self, runtime):
        pass

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        asked = ["python3", "-c", PROGRAM, endpoint, secret, ctx.model, data.prompt_text]
        return await runtime.run(asked, {})


__all__ = ["ShellsHarness"]
