"""What teachers say finds its way from their micro-batches into a student's."""

from __future__ import annotations

import numpy as np
from tests_support import ragged_policy_samples  # type: ignore[import-not-found]

from roll_like.builtin.pipelines.distill.answers import HiddenAnswers, Targets, assembled, chosen
from roll_like.training.layout import micro_batches
from roll_like.types import TopKAnswers


def test_answers_follow_their_targets_through_any_layout() -> None:
    samples = ragged_policy_samples(seed=3)
    targets = Targets(samples)
    assert targets.count == sum(int(sample.loss_mask.sum()) for sample in samples)
    # a teacher that says the token itself, and its place in the sample
    truth = np.concatenate([np.stack([s.token_ids, np.arange(len(s.token_ids))], 1)[s.loss_mask] for s in samples])
    for packing, ranks, budget in ((True, 2, 64), (False, 1, 200), (True, 3, 100)):
        shards = micro_batches(samples, ranks=ranks, max_tokens=budget, share_prompts=True, packing=packing)
        parts = [
            (
                targets.of(batch),
                TopKAnswers(
                    ids_NK=np.stack([batch.targets, batch.target_ids], 1).astype(np.int32),
                    logprobs_NK=np.zeros((len(batch.targets), 2), np.float32),
                    entropy_N=batch.targets.astype(np.float32),
                ),
            )
            for batches in shards
            for batch in batches
        ]
        whole = assembled(targets.count, parts)
        assert isinstance(whole, TopKAnswers)
        assert np.array_equal(whole.ids_NK, truth)
        assert np.array_equal(whole.entropy_N, truth[:, 0])
        for batch in shards[0]:
            again = chosen(whole, targets.of(batch))
            assert isinstance(again, TopKAnswers)
            assert np.array_equal(again.ids_NK[:, 0], batch.targets)


def test_hidden_states_too() -> None:
    whole = assembled(3, [(np.array([2, 0], np.int32), HiddenAnswers(hidden_NE=np.ones((2, 4), np.float32)))])
    assert isinstance(whole, HiddenAnswers)
    assert whole.hidden_NE.tolist() == [[1] * 4, [0] * 4, [1] * 4]
