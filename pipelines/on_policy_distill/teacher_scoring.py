"""Teacher scoring: the teachers' log-probabilities of the student's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from roll_like.algorithms.advantages.base import policy_samples
from roll_like.algorithms.distillation.on_policy import with_teacher_advantages
from roll_like.builtin.pipelines.distill.answers import OwnTopKAnswers, chosen
from roll_like.builtin.pipelines.distill.objective import TopKObjective, teacher_answers
from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.on_policy_distill.demonstrations import Demonstrations
from roll_like.builtin.pipelines.on_policy_distill.teacher_views import OtherTokens, SameTokens, TeacherView
from roll_like.config.teachers import teacher_key, teacher_model, teacher_of
from roll_like.config.training import TrainingConfig
from roll_like.models.load import load_renderer
from roll_like.models.teachers import planned_teachers
from roll_like.policy_gradient.advantages import Assigned
from roll_like.policy_gradient.gpu_sharing import GPUSharing
from roll_like.policy_gradient.objective import with_logprobs
from roll_like.policy_gradient.reward_workers import PromptWorkers
from roll_like.run.evaluation import Evaluated, Evaluation
from roll_like.run.state import Evaluates
from roll_like.training.engine import PolicyCopy, TrainingEngine, untimed
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.start import rank_spec, start_engine
from roll_like.types import FloatArray, Group, IntArray, PolicySample, Scored, TopKAnswers, TrainingSample
from roll_like.values import Mean, Metric

#: The name of the policy among teachers: of none that a configuration names.
POLICY = ""


class Told(NamedTuple):
    """What a teacher says of a sample.

    Attributes:
        logprobs_T: The log-probabilities of its tokens, 0 where not sampled.
        spans: The stretch of each sampled token (`ShownSample`).
        top_k: The teacher's most likely tokens in the place of each sampled one; None unless asked.
    """

    logprobs_T: FloatArray
    spans: IntArray
    top_k: TopKAnswers | None


class TeacherScorer:
    """Teachers that say how likely they find sampled tokens.

    Args:
        engines: The teachers' ranks, by name.
        views: How teachers see the student's samples, by name; the policy, where it is its own teacher, as ''.

    Attributes:
        policy: The policy, where it is its own teacher.
        own_weights: What it computes with then; None for its newest weights.
    """

    policy: TrainingEngine[Any] | None = None
    own_weights: PolicyCopy | None = None

    def __init__(
        self,
        config: OnPolicyDistillConfig,
        engines: Mapping[str, TrainingEngine[Any]],
        views: Mapping[str, TeacherView] | None = None,
    ) -> None:
        self._views = views or {}
        self._teachers = config.teachers
        self._signal = config.distillation
        self._engines = engines

    def score(self, assigned: Assigned, groups: Sequence[Group[Scored]]) -> Assigned:
        """Return the samples with the teachers' advantages, or with their log-probabilities for a loss.

        Args:
            assigned: What a step trains on, with the advantages of rewards.
            groups: The groups that it comes from: a sample's teacher is that of its task's domain.
        """
        signal, in_loss = self._signal, self._signal.use == "loss"
        told = self._told(assigned.samples, groups, top_k=signal.signal == "top_k")
        logprobs, spans = [each.logprobs_T for each in told], [each.spans for each in told]
        samples: Sequence[PolicySample] = with_teacher_advantages(
            assigned.samples,
            logprobs,
            teacher_weight=0.0 if in_loss else signal.weight,
            reward_weight=signal.reward_weight,
            spans=spans,
            estimator=signal.estimator,
            discount=signal.discount,
        )
        if signal.signal == "top_k":
            samples = [replace(sample, taught=each.top_k) for sample, each in zip(samples, told, strict=True)]
        elif in_loss:
            samples = with_logprobs(samples, logprobs)
        figure = {"distill/reverse_kl": reverse_kl(assigned.samples, logprobs)}
        return replace(assigned, samples=samples, metrics={**assigned.metrics, **figure})

    def logprobs(self, samples: Sequence[PolicySample], groups: Sequence[Group[Scored]]) -> list[FloatArray]:
        """Return the log-probability of each sampled token under its teacher, one array [T] a sample."""
        return [each.logprobs_T for each in self._told(samples, groups, top_k=False)]

    def _told(self, samples: Sequence[PolicySample], groups: Sequence[Group[Scored]], *, top_k: bool) -> list[Told]:
        """Return what teachers say of the samples' tokens, with their most likely ones if asked."""
        tasks = {group.task.task_id: group.task for group in groups}
        of_samples = [tasks[sample.group_id.rsplit("#", 1)[0]] for sample in samples]
        engines = self._engines if self.policy is None else {POLICY: self.policy}
        names = [POLICY if self.policy is not None else teacher_of(self._teachers, task.domain) for task in of_samples]
        found: dict[int, Told] = {}
        for name, engine in engines.items():
            view = self._views.get(name, SameTokens())
            of_teacher = [index for index, own in enumerate(names) if own == name]
            shown = [view.shown(samples[index], of_samples[index]) for index in of_teacher]
            answers: Sequence[tuple[FloatArray, TopKAnswers | None]] = ()
            with nullcontext() if self.own_weights is None else self.own_weights.computing():
                if shown and top_k:
                    answers = top_k_answers(engine, [each.scored for each in shown])
                elif shown:
                    answers = [(logprobs_T, None) for logprobs_T in engine.logprobs([each.scored for each in shown])]
            for index, each, (logprobs_T, most_likely) in zip(of_teacher, shown, answers, strict=True):
                found[index] = Told(view.told(samples[index], each, logprobs_T), each.spans, most_likely)
        return [found[index] for index in range(len(samples))]


class TeacherWorkers(PromptWorkers[OnPolicyDistillConfig]):
    """The teachers of a run, beside the reward workers where it has some.

    Attributes:
        scorer: They as one scorer; there is one from `start` on.
    """

    scorer: TeacherScorer

    def start(self, gpu_sharing: GPUSharing | None = None) -> None:
        """Start reward workers and teachers.

        Raises:
            ConfigError: A teacher has another tokenizer than the student.
            EngineError: A rank did not start.
        """
        super().start(gpu_sharing)
        config, engines = self._config, {}
        timer = untimed if gpu_sharing is None else gpu_sharing.timer
        for teacher in planned_teachers(config, config.teachers):
            objective = teacher_objective(config, teacher.training)
            engines[teacher.name] = engine = start_engine(
                f"teacher {teacher.name}",
                rank_spec(config, teacher.model, teacher.devices, objective, total_updates=None),
                self._resources,
                teacher.devices,
                stack=self._stack,
                timer=lambda _: timer("teachers"),
            )
            if gpu_sharing is not None:
                gpu_sharing.add(engine, teacher.devices)
        self.scorer = TeacherScorer(config, engines, teacher_views(config))

    def evaluator(self, warn: Callable[[str], None]) -> Evaluates | None:
        """Return what measures the student, or nothing where there is no `evaluation` section.

        Teachers score its answers, and rewards where there are some; the best checkpoint has the highest reward, or is
        nearest to the teachers. A policy that teaches itself is measured by rewards alone.
        """
        schedule, by_reward = self._config.evaluation, super().evaluator(warn)
        has_rewards = bool(self._config.rewards.use)
        if schedule is None or by_reward is None:
            return None
        if not self._config.teachers:
            return by_reward

        def measure() -> Evaluated:
            metrics, collected = by_reward.evaluate()
            assert collected is not None, "answers were sampled"
            samples = policy_samples(collected.groups)
            figure = reverse_kl(samples, self.scorer.logprobs(samples, collected.groups))
            return {**(metrics if has_rewards else without_rewards(metrics)), "eval/reverse_kl": figure}, collected

        best = "eval/avg" if has_rewards else "-eval/reverse_kl"
        return Evaluation(schedule=schedule, measure=measure, best=[best])


def teacher_objective(config: OnPolicyDistillConfig, training: TrainingConfig) -> LanguageModelObjective[Any, Any]:
    """Return what a teacher of a run computes."""
    settings: dict[str, Any] = {"settings": training, "temperature": config.rollout.temperature}
    if config.distillation.signal == "sampled_token":
        return LanguageModelObjective(**settings)
    return TopKObjective(**settings, **config.distillation.top_k_settings, tells_own=True)


def top_k_answers(
    engine: TrainingEngine[Any], samples: Sequence[TrainingSample]
) -> list[tuple[FloatArray, TopKAnswers]]:
    """Return a teacher's log-probabilities of each sample's tokens, shape [T], and its most likely ones [S, K]."""
    answers = teacher_answers(engine, samples)
    assert isinstance(answers, OwnTopKAnswers), "asked for in `tells_own`"
    top_k = TopKAnswers(**{each.name: getattr(answers, each.name) for each in fields(TopKAnswers)})
    told, start = [], 0
    for sample in samples:
        own = slice(start, start := start + sample.trained_tokens)
        logprobs_T = np.zeros(len(sample), np.float32)
        logprobs_T[sample.loss_mask] = answers.own_N[own]
        told.append((logprobs_T, chosen(top_k, own)))
    return told


def teacher_views(config: OnPolicyDistillConfig) -> dict[str, TeacherView]:
    """Return how each teacher of a run sees the student's samples.

    Raises:
        ConfigError: A teacher has no chat template, or none that says how answers end.
    """
    student, shown = load_renderer(config.model), config.distillation.demonstration
    views: dict[str, TeacherView] = {}
    for name in config.teachers or (POLICY,):
        teacher = config.teachers.get(name)
        renderer = student
        if teacher is not None and teacher.other_tokenizer:
            renderer = load_renderer(teacher_model(config.model, teacher), key=teacher_key(name))
        demonstrations = None if shown is None else Demonstrations(renderer, shown)
        views[name] = (
            SameTokens(demonstrations)
            if renderer is student
            else OtherTokens(student, renderer, demonstrations, name=name)
        )
    return views


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
