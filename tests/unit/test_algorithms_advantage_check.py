"""What a check of an estimator finds: nothing in those that are built in, and every planted fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import pytest

from roll_like import ADVANTAGES, AdvantageEstimator, GroupEstimator, Groups, PluginConfig, TokenValues
from roll_like.algorithms.advantage_check import check_advantage
from roll_like.algorithms.advantages.base import penalised_rewards, policy_samples
from roll_like.errors import ConfigError
from roll_like.types import Scored

Of = Callable[[Any, Groups, TokenValues], TokenValues]


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_built_in_estimators_have_no_problem(name: str) -> None:
    report = check_advantage(name)
    assert report.problems == (), str(report)
    # --check refuses kl.use: reward with it
    assert bool(report.notes) == (name == "gdpo")


def centred(estimator: Any, groups: Groups, penalties: TokenValues) -> list[Any]:
    """Reward minus the group's mean, at each token."""
    del estimator
    arrays = []
    for group, rewards in penalised_rewards(groups, penalties):
        for sample, value in zip(group.samples, rewards - rewards.mean(), strict=True):
            arrays.append(np.full(len(sample.trajectory.token_ids), value, np.float32))
    return arrays


def planted(of: Of, **members: Any) -> type[AdvantageEstimator]:
    """Return an estimator that is what a function says."""

    class Config(PluginConfig):
        type: Literal["planted"] = "planted"

    return type("OfTest", (AdvantageEstimator,), {"advantages": of, "Config": Config, **members})


def test_a_right_estimator() -> None:
    assert str(check_advantage(planted(centred))) == "planted: no problems"


def without_penalties(estimator: Any, groups: Groups, penalties: TokenValues) -> list[Any]:
    return centred(estimator, groups, [np.zeros_like(each) for each in penalties])


def by_first(estimator: Any, groups: Groups, penalties: TokenValues) -> list[Any]:
    del estimator, penalties
    return [
        np.full(len(one.trajectory.token_ids), one.reward - group.samples[0].reward)
        for group in groups
        for one in group.samples
    ]


def standardised(estimator: Any, groups: Groups, penalties: TokenValues) -> list[Any]:
    del estimator
    arrays = []
    for group, rewards in penalised_rewards(groups, penalties):
        values = (rewards - rewards.mean()) / (rewards.std(ddof=1) if len(rewards) > 1 else np.float64(np.nan))
        for sample, value in zip(group.samples, values, strict=True):
            arrays.append(np.full(len(sample.trajectory.token_ids), value, np.float32))
    return arrays


def with_steps(estimator: Any, groups: Groups, penalties: TokenValues) -> list[Any]:
    samples = [sample for group in groups for sample in group.samples]
    arrays = centred(estimator, groups, penalties)
    return [array + len(sample.step_rewards) for array, sample in zip(arrays, samples, strict=True)]


def counted(estimator: Any, groups: Groups, penalties: TokenValues) -> list[Any]:
    estimator.calls = getattr(estimator, "calls", 0) + 1
    return [array * estimator.calls for array in centred(estimator, groups, penalties)]


FAULTS: dict[str, tuple[Of, str]] = {
    "one array a group": (lambda e, g, p: centred(e, g, p)[: len(g)], "returned 4 arrays for 16 samples"),
    "one number a sample": (
        lambda e, g, p: [array[:1] for array in centred(e, g, p)],
        "one advantage for each token of prompt and response",
    ),
    "groups of one": (standardised, "are not finite where three of a group's four samples were lost"),
    "the first sample": (by_first, "depend on the order of a group's samples"),
    "the first group": (
        lambda e, g, p: [array * (2 if at < 4 else 1) for at, array in enumerate(centred(e, g, p))],
        "depend on the order of the groups",
    ),
    "another sign": (lambda e, g, p: [-array for array in centred(e, g, p)], "gets less than the worst"),
    "a secret state": (counted, "after a resume the advantages differ"),
    "random": (
        lambda e, g, p: [array + np.random.default_rng().normal() for array in centred(e, g, p)],
        "two estimators that were given the same groups differ",
    ),
    "a penalty that is added": (
        lambda e, g, p: centred(e, g, [-each for each in p]),
        "a penalty raises the advantage of its own sample",
    ),
    "penalties changed": (
        lambda e, g, p: [each.__imul__(2) for each in p] and centred(e, g, p),
        "token_penalties were changed in place",
    ),
    "the place in the group": (
        lambda e, g, p: [array * (1 + at % 4) for at, array in enumerate(centred(e, g, p))],
        "depend on the order of a group's samples",
    ),
    "steps": (with_steps, "set uses_steps = True"),
    "an error": (lambda e, g, p: centred(e, g, p)[99], "it raises IndexError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    of, message = FAULTS[fault]
    report = check_advantage(planted(of))
    assert any(message in problem for problem in report.problems), str(report)


class PromptMean(AdvantageEstimator):
    """Reward minus the running mean of the prompt, which a state holds, or not."""

    class Config(PluginConfig):
        type: Literal["prompt_mean_test"] = "prompt_mean_test"

    told = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.means: dict[str, float] = {}

    def advantages(self, groups: Groups, token_penalties: TokenValues) -> TokenValues:
        arrays = []
        for group, rewards in penalised_rewards(groups, token_penalties):
            mean = self.means.get(group.task.task_id, float(rewards.mean()))
            for sample, value in zip(group.samples, rewards - mean, strict=True):
                arrays.append(np.full(len(sample.trajectory.token_ids), value, np.float32))
            self.means[group.task.task_id] = 0.9 * mean + 0.1 * float(rewards.mean())
        return arrays

    def state(self) -> dict[str, Any]:
        return {"means": self.means} if self.told else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.means = dict(state.get("means", {}))


def test_a_running_mean_that_a_resume_loses() -> None:
    assert check_advantage(PromptMean).problems == ()
    forgetful = type("Forgetful", (PromptMean,), {"told": False})
    assert any("after a resume" in problem for problem in check_advantage(forgetful).problems)


def test_what_a_critic_learns_from() -> None:
    def critic(of: Callable[[Any], Any]) -> type[AdvantageEstimator]:
        def use(self: Any, given: Any) -> None:
            self.critic = given

        def advantages(self: Any, groups: Groups, penalties: TokenValues) -> Any:
            self.samples = policy_samples(groups)
            return centred(self, groups, penalties)

        def learn(self: Any) -> Any:
            values = self.critic.values(self.samples)
            return self.critic.learn(self.samples, values, of(values))

        return planted(advantages, needs_critic=True, use=use, learn=learn)

    assert check_advantage(critic(lambda values: values)).problems == ()
    for of, message in [(lambda values: values[:1], "do not fit"), (lambda v: [x * np.nan for x in v], "not finite")]:
        assert any(message in problem for problem in check_advantage(critic(of)).problems)


def test_a_state_that_is_told() -> None:

    def load(self: Any, state: Mapping[str, Any]) -> None:
        self.calls = state.get("calls", 0)

    told = planted(counted, state=lambda self: {"calls": getattr(self, "calls", 0)}, load_state=load)
    assert check_advantage(told).problems == ()


def test_notes() -> None:
    (note,) = check_advantage(planted(without_penalties)).notes
    assert "leaves out token_penalties" in note

    class Raw(GroupEstimator):
        class Config(PluginConfig):
            type: Literal["raw"] = "raw"

        def of_group(self, rewards: Any) -> Any:
            return rewards

        def of_samples(self, samples: Any, rewards: Any) -> Any:
            assert all(isinstance(sample, Scored) for sample in samples)
            return self.of_group(rewards)

    (note,) = check_advantage(Raw).notes
    assert note == "groups whose rewards are all equal train the policy"


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="the settings of the advantage estimator 'gae' are wrong"):
        check_advantage("gae", settings={"lambda": 1})
