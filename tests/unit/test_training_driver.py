"""What the driver's handles on policy and critic do, with ranks that only record what they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from roll_like.training.critic import CriticEngine
from roll_like.training.whole_batch import tokens_of_all_ranks
from tests_support import policy_sample  # type: ignore[import-not-found]

from roll_like.algorithms.kl import KLController
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.sections import CriticConfig
from roll_like.training.engine import TrainingEngine
from roll_like.training.layout import policy_batches
from roll_like.values import Mean, Sum, reduce

COUNTS = {"train/computed_tokens": Sum(8.0), "train/padding_tokens": Sum(2.0)}


class FakeCluster:
    """Two ranks; `scatter` keeps the shards and answers with what it was given."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[str, Any]] = []

    def __len__(self) -> int:
        return 2

    def scatter(self, method: Any, shards: Sequence[Any]) -> list[Any]:
        self.calls.append((method.__name__, shards))
        answer = self.answers[method.__name__]
        return [answer(shard) if callable(answer) else answer for shard in shards]

    def everywhere(self, method: Any, *arguments: Any) -> None:
        self.calls.append((method.__name__, arguments))


def trainer(cluster: FakeCluster, *, controller: KLController | None = None, **algorithm: Any) -> TrainingEngine:
    return TrainingEngine(
        cluster,  # type: ignore[arg-type]
        algorithm=AlgorithmConfig(**algorithm),
        max_response_tokens=8,
        max_tokens_per_micro_batch=64,
        share_prompts=True,
        kl_controller=controller,
    )


def trained_targets(cluster: FakeCluster) -> list[float]:
    """The advantage of every token that the ranks were given a weight for."""
    _, shares = cluster.calls[-1]
    batches = [batch for share in shares for update in share.updates for batch in update]
    return sorted(float(value) for batch in batches for value in batch.advantages[batch.weights != 0])


def test_no_samples_are_no_update() -> None:
    cluster = FakeCluster()
    assert reduce(trainer(cluster).train_step([]).metrics) == {"train/updates": 0.0}
    assert cluster.calls == []


@pytest.mark.parametrize(("loss", "expected"), [("ppo", [-1.0, 2.0]), ("clip_cov", [-1.0, 0.0, 2.0])])
def test_samples_without_advantage_are_left_out_unless_the_loss_needs_them(loss: str, expected: list[float]) -> None:
    cluster = FakeCluster(train=COUNTS)
    samples = [policy_sample(group=str(value), response=1, advantage=value) for value in (2.0, 0.0, -1.0)]
    trainer(cluster, loss=loss).train_step(samples)
    assert trained_targets(cluster) == expected
    weights = [batch.weights for share in cluster.calls[-1][1] for batch in share.updates[0]]
    assert max(map(np.max, weights)) == pytest.approx(1 / 3), "samples that are not computed count in the denominator"


def test_samples_that_the_loss_turns_down_do_not_count() -> None:
    cluster = FakeCluster(train=COUNTS)
    samples = [policy_sample(group=str(value), response=1, advantage=value) for value in (2.0, 1.0, -1.0)]
    trainer(cluster, loss="raft").train_step(samples)
    assert trained_targets(cluster) == [1.0, 2.0]
    weights = [batch.weights for share in cluster.calls[-1][1] for batch in share.updates[0]]
    assert max(map(np.max, weights)) == pytest.approx(1 / 2)


def test_the_weight_of_a_kl_penalty_follows_the_divergence() -> None:
    kl = {"use": "loss", "coefficient": 0.1, "adaptive": {"target": 0.01, "horizon": 10}}
    controller = KLController(AlgorithmConfig(kl=kl).kl)
    cluster = FakeCluster(train={**COUNTS, "train/kl": Mean(1.0, 3.0)})
    engine = trainer(cluster, controller=controller, kl=kl)
    samples = [policy_sample(group="a"), policy_sample(group="b")]
    coefficients = [reduce(engine.train_step(samples).metrics)["train/kl_coefficient"] for _ in range(2)]
    # far above the target: ×(1 + 0.2·2/10)
    assert coefficients == pytest.approx([0.1, 0.104])
    assert [share.kl_coefficient for share in cluster.calls[-1][1]] == pytest.approx([0.104, 0.104])
    assert controller.coefficient == pytest.approx(0.104 * 1.04)


def test_without_a_penalty_in_the_loss_nothing_follows() -> None:
    cluster = FakeCluster(train={**COUNTS, "train/kl": Mean(1.0, 3.0)})
    report = trainer(cluster).train_step([policy_sample()])
    assert "train/kl_coefficient" not in report.metrics


def learned(shard: Sequence[Any]) -> dict[str, Any]:
    return {"critic/loss": Sum(float(len(shard)))}


def device_mapping() -> tuple[list[str], Any]:
    seen: list[str] = []

    def devices(name: str) -> AbstractContextManager[None]:
        seen.append(name)
        return nullcontext()

    return seen, devices


def test_a_critics_figures_are_those_before_the_update() -> None:
    cluster = FakeCluster(train=learned)
    seen, devices = device_mapping()
    critic = CriticEngine(cluster, CriticConfig(updates_per_step=2), timer=devices)  # type: ignore[arg-type]
    samples = [policy_sample(group=group, prompt=1, response=2) for group in "aabb"]
    values = [np.array([9.0, 1.0, 1.0], np.float32), *(np.array([9.0, 2.0, 2.0], np.float32) for _ in range(3))]
    returns = [np.array([0.0, 1.0, 2.0], np.float32) for _ in samples]
    metrics = reduce(critic.learn(samples, values, returns))
    errors = np.array([0, 1] + [-1, 0] * 3)
    assert metrics["critic/value_mean"] == pytest.approx(1.75)
    assert metrics["critic/return_mean"] == pytest.approx(1.5)
    assert metrics["critic/explained_variance"] == pytest.approx(1 - errors.var() / 0.25)
    assert metrics["critic/loss"] == 4.0
    assert seen == ["critic"]
    (_, shards), *_ = cluster.calls
    assert [len(shard) for shard in shards] == [2, 2]
    for update in range(2):
        tokens = sum(int((batch.weights != 0).sum()) for shard in shards for batch in shard[update])
        total = sum(float(batch.weights.sum()) for shard in shards for batch in shard[update])
        assert (tokens, total) == (4, pytest.approx(1.0))


def test_a_critic_without_anything_to_learn() -> None:
    cluster = FakeCluster(train=learned)
    critic = CriticEngine(cluster, CriticConfig())  # type: ignore[arg-type]
    assert critic.learn([], [], []) == {}
    samples = [policy_sample(prompt=1, response=2)]
    constant = [np.ones(3, np.float32)]
    assert "critic/explained_variance" not in critic.learn(samples, constant, constant)


def test_a_critics_files_have_a_folder_of_their_own(tmp_path: Path) -> None:
    cluster = FakeCluster()
    critic = CriticEngine(cluster, CriticConfig())  # type: ignore[arg-type]
    critic.save(tmp_path)
    critic.load(tmp_path)
    assert cluster.calls == [("save", (str(tmp_path / "critic"),)), ("load", (str(tmp_path / "critic"),))]
    assert (tmp_path / "critic").is_dir()


def test_the_tokens_of_a_whole_batch_are_those_with_a_weight() -> None:
    samples = [policy_sample(prompt=2, response=3, advantage=2.0)]
    weights = [np.array([0, 0, 1, 0, 1], np.float32)]
    (shard,) = policy_batches(samples, weights, ranks=1, max_tokens=64, share_prompts=True)
    logprobs = [torch.tensor([-1.0, -2.0, -3.0])]
    tokens = tokens_of_all_ranks(shard, logprobs, [logprobs[0] * 2])
    assert tokens.logprobs_N.tolist() == [-1.0, -3.0]
    assert tokens.old_logprobs_N.tolist() == [-2.0, -6.0]
    assert tokens.advantages_N.tolist() == [2.0, 2.0]
    assert tokens.draws_N.tolist() == shard[0].draws[[0, 2]].tolist()
