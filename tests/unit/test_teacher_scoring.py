"""Teachers that score what a student sampled: who is asked, what becomes of it, and runs without rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from config_files import changed
from test_config_distill import ON_POLICY
from tests_support import scored, task  # type: ignore[import-not-found]

from roll_like.algorithms.advantages.base import policy_samples
from roll_like.builtin.pipelines.distill.answers import OwnTopKAnswers
from roll_like.builtin.pipelines.on_policy_distill.config import DemonstrationConfig, OnPolicyDistillConfig
from roll_like.builtin.pipelines.on_policy_distill.demonstrations import demonstrated
from roll_like.builtin.pipelines.on_policy_distill.teacher_scoring import TeacherScorer, reverse_kl, without_rewards
from roll_like.builtin.pipelines.on_policy_distill.teacher_views import SameTokens
from roll_like.errors import DataError
from roll_like.policy_gradient.advantages import Assigned
from roll_like.rollout.reward_pools import RewardPools
from roll_like.training.layout import micro_batches
from roll_like.types import (
    FloatArray,
    Group,
    IntArray,
    PolicySample,
    ReferencedSample,
    Scored,
    Task,
    TrainingSample,
)
from roll_like.values import Mean, Sum


class Scores:
    """A teacher that finds every token equally likely."""

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob
        self.asked = 0

    def logprobs(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        self.asked += len(samples)
        return [np.where(sample.loss_mask, self.logprob, 0).astype(np.float32) for sample in samples]


def groups() -> list[Group[Scored]]:
    """Two answers to a task of `maths`, one to a task of `chat`; the student gave each token −1 nat."""
    maths, chat = task(0, source="maths"), task(1, source="chat")
    return [
        Group(task=maths, samples=(scored(maths, 1.0), scored(maths, 0.0, sample=1)), failures=()),
        Group(task=chat, samples=(scored(chat, 0.5),), failures=()),
    ]


def config_of(**distillation: Any) -> OnPolicyDistillConfig:
    return OnPolicyDistillConfig.model_validate(
        changed(
            ON_POLICY,
            data__sources=[{"path": "maths.jsonl"}, {"path": "chat.jsonl"}],
            teachers={"of_maths": {"path": "m", "domains": ["maths"]}, "of_all": {"path": "a"}},
            distillation=distillation,
            **({"rewards": {"use": [{"type": "ifeval"}]}} if distillation.get("reward_weight") else {}),
        )
    )


def scorer(**distillation: Any) -> tuple[TeacherScorer, Scores, Scores]:
    first, second = Scores(-3.0), Scores(-0.5)
    engines: Any = {"of_maths": first, "of_all": second}
    return TeacherScorer(config_of(**distillation), engines), first, second


def with_advantages(value: float) -> Assigned:
    arrays = [np.full(len(one.trajectory.token_ids), value, np.float32) for group in groups() for one in group.samples]
    samples = policy_samples(groups(), arrays)
    return Assigned(samples=samples, metrics={"reward/kl": Mean(0.0)}, trained=[True] * 3)


def test_each_domain_has_its_teacher() -> None:
    teachers, maths, general = scorer()
    samples = with_advantages(0.0)
    scored = teachers.score(samples, groups())
    assert (maths.asked, general.asked) == (2, 1)
    # −(log π − log π_teacher): −(−1 + 3) where it found the answer unlikely, −(−1 + ½) where likely
    advantages = [sample.advantages[sample.loss_mask].tolist() for sample in scored.samples]
    assert advantages == [[-2.0] * 3, [-2.0] * 3, [0.5] * 3]
    assert [type(sample) for sample in scored.samples] == [PolicySample] * 3
    assert set(scored.metrics) == {"reward/kl", "distill/reverse_kl"}
    figure = scored.metrics["distill/reverse_kl"]
    assert (figure.value, figure.weight) == (pytest.approx((2 + 2 - 0.5) / 3), 9)  # type: ignore[union-attr]


def test_a_teacher_beside_a_reward() -> None:
    teachers, *_ = scorer(weight=0.5, reward_weight=2.0)
    scored = teachers.score(with_advantages(1.5), groups())
    assert [float(sample.advantages[-1]) for sample in scored.samples] == [2 * 1.5 - 1, 2 * 1.5 - 1, 2 * 1.5 + 0.25]


def test_a_teacher_in_the_loss_leaves_the_advantages_to_rewards() -> None:
    teachers, *_ = scorer(use="loss", reward_weight=1.0)
    scored = teachers.score(with_advantages(1.5), groups())
    assert [float(sample.advantages[-1]) for sample in scored.samples] == [1.5] * 3
    kept = [sample for sample in scored.samples if isinstance(sample, ReferencedSample)]
    assert [float(sample.reference_logprobs[-1]) for sample in kept] == [-3.0, -3.0, -0.5]
    alone, *_ = scorer(use="loss")
    assert not any(sample.advantages.any() for sample in alone.score(with_advantages(1.5), groups()).samples)


class Distributions(Scores):
    """A teacher that tells two tokens of each place: which it is, and which token was sampled."""

    def micro_batches(self, samples: Sequence[TrainingSample]) -> Any:
        return micro_batches(samples, ranks=1, max_tokens=7, share_prompts=True)  # samples of a group apart

    def teach(self, shards: Sequence[Sequence[Any]]) -> list[list[OwnTopKAnswers]]:
        return [[self.told(batch.targets) for batch in batches] for batches in shards]

    def told(self, targets_N: IntArray) -> OwnTopKAnswers:
        self.asked += 1
        who_N = np.full_like(targets_N, -10 * self.logprob)
        return OwnTopKAnswers(
            ids_NK=np.stack([who_N, targets_N], 1),
            logprobs_NK=np.full((len(targets_N), 2), -1, np.float32),
            entropy_N=targets_N.astype(np.float32),
            own_N=(self.logprob - targets_N / 8).astype(np.float32),
        )


@pytest.mark.parametrize("itself", [False, True])
def test_samples_carry_what_their_own_teacher_says(itself: bool) -> None:
    signal = {"use": "loss", "signal": "top_k", "reward_weight": 2.0}
    config = config_of(**signal)
    engines: Any = {"of_maths": Distributions(-3.0), "of_all": Distributions(-0.5)}
    teachers = TeacherScorer(config, engines)
    if itself:
        prompts: Any = Prompts()
        teachers = TeacherScorer(config, {}, {"": SameTokens(prompts)})
        teachers.policy = Distributions(-3.0)  # type: ignore[assignment]
    before = with_advantages(1.5)
    found = teachers.score(before, groups())
    for own, sample in zip(before.samples, found.samples, strict=True):
        tokens = sample.token_ids[sample.loss_mask]
        teacher = 30 if itself or own.group_id.startswith("maths") else 5
        assert sample.taught is not None
        assert sample.taught.ids_NK.tolist() == [[teacher, token] for token in tokens]
        assert sample.taught.entropy_N.tolist() == tokens.tolist()
        assert sample.advantages[sample.loss_mask].tolist() == [3.0] * len(tokens)
    logprob = [-3.0, -3.0, -3.0 if itself else -0.5]
    gaps = [
        -1 - (each - token / 8)
        for each, sample in zip(logprob, found.samples, strict=True)
        for token in sample.token_ids[sample.loss_mask]
    ]
    figure = found.metrics["distill/reverse_kl"]
    assert figure.value == pytest.approx(np.mean(gaps))


class Peeking:
    """A teacher that finds a token as likely as the prompt is long: −1 nat for each token of the prompt."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        self.seen += samples
        return [np.where(sample.loss_mask, -float(sample.prompt_length), 0).astype(np.float32) for sample in samples]


class Prompts:
    """Demonstrations of five tokens for `maths`, of one for all else."""

    def prompt_ids(self, task: Task) -> IntArray:
        return np.full(5 if task.domain == "maths" else 1, 9, np.int32)


def test_a_policy_that_reads_demonstrations_teaches_itself() -> None:
    config = OnPolicyDistillConfig.model_validate(
        changed(
            {key: value for key, value in ON_POLICY.items() if key != "teachers"},
            data__sources=[{"path": "maths.jsonl"}, {"path": "chat.jsonl"}],
            distillation={"demonstration": {"field": "good"}},
        )
    )
    prompts: Any = Prompts()
    teachers, policy = TeacherScorer(config, {}, {"": SameTokens(prompts)}), Peeking()
    teachers.policy = policy  # type: ignore[assignment]
    before = with_advantages(0.0)
    found = teachers.score(before, groups())
    # −(log π − log π_teacher) = 1 − prompt, at the tokens of the student's own sample
    assert [sample.advantages.tolist() for sample in found.samples] == [[0, 0, -4, -4, -4]] * 2 + [[0, 0, 0, 0, 0]]
    for own, seen in zip(before.samples, policy.seen, strict=True):
        prompt = 5 if own.group_id.startswith("maths") else 1
        assert seen.token_ids.tolist() == [9] * prompt + own.token_ids[2:].tolist()
        assert seen.loss_mask.tolist() == [False] * prompt + [True] * 3
        assert (seen.prompt_length, seen.group_id) == (prompt, own.group_id)
    # the groups' samples share a prompt, here as there
    assert len({seen.group_id for seen in policy.seen}) == 2


SYSTEM: tuple[Any, ...] = ({"role": "system", "content": "be brief"},)


def test_a_demonstration_is_put_where_the_template_says() -> None:
    config = DemonstrationConfig(field="good", template="Q: {prompt}\nE: {demonstration} {x}")
    row = replace(task(), metadata={"good": "as {prompt}"}, messages=(*SYSTEM, *task().messages))
    # what a row says is not filled in again, and other braces stay
    assert demonstrated(row, config) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Q: task 0\nE: as {prompt} {x}"},
    ]
    assert row.messages[1]["content"] == "task 0"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"fake\.jsonl:1: expected a demonstration, a text in 'good', found no such field \(the row has none\)"),
        ({"other": 1}, r"no such field \(the row has other\)"),
        ({"good": 3}, "found 3 in it"),
        ({"good": " "}, "found ' ' in it"),
    ],
)
def test_rows_without_a_demonstration_are_named(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        demonstrated(replace(task(), metadata=metadata), DemonstrationConfig(field="good"))


def test_a_prompt_without_a_user_takes_no_demonstration() -> None:
    row = replace(task(), metadata={"good": "so"}, messages=SYSTEM)
    with pytest.raises(DataError, match="no message of the user"):
        demonstrated(row, DemonstrationConfig(field="good"))


def test_no_answers_have_no_divergence() -> None:
    assert reverse_kl([], []) == Mean(0.0, 0)


def test_a_run_without_rewards_judges_nothing_and_shows_none() -> None:
    group: Any = groups()[0]
    bare: Any = Group(task=group.task, samples=tuple(one.trajectory for one in group.samples), failures=())
    judged = asyncio.run(RewardPools([], {}).score(bare))
    assert [(one.reward, dict(one.rewards)) for one in judged.samples] == [(0.0, {}), (0.0, {})]
    figures = {
        "rollout/reward/mean": Mean(0.0),
        "rollout/groups/zero_variance": Mean(1.0),
        "eval/avg": Mean(0.0),
        "eval/pass@4": Mean(0.0),
        "eval/domain/code/avg": Mean(0.0),
        "eval/domain/code/pass@4": Mean(0.0),
        "rollout/tokens": Sum(3.0),
        "eval/response_length": Mean(2.0),
    }
    assert set(without_rewards(figures)) == {"rollout/tokens", "eval/response_length"}
