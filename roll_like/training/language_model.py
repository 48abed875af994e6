"""One rank of a language model, whatever it is trained on: log-probabilities, and its weights for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roll_like.config.sections import ModelConfig, TrainingConfig
from roll_like.errors import CheckpointError
from roll_like.models.export import ModelCard, save_hf_directory
from roll_like.models.load import load_tokenizer
from roll_like.training.layout import MicroBatch
from roll_like.training.policy import PolicyModule, tensors_of
from roll_like.training.rank import DeepSpeedRank, RankSpec
from roll_like.types import FloatArray
from roll_like.values import Metrics, Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelSpec(RankSpec):
    """What a rank of a language model needs to know.

    Attributes:
        training: The `training` section.
        frozen: Whether the model only computes log-probabilities (a reference).
        temperature: Temperature that log-probabilities are taken at.
    """

    training: TrainingConfig
    frozen: bool
    temperature: float = 1.0


class LanguageModelRank(DeepSpeedRank):
    """Computes log-probabilities of chosen tokens, and writes the model for others to load."""

    section = "training"
    metric_prefix = "train"
    memory_name = "trainer"

    def __init__(self, spec: LanguageModelSpec, rank: int, world_size: int) -> None:
        super().__init__(spec, spec.training, rank, world_size)
        self._model_spec = spec

    def _module(self, causal_lm: Any) -> nn.Module:
        training = self._model_spec.training
        return PolicyModule(
            causal_lm, chunk_tokens=training.logprob_chunk_tokens, chunk_vocab=training.logprob_chunk_vocab
        )

    def _build(self, module: nn.Module) -> Any:
        return module.requires_grad_(False).eval() if self._model_spec.frozen else super()._build(module)

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        """Return the log-probability of every target of every micro-batch, shape [N] each."""
        return [logprobs.cpu().numpy() for logprobs in self._logprobs_of(batches)]

    @torch.no_grad()
    def _logprobs_of(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [self._forward(batch)[0] for batch in batches]

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of every target, in nats, shape [N]."""
        result: tuple[Tensor, Tensor] = self._engine(*tensors_of(batch, self._device), self._model_spec.temperature)
        return result

    def export(self, directory: str, tokenizer: ModelConfig, card: ModelCard) -> None:
        """Write a Hugging Face directory from rank 0; the other ranks take part in gathering.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        weights = {name: tensor.cpu().clone() for name, tensor in self.full_weights()}
        if self.rank != 0:
            return
        try:
            save_hf_directory(
                weights,
                self._causal_lm().config,
                load_tokenizer(tokenizer),
                Path(directory),
                card,
                trust_remote_code=self._model_spec.trust_remote_code,
            )
        except OSError as error:
            raise CheckpointError(
                f"the trained model cannot be written to {directory}: {error}", fix="free disk space"
            ) from error

    def _causal_lm(self) -> Any:
        module = self._engine if self._model_spec.frozen else self._engine.module
        return module.causal_lm

    def _handed_out(self) -> nn.Module:
        """Names are the Hugging Face model's own."""
        module: nn.Module = self._causal_lm()
        return module

    def _is_sharded(self) -> bool:
        return super()._is_sharded() and not self._model_spec.frozen


def computed(batch: MicroBatch) -> Metrics:
    """Return how many tokens a micro-batch computes, and how many of them are padding."""
    return {
        "train/computed_tokens": Sum(float(batch.tokens)),
        "train/padding_tokens": Sum(float(batch.padding)),
    }
