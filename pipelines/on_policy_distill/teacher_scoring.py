"""Teacher scoring: how likely teachers find the tokens that the student sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll_like.algorithms.advantages.base import policy_samples
from roll_like.algorithms.distillation.on_policy import with_teacher_advantages
from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig, TeacherSignalConfig
from roll_like.cluster import ResourceManager
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.config.resources import DeviceRange
from roll_like.config.teachers import teacher_of
from roll_like.models.teachers import planned_teachers
from roll_like.policy_gradient.gpu_sharing import GPUSharing
from roll_like.policy_gradient.objective import with_logprobs
from roll_like.policy_gradient.reward_workers import RewardWorkers, prompt_evaluator
from roll_like.rollout.collection import Collected, Progress, no_progress
from roll_like.rollout.evaluate import Evaluator
from roll_like.rollout.scheduler import GenerateScheduler
from roll_like.training.engine import Timer, TrainingEngine
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.start import rank_spec, start_engine
from roll_like.types import FloatArray, Group, PolicySample, Scored
from roll_like.values import Mean, Metric, Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScored:
    """A step's samples with what teachers made of them, and figures of that."""

    samples: Sequence[PolicySample]
    metrics: Metrics


class TeacherScorer:
    """Teachers that say how likely they find sampled tokens.

    Args:
        config: The run's configuration.
        engines: The teachers' ranks, by name.
    """

    def __init__(self, config: OnPolicyDistillConfig, engines: Mapping[str, TrainingEngine[Any]]) -> None:
        self._teachers = config.teachers
        self._signal: TeacherSignalConfig = config.distillation
        self._engines = engines

    def score(self, samples: Sequence[PolicySample], groups: Sequence[Group[Scored]]) -> TeacherScored:
        """Return the samples with the teachers' advantages, or with their log-probabilities for a loss.

        Args:
            samples: What a step trains on, with the advantages of rewards.
            groups: The groups that they come from: a sample's teacher is that of its task's domain.
        """
        logprobs = self.logprobs(samples, groups)
        metrics = {"distill/reverse_kl": reverse_kl(samples, logprobs)}
        signal = self._signal
        if signal.use == "loss":
            weighed = with_teacher_advantages(
                samples, logprobs, teacher_weight=0.0, reward_weight=signal.reward_weight, estimator=signal.estimator
            )
            return TeacherScored(samples=with_logprobs(weighed, logprobs), metrics=metrics)
        scored = with_teacher_advantages(
            samples,
            logprobs,
            teacher_weight=signal.weight,
            reward_weight=signal.reward_weight,
            estimator=signal.estimator,
            discount=signal.discount,
        )
        return TeacherScored(samples=scored, metrics=metrics)

    def logprobs(self, samples: Sequence[PolicySample], groups: Sequence[Group[Scored]]) -> list[FloatArray]:
        """Return the log-probability of each sampled token under its teacher, one array [T] a sample."""
        domains = {group.task.task_id: group.task.domain for group in groups}
        names = [teacher_of(self._teachers, domains[sample.group_id.rsplit("#", 1)[0]]) for sample in samples]
        found: dict[int, FloatArray] = {}
        for name, engine in self._engines.items():
            theirs = [index for index, chosen in enumerate(names) if chosen == name]
            if theirs:
                found |= zip(theirs, engine.logprobs([samples[index] for index in theirs]), strict=True)
        return [found[index] for index in range(len(samples))]


class TeacherWorkers(RewardWorkers):
    """The teachers of a run, beside the reward workers where it has some.

    Args:
        config: The run's configuration.
        resources: Where they go.
        stack: Ends them when it is closed.
        timer: Times a named part of a step.
    """

    def __init__(
        self,
        config: OnPolicyDistillConfig,
        resources: ResourceManager,
        stack: ExitStack,
        timer: Timer = lambda name: nullcontext(),
    ) -> None:
        super().__init__(config, resources, stack)
        self._student = config
        self._timer = timer
        self._engines: dict[str, tuple[TrainingEngine[Any], DeviceRange]] = {}
        self.scorer: TeacherScorer

    def start(self) -> None:
        """Start reward workers and teachers; a replay has rewards already.

        Raises:
            ConfigError: A teacher has another tokenizer than the student.
            EngineError: A rank did not start.
        """
        config = self._student
        if config.replay is None:
            super().start()
        for teacher in planned_teachers(config, config.teachers):
            objective = LanguageModelObjective[Any, Any](
                settings=teacher.training, temperature=config.rollout.temperature
            )
            engine = start_engine(
                f"teacher {teacher.name}",
                rank_spec(config, teacher.model, teacher.devices, objective, total_updates=None),
                self._resources,
                teacher.devices,
                stack=self._stack,
                timer=lambda _: self._timer("teachers"),
            )
            self._engines[teacher.name] = engine, teacher.devices
        self.scorer = TeacherScorer(config, {name: engine for name, (engine, _) in self._engines.items()})

    def share(self, gpu_sharing: GPUSharing) -> None:
        """Let teachers and inference engines on the same GPUs take turns."""
        for engine, devices in self._engines.values():
            gpu_sharing.add(engine, devices)

    def wait(self) -> None:
        """Wait until rewards can be computed, where they are."""
        if self._student.replay is None:
            super().wait()


class TeacherEvaluator:
    """Samples answers to tasks that are not trained on; teachers score them, and rewards where there are some.

    Args:
        evaluator: Samples, and computes rewards.
        scorer: What answers are compared with.
        has_rewards: Whether there are rewards.
    """

    def __init__(self, evaluator: Evaluator, scorer: TeacherScorer, *, has_rewards: bool) -> None:
        self._evaluator = evaluator
        self._scorer = scorer
        self._has_rewards = has_rewards

    def due(self, finished: int, total: int) -> bool:
        """Return whether to evaluate after `finished` of `total` steps."""
        return self._evaluator.due(finished, total)

    def evaluate(self) -> tuple[Mapping[str, Metric], Collected]:
        """Return `eval/reverse_kl`, with rewards also `eval/avg` and so on, and the answers."""
        metrics, collected = self._evaluator.evaluate()
        if not self._has_rewards:
            metrics = without_rewards(metrics)
        samples = policy_samples(collected.groups)
        figure = reverse_kl(samples, self._scorer.logprobs(samples, collected.groups))
        return {**metrics, "eval/reverse_kl": figure}, collected

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of: reward, or nearness to the teachers where there is none."""
        if self._has_rewards:
            return self._evaluator.score(values)
        return -values["eval/reverse_kl"] if "eval/reverse_kl" in values else None


def teacher_evaluator(
    config: OnPolicyDistillConfig,
    teachers: TeacherWorkers,
    scheduler: GenerateScheduler,
    runner: DriverLoop,
    progress: Progress = no_progress,
) -> TeacherEvaluator | None:
    """Return what measures the student, or nothing where there is no `evaluation` section."""
    evaluator = prompt_evaluator(config, scheduler, runner, progress)
    if evaluator is None:
        return None
    return TeacherEvaluator(evaluator, teachers.scorer, has_rewards=bool(config.rewards.use))


def reverse_kl(samples: Sequence[PolicySample], teacher_logprobs: Sequence[FloatArray]) -> Mean:
    """Return the mean of log π − log π_teacher over sampled tokens: an estimate of the reverse KL of a token, in nats.

    Log π is what the inference engine reported.
    """
    total = sum(
        float((sample.behaviour_logprobs - theirs)[sample.loss_mask].sum(dtype=np.float64))
        for sample, theirs in zip(samples, teacher_logprobs, strict=True)
    )
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    return Mean(total / max(tokens, 1), tokens)


def without_rewards(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return metrics without those of rewards, in a run that has none."""
    of_rewards = ("/reward", "/zero_variance", "/avg", "/pass@", "/maj@")
    return {name: metric for name, metric in metrics.items() if not any(part in name for part in of_rewards)}
