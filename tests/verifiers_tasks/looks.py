"""Tasks that show a picture, and a harness that shows another one after the first answer."""

import base64
import struct

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult


def picture(colour: int, width: int, height: int) -> str:
    """Return a bitmap of one grey as a `data:` URL; `width` is a multiple of 4."""
    pixels = bytes([colour]) * (3 * width * height)
    head = struct.pack("<IHHIIiiHHIIiiII", 54 + len(pixels), 0, 0, 54, 40, width, height, 1, 24, *[0] * 6)
    return f"data:image/bmp;base64,{base64.b64encode(b'BM' + head + pixels).decode()}"


def shown(text: str, url: str) -> vf.UserMessage:
    image = vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url=url))
    return vf.UserMessage(content=[vf.TextContentPart(text=text), image])


class LooksTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def light(self, trace: vf.Trace) -> float:
        return float("light" in trace.last_reply)


class LooksTaskset(vf.Taskset[LooksTask, vf.TasksetConfig]):
    def load(self):
        for index in range(4):
            data = vf.TaskData(prompt=[shown("How light?", picture(60 * index, 56, 28))], name=f"grey {index}")
            yield LooksTask(data, self.config.task)


class LooksHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime):
        pass

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [message_to_wire(message) for message in data.prompt]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as client:
            for turn in range(2):
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                said = answer.raise_for_status().json()["choices"][0]["message"]
                next_one = message_to_wire(shown("And this?", picture(200 + turn, 56, 56)))
                messages += [{"role": "assistant", "content": said["content"]}, next_one]
        return ProgramResult(0, "", "")


__all__ = ["LooksHarness", "LooksTaskset"]
