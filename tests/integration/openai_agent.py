"""An agent program for tests: a conversation of three turns, one of them streamed, and a helper beside it.

What it was told is written to the folder `SEEN`, in a file that is named after its seed and its first answer's id.
"""

import json
import os
from pathlib import Path

from openai import BadRequestError, OpenAI

client = OpenAI()
seed = int(os.environ["ROLL_LIKE_SEED"])
history = [{"role": "system", "content": "Talk."}, {"role": "user", "content": f"begin {seed}"}]
seen = []

first = client.chat.completions.create(model="policy", messages=history)
seen.append(first.choices[0].message.content)
history += [first.choices[0].message.to_dict(), {"role": "user", "content": "go  on 日本\n"}]

helper = [{"role": "user", "content": f"What of this?\n{seen[0]}"}]
seen.append(client.chat.completions.create(model="policy", messages=helper, max_tokens=5).choices[0].message.content)

with client.chat.completions.create(model="policy", messages=history, stream=True) as stream:
    seen.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
history += [{"role": "assistant", "content": seen[-1]}, {"role": "user", "content": "and?"}]
seen.append(client.chat.completions.create(model="policy", messages=history).choices[0].message.content)

try:
    client.chat.completions.create(model="policy", messages=history)
except BadRequestError as error:
    seen.append(error.code)

name = f"{seed}-{first.id}.json"
(Path(os.environ["SEEN"]) / name).write_text(json.dumps(seen), encoding="utf-8")
client.post("/reward", body={"reward": len(seen[0]), "success": True}, cast_to=object)
