"""One rank of a language model, whatever it is trained on: log-probabilities, and its weights for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roll_like.config.sections import ModelConfig, TrainingConfig
from roll_like.errors import EngineError
from roll_like.models.export import ModelCard
from roll_like.models.lora import adapters_off, add_adapters
from roll_like.training.layout import MicroBatch
from roll_like.training.policy import PolicyModule, tensors_of
from roll_like.training.rank import DeepSpeedRank, RankSpec
from roll_like.types import FloatArray
from roll_like.values import Metrics, Sum

if TYPE_CHECKING:
    from roll_like.inference.weight_transfer.interface import SendReport, WeightSender, WeightTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelSpec(RankSpec):
    """What a rank of a language model needs to know.

    Attributes:
        training: The `training` section.
        frozen: Whether the model only computes log-probabilities (a reference); then it has no adapters.
        temperature: Temperature that log-probabilities are taken at.
    """

    training: TrainingConfig
    frozen: bool
    temperature: float = 1.0


class LanguageModelRank(DeepSpeedRank):
    """Computes log-probabilities of chosen tokens, hands out weights, and writes the model for others to load."""

    section = "training"
    metric_prefix = "train"
    memory_name = "trainer"

    def __init__(self, spec: LanguageModelSpec, rank: int, world_size: int) -> None:
        super().__init__(spec, spec.training, rank, world_size)
        self._model_spec = spec
        self._sender: WeightSender | None = None

    def close(self) -> None:
        """Let go of the inference engines, where there are any, and leave the process group."""
        if self._sender is not None:
            self._sender.close()
        super().close()

    def _load(self) -> Any:
        causal_lm = super()._load()
        spec = self._model_spec
        if spec.training.lora is not None and not spec.frozen:
            add_adapters(causal_lm, spec.training.lora, seed=spec.seed)
        return causal_lm

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

    def base_logprobs(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        """Return the same of the model without its adapters: what training started from."""
        with adapters_off(self._causal_lm()):
            return self.logprobs(batches)

    @torch.no_grad()
    def _logprobs_of(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [self._forward(batch)[0] for batch in batches]

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of every target, in nats, shape [N]; dropout is for gradients only."""
        self._set_mode()
        result: tuple[Tensor, Tensor] = self._engine(*tensors_of(batch, self._device), self._model_spec.temperature)
        return result

    def connect_weights(self, transfer: WeightTransfer) -> None:
        """Prepare this rank's end of the way to the inference engines. They have started."""
        self._sender = transfer.connect(self, self.rank)

    def send_weights(self, salt: int) -> SendReport:
        """Take part in moving all weights; rank 0's report says what was sent."""
        if self._sender is None:
            raise EngineError("weights are sent before connect_weights")
        return self._sender.send(salt)

    def export(self, directory: str, tokenizer: ModelConfig, card: ModelCard) -> None:
        """Write a Hugging Face directory from rank 0; the other ranks take part in gathering.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        lora = None if self._model_spec.frozen else self._model_spec.training.lora
        self._write_model(directory, tokenizer, card, lora=lora)

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
