"""Rollout tokens per second: the whole scheduler on Ray against bare, in-process vLLM.

    python benchmarks/rollout.py

Both sides sample the quickstart's prompts with the same sampling parameters (a seed for every sample, the
log-probability of every sampled token) from the same weights. Our side goes through GenerateScheduler, Ray
actors and VLLMEngine, and every group through a scorer that gives each sample 0; the bare side is
`vllm.LLM.generate` on the same token ids. Speed is per sampled token, so that responses of other lengths do not matter.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import Peer, add_common_arguments, environment_of, finish, interleaved, prompts_of, quickstart, say, serve

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.types import Group, Scored, Task, Trajectory


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(arguments)
    arguments.add_argument("--prompts", type=int, default=16, help="groups of a step")
    arguments.add_argument("--samples", type=int, default=8, help="samples of each group")
    arguments.add_argument("--tokens", type=int, default=32, help="tokens of every response")
    return arguments


class ZeroScorer:
    """Judges nothing, so that rewards cost nothing."""

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        samples = tuple(Scored(trajectory=one, reward=0.0, rewards={}, details={}, weights={}) for one in group.samples)
        return Group(task=group.task, samples=samples, failures=group.failures)


@contextmanager
def ours(config: RLVRConfig, tasks: list[Task], options: argparse.Namespace) -> Iterator[Any]:
    """Yield a function that fills all groups once and returns the seconds it took."""
    from roll_like.cluster import RaySession, ResourceManager
    from roll_like.cluster.driver_loop import DriverLoop
    from roll_like.inference.interface import Sampling
    from roll_like.inference.worker import InferenceWorker
    from roll_like.models.load import resolve_model
    from roll_like.policy_gradient.start import start_inference
    from roll_like.rollout.handles import ActorReplica
    from roll_like.rollout.scheduler import GenerateScheduler, GroupPlan

    with ExitStack() as stack:
        runner = stack.enter_context(DriverLoop())
        stack.enter_context(RaySession(config.resources, Path(tempfile.gettempdir())))
        resources = stack.enter_context(ResourceManager(config.resources))
        resources.allocate()
        inference = start_inference(config, resolve_model(config.model), resources, stack)
        inference.everywhere(InferenceWorker.start)
        scheduler = GenerateScheduler([ActorReplica(inference, 0)], ZeroScorer(), max_in_flight=1024, retries=0)
        turn = iter(range(10**6))

        def run() -> float:
            plan = GroupPlan(
                groups=len(tasks),
                samples_per_group=options.samples,
                sampling=Sampling(temperature=config.rollout.temperature, max_tokens=options.tokens),
                initial_groups=len(tasks),
                max_groups=len(tasks),
                seed=next(turn),
                accept=lambda group: True,
            )
            began = time.perf_counter()
            collected = runner.run(scheduler.fill(iter(tasks), plan))
            took = time.perf_counter() - began
            return took / collected.tokens

        yield run


def bare_side(reading: int, writing: int, model: str, options: argparse.Namespace) -> None:
    """Answer with seconds per token of one `LLM.generate` over all samples."""
    import os

    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        TORCHDYNAMO_DISABLE="1",
    )
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    config = quickstart()
    prompts = [prompt.tolist() for prompt in prompts_of(config, options.prompts)]
    engine = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        max_num_seqs=config.inference.max_running,
        enforce_eager=True,
        kv_cache_memory_bytes=2**30,
        block_size=32,
        enable_chunked_prefill=False,
        max_num_batched_tokens=4096,
        logprobs_mode="processed_logprobs",
    )

    def answer(message: dict[str, Any]) -> float:
        requests = [prompt for prompt in prompts for _ in range(options.samples)]
        params = [
            SamplingParams(
                temperature=config.rollout.temperature,
                max_tokens=options.tokens,
                seed=message["turn"] * 10_000 + index,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for index in range(len(requests))
        ]
        engine.reset_prefix_cache()
        began = time.perf_counter()
        outputs = engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in requests], params, use_tqdm=False)
        took = time.perf_counter() - began
        return took / sum(len(output.outputs[0].token_ids) for output in outputs)

    serve(reading, writing, answer)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        reading, writing, model = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
        bare_side(reading, writing, model, parser().parse_args(sys.argv[5:]))
        return
    options = parser().parse_args()
    from roll_like.data.tasks import load_tasks
    from roll_like.models.load import load_tokenizer, resolve_model

    config = quickstart()
    tokenizer = load_tokenizer(config.model)
    tasks = list(load_tasks(config.data.sources, tokenizer, config.data.max_prompt_tokens).tasks[: options.prompts])
    model = str(resolve_model(config.model).path)
    say("starting both engines")
    environment = environment_of(options.threads, plain=options.plain_environment)
    with Peer(Path(__file__), [model, *sys.argv[1:]], environment) as bare, ours(config, tasks, options) as run:
        turn = iter(range(10**6))
        per_token = interleaved(
            {"bare vLLM": lambda: bare.call(turn=next(turn)), "scheduler": run}, repetitions=options.repetitions
        )
    figures = {name: 1 / seconds for name, seconds in per_token.items()}
    finish(
        {
            "benchmark": "rollout",
            "tokens_per_second": figures["scheduler"],
            "bare_tokens_per_second": figures["bare vLLM"],
            "ratio": figures["scheduler"] / figures["bare vLLM"],
        }
    )


if __name__ == "__main__":
    main()
