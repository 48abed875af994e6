"""Losses of demonstrations: formulas against hand-computed numbers and plain loops, and their place in a step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_samples import differences, make_inputs, make_policy_sample
from bigram_engine import LIMIT, LR, BigramBackend, OneRank, fixed_groups, start_table, table_logprobs
from rank_specs import cpu_rank

from roll_like.algorithms.advantages.base import flatten, policy_samples
from roll_like.algorithms.demonstrations import (
    off_policy_objective,
    sft_coefficient,
    shaped_probabilities,
    supervised_objective,
    supervised_weights,
)
from roll_like.algorithms.kl import KLController
from roll_like.algorithms.losses import policy_objective
from roll_like.config.algorithm import AlgorithmConfig, CorrectionConfig
from roll_like.config.demonstrations import DemonstrationsConfig, SFTTermConfig
from roll_like.config.training import TrainingConfig
from roll_like.errors import ConfigError, EngineError
from roll_like.policy_gradient import objective
from roll_like.policy_gradient.advantages import Advantages
from roll_like.policy_gradient.objective import PolicyObjective, SFTWeight, policy_batches, with_reference
from roll_like.policy_gradient.supervised import supervised_samples
from roll_like.registry import ADVANTAGES, LOSSES
from roll_like.training.engine import TrainingEngine
from roll_like.training.rank import TrainingRank
from roll_like.types import Group, Origin, PolicySample, Scored, Trajectory
from roll_like.values import reduce


@pytest.mark.parametrize(("gamma", "shaped"), [(0.1, [10 / 11, 0.5, 0.0]), (None, [1.0, 0.1, 0.0])])
def test_shaping_by_hand(gamma: float | None, shaped: list[float]) -> None:
    logprobs = torch.tensor([0.0, math.log(0.1), -200.0], dtype=torch.float64)
    assert shaped_probabilities(logprobs, gamma).tolist() == pytest.approx(shaped)


@pytest.mark.parametrize("gamma", [0.1, 0.5, None])
def test_gradient_of_the_off_policy_loss(gamma: float | None) -> None:
    logprobs, advantages, weights = [-0.2, -3.0, -9.0], [1.5, -0.5, 0.0], [0.5, 0.25, 0.25]

    def total(values: list[float]) -> float:
        def f(p: float) -> float:
            return p if gamma is None else p / (p + gamma)

        return sum(-w * a * f(math.exp(v)) for v, a, w in zip(values, advantages, weights, strict=True))

    tensor = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    given: list[Any] = [torch.tensor(values, dtype=torch.float64) for values in (advantages, weights)]
    loss, metrics = off_policy_objective(tensor, given[0], given[1], gamma)
    loss.backward()
    assert loss.item() == pytest.approx(total(logprobs))
    assert tensor.grad is not None
    assert tensor.grad.tolist() == pytest.approx(differences(total, logprobs), abs=1e-8)
    figures = reduce(metrics)
    assert figures["train/off_policy_loss"] == pytest.approx(loss.item())
    assert figures["demonstrations/probability"] == pytest.approx(np.exp(logprobs).mean())
    assert figures["demonstrations/tokens"] == 3


def test_unlikely_tokens_learn_faster_with_shaping() -> None:
    """The gradient in log π of an unlikely token is γ/(p + γ)² times that without shaping: about 1/γ."""
    gradients = {}
    for gamma in (0.1, None):
        logprob = torch.tensor([-8.0], dtype=torch.float64, requires_grad=True)
        off_policy_objective(logprob, torch.ones(1), torch.ones(1), gamma)[0].backward()
        gradients[gamma] = float(logprob.grad)  # type: ignore[arg-type]
    assert gradients[0.1] / gradients[None] == pytest.approx(0.1 / (math.exp(-8) + 0.1) ** 2)


@pytest.mark.parametrize("phi", [False, True])
def test_gradient_of_the_supervised_loss(phi: bool) -> None:
    logprobs, weights = [-0.1, -1.0, -6.0], [0.5, 0.0, 0.5]
    frozen = [math.exp(v) * (1 - math.exp(v)) if phi else 1.0 for v in logprobs]
    tensor = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    loss, metrics = supervised_objective(tensor, torch.tensor(weights, dtype=torch.float64), phi=phi)
    loss.backward()
    assert loss.item() == pytest.approx(-sum(w * p * v for w, p, v in zip(weights, frozen, logprobs, strict=True)))
    assert tensor.grad is not None
    # φ is a weight and has no gradient
    assert tensor.grad.tolist() == pytest.approx([-w * p for w, p in zip(weights, frozen, strict=True)])
    figures = reduce(metrics)
    assert figures["demonstrations/cross_entropy"] == pytest.approx((0.1 + 6.0) / 2)
    assert figures["demonstrations/sft_tokens"] == 2


def test_values_that_are_not_finite_are_refused() -> None:
    bad = torch.tensor([-1.0, math.nan])
    with pytest.raises(EngineError, match=r"demonstrated token 1 \(of 2"):
        supervised_objective(bad, torch.ones(2), phi=False)
    with pytest.raises(EngineError, match="log-probabilities hold nan"):
        off_policy_objective(bad, torch.ones(2), torch.ones(2), 0.1)


def test_schedule_of_the_coefficient() -> None:
    # warm-up of 2 steps to 0.8, a cosine of 4 steps to 0.2
    config = SFTTermConfig(coefficient=0.8, final_coefficient=0.2, warmup_steps=2, decay_steps=4)
    middle = [0.2 + 0.6 * (1 + math.cos(math.pi * passed / 4)) / 2 for passed in range(4)]
    expected = [0.0, 0.4, *middle, 0.2, 0.2]
    assert [sft_coefficient(config, step) for step in range(8)] == pytest.approx(expected)
    assert middle[2] == pytest.approx(0.5)
    assert [sft_coefficient(SFTTermConfig(coefficient=0.3), step) for step in (0, 9)] == [0.3, 0.3]
    rising = SFTTermConfig(coefficient=0.1, final_coefficient=0.5, decay_steps=2)
    assert [sft_coefficient(rising, step) for step in range(3)] == pytest.approx([0.1, 0.3, 0.5])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"decay_steps": 4}, "final_coefficient is not set"),
        ({"final_coefficient": 0.0}, "decay_steps is not set"),
        ({"coefficient": 0.2, "final_coefficient": 0.2, "decay_steps": 3}, "a decay from 0.2 to 0.2 is none"),
        ({"coefficient": 1.5}, "found 1.5: with combine: interpolate"),
        ({"final_coefficient": 2.0, "decay_steps": 3}, "found 2: with combine: interpolate"),
    ],
)
def test_schedules_that_are_none_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SFTTermConfig(**section)
    with pytest.raises(ConfigError, match="nothing uses the demonstrations"):
        DemonstrationsConfig()


def test_supervised_weights_divide_by_the_whole_batch() -> None:
    samples = [
        replace(make_policy_sample([0, 0, 0, 0]), supervised=np.array([0, 0, 1, 1], bool)),
        make_policy_sample([0, 1, 1]),
        replace(make_policy_sample([0, 0]), supervised=np.array([0, 1], bool)),
    ]
    found = supervised_weights(samples)
    third = float(np.float32(1 / 3))
    assert [array.tolist() for array in found] == [[0, 0, third, third], [0, 0, 0], [0, third]]
    assert [array.tolist() for array in supervised_weights(samples[1:2])] == [[0, 0, 0]]


def demonstration(group: Group[Scored], seed: int) -> Trajectory:
    """An answer to a group's task that nobody sampled."""
    sample = group.samples[0].trajectory
    response = np.random.default_rng([7, seed]).integers(0, 12, 5)
    token_ids = np.concatenate([group.task.prompt_ids, response]).astype(np.int32)
    sampled = np.arange(len(token_ids)) >= 2
    part = replace(sample.parts[0], end=len(token_ids))
    return replace(
        sample,
        sample_index=9,
        token_ids=token_ids,
        sampled=sampled,
        logprobs=np.zeros(len(token_ids), np.float32),
        turns=sampled.astype(np.int32) - 1,
        parts=(part,),
        segments=(),
        origin=Origin.DEMONSTRATION,
    )


def with_demonstrations(groups: list[Group[Scored]]) -> list[Group[Scored]]:
    """Groups that a demonstration has joined, right in every other group."""
    return [
        replace(
            group,
            off_policy=(replace(group.samples[0], trajectory=demonstration(group, at), reward=3.0 * (at % 2)),),
        )
        for at, group in enumerate(groups)
    ]


class Trainer:
    """One rank with the table, and the real objective and advantages."""

    def __init__(
        self, section: dict[str, Any], algorithm: dict[str, Any] | None = None, *, max_tokens: int = 4096
    ) -> None:
        self.demonstrations = DemonstrationsConfig.model_validate(section)
        self.algorithm = AlgorithmConfig.model_validate(algorithm or {})
        kl = KLController(self.algorithm.kl)
        sft = self.demonstrations.sft
        self.weight = None if sft is None else SFTWeight(sft)
        training = TrainingConfig(optimizer={"lr": 0.1}, max_tokens_per_micro_batch=max_tokens)
        steep = training.optimizer.model_copy(update={"lr": LR})
        objective = PolicyObjective(
            settings=training.model_copy(update={"optimizer": steep}),
            algorithm=self.algorithm,
            max_response_tokens=LIMIT,
            kl=kl,
            demonstrations=self.demonstrations,
            sft=self.weight,
        )
        worker, self.backend = (
            TrainingRank(cpu_rank(objective, "", dtype="bfloat16"), 0, 1),
            BigramBackend(torch.from_numpy(start_table())),
        )
        worker._backend = self.backend  # type: ignore[assignment]
        worker.take(torch.nn.Module())
        self.engine: Any = TrainingEngine(OneRank(worker), objective)  # type: ignore[arg-type]
        estimator = ADVANTAGES.get(self.algorithm.advantage.type)(self.algorithm.advantage)
        self.advantages = Advantages(estimator, self.algorithm, kl, None, max_response_tokens=LIMIT)

    def step(self, groups: list[Group[Scored]], *, supervised: bool = False) -> dict[str, float]:
        samples = list(self.advantages.assign(groups).samples)
        if supervised:
            assert self.weight is not None
            self.weight.begin_step(0)
            given = [demonstration(group, at) for at, group in enumerate(groups)]
            by_task = {trajectory.task.task_id: (trajectory,) for trajectory in given}
            samples += supervised_samples(groups, lambda task: by_task[task.task_id])
        return reduce(self.engine.train_step(with_reference(samples, None)))

    @property
    def gradient(self) -> np.ndarray[Any, Any]:
        return (start_table() - self.backend.table_VV.detach().numpy()) / LR


def plain_loss(groups: list[Group[Scored]], gamma: float | None, clip: float) -> torch.Tensor:
    """GRPO with demonstrations, sample by sample and token by token; ratios of one update are 1."""
    table = torch.from_numpy(start_table()).requires_grad_()
    tokens, total = 0, torch.zeros((), dtype=torch.float64)
    for group in groups:
        members = [*group.samples, *group.off_policy]
        rewards = np.array([member.reward for member in members])
        spread = rewards.std(ddof=1)
        for member, reward in zip(members, rewards, strict=True):
            advantage = 0.0 if np.ptp(rewards) < 1e-9 else (reward - rewards.mean()) / (spread + 1e-6)
            trajectory = member.trajectory
            own = table_logprobs(start_table(), trajectory.token_ids)
            for at in np.flatnonzero(trajectory.sampled):
                before, token = (int(trajectory.token_ids[at - 1]), int(trajectory.token_ids[at]))
                logprob = table[before].log_softmax(-1)[token]
                tokens += 1
                if trajectory.origin is Origin.DEMONSTRATION:
                    p = logprob.exp()
                    total = total - advantage * (p if gamma is None else p / (p + gamma))
                else:
                    ratio = min(math.exp(own[at] - float(trajectory.logprobs[at])), clip)
                    total = total - advantage * ratio * (logprob - logprob.detach()).exp()
    (total / tokens).backward()
    assert table.grad is not None
    return table.grad


@pytest.mark.parametrize("gamma", [0.1, None])
@pytest.mark.parametrize("max_tokens", [4096, 40])
def test_a_step_with_demonstrations_is_luffys(gamma: float | None, max_tokens: int) -> None:
    groups = with_demonstrations(fixed_groups(0.2, 0))
    trainer = Trainer({"off_policy": {"gamma": gamma}}, max_tokens=max_tokens)
    figures = trainer.step(groups)
    assert trainer.gradient == pytest.approx(plain_loss(groups, gamma, 2.0).numpy(), abs=2e-6)
    own = sum(int(sample.trajectory.sampled.sum()) for sample in flatten(groups))
    moving = [group for group in groups if len({one.reward for one in (*group.samples, *group.off_policy)}) > 1]
    assert figures["demonstrations/tokens"] == 5 * len(moving)
    # figures of the policy's samples are those without demonstrations
    plain = Trainer({"off_policy": {}}).step(fixed_groups(0.2, 0))
    assert figures["train/tokens"] <= own
    assert figures["mismatch/logprob_difference_max"] >= plain["mismatch/logprob_difference_max"] - 1e-6
    assert figures["mismatch/logprob_difference_max"] < 1.5  # 0 in the place of a log-probability would be further off


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_statistics_of_a_batch_are_of_the_policys_samples(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[float]] = []
    whole = objective.whole_batch

    def recorded(*arguments: Any) -> Any:
        batch = whole(*arguments)
        seen.append(sorted(batch.old_logprobs_N.tolist()))
        return batch

    monkeypatch.setattr(objective, "whole_batch", recorded)
    for groups in (fixed_groups(0.2, 0), with_demonstrations(fixed_groups(0.2, 0))):
        Trainer({"off_policy": {}}, {"loss": loss}).step(groups)
    without, beside = seen
    assert len(without) > 10
    assert beside == pytest.approx(without)


def test_demonstrations_leave_losses_of_sequences_alone() -> None:
    """GSPO and KL-Cov take statistics of sequences and batches: of the policy's samples only."""
    groups = with_demonstrations(fixed_groups(0.2, 0))
    for loss in ("gspo", "clip_cov", "kl_cov", "cispo", "dro"):
        figures = Trainer({"off_policy": {}}, {"loss": loss, "updates_per_step": 2}).step(groups)
        assert math.isfinite(figures["train/loss"])
        assert figures["demonstrations/tokens"] > 0


def supervised_gradient(groups: list[Group[Scored]], phi: bool) -> tuple[np.ndarray[Any, Any], float]:
    pairs = [
        (int(ids[at - 1]), int(ids[at]))
        for index, group in enumerate(groups)
        for ids in [demonstration(group, index).token_ids]
        for at in range(2, len(ids))
    ]
    table = torch.from_numpy(start_table()).requires_grad_()
    before, after = torch.tensor(pairs).T
    logprobs = table[before].log_softmax(-1).gather(1, after[:, None])[:, 0]
    weight = (logprobs.exp() * (1 - logprobs.exp())).detach() if phi else torch.ones_like(logprobs)
    loss = -(weight * logprobs).mean()
    (gradient,) = torch.autograd.grad(loss, table)
    return gradient.numpy(), loss.item()


@pytest.mark.parametrize("combine", ["interpolate", "add"])
@pytest.mark.parametrize("phi", [False, True])
@pytest.mark.parametrize("max_tokens", [4096, 40])
def test_a_step_with_a_supervised_loss_is_chords(combine: str, phi: bool, max_tokens: int) -> None:
    groups = fixed_groups(0.2, 0)
    section = {"coefficient": 0.3, "combine": combine, "token_weight": "phi" if phi else "none"}
    plain, chord = Trainer({"off_policy": {}}), Trainer({"sft": section}, max_tokens=max_tokens)
    without, figures = plain.step(groups), chord.step(groups, supervised=True)
    gradient, loss = supervised_gradient(groups, phi)
    keep = 0.7 if combine == "interpolate" else 1.0
    assert chord.gradient == pytest.approx(keep * plain.gradient + 0.3 * gradient, abs=2e-6)
    assert figures["train/sft_loss"] == pytest.approx(loss, rel=1e-5)
    assert figures["train/loss"] == pytest.approx(keep * without["train/loss"] + 0.3 * loss, rel=1e-4, abs=1e-6)
    assert figures["train/sft_coefficient"] == 0.3
    assert figures["demonstrations/sft_tokens"] == 25
    # no figure of the policy's samples changes
    same = [name for name in without if name.startswith(("mismatch/", "correction/", "train/policy", "train/tokens"))]
    assert len(same) > 10
    assert [figures[name] for name in same] == pytest.approx([without[name] for name in same], abs=1e-6)


def test_supervised_samples_are_in_the_update_of_their_group() -> None:
    groups = fixed_groups(0.2, 0)
    samples = supervised_samples(groups, lambda task: [demonstration(groups[0], 3)])
    assert [sample.group_id for sample in samples] == [f"toy/{index}#0" for index in range(5)]
    of_policy = policy_samples(groups)
    assert {sample.group_id for sample in samples} == {sample.group_id for sample in of_policy}
    assert all(not sample.loss_mask.any() and (sample.turns == -1).all() for sample in samples)
    assert all(sample.supervised is not None and sample.supervised.sum() == 5 for sample in samples)
    assert supervised_samples(groups, lambda task: []) == []


def test_batches_that_hold_demonstrations_alone_have_a_kl_penalty_too() -> None:
    """A micro-batch without a token of the policy is no batch without a reference."""
    groups = fixed_groups(0.2, 0)
    trainer = Trainer({"sft": {"coefficient": 0.3}}, {"kl": {"use": "loss"}}, max_tokens=8)
    samples: list[PolicySample] = list(trainer.advantages.assign(groups).samples)
    given = supervised_samples(groups, lambda task: [demonstration(groups[0], 1)])
    assert trainer.weight is not None
    trainer.weight.begin_step(0)

    class Reference:
        def logprobs(self, samples: list[PolicySample]) -> list[np.ndarray[Any, Any]]:
            return [np.where(sample.loss_mask, -1.0, 0).astype(np.float32) for sample in samples]

    figures = reduce(trainer.engine.train_step(with_reference([*samples, *given], Reference())))  # type: ignore[arg-type]
    assert figures["train/kl"] > 0
    assert figures["train/sft_loss"] > 0


def test_an_adaptive_penalty_counts_the_samples_that_it_looks_at() -> None:
    """Its coefficient moves by the number of the policy's samples: demonstrations have no penalty."""
    adaptive = {"kl": {"use": "loss", "coefficient": 0.1, "adaptive": {"target": 0.01, "horizon": 100}}}
    groups = fixed_groups(0.2, 0)

    class Reference:
        def logprobs(self, samples: list[PolicySample]) -> list[np.ndarray[Any, Any]]:
            return [np.where(sample.loss_mask, -1.0, 0).astype(np.float32) for sample in samples]

    def after(section: dict[str, Any], groups: list[Group[Scored]], supervised: bool) -> float:
        trainer = Trainer(section, adaptive)
        samples: list[PolicySample] = list(trainer.advantages.assign(groups).samples)
        if supervised:
            assert trainer.weight is not None
            trainer.weight.begin_step(0)
            samples += supervised_samples(groups, lambda task: [demonstration(groups[0], 1)])
        trainer.engine.train_step(with_reference(samples, Reference()))  # type: ignore[arg-type]
        return float(trainer.engine.objective.kl.coefficient)

    # the divergence is far above its target: ×(1 + 0.2·samples/100)
    expected = 0.1 * (1 + 0.2 * len(flatten(groups)) / 100)
    assert after({"off_policy": {}}, groups, False) == pytest.approx(expected)
    assert after({"sft": {"coefficient": 0.3}}, groups, True) == pytest.approx(expected)
    assert after({"off_policy": {}}, with_demonstrations(groups), False) == pytest.approx(expected)


def test_replayed_tokens_are_no_mismatch_of_the_engine() -> None:
    """Their distance to who sampled them is age: it is corrected, and shown apart."""
    old, policy = [-4.0, -1.0], [-1.0, -1.1]
    inputs = make_inputs(policy, behaviour_logprobs_N=old, replayed_N=torch.tensor([True, False]))
    loss = LOSSES.get("ppo")(LOSSES.get("ppo").Config())
    objective, metrics = policy_objective(inputs, loss, None, 0.0, CorrectionConfig(cap=2.0))
    figures = reduce(metrics)
    assert figures["mismatch/logprob_difference"] == pytest.approx(0.1)
    assert figures["mismatch/logprob_difference_max"] == pytest.approx(0.1)
    assert figures["replay/ratio"] == pytest.approx(math.exp(3.0))
    # e³ is cut at 2, and −A·ρ = −1 for both
    assert objective.item() == pytest.approx(-(2.0 + math.exp(-0.1)))
    alone = make_inputs(policy, behaviour_logprobs_N=old, replayed_N=torch.tensor([True, True]))
    figures = reduce(policy_objective(alone, loss, None, 0.0, CorrectionConfig())[1])
    assert not [name for name in figures if name.startswith("mismatch/")]
    assert figures["correction/ess"] > 0


def test_origins_are_columns_of_a_batch_where_there_are_some() -> None:
    samples = [make_policy_sample([0, 1, 1]), replace(make_policy_sample([0, 1]), origin=Origin.DEMONSTRATION)]
    weights = [sample.loss_mask.astype(np.float32) for sample in samples]
    layout: Any = {"ranks": 1, "max_tokens": 16, "share_prompts": True}
    ((batch,),) = policy_batches(samples, weights, **layout)
    assert batch.origins[batch.sample_ids == 0].tolist() == [0, 0]
    assert batch.origins[batch.sample_ids == 1].tolist() == [2]
    ((plain,),) = policy_batches(samples[:1], weights[:1], **layout)
    assert plain.origins.size == 0
