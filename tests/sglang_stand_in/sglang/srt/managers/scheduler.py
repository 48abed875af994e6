"""The scheduler and its model: a task that advances running requests in turn."""

from __future__ import annotations

import asyncio
import base64
import copy
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll_like.errors import WeightSyncError
from roll_like.inference.hf.weights import CheckpointWeights
from roll_like.models.modules import load_causal_lm
from roll_like.models.renames import cache_argument, cache_of
from roll_like.models.router import RouterReplay
from sglang.srt.managers import io_struct
from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group


class Model:
    """Takes a checkpoint's names, as SGLang's models do."""

    def __init__(self, path: str, dtype: str) -> None:
        self.module = load_causal_lm(Path(path), dtype).requires_grad_(False).eval()
        self._weights = CheckpointWeights(self.module)

    def parameters(self) -> Iterable[Tensor]:
        return self.module.parameters()

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._weights.write(name, tensor)


def cut_views(message: Any, receive: Callable[[Tensor], object]) -> list[tuple[str, Tensor]]:
    """Receive one broadcast, as SGLang's `FlattenedTensorBucket.empty` and `reconstruct_tensors` do."""
    assert message.load_format == "flattened_bucket"
    places, offset = [], 0
    for name, dtype, shape in zip(message.names, message.dtypes, message.shapes, strict=True):
        kind = getattr(torch, dtype)
        if offset % kind.itemsize:
            raise ValueError(f"Unaligned received tensor {name}: byte offset {offset}, dtype {kind}")
        end = offset + torch.Size(shape).numel() * kind.itemsize
        places.append((name, kind, shape, offset, end))
        offset = end
    packed = torch.empty(offset, dtype=torch.uint8)
    receive(packed)
    return [(name, packed[start:end].view(kind).reshape(shape)) for name, kind, shape, start, end in places]


class Request:
    def __init__(self, asked: Any) -> None:
        self.asked, self.sampling = asked, asked.sampling_params
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.input_logprobs: list[float | None] = []
        self.changes: list[tuple[str, int]] = []  # old version, tokens that it sampled
        self.cache: Any = None
        self.cached_tokens = 0
        self.sent = 0
        self.aborted = False
        seed = self.sampling["sampling_seed"]
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def spans(self, version: str) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for each, end in [*self.changes, (version, len(self.ids))]:
            if spans and each == spans[-1]["version"]:
                spans[-1]["end"] = end
            elif not spans or end > spans[-1]["end"]:
                spans.append({"version": each, "start": spans[-1]["end"] if spans else 0, "end": end})
        return spans


class Scheduler:
    def __init__(
        self, arguments: dict[str, Any], tokenizer: Any, report: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._arguments, self._tokenizer, self._report = arguments, tokenizer, report
        self._model = Model(arguments["model_path"], arguments["dtype"])
        eos = self._model.module.generation_config.eos_token_id
        self._eos = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])}
        self._generator = torch.Generator().manual_seed(arguments["random_seed"])
        self._version = arguments["weight_version"]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sglang-stand-in")
        self.inbox: asyncio.Queue[tuple[Any, asyncio.Future[Any] | None]] = asyncio.Queue()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.paused = False
        self._prefixes: dict[tuple[int, ...], Any] = {}
        self._session = False
        self._loaded: Any = None
        self._asleep: set[str] = set()
        self._backup: dict[str, Tensor] = {}
        self._group: Any = None
        self._router: RouterReplay | None = None

    def end(self) -> None:
        self._thread.shutdown(wait=True)
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            busy = not self.paused and (self.waiting or self.running)
            while not self.inbox.empty() or not busy:
                message, answer = await self.inbox.get()
                if message is not None:
                    found = await self._handle(message)
                    if answer is not None and not answer.done():
                        answer.set_result(found)
                busy = not self.paused and (self.waiting or self.running)
            free = self._arguments["max_running_requests"] - len(self.running)
            self.running += self.waiting[:free]
            del self.waiting[:free]
            await loop.run_in_executor(self._thread, self._step)
            for request in list(self.running):
                self._hand_over(request)

    async def _handle(self, message: Any) -> Any:
        if isinstance(message, tuple):
            return self._abort(message[1])
        if isinstance(message, str):
            return {"state": dict, "flush": self._flush}[message]()
        name = type(message).__name__
        if name == "GenerateReqInput":
            self.waiting.append(Request(message))
            return None
        handler = getattr(self, f"_on_{name}")
        return await asyncio.get_running_loop().run_in_executor(self._thread, handler, message)

    # ---- requests ------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self) -> None:
        assert not self._asleep, "computing with memory that is given up"
        for request in self.running:
            self._advance(request)

    def _advance(self, request: Request) -> None:
        prompt, wants_input = request.asked.input_ids, request.asked.logprob_start_len == 0
        if request.cache is None:
            known = None if wants_input or request.ids else self._prefixes.get(tuple(prompt[:-1]))
            request.cache = copy.deepcopy(known)
            request.cached_tokens = 0 if known is None else len(prompt) - 1
            inputs = [*prompt, *request.ids][request.cached_tokens :]
        else:
            inputs = request.ids[-1:]
        output = self._model.module(
            torch.tensor([inputs]), **cache_argument(self._model.module, request.cache), use_cache=True
        )
        if request.cache is None and not request.ids and len(prompt) > 1:
            kept = copy.deepcopy(cache_of(output))
            kept.crop(len(prompt) - 1)
            self._prefixes[tuple(prompt[:-1])] = kept
        request.cache = cache_of(output)
        logits = output.logits[0].float()
        if wants_input and not request.ids:
            told = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(prompt)[1:, None])[:, 0]
            request.input_logprobs = [None, *told.tolist()]
        token, logprob = self._draw(logits[-1], request)
        request.ids.append(token)
        request.logprobs.append(logprob)

    def _draw(self, logits_V: Tensor, request: Request) -> tuple[int, float]:
        sampling = request.sampling
        greedy = sampling["temperature"] == 0
        logprobs_V = torch.log_softmax(logits_V / (1.0 if greedy else sampling["temperature"]), -1)
        if greedy:
            token = int(logprobs_V.argmax())
        else:
            probabilities_V = logprobs_V.exp()
            if sampling["top_k"] not in (-1, ...):
                smallest = probabilities_V.topk(sampling["top_k"]).values[-1]
                probabilities_V = torch.where(probabilities_V < smallest, 0.0, probabilities_V)
            if sampling["top_p"] < 1:
                ordered, order = probabilities_V.sort(descending=True)
                outside = order[ordered.cumsum(0) - ordered > sampling["top_p"] * ordered.sum()]
                probabilities_V[outside] = 0
            followed = request.generator if self._arguments["enable_deterministic_inference"] else None
            token = int(torch.multinomial(probabilities_V, 1, generator=followed or self._generator))
        return token, float(logprobs_V[token])

    def _hand_over(self, request: Request) -> None:
        reason = self._finish_reason(request)
        interval = request.sampling["stream_interval"] or 1
        if reason is None and request.sent > 0 and len(request.ids) - request.sent < interval:
            return
        if reason is not None:
            self.running.remove(request)
        self._send(request, reason)

    def _finish_reason(self, request: Request) -> dict[str, Any] | None:
        if request.aborted:
            return {"type": "abort", "message": "Aborted"}
        if request.ids[-1] in self._eos:
            return {"type": "stop", "matched": request.ids[-1]}
        text = self._tokenizer.decode(request.ids, skip_special_tokens=True)
        for stop in request.sampling["stop"] or ():
            if stop in text:
                return {"type": "stop", "matched": stop}
        if len(request.ids) >= request.sampling["max_new_tokens"]:
            return {"type": "length", "length": len(request.ids)}
        return None

    def _send(self, request: Request, reason: dict[str, Any] | None, *, new: bool = True) -> None:
        meta: dict[str, Any] = {
            "id": request.asked.rid,
            "finish_reason": reason,
            "weight_version": self._version,
            "cached_tokens": request.cached_tokens,
        }
        if reason is not None:
            meta["weight_versions"] = request.spans(self._version)
            if request.asked.return_routed_experts:
                assert self._arguments["enable_return_routed_experts"]
                meta["routed_experts"] = self._routed_experts([*request.asked.input_ids, *request.ids])
        since = request.sent if new else len(request.ids)
        ids, logprobs = request.ids[since:], request.logprobs[since:]
        report = {
            "meta_info": meta,
            "new_ids": ids,
            "new_logprobs": [(value, token, None) for value, token in zip(logprobs, ids, strict=True)],
        }
        if request.sent == 0 and request.input_logprobs:
            pairs = zip(request.input_logprobs, request.asked.input_ids, strict=True)
            report["input_logprobs"] = [(value, token, None) for value, token in pairs]
        request.sent = len(request.ids)
        self._report(request.asked.rid, report)

    @torch.inference_mode()
    def _routed_experts(self, tokens: list[int]) -> str:
        """The experts of all tokens but the last, as SGLang sends them."""
        router = self._router = self._router or RouterReplay(self._model.module, "the stand-in")
        with router.record() as found:
            self._model.module(torch.tensor([tokens[:-1]]), use_cache=False)
        layers = [found[layer] for layer in range(router.experts.layers)]
        return base64.b64encode(torch.stack(layers, 1).to(torch.int32).numpy().tobytes()).decode()

    def _abort(self, beginning: str) -> None:
        for request in [each for each in self.waiting if each.asked.rid.startswith(beginning)]:
            self.waiting.remove(request)
            self._send(request, {"type": "abort", "message": "Abort in waiting queue"}, new=False)
        for request in self.running:
            if request.asked.rid.startswith(beginning):
                request.aborted = True

    def _flush(self) -> Any:
        success = not self.running and (self.paused or not self.waiting)
        if success:
            self._prefixes.clear()
        return io_struct.FlushCacheReqOutput(success=success)

    def _on_PauseGenerationReqInput(self, message: Any) -> None:
        self.paused = True
        if message.mode == "retract":
            for request in self.running:
                request.cache = None
            self.waiting = self.waiting + self.running
            self.running = []

    def _on_ContinueGenerationReqInput(self, message: Any) -> None:
        self.paused = False

    # ---- memory and weights --------------------------------------------------------------------

    def _on_UpdateWeightVersionReqInput(self, message: Any) -> None:
        if message.new_version != self._version:
            for request in (*self.waiting, *self.running):
                if request.ids:
                    request.changes.append((self._version, len(request.ids)))
            self._version = message.new_version

    def _on_BeginWeightUpdateReqInput(self, message: Any) -> tuple[bool, str]:
        if self._session:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self._session = True
        return True, "Success"

    def _on_EndWeightUpdateReqInput(self, message: Any) -> tuple[bool, str]:
        if not self._session:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self._session = False
        return True, "Success"

    def _on_UpdateWeightsFromTensorReqInput(self, message: Any) -> tuple[bool, str]:
        if not self._session:
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        assert len(message.serialized_named_tensors) == self._arguments["tp_size"]
        tensors = MultiprocessingSerializer.deserialize(message.serialized_named_tensors[0])
        tensors = [(name, tensor.to("cpu")) for name, tensor in tensors]
        assert message.load_format in self._arguments["custom_weight_loader"], "Unknown load_format"
        module, _, function = message.load_format.rpartition(".")
        getattr(import_module(module), function)(self._model, tensors)
        return self._after_update(message)

    def _on_InitWeightsUpdateGroupReqInput(self, message: Any) -> tuple[bool, str]:
        self._group = init_custom_process_group(
            backend=message.backend,
            init_method=f"tcp://{message.master_address}:{message.master_port}",
            world_size=message.world_size,
            rank=message.rank_offset,
            group_name=message.group_name,
        )
        return True, "Succeeded to initialize custom process group."

    def _on_UpdateWeightsFromDistributedReqInput(self, message: Any) -> tuple[bool, str]:
        if not self._session:
            return (
                False,
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()",
            )
        received = cut_views(message, lambda packed: torch.distributed.broadcast(packed, src=0, group=self._group))
        try:
            self._model.load_weights(received)
        except WeightSyncError as error:
            return False, f"Failed to update parameter online: {error}."
        return self._after_update(message)

    def _after_update(self, message: Any) -> tuple[bool, str]:
        if message.flush_cache and not self._flush().success:
            return False, "Weights were updated, but the cache was not flushed because requests are still running"
        return True, "Success"

    def _on_ReleaseMemoryOccupationReqInput(self, message: Any) -> None:
        assert self._arguments["enable_memory_saver"]
        assert not self.running, "release_memory_occupation should be called only when server is idle."
        assert self.paused, "release_memory_occupation should be called only when server is idle."
        self._asleep |= set(message.tags)
        if "kv_cache" in message.tags:
            self._prefixes.clear()
        if "weights" in message.tags:
            state = self._model.module.state_dict()
            if self._arguments["enable_weights_cpu_backup"]:
                self._backup = {name: tensor.clone() for name, tensor in state.items()}
            for tensor in state.values():
                tensor.fill_(torch.nan)

    def _on_ResumeMemoryOccupationReqInput(self, message: Any) -> None:
        for tag in message.tags:
            self._asleep.remove(tag)
        if "weights" in message.tags:
            self._model.module.load_state_dict(self._backup)
