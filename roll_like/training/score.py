"""The module of a reward model: a language model's backbone that returns the score of what it has read."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from roll_like.models.classifier import HEAD
from roll_like.training.policy import branch_mask


class ScoreHead(nn.Module):
    """A classifier's linear output, computed in float32: scores of a pair differ by little.

    It is no `nn.Linear`, so that what is done to a model's linear layers (adapters) leaves it as it is.

    Args:
        linear: The output, [1, D] without bias.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Return scores, shape [N], float32."""
        return nn.functional.linear(hidden_ND.float(), self.weight.float()).squeeze(1)


class ScoreModule(nn.Module):
    """A Hugging Face sequence classifier with one output, whose forward pass takes one micro-batch.

    Args:
        classifier: The model. Its output is trained, whatever else of it is frozen.
    """

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        self.classifier = classifier
        setattr(classifier, HEAD, ScoreHead(getattr(classifier, HEAD)))
        self.head.requires_grad_(True)

    @property
    def head(self) -> ScoreHead:
        """The output; its weight keeps the name that transformers gives it."""
        head: ScoreHead = getattr(self.classifier, HEAD)
        return head

    def forward(self, token_ids_BL: Tensor, positions_BL: Tensor, branches_BL: Tensor, sources_N: Tensor) -> Tensor:
        """Return the score at each flat index `sources_N` of [B·L], shape [N], float32."""
        hidden_BLD = self.classifier.base_model(
            input_ids=token_ids_BL,
            position_ids=positions_BL,
            attention_mask=branch_mask(branches_BL),
            use_cache=False,
        ).last_hidden_state
        scores_N: Tensor = self.head(hidden_BLD.reshape(-1, hidden_BLD.shape[-1])[sources_N])
        return scores_N
