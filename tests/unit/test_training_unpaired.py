"""What the driver's handle does on single answers, with ranks whose log-probabilities are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from roll_like.algorithms.preference.paired import DPOLoss
from roll_like.builtin.pipelines.dpo.labelled_data import LabelledSample, Preference
from roll_like.builtin.pipelines.dpo.labelled_objective import LabelledObjective, LabelledStep, labelled_step, of_step
from roll_like.config.training import TrainingConfig
from roll_like.errors import EngineError
from roll_like.registry import PREFERENCE_LOSSES
from roll_like.training.engine import TrainingEngine
from roll_like.training.interface import Share
from roll_like.training.layout import MicroBatch
from roll_like.types import FloatArray, Pair
from roll_like.values import Max, Mean, Sum, reduce

COUNTS = {
    "train/computed_tokens": Sum(8.0),
    "train/padding_tokens": Sum(2.0),
    "time/train_compute": Max(1.0),
}


class TokenCluster:
    """Two ranks of a model that gives a token t, wherever it stands, the log-probability −t/10."""

    name = "training"

    def __init__(self) -> None:
        self.shares: list[Share[MicroBatch]] = []

    def __len__(self) -> int:
        return 2

    def scatter(self, method: Any, shards: Sequence[Any]) -> list[Any]:
        if method.__name__ == "forward":
            return [[logprobs(batch) for batch in shard] for shard in shards]
        assert method.__name__ == "forward_backward"
        self.shares = list(shards)
        rewards = {"preference/reward_chosen": Mean(3.0, 2.0), "preference/reward_rejected": Mean(1.0, 1.0)}
        return [{**COUNTS, **rewards}, {**COUNTS}]

    def everywhere(self, method: Any) -> list[Any]:
        assert method.__name__ in {"optimizer_step", "speed"}
        return [{"time/train_compute": Max(1.0)} for _ in range(2)]


def logprobs(batch: MicroBatch) -> FloatArray:
    return -batch.targets.astype(np.float32) / 10


def labelled(verdicts: Sequence[tuple[int, list[int], bool]]) -> list[LabelledSample]:
    """Answers to prompts of one token."""
    samples = []
    for prompt, answer, label in verdicts:
        tokens = np.array([prompt, *answer], np.int32)
        samples.append(LabelledSample(token_ids=tokens, loss_mask=np.arange(len(tokens)) > 0, desirable=label))
    return samples


def batch(verdicts: Sequence[tuple[int, list[int], bool]]) -> LabelledStep:
    """The same, also after other prompts."""
    return labelled_step(labelled(verdicts), max_tokens=64, baseline=True)


def engine(cluster: TokenCluster, **settings: Any) -> TrainingEngine[LabelledStep]:
    loss = PREFERENCE_LOSSES.get("kto").Config(**settings)
    objective = LabelledObjective(settings=TrainingConfig(max_tokens_per_micro_batch=12), loss_config=loss)
    return TrainingEngine(cluster, objective)  # type: ignore[arg-type]


VERDICTS = [(1, [10, 20], True), (2, [30], False), (3, [5] * 6, True), (4, [40, 2], False), (4, [50], True)]
#: In the order of the batch: five answers, and five after other prompts.
REFERENCE = np.arange(10, dtype=np.float32) - 9


def test_ranks_get_each_answer_once_with_what_is_known_of_it() -> None:
    cluster = TokenCluster()
    samples = batch(VERDICTS)
    report = reduce(engine(cluster).train_step(replace(samples, reference=REFERENCE)))
    assert (report["train/updates"], report["train/padding_fraction"]) == (1.0, 0.25)
    assert report["preference/reward_margin"] == 2.0
    seen = {}
    for share in cluster.shares:
        known = share.shared
        assert len(known.desirable) == len(known.reference) == 5
        for each in share.batches:
            answers, _, counted = each.sequences()
            for answer, counts in zip(answers.tolist(), counted.tolist(), strict=True):
                assert counts == each.weights[each.sample_ids == answer].all()
                if counts:
                    assert answer not in seen
                    seen[answer] = (bool(known.desirable[answer]), float(known.reference[answer]))
    assert seen == {at: (label, float(REFERENCE[at])) for at, (_, _, label) in enumerate(VERDICTS)}


def test_all_ranks_get_the_same_mismatched_answers() -> None:
    cluster = TokenCluster()
    samples = batch(VERDICTS)
    engine(cluster).train_step(replace(samples, reference=REFERENCE))
    first, second = (share.shared.mismatched for share in cluster.shares)
    assert first is not None
    assert second is not None
    # this model does not look at prompts, so that an answer is as likely after any
    expected = [-float(sample.token_ids[sample.loss_mask].sum()) / 10 for sample in samples.mismatched]
    for each in (first, second):
        assert each.logprobs_M.tolist() == pytest.approx(expected)
        assert each.reference_logprobs_M.tolist() == REFERENCE[5:].tolist()
        assert each.tokens_M.tolist() == [int(sample.loss_mask.sum()) for sample in samples.mismatched]


def test_figures_without_a_step_by_hand() -> None:
    samples = batch([(1, [10, 20], True), (2, [30], False)])
    reference = np.array([-4.0, -2.5, -5.0, -3.5], np.float32)
    # log-ratios 1 and −0.5; both answers are as likely after other prompts (−3), so z = (2 + 0.5)/2
    assert [int(sample.token_ids.sum()) for sample in samples.mismatched] == [32, 31]
    found = reduce(engine(TokenCluster(), beta=1.0).measure(replace(samples, reference=reference)))
    loss = 1 - torch.sigmoid(torch.tensor([1 - 1.25, 1.25 + 0.5]))
    assert found["train/loss"] == pytest.approx(float(loss.mean()))
    assert found["preference/baseline"] == pytest.approx(1.25)
    assert found["preference/accuracy"] == 0.5  # the desirable answer is below the baseline, and so is the other one
    assert found["preference/reward_margin"] == pytest.approx(1.5)
    assert "preference/pair_accuracy" not in found


@pytest.mark.parametrize(
    ("reference", "expected"),
    [([-4.0, -3.5, -3.0, -3.5], 0.5), ([-4.0, -3.5, -4.0, -3.5], 1.0), ([-3.0, -3.0, -4.0, -3.5], 0.75)],
)
def test_pairs_are_measured_as_pairs_and_labelled_answers_are_not(reference: list[float], expected: float) -> None:
    verdicts = [(1, [30], True), (1, [10, 20], False), (2, [25, 5], True), (2, [29, 1], False)]
    one, two, three, four = labelled(verdicts)
    pairs = [Pair(chosen=one, rejected=two), Pair(chosen=three, rejected=four)]
    sums = np.array([*reference, *[-3.0] * 4], np.float32)

    def measured(preferences: Sequence[Preference]) -> dict[str, float]:
        step = labelled_step(preferences, max_tokens=64, baseline=True)
        return reduce(engine(TokenCluster()).measure(replace(step, reference=sums)))

    assert measured(pairs)["preference/pair_accuracy"] == expected
    assert "preference/pair_accuracy" not in measured(labelled(verdicts))


def test_a_baseline_needs_a_reference_and_a_loss_on_single_answers() -> None:
    with pytest.raises(EngineError, match="these mismatched samples have none"):
        engine(TokenCluster()).train_step(batch(VERDICTS))
    with pytest.raises(EngineError, match="DPOLoss takes pairs, found single answers"):
        of_step(DPOLoss(DPOLoss.Config()), None, torch.device("cpu"))
