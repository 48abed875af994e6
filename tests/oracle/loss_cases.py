"""Random batches of tokens, in our form and as the padded tensors that other libraries take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from algorithm_samples import NO_CORRECTION, make_policy_sample
from hypothesis import strategies as st
from torch import Tensor

from roll_like.algorithms.aggregation import Aggregation, token_weights
from roll_like.algorithms.logprobs import token_logprobs
from roll_like.algorithms.losses import BatchTokens, LossInputs, PolicyLoss, policy_objective
from roll_like.config.algorithm import CorrectionConfig, KLConfig
from roll_like.registry import LOSSES
from roll_like.values import reduce

#: The constant of `token_sum_norm`.
MAX_RESPONSE = 11


@dataclass(frozen=True)
class Batch:
    """Tokens of sequences, padded to [B, T], in float64.

    Attributes:
        mask_BT: 1 where the policy sampled the token.
        lengths: Of each sequence, with the tokens that the policy did not sample.
        logprobs_BT: Of the policy.
        old_BT, behaviour_BT, reference_BT: Of the other three.
        advantages_BT: Of each token; of whole sequences where `sequence_advantages`.
        entropy_BT: Of the policy at each token.
        draws_BT: Numbers in [0, 1).
        one_episode: Whether our side takes the rows for turns of one episode, which theirs takes for sequences.
    """

    mask_BT: Tensor
    lengths: list[int]
    logprobs_BT: Tensor
    old_BT: Tensor
    behaviour_BT: Tensor
    reference_BT: Tensor
    advantages_BT: Tensor
    entropy_BT: Tensor
    draws_BT: Tensor
    one_episode: bool = False

    @property
    def sampled(self) -> Tensor:
        return self.mask_BT > 0

    @property
    def advantages_B(self) -> Tensor:
        """Of sequences, where all of a sequence's tokens have the same."""
        return self.advantages_BT[:, 0]

    def inputs(self, logprobs_BT: Tensor, how: Aggregation) -> LossInputs:
        """Ours: the sampled tokens of all sequences, one after the other."""
        rows, _ = torch.nonzero(self.sampled, as_tuple=True)
        samples = [make_policy_sample(row) for row in self.mask_BT.int().tolist()]
        weights = torch.from_numpy(np.stack(token_weights(samples, how, max_response_tokens=MAX_RESPONSE)))
        return LossInputs(
            logprobs_N=logprobs_BT[self.sampled],
            old_logprobs_N=self.old_BT[self.sampled],
            behaviour_logprobs_N=self.behaviour_BT[self.sampled],
            reference_logprobs_N=self.reference_BT[self.sampled],
            advantages_N=self.advantages_BT[self.sampled],
            weights_N=weights[self.sampled].double(),
            sequence_N=torch.zeros_like(rows) if self.one_episode else rows,
            sequences=1 if self.one_episode else len(self.mask_BT),
            turn_N=rows,
            turns=len(self.mask_BT),
            entropy_N=self.entropy_BT[self.sampled],
            draws_N=self.draws_BT[self.sampled],
        )


def tokens(logprobs: list[list[float]], **rows: Any) -> Batch:
    """Sequences as they are given; what is not equals the policy, with advantage 1 and mask 1."""
    logprobs_BT = torch.tensor(logprobs, dtype=torch.float64)
    given = {name: torch.tensor(value, dtype=torch.float64) for name, value in rows.items()}
    same = dict.fromkeys(("logprobs_BT", "old_BT", "behaviour_BT", "reference_BT"), logprobs_BT)
    ones = dict.fromkeys(("mask_BT", "advantages_BT", "entropy_BT", "draws_BT"), torch.ones_like(logprobs_BT))
    return Batch(lengths=[len(row) for row in logprobs], **(same | ones | given))


def loss_and_gradient(
    name: str,
    batch: Batch,
    *,
    how: Aggregation = "token_mean",
    kl: KLConfig | None = None,
    entropy_coefficient: float = 0.0,
    correction: CorrectionConfig = NO_CORRECTION,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Our objective, and its gradient for log-probabilities, [B, T]."""
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    inputs = batch.inputs(logprobs_BT, how)
    objective, _ = policy_objective(inputs, _loss(name, inputs, settings), kl, entropy_coefficient, correction)
    (gradient_BT,) = torch.autograd.grad(objective, logprobs_BT)
    return objective, gradient_BT


def figures(
    name: str, batch: Batch, *, correction: CorrectionConfig = NO_CORRECTION, **settings: Any
) -> dict[str, float]:
    """The figures of our objective, reduced as a run logs them."""
    inputs = batch.inputs(batch.logprobs_BT, "token_mean")
    return reduce(policy_objective(inputs, _loss(name, inputs, settings), None, 0.0, correction)[1])


def _loss(name: str, inputs: LossInputs, settings: dict[str, Any]) -> PolicyLoss:
    plugin = LOSSES.get(name)
    loss = plugin(plugin.Config(**settings))
    if not loss.needs_batch:
        return loss
    names = ("logprobs_N", "old_logprobs_N", "advantages_N", "draws_N")
    return loss.of_batch(BatchTokens(**{name: getattr(inputs, name).detach() for name in names}))


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    sequence_advantages: bool = False,
    smallest_response: int = 0,
    distances: tuple[float, ...] = (0.02, 0.3, 1.5),
    zeros: bool = True,
) -> Batch:
    """One to five ragged sequences; policies that nearly agree, or do not at all.

    Args:
        sequence_advantages: Whether all tokens of a sequence have the same advantage.
        smallest_response: Leading tokens of a sequence that are sampled in any case.
        distances: Between two policies' log-probabilities of a token, standard deviations in nats.
        zeros: Whether some sequences may have advantage 0.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = draw(st.integers(1, 5))
    lengths = [int(random.integers(max(1, smallest_response), 9)) for _ in range(rows)]
    shape = rows, max(lengths)
    inside = np.arange(shape[1]) < np.array(lengths)[:, None]
    density = random.choice([1.0, 0.7, 0.3, 0.0], (rows, 1))
    mask = inside & (random.random(shape) < density)
    mask[:, :smallest_response] = True
    if not mask.any():
        mask[0, 0] = True
    distance = draw(st.sampled_from(distances))
    old = -random.exponential(1.5, shape)

    def nearby() -> Any:
        return -np.abs(old + random.normal(0, distance, shape))  # never equal, so that no ranking has ties

    advantages = random.normal(0, 1, (rows, 1) if sequence_advantages else shape) * np.ones(shape)
    if zeros and draw(st.booleans()):
        advantages[random.random(rows) < 0.3] = 0.0
    arrays = {
        "mask_BT": mask,
        "logprobs_BT": nearby(),
        "old_BT": old,
        "behaviour_BT": nearby(),
        "reference_BT": nearby(),
        "advantages_BT": advantages,
        "entropy_BT": random.exponential(1, shape),
        "draws_BT": random.random(shape),
    }
    tensors = {name: torch.from_numpy(np.asarray(array, np.float64)) for name, array in arrays.items()}
    return Batch(lengths=lengths, **tensors)


def far_apart(batch: Batch) -> Batch:
    """The same batch with some tokens that the policy all but abandoned or discovered since the reference."""
    shift = torch.where(batch.draws_BT < 0.5, -15.0, 15.0) * (batch.draws_BT % 0.25 < 0.1)
    return replace(batch, reference_BT=batch.reference_BT + shift)


def as_turns(batch: Batch) -> Batch:
    """The same batch with its rows as turns of one episode, for libraries that know sequences only."""
    return replace(batch, one_episode=True)


@dataclass(frozen=True)
class HeadCase:
    """A batch whose log-probabilities come from hidden states [B, T, D] and an output projection [V, D], in float32.

    Attributes:
        batch: The rest; its `logprobs_BT` are those of the states.
        ids_BT: The tokens.
        temperature: Logits are divided by it.
    """

    batch: Batch
    hidden_BTD: Tensor
    weight_VD: Tensor
    ids_BT: Tensor
    temperature: float


def head_logprobs(case: HeadCase, hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
    """Ours, [B, T]; 0 where not sampled."""
    logprobs_N, _ = token_logprobs(
        hidden_BTD[case.batch.sampled],
        weight_VD,
        case.ids_BT[case.batch.sampled],
        temperature=case.temperature,
        chunk_tokens=3,
        chunk_vocab=4,
    )
    return torch.zeros_like(case.batch.mask_BT).masked_scatter(case.batch.sampled, logprobs_N)


def loss_and_head_gradients(name: str, case: HeadCase, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Our objective in float64, and its gradients for the hidden states and the projection."""
    hidden_BTD, weight_VD = (array.double().requires_grad_() for array in (case.hidden_BTD, case.weight_VD))
    logprobs_BT = head_logprobs(case, hidden_BTD, weight_VD)
    loss, gradient_BT = loss_and_gradient(name, replace(case.batch, logprobs_BT=logprobs_BT.detach()), **settings)
    return loss, *torch.autograd.grad(logprobs_BT, [hidden_BTD, weight_VD], gradient_BT)


@st.composite
def head_cases(draw: st.DrawFn, *, distances: tuple[float, ...] = (0.02, 0.3, 1.5)) -> HeadCase:
    """Batches with one advantage a sequence and no empty sequence, from a vocabulary of 9 and a width of 4."""
    batch = draw(batches(sequence_advantages=True, smallest_response=1))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape, distance = batch.mask_BT.shape, draw(st.sampled_from(distances))
    # small enough that a log-probability in float32 is exact to 1e-6
    hidden, weight = (random.normal(0, 0.7, size).astype(np.float32) for size in ((*shape, 4), (9, 4)))
    case = HeadCase(
        batch,
        torch.from_numpy(hidden),
        torch.from_numpy(weight),
        torch.from_numpy(random.integers(0, 9, shape)),
        draw(st.sampled_from([1.0, 0.7])),
    )
    logprobs = head_logprobs(case, case.hidden_BTD.double(), case.weight_VD.double()).detach()
    others = {
        name: (logprobs + torch.from_numpy(random.normal(0, distance, shape))).float().double()
        for name in ("old_BT", "behaviour_BT", "reference_BT")
    }
    rounded = batch.advantages_BT.float().double()
    return replace(case, batch=replace(batch, logprobs_BT=logprobs, advantages_BT=rounded, **others))


any_batch = batches()
#: One advantage a sequence, and no empty one, which TRL, torchrl, liger-kernel and GMPO in verl count and we do not.
sequences = batches(sequence_advantages=True, smallest_response=1)
heads = head_cases()

#: Aggregations as verl calls them.
MODES = {
    "token_mean": "token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "token_sum_norm": "seq-mean-token-sum-norm",
}
#: PPO's bounds, as the libraries call them.
WIDE = {"clip_low": 0.2, "clip_high": 0.28}
LIGER_WIDE = {"epsilon_low": 0.2, "epsilon_high": 0.28}
