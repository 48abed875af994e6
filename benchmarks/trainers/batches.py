"""What each task trains on, the same tokens on every side, and the configuration that says how."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from common import CONFIGS, SMOKE_MODEL, configuration, device_overrides, prompts_of, quickstart
from mfu import Products

from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.config.run import RunConfig
from roll_like.models.flops import training_pass
from roll_like.models.load import resolve_model
from roll_like.models.shape import load_model_shape
from roll_like.types import PolicySample, TrainingSample

ConfigT = TypeVar("ConfigT", bound=RunConfig)
SampleT = TypeVar("SampleT", bound=TrainingSample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Generic[ConfigT, SampleT]):
    """What one turn of a side does: an optimizer step for each of the batches.

    Attributes:
        config: Model, precision, optimizer, budget of a micro-batch.
        batches: Each one optimizer step. Answers of pairs: chosen and rejected in turn.
        bare_max_tokens: Budget of a micro-batch of the bare loop.
    """

    config: ConfigT
    batches: Sequence[Sequence[SampleT]]
    bare_max_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of a turn as their user sees them: a prompt once an answer, no padding."""
        return sum(len(sample.token_ids) for batch in self.batches for sample in batch)

    @property
    def flops(self) -> int:
        """Model FLOPs of a turn: forward and backward."""
        shape = load_model_shape(resolve_model(self.config.model).path)
        return sum(training_pass(batch).training_flops(shape) for batch in self.batches)

    @property
    def products(self) -> Products:
        """Matrix products of as many rows as the engine's micro-batches have."""
        needed = [training_pass(batch) for batch in self.batches]
        tokens, targets = sum(each.tokens for each in needed), sum(each.targets for each in needed)
        rows = min(self.config.training.max_tokens_per_micro_batch, tokens)
        return Products(
            model=str(resolve_model(self.config.model).path),
            dtype=self.config.model.dtype,
            device=self.config.resources.device,
            rows=rows,
            targets=max(rows * targets // tokens, 1),
            backward=True,
        )


def work_of(options: argparse.Namespace) -> Work[Any, Any]:
    """Return what the options ask for."""
    return {"grpo": policy_work, "sft": supervised_work, "dpo": preference_work}[options.task](options)


def policy_work(options: argparse.Namespace) -> Work[RLVRConfig, PolicySample]:
    """Return one step of real prompts with responses of random tokens and lengths; every group has signal."""
    config = quickstart(
        f"training.share_prompts={str(not options.no_share_prompts).lower()}",
        *device_overrides(options, "training", "inference"),
        *_shared_overrides(options),
        smoke=options.smoke,
    )
    random = np.random.default_rng(0)
    samples = []
    for group, prompt in enumerate(prompts_of(config, options.prompts)):
        for _ in range(options.samples):
            length = int(random.integers(options.shortest, options.longest + 1))
            tokens = np.concatenate([prompt, random.integers(100, 40_000, length)]).astype(np.int32)
            loss_mask = np.arange(len(tokens)) >= len(prompt)
            samples.append(
                PolicySample(
                    group_id=str(group),
                    token_ids=tokens,
                    prompt_length=len(prompt),
                    loss_mask=loss_mask,
                    turns=np.where(loss_mask, 0, -1).astype(np.int32),
                    behaviour_logprobs=np.where(loss_mask, -11.0, 0.0).astype(np.float32),
                    advantages=np.where(loss_mask, random.normal(), 0.0).astype(np.float32),
                    reward=0.0,
                    policy_version=0,
                )
            )
    return _work(config, [samples], options)


def supervised_work(options: argparse.Namespace) -> Work[SFTConfig, TrainingSample]:
    """Return the first steps of the supervised quickstart."""
    from roll_like.builtin.pipelines.sft.pipeline import SFTPipeline
    from roll_like.offline.samples import numbered

    config = configuration(SFTConfig, CONFIGS / "sft_quickstart.yaml", *_given_overrides(options))
    order = SFTPipeline.trained_on(config).order(seed=config.seed)
    batches = [numbered(order.take(config.data.samples_per_step)) for _ in range(options.steps)]
    return _work(config, batches, options)


def preference_work(options: argparse.Namespace) -> Work[DPOConfig, TrainingSample]:
    """Return the first steps of the preference quickstart."""
    from roll_like.builtin.pipelines.dpo.pipeline import DPOPipeline
    from roll_like.builtin.pipelines.dpo.preferences import batch_of

    config = configuration(DPOConfig, CONFIGS / "dpo_quickstart.yaml", *_given_overrides(options))
    order = DPOPipeline.trained_on(config).order(seed=config.seed)
    batches = [batch_of(config, order.take(config.items_per_step[0])).sequences for _ in range(options.steps)]
    return _work(config, batches, options)


def _given_overrides(options: argparse.Namespace) -> list[str]:
    return [
        "epochs=null",
        "steps=1000",
        "evaluation=null",
        "training.optimizer.schedule=constant",
        "training.optimizer.warmup_steps=0",
        *device_overrides(options, "training"),
        *(SMOKE_MODEL if options.smoke else ()),
        *_shared_overrides(options),
    ]


def _shared_overrides(options: argparse.Namespace) -> list[str]:
    chosen = {"max_tokens_per_micro_batch": options.max_tokens, "zero_stage": options.zero_stage}
    return [
        *(f"training.{key}={value}" for key, value in chosen.items() if value is not None),
        *options.overrides,
    ]


def _work(config: ConfigT, batches: Sequence[Sequence[SampleT]], options: argparse.Namespace) -> Work[ConfigT, SampleT]:
    budget = options.bare_max_tokens or config.training.max_tokens_per_micro_batch
    return Work(config=config, batches=batches, bare_max_tokens=budget)
