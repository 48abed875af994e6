"""Several judges, each asked one or more times: the settings that rewards with judges share, and how votes count."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import fmean, multimode
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from roll_like import Completion, RewardConfig
from roll_like.builtin.rewards import judge_prompts
from roll_like.builtin.rewards.judge_answer import MalformedError
from roll_like.builtin.rewards.judge_client import JudgeClient, JudgeEndpointConfig
from roll_like.config.rewards import BASE_JUDGE_URL, JUDGE_URL
from roll_like.types import Message

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

_SCORE = re.compile(r"([-+]?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*(\d+(?:\.\d+)?))?")


class JuryConfig(RewardConfig):
    """Settings of rewards that ask judges."""

    judges: Annotated[tuple[JudgeEndpointConfig, ...], Field(min_length=1)] = Field(
        description="Models that judge; all of them answer each question."
    )
    votes: int = Field(default=1, ge=1, description="Answers that each judge samples to each question.")
    vote: Literal["mean", "majority"] = Field(
        default="mean",
        description="How all judges' answers to a question count: their mean, or the most frequent one (the mean of "
        "several that are equally frequent).",
    )
    timeout_seconds: float = Field(default=30.0, gt=0, description="Limit of one request. Seconds.")
    malformed_retries: int = Field(default=2, ge=0, description="Further requests after a malformed answer.")
    concurrency: int = Field(default=16, ge=1, description="Requests of one reward worker at a time.")

    @model_validator(mode="after")
    def _votes_can_differ(self) -> Self:
        for index, judge in enumerate(self.judges if self.votes > 1 else ()):
            if judge.extra_body.get("temperature", judge.temperature) == 0:
                raise ValueError(
                    f"votes: {self.votes} samples of judge {index} at temperature 0 are the same answer each time; set "
                    f"judges.{index}.temperature, such as 0.7, or votes: 1"
                )
            if "seed" in judge.extra_body:
                raise ValueError(
                    f"votes: {self.votes} samples of judge {index} with one seed are the same answer each time; remove "
                    f"judges.{index}.extra_body.seed"
                )
        return self

    def counted(self, answers: Sequence[float]) -> float:
        """Return what all judges' answers to one question come to.

        >>> JuryConfig.counted(JuryConfig.model_construct(vote="majority"), [1.0, 1.0, 0.0])
        1.0
        """
        return fmean(answers if self.vote == "mean" else multimode(answers))


class Jury:
    """Asks all judges, each as often as it has votes.

    Raises:
        RewardError: The environment variable with a judge's key is not set.
    """

    def __init__(self, config: JuryConfig) -> None:
        self._config = config
        self._tls: ssl.SSLContext | None = None
        limit = asyncio.Semaphore(config.concurrency)
        self._clients = [
            JudgeClient(judge, timeout_seconds=config.timeout_seconds, retries=config.malformed_retries, limit=limit)
            for judge in config.judges
        ]

    @property
    def side_by_side(self) -> int:
        """As many groups as keep `concurrency` requests under way; groups have eight answers or more."""
        return max(1, self._config.concurrency // 8)

    @asynccontextmanager
    async def connections(self) -> AsyncIterator[httpx.AsyncClient]:
        """Open what `ask` sends its requests through."""
        import httpx

        # a proxy of the environment leads to providers, and away from a judge of this run
        proxy = all(judge.url not in (JUDGE_URL, BASE_JUDGE_URL) for judge in self._config.judges)
        if self._tls is None:
            self._tls = httpx.create_ssl_context()  # reads all certificates: once is enough
        timeout = self._config.timeout_seconds
        async with httpx.AsyncClient(timeout=timeout, trust_env=proxy, verify=self._tls) as client:
            yield client

    async def ask(
        self,
        client: httpx.AsyncClient,
        messages: Sequence[Message],
        schema: Mapping[str, Any],
        key: str,
        read: Callable[[Any], T],
    ) -> list[list[T]]:
        """Return the answers of each judge, `votes` of them; the arguments are those of `JudgeClient.ask`.

        Raises:
            RewardError: A judge failed; a count of fewer votes would be on another scale.
        """
        votes = self._config.votes
        asked = [judge.ask(client, messages, schema, key, read) for judge in self._clients for _ in range(votes)]
        answers = await asyncio.gather(*asked)
        return [answers[start : start + votes] for start in range(0, len(answers), votes)]


def object_schema(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a judge's answer: its reasoning, then these fields."""
    return {
        "type": "object",
        "properties": {"reasoning": {"type": "string"}, **fields},
        "required": ["reasoning", *fields],
        "additionalProperties": False,
    }


def judged_text(completion: Completion) -> str:
    """Return what is judged: the response, or an episode after its first messages; empty where nothing was written."""
    if not completion.turns:
        return completion.text if completion.text.strip() else ""
    played = completion.conversation[len(completion.turns[0].shown) :]
    if not any(message["role"] == "assistant" and message["content"].strip() for message in played):
        return ""
    return judge_prompts.conversation(played)


def read_score(found: Any, lowest: float, highest: float) -> float:
    """Return a score on 0 to 1; it may be written as a text, alone or out of the highest: `8`, `"8/10"`.

    Raises:
        MalformedError: It is no number from `lowest` to `highest`.
    """
    match = _SCORE.fullmatch(found.strip()) if isinstance(found, str) else None
    score = float(match[1]) if match is not None and float(match[2] or highest) == highest else found
    if isinstance(score, bool) or not isinstance(score, int | float) or not lowest <= score <= highest:
        raise MalformedError(f"`score` should be a number from {lowest:g} to {highest:g}, found {found!r}")
    return (score - lowest) / (highest - lowest)
