"""One episode of an agent that is somebody else's program: it asks for answers, and somebody says what they are worth.

Infrastructure that fails makes the whole episode a failure, whatever the agent does afterwards; an agent that could not
be answered did not act as the policy would have had it.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roll_like.agents.chat_api import Answer, ApiError, ChatRequest, read_arguments
from roll_like.agents.conversation import ChatMessage, Renderer
from roll_like.agents.episode import (
    EpisodeLimits,
    Generator,
    joined_trajectory,
    scored_episode,
    seed_of,
    with_limit,
)
from roll_like.agents.recorder import Draft, RecordedTurn, Recorder
from roll_like.errors import EnvError, GenerationError
from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.rollout.router import SampleLost
from roll_like.tools import ToolCall, parse_tool_calls
from roll_like.types import Message, Scored, StopReason, Task, TurnRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """How one episode is played.

    Attributes:
        task: What is attempted; its prompt is known when the first request came.
        sample_index: Its place in the group.
        sampling: How answers are drawn; `max_tokens` is the limit of one.
        limits: Where it ends at the latest.
        name: Prefix of request ids.
        affinity_key: What the engine's prompt cache is shared by.
        sampling_seed: Seed of its answers; None leaves them unseeded.
        about: What `GET /task` tells the agent.
        scored_by: Who says what it is worth: `agent` posts a reward, `environment` wants an answer.
    """

    task: Task
    sample_index: int
    sampling: Sampling
    limits: EpisodeLimits
    name: str
    affinity_key: Any
    sampling_seed: int | None
    about: Mapping[str, Any]
    scored_by: str


class ProxyEpisode:
    """An episode that an agent plays through the proxy.

    Args:
        settings: How it is played.
        key: The agent's API key.
        base_url: Where the agent finds the proxy, `/v1` included.
        generator: Samples the policy's answers.
        renderer: Chat template and tokenizer of the policy.
        on_close: Called when it is closed.
    """

    def __init__(
        self,
        settings: EpisodeSettings,
        *,
        key: str,
        base_url: str,
        generator: Generator,
        renderer: Renderer,
        on_close: Callable[[ProxyEpisode], None],
    ) -> None:
        self.settings = settings
        self.key = key
        self.base_url = base_url
        self.answer: str | None = None
        self._out_of: set[str] = set()
        self._generator = generator
        self._renderer = renderer
        self._on_close = on_close
        self._recorder = Recorder(renderer)
        self._sampling: set[asyncio.Task[Generation]] = set()
        self._requests = 0
        self._ignored = 0
        self._rewarded = False
        self._success: bool | None = None
        self._error: Exception | None = None
        self._over = asyncio.Event()

    # ---- for the agent -------------------------------------------------------------------------

    async def chat(self, request: ChatRequest, model: str) -> tuple[Answer, RecordedTurn]:
        """Sample an answer and record it; `take_back` where it could not be delivered.

        Raises:
            ApiError: There is none.
        """
        self._refuse_when_over()
        limits = self.settings.limits
        if len(self._recorder.turns) + len(self._sampling) >= limits.turns:
            self._out_of.add("turns")
            raise ApiError(400, f"this episode has had its {limits.turns} turns; end it now", code="episode_turn_limit")
        began = time.time()
        self._ignored += bool(request.ignored)
        try:
            draft = self._recorder.draft(request.messages, request.tools)
        except EnvError as error:
            raise ApiError(400, error.message, code="invalid_messages", param="messages") from error
        try:
            generation = await self._sample(draft, request)
            message, finish_reason = _message(generation, request)
        except BaseException:
            self._recorder.drop(draft)
            raise
        turn = self._recorder.commit(draft, generation, message, began=began, sampled=time.time())
        self._out_of.discard("tokens")  # it went on with less
        return self._answer(model, request, turn, finish_reason), turn

    def take_back(self, turn: RecordedTurn) -> None:
        """Forget a turn whose answer never arrived, unless the agent has shown that it did."""
        if not turn.reward:
            self._recorder.take_back(turn)

    def award(self, reward: float, success: bool | None = None, *, done: bool = True) -> None:
        """Add a reward to the latest turn.

        Args:
            reward: A finite number.
            success: Whether the task was solved; None says nothing about it.
            done: Whether the episode has ended.

        Raises:
            ApiError: There is no turn that could have earned it, or the episode is over.
        """
        self._refuse_when_over()
        if not self._recorder.turns:
            raise ApiError(400, "a reward came before the first answer; there is no turn that earned it")
        total = self._recorder.turns[-1].reward + reward
        if not math.isfinite(total):
            raise ApiError(400, f"the turn's rewards add up to {total}; expected a finite number", param="reward")
        self._recorder.turns[-1].reward = total
        self._rewarded = True
        self._success = self._success if success is None else success
        if done:
            self._end()

    def hand_in(self, answer: str) -> None:
        """Take the agent's final answer, for the environment to score.

        Raises:
            ApiError: The episode is over, or there is no turn that could have earned a reward.
        """
        self._refuse_when_over()
        if not self._recorder.turns:
            raise ApiError(400, "an answer was handed in before the policy was asked for one")
        self.answer = answer
        self._end()

    # ---- for whoever plays it --------------------------------------------------------------------

    @property
    def turns(self) -> int:
        """Answers of the policy so far."""
        return len(self._recorder.turns)

    @property
    def over(self) -> bool:
        """Whether the agent said that it is done, or the episode has failed or was closed."""
        return self._over.is_set()

    @property
    def truncated(self) -> bool:
        """Whether the agent was refused a turn because of a limit, and took none after that."""
        return bool(self._out_of)

    @property
    def rewarded(self) -> bool:
        """Whether a reward has been posted."""
        return self._rewarded

    @property
    def error(self) -> Exception | None:
        """What infrastructure did to the episode; None where it is sound."""
        return self._error

    @property
    def last_content(self) -> str:
        """The content of the policy's latest answer."""
        return str(self._recorder.turns[-1].message["content"] or "") if self._recorder.turns else ""

    async def finished(self) -> None:
        """Wait until the agent says that the episode is done, or until it has failed."""
        await self._over.wait()

    def judged(self, reward: float, success: bool | None) -> None:
        """Add what an environment says that the episode is worth to its latest turn."""
        self._recorder.turns[-1].reward += reward
        self._rewarded = True
        self._success = success

    def scored(self) -> Scored:
        """Return the episode with its reward.

        Raises:
            SampleLost: An answer could not be sampled.
            GenerationError: No replica is left.
            EnvError: No answer was asked for, or nobody said what they are worth.
        """
        if self._error is not None:
            raise self._error
        if not self._recorder.turns:
            raise EnvError("the agent asked for no answer", fix="let it send chat completions to OPENAI_BASE_URL")
        if not self._rewarded:
            cut = f", and it had no {' and no '.join(sorted(self._out_of))} left" if self.truncated else ""
            raise EnvError(
                f"the agent posted no reward{cut}",
                fix='post {"reward": …} to OPENAI_BASE_URL + "/reward"'
                + ("; or set `program.limit_reward` to what such an episode is worth" if cut else ""),
            )
        records = [_record(turn) for turn in self._recorder.turns]
        messages, prompt_ids = self._recorder.first_prompt
        shown = tuple(Message(role=str(one["role"]), content=str(one["content"])) for one in messages)
        trajectory = joined_trajectory(
            replace(self.settings.task, messages=shown, prompt_ids=prompt_ids),
            self.settings.sample_index,
            self._recorder.segments(),
            "\n".join(record.text for record in records),
            StopReason.LENGTH if self.truncated else StopReason.STOP,
        )
        figures = {
            "cuts": float(self._recorder.cuts),
            "conversations": float(self._recorder.conversations),
            "ignored_options": float(self._ignored),
        }
        return scored_episode(trajectory, records, figures, self._success)

    async def close(self) -> None:
        """End it: what is being sampled is taken back, and its key opens nothing any more."""
        self._on_close(self)
        self._end()
        await asyncio.gather(*self._sampling, return_exceptions=True)

    def fail(self, error: Exception) -> None:
        """Make the episode a failure, whatever comes."""
        if self._error is None:
            self._error = error
        self._end()

    # ---- inside ----------------------------------------------------------------------------------

    def _end(self) -> None:
        self._over.set()
        for task in self._sampling:
            task.cancel()

    def _refuse_when_over(self) -> None:
        if self._error is not None:
            raise _lost(self._error)
        if self._over.is_set():
            raise ApiError(400, "this episode is over", code="episode_over")

    async def _sample(self, draft: Draft, request: ChatRequest) -> Generation:
        settings, prompt_tokens = self.settings, len(draft.prompt_ids)
        room = settings.limits.tokens - prompt_tokens
        if room < 1:
            self._out_of.add("tokens")
            raise ApiError(
                400,
                f"the messages are {prompt_tokens} tokens long, and this model's maximum context length is "
                f"{settings.limits.tokens} tokens, answer included",
                code="context_length_exceeded",
                param="messages",
            )
        sampling = with_limit(settings.sampling, min(settings.sampling.max_tokens, request.max_tokens or room, room))
        number, self._requests = self._requests, self._requests + 1
        wanted = GenerateRequest(
            request_id=f"{settings.name}-{number}",
            prompt_ids=draft.prompt_ids,
            sampling=replace(sampling, stop=(*sampling.stop, *request.stop)) if request.stop else sampling,
            seed=seed_of(settings.sampling_seed, number),
        )
        task = asyncio.ensure_future(self._generator.generate(wanted, settings.affinity_key))
        self._sampling.add(task)
        try:
            generation = await task
        except asyncio.CancelledError:
            if task.cancelled() and self._over.is_set():  # else it is the agent that went away
                self._refuse_when_over()
            raise
        except GenerationError as error:
            self.fail(error)
            raise _lost(error) from error
        finally:
            self._sampling.discard(task)
        if generation.stop_reason is StopReason.ABORTED:
            self.fail(SampleLost(f"the request {wanted.request_id} was taken back while it was sampled"))
        self._refuse_when_over()
        return generation

    def _answer(self, model: str, request: ChatRequest, turn: RecordedTurn, finish_reason: str) -> Answer:
        sampled = len(turn.generation.token_ids)
        cached = {"cached_tokens": turn.generation.cached_prompt_tokens}
        return Answer(
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
            },
        )

    def _logprobs(self, generation: Generation) -> list[dict[str, Any]]:
        texts = [self._renderer.decode([token_id]) for token_id in generation.token_ids.tolist()]
        return [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, np.asarray(generation.logprobs, np.float64).tolist(), strict=True)
        ]


def _lost(error: Exception) -> ApiError:
    return ApiError(503, f"the policy cannot answer, and this episode has failed: {error}", code="sample_lost")


def _message(generation: Generation, request: ChatRequest) -> tuple[ChatMessage, str]:
    """Return an answer as the agent gets it, and why it ended."""
    rest, found = parse_tool_calls(generation.text, "auto", request.tools) if request.parse_calls else ("", [])
    calls = [call for call in found if isinstance(call, ToolCall)]
    length = generation.stop_reason is StopReason.LENGTH
    if not calls:
        return {"role": "assistant", "content": generation.text}, "length" if length else "stop"
    # what looks like a call and cannot be read is text
    text = "\n".join(part for part in (rest, *(one.text for one in found if not isinstance(one, ToolCall))) if part)
    written = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in calls
    ]
    message = {"role": "assistant", "content": text or None, "tool_calls": written}
    return message, "length" if length else "tool_calls"


def _record(turn: RecordedTurn) -> TurnRecord:
    calls = tuple(
        {
            "name": call["function"]["name"],
            "arguments": read_arguments(call["function"]["arguments"]),
            "result": turn.results.get(call["id"], ""),
            "error": False,  # only the agent knows
        }
        for call in turn.message.get("tool_calls") or ()
    )
    return TurnRecord(
        shown=turn.shown,
        text=turn.generation.text,
        tokens=len(turn.generation.token_ids),
        prompt_tokens=turn.prompt_tokens,
        reward=turn.reward,
        state=turn.state,
        tool_calls=calls,
        began=turn.began,
        sampled=turn.sampled,
        ended=turn.ended,
    )
