"""The energy of a token's score: from two log-probabilities, what a whole softmax gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bigram_engine import bigram_engine, fixed_groups, start_table

from roll_like.algorithms.advantages.base import policy_samples
from roll_like.algorithms.kl import KLController
from roll_like.config.algorithm import AlgorithmConfig


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
