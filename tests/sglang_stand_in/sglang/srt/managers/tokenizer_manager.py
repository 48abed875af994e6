"""The process that requests come to: it hands them on to the scheduler, and reports on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from transformers import AutoTokenizer

from sglang.recorded import RECORD, default_of, with_signature
from sglang.srt.managers.scheduler import Scheduler


class ReqState:
    """What is known here of a request."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.output_ids: list[int] = []
        self.output_logprobs: list[tuple[float, int, None]] = []
        self.input_logprobs: list[tuple[float | None, int, None]] = []
        self.abort_sent = False

    def add(self, report: dict[str, Any]) -> None:
        self.output_ids += report.pop("new_ids")
        self.output_logprobs += report.pop("new_logprobs")
        self.input_logprobs += report.pop("input_logprobs", [])
        meta = report["meta_info"]
        if meta["finish_reason"] is not None and self.output_ids:
            count = len(self.output_ids)
            spans = [
                {**span, "end": min(span["end"], count)} for span in meta["weight_versions"] if span["start"] < count
            ]
            meta |= {"weight_versions": spans, "weight_version": spans[-1]["version"]}
        meta["completion_tokens"] = len(self.output_ids)
        meta |= {"input_token_logprobs": self.input_logprobs, "output_token_logprobs": self.output_logprobs}
        self.reports.put_nowait({"output_ids": self.output_ids, **report})


class TokenizerManager:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(arguments["tokenizer_path"], local_files_only=True)
        self.rid_to_state: dict[str, ReqState] = {}
        self.is_pause = False
        self.is_pause_cond = asyncio.Condition()
        self._context = arguments["context_length"]
        self.scheduler = Scheduler(arguments, self.tokenizer, self._report)
        self._loop: asyncio.Task[None] | None = None

    def end(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
        self.scheduler.end()

    def _report(self, rid: str, report: dict[str, Any]) -> None:
        state = self.rid_to_state.get(rid)
        if state is None:
            return
        state.add(report)
        if report["meta_info"]["finish_reason"] is not None:
            del self.rid_to_state[rid]

    def _send(self, message: Any) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self.scheduler.run())
        self.scheduler.inbox.put_nowait((message, None))

    async def _call(self, message: Any) -> Any:
        """Send a message that is answered, and wait for the answer."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._send(None)
        self.scheduler.inbox.put_nowait((message, answer))
        return await answer

    # ---- requests ------------------------------------------------------------------------------

    @with_signature("TokenizerManager.generate_request")
    async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[dict[str, Any]]:
        assert obj.stream
        fields = RECORD["classes"]["SamplingParams"]
        unknown = set(obj.sampling_params) - set(fields)
        if unknown:
            raise TypeError(f"SamplingParams has no {sorted(unknown)}")
        obj.sampling_params = {name: default_of(default) for name, default in fields.items()} | obj.sampling_params
        if len(obj.input_ids) + obj.sampling_params["max_new_tokens"] > self._context:
            raise ValueError(f"Requested token count exceeds the model's maximum context length of {self._context}")
        assert obj.rid not in self.rid_to_state, f"Duplicate request ID: {obj.rid}"
        state = self.rid_to_state[obj.rid] = ReqState()
        async with self.is_pause_cond:
            await self.is_pause_cond.wait_for(lambda: not self.is_pause)
        self._send(obj)
        while True:
            report = await state.reports.get()
            yield report
            if report["meta_info"]["finish_reason"] is not None:
                return

    @with_signature("TokenizerManager.abort_request")
    def abort_request(self, rid: str, abort_all: bool) -> None:
        assert not abort_all
        state = self.rid_to_state.get(rid)
        if state is None or state.abort_sent:
            return
        state.abort_sent = True
        self._send(("abort", rid))

    @with_signature("TokenizerManager.pause_generation")
    async def pause_generation(self, obj: Any) -> None:
        async with self.is_pause_cond:
            self.is_pause = True
            assert obj.mode != "abort"
            self._send(obj)

    @with_signature("TokenizerManager.continue_generation")
    async def continue_generation(self, obj: Any) -> None:
        async with self.is_pause_cond:
            self.is_pause = False
            self._send(obj)
            self.is_pause_cond.notify_all()

    # ---- memory and weights --------------------------------------------------------------------

    @with_signature("TokenizerControlMixin.get_internal_state")
    async def get_internal_state(self) -> list[dict[str, Any]]:
        return [await self._call("state")]

    @with_signature("TokenizerControlMixin.flush_cache")
    async def flush_cache(self, timeout_s: float | None) -> Any:
        return await self._call("flush")

    @with_signature("TokenizerControlMixin.update_weight_version")
    async def update_weight_version(self, obj: Any) -> None:
        await self._call(obj)

    @with_signature("TokenizerControlMixin.begin_weight_update")
    async def begin_weight_update(self, obj: Any, request: Any) -> tuple[bool, str]:
        return await self._call(obj)

    @with_signature("TokenizerControlMixin.end_weight_update")
    async def end_weight_update(self, obj: Any, request: Any) -> tuple[bool, str]:
        return await self._call(obj)

    @with_signature("TokenizerControlMixin.update_weights_from_tensor")
    async def update_weights_from_tensor(self, obj: Any, request: Any) -> tuple[bool, str]:
        return await self._call(obj)

    @with_signature("TokenizerControlMixin.update_weights_from_distributed")
    async def update_weights_from_distributed(self, obj: Any, request: Any) -> tuple[bool, str]:
        return await self._call(obj)

    @with_signature("TokenizerControlMixin.init_weights_update_group")
    async def init_weights_update_group(self, obj: Any, request: Any) -> tuple[bool, str]:
        return await self._call(obj)

    @with_signature("TokenizerControlMixin.release_memory_occupation")
    async def release_memory_occupation(self, obj: Any, request: Any) -> None:
        await self._call(obj)

    @with_signature("TokenizerControlMixin.resume_memory_occupation")
    async def resume_memory_occupation(self, obj: Any, request: Any) -> None:
        await self._call(obj)
