"""Asks language models for a JSON object through the OpenAI chat API, which vLLM, SGLang and most providers speak."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field

from roll_like.builtin.rewards.judge_answer import MalformedError, parse_object
from roll_like.config.base import ConfigModel
from roll_like.config.rewards import BASE_JUDGE_URL, BASE_JUDGE_VARIABLE, JUDGE_URL, JUDGE_URLS_VARIABLE
from roll_like.errors import RewardError
from roll_like.types import Message

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class JudgeEndpointConfig(ConfigModel):
    """One model that judges, and where it answers."""

    url: str = Field(
        pattern=rf"^(https?://\S+|{JUDGE_URL}|{BASE_JUDGE_URL})$",
        description="Base address of the API, such as `http://localhost:8000/v1`; or `judge`: the model of the `judge` "
        "section; or `base`: with `training.lora`, the model without adapters, in the policy's own engines.",
    )
    model: str = Field(description="Name of the model there.")
    api_key_env: str | None = Field(
        default=None, description="Environment variable with the API key; none where the endpoint asks for none."
    )
    structured: Literal["json_schema", "json_object", "none"] = Field(
        default="json_schema", description="Output constraint requested from the endpoint."
    )
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature of the judge.")
    max_tokens: int = Field(default=1024, ge=16, description="Longest answer of the judge. Tokens.")
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Further fields of the request.")


class JudgeClient:
    """Sends requests to one judge. Only malformed answers are requested again.

    Args:
        timeout_seconds: Limit of one request.
        retries: Further requests after a malformed answer.
        limit: Bounds the requests at a time, of all judges together.

    Raises:
        RewardError: The environment variable with the key is not set.
    """

    def __init__(
        self, config: JudgeEndpointConfig, *, timeout_seconds: float, retries: int, limit: asyncio.Semaphore
    ) -> None:
        self._config = config
        self._timeout = timeout_seconds
        self._retries = retries
        self._limit = limit
        self._requests = 0
        self._headers = {}
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env)
            if not key:
                raise RewardError(
                    f"the environment variable {config.api_key_env!r} that should hold the key of the judge "
                    f"{config.model!r} is not set",
                    fix="export it before the run (and before `ray start` on every machine), or correct `api_key_env`",
                )
            self._headers["Authorization"] = f"Bearer {key}"

    async def ask(
        self,
        client: httpx.AsyncClient,
        messages: Sequence[Message],
        schema: Mapping[str, Any],
        key: str,
        read: Callable[[Any], T],
    ) -> T:
        """Return what `read` makes of one value in the judge's JSON object.

        Args:
            read: Takes it; raises `MalformedError` if it will not do.

        Raises:
            RewardError: The judge cannot be reached, refuses, takes too long, or answers malformed every time.
        """
        problem = ""
        for _ in range(self._retries + 1):
            try:
                return read(parse_object(await self._request(client, messages, schema), key)[key])
            except MalformedError as error:
                problem = str(error)
        raise RewardError(
            f"the judge {self._config.model!r} gave {self._retries + 1} malformed answers; the last one: {problem}",
            fix="try another `structured` mode of the judge, raise its `max_tokens`, or correct the template",
        )

    async def _request(self, client: httpx.AsyncClient, messages: Sequence[Message], schema: Mapping[str, Any]) -> str:
        """Return the text of the judge's answer."""
        import httpx

        address = f"{self._url().rstrip('/')}/chat/completions"
        try:
            async with self._limit:
                # httpx has no limit for a whole request: an answer may drip in for ever
                response = await asyncio.wait_for(
                    client.post(address, json=self._body(messages, schema), headers=self._headers), self._timeout
                )
        except TimeoutError:
            raise RewardError(
                f"the judge at {address} did not answer within {self._timeout:g} s",
                fix="raise `timeout_seconds` of the reward, or lower its `concurrency`",
            ) from None
        except httpx.HTTPError as error:
            raise RewardError(
                f"the judge at {address} cannot be reached: {type(error).__name__}: {error}",
                fix="start it, or correct `url` of the judge",
            ) from error
        if response.status_code != 200:
            raise RewardError(f"the judge at {address} answered {response.status_code}: {response.text[:300]}")
        return _content(response.text)

    def _url(self) -> str:
        """Return the base address; of the run's own judge the next replica's."""
        if self._config.url == BASE_JUDGE_URL:
            base = os.environ.get(BASE_JUDGE_VARIABLE)
            if not base:
                raise RewardError(
                    f"url is {BASE_JUDGE_URL!r}, and no engines with adapters run here",
                    fix="use it in a run with `training.lora`, or give the address of an endpoint",
                )
            return base
        if self._config.url != JUDGE_URL:
            return self._config.url
        replicas = os.environ.get(JUDGE_URLS_VARIABLE, "").split(",")
        if replicas == [""]:
            raise RewardError(
                f"url is {JUDGE_URL!r}, and no judge model runs here",
                fix="add the section `judge: {path: …}` to the run, or give the address of an endpoint",
            )
        self._requests += 1
        return replicas[self._requests % len(replicas)]

    def _body(self, messages: Sequence[Message], schema: Mapping[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": list(messages),
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }
        if self._config.structured == "json_schema":
            wanted = {"name": "result", "strict": True, "schema": dict(schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        elif self._config.structured == "json_object":
            body["response_format"] = {"type": "json_object"}
        return body | self._config.extra_body


def _content(text: str) -> str:
    try:
        choice = json.loads(text)["choices"][0]
        content, reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise MalformedError(f"no chat completion: {text[:200]!r}") from error
    if not isinstance(content, str):
        raise MalformedError(f"an answer without text: {text[:200]!r}")
    if reason == "length":
        raise MalformedError(f"cut by `max_tokens`: {content[-200:]!r}")
    return content
