"""Whole GRPO steps, samples per second: this package against TRL's GRPOTrainer.

    make oracle-setup                # installs TRL, apart from .venv
    python benchmarks/vs_trl.py
    python benchmarks/vs_trl.py --device cuda      # one GPU, shared by both sides

Same model, prompts, samples of a prompt, reward, longest response, precision (weights in `model.dtype`: bfloat16, or
float32 on a CPU without it) and one update a step; no reference model, no evaluation, no saving, no trackers. On a CPU
TRL generates with transformers, as it does on a machine without a GPU; on a GPU with vLLM in its own process
(`vllm_mode="colocate"`), with a cache as large as ours, and awake all the time, as ours is. Both sides start first and
then take turns, step by step; the first of each is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from common import (
    Options,
    Peer,
    add_common_arguments,
    add_device_argument,
    device_overrides,
    environment_of,
    find_trl,
    finish,
    quickstart,
    say,
    serve,
)
from trainers.trl_side import Turns

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.pipelines.rlvr.pipeline import RLVRPipeline
from roll_like.run.state import RunContext


def parser() -> Options:
    arguments = Options(__doc__, repetitions=1, trl_micro_batch=4)
    add_common_arguments(arguments)
    add_device_argument(arguments)
    arguments.add_argument("--trl-micro-batch", type=int, default=32, help="samples of one of TRL's micro-batches")
    arguments.add_argument("--cache-gib", type=int, default=4, help="key-value cache of each side's vLLM on a GPU")
    arguments.add_argument("overrides", nargs="*", help="key=value of the configuration: model.path=DIRECTORY")
    return arguments


def configuration(options: argparse.Namespace, output_dir: str = "runs") -> RLVRConfig:
    """Return the quickstart without evaluation, checkpoints and trackers."""
    on_gpu = (
        *device_overrides(options, "training", "inference"),
        "training.sleep=false",
        "inference.sleep=false",
        "inference.gpu_memory_utilization=0.1",
        f"inference.engine_args={{kv_cache_memory_bytes: {options.cache_gib << 30}}}",
    )
    return quickstart(
        *(on_gpu if options.device == "cuda" else ()),
        f"steps={options.repetitions + 1}",
        f"output_dir={output_dir}",
        "evaluation=null",
        "checkpoint.at_end=false",
        "checkpoint.export=false",
        "metrics.trackers=[]",
        "metrics.console=quiet",
        *options.overrides,
        smoke=options.smoke,
    )


# ---- TRL's side ------------------------------------------------------------------------------------


def trl_side(reading: int, writing: int, model: str, options: argparse.Namespace) -> None:
    """Train with GRPOTrainer; each message lets it take one step and is answered with the step's seconds."""
    find_trl()
    turns = Turns()
    threading.Thread(target=serve, args=(reading, writing, lambda message: turns.take()), daemon=True).start()
    trl_trainer(model, options, turns).train()


def trl_trainer(model: str, options: argparse.Namespace, turns: Turns) -> Any:
    import torch
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    config = configuration(options)
    rollout = config.rollout
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    settings = GRPOConfig(
        output_dir=tempfile.gettempdir(),  # nothing is written
        use_cpu=options.device == "cpu",
        bf16=False,
        model_init_kwargs={"dtype": config.model.dtype},
        learning_rate=config.training.optimizer.lr,
        max_steps=options.repetitions + 1,
        per_device_train_batch_size=options.trl_micro_batch,
        gradient_accumulation_steps=samples // options.trl_micro_batch,
        num_generations=rollout.samples_per_prompt,
        max_completion_length=rollout.max_response_tokens,
        temperature=rollout.temperature,
        beta=0.0,
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        report_to="none",
        logging_steps=10**6,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        **on_vllm(config, options),
    )
    return GRPOTrainer(
        model=model,
        args=settings,
        reward_funcs=reward_of(config),
        train_dataset=dataset_of(config),
        callbacks=[turns.callback(1)],
    )


def on_vllm(config: RLVRConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Return what makes TRL generate with vLLM on a GPU, and give that a cache of the size that ours has."""
    if options.device == "cpu":
        return {}
    from trl.generation import vllm_generation

    # sized by hand, because vLLM would measure the free memory while the other side takes its own
    cache = options.cache_gib << 30
    vllm_generation.LLM = partial(vllm_generation.LLM, kv_cache_memory_bytes=cache)
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": config.context_window,
        "vllm_enable_sleep_mode": False,
    }


def dataset_of(config: RLVRConfig) -> Any:
    import json

    from datasets import Dataset

    rows = [json.loads(line) for line in Path(config.data.sources[0].path).read_bytes().splitlines()]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "instructions": json.dumps(row["instructions"]),
                "topic": row["topic"],
            }
            for row in rows
        ]
    )


def reward_of(config: RLVRConfig) -> Any:
    """Return the quickstart's reward as TRL calls one."""
    import json

    from roll_like import Completion, RewardResult
    from roll_like.registry import REWARDS
    from roll_like.types import StopReason

    settings = config.rewards.use[0]
    reward = REWARDS.get(settings.type)(settings)

    def score(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        answers = [
            Completion(
                text=completion[0]["content"],
                messages=tuple(prompt),
                answer=None,
                metadata={"instructions": json.loads(instructions), "topic": topic},
                stop_reason=StopReason.STOP,
                response_tokens=len(completion[0]["content"].split()),
            )
            for prompt, completion, instructions, topic in zip(
                prompts, completions, columns["instructions"], columns["topic"], strict=True
            )
        ]
        return [result.value if isinstance(result, RewardResult) else float(result) for result in reward.score(answers)]

    return score


# ---- our side --------------------------------------------------------------------------------------


class BetweenSteps:
    """In the place of the evaluator, which a pipeline asks after each step whether it is due: the peer's turn.

    Attributes:
        seconds: Side → seconds of each step.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._began = 0.0
        self.seconds: dict[str, list[float]] = {"roll_like": [], "TRL": []}

    def due(self, finished: int, total: int) -> bool:
        """Note the step that has ended, let the peer take one, begin the next; there is no evaluation."""
        if finished:
            self._note("roll_like", time.perf_counter() - self._began)
        if finished < total:
            self._note("TRL", self._peer.call())
        self._began = time.perf_counter()
        return False

    def _note(self, side: str, seconds: float) -> None:
        self.seconds[side].append(seconds)
        say(f"{side}: {seconds:.4g} s{'' if len(self.seconds[side]) > 1 else ' (warm-up, not counted)'}")


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        trl_side(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], parser().parse_args(sys.argv[5:]))
        return
    options = parser().parse_args()
    find_trl()
    from roll_like.models.load import resolve_model

    folder = tempfile.TemporaryDirectory(prefix="vs-trl-")
    config = configuration(options, folder.name)
    environment = environment_of(options.threads, plain=options.plain_environment)
    say("starting both sides")
    with folder, Peer(Path(__file__), [str(resolve_model(config.model).path), *sys.argv[1:]], environment) as peer:
        turns = BetweenSteps(peer)

        class TakingTurns(RLVRPipeline):
            """The pipeline, with the peer's step where an evaluation would be."""

            @classmethod
            def build(cls, config: RLVRConfig, run: RunContext) -> Self:
                return replace(super().build(config, run), evaluator=turns)

        TakingTurns.launch(config)
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    rate = {side: samples / statistics.median(seconds[1:]) for side, seconds in turns.seconds.items()}
    finish(
        options,
        {
            "benchmark": "vs_trl",
            "samples_per_second": rate["roll_like"],
            "trl_samples_per_second": rate["TRL"],
            "ratio": rate["roll_like"] / rate["TRL"],
            "dtype": config.model.dtype,
        },
    )


if __name__ == "__main__":
    main()
