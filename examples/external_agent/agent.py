"""An agent without training code: it sends a sum to a model behind an OpenAI-compatible API and posts a reward."""

import os
import random

import httpx
from openai import OpenAI

client = OpenAI()  # finds OPENAI_BASE_URL and OPENAI_API_KEY
draw = random.Random(int(os.environ["ROLL_LIKE_SEED"]))  # all episodes of a group get the same task
a, b = draw.randint(1, 9), draw.randint(1, 9)

messages = [
    {"role": "system", "content": "Answer with the number alone."},
    {"role": "user", "content": "2 + 2"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "7 + 5"},
    {"role": "assistant", "content": "12"},
    {"role": "user", "content": f"{a} + {b}"},
]
reward = 0.0
for worth in (1.0, 0.5):
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    if answer.content.strip() == str(a + b):
        reward = worth
        break
    messages += [answer.to_dict(), {"role": "user", "content": f"Wrong. Try again: {a} + {b}"}]

client.post("/reward", body={"reward": reward, "success": reward == 1.0}, cast_to=httpx.Response)
