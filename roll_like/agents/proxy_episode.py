"""One episode of an external agent: its requests are answered by the policy, and a reward is posted for it.

An infrastructure failure makes the whole episode a failure, whatever the agent does afterwards: after a missing answer
its behaviour is not the policy's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from roll_like.agents.chat_api import ApiError, ChatRequest, ChatResponse, as_sent, read_arguments
from roll_like.agents.episode import EpisodeSettings, scored_episode, started_messages
from roll_like.agents.recorder import Draft, RecordedTurn, Recorder
from roll_like.data.chat import ChatMessage, Renderer, UnseenImages
from roll_like.data.images import as_texts, pictures_of
from roll_like.data.reasoning import Turn, split_turn
from roll_like.errors import EnvError, GenerationError
from roll_like.inference.interface import GenerateRequest, Generation
from roll_like.rollout.router import SampleLost
from roll_like.tools.answers import openai_answer
from roll_like.types import THINK, ReasoningTags, Scored, StopReason, TurnRecord


class AnswersRequests(Protocol):
    """What samples the policy's answers: a `Router`, or a stand-in for one."""

    async def generate(self, request: GenerateRequest, affinity_key: Hashable, urgent: bool = False) -> Generation:
        """Return one sample."""


class ProxyEpisode:
    """An episode that an agent plays through the proxy.

    Args:
        base_url: Where the agent finds the proxy, `/v1` included.
        generator: Samples the policy's answers.
        on_close: Called when it is closed.
        shown: First messages of the environment that scores the agent's answer; None: the agent posts its reward.
        reasoning_apart: Whether the agent gets the policy's reasoning in `reasoning_content`, apart from the content.
        models: Names of models by which the agent asks the policy; empty: any name.

    Attributes:
        about: What `GET /task` returns.
        rewarded: Whether it has a reward.
        error: The infrastructure failure, if there was one.
        sent_answers: Answers and their turns, by the digest of the request: a client's retry gets the same answer.
        sent_rewards: Replies to posted rewards, by the digest of the request.
        kept: What requests may leave to the server (`Dialect.history`), by path and id of the answer they go on from.
        recorder: Its conversations.
    """

    def __init__(
        self,
        settings: EpisodeSettings,
        *,
        key: str,
        base_url: str,
        generator: AnswersRequests,
        renderer: Renderer,
        on_close: Callable[[], object],
        shown: Sequence[ChatMessage] | None = None,
        reasoning_apart: bool = False,
        models: Sequence[str] = (),
    ) -> None:
        self.settings = settings
        self.models = models
        self._reasoning_apart = reasoning_apart
        self.about: dict[str, Any] = {"name": settings.task.source, "seed": settings.seed}
        if shown is not None:
            self.about["messages"] = [as_sent(message) for message in shown]
        self.scored_by_environment = shown is not None
        self.sent_answers: dict[bytes, tuple[ChatResponse, RecordedTurn]] = {}
        self.sent_rewards: dict[bytes, dict[str, Any]] = {}
        self.kept: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._items: dict[bytes, Any] = {}
        self.key = key
        self.base_url = base_url
        self.answer: str | None = None
        self._out_of: set[str] = set()
        self._too_long = 0  # tokens of the latest prompt that was refused
        self._generator = generator
        self._renderer = renderer
        self._on_close = on_close
        self.recorder = Recorder(renderer)
        self._sampling: set[asyncio.Task[Generation]] = set()
        self._requests = 0
        self._ignored = 0
        self.rewarded = False
        self.error: Exception | None = None
        self._success: bool | None = None
        self._over = asyncio.Event()

    # ---- for the agent -------------------------------------------------------------------------

    async def chat(self, request: ChatRequest, model: str) -> tuple[ChatResponse, RecordedTurn]:
        """Sample an answer and record it; `take_back` where it could not be delivered.

        Raises:
            ApiError: There is none.
        """
        self.refuse_when_over()
        limits = self.settings.limits
        if len(self.recorder.turns) + len(self._sampling) >= limits.turns:
            self._out_of.add("turns")
            raise ApiError(400, f"this episode has had its {limits.turns} turns; end it now", code="episode_turn_limit")
        began = time.time()
        self._ignored += bool(request.ignored)
        draft = drafted(self.recorder, request)
        try:
            generation = await self._sample(draft, request)
            message, finish_reason = _message(generation, request, draft.reasoning, apart=self._reasoning_apart)
        except BaseException:
            self.recorder.drop(draft)
            raise
        turn = self.recorder.commit(draft, generation, message, began=began, sampled=time.time())
        self._out_of.discard("tokens")  # it went on with less
        return self._answer(model, request, turn, finish_reason), turn

    def keep(self, path: str, answer_id: str, history: Mapping[str, Any]) -> None:
        """Keep what a later request may leave out; what the histories of an episode share is held once."""
        held = {
            key: [self._once(one) for one in value] if isinstance(value, list) else value
            for key, value in history.items()
        }
        self.kept.setdefault(path, {})[answer_id] = held

    def _once(self, item: Any) -> Any:
        digest = hashlib.blake2b(json.dumps(item).encode(), digest_size=16).digest()
        return self._items.setdefault(digest, item)

    def take_back(self, turn: RecordedTurn) -> None:
        """Forget a turn whose answer never arrived, unless the agent has shown that it did."""
        if not turn.reward:
            self.recorder.take_back(turn)

    def award(self, reward: float, success: bool | None = None, *, done: bool = True) -> None:
        """Add a reward to the latest turn.

        Args:
            reward: A finite number.
            success: Whether the task was solved; None if that is unknown.
            done: Whether the episode has ended.

        Raises:
            ApiError: There is no turn that could have earned it, or the episode is over.
        """
        self.refuse_when_over()
        if not self.recorder.turns:
            raise ApiError(400, "a reward came before the first answer; there is no turn that earned it")
        total = self.recorder.turns[-1].reward + reward
        if not math.isfinite(total):
            raise ApiError(400, f"the turn's rewards add up to {total}; expected a finite number", param="reward")
        self.add_reward(reward, success)
        if done:
            self._end()

    def hand_in(self, answer: str) -> None:
        """Take the agent's final answer, for the environment to score.

        Raises:
            ApiError: The episode is over, or there is no turn that could have earned a reward.
        """
        self.refuse_when_over()
        if not self.recorder.turns:
            raise ApiError(400, "an answer was posted before the first chat request")
        self.answer = answer
        self._end()

    # ---- for the caller of `Proxy.open` -----------------------------------------------------------

    @property
    def turns(self) -> int:
        """Answers of the policy so far."""
        return len(self.recorder.turns)

    @property
    def over(self) -> bool:
        """Whether the agent reported the end, or the episode has failed or was closed."""
        return self._over.is_set()

    @property
    def truncated(self) -> bool:
        """Whether a limit refused the agent a turn, and it took none after that."""
        return bool(self._out_of)

    @property
    def final(self) -> Turn:
        """What the agent posted as its answer, else the content of the policy's latest answer."""
        latest = self.recorder.turns[-1] if self.recorder.turns else None
        tags = THINK if latest is None else latest.reasoning
        if self.answer is None:
            content = "" if latest is None else str(latest.message["content"] or "")
            return Turn(content, replace(tags, opened=False) if tags is not None and self._reasoning_apart else tags)
        # without a closing tag it is the answer alone, without the reasoning that the prompt began
        closed = tags is not None and tags.close in self.answer
        return Turn(self.answer, tags if tags is None or closed else replace(tags, opened=False))

    async def finished(self) -> None:
        """Wait until the agent reports the end of the episode, or until it has failed."""
        await self._over.wait()

    def add_reward(self, reward: float, success: bool | None) -> None:
        """Add a reward to the latest turn; None for `success` leaves it as it was."""
        self.recorder.turns[-1].reward += reward
        self.rewarded = True
        self._success = self._success if success is None else success

    @property
    def _last_turn_cut(self) -> bool:
        """Whether the run's limits cut the last answer; one that the agent asked to be as short is whole."""
        turn, settings = self.recorder.turns[-1], self.settings
        tokens = len(turn.generation.token_ids)
        at_limit = tokens >= settings.sampling.max_tokens or turn.prompt_tokens + tokens >= settings.limits.tokens
        return at_limit and turn.generation.stop_reason is StopReason.LENGTH

    def scored(self) -> Scored:
        """Return the episode with its reward.

        Raises:
            SampleLost: An answer could not be sampled.
            GenerationError: No replica is left.
            EnvError: The agent sent no request, or there is no reward.
        """
        if self.error is not None:
            raise self.error
        if not self.recorder.turns and self._too_long:
            raise EnvError(
                f"the agent's first messages are {self._too_long} tokens long, tools included; expected fewer than "
                f"{self.settings.limits.tokens}",
                fix="raise rollout.max_episode_tokens",
            )
        if not self.recorder.turns:
            raise EnvError("the agent sent no chat request", fix="let it send chat completions to OPENAI_BASE_URL")
        if not self.rewarded:
            cut = f", and it had no {' and no '.join(sorted(self._out_of))} left" if self.truncated else ""
            raise EnvError(
                f"the agent posted no reward{cut}",
                fix='post {"reward": …} to OPENAI_BASE_URL + "/reward"'
                + ("; or set `program.limit_reward` to the reward of such an episode" if cut else ""),
            )
        records = [_record(turn) for turn in self.recorder.turns]
        messages, prompt_ids, images = self.recorder.first_prompt
        return scored_episode(
            replace(self.settings.task, messages=started_messages(messages), prompt_ids=prompt_ids, images=images),
            self.settings.sample_index,
            self.recorder.segments(),
            records,
            text="\n".join(record.text for record in records),
            stop=StopReason.LENGTH if self.truncated or self._last_turn_cut else StopReason.STOP,
            details={
                "cuts": float(self.recorder.cuts),
                "conversations": float(self.recorder.conversations),
                "ignored_options": float(self._ignored),
            },
            success=self._success,
        )

    async def close(self) -> None:
        """End it: cancel what is being sampled, and make its key invalid."""
        self._on_close()
        self._end()
        self.kept.clear()
        self._items.clear()
        await asyncio.gather(*self._sampling, return_exceptions=True)

    def fail(self, error: Exception) -> None:
        """Make the episode a failure, whatever follows."""
        self.error = self.error or error
        self._end()

    # ---- inside ----------------------------------------------------------------------------------

    def _end(self) -> None:
        self._over.set()
        for task in self._sampling:
            task.cancel()

    def refuse_when_over(self) -> None:
        """Refuse a request of an episode that has ended.

        Raises:
            ApiError: It has.
        """
        if self.error is not None:
            raise _lost(self.error)
        if self._over.is_set():
            raise ApiError(400, "this episode is over", code="episode_over")

    async def _sample(self, draft: Draft, request: ChatRequest) -> Generation:
        settings, prompt_tokens = self.settings, len(draft.prompt_ids)
        if prompt_tokens >= settings.limits.tokens:
            self._out_of.add("tokens")
            self._too_long = prompt_tokens
            raise ApiError(
                400,
                f"the messages are {prompt_tokens} tokens long, and this model's maximum context length is "
                f"{settings.limits.tokens} tokens, answer included",
                code="context_length_exceeded",
                param="messages",
            )
        wanted = settings.request(
            self._requests, draft.prompt_ids, draft.images, max_tokens=request.max_tokens, stop=request.stop
        )
        self._requests += 1
        task = asyncio.ensure_future(self._generator.generate(wanted, settings.affinity_key, settings.urgent))
        self._sampling.add(task)
        try:
            generation = await task
        except asyncio.CancelledError:
            if task.cancelled() and self._over.is_set():  # else the agent disconnected
                self.refuse_when_over()
            raise
        except GenerationError as error:
            self.fail(error)
            raise _lost(error) from error
        finally:
            self._sampling.discard(task)
        if generation.stop_reason is StopReason.ABORTED:
            self.fail(SampleLost(f"the request {wanted.request_id} was taken back while it was sampled"))
        self.refuse_when_over()
        return generation

    def _answer(self, model: str, request: ChatRequest, turn: RecordedTurn, finish_reason: str) -> ChatResponse:
        sampled = len(turn.generation.token_ids)
        cached = {"cached_tokens": turn.generation.cached_prompt_tokens}
        return ChatResponse(
            answer_id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(turn.sampled),
            model=model,
            message=turn.message,
            finish_reason=finish_reason,
            logprobs={"content": self._logprobs(turn.generation), "refusal": None} if request.logprobs else None,
            usage={
                "prompt_tokens": turn.prompt_tokens,
                "completion_tokens": sampled,
                "total_tokens": turn.prompt_tokens + sampled,
                "prompt_tokens_details": cached,
                "completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens(turn)},
            },
        )

    def _reasoning_tokens(self, turn: RecordedTurn) -> int:
        """Return how many sampled tokens have characters of the reasoning that the agent gets apart."""
        text, reasoning = turn.generation.text, turn.message.get("reasoning_content")
        token_ids = turn.generation.token_ids.tolist()
        if not reasoning:
            return 0
        if reasoning not in text:  # it was not closed, and tags were taken out of it
            return len(token_ids)
        begin = len(text[: text.index(reasoning)].encode())
        end = begin + len(reasoning.encode())
        ends = [*accumulate(len(self._renderer.token_bytes(token_id)) for token_id in token_ids)]
        return sum(start < end and stop > begin for start, stop in pairwise([0, *ends]))

    def _logprobs(self, generation: Generation) -> list[dict[str, Any]]:
        # joined, the bytes are the text; those of one token may be a part of a character
        spelled = [self._renderer.token_bytes(token_id) for token_id in generation.token_ids.tolist()]
        return [
            {"token": text.decode(errors="replace"), "logprob": logprob, "bytes": list(text), "top_logprobs": []}
            for text, logprob in zip(spelled, np.asarray(generation.logprobs, np.float64).tolist(), strict=True)
        ]


def drafted(recorder: Recorder, request: ChatRequest, *, keep: bool = True) -> Draft:
    """Return the draft of a request; where it is not kept, nothing of it stays in the episode.

    Raises:
        ApiError: There is no prompt for its messages.
    """
    try:
        draft = recorder.draft(request.messages, request.tools)
    except UnseenImages as error:
        what = "the messages have images, and the policy takes texts only: model.path is no vision-language model"
        raise ApiError(400, what, code="images_not_supported", param="messages") from error
    except EnvError as error:
        raise ApiError(400, error.message, code="invalid_messages", param="messages") from error
    if not keep:
        recorder.drop(draft)
    return draft


def _lost(error: Exception) -> ApiError:
    return ApiError(503, f"the policy cannot answer, and this episode has failed: {error}", code="sample_lost")


def _message(
    generation: Generation, request: ChatRequest, tags: ReasoningTags | None, *, apart: bool
) -> tuple[ChatMessage, str]:
    """Return an answer as the agent gets it, and why it ended."""
    length = generation.stop_reason is StopReason.LENGTH
    content, calls = generation.text, list[dict[str, Any]]()
    if request.parse_calls:
        content, calls = openai_answer(content, request.tools, reasoning=tags or THINK)
    reasoning, content = split_turn(content, tags) if apart else (None, content)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if not calls:
        return message, "length" if length else "stop"
    return {**message, "content": content or None, "tool_calls": calls}, "length" if length else "tool_calls"


def _record(turn: RecordedTurn) -> TurnRecord:
    calls = tuple(
        {
            "name": call["function"]["name"],
            "arguments": read_arguments(call["function"]["arguments"]),
            "result": turn.results.get(call["id"], ""),
            "error": False,  # unknown to the run
        }
        for call in turn.message.get("tool_calls") or ()
    )
    return TurnRecord(
        shown=as_texts(turn.shown),
        images=pictures_of(turn.shown),
        text=turn.generation.text,
        tokens=len(turn.generation.token_ids),
        prompt_tokens=turn.prompt_tokens,
        reward=turn.reward,
        state=turn.state,
        tool_calls=calls,
        began=turn.began,
        sampled=turn.sampled,
        ended=turn.ended,
        reasoning=turn.reasoning,
    )
