"""Random pairs and samples, in our form and as the padded tensors that other libraries take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from roll_like.algorithms.logprobs import token_logprobs
from roll_like.algorithms.preference.base import MismatchedResponses, PairInputs, UnpairedInputs, sequence_logprobs
from roll_like.algorithms.preference.objective import preference_objective
from roll_like.registry import PREFERENCE_LOSSES
from roll_like.values import reduce


@dataclass(frozen=True)
class Responses:
    """Responses, one a row, padded to [B, T], in float64. Of pairs, chosen ones come first, then rejected ones.

    Attributes:
        mask_BT: 1 where a response has a token.
        logprobs_BT, reference_BT: Of the policy and of the reference model.
        desirable_B: Of samples that are no pairs.
        other_mask_BT, other_logprobs_BT, other_reference_BT: The same of mismatched responses.
    """

    mask_BT: Tensor
    logprobs_BT: Tensor
    reference_BT: Tensor
    desirable_B: Tensor
    other_mask_BT: Tensor
    other_logprobs_BT: Tensor
    other_reference_BT: Tensor

    @property
    def lengths_B(self) -> Tensor:
        return self.mask_BT.sum(1).long()

    @property
    def reference_B(self) -> Tensor:
        return (self.reference_BT * self.mask_BT).sum(1)

    @property
    def log_ratios_B(self) -> Tensor:
        """Sums over the tokens of a response."""
        return (self.logprobs_BT * self.mask_BT).sum(1) - self.reference_B

    @property
    def other_reference_B(self) -> Tensor:
        return (self.other_reference_BT * self.other_mask_BT).sum(1)

    def pairs(self, logprobs_BT: Tensor) -> PairInputs:
        """Ours, with the weights of means over pairs and over chosen tokens."""
        rows, _ = torch.nonzero(self.mask_BT, as_tuple=True)
        sums_B, tokens_B = sequence_logprobs(logprobs_BT[self.mask_BT > 0], rows, len(self.mask_BT))
        chosen_P, rejected_P = sums_B.chunk(2)
        chosen_tokens_P, rejected_tokens_P = tokens_B.chunk(2)
        reference_chosen_P, reference_rejected_P = self.reference_B.chunk(2)
        ones_P = torch.ones_like(chosen_P).detach()
        return PairInputs(
            chosen_logprobs_P=chosen_P,
            rejected_logprobs_P=rejected_P,
            chosen_tokens_P=chosen_tokens_P,
            rejected_tokens_P=rejected_tokens_P,
            weights_P=ones_P / len(ones_P),
            token_weights_P=ones_P / chosen_tokens_P.sum(),
            reference_chosen_logprobs_P=reference_chosen_P,
            reference_rejected_logprobs_P=reference_rejected_P,
        )

    def samples(self, logprobs_BT: Tensor) -> UnpairedInputs:
        """Ours, each row a sample, with the weights of a mean."""
        rows, _ = torch.nonzero(self.mask_BT, as_tuple=True)
        sums_S, tokens_S = sequence_logprobs(logprobs_BT[self.mask_BT > 0], rows, len(self.mask_BT))
        return UnpairedInputs(
            logprobs_S=sums_S,
            tokens_S=tokens_S,
            desirable_S=self.desirable_B,
            weights_S=torch.full_like(sums_S, 1 / len(sums_S)).detach(),
            reference_logprobs_S=self.reference_B,
        )

    def mismatched(self) -> MismatchedResponses:
        return MismatchedResponses(
            logprobs_M=(self.other_logprobs_BT * self.other_mask_BT).sum(1),
            reference_logprobs_M=self.other_reference_B,
            tokens_M=self.other_mask_BT.sum(1).long(),
        )


def loss_and_gradient(name: str, case: Responses, **settings: Any) -> tuple[Tensor, Tensor]:
    """Our objective, and its gradient for log-probabilities, [B, T]."""
    logprobs_BT = case.logprobs_BT.clone().requires_grad_()
    objective, _ = _objective(name, case, logprobs_BT, settings)
    return objective, torch.autograd.grad(objective, logprobs_BT)[0]


def figures(name: str, case: Responses, **settings: Any) -> dict[str, float]:
    """The figures of our objective, reduced as a run logs them."""
    return reduce(_objective(name, case, case.logprobs_BT, settings)[1])


def _objective(name: str, case: Responses, logprobs_BT: Tensor, settings: dict[str, Any]) -> Any:
    plugin = PREFERENCE_LOSSES.get(name)
    loss = plugin(plugin.Config(**settings))
    if loss.paired:
        return preference_objective(case.pairs(logprobs_BT), loss)
    return preference_objective(case.samples(logprobs_BT), loss.of_batch(case.mismatched()))


@st.composite
def responses(draw: st.DrawFn, *, distances: tuple[float, ...] = (0.02, 0.3, 1.5)) -> Responses:
    """One to four pairs of ragged responses; policies that nearly agree, or do not at all.

    Args:
        distances: Between two policies' log-probabilities of a token, standard deviations in nats.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, distance = 2 * draw(st.integers(1, 4)), draw(st.sampled_from(distances))
    mask, other_mask = _ragged(random, rows), _ragged(random, rows)

    def policies(shape: tuple[int, ...]) -> Any:
        # no token is certain: its odds would be infinite
        first = -0.1 - random.exponential(1.2, shape)
        return first, -0.1 - np.abs(first + 0.1 + random.normal(0, distance, shape))

    logprobs, reference = policies(mask.shape)
    other_logprobs, other_reference = policies(other_mask.shape)
    arrays = (mask, logprobs, reference, other_mask, other_logprobs, other_reference)
    tensors = [torch.from_numpy(np.asarray(array, np.float64)) for array in arrays]
    desirable = torch.from_numpy(random.random(rows) < random.choice([0.0, 0.5, 1.0]))
    return Responses(*tensors[:3], desirable, *tensors[3:])


def _ragged(random: np.random.Generator, rows: int, longest: int = 8) -> Any:
    lengths = random.integers(1, longest + 1, rows)
    return np.arange(lengths.max()) < lengths[:, None]


@dataclass(frozen=True)
class HeadCase:
    """Responses whose log-probabilities come from hidden states [B, T, D] and projections [V, D], in float32.

    Attributes:
        responses: The same responses, with log-probabilities in float64.
        hidden_BTD, reference_hidden_BTD: Of the policy and of the reference model.
        weight_VD, reference_weight_VD: The same.
        ids_BT: The tokens; −100 where there is none.
        baseline: What `kto` compares with, at least 0.
    """

    responses: Responses
    hidden_BTD: Tensor
    reference_hidden_BTD: Tensor
    weight_VD: Tensor
    reference_weight_VD: Tensor
    ids_BT: Tensor
    baseline: float


def head_logprobs(case_mask_BT: Tensor, ids_BT: Tensor, hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
    """Ours, [B, T]; 0 where there is no token."""
    inside = case_mask_BT > 0
    logprobs_N, _ = token_logprobs(
        hidden_BTD[inside], weight_VD, ids_BT[inside], temperature=1.0, chunk_tokens=64, chunk_vocab=9
    )
    return torch.zeros_like(case_mask_BT).masked_scatter(inside, logprobs_N)


def loss_and_head_gradients(name: str, case: HeadCase, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Our objective in float64, and its gradients for the policy's hidden states and projection."""
    hidden_BTD, weight_VD = (array.double().requires_grad_() for array in (case.hidden_BTD, case.weight_VD))
    logprobs_BT = head_logprobs(case.responses.mask_BT, case.ids_BT, hidden_BTD, weight_VD)
    loss, gradient_BT = loss_and_gradient(name, case.responses, **settings)
    return loss, *torch.autograd.grad(logprobs_BT, [hidden_BTD, weight_VD], gradient_BT)


@st.composite
def head_cases(draw: st.DrawFn, *, distances: tuple[float, ...] = (0.02, 0.3), longest: int = 8) -> HeadCase:
    """Pairs of up to `longest` tokens, from a vocabulary of 9 and a width of 4; the reference is near or far."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = _ragged(random, 2 * draw(st.integers(1, 4)), longest)
    distance = draw(st.sampled_from(distances))
    hidden, weight = (random.normal(0, 0.7, size) for size in ((*mask.shape, 4), (9, 4)))
    reference_hidden, reference_weight = (array + random.normal(0, distance, array.shape) for array in (hidden, weight))
    arrays = (hidden, reference_hidden, weight, reference_weight)
    tensors = [torch.from_numpy(array.astype(np.float32)) for array in arrays]
    mask_BT = torch.from_numpy(mask.astype(np.float64))
    ids_BT = torch.from_numpy(np.where(mask, random.integers(0, 9, mask.shape), -100))
    logprobs_BT, reference_BT = (
        head_logprobs(mask_BT, ids_BT, tensors[at].double(), tensors[at + 2].double()) for at in (0, 1)
    )
    # one mismatched response of one token gives any baseline
    baseline = float(np.float32(draw(st.sampled_from([0.0, 1.0])) * random.random()))
    one = torch.ones(1, 1, dtype=torch.float64)
    desirable = torch.from_numpy(random.random(len(mask)) < 0.5)
    made = Responses(mask_BT, logprobs_BT, reference_BT, desirable, one, -one, -one - baseline)
    return HeadCase(made, *tensors, ids_BT, baseline)
