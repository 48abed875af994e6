"""An agent program for tests: shows the policy a screenshot in each of two turns, the second by a tool's result."""

import base64
import io
import os

from openai import OpenAI
from PIL import Image

client = OpenAI()
seed = int(os.environ["ROLL_LIKE_SEED"])


def screenshot(number: int) -> dict[str, object]:
    buffer = io.BytesIO()
    Image.new("RGB", (56, 28), (50 * number, 7 * seed % 256, 9)).save(buffer, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


history: list[object] = [{"role": "user", "content": [{"type": "text", "text": "Look."}, screenshot(1)]}]
said = client.chat.completions.create(model="policy", messages=history).choices[0].message
history += [said.to_dict(), {"role": "tool", "tool_call_id": "c", "content": [screenshot(2)]}]
answer = client.chat.completions.create(model="policy", messages=history).choices[0].message.content
client.post("/reward", body={"reward": (answer or "").count("e") + len(answer or "") / 50}, cast_to=object)
