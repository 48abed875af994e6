"""What the requests of a service share: sessions, models, results, checkpoints, and the threads that work."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, TypeVar

from roll_like.service.checkpoints import CheckpointShelf
from roll_like.service.config import ServiceConfig
from roll_like.service.futures import Answer, Futures
from roll_like.service.hosted import HostedModel, Session
from roll_like.service.protocol import SessionBody
from roll_like.service.types import RequestError

R = TypeVar("R")


class ServiceState:
    """Runs on one event loop."""

    def __init__(self, config: ServiceConfig, *, vocabulary: int) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, HostedModel] = {}
        self.futures = Futures()
        self.shelf = CheckpointShelf(config.directory / "models")
        self.snapshots = config.directory / "snapshots"
        self.trained_tokens = self.sampled_tokens = 0
        # what ranks do comes one after the other, in the order in which it was asked for
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._files = ThreadPoolExecutor(2, thread_name_prefix="checkpoints")

    # ---- who asks, and for what ----------------------------------------------------------------

    def create_session(self, owner: str, body: SessionBody) -> Answer:
        """Begin a session of an API key's owner."""
        session = Session(
            session_id=str(uuid.uuid4()),
            owner=owner,
            user_metadata=body.user_metadata,
            display_name=body.display_name,
        )
        self.sessions[session.session_id] = session
        return {"type": "create_session", "session_id": session.session_id}

    def session(self, owner: str, session_id: str) -> Session:
        """Return a session, and note that its client lives.

        Raises:
            KeyError: There is none of this owner.
        """
        session = self.sessions.get(session_id)
        if session is None or session.owner != owner:
            raise KeyError(f"there is no session {session_id}; it may have ended")
        session.seen = time.monotonic()
        return session

    def sessions_of(self, owner: str) -> list[Session]:
        """Return the sessions of an owner."""
        return [session for session in self.sessions.values() if session.owner == owner]

    def owns(self, owner: str) -> Callable[[str], bool]:
        """Return what says whether a session is an owner's."""

        def is_own(session_id: str) -> bool:
            session = self.sessions.get(session_id)
            return session is not None and session.owner == owner

        return is_own

    def model(self, owner: str, model_id: str) -> HostedModel:
        """Return a model, and note that its client lives.

        Raises:
            KeyError: There is none of this owner.
        """
        model = self.models.get(model_id)
        if model is None or not self.owns(owner)(model.session):
            raise KeyError(f"there is no model {model_id}; it may have been unloaded")
        self.session(owner, model.session)
        model.last_request = datetime.now(UTC)
        return model

    def models_of(self, owner: str) -> list[HostedModel]:
        """Return the models of an owner."""
        return [model for model in self.models.values() if self.owns(owner)(model.session)]

    def refuse_base(self, name: str | None) -> None:
        """Raise a RequestError for a model that is not the one of this service."""
        if name is not None and name != self.config.base_model:
            raise RequestError(f"the base model {name!r} is not served; this service has {self.config.base_model!r}")

    # ---- requests in their order ---------------------------------------------------------------

    def enqueue(self, model: HostedModel, number: int, work: Callable[[], Awaitable[Answer]]) -> str:
        """Take a request of a model in its place, and return the id of its result; a repeated one is the same."""
        request_id = f"{model.model_id}:{number}"
        if request_id not in self.futures:
            if number < 1:
                raise RequestError(f"seq_id is {number}; requests of a model are numbered from 1")
            self.futures.open(request_id, model.session)
            try:
                model.queue.put(number, request_id, work)
            except RequestError as error:
                self.futures.refuse(request_id, error)
        return request_id

    def refuse(self, owner: str, model_id: str, number: int, error: RequestError) -> str:
        """Give a request its place, where nothing is done but refuse it."""

        async def work() -> Answer:
            raise error

        return self.enqueue(self.model(owner, model_id), number, work)

    # ---- threads -------------------------------------------------------------------------------

    async def on_ranks(self, work: Callable[..., R], *arguments: Any, **named: Any) -> R:
        """Have the trainer do something, after what it was asked before."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, lambda: work(*arguments, **named))

    async def in_files(self, work: Callable[..., R], *arguments: Any) -> R:
        """Do something with files, or data, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._files, work, *arguments)

    def close(self) -> None:
        """Let go of threads, and of what no checkpoint has."""
        self.thread.shutdown(wait=True, cancel_futures=True)
        self._files.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self.snapshots, ignore_errors=True)
