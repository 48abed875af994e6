"""Trainer tokens per second: this package's DeepSpeed engine against a bare PyTorch loop.

    python benchmarks/training.py                      # as the quickstart trains
    python benchmarks/training.py --no-share-prompts   # without computing a group's prompt once

A token counts once a sample, prompts included, on both sides: the tokens of the batch as its user sees
them. The bare loop is what one would write by hand for speed: padded micro-batches sorted by length,
logits only where a response token is predicted, bfloat16 weights with a float32 master copy, fused
AdamW, no metrics, no mismatch correction, no Ray.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    Peer,
    add_common_arguments,
    environment_of,
    finish,
    interleaved,
    prompts_of,
    quickstart,
    say,
    serve,
)

from roll_like.config.rlvr import RLVRConfig
from roll_like.types import PolicySample


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(arguments)
    arguments.add_argument("--prompts", type=int, default=16, help="groups in the batch")
    arguments.add_argument("--samples", type=int, default=8, help="samples of each group")
    arguments.add_argument("--shortest", type=int, default=15, help="tokens of the shortest response")
    arguments.add_argument("--longest", type=int, default=40, help="tokens of the longest response")
    arguments.add_argument("--max-tokens", type=int, help="micro-batch budget of both sides; default: the quickstart's")
    arguments.add_argument("--bare-max-tokens", type=int, help="micro-batch budget of the bare loop, if another")
    arguments.add_argument("--no-share-prompts", action="store_true", help="compute a group's prompt once a sample")
    arguments.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), help="default: the quickstart's")
    return arguments


def make_batch(config: RLVRConfig, options: argparse.Namespace) -> list[PolicySample]:
    """Return real prompts with responses of random tokens and lengths; every group has signal."""
    random = np.random.default_rng(0)
    samples = []
    for group, prompt in enumerate(prompts_of(config, options.prompts)):
        for _ in range(options.samples):
            length = int(random.integers(options.shortest, options.longest + 1))
            tokens = np.concatenate([prompt, random.integers(100, 40_000, length)]).astype(np.int32)
            sampled = np.arange(len(tokens)) >= len(prompt)
            samples.append(
                PolicySample(
                    group_id=str(group),
                    token_ids=tokens,
                    prompt_length=len(prompt),
                    sampled=sampled,
                    turns=np.where(sampled, 0, -1).astype(np.int32),
                    behaviour_logprobs=np.where(sampled, -11.0, 0.0).astype(np.float32),
                    advantages=np.where(sampled, random.normal(), 0.0).astype(np.float32),
                    reward=0.0,
                    policy_version=0,
                )
            )
    return samples


# ---- our side ----------------------------------------------------------------------------------


@contextmanager
def engine_step(config: RLVRConfig, samples: Sequence[PolicySample]) -> Iterator[Callable[[], float]]:
    """Yield a function that trains on the batch once through Ray and DeepSpeed, and returns the seconds."""
    from roll_like.cluster import RaySession, ResourceManager
    from roll_like.models.load import resolve_model
    from roll_like.training.start import start_trainer
    from roll_like.training.worker import TrainerSpec

    spec = TrainerSpec(
        model_path=str(resolve_model(config.model).path),
        dtype=config.model.dtype,
        device="cpu",
        threads=len(config.resources.spans.training) // config.training.workers,
        seed=0,
        training=config.training,
        frozen=False,
        algorithm=config.algorithm,
        temperature=1.0,
        total_updates=1000,
        trust_remote_code=False,
    )
    with ExitStack() as stack:
        stack.enter_context(RaySession(config.resources, Path("runs/benchmark-logs")))
        resources = stack.enter_context(ResourceManager(config.resources))
        resources.allocate()
        engine = start_trainer(
            "training",
            spec,
            resources,
            config.resources.spans.training,
            max_response_tokens=config.rollout.max_response_tokens,
            stack=stack,
        )

        def step() -> float:
            began = time.perf_counter()
            engine.train_step(samples)
            return time.perf_counter() - began

        yield step


# ---- the bare loop, in a process of its own ----------------------------------------------------


class BareLoop:
    """The policy-gradient step as one writes it by hand in PyTorch."""

    def __init__(self, config: RLVRConfig, samples: Sequence[PolicySample], *, max_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from roll_like.models.load import resolve_model

        torch.set_num_threads(len(config.resources.spans.training))
        self.model = AutoModelForCausalLM.from_pretrained(
            resolve_model(config.model).path, dtype=getattr(torch, config.model.dtype)
        )
        self.parameters = list(self.model.parameters())
        self.masters = [parameter.detach().float().clone() for parameter in self.parameters]
        optimizer = config.training.optimizer
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay, fused=True
        )
        self.max_grad_norm = optimizer.max_grad_norm
        ordered = sorted(samples, key=lambda sample: len(sample.token_ids), reverse=True)
        self.batches = [self._padded(part) for part in cut(ordered, max_tokens)]
        self.trained_tokens = sum(int(sample.sampled.sum()) for sample in samples)

    @staticmethod
    def _padded(samples: Sequence[PolicySample]) -> dict[str, Any]:
        import torch

        shape = (len(samples), max(len(sample.token_ids) for sample in samples))
        tokens, present = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        trained, advantages = np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
        for row, sample in enumerate(samples):
            length = len(sample.token_ids)
            tokens[row, :length], present[row, :length] = sample.token_ids, 1
            trained[row, :length], advantages[row, :length] = sample.sampled, sample.advantages
        return {
            name: torch.from_numpy(array)
            for name, array in {
                "tokens": tokens,
                "present": present,
                "trained": trained[:, 1:],
                "targets": tokens[:, 1:][trained[:, 1:]],
                "advantages": advantages[:, 1:][trained[:, 1:]],
            }.items()
        }

    def step(self) -> float:
        """Take one optimizer step over the batch; return the seconds."""
        import torch
        from torch.nn import functional

        began = time.perf_counter()
        for batch in self.batches:
            hidden_BLD = self.model.model(
                input_ids=batch["tokens"], attention_mask=batch["present"], use_cache=False
            ).last_hidden_state
            logits_NV = self.model.lm_head(hidden_BLD[:, :-1][batch["trained"]])
            logprobs_N = -functional.cross_entropy(logits_NV.float(), batch["targets"], reduction="none")
            ratio_N = (logprobs_N - logprobs_N.detach()).exp()
            (-(ratio_N * batch["advantages"]).sum() / self.trained_tokens).backward()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)
        return time.perf_counter() - began


def cut(samples: Sequence[PolicySample], max_tokens: int) -> list[list[PolicySample]]:
    """Cut samples, longest first, into batches of at most `max_tokens` tokens, padding included."""
    batches: list[list[PolicySample]] = []
    for sample in samples:
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].token_ids) <= max_tokens:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


# ---- both --------------------------------------------------------------------------------------


def configured(options: argparse.Namespace) -> RLVRConfig:
    """Return the quickstart's configuration with this benchmark's options."""
    overrides = [
        f"training.share_prompts={str(not options.no_share_prompts).lower()}",
        f"resources.devices_per_node={options.threads}",
        *(f"resources.spans.{role}=0-{options.threads - 1}" for role in ("training", "inference")),
    ]
    if options.max_tokens is not None:
        overrides.append(f"training.max_tokens_per_micro_batch={options.max_tokens}")
    if options.zero_stage is not None:
        overrides.append(f"training.zero_stage={options.zero_stage}")
    return quickstart(*overrides)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        options = parser().parse_args(sys.argv[4:])
        config = configured(options)
        budget = options.bare_max_tokens or config.training.max_tokens_per_micro_batch
        loop = BareLoop(config, make_batch(config, options), max_tokens=budget)
        serve(int(sys.argv[2]), int(sys.argv[3]), lambda message: loop.step())
        return
    options = parser().parse_args()
    config = configured(options)
    samples = make_batch(config, options)
    tokens = sum(len(sample.token_ids) for sample in samples)
    say(f"{len(samples)} samples, {tokens} tokens; prompts {'once a sample' if options.no_share_prompts else 'shared'}")
    environment = environment_of(options.threads, plain=options.plain_environment)
    with engine_step(config, samples) as engine, Peer(Path(__file__), sys.argv[1:], environment) as bare:
        seconds = interleaved({"engine": engine, "bare": bare.call}, repetitions=options.repetitions)
    finish(
        {
            "benchmark": "training",
            "engine_tokens_per_second": tokens / seconds["engine"],
            "bare_tokens_per_second": tokens / seconds["bare"],
            "ratio": seconds["bare"] / seconds["engine"],
            "share_prompts": not options.no_share_prompts,
            "max_tokens_per_micro_batch": config.training.max_tokens_per_micro_batch,
            "bare_max_tokens": options.bare_max_tokens or config.training.max_tokens_per_micro_batch,
            "plain_environment": options.plain_environment,
        }
    )


if __name__ == "__main__":
    main()
