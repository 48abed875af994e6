"""Whole GRPO steps, samples per second: this package against TRL's GRPOTrainer.

    pip install --no-deps --target .bench -r requirements/bench.txt
    python benchmarks/vs_trl.py

Same model, prompts, samples of a prompt, reward, longest response, precision (bfloat16 weights) and one update
a step; no reference model, no evaluation, no saving, no trackers. TRL generates with transformers, as it does on a
machine without a GPU. Both sides start first and then take turns, step by step; the first of each is not counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import Queue
from typing import Any

from common import (
    EXTRA_PACKAGES,
    Peer,
    add_common_arguments,
    environment_of,
    finish,
    interleaved,
    quickstart,
    say,
    serve,
)

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.pipelines.rlvr.pipeline import RLVRPipeline
from roll_like.rollout.metrics import rollout_metrics
from roll_like.run.launch import launch
from roll_like.training.engine import with_reference


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(arguments)
    arguments.add_argument("--trl-micro-batch", type=int, default=32, help="samples of one of TRL's micro-batches")
    return arguments


def configuration(options: argparse.Namespace) -> RLVRConfig:
    """Return the quickstart without evaluation, checkpoints and trackers."""
    return quickstart(
        f"steps={options.repetitions + 1}",
        f"output_dir={tempfile.mkdtemp(prefix='vs-trl-')}",
        "evaluation=null",
        "checkpoint.at_end=false",
        "checkpoint.export=false",
        "metrics.trackers=[]",
        "metrics.console=quiet",
    )


# ---- TRL's side ------------------------------------------------------------------------------------


def trl_side(reading: int, writing: int, model: str, options: argparse.Namespace) -> None:
    """Train with GRPOTrainer; each message lets it take one step and is answered with the step's seconds."""
    turns: Queue[bool] = Queue()
    seconds: Queue[float] = Queue()
    threading.Thread(target=serve, args=(reading, writing, lambda message: _turn(turns, seconds)), daemon=True).start()
    trainer = trl_trainer(model, options, turns, seconds)
    trainer.train()


def _turn(turns: Queue[bool], seconds: Queue[float]) -> float:
    turns.put(True)
    return seconds.get()


def trl_trainer(model: str, options: argparse.Namespace, turns: Queue[bool], seconds: Queue[float]) -> Any:
    import torch
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    config = configuration(options)
    rollout = config.rollout

    class Turns(TrainerCallback):  # type: ignore[misc]
        """Waits for its turn before each step."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            del args, kwargs
            turns.get()
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            del args, kwargs
            seconds.put(time.perf_counter() - self.began)

    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "bfloat16"},
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
    )
    return GRPOTrainer(
        model=model,
        args=settings,
        reward_funcs=reward_of(config),
        train_dataset=dataset_of(config),
        callbacks=[Turns()],
    )


def dataset_of(config: RLVRConfig) -> Any:
    import json

    from datasets import Dataset

    rows = [json.loads(line) for line in Path(config.data.sources[0].path).read_text().splitlines()]
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

    reward = REWARDS.get("ifeval")(config.rewards.use[0])

    def ifeval(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        judged = [
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
        return [result.value if isinstance(result, RewardResult) else float(result) for result in reward.score(judged)]

    return ifeval


# ---- our side --------------------------------------------------------------------------------------


class TakingTurns(RLVRPipeline):
    """The pipeline, one step at a time, in turns with a peer."""

    peer: Peer
    options: argparse.Namespace
    seconds: dict[str, float]

    def run(self) -> None:
        steps = self.run_state.steps()
        self.workers.push()
        type(self).seconds = interleaved(
            {"roll_like": lambda: self.step(next(steps)), "TRL": lambda: self.peer.call()},
            repetitions=self.options.repetitions,
        )

    def step(self, step: int) -> float:
        """Take one whole step, as `RLVRPipeline.run` does; return its seconds."""
        began = time.perf_counter()
        workers = self.workers
        with workers.generating():
            collected = self.rollouts.collect(step)
        with workers.training():
            samples = workers.advantages.assign(collected.groups)
            report = workers.actor.train_step(with_reference(samples, workers.kl_reference))
        sync = workers.push()
        self.run_state.log(step, rollout_metrics(collected, sync.version - 1), report.metrics)
        return time.perf_counter() - began


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        trl_side(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], parser().parse_args(sys.argv[5:]))
        return
    options = parser().parse_args()
    if not (EXTRA_PACKAGES / "trl").is_dir():
        sys.exit("TRL is missing: pip install --no-deps --target .bench -r requirements/bench.txt")
    from roll_like.models.load import resolve_model

    config = configuration(options)
    environment = environment_of(options.threads, plain=options.plain_environment)
    environment["PYTHONPATH"] = os.pathsep.join([str(EXTRA_PACKAGES), str(Path(__file__).parent)])
    say("starting both sides")
    with Peer(Path(__file__), [str(resolve_model(config.model).path), *sys.argv[1:]], environment) as peer:
        TakingTurns.peer, TakingTurns.options = peer, options
        launch(config, TakingTurns.build)
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    rate = {name: samples / seconds for name, seconds in TakingTurns.seconds.items()}
    finish(
        {
            "benchmark": "vs_trl",
            "samples_per_second": rate["roll_like"],
            "trl_samples_per_second": rate["TRL"],
            "ratio": rate["roll_like"] / rate["TRL"],
        }
    )


if __name__ == "__main__":
    main()
