"""One rank of a reward model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roll_like.algorithms.reward_model import ScoredPairs, reward_model_objective
from roll_like.builtin.pipelines.reward_model.config import RewardModelAlgorithmConfig
from roll_like.config.sections import ModelConfig, TrainingConfig
from roll_like.models.classifier import load_classifier
from roll_like.models.export import ModelCard
from roll_like.models.lora import add_adapters
from roll_like.training.language_model import computed
from roll_like.training.layout import PairBatch
from roll_like.training.policy import tensors_of
from roll_like.training.rank import DeepSpeedRank, RankSpec
from roll_like.training.score import ScoreModule
from roll_like.types import FloatArray
from roll_like.values import Max, Metric, Metrics, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSpec(RankSpec):
    """What a rank of a reward model needs to know.

    Attributes:
        training: The `training` section.
        algorithm: The `algorithm` section.
    """

    training: TrainingConfig
    algorithm: RewardModelAlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelShare:
    """What one rank trains on in one optimizer step.

    Attributes:
        batches: Its micro-batches; both conversations of a pair are in one.
        margins: By how much the first of each pair of the step should score higher, of all ranks, shape [pairs].
    """

    batches: Sequence[PairBatch]
    margins: FloatArray


class RewardModelWorker(DeepSpeedRank):
    """Scores conversations, and learns which of two should score higher."""

    section = "training"
    metric_prefix = "train"
    memory_name = "trainer"

    def __init__(self, spec: RewardModelSpec, rank: int, world_size: int) -> None:
        super().__init__(spec, spec.training, rank, world_size)
        self.spec = spec

    def _pretrained(self) -> Any:
        spec = self.spec
        return load_classifier(
            Path(spec.model_path), spec.dtype, seed=spec.seed, trust_remote_code=spec.trust_remote_code
        )

    def _load(self) -> Any:
        classifier, spec = super()._load(), self.spec
        if spec.training.lora is not None:
            add_adapters(classifier, spec.training.lora, seed=spec.seed)
        return classifier

    def _module(self, causal_lm: Any) -> nn.Module:
        return ScoreModule(causal_lm)

    def train(self, share: RewardModelShare) -> dict[str, Metric]:
        """Take one optimizer step; return this rank's metrics, which merge over ranks."""
        started = time.perf_counter()
        update = self._update(share.batches, partial(self._objective, share))
        return merge([update, {"time/train_compute": Max(time.perf_counter() - started)}, self._memory()])

    @torch.no_grad()
    def measure(self, share: RewardModelShare) -> dict[str, Metric]:
        """Return the metrics of pairs under the current weights, without a step."""
        return merge(self._objective(share, batch)[1] for batch in share.batches)

    def export(self, directory: str, tokenizer: ModelConfig, card: ModelCard) -> None:
        """Write a Hugging Face sequence classifier from rank 0; the other ranks take part in gathering.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        self._write_model(directory, tokenizer, card, task="text-classification", lora=self.spec.training.lora)

    def _objective(self, share: RewardModelShare, batch: PairBatch) -> tuple[Tensor, Metrics]:
        self._set_mode()
        tokens_BL, positions_BL, branches_BL, sources_N, _ = tensors_of(batch, self._device)
        scores_N: Tensor = self._engine(tokens_BL, positions_BL, branches_BL, sources_N)
        # one score a conversation: those of pair i are of samples 2·i, the chosen one, and 2·i + 1
        order_N = np.argsort(batch.sample_ids)
        scores_N = scores_N[torch.from_numpy(order_N).to(self._device)]
        counted_P = (batch.weights[order_N[::2]] != 0).astype(np.float32)
        pairs = ScoredPairs(
            chosen_P=scores_N[::2],
            rejected_P=scores_N[1::2],
            margins_P=self._tensor(share.margins[batch.sample_ids[order_N[::2]] // 2]),
            weights_P=self._tensor(counted_P / np.float32(len(share.margins))),
        )
        algorithm = self.spec.algorithm
        objective, metrics = reward_model_objective(
            pairs, label_smoothing=algorithm.label_smoothing, center_coefficient=algorithm.center_coefficient
        )
        return objective, merge([metrics, computed(batch)])

    def _handed_out(self) -> nn.Module:
        """Names are the Hugging Face model's own."""
        module: nn.Module = self._engine.module.classifier
        return module
