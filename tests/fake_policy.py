"""A policy that says what a test wrote for it, in tokens that no tokenizer would choose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from roll_like.agents.env_manager import episode_task
from roll_like.agents.episode import EpisodeLimits, EpisodeSettings, ProgramSpec
from roll_like.data.chat import Renderer
from roll_like.inference.interface import GenerateRequest, Generation, Guesses, Sampling
from roll_like.types import FloatArray, IntArray, Scored, Segment, StopReason

PROGRAM = ProgramSpec(name="agent", command=("agent",), timeout_seconds=60, max_programs=4)


def spelled(renderer: Renderer, text: str, *, ended: bool = True) -> IntArray:
    """A text in one token per character, and the end of the turn: not what tokenising the text gives."""
    ids = [token_id for character in text for token_id in renderer.encode(character).tolist()]
    return np.array([*ids, *(renderer.end_ids if ended else ())], np.int32)


def logprobs_of(token_ids: IntArray) -> FloatArray:
    """A log-probability that tells tokens apart."""
    return (-np.asarray(token_ids, np.float32) / 1000).astype(np.float32)


def generation(renderer: Renderer, text: str, *, name: str = "r", ended: bool = True, version: int = 3) -> Generation:
    """What an engine gives for a text."""
    ids = spelled(renderer, text, ended=ended)
    return Generation(
        request_id=name,
        token_ids=ids,
        logprobs=logprobs_of(ids),
        segments=(Segment(start=0, end=len(ids), policy_version=version),),
        text=text,
        stop_reason=StopReason.STOP if ended else StopReason.LENGTH,
    )


class Unqueued:
    """What episodes need of a router beside its samples, for a policy that answers at once."""

    replicas = 1

    def __init__(self) -> None:
        self.prioritized: set[Hashable] = set()

    def busy_seconds(self) -> float:
        return 0.0

    def take_guesses(self) -> Guesses:
        return Guesses()

    def prioritize(self, keys: Iterable[Hashable]) -> None:
        self.prioritized.update(keys)

    def forget(self, keys: Iterable[Hashable]) -> None:
        self.prioritized.difference_update(keys)

    def unfinished(self, keys: Collection[Hashable]) -> int:
        del keys
        return 0


class FakePolicy(Unqueued):
    """Says one text after another, and the last one for ever; remembers what it was asked.

    Args:
        renderer: Tokenizer and chat template.
        says: Texts, or exceptions to raise, or a function of the request.
    """

    def __init__(self, renderer: Renderer, says: Sequence[str | Exception] | Callable[[GenerateRequest], str]) -> None:
        super().__init__()
        self.renderer = renderer
        self.requests: list[GenerateRequest] = []
        self.urgent: list[bool] = []
        self.generations: list[Generation] = []
        self.cancelled = 0
        self.open = asyncio.Event()  # nothing is said while it is clear
        self.open.set()
        self._says = says

    async def generate(self, request: GenerateRequest, affinity_key: Hashable, urgent: bool = False) -> Generation:
        number = len(self.requests)
        self.requests.append(request)
        self.urgent.append(urgent)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        said = self._says(request) if callable(self._says) else self._says[min(number, len(self._says) - 1)]
        if isinstance(said, Exception):
            raise said
        whole = generation(self.renderer, said, name=request.request_id)
        limit = request.sampling.max_tokens
        if len(whole.token_ids) > limit:
            whole = generation(self.renderer, said[:limit], name=request.request_id, ended=False)
        self.generations.append(whole)
        return whole


def episode_settings(*, turns: int = 8, tokens: int = 2000, seed: int = 11, **changes: Any) -> EpisodeSettings:
    """How a test's episode is played."""
    return EpisodeSettings(
        **{
            "task": episode_task(PROGRAM, seed),
            "sample_index": 2,
            "sampling": Sampling(max_tokens=200),
            "limits": EpisodeLimits(turns=turns, tokens=tokens),
            "name": "0-0-2-0",
            "affinity_key": "0-0",
            "sampling_seed": 5,
            **changes,
        }
    )


def parts_of(scored: Scored) -> list[tuple[list[int], list[int]]]:
    """The sequences of an episode: tokens, and the turn of each."""
    whole = scored.trajectory
    return [
        (whole.token_ids[part.start : part.end].tolist(), whole.turns[part.start : part.end].tolist())
        for part in whole.parts
    ]


def assert_token_exact(scored: Scored, policy: FakePolicy, turns: Sequence[int] | None = None) -> None:
    """Every turn stands in the trajectory after exactly the prompt that the policy was given, as it was sampled.

    Args:
        scored: The episode.
        policy: Who played it.
        turns: Index among the policy's requests of each turn; default: all of them.
    """
    whole, asked = scored.trajectory, range(len(policy.requests)) if turns is None else turns
    assert whole.turns.max() == len(asked) - 1
    for turn, request in enumerate(asked):
        prompt, sampled = policy.requests[request].prompt_ids, policy.generations[request]
        places = np.flatnonzero(whole.turns == turn)
        assert whole.token_ids[places].tolist() == sampled.token_ids.tolist()
        assert whole.logprobs[places].tolist() == sampled.logprobs.tolist()
        (part,) = (part for part in whole.parts if part.start <= places[0] < part.end)
        assert whole.token_ids[part.start : places[0]].tolist() == prompt.tolist()
    assert (whole.turns >= 0).tolist() == whole.sampled.tolist()
    assert not whole.logprobs[~whole.sampled].any()
