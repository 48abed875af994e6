"""The energy of a token's score: from two log-probabilities, what a whole softmax gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bigram_engine import bigram_engine, fixed_groups, start_table

from roll_like.algorithms.advantages.base import policy_samples
from roll_like.algorithms.kept import kept_logprobs
from roll_like.algorithms.kl import KLController
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.training.language_model import LanguageModelObjective, score_energies
from roll_like.types import KeptTokens


def test_it_is_the_squared_gradient_of_the_log_probability_in_the_logits() -> None:
    algorithm = AlgorithmConfig()
    _, engine = bigram_engine(
        algorithm, KLController(algorithm.kl), max_response_tokens=24, max_tokens_per_micro_batch=60
    )
    samples = policy_samples(fixed_groups())
    table = torch.from_numpy(start_table())
    for sample, energies in zip(samples, engine.score_energies(samples), strict=True):
        assert energies.shape == sample.token_ids.shape
        assert not energies[~sample.loss_mask].any()
        for at in np.flatnonzero(sample.loss_mask):
            logits = table[int(sample.token_ids[at - 1])].clone().requires_grad_()
            logits.log_softmax(0)[int(sample.token_ids[at])].backward()
            assert logits.grad is not None
            assert energies[at] == pytest.approx(float(logits.grad.square().sum()), abs=1e-6)


def test_where_sampling_left_tokens_out_it_is_that_of_the_distribution_among_the_others() -> None:
    draw = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(2, 4, generator=draw), torch.randn(6, 4, generator=draw)
    targets, kept = torch.tensor([2, 5]), [[0, 2, 3], [1, 5]]
    batch = SimpleNamespace(
        kept=KeptTokens(ids=np.concatenate(kept).astype(np.int32), counts=np.array([3, 2], np.int32))
    )

    def model(_: Any, temperature: float, *among: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return kept_logprobs(hidden, weight, targets, *among, temperature=temperature, chunk_tokens=8, chunk_vocab=8)

    model.device = "cpu"  # type: ignore[attr-defined]
    objective: Any = SimpleNamespace(temperature=1.0)
    plain = LanguageModelObjective.logprobs(objective, model, batch)[0].numpy()  # type: ignore[arg-type]
    energies = score_energies(plain, LanguageModelObjective.colder(objective, model, batch))  # type: ignore[arg-type]
    for place, ids in enumerate(kept):
        logits = (hidden[place] @ weight[ids].T).requires_grad_()
        logits.log_softmax(0)[ids.index(int(targets[place]))].backward()
        assert logits.grad is not None
        assert energies[place] == pytest.approx(float(logits.grad.square().sum()), abs=1e-6)
