"""What preference runs on the policy's own answers are made of: iterations, their pairs and their reference."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.dpo.objective import AnswerLogprobs
from roll_like.builtin.pipelines.dpo.precomputed_reference import PrecomputedReference
from roll_like.builtin.pipelines.dpo.preferences import (
    PreferenceEvaluator,
    References,
    Trainer,
    answers_of,
    batch_of,
    evaluate_preferences,
    evaluated_preferences_of,
    references_of,
    start_preference,
)
from roll_like.builtin.pipelines.online_dpo.config import prompts_of
from roll_like.builtin.pipelines.online_dpo.pairs import Paired, PairingRule, decode_pairs, encode_pairs, pair_groups
from roll_like.builtin.pipelines.online_dpo.rollouts import Evaluators, OnPolicyEvaluator, PolicyEngines, Samples
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.data.order import Drawn, Order
from roll_like.data.pairs import PairSample
from roll_like.errors import CheckpointError, GenerationError
from roll_like.inference.worker import InferenceWorker
from roll_like.models.load import resolve_model
from roll_like.policy_gradient.reward_workers import Judging, prompt_evaluator, prompt_rollouts
from roll_like.policy_gradient.start import shares_gpus, start_inference, start_weight_sync
from roll_like.policy_gradient.workers import evaluate_model
from roll_like.rollout.collection import Collected
from roll_like.rollout.metrics import rollout_metrics
from roll_like.rollout.source import RolloutSource
from roll_like.run.launch import Evaluates, RunContext
from roll_like.types import FloatArray, TrainingSample
from roll_like.values import Last, Metrics, merge

#: How often in a row an iteration may sample without getting a single pair.
COLLECTIONS = 5


class Notes(Protocol):
    """Takes figures and samples of the step under way: `RunState`, or a fake."""

    def note(self, figures: Metrics, collected: Collected | None = None) -> None:
        """Keep them for the step's log."""


class Sums(Protocol):
    """Says how likely a policy finds answers: `AnswerLogprobs`, or a fake."""

    def sums(self, samples: Sequence[TrainingSample]) -> FloatArray:
        """Return the log-probability of each answer, shape [len(samples)]."""


class RefreshedReference:
    """The policy at the start of an iteration: it is asked about the iteration's pairs before it learns from them.

    Args:
        policy: The policy being trained.
    """

    def __init__(self, policy: Sums) -> None:
        self._policy = policy
        self._said = PrecomputedReference({})

    def refresh(self, pairs: Sequence[PairSample]) -> FloatArray:
        """Ask the policy as it is now; return the log-probability of each answer."""
        sums = self._policy.sums(answers_of(pairs))
        self.recall(pairs, sums)
        return sums

    def recall(self, pairs: Sequence[PairSample], sums: FloatArray) -> None:
        """Take what an earlier process was told."""
        self._said = PrecomputedReference.of(answers_of(pairs), sums)

    def sums(self, samples: Sequence[TrainingSample]) -> FloatArray:
        """Return the log-probability of each answer of this iteration."""
        return self._said.sums(samples)


class SampledPairs:
    """Pairs out of the policy's own answers: when an iteration's pairs are used up, the next ones are sampled.

    Args:
        config: The run's configuration; has an `iterations` section.
        rollouts: Brings an iteration's judged groups.
        engines: What samples them.
        notes: Takes the figures of an iteration, with the step that begins it.
        reference: What is asked anew in each iteration, where the reference is refreshed.
    """

    def __init__(
        self,
        config: DPOConfig,
        rollouts: RolloutSource,
        engines: Samples,
        notes: Notes,
        reference: RefreshedReference | None = None,
    ) -> None:
        section = config.iterations
        assert section is not None, "the caller asked"
        self._config = config
        self._section = section
        self._rule = PairingRule(pairing=section.pairing, min_margin=section.min_margin, truncated=section.truncated)
        self._rollouts = rollouts
        self._engines = engines
        self._notes = notes
        self._reference = reference
        self._iteration = 0
        self._collections = 0
        self._left = 0
        self._pairs: tuple[PairSample, ...] = ()
        self._encoded = ""
        self._order: Order[PairSample] | None = None

    def take(self, count: int) -> list[PairSample]:
        """Return the pairs of a step; where an iteration begins, sample its pairs first.

        An iteration with fewer pairs than `count` has all of them in each of its steps.

        Raises:
            GenerationError: No group gave a pair, or too many samples were lost.
        """
        if self._left == 0:
            self._begin(count)
        assert self._order is not None, "an iteration has begun"
        self._left -= 1
        self._engines.fall_behind()
        return self._order.take(min(count, len(self._pairs)))

    def state(self) -> dict[str, Any]:
        """Return the iteration with the pairs that it has left to train on; plain JSON."""
        unfinished = self._left > 0 and self._order is not None
        return {
            "iteration": self._iteration,
            "collections": self._collections,
            "left": self._left,
            "rollouts": self._rollouts.state(),
            "order": self._order.state() if unfinished and self._order is not None else None,
            "pairs": self._encoded if unfinished else None,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            CheckpointError: The pairs are damaged, or prompts, seed or reference are others.
        """
        self._iteration, self._collections, self._left = state["iteration"], state["collections"], state["left"]
        self._rollouts.load_state(state["rollouts"])
        if state["pairs"] is None:
            return
        pairs, sums = decode_pairs(state["pairs"])
        if self._reference is not None:
            if sums is None:
                raise CheckpointError(
                    "the checkpoint's pairs come without what their reference said",
                    fix="set `reference` as it was, or start a new run",
                )
            self._reference.recall(pairs, sums)
        self._order = self._hold(pairs, state["pairs"])
        self._order.load_state(state["order"])

    def _begin(self, pairs_per_step: int) -> None:
        """Sample until there are pairs."""
        for _ in range(COLLECTIONS):
            paired = self._collect()
            if paired.pairs:
                break
        else:
            raise GenerationError(
                f"iteration {self._iteration + 1} sampled {COLLECTIONS} times and no group gave a pair: rewards of a "
                f"group are equal, or closer than iterations.min_margin: {self._section.min_margin:g}",
                fix="look at the answers in the run's folder, raise iterations.rollout.samples_per_prompt or "
                "temperature, lower iterations.min_margin, or use rewards that tell answers apart",
            )
        self._iteration += 1
        sums = None if self._reference is None else self._reference.refresh(paired.pairs)
        self._order = self._hold(paired.pairs, encode_pairs(paired.pairs, sums))
        self._left = self._section.steps_for(len(paired.pairs), pairs_per_step)
        self._notes.note({"iteration/number": Last(self._iteration), "iteration/steps": Last(self._left)})

    def _collect(self) -> Paired:
        with self._engines.sampling() as sync:
            collected = self._rollouts.collect(self._collections)
        seed = np.random.SeedSequence([self._config.seed, self._collections, 1]).generate_state(1)[0]
        self._collections += 1
        lost = [group for group in collected.rejected if len(group.samples) < 2]
        paired = pair_groups((*collected.groups, *lost), self._rule, int(seed))
        self._notes.note(merge([sync, rollout_metrics(collected, self._engines.version), paired.metrics]), collected)
        return paired

    def _hold(self, pairs: tuple[PairSample, ...], encoded: str) -> Order[PairSample]:
        """Keep an iteration's pairs and return the order in which they are trained on."""
        self._pairs, self._encoded = pairs, encoded
        drawn = Drawn(name=f"iteration {self._iteration}", key="iterations", weight=1.0, items=pairs)
        fingerprint = hashlib.sha256(b"".join(pair.content() for pair in pairs)).hexdigest()
        data = self._config.data
        return Order([drawn], fingerprint, seed=self._config.seed, shuffle=data.shuffle, limit="iterations")


@dataclass(frozen=True, kw_only=True)
class IterationParts:
    """What a preference run is made of that samples its pairs.

    Attributes:
        trainer: The policy.
        pairs: Its own answers, in pairs.
        references: What it is compared with.
        evaluator: What measures it; None without an evaluation.
    """

    trainer: Trainer
    pairs: SampledPairs
    references: References
    evaluator: Evaluates | None


def start_iterations(config: DPOConfig, run: RunContext) -> IterationParts:
    """Start trainer, engines and reward workers, side by side, and put together what samples pairs.

    Args:
        config: The run's configuration; has an `iterations` section.
        run: What it is built on; comes back where a resumed run left it.

    Raises:
        RollLikeError: One of them did not start.
    """
    state, prompts = run.state, prompts_of(config)
    state.metrics.phase("preparing the model")
    evaluated = evaluated_preferences_of(config)
    model = resolve_model(config.model)
    runner = run.stack.enter_context(DriverLoop())
    state.metrics.phase("starting workers")
    inference = start_inference(prompts, model, run.resources, run.stack)
    wait_for_inference = inference.begin(InferenceWorker.start)  # loads while the trainer does
    judging = Judging(prompts, run.resources, run.stack)
    judging.start()
    trainer = start_preference(config, model, run.resources, run.stack, timer=state.timer)
    refreshed = (
        None
        if config.reference is None or config.reference.refresh == "never"
        else RefreshedReference(AnswerLogprobs(trainer))
    )
    # one that is refreshed is asked about given pairs, too: they are compared with the starting policy throughout
    asked = evaluated is not None or refreshed is None
    about = [] if evaluated is None else batch_of(config, evaluated.samples).sequences
    said = references_of(config, run, trainer, about) if asked else None
    wait_for_inference()
    judging.wait()
    engines = PolicyEngines(
        state=state,
        runner=runner,
        inference=inference,
        weights=start_weight_sync(prompts, trainer.cluster, inference),
        shared=[trainer] if shares_gpus(prompts, prompts.resources.device_mapping.training) else [],
    )
    scheduler = judging.scheduler(inference, lambda done, total: state.metrics.phase("generating", done, total))
    rollouts = prompt_rollouts(prompts, scheduler, runner, state.metrics.warn, unit="iteration")
    pairs = SampledPairs(config, rollouts, engines, state, refreshed)
    state.keep([trainer], pairs=pairs)
    evaluators: list[Evaluates] = []
    by_reward = prompt_evaluator(prompts, scheduler, runner)
    if by_reward is not None:
        evaluators.append(OnPolicyEvaluator(by_reward, engines))
    if evaluated is not None and said is not None:
        evaluators.append(PreferenceEvaluator(config, evaluated, trainer, said))
    references: References | None = refreshed or said
    assert references is not None, "one of the two is there"
    return IterationParts(
        trainer=trainer, pairs=pairs, references=references, evaluator=Evaluators(evaluators) if evaluators else None
    )


def evaluate_iterations(config: DPOConfig, model_path: str) -> dict[str, float]:
    """Measure a model by the configuration's evaluations, of pairs and of prompts, without training.

    Raises:
        ConfigError: The configuration has neither.
    """
    assert config.iterations is not None, "the caller asked"
    figures: dict[str, float] = {}
    if config.evaluation is not None or config.iterations.evaluation is None:
        figures |= evaluate_preferences(config, model_path)
    if config.iterations.evaluation is not None:
        figures |= evaluate_model(
            prompts_of(config),
            model_path,
            Judging,
            lambda prompts, judging, engines, runner: prompt_evaluator(prompts, judging.scheduler(engines), runner),
        )
    return figures
