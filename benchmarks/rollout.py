"""Rollout tokens per second: the whole scheduler on Ray against bare, in-process vLLM.

    python benchmarks/rollout.py
    python benchmarks/rollout.py --device cuda     # one GPU, shared by both sides
    python benchmarks/rollout.py --evaluation --prompts 128 --tokens 128

Both sides sample the quickstart's prompts, other ones in each turn, with the same engine arguments and sampling
parameters (a seed for every sample, the log-probability of every sampled token) from the same weights. Our side goes
through GenerateScheduler, Ray actors and VLLMEngine, and every group through a scorer that gives each sample 0; the
bare side is `vllm.LLM.generate` on the same token ids. Speed is per sampled token, so that responses of other lengths
do not matter. MFU (benchmarks/mfu.py) compares with matrix products of as many rows as the largest forward pass of a
turn has tokens: that of the prompts, each once.

With `--evaluation` our side is what `roll-like eval --benchmark gsm8k` does with word problems, grading included:
greedy, 8 examples before each question, strings that end an answer. Bare vLLM gets the same prompts and strings, and
nothing else: no seeds, no log-probabilities.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import (
    SMOKE_MODEL,
    Options,
    Peer,
    add_common_arguments,
    add_device_argument,
    device_overrides,
    environment_of,
    finish,
    interleaved,
    quickstart,
    say,
    serve,
)
from mfu import PRODUCTS, Products, matrix_products, utilisation

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.config.benchmarks import FOLDER
from roll_like.models.flops import generation_pass
from roll_like.models.precision import settled
from roll_like.models.shape import load_model_shape
from roll_like.types import Group, Scored, Task, Trajectory

#: vLLM divides longer prompts among several forward passes.
MAX_ROWS = 4096
#: Seconds of one turn, and the number of sampled tokens of each sample, prompt by prompt.
Turn = tuple[float, Sequence[int]]
#: Plays a turn: its number, and its prompts.
Play = Callable[[int, list[Task]], Turn]


def parser() -> Options:
    arguments = Options(__doc__, repetitions=1, prompts=2, samples=4, tokens=8)
    add_common_arguments(arguments)
    add_device_argument(arguments)
    arguments.add_argument("--prompts", type=int, default=16, help="groups of a step")
    arguments.add_argument("--samples", type=int, default=8, help="samples of each group")
    arguments.add_argument("--tokens", type=int, default=32, help="tokens of every response")
    arguments.add_argument("--evaluation", action="store_true", help="measure an evaluation on a benchmark instead")
    arguments.add_argument("overrides", nargs="*", help="key=value of the configuration: model.path=DIRECTORY")
    return arguments


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    options: argparse.Namespace = parser().parse_args(words)
    if options.evaluation:
        options.samples = 1
    return options


def configuration(options: argparse.Namespace) -> RLVRConfig:
    """Return the quickstart's configuration on the device of the options."""
    # a GPU holds both engines
    memory = [] if options.device == "cpu" or options.smoke else ["inference.gpu_memory_utilization=0.4"]
    overrides = [*device_overrides(options, "training", "inference"), *memory, *options.overrides]
    return quickstart(*overrides, smoke=options.smoke)


def evaluation(options: argparse.Namespace, folder: str) -> RLVRConfig:
    """Return the configuration of `roll-like eval`, with a benchmark of other word problems for each turn."""
    from roll_like.run.measure import benchmark_config

    quick, draws, uses = configuration(options), random.Random(0), []
    for turn in range(options.repetitions + 1):
        rows, benchmark = Path(folder, f"turn{turn}.jsonl"), Path(folder, f"turn{turn}.yaml")
        with rows.open("w") as file:
            for _ in range(options.prompts):
                a, b, c = (draws.randint(2, 99) for _ in range(3))
                question = f"A shop has {a} boxes of {b} pens, and sells {c} pens. How many pens are left?"
                file.write(json.dumps({"question": question, "answer": f"#### {a * b - c}"}) + "\n")
        benchmark.write_text((FOLDER / "gsm8k.yaml").read_text())
        uses.append({"name": str(benchmark), "path": str(rows), "max_response_tokens": options.tokens})
    overrides = [*device_overrides(options, "training", "inference"), *options.overrides]
    if options.smoke:
        overrides += ["inference.type=hf", *SMOKE_MODEL]
    found = settled(benchmark_config(None, overrides, uses, quick.model.path))
    assert isinstance(found, RLVRConfig)
    return found


def prompt_of(task: Task) -> list[int]:
    tokens: list[int] = task.prompt_ids.tolist()
    return tokens


class ZeroScorer:
    """Scores nothing, so that rewards cost nothing."""

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        samples = tuple(Scored(trajectory=one, reward=0.0, rewards={}, details={}, weights={}) for one in group.samples)
        return Group(task=group.task, samples=samples, failures=group.failures)


@contextmanager
def ours(config: RLVRConfig, options: argparse.Namespace) -> Iterator[Play]:
    """Yield a function that fills all groups of a turn."""
    from roll_like.cluster import RaySession, ResourceManager
    from roll_like.cluster.driver_loop import DriverLoop
    from roll_like.inference.interface import InferenceEngine, Sampling
    from roll_like.models.load import resolve_model
    from roll_like.policy_gradient.start import start_inference
    from roll_like.rollout.collection import collect_batch
    from roll_like.rollout.scheduler import GenerateScheduler, GroupPlan

    with ExitStack() as stack:
        runner = stack.enter_context(DriverLoop())
        stack.enter_context(RaySession(config.resources, Path(tempfile.gettempdir())))
        resources = stack.enter_context(ResourceManager(config.resources))
        resources.allocate()
        inference = start_inference(config, resolve_model(config.model), resources, stack, runner, follows=False)
        inference.begin(InferenceEngine.start)()
        scheduler = GenerateScheduler(inference.router(config.inference, config.rollout), ZeroScorer())

        def run(turn: int, tasks: list[Task]) -> Turn:
            plan = GroupPlan(
                samples_per_group=options.samples,
                sampling=Sampling(temperature=config.rollout.temperature, max_tokens=options.tokens),
            )
            began = time.perf_counter()
            collected = runner.run(collect_batch(scheduler.runner(plan, turn), iter(tasks), groups=len(tasks)))
            took = time.perf_counter() - began
            return took, [int(one.trajectory.sampled.sum()) for group in collected.groups for one in group.samples]

        yield run


@contextmanager
def evaluated(config: RLVRConfig) -> Iterator[Play]:
    """Yield a function that measures the benchmark of a turn."""
    from roll_like.builtin.pipelines.rlvr.pipeline import RLVRPipeline
    from roll_like.rollout.benchmarks import BenchmarkEvaluator
    from roll_like.run.launch import measuring

    with measuring(config, Path(tempfile.gettempdir())) as (resources, stack):
        evaluator = RLVRPipeline.start_evaluator(config, resources, stack)
        assert isinstance(evaluator, BenchmarkEvaluator)

        def run(turn: int, tasks: list[Task]) -> Turn:
            began = time.perf_counter()
            _, collected = evaluator.evaluators[f"turn{turn}"].evaluate()
            took = time.perf_counter() - began
            assert len(collected.groups) == len(tasks)
            return took, [int(one.trajectory.sampled.sum()) for group in collected.groups for one in group.samples]

        yield run


def bare_side(reading: int, writing: int, model: str, options: argparse.Namespace, folder: str) -> None:
    """Answer with the turns of `LLM.generate` over all samples of the prompts in a message.

    Args:
        reading: Where messages come from.
        writing: Where answers go.
        model: Its directory.
        options: The command line.
        folder: Keeps the files of benchmarks.
    """
    from roll_like.inference.interface import EngineSpec
    from roll_like.inference.vllm.arguments import engine_arguments, vllm_environment
    from roll_like.inference.vllm.config import VLLMConfig

    config = evaluation(options, folder) if options.evaluation else configuration(options)
    settings = config.inference if isinstance(config.inference, VLLMConfig) else VLLMConfig()  # --smoke
    os.environ.update(vllm_environment(settings, options.threads, options.device))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # on GPUs too
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    spec = EngineSpec(
        model_path=model,
        tokenizer_path=model,
        dtype=config.model.dtype,
        device=options.device,
        threads=options.threads,
        tensor_parallel_size=1,
        max_model_len=config.context_window,
        seed=config.seed,
    )
    arguments = engine_arguments(settings, spec)
    for name in ("worker_extension_cls", "weight_transfer_config"):  # only weight updates need them
        del arguments[name]
    engine = LLM(**arguments)

    def sampled(turn: int, index: int) -> SamplingParams:
        if options.evaluation:
            stop = list(config.benchmarks[0].sampling.stop)
            return SamplingParams(
                temperature=0, max_tokens=options.tokens, stop=stop, output_kind=RequestOutputKind.FINAL_ONLY
            )
        return SamplingParams(
            temperature=config.rollout.temperature,
            max_tokens=options.tokens,
            seed=turn * 10_000 + index,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def answer(message: dict[str, Any]) -> Turn:
        requests = [prompt for prompt in message["prompts"] for _ in range(options.samples)]
        params = [sampled(message["turn"], index) for index in range(len(requests))]
        began = time.perf_counter()
        outputs = engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in requests], params, use_tqdm=False)
        took = time.perf_counter() - began
        return took, [len(output.outputs[0].token_ids) for output in outputs]

    serve(reading, writing, answer)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        reading, writing, model = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
        with tempfile.TemporaryDirectory() as folder:
            bare_side(reading, writing, model, options_of(sys.argv[5:]), folder)
        return
    options = options_of(sys.argv[1:])
    from roll_like.data.benchmark_tasks import benchmark_tasks
    from roll_like.data.tasks import load_tasks
    from roll_like.models.load import load_renderer, resolve_model

    stack = ExitStack()
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    config = evaluation(options, folder) if options.evaluation else configuration(options)
    engine_args = getattr(config.inference, "engine_args", {})  # an engine of transformers has none
    model = str(resolve_model(config.model).path)
    shape = load_model_shape(Path(model))
    environment = environment_of(options.threads, plain=options.plain_environment)
    flops_per_token: dict[str, list[float]] = {"bare": [], "scheduler": []}

    def side(name: str, play: Play) -> Callable[[], float]:
        """Return a function that plays the side's next turn; it returns the seconds of a sampled token."""
        turns, order = itertools.count(), itertools.cycle(tasks)

        def work() -> float:
            # other prompts than in the turn before: a prefix cache would have those
            batch = list(itertools.islice(order, options.prompts))
            seconds, lengths = play(next(turns), batch)
            prompts = [prompt_of(task) for task in batch for _ in range(options.samples)]
            needed = generation_pass(zip(prompts, lengths, strict=True))
            flops_per_token[name].append(needed.flops(shape) / sum(lengths))
            return seconds / sum(lengths)

        return work

    say("starting both engines")
    with stack:
        bare = stack.enter_context(Peer(Path(__file__), [model, *sys.argv[1:]], environment))
        renderer = load_renderer(config.model)
        if options.evaluation:
            tasks = tuple(task for use in config.benchmarks for task in benchmark_tasks(use, renderer, "--evaluation"))
        else:
            tasks = load_tasks(config.data.sources, renderer, config.data.max_prompt_tokens).tasks
        largest = generation_pass((prompt_of(task), 1) for task in tasks[: options.prompts])
        products = Products(
            model=model,
            dtype=config.model.dtype,
            device=options.device,
            rows=min(largest.tokens, MAX_ROWS),
            targets=min(config.inference.max_running, options.prompts * options.samples),
            backward=False,
        )
        # vLLM measures free memory while it starts, so one starts after the other, unless it is told what to take
        if options.device == "cuda" and "kv_cache_memory_bytes" not in engine_args:
            bare.call(turn=0, prompts=[])
        multiply = stack.enter_context(matrix_products(products, environment))
        if options.device == "cuda":
            multiply.call()
        scheduler = stack.enter_context(evaluated(config) if options.evaluation else ours(config, options))
        seconds = interleaved(
            {
                "bare": side("bare", lambda turn, tasks: bare.call(turn=turn, prompts=[*map(prompt_of, tasks)])),
                "scheduler": side("scheduler", scheduler),
                PRODUCTS: multiply.call,
            },
            repetitions=options.repetitions,
        )
    rates = {name: statistics.median(flops) / seconds[name] for name, flops in flops_per_token.items()}
    finish(
        options,
        {
            "benchmark": "rollout",
            "tokens_per_second": 1 / seconds["scheduler"],
            "bare_tokens_per_second": 1 / seconds["bare"],
            "ratio": seconds["bare"] / seconds["scheduler"],
            "dtype": config.model.dtype,
            **utilisation(rates, 1e9 / seconds[PRODUCTS]),
        },
    )


if __name__ == "__main__":
    main()
