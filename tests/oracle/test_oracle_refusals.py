"""Infinities and NaN are refused by every estimator and every loss, with a message that says where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from advantage_cases import Step, advantages, steps
from algorithm_samples import same_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import Batch, batches, loss_and_gradient
from registered import computed

from roll_like.errors import EngineError, RewardError

ESTIMATORS = [name for kind, name in computed() if kind == "advantage"]
POLICY_LOSSES = [name for kind, name in computed() if kind == "loss"]
#: The check is the same for every number: a few cases a name will do.
few_cases = settings(same_cases, max_examples=15)
BAD = st.sampled_from([float("inf"), -float("inf"), float("nan")])


@pytest.mark.parametrize("name", ESTIMATORS)
@given(step=steps(), bad=BAD, data=st.data())
@few_cases
def test_rewards(name: str, step: Step, bad: float, data: Any) -> None:
    at = data.draw(st.integers(0, len(step.parts) - 1))
    parts = [{"toy": bad} if row == at else part for row, part in enumerate(step.parts)]
    with pytest.raises(RewardError, match="rewards are finite numbers"):
        advantages(name, replace(step, parts=parts))


@pytest.mark.parametrize("name", ESTIMATORS)
@given(step=steps(smallest_response=1), bad=BAD, data=st.data())
@few_cases
def test_penalties(name: str, step: Step, bad: float, data: Any) -> None:
    at = data.draw(st.integers(0, len(step.penalties) - 1))
    penalties = [np.array([bad, *row[1:]]) if place == at else row for place, row in enumerate(step.penalties)]
    with pytest.raises(EngineError, match=r"penalties .* hold infinities or NaN"):
        advantages(name, replace(step, penalties=penalties))


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(
    batch=batches(smallest_response=1),
    field=st.sampled_from(["logprobs_BT", "old_BT", "behaviour_BT", "reference_BT", "advantages_BT", "entropy_BT"]),
    bad=BAD,
)
@few_cases
def test_tokens(name: str, batch: Batch, field: str, bad: float) -> None:
    array = getattr(batch, field).clone()
    array[-1, 0] = bad
    with pytest.raises(EngineError, match="finite numbers were expected"):
        loss_and_gradient(name, replace(batch, **{field: array}))
