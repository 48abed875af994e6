"""What an engine saw of episodes, what a trainer sees of them, and how the two differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from talkative_environment import AFRESH

from roll_like.inference.interface import FailedGeneration, GenerateRequest, Generation
from roll_like.policy_gradient.objective import PolicyBatch, policy_batches
from roll_like.types import FloatArray, Group, PolicySample, Scored

#: Bounds on the difference between both engines' log-probabilities, in nats: of any token, and on average. Both compute
#: in float32, by other kernels.
LARGEST, MEAN = 2e-4, 2e-5

#: Tokens of one sequence, the turn that sampled each (−1: none), and its log-probability in nats.
Sequence3: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
#: A turn: its number in the episode, all tokens before it, its own tokens, and their log-probabilities in nats.
Turn: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], tuple[float, ...]]
Asked: TypeAlias = Sequence[tuple[GenerateRequest, Generation]]


class Recorder:
    """An engine as a replica; remembers what went in and what came out."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.asked: dict[str, GenerateRequest] = {}
        self.sampled: dict[str, Generation] = {}

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self.asked |= {one.request_id: replace(one, prompt_ids=one.prompt_ids.copy()) for one in requests}
        await self._engine.submit(requests)

    async def poll(self, timeout: float) -> Sequence[Generation | FailedGeneration]:
        results: Sequence[Generation | FailedGeneration] = await self._engine.poll(timeout)
        self.sampled |= {one.request_id: one for one in results if isinstance(one, Generation)}
        return results

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._engine.abort(request_ids)

    def episodes(self, owner: str) -> list[Asked]:
        """Each episode's requests and what was sampled, in the order of its turns; ids are `owner/episode-turn`."""
        found: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for name in self.asked:
            played, _, turn = name.rpartition("-")
            if played.startswith(f"{owner}/"):
                found[played].append((int(turn), name))
        return [[(self.asked[name], self.sampled[name]) for _, name in sorted(turns)] for turns in found.values()]


def seen_by_the_engine(asked: Asked) -> list[Turn]:
    """Return an episode's turns as they went through the engine."""
    return [
        (
            number,
            tuple(request.prompt_ids.tolist()),
            tuple(generation.token_ids.tolist()),
            tuple(generation.logprobs.tolist()),
        )
        for number, (request, generation) in enumerate(asked)
    ]


def beginnings(asked: Asked) -> int:
    """Return how many of an episode's prompts do not begin with the prompt before and what was sampled after it."""
    count, before = 1, (0,)
    for _, prompt, sampled, _ in seen_by_the_engine(asked):
        count += prompt[: len(before)] != before and before != (0,)
        before = prompt + sampled
    return count


def seen_by_the_trainer(samples: Sequence[PolicySample]) -> list[Sequence3]:
    """Return the sequences that a pass's tensors hold; the turn of a token without a loss is −1."""
    ones = [np.ones(len(sample.token_ids), np.float32) for sample in samples]
    (batches,) = policy_batches(samples, ones, ranks=1, max_tokens=4096, share_prompts=True)
    return [_laid_out(batch, int(index)) for batch in batches for index in np.unique(batch.sample_ids)]


def turns_of(sequence: Sequence3) -> Iterator[Turn]:
    """Yield the turns of a sequence, each with all that comes before it."""
    tokens, turns, logprobs = sequence
    for number in sorted(set(turns) - {-1}):
        start, end = turns.index(number), len(turns) - turns[::-1].index(number)
        yield number, tokens[:start], tokens[start:end], logprobs[start:end]


def _laid_out(batch: PolicyBatch, index: int) -> Sequence3:
    """Follow a sample's last target back to the tokens that it attends to."""
    mine = np.flatnonzero((batch.sample_ids == index) & (batch.weights > 0))
    mine = mine[np.argsort(batch.target_ids[mine])]
    row, last = divmod(int(batch.sources[mine[-1]]), batch.token_ids_BL.shape[1])
    segments = batch.segment_ids_BL[row]
    attended = np.flatnonzero(np.isin(segments, [0, segments[last]])[: last + 1])
    assert batch.positions_BL[row][attended].tolist() == list(range(len(attended)))
    tokens = [*batch.token_ids_BL[row][attended].tolist(), int(batch.targets[mine[-1]])]
    turns, logprobs = np.full(len(tokens), -1), np.zeros(len(tokens), np.float32)
    # whatever a target claims to be, it is the token after its source
    at = np.searchsorted(attended, batch.sources[mine] % batch.token_ids_BL.shape[1]) + 1
    assert [tokens[place] for place in at] == batch.targets[mine].tolist()
    turns[at], logprobs[at] = batch.turns[mine], batch.behaviour_logprobs[mine]
    return tuple(tokens), tuple(turns.tolist()), tuple(logprobs.tolist())


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What the episodes under one template showed.

    Attributes:
        episodes: How many were played.
        limited: How many of them a limit ended.
        turns: What the policy sampled in one go.
        unended: How many of the turns the token limit cut.
        afresh: Conversations that the environment began anew.
        cuts: How often the template rewrote history, as episodes count it.
        beginnings: Prompts that do not extend the tokens before them.
        sequences: What is trained on.
        sampled: Tokens that the engine sampled.
        unlike: Turns that only one of engine and trainer has with these tokens before it.
        differences: |trainer − engine| of the log-probability of each trained token, in nats.
    """

    episodes: int
    limited: int
    turns: int
    unended: int
    afresh: int
    cuts: int
    beginnings: int
    sequences: int
    sampled: int
    unlike: int
    differences: FloatArray

    @classmethod
    def of(
        cls,
        played: Sequence[Asked],
        groups: Sequence[Group[Scored]],
        samples: Sequence[PolicySample],
        logprobs: Sequence[FloatArray],
    ) -> Compared:
        """Compare.

        Args:
            played: What went through the engine, by episodes.
            groups: What came out of the episodes.
            samples: What is trained on.
            logprobs: Of the trainer, one array [T] a sample.
        """
        sequences = seen_by_the_trainer(samples)
        expected = Counter(turn for asked in played for turn in seen_by_the_engine(asked))
        found = Counter(turn for sequence in sequences for turn in turns_of(sequence))
        episodes = [sample for group in groups for sample in group.samples]
        differences = [
            np.abs(mine - one.behaviour_logprobs)[one.loss_mask] for one, mine in zip(samples, logprobs, strict=True)
        ]
        return cls(
            episodes=len(episodes),
            limited=sum(len(one.turn_states) < _length(one) for one in episodes),
            turns=sum(map(len, played)),
            unended=sum(generation.stop_reason == "length" for asked in played for _, generation in asked),
            afresh=sum(state.endswith(AFRESH) for one in episodes for state in one.turn_states),
            cuts=sum(int(one.details["cuts"]) for one in episodes),
            beginnings=sum(map(beginnings, played)),
            sequences=len(sequences),
            sampled=sum(len(generation.token_ids) for asked in played for _, generation in asked),
            unlike=(expected - found).total() + (found - expected).total(),
            differences=np.concatenate(differences),
        )

    def wrong(self) -> list[str]:
        """Return which of the promises was not kept."""
        counted = self.episodes + self.afresh + self.cuts
        checks = {
            "the trainer sees other tokens than the engine": self.unlike > 0,
            "a prompt neither extends the tokens before it nor was counted": self.beginnings > counted,
            # where a limit ends an episode, history may have been rewritten for a turn that never came
            "sequences are not the counted ones": not counted - self.limited <= self.sequences <= counted,
            "not every sampled token is trained on, or others are": len(self.differences) != self.sampled,
            "log-probabilities differ": not self.differences.max() < LARGEST or not self.differences.mean() < MEAN,
        }
        return [promise for promise, broken in checks.items() if broken]


def _length(episode: Scored) -> int:
    """Return how many turns the environment wanted."""
    return int(episode.turn_states[0].partition("/")[2])


def table(results: Mapping[str, Compared]) -> Iterator[str]:
    """The results as Markdown."""
    yield (
        "| template | episodes | turns | begun anew | cuts | sequences | sampled tokens | mismatches "
        "| largest \\|Δ\\| | mean \\|Δ\\| |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for name, one in results.items():
        yield (
            f"| {name} | {one.episodes} | {one.turns} | {one.afresh} | {one.cuts} | {one.sequences} | {one.sampled} "
            f"| {one.unlike} | {one.differences.max():.1e} | {one.differences.mean():.1e} |"
        )
