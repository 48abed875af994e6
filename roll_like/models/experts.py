"""The modules of a mixture that hold its experts, and whether ranks can divide them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_like.errors import ConfigError
from roll_like.models.shape import Experts

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


def refuse_undivided_experts(config: PretrainedConfig, ranks: int) -> None:
    """Raise a ConfigError for a model without experts that several ranks can divide among themselves evenly."""
    if ranks == 1:
        return
    experts = Experts.of(config.get_text_config())
    if experts is None:
        raise ConfigError(
            f"expert_parallel: {ranks} divides experts among {ranks} ranks, and no layer of the model has any",
            fix="remove the key",
        )
    if experts.choice % ranks:
        possible = ", ".join(str(n) for n in range(1, experts.choice + 1) if experts.choice % n == 0)
        raise ConfigError(
            f"expert_parallel: {ranks} divides experts among {ranks} ranks, and a layer of the model has "
            f"{experts.choice}",
            fix=f"set it to one of {possible}",
        )


def expert_layers(model: Any) -> list[nn.Module]:
    """Return the modules that hold the experts of the layers; their parameters are [E, …], one for all experts.

    Args:
        model: A Hugging Face model, or what holds one.

    Raises:
        ConfigError: It has none in the form in which transformers lets their computation be replaced.
    """
    found = [module for module in model.modules() if hasattr(module, "_apply_gate") and hasattr(module, "num_experts")]
    holders = {module.experts for module in model.modules() if hasattr(module, "experts")}
    if not found or not holders <= set(found):
        kinds = sorted({type(module).__name__ for module in holders - set(found)}) or [type(model).__name__]
        raise ConfigError(
            f"expert_parallel: ranks cannot divide the experts of {', '.join(kinds)}", fix="remove the key"
        )
    return found
