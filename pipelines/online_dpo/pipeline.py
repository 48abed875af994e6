"""Online DPO: sample groups of answers, pair better ones with worse ones, train on the pairs, and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from roll_like.builtin.pipelines.dpo.objective import PairStep, whole_logprobs
from roll_like.builtin.pipelines.dpo.preferences import (
    SequenceReference,
    live_reference,
    objective_of,
    pair_step,
    precomputed_reference,
    preference_evaluator,
    start_preference_evaluator,
    with_reference_logprobs,
)
from roll_like.builtin.pipelines.online_dpo.config import OnlineDPOConfig
from roll_like.builtin.pipelines.online_dpo.iterations import RefreshedReference, SampledPairs, in_steps_of
from roll_like.check import Finding, Report, check
from roll_like.check.data import prompt_findings
from roll_like.check.plan import Plan, plan
from roll_like.cluster import ResourceManager
from roll_like.data.chat import Renderer
from roll_like.data.pairs import load_pairs
from roll_like.models.load import load_renderer
from roll_like.models.shape import ModelShape
from roll_like.offline.check import load_findings
from roll_like.offline.samples import samples_metrics
from roll_like.policy_gradient.reward_workers import PromptWorkers
from roll_like.policy_gradient.workers import Workers, start_evaluator, starting_workers
from roll_like.rollout.collection import Collected
from roll_like.rollout.source import SynchronousRollouts
from roll_like.run.evaluation import Evaluated, Evaluation
from roll_like.run.pipeline import TrainerPipeline
from roll_like.run.state import Evaluates, RunContext
from roll_like.training.engine import policy_copies
from roll_like.training.start import start_trainer
from roll_like.values import Metric, Metrics, merge


@dataclass(kw_only=True)
class OnlineDPOPipeline(TrainerPipeline[OnlineDPOConfig, PairStep]):
    """Each step prefers better answers of the policy; used-up pairs are replaced by newly sampled ones."""

    workers: Workers
    pairs: SampledPairs
    reference: SequenceReference | None

    def next_batch(self) -> tuple[PairStep, Metrics]:
        """Return a step's pairs, with the reference's log-probabilities; where an iteration begins, sample first."""
        pairs = pair_step(self.pairs.take(self.config.pairs.pairs_per_step))
        return with_reference_logprobs(pairs, self.reference), samples_metrics(pairs.trained)

    def training(self) -> AbstractContextManager[None]:
        """Time an update, after which the engines' weights are old ones."""
        return self.workers.training()

    @classmethod
    def build(cls, config: OnlineDPOConfig, run: RunContext) -> Self:
        """Start trainer, engines and reward workers side by side, and put the parts together."""
        state, resources, evaluated = run.state, config.resources, _evaluated_pairs(config)
        prompts = PromptWorkers(config, run.resources, run.stack)
        refreshes = config.reference is not None and config.reference.mode == "iteration"
        with starting_workers(config, run, prompts) as workers:
            add = workers.gpu_sharing.add
            workers.actor = trainer = start_trainer(
                config,
                workers.model,
                objective_of(config),
                run.resources,
                run.stack,
                timer=state.timer,
                copies=config.copies,
            )
            workers.copies = policy_copies(trainer, config.copies)
            add(trainer, resources.devices_of("training"))
            refreshed = RefreshedReference(partial(whole_logprobs, trainer)) if refreshes else None
            reference = refreshed or live_reference(
                config, run, trainer, workers.copies, lambda engine: add(engine, resources.devices_of("reference"))
            )
            # given pairs are compared with the starting policy throughout
            asked = [] if evaluated is None else evaluated.sequences
            for_evaluation = precomputed_reference(config, run, trainer, asked) if refreshed else reference
        rollouts = SynchronousRollouts(
            in_steps_of(state, prompts.groups(state.metrics.warn)),
            config.rollout,
            seed=config.seed,
            runner=workers.runner,
            progress=workers.progress,
            unit="iteration",
        )
        pairs = SampledPairs(config, rollouts, workers, refreshed)
        state.keep([trainer], pairs=pairs, **workers.copies)
        evaluators: list[Evaluates] = []
        by_reward = prompts.evaluator(state.metrics.warn)
        if by_reward is not None and config.evaluation is not None:
            measure = _with_newest_weights(by_reward, workers)
            evaluators.append(Evaluation(schedule=config.evaluation, measure=measure, best=("eval/avg",)))
        if config.pair_evaluation is not None and evaluated is not None:
            evaluators.append(preference_evaluator(config.pair_evaluation, evaluated, trainer, for_evaluation))
        return cls(
            config=config,
            run_state=state,
            trainer=trainer,
            evaluator=Evaluators(evaluators) if evaluators else None,
            workers=workers,
            copies=workers.copies,
            pairs=pairs,
            reference=reference,
        )

    @classmethod
    def check(cls, config: OnlineDPOConfig) -> Report:
        return check(config, cls.findings, _plan)

    @classmethod
    def findings(cls, config: OnlineDPOConfig, renderer: Renderer | None, report: Report) -> Iterator[Finding]:
        """Yield what is wrong with prompts, rewards and given pairs; tell the report about sources."""
        yield from prompt_findings(config, renderer, report)
        if config.pair_evaluation is not None:
            yield from load_findings({"pair_evaluation": config.pair_evaluation}, load_pairs, renderer, report)

    @classmethod
    def evaluate(cls, config: OnlineDPOConfig, model: str) -> dict[str, float]:
        """Measure a model by each evaluation that the configuration has, one after the other.

        Args:
            model: Directory, hub id or GGUF file of the model to measure.

        Raises:
            ConfigError: The configuration has none.
        """
        if config.evaluation is None or config.pair_evaluation is None:
            return super().evaluate(config, model)
        # side by side they would take the same devices
        by_pairs = super().evaluate(config.model_copy(update={"evaluation": None}), model)
        return by_pairs | super().evaluate(config.model_copy(update={"pair_evaluation": None}), model)

    @classmethod
    def start_evaluator(cls, config: OnlineDPOConfig, resources: ResourceManager, stack: ExitStack) -> Evaluates | None:
        """Start what the configuration's evaluation needs: ranks for given pairs, else engines and reward workers."""
        pairs = _evaluated_pairs(config)
        if config.pair_evaluation is not None and pairs is not None:
            return start_preference_evaluator(config, config.pair_evaluation, pairs, resources, stack)
        return start_evaluator(config, resources, stack, PromptWorkers(config, resources, stack))


class Evaluators:
    """Several evaluations as one; each has a schedule of its own.

    Args:
        parts: The evaluations; the best checkpoint is chosen by the first that has a score. All are
            run until `due` was asked.
    """

    def __init__(self, parts: Sequence[Evaluates]) -> None:
        self._parts = parts
        self._due = parts

    def due(self, finished: int, total: int) -> bool:
        """Return whether any is due; those are the ones that `evaluate` runs."""
        self._due = [part for part in self._parts if part.due(finished, total)]
        return bool(self._due)

    def evaluate(self) -> tuple[Mapping[str, Metric], Collected | None]:
        """Return the figures of all that are due, and the scored answers where there are any."""
        results = [part.evaluate() for part in self._due]
        answers = [collected for _, collected in results if collected is not None]
        return merge(figures for figures, _ in results), answers[0] if answers else None

    def score(self, values: Mapping[str, float]) -> float | None:
        """Return what the best checkpoint has most of."""
        return next((score for part in self._parts if (score := part.score(values)) is not None), None)


def _with_newest_weights(evaluator: Evaluates, workers: Workers) -> Callable[[], Evaluated]:
    """Return what measures the policy by rewards, with its newest weights in the engines."""

    def measure() -> Evaluated:
        with workers.sampling():
            return evaluator.evaluate()

    return measure


def _plan(config: OnlineDPOConfig, shapes: Mapping[str, ModelShape]) -> Plan:
    """Return the plan of a run; a step trains on pairs."""
    pairs = config.pairs.pairs_per_step
    return replace(plan(config, shapes), groups_per_step=pairs, samples_per_group=1, units=("pairs", "pairs"))


def _evaluated_pairs(config: OnlineDPOConfig) -> PairStep | None:
    """Return the given pairs of an evaluation; None without one."""
    if config.pair_evaluation is None:
        return None
    renderer = load_renderer(config.model)
    return pair_step(load_pairs(config.pair_evaluation, renderer, section="pair_evaluation").samples)
