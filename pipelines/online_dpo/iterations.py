"""Iterations of online DPO: when they begin, their pairs, and their reference."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from roll_like.builtin.pipelines.dpo.preferences import PrecomputedReference, SequenceReference, answers_of
from roll_like.builtin.pipelines.online_dpo.config import OnlineDPOConfig
from roll_like.builtin.pipelines.online_dpo.pairs import decode_pairs, encode_pairs, pair_groups
from roll_like.data.order import ItemSource, Order
from roll_like.errors import CheckpointError, GenerationError
from roll_like.policy_gradient.workers import Workers
from roll_like.rollout.metrics import rollout_metrics
from roll_like.rollout.source import GroupSource, RolloutSource
from roll_like.run.state import RunState
from roll_like.types import FloatArray, Pair, TrainingSample
from roll_like.values import Last, merge

#: How often in a row an iteration may sample without getting a single pair.
COLLECTIONS = 5


def in_steps_of(state: RunState, source: GroupSource) -> GroupSource:
    """Return a source that is told the run's step when groups are collected, not how often they were collected."""
    return replace(source, begin_step=lambda _: source.begin_step(state.finished))


class RefreshedReference:
    """The policy at the start of an iteration: it computes the iteration's pairs before it learns from them."""

    def __init__(self, policy: SequenceReference) -> None:
        self._policy = policy
        self._logprobs = PrecomputedReference({})

    def refresh(self, pairs: Sequence[Pair]) -> FloatArray:
        """Return the log-probability of each answer under the policy as it is now, and keep it."""
        sequence_logprobs = self._policy(answers_of(pairs))
        self.recall(pairs, sequence_logprobs)
        return sequence_logprobs

    def recall(self, pairs: Sequence[Pair], sequence_logprobs: FloatArray) -> None:
        """Keep what an earlier process computed."""
        self._logprobs = PrecomputedReference.of(answers_of(pairs), sequence_logprobs)

    def __call__(self, samples: Sequence[TrainingSample]) -> FloatArray:
        """Return the log-probability of each answer of this iteration."""
        return self._logprobs(samples)


class SampledPairs:
    """Pairs out of the policy's own answers: when an iteration's pairs are used up, the next ones are sampled.

    Args:
        rollouts: Brings an iteration's scored groups.
        workers: What samples them; the run takes the figures of an iteration, with the step that begins it.
        reference: What is computed anew in each iteration, where the reference is refreshed.
    """

    def __init__(
        self,
        config: OnlineDPOConfig,
        rollouts: RolloutSource,
        workers: Workers,
        reference: RefreshedReference | None = None,
    ) -> None:
        self._config = config
        self._section = config.pairs
        self._rollouts = rollouts
        self._workers = workers
        self._reference = reference
        self._iteration = 0
        self._collections = 0
        self._left = 0
        self._pairs: tuple[Pair, ...] = ()
        self._encoded = ""
        self._order: Order[Pair] | None = None

    def take(self, count: int) -> list[Pair]:
        """Return the pairs of a step; where an iteration begins, sample its pairs first.

        An iteration with fewer pairs than `count` has all of them in each of its steps.

        Raises:
            GenerationError: No group gave a pair, or too many samples were lost.
        """
        if self._left == 0:
            self._begin(count)
        assert self._order is not None, "an iteration has begun"
        self._left -= 1
        return self._order.take(min(count, len(self._pairs)))

    def state(self) -> dict[str, Any]:
        """Return the iteration with the pairs that it has left to train on; plain JSON."""
        unfinished = self._left > 0 and self._order is not None
        return {
            "iteration": self._iteration,
            "collections": self._collections,
            "left": self._left,
            "version": self._workers.weights.version,
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
        self._workers.weights.version = state["version"]
        self._rollouts.load_state(state["rollouts"])
        if state["pairs"] is None:
            return
        pairs, reference_logprobs = decode_pairs(state["pairs"])
        if self._reference is not None:
            if reference_logprobs is None:
                raise CheckpointError(
                    "the checkpoint's pairs have no log-probabilities of the reference",
                    fix="set `reference` as it was, or start a new run",
                )
            self._reference.recall(pairs, reference_logprobs)
        self._order = self._hold(pairs, state["pairs"])
        self._order.load_state(state["order"])

    def _begin(self, pairs_per_step: int) -> None:
        """Sample until there are pairs."""
        for _ in range(COLLECTIONS):
            if pairs := self._collect():
                break
        else:
            raise GenerationError(
                f"iteration {self._iteration + 1} sampled {COLLECTIONS} times and no group gave a pair: rewards of a "
                f"group are equal, or closer than pairs.min_margin: {self._section.min_margin:g}",
                fix="look at the answers in the run's folder, raise rollout.samples_per_prompt or "
                "rollout.temperature, lower pairs.min_margin, or use rewards that tell answers apart",
            )
        self._iteration += 1
        reference_logprobs = None if self._reference is None else self._reference.refresh(pairs)
        self._order = self._hold(pairs, encode_pairs(pairs, reference_logprobs))
        self._left = self._section.steps_for(len(pairs), pairs_per_step)
        self._workers.state.note({"iteration/number": Last(self._iteration), "iteration/steps": Last(self._left)})

    def _collect(self) -> tuple[Pair, ...]:
        with self._workers.sampling() as sync:
            collected = self._rollouts.collect(self._collections)
        seed = np.random.SeedSequence([self._config.seed, self._collections, 1]).generate_state(1)[0]
        self._collections += 1
        lost = [group for group in collected.rejected if len(group.samples) < 2]
        pairs, metrics = pair_groups((*collected.groups, *lost), self._section, int(seed))
        self._workers.state.note(
            merge([sync, rollout_metrics(collected, self._workers.weights.version), metrics]), collected
        )
        return pairs

    def _hold(self, pairs: tuple[Pair, ...], encoded: str) -> Order[Pair]:
        """Keep an iteration's pairs and return the order in which they are trained on."""
        self._pairs, self._encoded = pairs, encoded
        drawn = ItemSource(name=f"iteration {self._iteration}", key="rollout", weight=1.0, items=pairs)
        fingerprint = hashlib.sha256(b"".join(pair.content() for pair in pairs)).hexdigest()
        return Order([drawn], fingerprint, seed=self._config.seed, shuffle=self._section.shuffle, limit="rollout")
