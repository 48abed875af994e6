"""The figures of a step's rollouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from roll_like.inference.interface import Guesses
from roll_like.metrics.rollouts import SOLVED, message_text, transcript
from roll_like.rollout.collection import Collected
from roll_like.rollout.thumbnails import thumbnail_name
from roll_like.types import Group, KeptTokens, Origin, PlacedImage, Scored, StopReason, Task, Trajectory, by_agent
from roll_like.values import Max, Mean, Metric, Sum, has_signal, merge

#: Fields of a turn that rows do not have as they are.
_NOT_SHOWN = ("reasoning", "images")


def rollout_metrics(collected: Collected, policy_version: int, *, of_steps: bool = False) -> dict[str, Metric]:
    """Return what a step's samples were like; every mean is over samples or tokens, never over means.

    Args:
        collected: The step's groups. Rejected groups count for the reward: they were sampled too. Those that lost all
            samples count in `rollout/failures` alone.
        policy_version: Version of the weights that the step trains.
        of_steps: Whether scores of steps are learned from, not rewards alone.
    """
    rejected = [group for group in collected.rejected if group.samples]  # of others infrastructure lost all
    groups = by_agent(_with_success([*collected.groups, *rejected]))
    samples = [sample for group in groups for sample in group.samples]
    metrics: dict[str, Metric] = merge(_sample_metrics(sample) for sample in samples)
    metrics |= {
        "rollout/tokens": Sum(float(collected.tokens)),
        "rollout/samples": Sum(float(len(samples))),
        "rollout/failures": Sum(float(sum(failure.of_policy for failure in collected.failures))),
        "rollout/groups/accepted": Sum(float(len(collected.groups))),
        "rollout/groups/rejected": Sum(float(len(rejected))),
        "rollout/groups/aborted": Sum(float(len(collected.unfinished))),
        "rollout/groups/zero_variance": Mean(_share_zero_variance(groups, of_steps=of_steps), len(groups)),
        "time/reward": Sum(collected.wait_reward_seconds),
        **staleness_metrics(collected.groups, policy_version),
        **collected.metrics,
    }
    if lost := sum(not failure.of_policy for failure in collected.failures):
        metrics["demonstrations/failures"] = Sum(float(lost))
    if samples:
        rewards = np.array([sample.reward for sample in samples])
        metrics["rollout/reward/std"] = Mean(float(rewards.std()), len(samples))
        passed = [any(map(_solved, group.samples)) for group in groups]
        metrics["rollout/reward/pass"] = Mean(float(np.mean(passed)), len(groups))
    domains = _by_domain(groups)
    for domain, members in domains.items():
        if len(domains) == 1 and all(group.task.source == domain for group in members):
            continue  # the source's figures are the same
        prefix = f"rollout/domain/{domain}"
        metrics |= merge(_domain_metrics(prefix, sample) for group in members for sample in group.samples)
        metrics[f"{prefix}/zero_variance"] = Mean(_share_zero_variance(members, of_steps=of_steps), len(members))
        metrics[f"{prefix}/groups"] = Sum(float(len(members)))
    return metrics


def off_policy_metrics(
    groups: Sequence[Group[Scored]], policy_version: int, origins: Collection[Origin]
) -> dict[str, Metric]:
    """Return how many of a step's groups off-policy answers have joined, and what these are like.

    Args:
        policy_version: As in `rollout_metrics`.
        origins: The kinds that may join.
    """
    metrics: dict[str, Metric] = {}
    for origin, name in ((Origin.DEMONSTRATION, "demonstrations"), (Origin.REPLAYED, "replay")):
        if origin not in origins or not groups:
            continue
        joined = [[one for one in group.off_policy if one.trajectory.origin is origin] for group in groups]
        metrics[f"{name}/groups"] = Mean(float(np.mean(list(map(bool, joined)))), len(groups))
        answers = [one for of_group in joined for one in of_group]
        if answers and origin is Origin.DEMONSTRATION:
            metrics["demonstrations/reward"] = Mean(float(np.mean([one.reward for one in answers])), len(answers))
        elif answers:
            ages = [policy_version - one.trajectory.policy_version for one in answers]
            metrics["replay/age"] = Mean(float(np.mean(ages)), len(answers))
    return metrics


def staleness_metrics(groups: Sequence[Group[Scored]], policy_version: int) -> dict[str, Metric]:
    """Return how old a step's samples are, in policy versions."""
    metrics: dict[str, Metric] = merge(
        _sample_staleness(sample.trajectory, policy_version) for group in groups for sample in group.samples
    )
    versions = [
        [segment.policy_version for sample in group.samples for segment in sample.trajectory.segments]
        for group in groups
    ]
    ranges = [float(np.ptp(of_group)) for of_group in versions if of_group]
    if ranges:
        metrics["staleness/group_range"] = Mean(float(np.mean(ranges)), len(ranges))
    return metrics


def _sample_staleness(trajectory: Trajectory, policy_version: int) -> dict[str, Metric]:
    age = float(policy_version - trajectory.policy_version)
    lengths = [segment.end - segment.start for segment in trajectory.segments]
    ages = [policy_version - segment.policy_version for segment in trajectory.segments]
    return {
        "staleness/mean": Mean(age),
        "staleness/max": Max(age),
        "staleness/tokens": Mean(float(np.average(ages, weights=lengths)), sum(lengths)),
        "staleness/mixed": Mean(float(len(set(ages)) > 1)),
        "schedule/off_policy": Mean(float(age > 0)),
    }


def speculation_metrics(guesses: Guesses) -> dict[str, Metric]:
    """Return how much of what engines guessed was accepted; nothing where nothing was guessed.

    >>> speculation_metrics(Guesses(tokens=8, accepted=6, passes=2))["rollout/speculation/accepted"].value
    0.75
    """
    if not guesses.tokens:
        return {}
    return {
        "rollout/speculation/accepted": Mean(guesses.accepted / guesses.tokens, guesses.tokens),
        "rollout/speculation/length": Mean(1 + guesses.accepted / guesses.passes, guesses.passes),
    }


def evaluation_metrics(collected: Collected, k: int) -> dict[str, Metric]:
    """Return `eval/avg` (avg@k), `eval/pass@j` for j = 1, 2, 4, … and k, `eval/maj@k`, each reward's mean, losses.

    A task that lost samples counts in every mean over samples, but not in pass@j and maj@k: of fewer than k samples
    pass@k has no unbiased estimate, and all of them are over the same tasks. `eval/incomplete_tasks` counts such tasks;
    where no task is complete, none of these metrics is there.

    Args:
        collected: The evaluation's groups, one a task. Rejected ones lost all their samples.
        k: Samples that each task was given.
    """
    groups = by_agent(_with_success(collected.groups))
    samples = [sample for group in groups for sample in group.samples]
    metrics: dict[str, Metric] = merge(
        {
            "eval/avg": Mean(sample.reward),
            "eval/response_length": Mean(float(sample.trajectory.response_length)),
            "eval/truncated": Mean(float(sample.trajectory.stop_reason is StopReason.LENGTH)),
            **{f"eval/reward/{name}": Mean(value) for name, value in sample.rewards.items()},
            **{f"eval/{name}": Mean(value) for name, value in sample.details.items()},
            **({f"eval/agent/{sample.agent}/avg": Mean(sample.reward)} if sample.agent else {}),
        }
        for sample in samples
    )
    voting = {sample.trajectory.task.source for sample in samples if sample.answer is not None}
    metrics |= _task_metrics("eval", groups, k, voting)
    metrics["eval/failures"] = Sum(float(len(collected.failures)))
    incomplete = sum(len(group.samples) < k for group in (*groups, *collected.rejected))
    metrics["eval/incomplete_tasks"] = Sum(float(incomplete))
    domains = _by_domain(groups)
    for domain, members in domains.items() if len(domains) > 1 else ():
        rewards = [sample.reward for group in members for sample in group.samples]
        if rewards:
            metrics[f"eval/domain/{domain}/avg"] = Mean(float(np.mean(rewards)), len(rewards))
        metrics |= _task_metrics(f"eval/domain/{domain}", members, k, voting)
    return metrics


def rollout_rows(groups: Sequence[Group[Scored]], policy_version: int | None = None) -> list[dict[str, Any]]:
    """Return groups as rows that people can read, one a sample.

    An episode's row has its `turns` (records as plain JSON), `return`, `cuts`, the environment's `seed` and, where the
    environment reports it, `success`; its `text` is the transcript after the first prompt.

    Args:
        policy_version: Version of the weights that train on them; `staleness` counts from it. None: nothing does.
    """
    return [
        {
            "task_id": group.task.task_id,
            "source": group.task.source,
            "domain": group.task.domain,
            "sample_index": sample.trajectory.sample_index,
            "prompt": _prompt(sample.trajectory.task),
            "messages": list(sample.trajectory.task.messages),
            **({"images": shown} if (shown := _images(sample.trajectory)) else {}),
            "text": sample.trajectory.text,
            "reward": sample.reward,
            "rewards": dict(sample.rewards),
            "details": dict(sample.details),
            **({"step_scores": _steps(sample)} if sample.step_scores else {}),
            "tokens": sample.trajectory.response_length,
            **({} if sample.answer is None else {"answer": sample.answer}),
            **({"agent": sample.agent} if sample.agent else {}),
            **({} if group.task.answer is None else {"reference": group.task.answer}),
            "stop_reason": str(sample.trajectory.stop_reason),
            "policy_version": sample.trajectory.policy_version,
            **({} if policy_version is None else {"staleness": policy_version - sample.trajectory.policy_version}),
            **(_episode(sample.trajectory.task, sample) if sample.record else {}),
        }
        for group in groups
        for sample in group.samples
    ]


def _steps(sample: Scored) -> dict[str, list[dict[str, Any]]]:
    """Return the scores of an answer's steps, and where these end, by the reward that gave them."""
    return {
        name: [{"score": step.value, "end": step.end} for step in steps] for name, steps in sample.step_scores.items()
    }


def _images(trajectory: Trajectory) -> list[dict[str, str]]:
    """Return what images are called in the messages that show them, and the names of their small copies."""
    pictures = dict.fromkeys((picture.label, thumbnail_name(picture)) for picture in trajectory.pictures)
    return [{"label": label, "file": file} for label, file in pictures]


def _prompt(task: Task) -> str:
    return message_text(task.messages[-1]) if task.messages else ""


def _episode(task: Task, sample: Scored) -> dict[str, Any]:
    """Return what the row of an episode has beside that of a single answer, or instead."""
    turns = [
        {field.name: getattr(record, field.name) for field in fields(record) if field.name not in _NOT_SHOWN}
        for record in sample.record
    ]
    row: dict[str, Any] = {
        "prompt": message_text(turns[0]["shown"][-1]) if turns[0]["shown"] else _prompt(task),
        "text": transcript(turns),
        "return": sum(record.reward for record in sample.record),
        "cuts": int(sample.details.get("cuts", 0)),
        "turns": turns,
    }
    if "seed" in task.metadata:
        row["seed"] = task.metadata["seed"]
    if "success" in sample.details:
        row["success"] = bool(sample.details["success"])
    return row


def _sample_metrics(sample: Scored) -> dict[str, Metric]:
    trajectory = sample.trajectory
    length = float(trajectory.response_length)
    return {
        "rollout/reward/mean": Mean(sample.reward),
        **{f"rollout/reward/{name}": Mean(value) for name, value in sample.rewards.items()},
        **{f"rollout/{name}": Mean(value) for name, value in sample.details.items()},
        f"rollout/source/{trajectory.task.source}/reward": Mean(sample.reward),
        **({f"rollout/agent/{sample.agent}/reward": Mean(sample.reward)} if sample.agent else {}),
        "rollout/response_length/mean": Mean(length),
        "rollout/response_length/max": Max(length),
        "rollout/truncated": Mean(float(trajectory.stop_reason is StopReason.LENGTH)),
        **_kept_metrics(trajectory.kept),
        **_image_metrics(trajectory.images),
    }


def _image_metrics(images: Sequence[PlacedImage]) -> dict[str, Metric]:
    """Return how many images a sample has among its tokens, and how many of the tokens stand for them."""
    if not images:
        return {}
    tokens = float(sum(image.length for image in images))
    return {"rollout/images/mean": Mean(float(len(images))), "rollout/images/tokens": Mean(tokens)}


def _kept_metrics(kept: KeptTokens | None) -> dict[str, Metric]:
    """Return how many tokens `top_p`, `top_k` and `min_p` left, of sampled tokens that they left some out for."""
    counts = np.zeros(0) if kept is None else kept.counts[kept.counts > 0]
    if not len(counts):
        return {}
    return {"rollout/kept/mean": Mean(float(counts.mean()), len(counts)), "rollout/kept/max": Max(float(counts.max()))}


def _domain_metrics(prefix: str, sample: Scored) -> dict[str, Metric]:
    trajectory = sample.trajectory
    return {
        f"{prefix}/reward": Mean(sample.reward),
        f"{prefix}/response_length": Mean(float(trajectory.response_length)),
        f"{prefix}/truncated": Mean(float(trajectory.stop_reason is StopReason.LENGTH)),
    }


def _with_success(groups: Sequence[Group[Scored]]) -> list[Group[Scored]]:
    """Return groups in which an episode without `success` was not solved, if others of its source report it.

    A limit ended it before its environment reported `success`; without this the mean would be over the others.
    """
    reporting = {group.task.source for group in groups for sample in group.samples if "success" in sample.details}
    return [
        replace(group, samples=tuple(_unsolved(sample) for sample in group.samples))
        if group.task.source in reporting
        else group
        for group in groups
    ]


def _unsolved(sample: Scored) -> Scored:
    return sample if "success" in sample.details else replace(sample, details={**sample.details, "success": 0.0})


def _by_domain(groups: Sequence[Group[Scored]]) -> dict[str, list[Group[Scored]]]:
    domains: dict[str, list[Group[Scored]]] = {}
    for group in groups:
        domains.setdefault(group.task.domain, []).append(group)
    return domains


def rewards_differ(samples: Sequence[Scored], *, of_steps: bool = False) -> bool:
    """Return whether the rewards of a group's samples differ.

    Args:
        of_steps: Also look at scores of steps; not at rewards of turns, which add up to the reward.
    """
    values = [[sample.reward for sample in samples]]
    if of_steps:
        names = {name for sample in samples for name in sample.step_scores}
        values += [[step.value for sample in samples for step in sample.steps_of(name)] for name in names]
    return any(map(has_signal, values))


def _share_zero_variance(groups: Sequence[Group[Scored]], *, of_steps: bool = False) -> float:
    if not groups:
        return math.nan
    flat = [not rewards_differ(group.samples, of_steps=of_steps) for group in groups]
    return float(np.mean(flat))


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples solves a task.

    1 − C(n − c, k)/C(n, k), where c of n ≥ k samples solved it (Chen et al. 2021, arXiv:2107.03374, equation 1).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1 - math.comb(samples - solved, k) / math.comb(samples, k)


def majority(answers: Sequence[str | None], solved: Sequence[bool]) -> float:
    """Return the expected score of the most frequent answer (self-consistency, Wang et al. 2022, arXiv:2203.11171).

    Ties are broken by expectation: each of the tied answers is equally likely. An answer's score is the share of its
    samples that are solved, because rewards beside that of the answer may set them apart. Samples without an answer
    have no vote; where none has one, nothing is solved.

    Args:
        answers: The answer of each sample of a task; None or empty where there is none.
        solved: Whether each sample is solved, in the same order.

    >>> majority(["7", "7", "9", None], [True, True, False, False])
    1.0
    >>> majority(["7", "9", "", None], [True, False, False, False])
    0.5
    """
    votes = Counter(answer for answer in answers if answer)
    most = max(votes.values(), default=0)
    # tied answers have equally many samples, so the mean over the samples is that over the answers
    chosen = [right for answer, right in zip(answers, solved, strict=True) if answer and votes[answer] == most]
    return sum(chosen) / len(chosen) if chosen else 0.0


def _task_metrics(prefix: str, groups: Sequence[Group[Scored]], k: int, voting: Collection[str]) -> dict[str, Metric]:
    """Return the means of `task_values`, of figures that a task has; names begin with the prefix."""
    return {
        f"{prefix}/{name}": Mean(float(np.mean(values)), len(values))
        for name, values in task_values(groups, k, voting).items()
        if values
    }


def task_values(groups: Sequence[Group[Scored]], k: int, voting: Collection[str]) -> dict[str, list[float]]:
    """Return pass@j for j = 1, 2, 4, … and k, and maj@k for sources whose answers can vote; one value a task.

    Only tasks with at least k samples have values.

    Args:
        groups: One a task.
        k: Samples that each task was given.
        voting: Sources of which a reward compares the answers.
    """
    solved = [(group, list(map(_solved, group.samples))) for group in groups if len(group.samples) >= k]
    values = {
        f"pass@{j}": [pass_at_k(len(right), sum(right), j) for _, right in solved]
        for j in (*(2**power for power in range(k.bit_length()) if 2**power < k), k)
    }
    if voting and k > 1:  # of one sample there is no majority
        values[f"maj@{k}"] = [
            majority([sample.answer for sample in group.samples], right)
            for group, right in solved
            if group.task.source in voting
        ]
    return values


def _solved(sample: Scored) -> bool:
    """Whether its environment reports success; without a report, whether the reward is (nearly) 1."""
    return bool(sample.details.get("success", sample.reward >= SOLVED))
