"""What a model drops or shakes at random while it is trained, as its config.json says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

#: Ends of the names that transformers' modules have for such a share; the last is a router's.
_SHARES = ("dropout", "pdrop", "layerdrop", "jitter_noise")


def without_dropout(model: nn.Module) -> None:
    """Let a model compute while it is trained what it computes otherwise.

    Its configuration is left as it is: an export says what the model was made with. (PhiMoE's `router_jitter_noise` is
    a bound of its router, which draws experts at random in training whatever its value; that stays.)

    Args:
        model: A Hugging Face model, before it gets adapters, whose dropout is chosen by `lora.dropout`.
    """
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and name.endswith(_SHARES) and name != "router_jitter_noise":
                setattr(module, name, 0.0)
