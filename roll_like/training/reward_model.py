"""The driver's handle on the ranks of a reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roll_like.cluster import Cluster
from roll_like.config.sections import TrainingConfig
from roll_like.data.scored_pairs import ScoredPair
from roll_like.errors import EngineError
from roll_like.training.engine import with_padding_fraction
from roll_like.training.handle import RanksHandle
from roll_like.training.layout import pair_batches
from roll_like.training.reward_model_worker import RewardModelShare, RewardModelWorker
from roll_like.types import IntArray, TrainingSample
from roll_like.values import Metric, Sum, merge


class RewardModelEngine(RanksHandle[RewardModelWorker]):
    """Splits pairs of conversations over ranks and runs them.

    Args:
        cluster: Started ranks.
        training: The `training` section.
        pad_token_id: The token that the model, once exported, takes for padding.
    """

    def __init__(self, cluster: Cluster[RewardModelWorker], training: TrainingConfig, *, pad_token_id: int) -> None:
        super().__init__(cluster)
        self._training = training
        self._pad_token_id = pad_token_id

    def train_step(self, pairs: Sequence[ScoredPair]) -> Mapping[str, Metric]:
        """Take one optimizer step over pairs.

        Raises:
            EngineError: A pair is longer than a row may be, or a conversation is nothing but padding.
        """
        parts = self.cluster.scatter(RewardModelWorker.train, self._shares(pairs))
        return with_padding_fraction(merge([{"train/updates": Sum(1.0)}, *parts]))

    def measure(self, pairs: Sequence[ScoredPair]) -> dict[str, Metric]:
        """Return the figures of pairs under the current weights, without a step."""
        return merge(self.cluster.scatter(RewardModelWorker.measure, self._shares(pairs)))

    def _shares(self, pairs: Sequence[ScoredPair]) -> list[RewardModelShare]:
        shards = pair_batches(
            read_samples(pairs, self._pad_token_id),
            None,
            ranks=len(self.cluster),
            max_tokens=self._training.max_tokens_per_micro_batch,
        )
        margins = np.array([pair.margin for pair in pairs], np.float32)
        return [RewardModelShare(batches=batches, margins=margins) for batches in shards]


def read_samples(pairs: Sequence[ScoredPair], pad_token_id: int) -> list[TrainingSample]:
    """Return the conversations of pairs, chosen and rejected in turn, with a target at the place after their end.

    A score is read where the next token would be foretold: at the last token that is not padding, which is where
    transformers' sequence classifiers read it, also where a conversation itself ends with that token. What follows it
    changes nothing and is left out; one more token stands for the place after it and is not computed.

    Args:
        pairs: What is to be scored.
        pad_token_id: The token that the exported model takes for padding.

    Raises:
        EngineError: A conversation is nothing but padding.
    """
    samples = []
    for index, pair in enumerate(pairs):
        read = [_until_padding(each.token_ids, pad_token_id, pair.origin) for each in pair.sequences]
        shortest = min(map(len, read))
        differ = np.flatnonzero(read[0][:shortest] != read[1][:shortest])
        shared = int(differ[0]) if len(differ) else shortest
        samples += [
            TrainingSample(
                group_id=str(index),
                token_ids=np.append(tokens, tokens[-1]),
                prompt_length=shared,
                sampled=np.arange(len(tokens) + 1) == len(tokens),
            )
            for tokens in read
        ]
    return samples


def _until_padding(token_ids: IntArray, pad_token_id: int, origin: str) -> IntArray:
    places = np.flatnonzero(token_ids != pad_token_id)
    if not len(places):
        raise EngineError(
            f"{origin}: a conversation holds nothing but the padding token {pad_token_id}", fix="correct the row"
        )
    return token_ids[: places[-1] + 1]
