"""What a teacher says of each token: its most likely tokens, or what all of its logits come from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from roll_like.algorithms.blocks import Blocks, Cut
from roll_like.algorithms.divided import DividedVocabulary
from roll_like.errors import ConfigError, EngineError
from roll_like.types import PLAIN_LOGITS, LogitTransform

#: Log-probabilities in float32 cannot say that less than this is left for other tokens.
REST_FLOOR = 2.0**-23
#: By how much rounding may bring the sum of the top-k's probabilities above 1.
ROUNDING = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTopK:
    """The teacher's K most likely tokens at each of N positions: what a teacher worker sends.

    Attributes:
        ids_NK: Their ids, distinct within a row, integers.
        logprobs_NK: Their log-probabilities under the softmax of the whole vocabulary at `temperature`, float32.
        temperature: Of that softmax; must be the loss's.
        entropy_N: Entropy of the whole distribution, in nats; None where the teacher cannot say.
    """

    ids_NK: Tensor
    logprobs_NK: Tensor
    temperature: float = 1.0
    entropy_N: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids_NK)

    def select(self, rows_N: Tensor) -> TeacherTopK:
        """Return the rows where `rows_N` is true."""
        return TeacherTopK(
            ids_NK=self.ids_NK[rows_N],
            logprobs_NK=self.logprobs_NK[rows_N],
            temperature=self.temperature,
            entropy_N=None if self.entropy_N is None else self.entropy_N[rows_N],
        )

    def mass(self) -> Tensor:
        """Return the mass that the K tokens have together, float64, shape [N]."""
        return self.logprobs_NK.double().exp().sum(-1)

    def check(self, vocabulary: int, temperature: float) -> None:
        """Refuse what cannot be the top-k of a teacher for a student with this vocabulary, at this temperature.

        Raises:
            EngineError: Ids, log-probabilities or shapes are not those of a top-k.
            ConfigError: The temperatures differ.
        """
        if self.ids_NK.shape != self.logprobs_NK.shape or self.ids_NK.ndim != 2 or self.ids_NK.shape[1] < 1:
            raise EngineError(
                f"the teacher's ids have shape {tuple(self.ids_NK.shape)} and its log-probabilities "
                f"{tuple(self.logprobs_NK.shape)}; [N, K] of both was expected, with K at least 1"
            )
        if self.temperature != temperature:
            raise ConfigError(
                f"the teacher's log-probabilities are at temperature {self.temperature:g}, the loss compares at "
                f"{temperature:g}",
                fix="take the teacher's softmax at the loss's `temperature`",
            )
        if not len(self):
            return
        low, high = (int(value) for value in self.ids_NK.aminmax())
        if low < 0 or high >= vocabulary:
            raise EngineError(
                f"the teacher's token ids run from {low} to {high}, the student's vocabulary has {vocabulary} tokens",
                fix="distil between models of one tokenizer",
            )
        sorted_NK = self.ids_NK.sort(-1).values
        _refuse_rows((sorted_NK[:, 1:] == sorted_NK[:, :-1]).any(-1), "name a token twice; distinct ids were expected")
        wrong_N = self.logprobs_NK.isnan().any(-1) | (self.mass() > 1 + ROUNDING) | (self.mass() == 0)
        _refuse_rows(wrong_N, "are no log-probabilities of a softmax; a sum of probabilities in (0, 1] was expected")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherHead:
    """What the teacher's logits come from: hidden states [N, E], output projection [V, E] and what it does to products.

    Full logits without anyone holding or sending them: the student's rank computes a block of the teacher's at a time.
    """

    hidden_NE: Tensor
    weight_VE: Tensor
    bias: Tensor | None = None
    logits: LogitTransform = PLAIN_LOGITS

    def __len__(self) -> int:
        return len(self.hidden_NE)

    def select(self, rows_N: Tensor) -> TeacherHead:
        """Return the rows where `rows_N` is true."""
        return replace(self, hidden_NE=self.hidden_NE[rows_N])

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return len(self.weight_VE)


Teacher: TypeAlias = TeacherTopK | TeacherHead


def _refuse_rows(wrong_N: Tensor, what: str) -> None:
    if wrong_N.any():
        rows = wrong_N.nonzero().flatten().tolist()
        raise EngineError(f"the teacher's top-k of token {rows[0]} ({len(rows)} of {len(wrong_N)} tokens) {what}")


@torch.no_grad()
def teacher_topk(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    k: int,
    *,
    temperature: float,
    chunk_tokens: int,
    chunk_vocab: int,
    bias: Tensor | None = None,
    logits: LogitTransform = PLAIN_LOGITS,
    divided: DividedVocabulary | None = None,
) -> TeacherTopK:
    """Return the teacher's K most likely tokens at each position, from its hidden states: what its worker sends.

    Never holds more logits than `chunk_tokens` × `chunk_vocab` and the candidates of a token. 8 bytes a token and
    candidate travel (ids as int32): K = 64 and 4,096 tokens are 2 MiB, where all logits of a vocabulary of 150,000
    are 2.3 GiB.

    Args:
        hidden_ND: Last hidden states of the teacher, after the final norm.
        weight_VD: Its output projection.
        k: How many tokens; at most V.
        temperature: The loss's; logits are divided by it.
        chunk_tokens: Rows of logits that exist at a time, at most.
        chunk_vocab: Columns of logits that exist at a time, at most.
        bias: Of the output projection, shape [V].
        logits: What the teacher does to the products.
        divided: The ranks that divide the vocabulary, as `token_logprobs` takes it; all of them return the same.

    Raises:
        ConfigError: `k` is not in [1, V].
    """
    vocabulary = len(weight_VD) if divided is None else divided.size
    if not 1 <= k <= vocabulary:
        raise ConfigError(f"top-k of the teacher is {k}; 1 to {vocabulary}, its vocabulary, was expected")
    cut = Cut(temperature, chunk_tokens, chunk_vocab, logits=logits)
    blocks = Blocks(hidden_ND, weight_VD.to(hidden_ND.dtype), bias, cut)
    ids_NK = torch.empty(len(hidden_ND), k, dtype=torch.int32, device=hidden_ND.device)
    logits_NK = torch.empty(len(hidden_ND), k, dtype=blocks.wide, device=hidden_ND.device)
    logsumexp_N, entropy_N = (torch.empty(len(hidden_ND), dtype=blocks.wide, device=hidden_ND.device) for _ in range(2))
    with torch.autocast(hidden_ND.device.type, enabled=False):
        for rows in blocks.tokens:
            best = _Best(k, rows.stop - rows.start, blocks.wide, hidden_ND.device)
            for columns in blocks.vocabulary:
                for part, tile, _ in blocks.tiles(blocks.compute(rows, columns), columns):
                    best.add(part, tile, columns.start)
            ids_NK[rows], logits_NK[rows] = best.ids_CK, best.logits_CK
            logsumexp_N[rows], entropy_N[rows] = best.logsumexp_C, best.entropy_C
    if divided is not None:
        logits_NK, order_NK = torch.cat(divided.told(logits_NK), 1).topk(k)
        ids_NK = torch.cat(divided.told(ids_NK + divided.own.start), 1).gather(1, order_NK)
        parts_SFN = torch.stack(divided.told(torch.stack([logsumexp_N, entropy_N])))
        logsumexp_N = parts_SFN[:, 0].logsumexp(0)
        log_share_SN = parts_SFN[:, 0] - logsumexp_N
        entropy_N = _weighted(log_share_SN, parts_SFN[:, 1]).sum(0)
    logprobs_NK = logits_NK - logsumexp_N[:, None]
    return TeacherTopK(ids_NK=ids_NK, logprobs_NK=logprobs_NK, temperature=temperature, entropy_N=entropy_N)


class _Best:
    """The largest logits of some tokens so far, and log-sum-exp and entropy of all that were seen."""

    def __init__(self, k: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.k = k
        self.logits_CK = torch.full((rows, k), -torch.inf, dtype=dtype, device=device)
        self.ids_CK = torch.zeros(rows, k, dtype=torch.int32, device=device)
        self.logsumexp_C = torch.full((rows,), -torch.inf, dtype=dtype, device=device)
        self.entropy_C = torch.zeros(rows, dtype=dtype, device=device)

    def add(self, rows: slice, logits_RC: Tensor, start: int) -> None:
        """Take in the logits of some rows for a part of the vocabulary that begins at `start`."""
        values, places = logits_RC.topk(min(self.k, logits_RC.shape[1]), sorted=False)
        values = torch.cat([self.logits_CK[rows], values], 1)
        ids = torch.cat([self.ids_CK[rows], (places + start).int()], 1)
        self.logits_CK[rows], order = values.topk(self.k)
        self.ids_CK[rows] = ids.gather(1, order)
        logprobs_RC = logits_RC.log_softmax(-1)
        part_R, seen_R = logits_RC.logsumexp(-1), self.logsumexp_C[rows]
        total_R = torch.logaddexp(seen_R, part_R)
        entropy_R = -(logprobs_RC.exp() * logprobs_RC).sum(-1)
        # a mixture's entropy: its parts' and that of choosing between them
        entropy_R = _weighted(part_R - total_R, entropy_R) + _weighted(seen_R - total_R, self.entropy_C[rows])
        self.logsumexp_C[rows], self.entropy_C[rows] = total_R, entropy_R


def _weighted(log_share_R: Tensor, entropy_R: Tensor) -> Tensor:
    # what was not seen yet has log-share −∞ and adds nothing
    return torch.where(log_share_R == -torch.inf, 0.0, log_share_R.exp() * (entropy_R - log_share_R))
