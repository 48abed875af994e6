"""The servers of the run's own judge, and new ones in the place of those that ended."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

from roll_like.cluster import Cluster
from roll_like.cluster.worker_restarts import RestartCallback, WorkerRestarts
from roll_like.errors import RollLikeError, WorkerError
from roll_like.inference.interface import JudgeServer

#: How long after a reward failed the end of the judge may become known, which is its cause then. Seconds.
NOTICE_SECONDS = 1.0
#: How often what waits for a new server looks whether it is there. Seconds.
LOOK_SECONDS = 0.2


class JudgeKeeper:
    """Replaces servers that end. Rewards find the new one at the old one's address.

    One thread per server blocks until it exits.

    Args:
        servers: The servers; `start` is called when they have started.
        report: Told about those that were replaced.
    """

    def __init__(self, servers: Cluster[JudgeServer], report: RestartCallback) -> None:
        self._deaths = 0
        self._servers = servers
        self._report = report
        self._restarts = WorkerRestarts("judge", "what it was asked is asked again", self._told)
        self._away: set[int] = set()
        self._lost = False
        self._closed = False

    def start(self) -> None:
        """Wait for the end of each server from now on."""
        for rank in range(len(self._servers)):
            threading.Thread(target=self._keep, args=(rank,), name=f"judge-{rank}", daemon=True).start()

    def close(self) -> None:
        """Let servers end."""
        self._closed = True

    async def ready(self) -> int:
        """Wait until all servers answer; return how many have ended so far."""
        while self._away and not self._lost:
            await asyncio.sleep(LOOK_SECONDS)
        return self._deaths

    async def died_since(self, deaths: int) -> bool:
        """Return whether more than `deaths` have ended, and are being replaced or have been.

        Args:
            deaths: What `ready` said before something failed.
        """
        until = time.monotonic() + NOTICE_SECONDS
        while self._deaths == deaths and time.monotonic() < until:
            await asyncio.sleep(LOOK_SECONDS)
        return self._deaths > deaths and not self._lost

    def _keep(self, rank: int) -> None:
        while True:
            try:
                self._servers.only([rank]).everywhere(JudgeServer.ended)
                error: RollLikeError = WorkerError(f"the server of judge {rank} ended")
            except RollLikeError as death:
                error = death
            if self._closed:
                return
            self._away.add(rank)
            self._deaths += 1
            replaced = False
            try:
                self._restarts.replace(f"judge {rank}", error, partial(self._start, rank))
                replaced = True
            except RollLikeError:
                return  # it was said
            finally:  # or rewards would wait for ever
                self._lost = self._lost or not replaced
            self._away.discard(rank)

    def _start(self, rank: int) -> None:
        """Start a server anew, and wait until it answers."""
        self._servers.fence(rank)
        self._servers.restart(rank)
        started = self._servers.only([rank], within=self._servers.start_timeout_seconds)
        started.everywhere(JudgeServer.start)

    def _told(self, role: str, text: str, *, seconds: float | None) -> None:
        if not self._closed:
            self._report(role, text, seconds=seconds)
