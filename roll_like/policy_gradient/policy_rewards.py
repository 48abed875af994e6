"""Adds what the policy says of a step's samples to their rewards (`roll_like.rewards.of_policy`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from roll_like.algorithms.logprobs import EveryToken
from roll_like.config.sampling import PromptConfig
from roll_like.data.chat import Renderer
from roll_like.errors import FOREIGN_ERRORS, RewardError
from roll_like.policy_gradient.probe import evaluating, untempered_logprobs
from roll_like.registry import REWARDS
from roll_like.rewards.base import RewardConfig, failure
from roll_like.rewards.call import ResultOrError, read_outcomes
from roll_like.rewards.of_policy import Answered, PolicyReward
from roll_like.rewards.scorer import reward_name, scores_task, to_completion
from roll_like.rollout.collection import Collected
from roll_like.training.engine import TrainingEngine
from roll_like.training.interface import RankModel
from roll_like.training.layout import MicroBatch
from roll_like.types import Failure, FloatArray, Group, Scored, TrainingSample


class PolicyRewards:
    """Computes the rewards of the policy for each step, before it is updated.

    Args:
        configs: Their settings; none in most runs, where nothing is computed.
        domains: Names of the rewards of each domain that names its own.
        policy: What is trained.
        renderer: Returns the policy's tokenizer; asked only where there are such rewards.
        max_failure_fraction: `rollout.max_failure_fraction`.
    """

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        domains: Mapping[str, Sequence[str]],
        policy: TrainingEngine[Any],
        renderer: Callable[[], Renderer],
        *,
        max_failure_fraction: float,
    ) -> None:
        self._rewards: list[tuple[RewardConfig, PolicyReward]] = [
            (config, REWARDS.get(config.type)(config)) for config in configs
        ]
        self._domains = domains
        self._forward = EngineForward(policy)
        self._renderer = renderer
        self._accepted = max_failure_fraction

    @classmethod
    def of(cls, config: Any, policy: TrainingEngine[Any], renderer: Callable[[], Renderer]) -> PolicyRewards:
        """Return those of a run; none of pipelines without them, and in a replay, whose groups have theirs."""
        has_some = isinstance(config, PromptConfig) and config.replay is None
        return cls(
            cast(Sequence[RewardConfig], config.policy_rewards) if has_some else (),
            config.domain_rewards if has_some else {},
            policy,
            renderer,
            max_failure_fraction=config.rollout.max_failure_fraction,
        )

    def add(self, collected: Collected, step: int) -> Collected:
        """Return a step's groups with these rewards added.

        Samples that one of them could not score are failures; a group that has no other sample is rejected.

        Raises:
            GenerationError: Too many samples have become failures.
        """
        if not self._rewards:
            return collected
        groups = list(collected.groups)
        for config, reward in self._rewards:
            groups = self._with_reward(groups, config, reward)
        new = tuple(
            failure
            for before, after in zip(collected.groups, groups, strict=True)
            for failure in after.failures[len(before.failures) :]
        )
        rewarded = replace(
            collected,
            groups=tuple(group for group in groups if group.samples),
            rejected=(*collected.rejected, *(group for group in groups if not group.samples)),
            failures=(*collected.failures, *new),
        )
        if new:
            rewarded.refuse_too_many_failures(self._accepted, f"step {step + 1}")
        return rewarded

    def _with_reward(
        self, groups: Sequence[Group[Scored]], config: RewardConfig, reward: PolicyReward
    ) -> list[Group[Scored]]:
        meant = [scores_task(config, group.task, self._domains) for group in groups]
        asked = [
            Answered(scored=sample, completion=to_completion(sample.trajectory))
            for group, is_meant in zip(groups, meant, strict=True)
            for sample in group.samples
            if is_meant
        ]
        if not asked:
            return list(groups)
        results = iter(self._measured(reward, asked))
        return [
            _added(group, config, results) if is_meant else group for group, is_meant in zip(groups, meant, strict=True)
        ]

    def _measured(self, reward: PolicyReward, asked: Sequence[Answered]) -> list[ResultOrError]:
        """Return a result for each sample; a `RewardError` for all where the reward raised."""
        renderer = self._renderer()
        try:
            outcomes = reward.measure(asked, self._forward, renderer)
        except _ForwardError as error:  # the policy's own: the run cannot go on
            raise error.raised from None
        except RewardError as error:
            return [error] * len(asked)
        except FOREIGN_ERRORS as error:
            return [failure(error)] * len(asked)
        return read_outcomes(outcomes, [sample.completion for sample in asked], method="measure")


def _added(group: Group[Scored], config: RewardConfig, results: Iterator[ResultOrError]) -> Group[Scored]:
    """Return a group with the next results, one for each sample."""
    name = reward_name(config)
    samples: list[Scored] = []
    failures = list(group.failures)
    for sample in group.samples:
        result = next(results)
        if isinstance(result, RewardError):
            failures.append(Failure(stage="reward", name=name, error=str(result), origin=group.task.origin))
            continue
        samples.append(
            replace(
                sample,
                reward=sample.reward + config.weight * result.value,
                rewards={**sample.rewards, name: result.value},
                weights={**sample.weights, name: config.weight},
                details={**sample.details, **{f"{name}/{key}": value for key, value in result.details.items()}},
            )
        )
    return replace(group, samples=tuple(samples), failures=tuple(failures))


class _ForwardError(Exception):
    """Carries what the policy's forward pass raised through a reward, whose own errors lose its samples alone."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(str(raised))
        self.raised = raised


class EngineForward:
    """A trained model's forward pass as rewards ask for it: `PolicyForward`."""

    def __init__(self, policy: TrainingEngine[Any]) -> None:
        self._policy = policy

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Return the log-probability of each target."""
        return self._ask(untempered_logprobs, samples)

    def entropies(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Return the entropy at each target."""
        return self._ask(untempered_entropies, samples)

    def certainties(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Return KL(uniform ‖ policy) at each target."""
        return self._ask(untempered_certainties, samples)

    def _ask(
        self, question: Callable[[Any, RankModel, MicroBatch], FloatArray], samples: Sequence[TrainingSample]
    ) -> list[FloatArray]:
        try:
            return self._policy.ask(question, samples)
        except Exception as error:
            raise _ForwardError(error) from error


@torch.no_grad()
def untempered_entropies(objective: object, model: RankModel, batch: MicroBatch) -> FloatArray:
    """Return the entropy before every target at temperature 1, without dropout, shape [N]. Called in a rank."""
    del objective
    with evaluating(model):
        entropies_N: FloatArray = model(batch, 1.0)[1].float().cpu().numpy()
    return entropies_N


@torch.no_grad()
def untempered_certainties(objective: object, model: RankModel, batch: MicroBatch) -> FloatArray:
    """Return KL(uniform ‖ policy) before every target at temperature 1, shape [N]. Called in a rank."""
    del objective
    with evaluating(model):
        certainties_N: FloatArray = model(batch, 1.0, EveryToken())[0].float().cpu().numpy()
    return certainties_N
