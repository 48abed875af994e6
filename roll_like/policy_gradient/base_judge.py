"""The model that adapters are trained on, as a judge: rewards ask the policy's engines, which have it beside.

    POST /v1/chat/completions   messages, temperature, max_tokens, stop, response_format

No second engine, and no second copy of the weights. Requests share the engines with the policy's and go before them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from roll_like.agents.chat_api import ApiError, finite_number, read_body, read_chat_request
from roll_like.config.inference import BASE
from roll_like.data.chat import Renderer
from roll_like.data.reasoning import split_reasoning
from roll_like.errors import EnvError, GenerationError
from roll_like.inference.interface import GenerateRequest, Sampling
from roll_like.rollout.router import Router
from roll_like.types import StopReason

_KNOWN = {"model", "messages", "temperature", "max_tokens", "stop", "response_format"}
#: How long answers that are being sent may take when the server stops. Seconds.
_STOP_SECONDS = 1.0


class BaseJudge:
    """Answers chat requests with the base model; runs on the event loop that it is started on."""

    def __init__(self, renderer: Renderer, *, host: str, port: int) -> None:
        self._renderer = renderer
        self._host = host
        self._port = port
        self._numbers = itertools.count()
        self._router: Router
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The base address of its API; nothing answers there before `start`."""
        return f"http://{self._host}:{self._port}/v1"

    async def start(self, router: Router) -> None:
        """Answer from now on.

        Raises:
            OSError: The address cannot be listened on.
        """
        self._router = router
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_post("/v1/chat/completions", self._chat)
        # what is sampled for a client that went away is taken back
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_STOP_SECONDS, handle_signals=False
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()

    async def close(self) -> None:
        """Stop answering."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _chat(self, request: web.Request) -> web.Response:
        try:
            asked = self._asked(read_body(await request.read()))
        except ApiError as error:
            return web.json_response(error.body, status=error.status)
        try:
            generation = await self._router.submit(asked, asked.request_id, urgent=True)
        except GenerationError as error:
            return web.json_response(ApiError(503, error.message).body, status=503)
        finally:
            self._router.forget([asked.request_id])
        cut = generation.stop_reason is not StopReason.STOP
        tags = self._renderer.reasoning_after(self._renderer.decode(asked.prompt_ids))
        message = {"role": "assistant", "content": split_reasoning(generation.text, tags)[1]}
        choice = {"index": 0, "message": message, "finish_reason": "length" if cut else "stop"}
        return web.json_response({"object": "chat.completion", "model": BASE, "choices": [choice]})

    def _asked(self, body: Mapping[str, Any]) -> GenerateRequest:
        """Return the request that a chat request means.

        Raises:
            ApiError: It asks for something else than this server can.
        """
        unknown = sorted(body.keys() - _KNOWN)
        if unknown:
            raise ApiError(400, f"{', '.join(unknown)}: this server knows {', '.join(sorted(_KNOWN))} only")
        temperature = finite_number(body, "temperature") if "temperature" in body else 1.0
        sampling = Sampling(temperature=temperature, max_tokens=1024)
        chat = read_chat_request({key: value for key, value in body.items() if key != "response_format"}, sampling)
        try:
            prompt_ids = self._renderer.encode(self._renderer.render(chat.messages, ()))
        except EnvError as error:
            raise ApiError(400, error.message, param="messages") from error
        return GenerateRequest(
            request_id=f"judge-{next(self._numbers)}",
            prompt_ids=prompt_ids,
            sampling=Sampling(temperature=temperature, max_tokens=chat.max_tokens or 1024, stop=chat.stop),
            seed=None,
            adapter=BASE,
            json_schema=_schema(body.get("response_format")),
        )


def _schema(wanted: Any) -> str | None:
    """Return the JSON Schema of a `response_format`; None for text.

    Raises:
        ApiError: It has another form.
    """
    match wanted:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return json.dumps({"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return json.dumps(schema)
        case _:
            raise ApiError(400, "response_format: expected text, json_object or json_schema", param="response_format")
