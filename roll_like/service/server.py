"""The service over HTTP: paths, keys, bodies, errors. What is done is in `core.py`."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

from roll_like.errors import RollLikeError
from roll_like.service.checkpoints import StoredCheckpoint, expiry
from roll_like.service.core import ServiceCore
from roll_like.service.futures import Answer
from roll_like.service.hosted import HostedModel, Session
from roll_like.service.protocol import (
    AnyBody,
    ClientBody,
    CopyBody,
    CreateModelBody,
    FutureBody,
    HeartbeatBody,
    JoinBody,
    LoadBody,
    ModelBody,
    OptimStepBody,
    PathBody,
    SampleBody,
    SamplingSessionBody,
    SaveBody,
    SaveForSamplerBody,
    SessionBody,
    TTLBody,
    numbered_place,
    parsed_body,
)
from roll_like.service.types import RequestError
from roll_like.service.wire import CONTENT_TYPE, read_train_request

_log = logging.getLogger(__name__)

API = "/api/v1"
KEY_HEADER = "X-API-Key"
#: Connections that may wait to be accepted.
BACKLOG = 4096
#: How long answers that are being sent may take when the server stops. Seconds.
STOP_SECONDS = 1.0
#: Most items of one page of a list.
PAGE = 1000
_OWNER = web.RequestKey("owner", str)
#: What clients are told to do; what is not among these keys keeps the client's own default.
_CLIENT_CONFIG: Answer = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
}
#: Parts of the protocol that are not served, by the beginnings of their paths.
_NOT_SERVED = {
    f"{API}/create_custom_loss": "losses that run on the server; forward_backward_custom computes them in the client",
    f"{API}/save_weights_external": "weights in an external format; `roll-like export` makes a Hugging Face folder",
    f"{API}/retrieve_futures": "polling for many results at once; the client polls for each",
    f"{API}/auth/token": "tokens in exchange for keys; the key itself is sent with each request",
    f"{API}/billing": "bills",
    f"{API}/audit": "an audit log",
    f"{API}/sessions/search": "searching for sessions",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServiceServer:
    """Answers clients.

    Args:
        window: Longest sequence, in tokens.
    """

    def __init__(
        self, core: ServiceCore, keys: Iterable[str], *, base_model: str, window: int, max_request_bytes: int
    ) -> None:
        self._core = core
        self._owners = [fingerprint_of(key) for key in keys]
        self._base_model = base_model
        self._window = window
        self._max_bytes = max_request_bytes
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port.

        Raises:
            OSError: The address cannot be listened on.
        """
        app = web.Application(client_max_size=self._max_bytes, middlewares=[self._guarded])
        for method, path, handler in self._routes():
            app.router.add_route(method, API + path, handler)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_SECONDS, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        found: int = self._runner.addresses[0][1]
        return found

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _routes(self) -> Iterable[tuple[str, str, Handler]]:
        core = self._core
        yield from (
            ("GET", "/healthz", self._health),
            ("GET", "/get_server_capabilities", self._capabilities),
            ("POST", "/client/config", self._client_config),
            ("POST", "/client/dynamic_config", self._client_config),
            ("POST", "/telemetry", self._telemetry),
            ("POST", "/create_session", _json(SessionBody, core.state.create_session)),
            ("POST", "/session_heartbeat", self._heartbeat),
            ("POST", "/sessions/{session}/finish", self._finish),
            ("GET", "/sessions", self._sessions),
            ("GET", "/sessions/{session}", self._session),
            ("POST", "/create_model", self._future(CreateModelBody, core.models.create)),
            ("POST", "/get_info", _json(ModelBody, lambda owner, body: core.models.info(owner, body.model_id))),
            ("POST", "/unload_model", self._unload),
            ("POST", "/forward_backward", self._train),
            ("POST", "/optim_step", self._future(OptimStepBody, core.models.optim_step)),
            ("POST", "/save_weights", self._future(SaveBody, core.weights.save)),
            ("POST", "/save_weights_for_sampler", self._future(SaveForSamplerBody, core.weights.save_for_sampler)),
            ("POST", "/load_weights", self._future(LoadBody, core.weights.load)),
            ("POST", "/weights_info", _json(PathBody, lambda owner, body: core.weights.info(body.tinker_path))),
            ("POST", "/copy_weights", self._copy),
            ("POST", "/create_sampling_session", _json(SamplingSessionBody, core.samples.create_sampler)),
            (
                "POST",
                "/join_sampling_session",
                _json(JoinBody, lambda owner, body: core.samples.join(owner, body.sampling_session_id)),
            ),
            ("GET", "/samplers/{sampler}", self._sampler),
            ("POST", "/asample", self._sample),
            ("POST", "/retrieve_future", self._retrieve),
            ("POST", "/cancel_future", self._cancel),
            ("GET", "/training_runs", self._runs),
            ("GET", "/training_runs/{model}", self._run),
            ("GET", "/training_runs/{model}/checkpoints", self._checkpoints),
            ("GET", "/checkpoints", self._checkpoints),
            ("DELETE", "/training_runs/{model}/checkpoints/{kind}/{name}", self._delete),
            ("PUT", "/training_runs/{model}/checkpoints/{kind}/{name}/ttl", self._ttl),
        )

    # ---- what concerns the whole service -------------------------------------------------------

    async def _health(self, http: web.Request) -> web.Response:
        del http
        return web.json_response({"status": "ok"})

    async def _capabilities(self, http: web.Request) -> web.Response:
        del http
        model = {
            "model_name": self._base_model,
            "max_context_length": self._window,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model]})

    async def _client_config(self, http: web.Request) -> web.Response:
        parsed_body(await http.read(), ClientBody)
        return web.json_response(_CLIENT_CONFIG)

    async def _telemetry(self, http: web.Request) -> web.Response:
        await http.read()  # and dropped
        return web.json_response({"status": "accepted"})

    # ---- sessions ------------------------------------------------------------------------------

    async def _heartbeat(self, http: web.Request) -> web.Response:
        body: HeartbeatBody = parsed_body(await http.read(), HeartbeatBody)
        try:
            self._core.state.session(http[_OWNER], body.session_id)
        except KeyError as error:  # the client then stops telling that it lives
            return _refused(410, error.args[0])
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, http: web.Request) -> web.Response:
        parsed_body(await http.read(), AnyBody)
        await self._core.end_session(http[_OWNER], http.match_info["session"])
        return web.Response(status=204)

    async def _sessions(self, http: web.Request) -> web.Response:
        found = [session.session_id for session in self._core.state.sessions_of(http[_OWNER])]
        return web.json_response({"sessions": _page(http, found)[0]})

    async def _session(self, http: web.Request) -> web.Response:
        session: Session = self._core.state.session(http[_OWNER], http.match_info["session"])
        return web.json_response(
            {
                "training_run_ids": session.models,
                "sampler_ids": list(session.samplers),
                "user_metadata": session.user_metadata,
                "display_name": session.display_name,
            }
        )

    # ---- models --------------------------------------------------------------------------------

    async def _unload(self, http: web.Request) -> web.Response:
        body: ModelBody = parsed_body(await http.read(), ModelBody)
        return web.json_response(await self._core.models.unload(http[_OWNER], body.model_id))

    async def _train(self, http: web.Request) -> web.Response:
        if http.content_type != CONTENT_TYPE or "Content-Encoding" in http.headers:
            raise RequestError(
                f"a batch came as {http.content_type!r} with encoding {http.headers.get('Content-Encoding')!r}; "
                f"expected {CONTENT_TYPE}, as tinker 0.38 sends it"
            )
        request_id = self._core.models.train(http[_OWNER], read_train_request(await http.read()))
        return web.json_response({"request_id": request_id})

    async def _sample(self, http: web.Request) -> web.Response:
        body: SampleBody = parsed_body(await http.read(), SampleBody)
        request_id, names = self._core.samples.sample(http[_OWNER], body)
        return web.json_response({"request_id": request_id, "sample_sequence_ids": names})

    async def _sampler(self, http: web.Request) -> web.Response:
        return web.json_response(self._core.samples.describe(http[_OWNER], http.match_info["sampler"]))

    async def _copy(self, http: web.Request) -> web.Response:
        return web.json_response(await self._core.weights.copy(parsed_body(await http.read(), CopyBody)))

    def _future(self, kind: type[Any], work: Callable[[str, Any], str]) -> Handler:
        """Return a handler that answers with the id of a result.

        A request that is refused has its place in the model's order all the same: later ones would wait for it.
        """

        async def handle(http: web.Request) -> web.Response:
            owner, raw = http[_OWNER], await http.read()
            try:
                request_id = work(owner, parsed_body(raw, kind))
            except RequestError as error:
                place = numbered_place(raw)
                if place is None:
                    raise
                request_id = self._core.state.refuse(owner, *place, error)
            return web.json_response({"request_id": request_id})

        return handle

    # ---- results -------------------------------------------------------------------------------

    async def _retrieve(self, http: web.Request) -> web.Response:
        body: FutureBody = parsed_body(await http.read(), FutureBody)
        try:
            answer = await self._core.state.futures.result(body.request_id, self._core.state.owns(http[_OWNER]))
        except KeyError:
            return _refused(404, f"there is no request {body.request_id}, or its session has ended")
        except RollLikeError as error:
            category = "user" if isinstance(error, RequestError) else "server"
            return web.json_response({"error": str(error), "category": category})
        except Exception as error:  # noqa: BLE001 - it was logged when it happened
            return web.json_response({"error": f"{type(error).__name__}: {error}", "category": "server"})
        if answer is None:
            return web.json_response(
                {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}, status=408
            )
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type=CONTENT_TYPE)
        return web.json_response(answer)

    async def _cancel(self, http: web.Request) -> web.Response:
        body: FutureBody = parsed_body(await http.read(), FutureBody)
        self._core.state.futures.cancel(body.request_id, self._core.state.owns(http[_OWNER]))
        return web.Response(status=204)

    # ---- checkpoints ---------------------------------------------------------------------------

    async def _runs(self, http: web.Request) -> web.Response:
        runs = [self._described(model) for model in self._core.state.models_of(http[_OWNER])]
        page, cursor = _page(http, runs)
        return web.json_response({"training_runs": page, "cursor": cursor})

    async def _run(self, http: web.Request) -> web.Response:
        return web.json_response(self._described(self._core.state.model(http[_OWNER], http.match_info["model"])))

    def _described(self, model: HostedModel) -> dict[str, Any]:
        stored = self._core.state.shelf.all(model.model_id)
        last = {kind: next((each.answer for each in stored if each.kind == kind), None) for kind in _KINDS}
        return {
            "training_run_id": model.model_id,
            "base_model": self._base_model,
            "model_owner": "roll-like",
            "is_lora": model.lora_rank is not None,
            "lora_rank": model.lora_rank,
            "last_request_time": model.last_request.isoformat(),
            "last_checkpoint": last["weights"],
            "last_sampler_checkpoint": last["sampler_weights"],
            "user_metadata": model.user_metadata,
        }

    async def _checkpoints(self, http: web.Request) -> web.Response:
        found = [stored.answer for stored in self._core.state.shelf.all(http.match_info.get("model"))]
        page, cursor = _page(http, found)
        return web.json_response({"checkpoints": page, "cursor": cursor})

    async def _delete(self, http: web.Request) -> web.Response:
        self._core.state.shelf.delete(self._named(http))
        return web.Response(status=204)

    async def _ttl(self, http: web.Request) -> web.Response:
        body: TTLBody = parsed_body(await http.read(), TTLBody)
        self._core.state.shelf.change(self._named(http), expires_at=expiry(body.ttl_seconds))
        return web.Response(status=204)

    def _named(self, http: web.Request) -> StoredCheckpoint:
        place = http.match_info
        return self._core.state.shelf.find(f"tinker://{place['model']}/{place['kind']}/{place['name']}")

    # ---- keys and errors -----------------------------------------------------------------------

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        own = fingerprint_of(request.headers.get(KEY_HEADER, ""))
        if sum(hmac.compare_digest(own, owner) for owner in self._owners) == 0:  # looks at all of them, always
            return _refused(401, f"the API key is missing or unknown; send one of the service's keys in {KEY_HEADER}")
        request[_OWNER] = own
        try:
            return await handler(request)
        except Exception as error:  # noqa: BLE001 - the client gets it, and the service goes on
            # the client has gone: aiohttp would log what is raised, and finds out by itself
            if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
                return web.Response(status=499)
            return self._answer_to(error, request)

    def _answer_to(self, error: Exception, request: web.Request) -> web.Response:
        if isinstance(error, RequestError):
            return _refused(400, str(error))
        if isinstance(error, KeyError):
            return _refused(404, str(error.args[0]))
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            return _refused(413, f"the request is larger than {self._max_bytes // 2**20} MiB (max_request_mib)")
        if isinstance(error, web.HTTPException):
            why = next((why for path, why in _NOT_SERVED.items() if request.path.startswith(path)), None)
            what = f"{request.method} {request.path} is not served"
            return _refused(error.status, what if why is None else f"{what}: {why}")
        if isinstance(error, web.RequestPayloadError):
            return _refused(400, f"the body could not be read: {error}")
        if not isinstance(error, RollLikeError):
            _log.error("%s %s failed", request.method, request.path, exc_info=error)
        return _refused(500, f"{type(error).__name__}: {error}")


_KINDS = ("weights", "sampler_weights")


def fingerprint_of(key: str) -> str:
    """Return what stands for an API key, which is kept nowhere."""
    return hashlib.sha256(key.encode()).hexdigest()


def _json(kind: type[Any], work: Callable[[str, Any], Answer]) -> Handler:
    """Return a handler that answers at once."""

    async def handle(http: web.Request) -> web.Response:
        return web.json_response(work(http[_OWNER], parsed_body(await http.read(), kind)))

    return handle


def _page(http: web.Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the part of a list that was asked for, and where it is."""
    try:
        offset, limit = (int(http.query.get(name, default)) for name, default in (("offset", "0"), ("limit", "100")))
    except ValueError as error:
        raise RequestError("offset and limit are whole numbers") from error
    offset, limit = max(offset, 0), min(max(limit, 0), PAGE)
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"detail": message}, status=status)
