"""An agent that uses nothing but Python's standard library, for tests: python plain_agent.py WHAT_TO_DO …"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

HISTORY = [{"role": "user", "content": f"seed {os.environ.get('ROLL_LIKE_SEED')}"}]


def call(path: str, body: object | None = None) -> dict:
    """Ask the proxy."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def turn() -> str:
    """Take a turn of one conversation."""
    message = call("chat/completions", {"model": "policy", "messages": HISTORY})["choices"][0]["message"]
    HISTORY.extend([message, {"role": "user", "content": "and?"}])
    return str(message["content"])


def endless(_: str) -> None:
    """Take turns until there are no more."""
    while True:
        turn()


def show_task(_: str) -> None:
    """Say what the episode is about."""
    assert call("task") == json.loads(os.environ["ROLL_LIKE_TASK"])
    print(json.dumps(call("task")), file=sys.stderr)


def show_environment(_: str) -> None:
    """Say what of the environment a run has to do with, and where the program was started."""
    names = ("OPENAI_", "ROLL_LIKE_", "NO_PROXY", "MINE")
    print(json.dumps({name: value for name, value in os.environ.items() if name.startswith(names)}), file=sys.stderr)
    print(os.getcwd(), file=sys.stderr)


def start_child(kind: str) -> None:
    """Start one of the same group, one in a session of its own, or one out of reach, without the environment."""
    alone = {"session": {"start_new_session": True}, "escaped": {"start_new_session": True, "env": {}}}
    child = subprocess.Popen(["/bin/sleep", "60"], **alone.get(kind, {}))
    print(f"child {child.pid}", file=sys.stderr, flush=True)


#: What an argument `name=value` of the command line does.
ACTS = {
    "turn": lambda _: turn(),
    "endless": endless,
    "reward": lambda value: call("reward", {"reward": float(value), "success": float(value) > 0}),
    "answer": lambda value: call("reward", {"answer": value}),
    "task": show_task,
    "environment": show_environment,
    "say": lambda value: print(value, file=sys.stderr, flush=True),
    "flood": lambda value: print("x" * int(value)),
    "sleep": lambda value: time.sleep(float(value)),
    "stubborn": lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "child": start_child,
    "exit": lambda value: sys.exit(int(value)),
}

if __name__ == "__main__":
    for argument in sys.argv[1:]:
        name, _, value = argument.partition("=")
        ACTS[name](value)
