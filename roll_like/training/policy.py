"""The module that is trained: a causal language model that returns log-probabilities of chosen tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll_like.algorithms.divided import DividedVocabulary
from roll_like.algorithms.kept import KeptIds, kept_logprobs
from roll_like.algorithms.logprobs import EveryToken, token_certainties, token_logprobs
from roll_like.data.routes import unknown
from roll_like.models.logits import logit_transform
from roll_like.models.router import UNKNOWN, RouterReplay
from roll_like.models.vision import SeenTokens, TowerRuns
from roll_like.training.backbone import layer_tokens, run_backbone
from roll_like.training.layout import MicroBatch
from roll_like.training.segments import RowSegments
from roll_like.training.sequence_parallel import OwnTargets, SequenceParallel
from roll_like.types import KeptTokens, LogitTransform


class TokenLogprobHead(nn.Module):
    """The language-model head, without ever holding all logits.

    It registers the head's own (perhaps tied) weight, so that ZeRO-3 gathers it around this module.

    Attributes:
        divided: The ranks that divide the vocabulary, where weight and bias are `DTensor`s, or the rank's own rows, and
            perhaps some after them that fill all up to the same number; None for this one alone.
        float32: Whether products are computed in float32, whatever the precision of hidden states and weight.
    """

    divided: DividedVocabulary | None = None

    def __init__(
        self, head: nn.Linear, *, chunk_tokens: int, chunk_vocab: int, logits: LogitTransform, float32: bool = False
    ) -> None:
        super().__init__()
        self.float32 = float32
        self.weight = head.weight
        self.bias = head.bias
        self.logits = logits
        self.chunk_tokens = chunk_tokens
        self.chunk_vocab = chunk_vocab

    def forward(
        self, hidden_ND: Tensor, targets_N: Tensor, temperature: float, kept: KeptIds | EveryToken | None = None
    ) -> tuple[Tensor, ...]:
        """Return log-probability and entropy of each target, in nats, float32, shape [N]; or `token_certainties`."""
        options: dict[str, Any] = {
            "temperature": temperature,
            "chunk_tokens": self.chunk_tokens,
            "chunk_vocab": self.chunk_vocab,
            "bias": self.own(self.bias),
            "logits": self.logits,
            "divided": self.divided,
        }
        hidden_ND, weight_VD = self.factors(hidden_ND)
        if kept is None:
            return token_logprobs(hidden_ND, weight_VD, targets_N, **options)
        if isinstance(kept, EveryToken):
            return (token_certainties(hidden_ND, weight_VD, **options),)
        return kept_logprobs(hidden_ND, weight_VD, targets_N, kept, **options)

    def factors(self, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and weight in the precisions that their products take; the weight is the engines'."""
        weight_VD = self.own(self.weight)
        if not self.float32:
            return hidden_ND, weight_VD
        return hidden_ND.float(), weight_VD.to(hidden_ND.dtype)  # not those of a master weight in float32

    def own(self, parameter: Any) -> Any:
        """Return what this rank has of the weight or of the bias."""
        if self.divided is None or parameter is None:
            return parameter
        if isinstance(parameter, torch.distributed.tensor.DTensor):
            return parameter.to_local()
        own = self.divided.own
        return parameter[: own.stop - own.start]


@dataclass(frozen=True, eq=False, slots=True)
class RoutedTokens:
    """Tokens with the experts to compute them with, in the place of tokens alone.

    Attributes:
        tokens: The tokens, with their images where there are some.
        routes_BLMK: The experts in M layers; `UNKNOWN` where the model is to choose.
    """

    tokens: Tensor | SeenTokens
    routes_BLMK: Tensor


#: What a forward pass takes as its tokens.
Tokens: TypeAlias = Tensor | SeenTokens | RoutedTokens


class RowModule(nn.Module):
    """A model that says something of each target of a micro-batch.

    Attributes:
        parallel: The ranks that share a micro-batch's rows, each with its share of the tokens; None for this one alone.
        dividing: Ranks that divide matrices, and between them the tokens; None for this one alone.
        computed_by: What computes the layers in the place of the backbone, and is called like it; None where it does.
        router: Replays given experts; None where the model chooses them, whatever comes with the tokens.
        tower: Which micro-batches run the vision tower (`tower_runs`).
    """

    parallel: SequenceParallel | None = None
    dividing: ProcessGroup | None = None
    computed_by: Any = None
    router: RouterReplay | None = None
    tower: TowerRuns = "where there are images"

    @property
    def sharing(self) -> ProcessGroup | None:
        """The ranks that divide the tokens of a micro-batch's rows; None for this one alone."""
        return self.dividing if self.parallel is None else self.parallel.group

    def states_before(
        self,
        backbone: Any,
        token_ids_BL: Tokens,
        positions_BL: Tensor,
        segment_ids_BL: Tensor,
        sources_N: Tensor,
    ) -> tuple[Tensor, OwnTargets]:
        """Return a backbone's last hidden states, after the final norm, before this rank's targets; and which they are.

        Args:
            backbone: The model without its output.
            token_ids_BL: Inputs, with their images and routes where there are some.
            positions_BL: Position of each in its sample.
            segment_ids_BL: What it may see (`rows.py`).
            sources_N: Flat index of [B·L] of the token before each target.
        """
        backbone = self.computed_by or backbone
        segments = RowSegments(segment_ids_BL, positions_BL, parallel=self.parallel)
        routes_BLMK: Tensor | None = None
        if isinstance(token_ids_BL, RoutedTokens):
            routes_BLMK, token_ids_BL = token_ids_BL.routes_BLMK, token_ids_BL.tokens
        # without images on this rank, and perhaps with some on another
        waited_for = self.tower == "always" or (self.tower == "with gradients" and torch.is_grad_enabled())
        if waited_for and isinstance(token_ids_BL, Tensor):
            token_ids_BL = SeenTokens(token_ids_BL, images=())
        if self.router is not None:
            self.router.give(None if routes_BLMK is None else self._own_routes(backbone, segments, routes_BLMK))
        own = segments.own_targets(sources_N)
        return run_backbone(backbone, token_ids_BL, segments, own.part(sources_N)), own

    def _own_routes(self, backbone: Any, segments: RowSegments, routes_BLMK: Tensor) -> Tensor:
        """Return the routes of the tokens that this rank's experts layers see, in their order."""
        routes_TMK = routes_BLMK.flatten(0, 1)[layer_tokens(backbone, segments)]
        if self.dividing is None:
            return routes_TMK
        size = self.dividing.size()
        filled_TMK = nn.functional.pad(routes_TMK, (0, 0, 0, 0, 0, -len(routes_TMK) % size), value=UNKNOWN)
        return filled_TMK.chunk(size)[self.dividing.rank()]


class PolicyModule(RowModule):
    """A Hugging Face causal model whose forward pass takes one micro-batch.

    Args:
        causal_lm: The model, with a `lm_head` and a backbone (`base_model`).
        chunk_tokens: Rows of logits that exist at a time.
        chunk_vocab: Columns of logits that exist at a time.
        head: What becomes of the hidden states before targets.
        float32_head: Whether the head computes in float32.
    """

    def __init__(
        self,
        causal_lm: Any,
        *,
        chunk_tokens: int,
        chunk_vocab: int,
        head: type[TokenLogprobHead] = TokenLogprobHead,
        float32_head: bool = False,
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.head = head(
            causal_lm.get_output_embeddings(),
            chunk_tokens=chunk_tokens,
            chunk_vocab=chunk_vocab,
            logits=logit_transform(causal_lm.config),
            float32=float32_head,
        )

    def forward(
        self,
        token_ids_BL: Tokens,
        positions_BL: Tensor,
        segment_ids_BL: Tensor,
        sources_N: Tensor,
        targets_N: Tensor,
        temperature: float,
        *more: Any,
    ) -> Any:
        """Return what the head makes of the targets: (log-probabilities, entropies), shape [N], float32.

        Each target is predicted by the output at flat index `sources_N` of [B·L]. `more` goes to the head: tensors
        [N, …], or what selects some of the targets (`OwnTargets.part`).
        """
        rows = (token_ids_BL, positions_BL, segment_ids_BL, sources_N)
        hidden_ND, own = self.states_before(self.causal_lm.base_model, *rows)
        return own.whole(self.head(hidden_ND, own.part(targets_N), temperature, *map(own.part, more)))

    def hidden_states(
        self, token_ids_BL: Tokens, positions_BL: Tensor, segment_ids_BL: Tensor, sources_N: Tensor
    ) -> Tensor:
        """Return the last hidden states before each target, after the final norm, shape [N, D]."""
        rows = (token_ids_BL, positions_BL, segment_ids_BL, sources_N)
        hidden_ND, own = self.states_before(self.causal_lm.base_model, *rows)
        whole_ND: Tensor = own.whole(hidden_ND)
        return whole_ND


def kept_ids(kept: KeptTokens, device: torch.device) -> KeptIds:
    """Return what targets are normalised over on a device."""
    ids_M, counts_N = (torch.from_numpy(each).to(device, non_blocking=True) for each in (kept.ids, kept.counts))
    return KeptIds(ids_M, counts_N)


def tensors_of(batch: MicroBatch, device: torch.device) -> tuple[Tokens, Tensor, Tensor, Tensor, Tensor]:
    """Return the forward pass's index tensors on a device; the tokens with images and routes where there are some."""
    arrays = (batch.token_ids_BL, batch.positions_BL, batch.segment_ids_BL, batch.sources, batch.targets)
    tokens, *others = (torch.from_numpy(array).long().to(device, non_blocking=True) for array in arrays)
    positions, segments, sources, targets = others
    seen = SeenTokens(tokens, batch.images) if batch.images else tokens
    if batch.routes_BLMK is None:
        return seen, positions, segments, sources, targets
    routes = torch.from_numpy(batch.routes_BLMK.astype(np.int64)).to(device, non_blocking=True)
    known = routes != unknown(batch.routes_BLMK)
    return RoutedTokens(seen, torch.where(known, routes, UNKNOWN)), positions, segments, sources, targets
