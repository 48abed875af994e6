"""What the driver's handles on policy and critic do, with ranks that only record what they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests_support import policy_sample  # type: ignore[import-not-found]

from roll_like.algorithms.kl import KLController
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.training import CriticConfig, TrainerConfig, TrainingConfig
from roll_like.policy_gradient.critic import Critic, ValueObjective
from roll_like.policy_gradient.objective import PolicyObjective, policy_batches, whole_batch
from roll_like.registry import TRAINING_BACKENDS
from roll_like.training.deepspeed import DeepSpeedBackend
from roll_like.training.engine import TrainingEngine
from roll_like.values import Max, Mean, Sum, reduce

COUNTS = {"train/computed_tokens": Sum(8.0), "train/padding_tokens": Sum(2.0)}


class FakeCluster:
    """Two ranks; remembers what they were given, and answers `forward_backward` with `answer`."""

    name = "training"

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.calls: list[tuple[str, Any]] = []

    def __len__(self) -> int:
        return 2

    def scatter(self, method: Any, shards: Sequence[Any]) -> list[Any]:
        self.calls.append((method.__name__, shards))
        if method.__name__ == "forward":
            return [[np.zeros(len(batch.targets), np.float32) for batch in shard] for shard in shards]
        assert method.__name__ == "forward_backward"
        seconds = {"time/train_compute": Max(1.0)}
        return [{**(self.answer(each) if callable(self.answer) else self.answer), **seconds} for each in shards]

    def everywhere(self, method: Any, *arguments: Any) -> list[Any]:
        self.calls.append((method.__name__, arguments))
        found = {"optimizer_step": {"time/train_compute": Max(0.5)}, "speed": {"throughput/trainer_tflops": Sum(2.0)}}
        return [dict(found.get(method.__name__, {})) for _ in range(2)]

    @property
    def shares(self) -> list[Any]:
        """What the ranks computed gradients of, update by update."""
        return [share for name, shares in self.calls if name == "forward_backward" for share in shares]


def trainer(
    cluster: FakeCluster,
    *,
    controller: KLController | None = None,
    training: dict[str, Any] | None = None,
    **algorithm: Any,
) -> TrainingEngine[Any]:
    config = AlgorithmConfig(**algorithm)
    objective = PolicyObjective(
        settings=TrainingConfig(max_tokens_per_micro_batch=64, **training or {}),
        algorithm=config,
        max_response_tokens=8,
        kl=controller or KLController(config.kl),
    )
    return TrainingEngine(cluster, objective)  # type: ignore[arg-type]


def trained_targets(cluster: FakeCluster) -> list[float]:
    """The advantage of every token that the ranks were given a weight for."""
    batches = [batch for share in cluster.shares for batch in share.batches]
    return sorted(float(value) for batch in batches for value in batch.advantages[batch.weights != 0])


class InPairs(DeepSpeedBackend):
    """A backend whose ranks are pairs, each with rows of its own."""

    @staticmethod
    def data_ranks(settings: TrainerConfig) -> int:
        return settings.workers // 2


def test_neighbouring_ranks_get_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    TRAINING_BACKENDS.names()
    monkeypatch.setitem(TRAINING_BACKENDS._plugins, "in_pairs", InPairs)
    cluster = FakeCluster({**COUNTS, "train/loss": Sum(1.0)})
    monkeypatch.setattr(FakeCluster, "__len__", lambda cluster: 4)
    engine = trainer(cluster, training={"backend": "in_pairs", "workers": 4})
    assert (engine.layout["ranks"], engine.layout["max_tokens"]) == (2, 64)
    samples = [policy_sample(group=group, prompt=1, response=2, advantage=1.0) for group in "abcd"]
    report = reduce(engine.train_step(samples))
    first, second, third, fourth = cluster.shares
    assert first.batches is second.batches
    assert third.batches is fourth.batches
    assert {*first.batches[0].sample_ids} & {*third.batches[0].sample_ids} == set()
    assert report["train/loss"] == 2.0  # one rank of each pair tells the metrics
    assert sorted(len(found) for found in engine.logprobs(samples)) == [3] * 4
    (violation,) = engine.objective.settings.ranks_have_work(1, "update", "samples", "sample more")
    assert "fewer than 2 times 2 workers" in violation.message


def test_no_samples_are_no_update() -> None:
    cluster = FakeCluster()
    assert reduce(trainer(cluster).train_step([])) == {"train/updates": 0.0}
    assert cluster.calls == []


@pytest.mark.parametrize(("loss", "expected"), [("ppo", [-1.0, 2.0]), ("clip_cov", [-1.0, 0.0, 2.0])])
def test_samples_without_advantage_are_left_out_unless_the_loss_needs_them(loss: str, expected: list[float]) -> None:
    cluster = FakeCluster(COUNTS)
    samples = [policy_sample(group=str(value), response=1, advantage=value) for value in (2.0, 0.0, -1.0)]
    trainer(cluster, loss=loss).train_step(samples)
    assert trained_targets(cluster) == expected
    weights = [batch.weights for share in cluster.shares for batch in share.batches]
    assert max(map(np.max, weights)) == pytest.approx(1 / 3), "samples that are not computed count in the denominator"


def test_samples_that_the_loss_turns_down_do_not_count() -> None:
    cluster = FakeCluster(COUNTS)
    samples = [policy_sample(group=str(value), response=1, advantage=value) for value in (2.0, 1.0, -1.0)]
    trainer(cluster, loss="raft").train_step(samples)
    assert trained_targets(cluster) == [1.0, 2.0]
    weights = [batch.weights for share in cluster.shares for batch in share.batches]
    assert max(map(np.max, weights)) == pytest.approx(1 / 2)


def test_the_weight_of_a_kl_penalty_follows_the_divergence() -> None:
    kl = {"use": "loss", "coefficient": 0.1, "adaptive": {"target": 0.01, "horizon": 10}}
    controller = KLController(AlgorithmConfig(kl=kl).kl)
    cluster = FakeCluster({**COUNTS, "train/kl": Mean(1.0, 3.0)})
    engine = trainer(cluster, controller=controller, kl=kl)
    samples = [policy_sample(group="a"), policy_sample(group="b")]
    coefficients = [reduce(engine.train_step(samples))["train/kl_coefficient"] for _ in range(2)]
    # far above the target: ×(1 + 0.2·2/10)
    assert coefficients == pytest.approx([0.1, 0.104])
    assert [share.shared.kl_coefficient for share in cluster.shares[-2:]] == pytest.approx([0.104, 0.104])
    assert controller.coefficient == pytest.approx(0.104 * 1.04)


def test_without_a_penalty_in_the_loss_nothing_follows() -> None:
    cluster = FakeCluster({**COUNTS, "train/kl": Mean(1.0, 3.0)})
    report = trainer(cluster).train_step([policy_sample()])
    assert "train/kl_coefficient" not in report


def critic_of(cluster: FakeCluster, *, updates: int = 1, **options: Any) -> Critic:
    objective = ValueObjective(settings=CriticConfig(updates_per_step=updates))
    return Critic(TrainingEngine(cluster, objective, **options))  # type: ignore[arg-type]


def learned(share: Any) -> dict[str, Any]:
    return {"critic/loss": Sum(float(len(share.batches)))}


def device_mapping() -> tuple[list[str], Any]:
    seen: list[str] = []

    def devices(name: str) -> AbstractContextManager[None]:
        seen.append(name)
        return nullcontext()

    return seen, devices


def test_a_critics_figures_are_those_before_the_update() -> None:
    cluster = FakeCluster(learned)
    seen, devices = device_mapping()
    critic = critic_of(cluster, updates=2, timer=devices)
    samples = [policy_sample(group=group, prompt=1, response=2) for group in "aabb"]
    values = [np.array([9.0, 1.0, 1.0], np.float32), *(np.array([9.0, 2.0, 2.0], np.float32) for _ in range(3))]
    returns = [np.array([0.0, 1.0, 2.0], np.float32) for _ in samples]
    metrics = reduce(critic.learn(samples, values, returns))
    errors = np.array([0, 1] + [-1, 0] * 3)
    assert metrics["critic/value_mean"] == pytest.approx(1.75)
    assert metrics["critic/return_mean"] == pytest.approx(1.5)
    assert metrics["critic/explained_variance"] == pytest.approx(1 - errors.var() / 0.25)
    # a mean over two updates, of two micro-batches each
    assert metrics["critic/loss"] == 2.0
    assert metrics["throughput/trainer_tflops"] == 4.0
    assert "time/train_compute" not in metrics
    assert seen == ["critic"]
    assert [name for name, _ in cluster.calls] == ["forward_backward", "optimizer_step"] * 2 + ["speed"]
    for shares in (cluster.shares[:2], cluster.shares[2:]):
        tokens = sum(int((batch.weights != 0).sum()) for share in shares for batch in share.batches)
        total = sum(float(batch.weights.sum()) for share in shares for batch in share.batches)
        assert (tokens, total) == (4, pytest.approx(1.0))


def test_a_critic_without_anything_to_learn() -> None:
    cluster = FakeCluster(learned)
    critic = critic_of(cluster)
    assert critic.learn([], [], []) == {}
    samples = [policy_sample(prompt=1, response=2)]
    constant = [np.ones(3, np.float32)]
    assert "critic/explained_variance" not in critic.learn(samples, constant, constant)


def test_a_critics_files_have_a_folder_of_their_own(tmp_path: Path) -> None:
    cluster = FakeCluster()
    critic = critic_of(cluster).engine
    critic.save(tmp_path)
    critic.load(tmp_path)
    assert cluster.calls == [("save", (str(tmp_path / "critic"),)), ("load", (str(tmp_path / "critic"),))]
    assert (tmp_path / "critic").is_dir()


def test_the_tokens_of_a_whole_batch_are_those_with_a_weight() -> None:
    samples = [policy_sample(prompt=2, response=3, advantage=2.0)]
    weights = [np.array([0, 0, 1, 0, 1], np.float32)]
    (shard,) = policy_batches(samples, weights, ranks=1, max_tokens=64, share_prompts=True)
    logprobs = np.array([-1.0, -2.0, -3.0], np.float32)
    old = [replace(batch, old_logprobs=2 * logprobs) for batch in shard]
    tokens = whole_batch([old, old], [[logprobs], [logprobs - 10]])
    assert tokens.logprobs_N.tolist() == [-1.0, -3.0, -11.0, -13.0]
    assert tokens.old_logprobs_N.tolist() == [-2.0, -6.0] * 2
    assert tokens.advantages_N.tolist() == [2.0] * 4
    assert tokens.draws_N.tolist() == shard[0].draws[[0, 2]].tolist() * 2
    assert whole_batch([shard], [[logprobs]]).old_logprobs_N.tolist() == [-1.0, -3.0]
