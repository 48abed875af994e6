"""The servers of the run's own judge, and new ones in the place of those that ended."""

from __future__ import annotations

import asyncio
import threading
import time

from roll_like.cluster import Cluster
from roll_like.cluster.health import RestartBudget, RestartCallback, brief
from roll_like.errors import RollLikeError
from roll_like.inference.interface import JudgeServer

#: How long after a reward failed the end of the judge may become known, which is its cause then. Seconds.
NOTICE_SECONDS = 1.0
#: How often what waits for a new server looks whether it is there. Seconds.
LOOK_SECONDS = 0.2


class JudgeKeeper:
    """Replaces servers that end. Rewards find the new one at the old one's address.

    A thread a server waits for its end; that takes no processor time.

    Args:
        servers: The servers; `start` is called when they have started.
        report: Told about those that were replaced.
        budget: How often they may be.
    """

    def __init__(
        self, servers: Cluster[JudgeServer], report: RestartCallback, budget: RestartBudget | None = None
    ) -> None:
        self._deaths = 0
        self._servers = servers
        self._report = report
        self._budget = budget or RestartBudget()
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
                cause = f"the server of judge {rank} ended"
            except RollLikeError as error:
                cause = brief(error)
            if self._closed:
                return
            self._away.add(rank)
            self._deaths += 1
            replaced = False
            try:
                replaced = self._replace(rank, cause)
            finally:  # or rewards would wait for ever
                self._lost = self._lost or not replaced
            if not replaced:
                return
            self._away.discard(rank)

    def _replace(self, rank: int, cause: str) -> bool:
        """Start a server anew, and return whether it answers."""
        began, error = time.monotonic(), cause
        while (pause := self._budget.take()) is not None:
            time.sleep(pause)
            self._servers.fence(rank)
            self._servers.restart(rank)
            try:
                started = self._servers.only([rank], within=self._servers.start_timeout_seconds)
                started.everywhere(JudgeServer.start)
            except RollLikeError as failure:
                error = brief(failure)
                continue
            seconds = time.monotonic() - began
            text = f"{cause}; it was replaced in {seconds:.0f} s, and what it was asked is asked again"
            self._report("judge", text, seconds=seconds)
            return True
        if not self._closed:
            self._report(
                "judge", f"judge {rank} ended too often and is not replaced; the last error: {error}", seconds=None
            )
        return False
