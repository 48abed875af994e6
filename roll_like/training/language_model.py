"""What objectives of language models have in common: log-probabilities of chosen tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from roll_like.config.algorithm import ROUTER_REPLAY
from roll_like.config.training import TrainerConfig, TrainingConfig
from roll_like.models.attention import refuse_undivided_heads
from roll_like.models.dropout import without_dropout
from roll_like.models.logits import refuse_other_logits
from roll_like.models.lora import add_adapters
from roll_like.models.modules import load_causal_lm
from roll_like.models.renames import recompute_activations
from roll_like.models.rotary import fix_frequencies
from roll_like.models.router import RouterReplay
from roll_like.models.vision import refuse_vision, tower_runs, vision_tower
from roll_like.registry import TRAINING_BACKENDS
from roll_like.training.backbone import use_row_attention
from roll_like.training.compiled import compile_layers
from roll_like.training.interface import BatchT, Objective, RankModel, RankSpec, StepT
from roll_like.training.layout import MicroBatch
from roll_like.training.policy import PolicyModule, TokenLogprobHead, kept_ids
from roll_like.types import FloatArray


@dataclass(frozen=True, kw_only=True)
class LanguageModelObjective(Objective[StepT, BatchT]):
    """A language model that tells the log-probabilities of tokens. By itself it is a reference: it learns nothing.

    Attributes:
        settings: The `training` section.
        temperature: Temperature that log-probabilities are taken at.
        replays_routes: Whether tokens are computed with the experts that the engine chose, where samples have them.
    """

    settings: TrainingConfig
    temperature: float = 1.0
    replays_routes: bool = False

    def head(self) -> type[TokenLogprobHead]:
        """Return what becomes of the hidden states before targets."""
        return TokenLogprobHead

    def load(self, spec: RankSpec[Any]) -> nn.Module:
        """Return the model with adapters where it has some, and a head that never holds all logits."""
        settings = self.settings
        loaded = load_language_model(spec, settings)
        refuse_vision(loaded.config, settings, self.section)
        tower = vision_tower(loaded)
        if tower is not None and settings.freeze_vision:
            tower.requires_grad_(False)
        model = prepared(loaded, spec, settings)
        refuse_other_logits(model)
        module = PolicyModule(
            model,
            chunk_tokens=settings.logprob_chunk_tokens,
            chunk_vocab=settings.logprob_chunk_vocab,
            head=self.head(),
            float32_head=spec.float32_head,
        )
        if tower is not None:
            divided = "weights" in TRAINING_BACKENDS.get(settings.backend).divided(settings)
            trained = not (settings.freeze_vision or spec.frozen)
            module.tower = tower_runs(ranks=settings.workers, divided=divided, trained=trained)
        if self.replays_routes:
            module.router = RouterReplay(model, ROUTER_REPLAY)
        return module

    def hf_model(self, module: nn.Module) -> Any:
        """Return the Hugging Face model."""
        return module.causal_lm

    def logprobs(self, model: RankModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of every target, in nats, shape [N]; among what was kept, if told."""
        return _logprobs(model, batch, self.temperature)

    def forward(self, model: RankModel, batch: BatchT) -> Any:
        """Return the log-probability of every target, shape [N]."""
        logprobs_N: FloatArray = self.logprobs(model, batch)[0].cpu().numpy()
        return logprobs_N

    def colder(self, model: RankModel, batch: BatchT) -> FloatArray:
        """Return the log-probability of every target at half of the temperature, among what was kept, shape [N]."""
        logprobs_N: FloatArray = _logprobs(model, batch, self.temperature / 2)[0].cpu().numpy()
        return logprobs_N


def _logprobs(model: RankModel, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    kept = () if batch.kept is None else (kept_ids(batch.kept, model.device),)
    result: tuple[Tensor, Tensor] = model(batch, temperature, *kept)
    return result


def score_energies(logprobs_N: FloatArray, colder_N: FloatArray) -> FloatArray:
    """Return 1 − 2π(y) + Σ_v π(v)² of targets y, shape [N]: the squared norm of ∇ log π(y) in the logits.

    No whole distribution is needed: at half of the temperature log π'(y) = 2·log π(y) − log Σ_v π(v)².

    Args:
        logprobs_N: log π(y).
        colder_N: log π'(y).
    """
    wide_N = logprobs_N.astype(np.float64)
    energies_N = 1 - 2 * np.exp(wide_N) + np.exp(2 * wide_N - colder_N)
    bounded_N: FloatArray = np.maximum(energies_N, 0).astype(np.float32)
    return bounded_N


def load_language_model(spec: RankSpec[Any], settings: TrainerConfig) -> Any:
    """Return the language model of a spec on the CPU; without what can be read later, where no rank needs all of it.

    That is where ranks divide its weights, or quantise one layer after the other.

    Raises:
        ConfigError: As `load_causal_lm`.
    """
    return load_causal_lm(
        Path(spec.model_path),
        dtype=spec.dtype,
        trust_remote_code=spec.trust_remote_code,
        late=loads_late(spec, settings),
    )


def loads_late(spec: RankSpec[Any], settings: TrainerConfig) -> bool:
    """Return whether a rank may leave tensors in the files until each is wanted: it needs no whole model at a time."""
    backend = TRAINING_BACKENDS.get(settings.backend)
    quantised = settings.lora is not None and settings.lora.quantization is not None and not spec.frozen
    return quantised or (backend.reads_late and "weights" in backend.divided(settings))


def prepared(model: Any, spec: RankSpec[Any], settings: TrainerConfig) -> Any:
    """Return a Hugging Face model with the attention, dropout, checkpointing and adapters that it is trained with."""
    refuse_undivided_heads(model.config, settings.sequence_parallel)
    backend = TRAINING_BACKENDS.get(settings.backend)
    backend.refuse_model(model.config, settings)
    fix_frequencies(model, spec.window)
    use_row_attention(
        model,
        settings.attention,
        row_sharing=spec.objective.row_sharing,
        device=spec.device,
        # tokens are exchanged for heads over joined rows
        joining=settings.sequence_parallel > 1 or backend.joins_rows,
    )
    if not spec.objective.drops:
        without_dropout(model)
    if settings.gradient_checkpointing:
        recompute_activations(model)
    if settings.lora is not None and not spec.frozen:
        add_adapters(model, settings.lora, seed=spec.seed, section=spec.objective.section)
    if settings.compile:
        compile_layers(model)
    return model
