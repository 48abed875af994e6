"""Guards: what they find, when they warn, and which of them end a run."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, nan
from typing import Any

import pytest

from roll_like.config.run import GuardsConfig
from roll_like.metrics.guards import Guards, NothingLearned, without_update


def alarms(metric: str, values: Iterable[float], **config: Any) -> tuple[list[tuple[int, str, bool]], Guards]:
    """The alarms of a series: step, guard and whether it ends the run."""
    guards = Guards(GuardsConfig(**config))
    found = [
        (step, alarm.guard, alarm.stop)
        for step, value in enumerate(values, 1)
        for alarm in guards.check({metric: value})
    ]
    return found, guards


def test_nothing_is_found_in_ordinary_steps_or_where_metrics_are_missing() -> None:
    ordinary = {
        "mismatch/kl": 0.002,
        "train/grad_norm": 0.5,
        "rollout/reward/mean": 0.3,
        "train/entropy": 0.6,
        "rollout/truncated": 0.2,
        "rollout/groups/zero_variance": 0.4,
    }
    guards = Guards(GuardsConfig(stop=("mismatch", "reward")))
    assert not [alarm for _ in range(100) for alarm in guards.check(ordinary)]
    assert not [alarm for _ in range(100) for alarm in guards.check({"train/loss": 1.0})]
    assert guards.healthy


def test_a_mismatch_that_grows_is_found_after_three_steps() -> None:
    usual = [0.002] * 20
    assert alarms("mismatch/kl", [*usual, 0.009] * 3)[0] == []  # below 5 times the usual
    found, guards = alarms("mismatch/kl", [*usual, 0.011, 0.011, 0.002, 0.011, 0.011, 0.011, 0.011])
    assert found == [(26, "mismatch", False)]
    assert not guards.healthy
    assert alarms("mismatch/kl", [1.1] * 3, stop=("mismatch",))[0] == [(3, "mismatch", True)]


def test_the_limits_of_a_mismatch_are_settings() -> None:
    drift = [0.02, 0.02, 0.06, 0.06, 0.06]
    assert alarms("mismatch/kl", drift)[0] == []
    assert alarms("mismatch/kl", drift, mismatch_limit=0.06)[0] == []
    assert alarms("mismatch/kl", drift, mismatch_limit=0.05, stop=("mismatch",))[0] == [(5, "mismatch", True)]
    grown = [*[0.02] * 20, *[0.05] * 3]
    assert alarms("mismatch/kl", grown)[0] == []
    assert alarms("mismatch/kl", grown, mismatch_growth=2.0)[0] == [(23, "mismatch", False)]
    assert alarms("mismatch/kl", [*[1e-5] * 20, *[4e-4] * 3])[0] == []  # 40 times next to nothing
    assert alarms("mismatch/kl", [nan] * 3)[0] == [(3, "mismatch", False)]


def test_one_update_ten_times_the_usual_is_found_and_the_next_is_healthy_again() -> None:
    found, guards = alarms("train/grad_norm", [*[1.0] * 25, 10.5])
    assert found == [(26, "grad_norm", False)]
    assert not guards.healthy
    guards.check({"train/grad_norm": 1.0})
    assert guards.healthy
    assert alarms("train/grad_norm", [1.0, 50.0, 1.0])[0] == []  # too early to know
    for norm in (nan, inf):  # such an update is not taken, and the next are compared as before
        assert alarms("train/grad_norm", [norm, *[1.0] * 25, norm, 1.0, 10.5])[0] == [(29, "grad_norm", False)]
    assert alarms("train/grad_norm", [1.0 * 1.2**step for step in range(60)])[0] == []  # it grows slowly


def test_a_reward_that_collapses_is_found_after_patience() -> None:
    rising = [min(0.1 + 0.02 * step, 0.8) for step in range(60)]
    found, guards = alarms("rollout/reward/mean", [*rising, *[0.0] * 40], patience=5, stop=("reward",))
    # the moving mean, 0.8 · 0.9^n, is below 0.4 from the seventh step on
    assert found == [(60 + 7 + 4, "reward", True)]
    assert not guards.healthy
    assert alarms("rollout/reward/mean", [*rising, *[0.0] * 8, *[0.8] * 60], patience=5)[0] == []
    assert alarms("rollout/reward/mean", [-1.0 - step for step in range(60)], patience=5)[0] == []  # a penalty


def test_entropy_that_is_lost_is_found_after_patience() -> None:
    found, guards = alarms("train/entropy", [*[0.5] * 20, 0.04, 0.2, *[0.04] * 6], patience=6)
    assert (found, guards.healthy) == ([(28, "entropy", False)], False)


@pytest.mark.parametrize(
    ("metric", "guard", "value"),
    [("rollout/truncated", "truncation", 0.95), ("rollout/groups/zero_variance", "zero_variance", 1.0)],
)
def test_shares_that_stay_too_high_are_found_and_leave_checkpoints_healthy(
    metric: str, guard: str, value: float
) -> None:
    series = [*[value] * 19, 0.5, *[value] * 25, 0.5, *[value] * 20]
    found, guards = alarms(metric, series, stop=(guard,))
    assert found == [(40, guard, True), (66, guard, True)]  # again after a step without
    assert guards.healthy


def test_steps_without_an_update_are_told_more_and_more_seldom() -> None:
    told = NothingLearned()
    equal = {"train/updates": 0.0, "rollout/groups/accepted": 16.0, "rollout/groups/zero_variance": 1.0}
    found = {step: list(told.found(equal)) for step in range(1, 10)}
    assert [step for step, texts in found.items() if texts] == [1, 2, 4, 8]
    assert found[1] == ["all 16 groups have equal rewards: no update"]
    assert found[4] == ["all 16 groups have equal rewards: no update (4 steps of this run had none)"]
    assert list(told.found({**equal, "rollout/groups/zero_variance": 0.9, "train/updates": 1.0})) == []


def test_why_a_step_had_no_update() -> None:
    assert without_update({"train/updates": 0, "rollout/groups/zero_variance": 0.5}) == "no sample has an advantage"
    assert without_update({"train/updates": 0, "train/skipped_updates": 1}) is None  # told elsewhere
    assert without_update({"train/loss": 1.0}) is None
