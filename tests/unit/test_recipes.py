"""Recipes are different algorithms, and every option of the `algorithm` section changes a computed number.

Each case trains two steps through the training code itself on a policy of one table (`bigram_engine.py`).
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
from bigram_engine import distances, train_two_steps

from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.base import ConfigModel, PluginSetting
from roll_like.registry import Registry

ROOT = Path(__file__).resolve().parents[2]

#: Bypass: ratios to the engine that sampled, which is some way off, so that bounds are reached.
OFF_POLICY: dict[str, Any] = {"old_logprobs": "behaviour", "correction": {"type": "none"}}


def test_every_two_recipes_have_different_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names, matrix = distances()
    assert set(names) == {
        "cispo", "dapo", "deepseek_v3_2", "dr_grpo", "gspo", "grpo", "lite_ppo", "luspo", "maxrl", "ppo", "raft",
        "reinforce_plus_plus", "remax", "rloo", "topr", "vapo", "vespo",
    }  # fmt: skip
    # different in direction, not only in length
    for one, other in itertools.combinations(range(len(names)), 2):
        assert matrix[one, other] > 1e-3, f"{names[one]} and {names[other]} move the policy alike"


def test_every_recipe_is_a_row_of_the_documentation() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    names = {path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml")}
    assert {"cross_tokenizer", "echo", "sdft"} <= names
    assert [name for name in sorted(names) if f"| `{name}` | `" not in page] == []


def test_the_same_algorithm_moves_the_same_way() -> None:
    assert np.array_equal(train_two_steps(AlgorithmConfig()).movement, train_two_steps(AlgorithmConfig()).movement)


# ---- every option --------------------------------------------------------------------------------

KL_LOSS: dict[str, Any] = {"kl": {"use": "loss", "coefficient": 0.1}}
RUNNING: dict[str, Any] = {"advantage": "reinforce"}

#: Option → the rest of the section, and values that must lead to different numbers.
OPTIONS: dict[str, tuple[Mapping[str, Any], list[Any]]] = {
    "reward_shaping.truncated.factor": ({"reward_shaping": {"truncated": {}}}, [0.0, 0.5]),
    "reward_shaping.truncated.reward": ({"reward_shaping": {"truncated": {}}}, [-1.0, 0.25]),
    "reward_shaping.overlong.buffer_tokens": ({"reward_shaping": {"overlong": {}}}, [4, 12]),
    "reward_shaping.overlong.penalty": ({"reward_shaping": {"overlong": {"buffer_tokens": 12}}}, [0.5, 1.0]),
    "reward_shaping.length_penalty.type": (
        {"reward_shaping": {"length_penalty": {"coefficient": 0.5}}},
        ["linear", "group"],
    ),
    "reward_shaping.length_penalty.coefficient": ({"reward_shaping": {"length_penalty": {}}}, [0.1, 0.5]),
    "reward_shaping.normalise.mean": (RUNNING, ["none", "group", "batch", "running"]),
    "reward_shaping.normalise.std": (RUNNING, ["none", "group", "batch", "running"]),
    "reward_shaping.clip": ({"advantage": "dr_grpo"}, [None, 0.5]),
    "advantage": ({}, []),  # all registered ones, in a test of their own
    "advantage_shaping.whiten": ({}, [False, True]),
    "advantage_shaping.clip": ({}, [None, 0.5]),
    "mask.truncated": ({}, [False, True]),
    "mask.difficulty.of": ({"mask": {"difficulty": {"low": 0.0, "high": 0.5}}}, ["mean", "std"]),
    "mask.difficulty.low": ({"mask": {"difficulty": {"of": "mean", "high": 2.0}}}, [-1.0, 0.4]),
    "mask.difficulty.high": ({"mask": {"difficulty": {"of": "mean", "low": -1.0}}}, [0.4, 2.0]),
    "loss": ({}, []),
    "aggregation": ({}, ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "token_sum_norm"]),
    "router_replay": ({}, []),  # of mixtures of experts: test_router_replay.py
    "updates_per_step": ({}, [1, 2, 4]),
    "old_logprobs": ({"updates_per_step": 2}, ["recompute", "behaviour"]),
    "kl.use": ({"kl": {"coefficient": 0.1}}, ["none", "loss", "reward"]),
    "kl.estimator": (KL_LOSS, ["k1", "abs", "k2", "k3"]),
    "kl.straight_through": (KL_LOSS, [False, True]),
    "kl.importance_weight": ({"kl": {"use": "loss", "coefficient": 0.1}, "updates_per_step": 2}, [False, True]),
    "kl.coefficient": (KL_LOSS, [0.1, 0.2]),
    "kl.adaptive.target": ({"kl": {"use": "loss", "coefficient": 0.1, "adaptive": {"horizon": 20}}}, [0.01, 10.0]),
    "kl.adaptive.horizon": ({"kl": {"use": "reward", "coefficient": 0.1, "adaptive": {"target": 0.01}}}, [20, 40]),
    "entropy_coefficient": ({}, [0.0, 0.1]),
    "observation_coefficient": ({}, [0.0, 0.1, 1.0]),
    "mask.samples_per_group": ({}, [2, 3]),
    "correction.type": ({}, ["none", "truncated", "masked"]),
    "correction.level": (
        {"correction": {"cap": 1.2}},
        ["token", "turn", "turn_geometric", "sequence", "geometric"],
    ),
    "correction.cap": ({}, [1.1, 2.0]),
    "correction.floor": ({"correction": {"type": "masked"}}, [None, 0.9]),
    "correction.reject.estimator": ({"correction": {"reject": {"high": 1.05, "level": "token"}}}, ["k1", "k2", "k3"]),
    "correction.reject.level": (
        {"correction": {"reject": {"estimator": "k2", "high": 0.12}}},
        ["token", "turn_mean", "turn_max", "sequence_mean", "sequence_max"],
    ),
    "correction.reject.advantages": ({"correction": {"reject": {"level": "token", "high": 1.1}}}, ["all", "negative"]),
    "correction.reject.high": ({"correction": {"reject": {"level": "token"}}}, [1.1, 1.5]),
    "correction.reject.low": ({"correction": {"reject": {"level": "token", "high": 3.0}}}, [None, 0.8]),
    "advantage.gae.gamma": ({"advantage": {"type": "gae"}}, [0.9, 1.0]),
    "advantage.gae.lam": ({"advantage": {"type": "gae"}}, [0.5, 1.0]),
    # what the critic learns, which is nothing here: test_algorithms_estimators.py
    "advantage.gae.critic_lam": ({}, []),
    "advantage.gae.length_adaptive": ({"advantage": {"type": "gae"}}, [None, 0.1, 1.0]),
    "advantage.gigpo.divide_by_std": ({"advantage": {"type": "gigpo"}}, [False, True]),
    "advantage.gigpo.gamma": ({"advantage": {"type": "gigpo"}}, [0.5, 1.0]),
    "advantage.gigpo.turn_weight": ({"advantage": {"type": "gigpo"}}, [0.5, 1.0]),
    "advantage.grpo_passk.divide_by_std": ({"advantage": {"type": "grpo_passk"}}, [False, True]),
    "advantage.grpo_process.divide_by_std": ({"advantage": {"type": "grpo_process"}}, [False, True]),
    # of rewards without scores of steps, which no sample here has beside others: tests/unit/test_algorithms_process.py
    "advantage.grpo_process.outcome_weight": ({}, []),
    "advantage.optimal_token_baseline.gamma": ({"advantage": {"type": "optimal_token_baseline"}}, [0.5, 1.0]),
    "advantage.optimal_token_baseline.tail_returns": ({"advantage": {"type": "optimal_token_baseline"}}, [False, True]),
    "advantage.pkpo.k": ({"advantage": {"type": "pkpo"}}, [2, 4]),
    "advantage.rae.decay": ({"advantage": {"type": "rae"}}, [0.5, 0.95]),
    "advantage.reinforce.gamma": ({"advantage": {"type": "reinforce"}}, [0.9, 1.0]),
    "advantage.reinforce_plus_plus.gamma": ({"advantage": {"type": "reinforce_plus_plus"}}, [0.9, 1.0]),
    "advantage.remax.gamma": ({"advantage": {"type": "remax"}}, [0.9, 1.0]),
    "advantage.rloo.divide_by_std": ({"advantage": {"type": "rloo"}}, [False, True]),
    "advantage.turn_returns.gamma": ({"advantage": {"type": "turn_returns"}}, [0.5, 1.0]),
    "loss.cispo.clip_high": (OFF_POLICY, [0.1, 0.3]),
    "loss.cispo.clip_low": (OFF_POLICY, [0.1, 0.3]),
    "loss.clip_cov.clip_high": (OFF_POLICY, [0.1, 0.3]),
    "loss.clip_cov.clip_low": (OFF_POLICY, [0.1, 0.3]),
    "loss.clip_cov.fraction": ({"loss": {"low": 0.1}}, [0.01, 0.1]),
    "loss.clip_cov.high": ({"loss": {"low": 0.1, "fraction": 0.1}}, [0.3, 5.0]),
    "loss.clip_cov.low": ({"loss": {"fraction": 1.0}}, [0.1, 0.5]),
    "loss.dppo_kl.clip_high": (OFF_POLICY, [0.001, 0.1]),
    "loss.dppo_kl.clip_low": (OFF_POLICY, [0.001, 0.1]),
    "loss.dppo_kl.ratio_cap": (OFF_POLICY, [1.1, 20.0]),
    "loss.dppo_tv.clip_high": (OFF_POLICY, [0.01, 0.2]),
    "loss.dppo_tv.clip_low": (OFF_POLICY, [0.01, 0.2]),
    "loss.dppo_tv.ratio_cap": (OFF_POLICY, [1.1, 20.0]),
    "loss.dro.beta": (OFF_POLICY, [0.05, 0.5]),
    "loss.gmpo.clip_high": (OFF_POLICY, [0.1, 0.4]),
    "loss.gmpo.clip_low": (OFF_POLICY, [0.1, 0.4]),
    "loss.gspo.clip_high": (OFF_POLICY, [4e-4, 0.5]),
    "loss.gspo.clip_low": (OFF_POLICY, [3e-4, 0.5]),
    "loss.gspo.unit": ({**OFF_POLICY, "loss": {"clip_low": 0.5, "clip_high": 0.5}}, ["sequence", "turn"]),
    "loss.kimi.tau": (OFF_POLICY, [0.05, 0.5]),
    "loss.kl_cov.coefficient": ({**OFF_POLICY, "loss": {"fraction": 0.1}}, [0.1, 1.0]),
    "loss.kl_cov.fraction": (OFF_POLICY, [0.01, 0.1]),
    "loss.ppo.clip_high": (OFF_POLICY, [0.1, 0.3]),
    "loss.ppo.clip_low": (OFF_POLICY, [0.1, 0.3]),
    "loss.ppo.dual_clip": ({**OFF_POLICY, "loss": {"clip_high": 0.1}}, [1.2, 3.0, None]),
    "loss.raft.min_advantage": ({"advantage": "reinforce"}, [0.0, 0.8]),
    "loss.reinforce.importance_weight": (OFF_POLICY, [False, True]),
    "loss.sapo.tau_negative": (OFF_POLICY, [1.0, 2.0]),
    "loss.sapo.tau_positive": (OFF_POLICY, [1.0, 2.0]),
    "loss.topr.negative_cap": (OFF_POLICY, [0.5, 1.0]),
    "loss.vespo.k_negative": (OFF_POLICY, [0.5, 3.0]),
    "loss.vespo.k_positive": (OFF_POLICY, [0.5, 2.0]),
    "loss.vespo.lam_negative": (OFF_POLICY, [0.5, 2.0]),
    "loss.vespo.lam_positive": (OFF_POLICY, [0.5, 3.0]),
}


def leaves(model: type[ConfigModel], prefix: str = "") -> Iterator[str]:
    """Every option of a section, by its path; plugins' own are `field.type.option`."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        setting = next((mark for mark in field.metadata if isinstance(mark, PluginSetting)), None)
        section = next((part for part in sections(field.annotation)), None)
        if setting is not None:
            yield path
            yield from plugin_leaves(setting.registry, path)
        elif section is not None:
            yield from leaves(section, f"{path}.")
        elif name != "type" or get_origin(field.annotation) is not Literal or len(get_args(field.annotation)) > 1:
            yield path


def plugin_leaves(registry: Registry[Any], path: str) -> Iterator[str]:
    for plugin in registry.names():
        if registry.origin(plugin).startswith("roll_like."):
            yield from leaves(registry.get(plugin).Config, f"{path}.{plugin}.")


def sections(annotation: Any) -> Iterator[type[ConfigModel]]:
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from sections(part)


def with_option(rest: Mapping[str, Any], path: str, value: Any) -> AlgorithmConfig:
    """The section with one option set, and the plugin chosen that has it."""
    values: dict[str, Any] = {key: dict(part) if isinstance(part, Mapping) else part for key, part in rest.items()}
    parts = path.split(".")
    if parts[0] in ("advantage", "loss") and len(parts) == 3:
        values[parts[0]] = {**values.get(parts[0], {}), "type": parts[1], parts[2]: value}
        return AlgorithmConfig.model_validate(values)
    at = values
    for part in parts[:-1]:
        at[part] = dict(at.get(part, {}))
        at = at[part]
    at[parts[-1]] = value
    return AlgorithmConfig.model_validate(values)


def test_every_option_has_a_case() -> None:
    assert sorted(OPTIONS) == sorted(leaves(AlgorithmConfig))


@pytest.mark.parametrize("path", [path for path, (_, values) in OPTIONS.items() if values])
def test_every_option_changes_a_computed_number(path: str) -> None:
    rest, values = OPTIONS[path]
    movements = [train_two_steps(with_option(rest, path, value), noise=0.6).movement for value in values]
    for one, other in itertools.combinations(range(len(values)), 2):
        difference = np.abs(movements[one] - movements[other]).max()
        assert difference > 1e-5, f"{path}: {values[one]} and {values[other]} compute the same"


@pytest.mark.parametrize("field", ["advantage", "loss"])
def test_every_estimator_and_loss_computes_something_of_its_own(field: str) -> None:
    registry = next(mark for mark in AlgorithmConfig.model_fields[field].metadata if isinstance(mark, PluginSetting))
    names = [name for name in registry.registry.names() if registry.registry.origin(name).startswith("roll_like.")]
    algorithms = {name: AlgorithmConfig.model_validate({**OFF_POLICY, field: {"type": name}}) for name in names}
    movements = {name: train_two_steps(algorithm, noise=0.6).movement for name, algorithm in algorithms.items()}
    # the policy gradient has two names: its usual one, and the one of the recipe that is nothing else
    alike = {frozenset({"reinforce", "gpg"})} if field == "loss" else set()
    for (one, first), (other, second) in itertools.combinations(movements.items(), 2):
        if frozenset({one, other}) not in alike:
            assert np.abs(first - second).max() > 1e-5, f"{one} and {other} compute the same"


def test_a_critic_that_warms_up_leaves_the_policy_alone() -> None:
    algorithm = AlgorithmConfig.model_validate({"advantage": "gae"})
    first, second = np.split(train_two_steps(algorithm, warmup_steps=1).movement, 2)
    assert not first.any()
    assert second.any()


# ---- the same update, however it is cut ------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    **{
        f"advantage {name}": {"advantage": {"type": name}}
        for name in ("gae", "gdpo", "gpg", "grpo", "optimal_token_baseline", "remax")
    },
    **{
        f"loss {name}": {**OFF_POLICY, "loss": {"type": name}, "aggregation": "seq_mean_token_mean"}
        for name in (
            "ppo",
            "gspo",
            "cispo",
            "sapo",
            "gmpo",
            "dppo_tv",
            "dppo_kl",
            "dro",
            "topr",
            "kimi",
            "raft",
            "vespo",
        )
    },
    "loss clip_cov": {**OFF_POLICY, "loss": {"type": "clip_cov", "low": 0.1, "fraction": 0.05}},
    "loss kl_cov": {**OFF_POLICY, "loss": {"type": "kl_cov", "fraction": 0.05}},
    "loss gspo of turns": {**OFF_POLICY, "loss": {"type": "gspo", "unit": "turn", "clip_low": 0.5, "clip_high": 0.5}},
    "kl in the loss": {"kl": {"use": "loss", "coefficient": 0.1, "adaptive": {"target": 0.01, "horizon": 20}}},
    "kl in the reward": {"advantage": "reinforce_plus_plus", "kl": {"use": "reward", "coefficient": 0.1}},
    "sequence correction": {"correction": {"level": "sequence", "reject": {"estimator": "k3", "high": 0.2}}},
    "turn correction": {"correction": {"level": "turn_geometric", "reject": {"level": "turn_max", "high": 1.3}}},
    "kl in the reward of turns": {"advantage": "gigpo", "kl": {"use": "reward", "coefficient": 0.1}},
    "kl weighted": {"kl": {"use": "loss", "coefficient": 0.1, "importance_weight": True}, "old_logprobs": "behaviour"},
    "sequence mask": {**OFF_POLICY, "correction": {"type": "none", "reject": {"low": 0.9, "advantages": "negative"}}},
    "observations": {**OFF_POLICY, "loss": {"type": "gspo", "clip_high": 0.5}, "observation_coefficient": 0.5},
    "two updates": {"updates_per_step": 2, "entropy_coefficient": 0.01},
}


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_packing_and_order_change_nothing(case: str) -> None:
    algorithm = AlgorithmConfig.model_validate(CASES[case])
    expected = train_two_steps(algorithm, noise=0.6).movement
    ways: list[dict[str, Any]] = [{"max_tokens": 60}, {"share_prompts": False, "max_tokens": 30}]
    if algorithm.updates_per_step == 1:  # another order puts other groups into each of two updates
        ways[0]["reverse"] = True
    for way in ways:
        assert np.abs(train_two_steps(algorithm, noise=0.6, **way).movement - expected).max() < 1e-6, way
