"""An OpenAI-compatible server: external agents send chat requests to it, and the policy answers.

    async with Proxy(router, renderer) as proxy:
        episode = proxy.open(settings)
        ...                      # an agent sends its requests to episode.base_url with episode.key
        await episode.finished()
        scored = episode.scored()
        await episode.close()

    POST /v1/chat/completions   the policy answers; so it does at /v1/responses and /v1/messages (`dialects.py`)
    POST /v1/reward             {"reward": 1.0, "success": true, "done": true}, or {"answer": "…"} for an environment
    GET  /v1/task               name, seed and, with an environment, its first messages
    GET  /v1/models             the policy, and how many tokens a conversation may have

Each episode has an API key of its own. A server that plays many has one key, and its requests name their episode in
`X-Session-ID`; those that sample nothing need not.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from aiohttp import web

from roll_like.agents.chat_api import (
    ApiError,
    ChatRequest,
    finite_number,
    flag,
    read_body,
    read_chat_request,
    refuse_other_models,
    why_ignored,
)
from roll_like.agents.dialects import DIALECTS, Dialect
from roll_like.agents.episode import EpisodeSettings
from roll_like.agents.proxy_episode import AnswersRequests, ProxyEpisode, drafted
from roll_like.agents.recorder import Recorder
from roll_like.data.chat import ChatMessage, Renderer
from roll_like.inference.interface import Sampling

_log = logging.getLogger(__name__)

#: Name of the policy. Requests may name any model, and get this one.
MODEL = "policy"
MAX_BODY_BYTES = 64 * 2**20
#: Longer requests, which most likely have images, are read beside the event loop.
LARGE_BODY_BYTES = 2**18
#: Connections that may wait to be accepted: thousands of agents may start at once.
BACKLOG = 4096
#: How long answers that are being sent may take when the server stops. Seconds.
STOP_SECONDS = 1.0
#: Ignored options that are named, of a request in its header and of a run in its log.
_MOST_NAMES = 30
#: Names the episode of a request whose key is shared.
SESSION_HEADER = "X-Session-ID"
#: How long a request may come before its session is opened. Seconds.
SESSION_SECONDS = 5.0
_EPISODE = web.RequestKey("episode", ProxyEpisode)
_DIALECT = web.RequestKey("dialect", Dialect)


class Proxy:
    """The server; runs on the event loop that it is started on.

    Args:
        generator: Samples the policy's answers.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
    """

    def __init__(
        self,
        generator: AnswersRequests,
        renderer: Renderer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._generator = generator
        self._renderer = renderer
        self._host = host
        self._port = port
        self._episodes: dict[str, ProxyEpisode] = {}
        self._shared: dict[str, int] = {}  # the longest conversation, by key
        self._opened = asyncio.Event()
        self._warned: set[str] = set()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: The address cannot be listened on.
        """
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._in_openais_shape])
        for dialect in DIALECTS:
            app.router.add_post(dialect.path, partial(self._turn, dialect))
            if dialect.count_path is not None:
                app.router.add_post(dialect.count_path, partial(self._count, dialect))
        app.router.add_post("/v1/reward", self._reward)
        app.router.add_get("/v1/task", self._task)
        app.router.add_get("/v1/models", self._models)
        # a handler is cancelled when its client goes away, and what is sampled for it is taken back
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_SECONDS, handle_signals=False
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Close all episodes and stop listening."""
        await asyncio.gather(*(episode.close() for episode in list(self._episodes.values())))
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextlib.asynccontextmanager
    async def listening(self, listener: socket.socket) -> AsyncIterator[None]:
        """Answer requests of another socket too; it is closed at the end."""
        assert self._runner is not None, "not started"
        site = web.SockSite(self._runner, listener)
        await site.start()
        try:
            yield
        finally:
            await site.stop()

    @property
    def base_url(self) -> str:
        """Where agents on this machine find it, `/v1` included."""
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}/v1"

    def share(self, key: str, *, max_tokens: int) -> None:
        """Take requests with this key whose header says which session they belong to.

        Args:
            max_tokens: Longest conversation of its episodes.
        """
        self._shared[key] = max_tokens

    def open(
        self,
        settings: EpisodeSettings,
        shown: Sequence[ChatMessage] | None = None,
        *,
        session: tuple[str, str] | None = None,
        reasoning_apart: bool = False,
        models: Sequence[str] = (),
    ) -> ProxyEpisode:
        """Return a new episode. Close it.

        Args:
            shown: First messages of the environment that scores the agent's answer; None: the agent posts its reward.
            session: A shared key, and what its requests have in `X-Session-ID`; None: it has a key of its own.
            reasoning_apart: As in `ProxyEpisode`.
            models: As in `ProxyEpisode`.
        """
        key = new_key() if session is None else _of_session(*session)
        episode = ProxyEpisode(
            settings,
            key=key,
            base_url=self.base_url,
            generator=self._generator,
            renderer=self._renderer,
            on_close=lambda: self._episodes.pop(key, None),
            shown=shown,
            reasoning_apart=reasoning_apart,
            models=models,
        )
        self._episodes[key] = episode
        if session is not None:
            self._opened.set()
        return episode

    # ---- requests ------------------------------------------------------------------------------

    async def _turn(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        http[_DIALECT] = dialect
        episode = await self._episode(http)
        answers = episode.sent_answers
        raw = await http.read()
        body, digest = read_body(raw), _digest(raw)
        before = answers.get(digest) if _is_retry(http) else None
        if before is None:
            episode.refuse_when_over()
        refuse_other_models(body, episode.models)
        whole = dialect.whole(body, episode.kept.get(dialect.path, {}))
        request = await _read(dialect, whole, episode.settings.sampling, len(raw))
        headers = self._noted(request)
        answer, turn = before or await episode.chat(request, MODEL)
        answers[digest] = answer, turn
        answered = dialect.body(answer, body)
        history = dialect.history(whole, answered)
        if history is not None:
            episode.keep(dialect.path, answered["id"], history)
        try:
            if not request.stream:
                return await _sent(http, answered, headers)
            return await _streamed(http, dialect.events(answer, body), headers)
        except (ConnectionError, asyncio.CancelledError):
            answers.pop(digest, None)
            episode.kept.get(dialect.path, {}).pop(answered["id"], None)
            episode.take_back(turn)
            raise

    async def _count(self, dialect: Dialect, http: web.Request) -> web.Response:
        """Return how long a prompt is; nothing is sampled."""
        http[_DIALECT] = dialect
        episode = None if self._of_no_episode(http) else await self._episode(http)
        sampling = Sampling(max_tokens=1) if episode is None else episode.settings.sampling
        kept = {} if episode is None else episode.kept.get(dialect.path, {})
        raw = await http.read()
        request = await _read(dialect, dialect.whole(read_body(raw), kept), sampling, len(raw))
        recorder = Recorder(self._renderer) if episode is None else episode.recorder
        return web.json_response(dialect.counted(len(drafted(recorder, request, keep=False).prompt_ids)))

    def _noted(self, request: ChatRequest) -> dict[str, str]:
        """Return a header that names what is ignored; log each once."""
        for option in request.ignored:
            if option not in self._warned and len(self._warned) < _MOST_NAMES:
                self._warned.add(option)
                _log.warning("an agent sends %s, which is ignored: %s", option, why_ignored(option))
        named = ",".join(request.ignored[:_MOST_NAMES])
        return {"x-roll-like-ignored": named} if named else {}

    async def _reward(self, http: web.Request) -> web.Response:
        episode = await self._episode(http)
        rewards = episode.sent_rewards
        raw = await http.read()
        digest = _digest(raw)
        if not (_is_retry(http) and digest in rewards):
            rewards[digest] = self._take_reward(episode, read_body(raw))
        return web.json_response(rewards[digest])

    @staticmethod
    def _take_reward(episode: ProxyEpisode, body: dict[str, Any]) -> dict[str, Any]:
        if episode.scored_by_environment:
            if "reward" in body or not isinstance(body.get("answer"), str):
                raise ApiError(
                    400,
                    'an environment scores this episode; expected {"answer": "…"}, the final answer',
                    param="answer",
                )
            episode.hand_in(body["answer"])
            return {"turns": episode.turns, "done": True}
        if "answer" in body:
            raise ApiError(400, 'no environment scores this episode; expected {"reward": 1.0}', param="answer")
        reward, success = finite_number(body, "reward"), flag(body, "success", None)
        done = flag(body, "done", True) is not False
        episode.award(reward, success, done=done)
        return {"turns": episode.turns, "done": done}

    async def _task(self, http: web.Request) -> web.Response:
        return web.json_response((await self._episode(http)).about)

    async def _models(self, http: web.Request) -> web.Response:
        if self._of_no_episode(http):
            names: tuple[str, ...] = (MODEL,)
            max_tokens = self._shared[_key_of(http)[1]]
        else:
            episode = await self._episode(http)
            names, max_tokens = tuple(episode.models) or (MODEL,), episode.settings.limits.tokens
        model = {"object": "model", "created": 0, "owned_by": "roll_like", "max_model_len": max_tokens}
        return web.json_response({"object": "list", "data": [{"id": name, **model} for name in names]})

    def _of_no_episode(self, http: web.Request) -> bool:
        """Return whether a request comes from a server of many episodes and names none of them."""
        return _key_of(http)[1] in self._shared and SESSION_HEADER not in http.headers

    async def _episode(self, http: web.Request) -> ProxyEpisode:
        kind, key = _key_of(http)
        if key in self._shared:
            key = _of_session(key, http.headers.get(SESSION_HEADER, ""))
            await self._until_open(key)
        episode = self._episodes.get(key)
        if kind.lower() != "bearer" or episode is None:
            raise ApiError(
                401,
                "the API key belongs to no open episode: it is missing, mistyped, or its episode was closed; "
                "an agent program finds its own in OPENAI_API_KEY",
                code="invalid_api_key",
            )
        http[_EPISODE] = episode
        return episode

    async def _until_open(self, key: str) -> None:
        """Wait a little for a session: its server tells of it by another connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SESSION_SECONDS):
                while key not in self._episodes:
                    self._opened.clear()
                    await self._opened.wait()

    # ---- errors --------------------------------------------------------------------------------

    @web.middleware
    async def _in_openais_shape(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return _error_response(request, error)
        except web.HTTPRequestEntityTooLarge:
            limit = MAX_BODY_BYTES // 2**20
            return _error_response(
                request, ApiError(413, f"the request is larger than {limit} MiB", code="request_too_large")
            )
        except web.HTTPException as error:
            served = "POST chat/completions, responses, messages and reward, GET task and models"
            what = f"{request.method} {request.path} is not served; there are {served} under /v1"
            return _error_response(request, ApiError(error.status, what))
        except web.RequestPayloadError as error:
            return _error_response(request, ApiError(400, f"the body could not be read: {error}"))
        except Exception as error:  # noqa: BLE001 - it is logged, sent to the agent, and fails the episode
            closed = request.transport is None or request.transport.is_closing()
            if not (closed and isinstance(error, ConnectionError)):  # else the client has gone, and nobody reads it
                _log.error("a request of an agent failed", exc_info=error)
                if _EPISODE in request:
                    request[_EPISODE].fail(error)
            what = f"{type(error).__name__}: {error}"
            return _error_response(request, ApiError(500, f"the proxy failed: {what}", code="internal_error"))


async def _read(dialect: Dialect, body: Mapping[str, Any], sampling: Sampling, size: int) -> ChatRequest:
    """Return a request as chat has it; `size` is that of its body."""
    chat = dialect.to_chat(body)
    if size < LARGE_BODY_BYTES:
        return read_chat_request(chat, sampling)
    return await asyncio.to_thread(read_chat_request, chat, sampling)


async def _sent(http: web.Request, body: Mapping[str, Any], headers: Mapping[str, str]) -> web.Response:
    whole = web.json_response(body, headers=headers)
    await whole.prepare(http)
    await whole.write_eof()
    return whole


async def _streamed(http: web.Request, parts: Iterable[str], headers: Mapping[str, str]) -> web.StreamResponse:
    events = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers})
    await events.prepare(http)
    for part in parts:
        await events.write(part.encode())
    await events.write_eof()
    return events


def new_key() -> str:
    """Return a random API key."""
    return f"sk-roll-{secrets.token_urlsafe(32)}"


def _key_of(http: web.Request) -> tuple[str, str]:
    """Return the scheme and the key of a request."""
    kind, _, key = http.headers.get("Authorization", "").partition(" ")
    if not key:  # Anthropic's clients
        kind, key = "bearer", http.headers.get("x-api-key", "")
    return kind, key.strip()


def _of_session(key: str, session: str) -> str:
    return f"{key} {session}"


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


def _is_retry(http: web.Request) -> bool:
    """Return whether the client tries again, because it lost the answer on its way; OpenAI's clients count."""
    return http.headers.get("x-stainless-retry-count", "0") != "0"


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    # an episode that has failed does not get better by asking again
    headers = {"x-should-retry": "false"} if error.status >= 500 else {}
    body = request[_DIALECT].error(error) if _DIALECT in request else error.body
    return web.json_response(body, status=error.status, headers=headers)
