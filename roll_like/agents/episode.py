"""One episode: a policy and an environment take turns until one of them ends it.

Token-exact: what the policy samples is kept as sampled, and each prompt extends the tokens before it
(`conversation.py`). Infrastructure that fails (environment, engine) raises; it never becomes a reward.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from roll_like.agents.conversation import ChatMessage, Conversation, Renderer, Segmented
from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.types import IntArray, Message, Part, Scored, Segment, StopReason, Task, Trajectory, TurnRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """An environment as a run uses it.

    Attributes:
        name: Its name in metrics.
        env_id: Its id in Gymnasium's registry.
        kwargs: Its own options.
    """

    name: str
    env_id: str
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """An agent program as a run uses it: it asks the proxy for turns (`proxy.py`).

    Attributes:
        name: Its name in metrics.
        command: The program and its arguments; found as a shell finds it.
        env: Environment variables beside the run's own.
        directory: Where it is started; None is where the run was.
        timeout_seconds: Longest episode, from its start. What takes longer has failed.
        max_programs: How many may run at a time.
        environment: Gives it its task and scores its answer; None where the program posts its reward.
        limit_reward: Reward of an episode that reached a limit and for which none was posted; None: it has failed.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    directory: str | None = None
    timeout_seconds: float
    max_programs: int
    environment: EnvironmentSpec | None = None
    limit_reward: float | None = None


#: What may play an episode.
EpisodeSpec: TypeAlias = EnvironmentSpec | ProgramSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What an environment shows after `reset`.

    Attributes:
        messages: The beginning of the conversation, system message included.
        tools: Function schemas for the chat template.
        state: Key of the state that the first turn acts in.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]]
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What an environment shows after a turn.

    Attributes:
        messages: What the policy sees next.
        reward: What the turn earned.
        terminated: Whether the episode has ended.
        truncated: Whether the environment cut it short.
        success: Whether it was solved, where the environment says so.
        state: Key of the state that the next turn acts in.
        fresh: Whether the next turn is shown these messages alone, as the beginning of a conversation.
        tool_calls: What the turn called, as in `TurnRecord`.
        invalid: Whether there was no action in the turn.
    """

    messages: Sequence[ChatMessage]
    reward: float
    terminated: bool
    truncated: bool
    success: bool | None
    state: str
    fresh: bool = False
    tool_calls: Sequence[Mapping[str, Any]] = ()
    invalid: bool = False


class Environment(Protocol):
    """One environment at play, wherever it lives. Its methods raise `EnvError` when it fails."""

    async def reset(self, seed: int) -> Started:
        """Begin an episode; the same seed begins the same one."""

    async def step(self, text: str) -> Stepped:
        """Take the policy's turn."""

    async def close(self) -> None:
        """Let go of it."""


class Generator(Protocol):
    """What samples the policy's turns: a `Router`."""

    async def generate(self, request: GenerateRequest, affinity_key: Any) -> Generation:
        """Return what is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Where an episode ends if nobody else ends it.

    Attributes:
        turns: Turns of the policy.
        tokens: Tokens of one sequence, prompts included: the engine's context window.
    """

    turns: int
    tokens: int


async def play(
    environment: Environment,
    generator: Generator,
    renderer: Renderer,
    *,
    spec: EnvironmentSpec,
    seed: int,
    sampling: Sampling,
    limits: EpisodeLimits,
    name: str,
    sample_index: int,
    affinity_key: Any,
    sampling_seed: int | None,
) -> Scored:
    """Play one episode to its end and return it with its reward.

    Args:
        environment: Not yet reset.
        generator: Samples the policy's turns.
        renderer: Chat template and tokenizer of the policy.
        spec: The environment.
        seed: Seed of the environment; members of a group share it.
        sampling: How each turn is drawn; `max_tokens` is the limit of a turn.
        limits: Where it ends at the latest.
        name: Prefix of request ids.
        sample_index: Its place in the group.
        affinity_key: What the engine's prompt cache is shared by.
        sampling_seed: Seed of its turns; None leaves them unseeded.

    Raises:
        EnvError: The environment failed.
        SampleLost: A turn could not be sampled.
    """
    started = await environment.reset(seed)
    talk = _EpisodeConversation(renderer, started.tools)
    prompt_ids = talk.begin(started.messages)
    task = _task(spec, seed, started.messages, prompt_ids)
    turns: list[TurnRecord] = []
    shown, state, success, stop = started.messages, started.state, None, StopReason.LENGTH
    while len(turns) < limits.turns and len(prompt_ids) < limits.tokens:
        budget = min(sampling.max_tokens, limits.tokens - len(prompt_ids))
        began = time.time()
        generation = await generator.generate(
            GenerateRequest(
                request_id=f"{name}-{len(turns)}",
                prompt_ids=prompt_ids,
                sampling=with_limit(sampling, budget),
                seed=seed_of(sampling_seed, len(turns)),
            ),
            affinity_key,
        )
        sampled = time.time()
        talk.conversation.sampled(generation.token_ids, generation.logprobs, generation.segments)
        stepped = await environment.step(generation.text)
        turns.append(_record(shown, state, len(prompt_ids), generation, stepped, began, sampled))
        shown, state = stepped.messages, stepped.state
        if stepped.terminated or stepped.truncated:
            success = stepped.success
            stop = StopReason.STOP if stepped.terminated else StopReason.LENGTH
            break
        prompt_ids = talk.begin(stepped.messages) if stepped.fresh else talk.conversation.observe(stepped.messages)
    if turns:
        turns[-1] = replace(turns[-1], after=tuple(shown))
    trajectory = joined_trajectory(task, sample_index, talk.segments(), talk.spoken, stop)
    return scored_episode(trajectory, turns, {"cuts": float(talk.cuts)}, success)


def _record(
    shown: Sequence[ChatMessage],
    state: str,
    prompt_tokens: int,
    generation: Generation,
    stepped: Stepped,
    began: float,
    sampled: float,
) -> TurnRecord:
    return TurnRecord(
        shown=tuple(shown),
        text=generation.text,
        tokens=len(generation.token_ids),
        prompt_tokens=prompt_tokens,
        reward=float(stepped.reward),
        state=state,
        tool_calls=tuple(stepped.tool_calls),
        invalid=stepped.invalid,
        began=began,
        sampled=sampled,
        ended=time.time(),
    )


class _EpisodeConversation:
    """The conversations of one episode: one, unless its environment begins a new one with every turn.

    Args:
        renderer: Chat template and tokenizer of the policy.
        tools: Function schemas for the chat template.
    """

    def __init__(self, renderer: Renderer, tools: Sequence[Mapping[str, Any]]) -> None:
        self._renderer = renderer
        self._tools = tools
        self._earlier: list[Conversation] = []
        self.conversation = Conversation(renderer)

    def begin(self, messages: Sequence[ChatMessage]) -> IntArray:
        """Start a conversation with these messages; return its first prompt, shape [T]."""
        if self.conversation.turns:
            self._earlier.append(self.conversation)
            self.conversation = Conversation(self._renderer)
        return self.conversation.start(messages, self._tools)

    @property
    def cuts(self) -> int:
        """How often the chat template rewrote history."""
        return sum(one.cuts for one in (*self._earlier, self.conversation))

    @property
    def spoken(self) -> str:
        """What the policy said, for people."""
        messages = (message for one in (*self._earlier, self.conversation) for message in one.messages)
        return "\n".join(str(one.get("content", "")) for one in messages if one["role"] == "assistant")

    def segments(self) -> list[Segmented]:
        """Return all sequences that the engine saw, turns counted through the episode."""
        segments: list[Segmented] = []
        turns = 0
        for conversation in (*self._earlier, self.conversation):
            for segment in conversation.segments():
                counted = np.where(segment.sampled, segment.turns + turns, -1).astype(np.int32)
                segments.append(replace(segment, turns=counted))
            turns += conversation.turns
        return segments


def _task(spec: EnvironmentSpec, seed: int, messages: Sequence[ChatMessage], prompt_ids: Any) -> Task:
    return Task(
        task_id=f"{spec.name}:{seed}",
        source=spec.name,
        domain=spec.name,
        messages=tuple(Message(role=str(one["role"]), content=str(one.get("content", ""))) for one in messages),
        prompt_ids=prompt_ids,
        answer=None,
        metadata={"seed": seed},
        origin=f"{spec.env_id} with seed {seed}",
    )


def scored_episode(
    trajectory: Trajectory, turns: Sequence[TurnRecord], figures: Mapping[str, float], success: bool | None
) -> Scored:
    """Return an episode with what its turns earned.

    Args:
        trajectory: What was sampled.
        turns: Its turns.
        figures: Figures for metrics, beside the number of turns and success.
        success: Whether it was solved, where somebody says so.
    """
    total = sum(turn.reward for turn in turns)
    details = {"turns": float(len(turns)), **figures}
    if success is not None:
        details["success"] = float(success)
    return Scored(
        trajectory=trajectory,
        reward=total,
        rewards={"return": total},
        details=details,
        weights={"return": 1.0},
        turn_rewards=tuple(turn.reward for turn in turns),
        turn_states=tuple(turn.state for turn in turns),
        record=tuple(turns),
    )


def joined_trajectory(
    task: Task, sample_index: int, segments: Sequence[Segmented], text: str, stop: StopReason
) -> Trajectory:
    """Join the sequences that the engine saw, one after another."""
    starts = np.cumsum([0, *(len(segment.token_ids) for segment in segments)]).tolist()
    empty = np.zeros(0, np.int32)
    return Trajectory(
        task=task,
        sample_index=sample_index,
        token_ids=np.concatenate([empty, *(segment.token_ids for segment in segments)]).astype(np.int32),
        sampled=np.concatenate([empty, *(segment.sampled for segment in segments)]).astype(np.bool_),
        logprobs=np.concatenate([empty, *(segment.logprobs for segment in segments)]).astype(np.float32),
        turns=np.concatenate([empty, *(segment.turns for segment in segments)]).astype(np.int32),
        parts=tuple(
            Part(start=start, end=start + len(segment.token_ids), prompt_length=segment.prompt_length)
            for start, segment in zip(starts, segments, strict=False)
        ),
        segments=tuple(
            Segment(start=start + span.start, end=start + span.end, policy_version=span.policy_version)
            for start, segment in zip(starts, segments, strict=False)
            for span in segment.spans
        ),
        text=text,
        stop_reason=stop,
    )


def with_limit(sampling: Sampling, tokens: int) -> Sampling:
    """Return how to draw at most so many tokens."""
    return sampling if tokens == sampling.max_tokens else replace(sampling, max_tokens=tokens)


def seed_of(seed: int | None, turn: int) -> int | None:
    """Return the seed of one turn of an episode."""
    return None if seed is None else int(np.random.SeedSequence([seed, turn]).generate_state(1)[0])
