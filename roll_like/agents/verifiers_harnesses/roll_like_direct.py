"""`harness: roll-like-direct`: a conversation without tools, kept in the server's own process.

verifiers' `null` starts a Python for each answer of the policy that follows a user's words, which takes half a
second of a core; this sends one request. For tasksets and simulated users whose agents have no tools.
"""

from __future__ import annotations

import traceback
from typing import Any, ClassVar

import verifiers.v1 as vf
from openai import APIConnectionError, APIStatusError, AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import MODEL_TRANSPORT_ERROR_EXIT_CODE


class DirectHarness(vf.Harness[vf.HarnessConfig]):
    """Asks once for each segment of a conversation."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    #: Of all episodes, made with the first.
    _client: ClassVar[AsyncOpenAI | None] = None

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        """Send the conversation so far; verifiers records the answer."""
        del trace, runtime, mcp_urls
        kind = type(self)
        if kind._client is None:
            kind._client = AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None)
        client = kind._client.with_options(base_url=endpoint, api_key=secret)
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        messages: list[Any] = [*([{"role": "system", "content": system}] if system else []), *said]
        try:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        except APIConnectionError:
            return _failed(MODEL_TRANSPORT_ERROR_EXIT_CODE)
        except APIStatusError:
            return _failed(1)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _failed(status: int) -> vf.ProgramResult:
    """Return what a program would that ends with an exception."""
    return vf.ProgramResult(exit_code=status, stdout="", stderr=traceback.format_exc())


__all__ = ["DirectHarness"]
