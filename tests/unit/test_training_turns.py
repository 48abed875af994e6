"""Turns on their way from a sample to the loss: each is one, however its sample is cut, packed and shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bigram_engine import bigram_engine

import roll_like.policy_gradient.objective as objective_module
from roll_like.algorithms.kl import KLController
from roll_like.algorithms.losses import LossInputs, policy_objective
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.types import PolicySample

#: Turns of the tokens after a prompt of two: with glue between turns, without, with a token inside a turn that the
#: loss leaves out, starting late (a part of a cut episode), and of a single answer.
EPISODES = {
    "glue": [0, 0, -1, -1, 1],
    "no glue": [0, 1, 1, 1, 2],
    "hidden inside": [0, 0, -1, 0, 0],
    "second part": [3, 3, -1, 4],
    "answer": [0, 0, 0],
}


def episode(name: str, group: str) -> PolicySample:
    turns = np.array([-1, -1, *EPISODES[name]], np.int32)
    return PolicySample(
        group_id=group,
        token_ids=(np.arange(len(turns)) * 5 % 11).astype(np.int32),
        prompt_length=2,
        loss_mask=turns >= 0,
        turns=turns,
        behaviour_logprobs=np.where(turns >= 0, -1, 0).astype(np.float32),
        # which token of which sample it is
        advantages=np.where(turns >= 0, 100 * (1 + list(EPISODES).index(name)) + np.arange(len(turns)), 0).astype(
            np.float32
        ),
        reward=0.0,
        policy_version=0,
    )


def seen_by_the_loss(monkeypatch: pytest.MonkeyPatch, samples: list[PolicySample], **layout: Any) -> list[LossInputs]:
    """The inputs of every micro-batch of one step."""
    seen: list[LossInputs] = []

    def recording(inputs: LossInputs, *rest: Any) -> Any:
        seen.append(inputs)
        return policy_objective(inputs, *rest)

    monkeypatch.setattr(objective_module, "policy_objective", recording)
    algorithm = AlgorithmConfig()
    _, engine = bigram_engine(algorithm, KLController(algorithm.kl), max_response_tokens=8, **layout)
    engine.train_step(samples)
    return seen


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("max_tokens", [8, 20, 1000])
@pytest.mark.parametrize("order", [1, -1])
def test_the_loss_sees_each_turn_as_one(
    monkeypatch: pytest.MonkeyPatch, share_prompts: bool, max_tokens: int, order: int
) -> None:
    samples = [episode(name, "same") for name in EPISODES][::order]
    seen = seen_by_the_loss(monkeypatch, samples, share_prompts=share_prompts, max_tokens_per_micro_batch=max_tokens)
    assert (len(seen) > 1) is (max_tokens == 8 or (max_tokens == 20 and not share_prompts))
    found = {}
    for inputs in seen:
        assert sorted(set(inputs.turn_N.tolist())) == list(range(inputs.turns))
        sums = inputs.turn_sum(inputs.advantages_N)
        assert inputs.turn_max(inputs.sequence_N.double()).tolist() == inputs.sequence_N.tolist()
        found |= dict(zip(inputs.advantages_N.tolist(), sums.tolist(), strict=True))
    expected = {}
    for sample in samples:
        for turn in set(sample.turns[sample.loss_mask].tolist()):
            tokens = sample.advantages[sample.turns == turn].tolist()
            expected |= dict.fromkeys(tokens, sum(tokens))
    assert found == expected
