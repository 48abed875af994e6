"""Online DPO: sample groups of answers, pair better ones with worse ones, train on the pairs, and again."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from roll_like.builtin.pipelines.dpo.objective import AnswerLogprobs, PairStep
from roll_like.builtin.pipelines.dpo.preferences import (
    PreferenceTrainer,
    SequenceReference,
    live_reference,
    pair_step,
    precomputed_reference,
    preference_evaluator,
    start_preference,
    start_preference_evaluator,
    with_reference_logprobs,
)
from roll_like.builtin.pipelines.online_dpo.check import online_dpo_findings, online_dpo_plan
from roll_like.builtin.pipelines.online_dpo.config import OnlineDPOConfig
from roll_like.builtin.pipelines.online_dpo.iterations import RefreshedReference, SampledPairs
from roll_like.builtin.pipelines.online_dpo.rollouts import Evaluators, OnPolicyEvaluator, PolicyEngines
from roll_like.check import Report, check_run
from roll_like.cluster import ResourceManager
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.data.pairs import load_pairs
from roll_like.models.load import load_renderer, resolve_model
from roll_like.offline.samples import samples_metrics
from roll_like.policy_gradient.gpu_sharing import GPUSharing
from roll_like.policy_gradient.reward_workers import RewardWorkers, prompt_evaluator, prompt_groups
from roll_like.policy_gradient.start import start_inference, start_weight_sync
from roll_like.policy_gradient.workers import start_engines
from roll_like.rollout.source import SynchronousRollouts
from roll_like.run.pipeline import Pipeline
from roll_like.run.state import Evaluates, RunContext
from roll_like.training.engine import TrainingEngine


@dataclass(kw_only=True)
class OnlineDPOPipeline(Pipeline[OnlineDPOConfig]):
    """The parts of an online DPO run."""

    pairs: SampledPairs
    trainer: PreferenceTrainer
    reference: SequenceReference | None
    evaluator: Evaluates | None

    def run(self) -> None:
        """Train to the end: each step prefers better answers; used-up pairs are replaced by newly sampled ones."""
        state = self.run_state
        state.evaluate(self.evaluator)
        for step in state.steps():
            pairs = pair_step(self.pairs.take(self.config.pairs.pairs_per_step))
            pairs = with_reference_logprobs(pairs, self.reference)
            with state.timer("train"):
                report = self.trainer.train_step(pairs)
            state.log(step, report, samples_metrics(pairs.trained))
            state.evaluate(self.evaluator)

    @classmethod
    def build(cls, config: OnlineDPOConfig, run: RunContext) -> Self:
        """Start trainer, engines and reward workers side by side, and put the parts together."""
        state = run.state
        state.metrics.phase("preparing the model")
        evaluated = _evaluated_pairs(config)
        model = resolve_model(config.model)
        runner = run.stack.enter_context(DriverLoop())
        state.metrics.phase("starting workers")
        inference = start_inference(config, model, run.resources, run.stack, runner)
        gpu_sharing = GPUSharing(runner=runner, engines=inference, resources=config.resources, timer=state.timer)
        rewards = RewardWorkers(config, run.resources, run.stack)
        mapping = config.resources.device_mapping
        with gpu_sharing.starting(alone=config.starts_alone("inference")):
            rewards.start()
            trainer = start_preference(config, model, run.resources, run.stack, timer=state.timer)
            gpu_sharing.add(trainer, mapping.training)
            refreshed = RefreshedReference(AnswerLogprobs(trainer)) if _refreshes(config) else None
            reference = refreshed or live_reference(
                config, run, trainer, lambda engine: gpu_sharing.add(engine, mapping.reference or mapping.training)
            )
            # given pairs are compared with the starting policy throughout
            asked = [] if evaluated is None else evaluated.sequences
            for_evaluation = precomputed_reference(config, run, trainer, asked) if refreshed else reference
        rewards.wait()
        weights = start_weight_sync(config, trainer, inference)
        gpu_sharing.follow(weights, trainer)
        engines = PolicyEngines(state=state, weights=weights, policy=trainer, gpu_sharing=gpu_sharing)
        scheduler = rewards.scheduler(inference)
        source = prompt_groups(config, scheduler, state.metrics.warn)
        progress = partial(state.metrics.phase, "generating")
        rollouts = SynchronousRollouts(
            source, config.rollout, seed=config.seed, runner=runner, progress=progress, unit="iteration"
        )
        pairs = SampledPairs(config, rollouts, engines, state, refreshed)
        state.keep([trainer], pairs=pairs)
        evaluators: list[Evaluates] = []
        by_reward = prompt_evaluator(config, scheduler, runner, progress)
        if by_reward is not None:
            evaluators.append(OnPolicyEvaluator(by_reward, engines))
        if config.pair_evaluation is not None and evaluated is not None:
            evaluators.append(preference_evaluator(config.pair_evaluation, evaluated, trainer, for_evaluation))
        return cls(
            config=config,
            run_state=state,
            pairs=pairs,
            trainer=trainer,
            reference=reference,
            evaluator=Evaluators(evaluators) if evaluators else None,
        )

    @classmethod
    def check(cls, config: OnlineDPOConfig) -> Report:
        """Return every problem that can be known before a run, and its plan."""
        return check_run(config, online_dpo_plan, online_dpo_findings)

    @classmethod
    def evaluate(cls, config: OnlineDPOConfig, model: str) -> dict[str, float]:
        """Measure a model by each evaluation that the configuration has, one after the other.

        Args:
            config: The validated configuration.
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
        rewards = RewardWorkers(config, resources, stack)
        inference, runner = start_engines(config, resources, stack, rewards)
        return prompt_evaluator(config, rewards.scheduler(inference), runner)

    @property
    def trained(self) -> TrainingEngine[Any]:
        """The policy."""
        return self.trainer


def _refreshes(config: OnlineDPOConfig) -> bool:
    return config.reference is not None and config.reference.mode == "iteration"


def _evaluated_pairs(config: OnlineDPOConfig) -> PairStep | None:
    """Return the given pairs of an evaluation; None without one."""
    if config.pair_evaluation is None:
        return None
    renderer = load_renderer(config.model)
    return pair_step(load_pairs(config.pair_evaluation, renderer, section="pair_evaluation").samples)
