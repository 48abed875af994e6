"""One episode: a policy and an environment take turns until the episode ends or is truncated.

Token-exact: sampled tokens are kept as sampled, and each prompt extends the tokens before it
(`conversation.py`). A failure of the environment or the engine raises; it never becomes a reward.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from roll_like.agents.conversation import Conversation, Segmented
from roll_like.config.containers import ContainerConfig
from roll_like.config.rewards import RETURN
from roll_like.data.chat import ChatMessage, Renderer, UnseenImages
from roll_like.data.foreign import unbroken
from roll_like.data.images import as_text, as_texts, pictures_of, shift_images
from roll_like.data.kept import joined_kept
from roll_like.data.reasoning import Turn
from roll_like.data.routes import joined_routes
from roll_like.data.shown_images import held_once
from roll_like.errors import ConfigError, EnvError, WorkerError
from roll_like.inference.interface import GenerateRequest, Sampling, derived_seed
from roll_like.rollout.router import Router
from roll_like.types import IntArray, Message, Part, PlacedImage, Scored, StopReason, Task, Trajectory, TurnRecord


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

    @property
    def what(self) -> str:
        """What is played, in words."""
        return self.env_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """An agent program as a run uses it: it sends chat requests to the proxy (`proxy.py`).

    Attributes:
        name: Its name in metrics.
        command: The program and its arguments; found as a shell finds it.
        env: Environment variables beside the run's own.
        directory: Where it is started, in its container if it has one; None is where the run was, or the image says.
        container: What it runs in; None: on this machine as it is.
        timeout_seconds: Longest episode, from its start. What takes longer has failed.
        max_programs: How many may run at a time.
        environment: Gives it its task and scores its answer; None where the program posts its reward.
        limit_reward: Reward of an episode that reached a limit and for which none was posted; None: it has failed.
        reasoning_apart: As in `ProxyEpisode`.
        models: As in `ProxyEpisode`.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    directory: str | None = None
    container: ContainerConfig | None = None
    timeout_seconds: float
    max_programs: int
    environment: EnvironmentSpec | None = None
    limit_reward: float | None = None
    reasoning_apart: bool = True
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersSpec:
    """A verifiers environment as a run uses it.

    A checkpoint keeps its `repr`, which is of what decides the tasks: the rest may be another when a run is resumed.

    Attributes:
        name: Its name in metrics.
        python: The interpreter that has verifiers.
        config: The environment's own configuration, as verifiers reads it.
        seats: Parts of the configuration of every agent that has none of its own.
        select: Which of its tasks are played, as verifiers reads it.
        held_out: So many of the first tasks are for evaluations alone.
        env: Environment variables beside the run's own.
        timeout_seconds: Longest episode.
        max_episodes: How many are played at a time.
        limit_reward: Reward of an episode that the run's limits ended and verifiers did not score; None: it has failed.
    """

    name: str
    python: str = field(repr=False)
    config: Mapping[str, Any]
    seats: Mapping[str, Any]
    select: Mapping[str, Any]
    held_out: int
    env: Mapping[str, str] = field(repr=False)
    timeout_seconds: float = field(repr=False)
    max_episodes: int = field(repr=False)
    limit_reward: float | None = field(default=0.0, repr=False)

    @property
    def what(self) -> str:
        """What is played, in words."""
        return f"verifiers' {self.config['taskset'].get('id')}"


class VerifiersLost(WorkerError, EnvError):
    """The process of an environment ended or hung; its episodes can be played by another."""


#: What may play an episode.
EpisodeSpec: TypeAlias = EnvironmentSpec | ProgramSpec | VerifiersSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What an environment shows after `reset`.

    Attributes:
        messages: The beginning of the conversation, system message included; images are parts of their contents, as
            `Conversation.start` takes them.
        tools: Function schemas for the chat template.
        state: Key of the state that the first turn acts in.
        agent: Who takes the first turn; empty in an environment of one agent.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]]
    state: str
    agent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What an environment shows after a turn.

    Attributes:
        messages: What the policy sees next.
        reward: What the turn earned.
        terminated: Whether the episode has ended.
        truncated: Whether the environment cut it short.
        success: Whether it was solved; None if the environment does not report it.
        state: Key of the state that the next turn acts in.
        fresh: Whether the next turn is shown these messages alone, as the beginning of a conversation.
        tool_calls: What the turn called, as in `TurnRecord`.
        invalid: Whether there was no action in the turn.
        agent: Who takes the next turn, and is shown the messages; empty in an environment of one agent.
        rewards: What the turn earned other agents.
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
    agent: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode's environment, local or on a worker. Its methods raise `EnvError` when it fails."""

    async def reset(self, seed: int) -> Started:
        """Begin an episode; the same seed begins the same one."""

    async def step(self, text: str) -> Stepped:
        """Take the policy's turn: a `Turn`, which knows where its answer is."""

    async def close(self) -> None:
        """Release it."""


class EnvironmentPool(Protocol):
    """Hosts environments."""

    def open(self, spec: EnvironmentSpec) -> Environment:
        """Return an environment that is not yet reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Where an episode is truncated.

    Attributes:
        turns: Turns of the policy.
        tokens: Tokens of one sequence, prompts included: the engine's context window.
    """

    turns: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """How one episode is played.

    Attributes:
        task: What is attempted, with its seed in `metadata`; its prompt is known when the episode has begun.
        sample_index: Its place in the group.
        sampling: How each turn is drawn; `max_tokens` is the limit of a turn.
        limits: Where it ends at the latest.
        name: Prefix of request ids.
        affinity_key: Common to its turns: each goes to the engine that has the turns before it in its prompt cache.
        urgent: Whether its turns go before those of others.
        sampling_seed: Seed of its turns; None leaves them unseeded.
    """

    task: Task
    sample_index: int
    sampling: Sampling
    limits: EpisodeLimits
    name: str
    affinity_key: Hashable
    sampling_seed: int | None
    urgent: bool = False

    @property
    def seed(self) -> int:
        """Seed of the environment; members of a group share it."""
        return int(self.task.metadata["seed"])

    def request(
        self,
        number: int,
        prompt_ids: IntArray,
        images: tuple[PlacedImage, ...] = (),
        *,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
    ) -> GenerateRequest:
        """Return the request for one turn.

        Args:
            number: Its place among the episode's requests.
            prompt_ids: Shorter than `limits.tokens`, shape [T].
            images: The images among them.
            max_tokens: A lower limit than that of `sampling`.
            stop: Strings that end the turn, beside those of `sampling`.
        """
        room = self.limits.tokens - len(prompt_ids)
        most = min(self.sampling.max_tokens, max_tokens or room, room)
        return GenerateRequest(
            request_id=f"{self.name}-{number}",
            prompt_ids=prompt_ids,
            images=images,
            sampling=replace(self.sampling, max_tokens=most, stop=(*self.sampling.stop, *stop)),
            seed=derived_seed(self.sampling_seed, number),
        )


@dataclass(kw_only=True)
class _Seat:
    """One agent's side of an episode: what it was shown, and its turns. Most episodes have one agent."""

    renderer: Renderer
    tools: Sequence[Mapping[str, Any]]
    first: tuple[Message, ...] = ()
    first_prompt: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    first_images: tuple[PlacedImage, ...] = ()
    shown: Sequence[ChatMessage] = ()
    conversations: list[Conversation] = field(default_factory=list)  # more than one if the environment starts new ones
    turns: list[TurnRecord] = field(default_factory=list)
    owed: float = 0.0  # what others' turns earned it before its first one
    cut: bool = False  # whether the token limit cut its last turn

    def show(self, messages: Sequence[ChatMessage], *, fresh: bool) -> IntArray:
        """Return the prompt of the next turn."""
        self.shown = messages = held_once(messages)
        if self.conversations and not fresh:
            return self.conversations[-1].observe(messages)
        self.conversations.append(Conversation(self.renderer))
        prompt_ids = self.conversations[-1].start(messages, self.tools)
        if len(self.conversations) == 1:
            self.first, self.first_prompt = started_messages(messages), prompt_ids
            self.first_images = self.conversations[-1].images
        return prompt_ids

    def earn(self, reward: float) -> None:
        """Add what another agent's turn earned it to its own last turn, or to its first."""
        if self.turns:
            self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + reward)
        else:
            self.owed += reward

    def scored(self, settings: EpisodeSettings, agent: str, stop: StopReason, *, success: bool | None) -> Scored:
        """Return its turns as a trajectory with its rewards."""
        segments: list[Segmented] = []
        first = 0
        for one in self.conversations:
            segments += one.segments(range(first, first + one.turns))
            first += one.turns
        messages = [message for one in self.conversations for message in one.messages]
        sample = scored_episode(
            replace(settings.task, messages=self.first, prompt_ids=self.first_prompt, images=self.first_images),
            settings.sample_index,
            segments,
            self.turns,
            text=unbroken("\n".join(str(one.get("content") or "") for one in messages if one["role"] == "assistant")),
            stop=StopReason.LENGTH if self.cut else stop,
            details={"cuts": float(sum(one.cuts for one in self.conversations))},
            success=success,
        )
        return replace(sample, agent=agent)


async def play(
    environment: Environment, generator: Router, renderer: Renderer, settings: EpisodeSettings
) -> list[Scored]:
    """Play one episode to its end and return it with its reward: a sample for each agent that took a turn.

    Args:
        environment: Not yet reset.
        generator: Samples the policy's turns.

    Raises:
        ConfigError: It shows images, and the model takes texts.
        EnvError: The environment failed, or its first prompt leaves no room for a turn.
        SampleLost: A turn could not be sampled.
    """
    try:
        return await _played(environment, generator, renderer, settings)
    except UnseenImages as error:
        raise unseen(settings.task.source) from error


def unseen(environment: str) -> ConfigError:
    """Return the error that an environment of this name shows images to a model that takes texts."""
    return ConfigError(
        f"the environment {environment!r} shows images, and the model of model.path takes texts only",
        fix="set model.path to a vision-language model (docs/vision.md), or the options of this entry of "
        "`environments` to ones that show texts",
    )


async def _played(
    environment: Environment, generator: Router, renderer: Renderer, settings: EpisodeSettings
) -> list[Scored]:
    limits = settings.limits
    started = await environment.reset(settings.seed)
    seat = _Seat(renderer=renderer, tools=started.tools)
    seats, state, success, stop, number = {started.agent: seat}, started.state, None, StopReason.LENGTH, 0
    prompt_ids = seat.show(started.messages, fresh=True)
    if len(prompt_ids) >= limits.tokens:
        raise EnvError(
            f"the first prompt has {len(prompt_ids)} tokens, and a conversation {limits.tokens} at most, so no turn "
            "could be taken",
            fix="raise rollout.max_episode_tokens, or shorten the prompt",
        )
    while number < limits.turns and len(prompt_ids) < limits.tokens:
        began, tags = time.time(), seat.conversations[-1].reasoning
        request = settings.request(number, prompt_ids, seat.conversations[-1].images)
        generation = await generator.generate(request, settings.affinity_key, settings.urgent)
        sampled, number = time.time(), number + 1
        seat.conversations[-1].sampled(
            generation.token_ids,
            generation.logprobs,
            generation.segments,
            routes=generation.routes,
            kept=generation.kept,
        )
        # of a turn that was cut the environment sees a part: like a single answer that was cut
        seat.cut = generation.stop_reason is StopReason.LENGTH
        stepped = await environment.step(Turn(generation.text, tags))
        seat.turns.append(
            TurnRecord(
                shown=as_texts(seat.shown),
                images=pictures_of(seat.shown),
                text=generation.text,
                tokens=len(generation.token_ids),
                prompt_tokens=len(prompt_ids),
                reward=float(stepped.reward) + (0.0 if seat.turns else seat.owed),
                state=state,
                tool_calls=tuple(stepped.tool_calls),
                invalid=stepped.invalid,
                began=began,
                sampled=sampled,
                ended=time.time(),
                reasoning=tags,
            )
        )
        for agent, reward in stepped.rewards.items():
            seats.setdefault(agent, _Seat(renderer=renderer, tools=started.tools)).earn(reward)
        seat, state = seats.setdefault(stepped.agent, _Seat(renderer=renderer, tools=started.tools)), stepped.state
        if stepped.terminated or stepped.truncated:
            seat.shown, success = stepped.messages, stepped.success
            stop = StopReason.STOP if stepped.terminated else StopReason.LENGTH
            break
        prompt_ids = seat.show(stepped.messages, fresh=stepped.fresh)
    if seat.turns:
        last = seat.turns[-1]
        images = (*last.images, *pictures_of(seat.shown))
        seat.turns[-1] = replace(last, after=as_texts(seat.shown), images=images)
    return [one.scored(settings, agent, stop, success=success) for agent, one in seats.items() if one.turns]


def started_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Return an episode's first messages as the messages of its task."""
    return tuple(Message(role=str(one["role"]), content=as_text(one.get("content"))) for one in messages)


def scored_episode(
    task: Task,
    sample_index: int,
    segments: Sequence[Segmented],
    turns: Sequence[TurnRecord],
    *,
    text: str,
    stop: StopReason,
    details: Mapping[str, float],
    success: bool | None,
) -> Scored:
    """Return an episode with the rewards of its turns.

    Args:
        task: With the messages and the prompt that the episode began with.
        segments: The sequences that the engine saw, turns counted through the episode; joined in this order.
        details: Figures for metrics, beside the number of turns and success.
        success: Whether it was solved, if the environment or the agent reports that.
    """
    starts = np.cumsum([0, *(len(segment.token_ids) for segment in segments)]).tolist()
    empty = np.zeros(0, np.int32)
    trajectory = Trajectory(
        task=task,
        sample_index=sample_index,
        token_ids=np.concatenate([empty, *(segment.token_ids for segment in segments)]).astype(np.int32),
        sampled=np.concatenate([empty, *(segment.sampled for segment in segments)]).astype(np.bool_),
        logprobs=np.concatenate([empty, *(segment.logprobs for segment in segments)]).astype(np.float32),
        turns=np.concatenate([empty, *(segment.turns for segment in segments)]).astype(np.int32),
        parts=tuple(
            Part(
                start=start,
                end=start + len(segment.token_ids),
                prompt_length=segment.prompt_length,
                observed_from=segment.observed_from,
            )
            for start, segment in zip(starts, segments, strict=False)
        ),
        segments=tuple(
            one.shifted(start) for start, segment in zip(starts, segments, strict=False) for one in segment.segments
        ),
        text=text,
        stop_reason=stop,
        record=tuple(turns),
        images=tuple(
            one for start, segment in zip(starts, segments, strict=False) for one in shift_images(segment.images, start)
        ),
        routes=joined_routes([(segment.routes, len(segment.token_ids)) for segment in segments]),
        kept=joined_kept([(segment.kept, len(segment.token_ids)) for segment in segments]),
    )
    total = sum(turn.reward for turn in turns)
    solved = {} if success is None else {"success": float(success)}
    return Scored(
        trajectory=trajectory,
        reward=total,
        rewards={RETURN: total},
        details={"turns": float(len(turns)), **details, **solved},
        weights={RETURN: 1.0},
        turn_rewards=tuple(turn.reward for turn in turns),
        turn_states=tuple(turn.state for turn in turns),
    )
