"""One rank of a teacher: a frozen model that says what it would write at each token of given samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll_like.algorithms.distillation import teacher_topk
from roll_like.training.language_model import LanguageModelRank, LanguageModelSpec
from roll_like.training.layout import MicroBatch
from roll_like.training.policy import tensors_of
from roll_like.training.taught import Answers, HiddenAnswers, TopKAnswers


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSpec(LanguageModelSpec):
    """What a rank of a teacher needs to know. `temperature` is that of the loss.

    Attributes:
        top_k: How many of the most likely tokens are sent; None for hidden states, from which students compute the
            whole distribution.
    """

    top_k: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A teacher's output projection: from hidden states [N, E] to logits [N, V].

    Attributes:
        weight_VE: In the teacher's precision.
        bias_V: None where it has none.
    """

    weight_VE: Tensor
    bias_V: Tensor | None


class TeacherWorker(LanguageModelRank):
    """Answers for the targets of micro-batches."""

    memory_name = "teacher"

    def __init__(self, spec: TeacherSpec, rank: int, world_size: int) -> None:
        super().__init__(spec, rank, world_size)
        self.spec = spec

    @torch.no_grad()
    def answers(self, batches: Sequence[MicroBatch]) -> list[Answers]:
        """Return the answers for each micro-batch's targets."""
        if self.spec.top_k is None:
            return [HiddenAnswers(hidden_NE=self._hidden(batch).float().cpu().numpy()) for batch in batches]
        return [self._top_k(batch, self.spec.top_k) for batch in batches]

    def projection(self) -> Projection:
        """Return the output projection."""
        head = self._engine.head
        bias = None if head.bias is None else head.bias.detach().cpu()
        return Projection(weight_VE=head.weight.detach().cpu(), bias_V=bias)

    def _hidden(self, batch: MicroBatch) -> Tensor:
        hidden_NE: Tensor = self._engine.hidden_states(*tensors_of(batch, self._device)[:4])
        return hidden_NE

    def _top_k(self, batch: MicroBatch, k: int) -> TopKAnswers:
        training, head = self.spec.training, self._engine.head
        said = teacher_topk(
            self._hidden(batch),
            head.weight,
            k,
            temperature=self.spec.temperature,
            chunk_tokens=training.logprob_chunk_tokens,
            chunk_vocab=training.logprob_chunk_vocab,
            bias=head.bias,
        )
        assert said.entropy_N is not None, "computed with the top-k"
        return TopKAnswers(
            ids_NK=said.ids_NK.cpu().numpy(),
            logprobs_NK=said.logprobs_NK.float().cpu().numpy(),
            entropy_N=said.entropy_N.float().cpu().numpy(),
        )
