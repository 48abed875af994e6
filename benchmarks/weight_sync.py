"""Weight sync: seconds and GB/s of trainer to vLLM, against a plain copy of the same bytes.

    python benchmarks/weight_sync.py                    # the quickstart's model
    python benchmarks/weight_sync.py --model DIRECTORY
    python benchmarks/weight_sync.py --running 32 --context 512
    python benchmarks/weight_sync.py --rank 64          # of the adapters in the third part
    python benchmarks/weight_sync.py --model DIRECTORY --merged-only    # the first part alone

A sync is everything between freezing and going on: gathering, copying into shared memory, checksums on
both sides, loading and packing in vLLM's process, resetting its prefix cache, and the comparison of every
tensor. The plain copy is `torch.Tensor.copy_` from tensor to tensor into memory that is already there.
Trainer and engine are processes of their own, without Ray, which would add about a millisecond a call.

The second part syncs while requests are under way, each at the start of its response to a prompt of its own.
Their keys and values are computed again with the new weights: `recompute_seconds` is the time from the sync's end
to the first token of one more request, which waits behind all of them. `prefill_seconds` is what the same prompts
took at first.

The third part sends adapters of all linear layers alone (`training.lora`, `inference.lora`) to an engine of its own,
and lets both engines generate the same prompts: an engine with an adapter computes two small products more in each
layer, where merged weights need none.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from common import Options, add_common_arguments, environment_of, finish, quickstart, say

T = TypeVar("T")
#: Most tokens of a response. Requests are aborted long before.
RESPONSE = 256


def parser() -> Options:
    arguments = Options(__doc__, repetitions=1, running=2, context=8)
    add_common_arguments(arguments, repetitions=5)
    arguments.add_argument("--model", help="directory of a model; default: the quickstart's")
    arguments.add_argument("--bucket-mib", type=int, default=64, help="size of one bucket")
    arguments.add_argument("--running", type=int, default=16, help="requests under way in the second part")
    arguments.add_argument("--context", type=int, default=256, help="tokens of the prompt of each")
    arguments.add_argument("--merged-only", action="store_true", help="stop after the first part")
    arguments.add_argument("--rank", type=int, default=16, help="rank of the adapters in the third part")
    return arguments


class Engine:
    """An inference engine on an event loop of its own; for the sync, the cluster of this one engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.run(engine.start())

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def everywhere(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [self.run(getattr(self.engine, method.__name__)(*arguments))]

    def close(self) -> None:
        self.run(self.engine.close())


def main(options: argparse.Namespace) -> None:
    from roll_like.inference.interface import EngineSpec
    from roll_like.inference.weight_transfer.shared_memory import SharedMemoryTransfer
    from roll_like.inference.weight_transfer.sync import WeightSync
    from roll_like.models.load import resolve_model
    from roll_like.models.modules import load_causal_lm
    from roll_like.registry import INFERENCE_ENGINES

    config = quickstart("inference.type=vllm", smoke=options.smoke)  # the only engine that takes adapters alone
    dtype = config.model.dtype
    path = options.model or str(resolve_model(config.model).path)
    spec = EngineSpec(
        model_path=path,
        tokenizer_path=path,
        dtype=dtype,
        device="cpu",
        threads=options.threads,
        tensor_parallel_size=1,
        max_model_len=options.context + RESPONSE,
        seed=0,
    )
    engine = Engine(INFERENCE_ENGINES.get(config.inference.type).engine()(config.inference, spec))
    policy = Policy(load_causal_lm(Path(path), dtype))
    sender = SharedMemoryTransfer(engine, options.bucket_mib << 20).connect(policy, rank=0)
    sync = WeightSync(sender.send, engine)
    target = [tensor.clone() for _, tensor in policy.full_weights()]
    pushes, copies = [], []
    for turn in range(-1, options.repetitions):
        push, copy = sync.push(), copy_seconds(policy, target)
        say(f"sync {push.seconds:.3f} s (check {push.check_seconds:.3f} s), plain copy {copy:.3f} s")
        if turn >= 0:  # the first turn touches fresh memory
            pushes.append(push)
            copies.append(copy)
    seconds, plain = statistics.median(push.seconds for push in pushes), statistics.median(copies)
    size = pushes[0].bytes
    figures = {
        "benchmark": "weight_sync",
        "model": Path(path).name,
        "dtype": dtype,
        "bytes": size,
        "seconds": seconds,
        "check_seconds": statistics.median(push.check_seconds for push in pushes),
        "gb_per_second": size / 1e9 / seconds,
        "plain_copy_seconds": plain,
        "plain_copy_gb_per_second": size / 1e9 / plain,
        "ratio": seconds / plain,
        "tensors_checked": pushes[0].checked,
    }
    if options.merged_only:
        sender.close()
        engine.close()
        finish(options, figures)
        return
    inflight = []
    for turn in range(-1, options.repetitions):
        draw = np.random.default_rng(turn + 1)  # other prompts in each turn: the engine keeps those of the last one
        prefill, push, recompute = sync_while_running(engine, sync, options.running, options.context, draw)
        say(f"prefill {prefill:.3f} s, sync while they run {push:.3f} s, prefill again {recompute:.3f} s")
        if turn >= 0:
            inflight.append((prefill, push, recompute))
    sender.close()
    rates = {"merged": tokens_per_second(engine, options.repetitions, options.running, options.context)}
    engine.close()
    adapted = Adapters(load_causal_lm(Path(path), dtype), options.rank, dtype)
    engine = Engine(INFERENCE_ENGINES.get(config.inference.type).engine()(config.inference, adapted.engine(spec)))
    sender = SharedMemoryTransfer(engine, options.bucket_mib << 20).connect(adapted, rank=0)
    sync = WeightSync(sender.send, engine)
    adapter_pushes = [sync.push() for _ in range(options.repetitions + 1)][1:]
    rates["adapters"] = tokens_per_second(engine, options.repetitions, options.running, options.context)
    say(f"adapters {statistics.median(push.seconds for push in adapter_pushes):.3f} s, {rates} tokens/s")
    sender.close()
    engine.close()
    finish(
        options,
        {
            **figures,
            "running": options.running,
            "context": options.context,
            "prefill_seconds": statistics.median(prefill for prefill, _, _ in inflight),
            "running_seconds": statistics.median(push for _, push, _ in inflight),
            "recompute_seconds": statistics.median(recompute for _, _, recompute in inflight),
            "rank": options.rank,
            "adapter_bytes": adapter_pushes[0].bytes,
            "adapter_seconds": statistics.median(push.seconds for push in adapter_pushes),
            "adapter_check_seconds": statistics.median(push.check_seconds for push in adapter_pushes),
            "adapter_tensors_checked": adapter_pushes[0].checked,
            "merged_tokens_per_second": rates["merged"],
            "adapter_tokens_per_second": rates["adapters"],
        },
    )


def tokens_per_second(engine: Engine, repetitions: int, running: int, context: int) -> float:
    """Return how many tokens an engine samples in a second, prefill included; the first turn does not count."""
    from roll_like.inference.interface import GenerateRequest, Sampling

    rates = []
    for turn in range(-1, repetitions):
        draw = np.random.default_rng(100 + turn)
        requests = [
            GenerateRequest(
                request_id=f"{turn}-{index}",
                prompt_ids=draw.integers(100, 1000, context).astype(np.int32),
                sampling=Sampling(max_tokens=RESPONSE // 4),
                seed=index,
            )
            for index in range(running)
        ]
        began, tokens, left = time.perf_counter(), 0, running
        engine.run(engine.engine.submit(requests))
        while left:
            finished = engine.run(engine.engine.poll(60.0))
            left -= len(finished)
            tokens += sum(len(each.token_ids) for each in finished)
        rates.append(tokens / (time.perf_counter() - began))
    return statistics.median(rates[1:])


def sync_while_running(
    engine: Engine, sync: Any, running: int, context: int, draw: np.random.Generator
) -> tuple[float, float, float]:
    """Return the seconds of requests' first prefill, of a sync while they run, and until each has its next token."""
    from roll_like.inference.interface import GenerateRequest, Sampling

    def request(name: str, prompt: int, response: int) -> GenerateRequest:
        prompt_ids = draw.integers(100, 1000, prompt).astype(np.int32)
        return GenerateRequest(
            request_id=name, prompt_ids=prompt_ids, sampling=Sampling(max_tokens=response), seed=None
        )

    def wait_for(name: str) -> None:
        while name not in {result.request_id for result in engine.run(engine.engine.poll(60.0))}:
            pass

    under_way = [request(f"{index}", context, RESPONSE) for index in range(running)]
    submitted = time.perf_counter()
    # requests are served in the order in which they come: when the last one ends, all others have a token
    engine.run(engine.engine.submit([*under_way, request("all have begun", 1, 1)]))
    wait_for("all have begun")
    prefill = time.perf_counter() - submitted
    push = sync.push()
    began = time.perf_counter()
    engine.run(engine.engine.submit([request("all went on", 1, 1)]))
    wait_for("all went on")
    recompute = time.perf_counter() - began
    engine.run(engine.engine.abort([item.request_id for item in under_way]))
    while engine.run(engine.engine.poll(1.0)):
        pass
    return prefill, push.seconds, recompute


class Policy:
    """A transformers model in the trainer's place; it sends the tensors of a checkpoint, as a trainer does."""

    def __init__(self, model: Any) -> None:
        from roll_like.models.checkpoint_names import tensor_groups

        self._model = model
        self._weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self._groups = tensor_groups(model, {name: weight.shape for name, weight in self._weights.items()})

    def full_weights(self) -> Iterator[tuple[str, Any]]:
        from roll_like.models.checkpoint_names import checkpoint_tensors

        for group in self._groups:
            yield from checkpoint_tensors(self._model, group, {name: self._weights[name] for name in group.parameters})


class Adapters:
    """A transformers model with adapters that have learned something, in the trainer's place."""

    def __init__(self, model: Any, rank: int, dtype: str) -> None:
        import torch

        from roll_like.config.training import LoRAConfig
        from roll_like.models.lora import add_adapters, named_weights, targets

        lora = LoRAConfig(rank=rank)
        self._modules = targets(model, lora)
        self._rank = rank
        add_adapters(model, lora, seed=0)
        self._weights = [weight for weight in named_weights(model) if weight.layer is not None]
        self._dtype = getattr(torch, dtype)
        with torch.no_grad():
            for weight in self._weights:
                weight.parts[2].normal_(std=1e-4)

    def engine(self, spec: Any) -> Any:
        """Return what an engine is told that takes these adapters."""
        from roll_like.inference.interface import AdapterSpec

        return replace(spec, adapter=AdapterSpec(rank=self._rank, modules=self._modules))

    def full_weights(self) -> Iterator[tuple[str, Any]]:
        from roll_like.models.lora import adapter_names

        for weight in self._weights:
            yield from zip(adapter_names(weight.name), weight.adapter(self._dtype), strict=True)


def copy_seconds(policy: Policy, target: Sequence[Any]) -> float:
    """Return how long it takes to copy every tensor."""
    began = time.perf_counter()
    for (_, tensor), place in zip(policy.full_weights(), target, strict=True):
        place.copy_(tensor)
    return time.perf_counter() - began


if __name__ == "__main__":
    chosen = parser().parse_args()
    os.environ.update(environment_of(chosen.threads, plain=chosen.plain_environment))
    main(chosen)
