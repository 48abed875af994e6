"""Training steps as one writes them by hand in PyTorch, for speed.

Padded micro-batches sorted by length, made once; logits only where a token is learned; bfloat16 weights with a
float32 master copy; fused AdamW; no metrics, no Ray.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from roll_like.models.renames import recompute_activations
from roll_like.types import PolicySample, TrainingSample
from trainers.batches import SampleT, Work

Arrays = dict[str, Tensor]
AnyT = TypeVar("AnyT")


class BareLoop(ABC, Generic[SampleT]):
    """A model, its optimizer, and micro-batches of each step."""

    def __init__(self, work: Work[Any, SampleT]) -> None:
        from transformers import AutoModelForCausalLM

        from roll_like.models.load import resolve_model

        config = work.config
        torch.set_num_threads(len(config.resources.devices_of("training")))
        self.config = config
        self.device = torch.device(config.resources.device)
        self.model = AutoModelForCausalLM.from_pretrained(
            resolve_model(config.model).path, dtype=getattr(torch, config.model.dtype)
        ).to(self.device)
        if config.training.gradient_checkpointing:
            recompute_activations(self.model)
            self.model.train()  # or transformers keeps all activations
        self.parameters = list(self.model.parameters())
        self.wide = config.model.dtype == "float32"  # weights are then their own master copy
        self.masters = self.parameters if self.wide else [each.detach().float() for each in self.parameters]
        optimizer = config.training.optimizer
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay, fused=True
        )
        self.max_grad_norm = optimizer.max_grad_norm
        self.steps = [
            [
                {name: tensor.to(self.device) for name, tensor in batch.items()}
                for batch in self.layout(samples, work.bare_max_tokens)
            ]
            for samples in work.batches
        ]

    def layout(self, samples: Sequence[SampleT], max_tokens: int) -> list[Arrays]:
        """Return the micro-batches of one step."""
        ordered = sorted(samples, key=lambda sample: len(sample.token_ids), reverse=True)
        return [self.padded(part, samples) for part in cut(ordered, max_tokens)]

    def padded(self, part: Sequence[SampleT], samples: Sequence[SampleT]) -> Arrays:  # noqa: ARG002 - for subclasses
        """Return a micro-batch of one step's samples."""
        shape = (len(part), max(len(sample.token_ids) for sample in part))
        tokens, present, loss_mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
        for row, sample in enumerate(part):
            length = len(sample.token_ids)
            tokens[row, :length], present[row, :length], loss_mask[row, :length] = sample.token_ids, 1, sample.loss_mask
        arrays = {"tokens": tokens, "present": present, "loss_mask": loss_mask[:, 1:]}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def logprobs(self, batch: Arrays) -> Tensor:
        """Return the log-probability of each token that is learned, shape [N]."""
        hidden_BLD = self.model.model(
            input_ids=batch["tokens"], attention_mask=batch["present"], use_cache=False
        ).last_hidden_state
        logits_NV = self.model.lm_head(hidden_BLD[:, :-1][batch["loss_mask"]])
        targets_N = batch["tokens"][:, 1:][batch["loss_mask"]]
        return -functional.cross_entropy(logits_NV.float(), targets_N, reduction="none")

    @abstractmethod
    def loss(self, batch: Arrays) -> Tensor:
        """Return the micro-batch's share of the step's loss."""

    def turn(self) -> float:
        """Take every step once; return the seconds."""
        began = time.perf_counter()
        for batches in self.steps:
            for batch in batches:
                self.loss(batch).backward()
            self.update()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def update(self) -> None:
        """Take one optimizer step."""
        for master, parameter in () if self.wide else zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in () if self.wide else zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)


class PolicyLoop(BareLoop[PolicySample]):
    """A policy-gradient step."""

    def padded(self, part: Sequence[PolicySample], samples: Sequence[PolicySample]) -> Arrays:
        arrays = super().padded(part, samples)
        advantages = np.concatenate([sample.advantages[sample.loss_mask] for sample in part])
        total = sum(int(sample.loss_mask.sum()) for sample in samples)
        return {**arrays, "weights": torch.from_numpy(advantages) / total}

    def loss(self, batch: Arrays) -> Tensor:
        logprobs_N = self.logprobs(batch)
        ratio_N = (logprobs_N - logprobs_N.detach()).exp()
        return -(ratio_N * batch["weights"]).sum()


class SupervisedLoop(BareLoop[TrainingSample]):
    """A step on given answers."""

    def padded(self, part: Sequence[TrainingSample], samples: Sequence[TrainingSample]) -> Arrays:
        total = sum(int(sample.loss_mask.sum()) for sample in samples)
        return {**super().padded(part, samples), "total": torch.tensor(total)}

    def loss(self, batch: Arrays) -> Tensor:
        return -self.logprobs(batch).sum() / batch["total"]


class PreferenceLoop(BareLoop[TrainingSample]):
    """A DPO step (arXiv:2305.18290); what the reference model says is computed once, before the first."""

    def __init__(self, work: Work[Any, TrainingSample]) -> None:
        super().__init__(work)
        with torch.no_grad():
            for batch in (batch for batches in self.steps for batch in batches):
                batch["reference"] = self.margins(batch)

    def layout(self, samples: Sequence[TrainingSample], max_tokens: int) -> list[Arrays]:
        pairs = sorted(
            zip(samples[::2], samples[1::2], strict=True),
            key=lambda pair: max(len(answer.token_ids) for answer in pair),
            reverse=True,
        )
        parts = cut(pairs, max_tokens, length=lambda pair: 2 * max(len(answer.token_ids) for answer in pair))
        return [self.padded([answer for pair in part for answer in pair], samples) for part in parts]

    def padded(self, part: Sequence[TrainingSample], samples: Sequence[TrainingSample]) -> Arrays:
        return {**super().padded(part, samples), "pairs": torch.tensor(len(samples) // 2)}

    def margins(self, batch: Arrays) -> Tensor:
        """Return how much likelier each pair's chosen answer is, shape [P]."""
        rows_N = batch["loss_mask"].nonzero()[:, 0]
        sums_B = torch.zeros(len(batch["loss_mask"]), device=self.device).index_add(0, rows_N, self.logprobs(batch))
        return sums_B[::2] - sums_B[1::2]

    def loss(self, batch: Arrays) -> Tensor:
        beta = self.config.algorithm.loss.beta
        return -functional.logsigmoid(beta * (self.margins(batch) - batch["reference"])).sum() / batch["pairs"]


def _tokens(sample: Any) -> int:
    return len(sample.token_ids)


def cut(items: Sequence[AnyT], max_tokens: int, length: Any = _tokens) -> list[list[AnyT]]:
    """Cut items, longest first, into batches of at most `max_tokens` tokens, padding included.

    Args:
        items: Samples, or pairs of them.
        max_tokens: Budget of a batch; one longer item makes a batch of its own.
        length: Tokens that an item takes without padding.
    """
    batches: list[list[AnyT]] = []
    for item in items:
        if batches and (len(batches[-1]) + 1) * length(batches[-1][0]) <= max_tokens:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def bare_loop(task: str, work: Work[Any, Any]) -> BareLoop[Any]:
    """Return the loop of a task."""
    return {"grpo": PolicyLoop, "sft": SupervisedLoop, "dpo": PreferenceLoop}[task](work)
