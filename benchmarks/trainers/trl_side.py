"""TRL's SFTTrainer and DPOTrainer on the same tokens, a turn at a time."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from queue import Queue
from typing import Any

import numpy as np

from roll_like.types import TrainingSample
from trainers.batches import Work


class Turns:
    """Lets a trainer take the steps of one turn at a time."""

    def __init__(self) -> None:
        self._begun: Queue[None] = Queue()
        self._seconds: Queue[float] = Queue()

    def take(self) -> float:
        """Let the trainer take its next turn; return the turn's seconds."""
        self._begun.put(None)
        return self._seconds.get()

    def callback(self, steps: int) -> Any:
        """Return what the trainer is to call: it waits before each turn's first step and answers after its last."""
        import torch
        from transformers import TrainerCallback

        begun, seconds = self._begun, self._seconds

        class Waiting(TrainerCallback):  # type: ignore[misc]
            """Begins and ends turns."""

            began = 0.0

            def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                del args, control, others
                if state.global_step % steps == 0:
                    begun.get()
                    self.began = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                del args, control, others
                if state.global_step % steps == 0:
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()
                    seconds.put(time.perf_counter() - self.began)

        return Waiting()


def train(work: Work[Any, TrainingSample], options: argparse.Namespace, turns: Turns) -> None:
    """Train to the end of all turns; `turns` says when each begins."""
    import torch

    torch.set_num_threads(options.threads)
    {"sft": supervised_trainer, "dpo": preference_trainer}[options.task](work, options, turns).train()


def supervised_trainer(work: Work[Any, TrainingSample], options: argparse.Namespace, turns: Turns) -> Any:
    """Return an SFTTrainer that sees the work's samples in the work's order, over and over."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    packing = {
        "none": {},
        "padding_free": {"padding_free": True, "max_length": None},
        "bfd": {"packing": True, "max_length": work.config.training.max_tokens_per_micro_batch},
    }[options.trl_packing]
    rows = [
        {
            "input_ids": sample.token_ids.tolist(),
            "labels": np.where(sample.loss_mask, sample.token_ids, -100).tolist(),
        }
        for batch in work.batches
        for sample in by_length(batch, 1)
    ]
    micro_batch = 1 if options.trl_packing == "bfd" else options.trl_micro_batch
    settings = SFTConfig(**shared_settings(work, options, len(work.batches[0]), micro_batch), **packing)
    return SFTTrainer(
        model=model_path(work), args=settings, train_dataset=Dataset.from_list(rows), callbacks=callbacks(work, turns)
    )


def preference_trainer(work: Work[Any, TrainingSample], options: argparse.Namespace, turns: Turns) -> Any:
    """Return a DPOTrainer that sees the work's pairs in the work's order; the reference's answers are precomputed."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Tokenized(DPOTrainer):  # type: ignore[misc]
        """Takes tokens as they are, so that both sides have the same."""

        def _prepare_dataset(self, dataset: Any, *others: Any, **options: Any) -> Any:
            del others, options
            return dataset

    rows = []
    for batch in work.batches:
        ordered = by_length(batch, 2)
        for chosen, rejected in zip(ordered[::2], ordered[1::2], strict=True):
            prompt = chosen.prompt_length
            rows.append(
                {
                    "prompt_ids": chosen.token_ids[:prompt].tolist(),
                    "chosen_ids": chosen.token_ids[prompt:].tolist(),
                    "rejected_ids": rejected.token_ids[prompt:].tolist(),
                }
            )
    settings = DPOConfig(
        **shared_settings(work, options, len(work.batches[0]) // 2, options.trl_micro_batch),
        beta=work.config.algorithm.loss.beta,
        precompute_ref_log_probs=True,
    )
    return Tokenized(
        model=model_path(work), args=settings, train_dataset=Dataset.from_list(rows), callbacks=callbacks(work, turns)
    )


def shared_settings(
    work: Work[Any, TrainingSample], options: argparse.Namespace, per_step: int, micro_batch: int
) -> dict[str, Any]:
    """Return what both trainers are told: weights in `model.dtype`, fused AdamW, no checkpointing, nothing written."""
    optimizer = work.config.training.optimizer
    return {
        "output_dir": tempfile.gettempdir(),  # nothing is written
        "use_cpu": work.config.resources.device == "cpu",
        "bf16": False,
        "model_init_kwargs": {"dtype": work.config.model.dtype},
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "max_grad_norm": optimizer.max_grad_norm,
        "max_steps": (options.repetitions + 1) * len(work.batches),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": per_step // micro_batch,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "report_to": "none",
        "logging_steps": 10**6,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }


def by_length(batch: Sequence[TrainingSample], together: int) -> list[TrainingSample]:
    """Return a step's samples, longest first, so that micro-batches have little padding.

    Args:
        batch: The samples.
        together: How many consecutive ones stay together: 2 for the answers of a pair.
    """
    parts = [batch[start : start + together] for start in range(0, len(batch), together)]
    parts.sort(key=lambda part: max(len(sample.token_ids) for sample in part), reverse=True)
    return [sample for part in parts for sample in part]


def callbacks(work: Work[Any, TrainingSample], turns: Turns) -> list[Any]:
    """Return the trainer's callbacks."""
    return [turns.callback(len(work.batches))]


def model_path(work: Work[Any, TrainingSample]) -> str:
    """Return the directory of the model."""
    from roll_like.models.load import resolve_model

    return str(resolve_model(work.config.model).path)
