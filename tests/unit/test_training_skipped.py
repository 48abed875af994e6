"""What becomes of updates whose gradient is not finite: computed again, skipped, and in the end an error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bigram_engine import bigram_engine
from tests_support import policy_sample  # type: ignore[import-not-found]

from roll_like.algorithms.kl import KLController
from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.training import CriticConfig, TrainingConfig
from roll_like.errors import EngineError, NonFiniteGradientError
from roll_like.policy_gradient.critic import Critic, ValueObjective
from roll_like.policy_gradient.objective import PolicyObjective
from roll_like.training.engine import TrainingEngine
from roll_like.training.skipped import SkippedUpdates
from roll_like.values import Last, Max, Mean, Metric, Sum, reduce

NAN, INF = math.nan, math.inf


class Ranks:
    """Two ranks whose gradients have the given norms, one attempt after the other; the loss is the attempt's number."""

    name = "training"

    def __init__(self, *norms: float, prefix: str = "train") -> None:
        self.norms = list(norms)
        self.prefix = prefix
        self.shares: list[Any] = []

    def __len__(self) -> int:
        return 2

    def scatter(self, method: Any, shards: Sequence[Any]) -> list[Any]:
        if method.__name__ == "forward":
            return [[np.zeros(len(batch.targets), np.float32) for batch in shard] for shard in shards]
        self.shares.append(shards)
        counts = {"train/computed_tokens": Sum(8.0), "train/padding_tokens": Sum(2.0), "time/train_compute": Max(1.0)}
        number = float(len(self.shares))
        return [{**counts, f"{self.prefix}/loss": Sum(number / 2), "train/kl": Mean(number)} for _ in shards]

    def everywhere(self, method: Any) -> list[Any]:
        if method.__name__ == "speed":
            return [{"throughput/trainer_tflops": Sum(2.0)} for _ in range(2)]
        norm = self.norms.pop(0)
        found: dict[str, Metric] = {
            f"{self.prefix}/grad_norm": Mean(norm),
            f"{self.prefix}/lr": Last(0.1),
            "time/train_compute": Max(0.5),
        }
        if not math.isfinite(norm):
            found[f"{self.prefix}/skipped_updates"] = Max(1.0)
        return [found, found]


def trainer(ranks: Ranks, controller: KLController | None = None, **algorithm: Any) -> TrainingEngine[Any]:
    config = AlgorithmConfig(**algorithm)
    objective = PolicyObjective(
        settings=TrainingConfig(), algorithm=config, max_response_tokens=8, kl=controller or KLController(config.kl)
    )
    return TrainingEngine(ranks, objective)  # type: ignore[arg-type]


def samples(count: int = 2) -> list[Any]:
    return [policy_sample(group=str(index), response=2, advantage=1.0) for index in range(count)]


def test_a_gradient_that_is_finite_the_second_time_is_taken() -> None:
    ranks = Ranks(NAN, 2.0)
    report = reduce(trainer(ranks).train_step(samples()))
    assert (report["train/updates"], report["train/recomputed_updates"]) == (1, 1)
    assert "train/skipped_updates" not in report
    # of the second attempt only, but for the time
    assert (report["train/loss"], report["train/grad_norm"], report["train/computed_tokens"]) == (2, 2, 16)
    assert report["time/train_compute"] == 3
    first, second = ranks.shares
    assert [share.batches for share in first] == [share.batches for share in second]


def test_a_gradient_that_is_not_finite_again_is_skipped() -> None:
    ranks = Ranks(1.5, NAN, NAN, 2.5)
    report = reduce(trainer(ranks, updates_per_step=3).train_step(samples(6)))
    assert (report["train/updates"], report["train/skipped_updates"]) == (2, 1)
    assert "train/recomputed_updates" not in report
    # of the attempts 1 and 4; a norm that is not finite is not hidden
    assert (report["train/loss"], report["train/kl"], report["train/computed_tokens"]) == (2.5, 2.5, 32)
    assert math.isnan(report["train/grad_norm"])
    assert (report["train/lr"], report["time/train_compute"]) == (0.1, 6)


def test_a_step_whose_only_update_is_skipped_has_no_figures_of_a_loss() -> None:
    kl = {"use": "loss", "coefficient": 0.1, "adaptive": {"target": 0.01, "horizon": 10}}
    controller = KLController(AlgorithmConfig(kl=kl).kl)
    report = reduce(trainer(Ranks(INF, INF), controller, kl=kl).train_step(samples()))
    assert report.pop("train/grad_norm") == INF
    assert report == {
        "train/updates": 0,
        "train/skipped_updates": 1,
        "time/train_compute": 3,
        "throughput/trainer_tflops": 4,
    }
    assert controller.coefficient == 0.1


def test_a_supervised_step_may_be_skipped() -> None:
    ranks: Any = Ranks(NAN, NAN)
    report = reduce(TrainingEngine(ranks, SupervisedObjective(settings=TrainingConfig())).train_step(samples()))
    assert report["train/skipped_updates"] == 1
    assert "train/perplexity" not in report


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ((NAN, NAN), {"critic/skipped_updates": 1}),
        ((NAN, NAN, 2.0), {"critic/skipped_updates": 1, "critic/loss": 3, "critic/value_mean": 1, "critic/lr": 0.1}),
        ((NAN, 1.0, 3.0), {"critic/recomputed_updates": 1, "critic/loss": 2.5, "critic/grad_norm": 2}),
    ],
)
def test_a_critic_does_the_same(norms: tuple[float, ...], expected: dict[str, float]) -> None:
    ranks: Any = Ranks(*norms, prefix="critic")
    critic = Critic(TrainingEngine(ranks, ValueObjective(settings=CriticConfig(updates_per_step=len(norms) - 1))))
    step = samples(4)
    values = [np.ones(len(sample.token_ids), np.float32) for sample in step]
    report = reduce(critic.learn(step, values, values))
    assert {name: report[name] for name in expected} == expected
    assert ("critic/loss" in report) == ("critic/value_mean" in report) == (len(norms) == 3)


def test_two_skipped_updates_in_a_row_end_the_run_also_across_steps() -> None:
    engine = trainer(Ranks(NAN, NAN, NAN, 1.0, NAN, NAN, INF, INF))
    for _ in range(3):  # what is computed again and then taken is between them
        engine.train_step(samples())
    with pytest.raises(NonFiniteGradientError, match=r"2 updates in a row, .* gradients are nan, inf, al") as caught:
        engine.train_step(samples())
    assert isinstance(caught.value, EngineError)
    assert not caught.value.retry
    for key in ("training.optimizer.lr", "training.optimizer.max_grad_norm", "model.dtype: float32"):
        assert key in str(caught.value.fix)


@pytest.mark.parametrize(("between", "ends"), [(97, True), (98, False)])
def test_three_skipped_updates_among_a_hundred_end_the_run(between: int, ends: bool) -> None:
    skipped = SkippedUpdates("training", "train")
    for norm in (NAN, *[None] * (between - 1), NAN, None):
        skipped.note(norm)
    if not ends:
        skipped.note(INF)
        return
    with pytest.raises(
        NonFiniteGradientError,
        match=r"the training engine has skipped 3 of its last 100 updates, .* are nan, nan, inf, ",
    ):
        skipped.note(INF)


def spoil(backend: Any, *attempts: int) -> None:
    """Let the gradients of these attempts be NaN."""
    plain, attempt = backend.forward_backward, 0

    def forward_backward(batches: Any, loss_of: Any) -> None:
        nonlocal attempt
        factor = NAN if attempt in attempts else 1.0
        plain(batches, lambda batch: loss_of(batch) * factor)
        attempt += 1

    backend.forward_backward = forward_backward


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_float16_gradients_that_are_not_finite_are_normal(dtype: str) -> None:
    config = AlgorithmConfig()
    backend, engine = bigram_engine(config, KLController(config.kl), max_response_tokens=24)
    rank = engine.cluster.worker  # type: ignore[attr-defined]
    rank._spec = replace(rank._spec, dtype=dtype)
    start = backend.table_VV.detach().clone()
    spoil(backend, *range(10))
    step = [policy_sample(response=2, advantage=1.0)]
    if dtype == "bfloat16":
        assert reduce(engine.train_step(step))["train/skipped_updates"] == 1
        with pytest.raises(NonFiniteGradientError):
            engine.train_step(step)
    else:
        for _ in range(5):
            report = reduce(engine.train_step(step))
            assert math.isnan(report["train/grad_norm"])
            assert "train/skipped_updates" not in report
    assert torch.equal(backend.table_VV, start)
    assert rank.updates == 0
