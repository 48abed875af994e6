"""Environments that an OpenEnv server plays: one session over a WebSocket for each episode."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from roll_like.builtin.envs.extras import need
from roll_like.envs import FreeText, answer_of
from roll_like.errors import EnvError

ENV_ID = "roll_like/OpenEnv-v0"
PACKAGE = "websockets>=15"
#: Longest connection, and longest wait for a schema. Seconds.
CONNECT_SECONDS = 30.0
#: Longest wait for a server to close a session. Seconds.
CLOSE_SECONDS = 2.0
#: What a server says of an action that does not fit its schema.
INVALID = "VALIDATION_ERROR"


class OpenEnv(gymnasium.Env[str, str]):
    """`roll_like/OpenEnv-v0`.

    The server's schema of actions is in the system prompt. An answer is an action as JSON, or the value of its only
    required field. What the server refuses as an action is the policy's mistake: it is told so, and goes on.

    Args:
        base_url: Address of the server, such as `http://127.0.0.1:8000`.
        reset: What else the server's `reset` gets, beside the seed.
        invalid_penalty: Reward of an answer that is no action.

    Raises:
        EnvError: The server cannot be reached, or websockets is not installed.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(self, base_url: str, *, reset: Mapping[str, Any] | None = None, invalid_penalty: float = 0.0) -> None:
        self._connect = need("websockets.sync.client", PACKAGE, ENV_ID).connect
        exceptions = need("websockets.exceptions", PACKAGE, ENV_ID)
        self._closed = exceptions.ConnectionClosed
        self._failures = (OSError, exceptions.WebSocketException)
        self.observation_space = FreeText()
        self.action_space = FreeText()
        self._base_url = base_url.rstrip("/")
        self._reset = dict(reset or {})
        self._penalty = invalid_penalty
        self._stack = ExitStack()
        self._session: Any = None
        self._open = False
        self._schema = self._action_schema()
        self.system_prompt = f"Answer with an action as JSON of this schema: {json.dumps(self._schema)}"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode in a session of its own.

        Raises:
            EnvError: The server refused.
        """
        super().reset(seed=seed, options=options)
        self.close()
        try:
            address = self._base_url.replace("http", "ws", 1) + "/ws"
            connection = self._connect(address, open_timeout=CONNECT_SECONDS, max_size=None, proxy=None)
            self._session = self._stack.enter_context(connection)
        except self._failures as error:
            raise self._unreachable(error) from error
        result = self._ask("reset", {**self._reset, **({} if seed is None else {"seed": seed})})
        self._open = not result["done"]
        return _text(result), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send an action.

        Raises:
            ResetNeeded: The episode is over.
            EnvError: The server failed.
        """
        if not self._open:
            raise ResetNeeded("the episode is over; call reset() first")
        read = schema_action(answer_of(action), self._schema)
        result = None if read is None else self._ask("step", read)
        if result is None:
            return "That is no action of the schema.", self._penalty, False, False, {"invalid_action": True}
        self._open = not result["done"]
        return _text(result), float(result.get("reward") or 0.0), bool(result["done"]), False, {}

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            with suppress(*self._failures):  # the server may be gone
                self._session.send(json.dumps({"type": "close"}))
                self._session.recv(timeout=CLOSE_SECONDS)  # it closes; where the other side does, it logs an error
            self._session = None
        self._stack.close()

    def _ask(self, what: str, data: Mapping[str, Any]) -> Any:
        """Return what the server answers; None where it takes `data` for no action."""
        try:
            with suppress(self._closed):  # what the server said before it closed is read
                self._session.send(json.dumps({"type": what, "data": data}))
            answer = json.loads(self._session.recv())
        except self._failures as error:
            raise self._unreachable(error) from error
        found = answer["data"]
        if answer["type"] != "error":
            return found
        if what == "step" and found.get("code") == INVALID:
            return None
        raise EnvError(
            f"the OpenEnv server {self._base_url} refused `{what}`: {found.get('code')}: {found.get('message')}",
            fix="look at the server's output; if it has no room, raise its max_concurrent_envs, or lower "
            "rollout.max_in_flight",
        )

    def _action_schema(self) -> Any:
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"{self._base_url}/schema", timeout=CONNECT_SECONDS) as answer:
                schema = json.load(answer)["action"]
        except (OSError, ValueError, KeyError) as error:
            raise self._unreachable(error) from error
        # `metadata` is of every action, and no policy's business
        shown = {name: each for name, each in schema.get("properties", {}).items() if name != "metadata"}
        return {**{key: schema[key] for key in ("required", "$defs") if key in schema}, "properties": shown}

    def _unreachable(self, error: Exception) -> EnvError:
        return EnvError(
            f"the OpenEnv server {self._base_url} cannot be reached: {type(error).__name__}: {error}",
            fix="start the server, or correct `base_url` of the kwargs",
        )


def schema_action(text: str, schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the action that a text is, or None.

    >>> schema = {"required": ["word"], "properties": {"word": {"type": "string"}}}
    >>> schema_action('{"word": "tea"}', schema), schema_action("7", schema)
    ({'word': 'tea'}, {'word': '7'})
    >>> schema_action("7", {"required": ["row", "column"]})
    """
    text = text.strip().removeprefix("```json").strip("`").strip()
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if isinstance(value, dict):
        return value
    if len(names := schema.get("required", [])) != 1:
        return None
    only = schema.get("properties", {}).get(names[0], {})
    return {names[0]: text if only.get("type") == "string" else value}


def _text(result: Mapping[str, Any]) -> str:
    """Return an observation as a policy reads it: its only text, or JSON."""
    observation = {key: value for key, value in result["observation"].items() if key != "metadata"}
    values = list(observation.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(observation, ensure_ascii=False)
