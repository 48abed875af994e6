"""A reference, or a policy's own teacher, that follows the policy: what is refused, planned, and when it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from config_files import MINIMAL, Billion, changed, refused
from plain_backend import plain_ranks  # type: ignore[import-not-found]
from test_config_distill import ON_POLICY
from test_config_dpo import MINIMAL as DPO
from test_config_online_dpo import config as online_config
from test_teacher_scoring import Scores, groups, with_advantages

from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.on_policy_distill.teacher_scoring import TeacherScorer
from roll_like.builtin.pipelines.online_dpo.config import OnlineDPOConfig
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check.plan import COPIES, trainer_memory
from roll_like.config.run import RunConfig
from roll_like.config.training import CopySection
from roll_like.training.engine import PolicyCopy, follow
from roll_like.values import reduce

WITH_KL = changed(MINIMAL, algorithm={"kl": {"use": "loss"}}, steps=40)
TEACHING_ITSELF = changed(ON_POLICY, teachers={}, distillation={"demonstration": {"field": "solution"}}, steps=40)


def online_dpo(**changes: Any) -> OnlineDPOConfig:
    return online_config(**{"steps": 40, **changes})


def of(kind: type[RunConfig], base: Mapping[str, Any]) -> Callable[..., RunConfig]:
    return lambda **changes: kind.from_values(changed(base, **changes))


rlvr, dpo = of(RLVRConfig, WITH_KL), of(DPOConfig, changed(DPO, steps=40))
distill = of(OnPolicyDistillConfig, TEACHING_ITSELF)
MOVING = {"mode": "copy", "sync_steps": 10, "mixup_alpha": 0.6}


@pytest.mark.parametrize(
    ("config", "changes", "key", "expected"),
    [
        (dpo, {"reference": {"sync_steps": 5}}, "reference.sync_steps", "computed once, before the first step"),
        (rlvr, {"reference": {"sync_steps": 5}}, "reference.sync_steps", "a frozen model of their own"),
        (
            dpo,
            {"reference": {"mode": "adapter_off", "sync_steps": 5}, "training": {"lora": {}}},
            "reference.sync_steps",
            "set reference.mode: copy",
        ),
        (
            online_dpo,
            {"reference": {"sync_steps": 5}},
            "reference.sync_steps",
            "at the start of each iteration already",
        ),
        (dpo, {"reference": {"mode": "copy", "mixup_alpha": 0.6}}, "reference.mixup_alpha", "set sync_steps"),
        (rlvr, {"reference": {"reset_optimizer": True}}, "reference.reset_optimizer", "set reference.mode: copy"),
        (rlvr, {"reference": {"mode": "copy", "reset_optimizer": True}}, "reference.reset_optimizer", "set sync_steps"),
        (rlvr, {"reference": {**MOVING, "sync_steps": 40}}, "reference.sync_steps", "before the last of 40"),
        (dpo, {"reference": {**MOVING, "path": "org/other"}}, "reference.path", "use mode: cluster"),
        (rlvr, {"reference": {**MOVING, "workers": 2}}, "reference.workers", "training.workers holds"),
        (rlvr, {"reference": MOVING, "training": {"backend": "plain"}}, "reference.mode", "deepspeed or fsdp2"),
        (rlvr, {"reference": {**MOVING, "mixup_alpha": 0.0}}, "reference.mixup_alpha", "greater than 0"),
        (
            distill,
            {"distillation__self_teacher": {"sync_steps": 40}},
            "distillation.self_teacher.sync_steps",
            "before the last of 40",
        ),
        (
            distill,
            {"distillation__self_teacher": {"mixup_alpha": 0.1}},
            "distillation.self_teacher.mixup_alpha",
            "without distillation.self_teacher.sync_steps nothing moves",
        ),
        (
            distill,
            {"distillation__self_teacher": {}, "teachers": {"large": {"path": "org/large"}}},
            "distillation.self_teacher",
            "the teachers are large",
        ),
    ],
)
def test_what_cannot_move_is_refused(
    monkeypatch: pytest.MonkeyPatch, config: Callable[..., RunConfig], changes: dict[str, Any], key: str, expected: str
) -> None:
    ranks: Iterator[None] = plain_ranks(monkeypatch)
    next(ranks)
    found = refused(config, **changes)
    assert expected in found.get(key, ""), found
    assert len(found) == 1, found


def test_a_copy_takes_no_ranks_of_its_own() -> None:
    config = rlvr(reference=MOVING)
    assert [role.name for role in config.roles] == ["training", "inference"]
    assert config.copies["reference"].mixup_alpha == 0.6
    assert [*distill(distillation__self_teacher={"sync_steps": 1, "mixup_alpha": 0.05}).copies] == ["teacher"]
    assert rlvr(reference={"mode": "cluster"}).copies == distill().copies == {}


@pytest.mark.parametrize(
    ("training", "alpha", "expected"),
    [
        ({"zero_stage": 1}, 1.0, 2 + 2),  # bytes of a weight: the copy, and room for the policy
        ({"zero_stage": 1}, 0.6, 4 + 2),
        ({"zero_stage": 3, "workers": 2}, 0.6, (4 + 2) / 2),
        ({"zero_stage": 3, "workers": 2, "backend": "fsdp2"}, 1.0, (4 + 4) / 2),
    ],
)
def test_the_plan_counts_its_host_memory(training: dict[str, Any], alpha: float, expected: float) -> None:
    shape: Any = Billion()
    reference = {"mode": "copy", "sync_steps": 10, "mixup_alpha": alpha}
    config = rlvr(reference=reference, training=training, model__dtype="bfloat16")
    parts = dict(trainer_memory(config, shape).parts)
    assert parts[COPIES] == pytest.approx(expected * shape.parameters, rel=1e-6)
    assert COPIES not in dict(trainer_memory(rlvr(reference={"mode": "cluster"}, training=training), shape).parts)


class Ranks:
    """A policy's engine that remembers what was asked of it."""

    def __init__(self) -> None:
        self.moves: list[tuple[str, float, bool]] = []
        self.computing: str | None = None

    def move_copy(self, copy: str, share: float, *, reset_optimizer: bool) -> float:
        self.moves.append((copy, share, reset_optimizer))
        return 0.5

    @contextmanager
    def computing_with(self, copy: str) -> Iterator[None]:
        self.computing = copy
        yield
        self.computing = None


def test_it_moves_after_each_number_of_steps_also_in_a_run_that_goes_on() -> None:
    ranks: Any = Ranks()
    section = CopySection(sync_steps=3, mixup_alpha=0.25, reset_optimizer=True)
    copy = PolicyCopy(ranks, "reference", section)
    figures = [reduce(follow({"reference": copy}, finished)) for finished in range(1, 8)]
    assert [each["reference/last_sync"] for each in figures] == [0, 0, 3, 3, 3, 6, 6]
    assert [each.get("reference/distance") for each in figures] == [None, None, 0.5, None, None, 0.5, None]
    assert ranks.moves == [("reference", 0.25, True)] * 2
    resumed = PolicyCopy(ranks, "reference", section)
    resumed.load_state(copy.state())
    assert reduce(resumed.follow(8)) == {"reference/last_sync": 6}
    assert reduce(resumed.follow(9))["reference/last_sync"] == 9
    fixed = PolicyCopy(ranks, "reference", CopySection())
    assert [reduce(fixed.follow(finished)) for finished in (1, 1000)] == [{"reference/last_sync": 0}] * 2


class OwnScores(Scores):
    """A policy that finds tokens likelier with the copy of its weights."""

    def __init__(self) -> None:
        super().__init__(-3.0)
        self.ranks = Ranks()

    def logprobs(self, samples: Any) -> Any:
        self.logprob = -3.0 if self.ranks.computing is None else -0.5
        return super().logprobs(samples)


@pytest.mark.parametrize(("own", "expected"), [(None, -2.0), (CopySection(sync_steps=1, mixup_alpha=0.05), 0.5)])
def test_a_policy_is_taught_by_the_weights_that_are_named(own: CopySection | None, expected: float) -> None:
    config = OnPolicyDistillConfig.model_validate(TEACHING_ITSELF)
    policy: Any = OwnScores()
    scorer = TeacherScorer(config, {})
    scorer.policy = policy
    if own is not None:
        scorer.own_weights = PolicyCopy(policy.ranks, "teacher", own)
    found = scorer.score(with_advantages(0.0), groups())
    # −(log π − log π_teacher), where the student gave each token −1 nat
    assert {float(sample.advantages[-1]) for sample in found.samples} == {expected}
    assert policy.ranks.computing is None
