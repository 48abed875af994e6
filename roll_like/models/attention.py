"""What the layers of a model see, from its configuration: everything, a window, or a state that runs through the row.

Training puts several samples into one row (`roll_like/training/rows.py`), so it must know how each layer can be kept
from reading another sample. Layer types are those of transformers' `config.layer_types`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_like.config.run import ALWAYS_SHARED
from roll_like.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Their state runs through a row from its first token to its last, whatever a mask says.
RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
#: `model_type`s whose layers with a state can compute each sample of a row by itself (`training/recurrent.py`): gated
#: delta layers, Mamba 1 and 2 beside attention, short convolutions.
BY_SAMPLE = frozenset(
    {
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"),
        *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h"),
        *("lfm2", "lfm2_moe"),
    }
)
#: Each token by itself.
_TOKENWISE = frozenset({"moe", "mlp", "sparse", "dense"})
_FULL, _WINDOW = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayers:
    """What the layers of a model see.

    Attributes:
        recurrent: Types of layers with a state, in alphabetical order; empty for most models.
        count: Layers that attend; None where the configuration does not tell.
        windows: How many of them have a sliding window.
        window: Tokens that those see, the query itself included.
        states: How many layers have a state.
        by_sample: Whether these compute each sample of a row by itself (`training/recurrent.py`).
    """

    recurrent: tuple[str, ...]
    count: int | None
    windows: int
    window: int | None
    states: int = 0
    by_sample: bool = False

    @classmethod
    def of(cls, config: PretrainedConfig) -> AttentionLayers:
        """Return what a configuration says.

        Raises:
            ConfigError: A layer attends in a way that rows of several samples have no mask for.
        """
        text: Any = config.get_text_config()
        types: list[str] | None = getattr(text, "layer_types", None)
        window: int | None = getattr(text, "sliding_window", None)
        if types is None:
            count = int(text.num_hidden_layers)
            return cls(recurrent=(), count=count, windows=count if window else 0, window=window or None)
        unknown = sorted(set(types) - RECURRENT - _TOKENWISE - {_FULL, _WINDOW})
        if unknown:
            raise ConfigError(
                f"layers of the model are of the type {unknown[0]}, and training has masks for {_FULL} and {_WINDOW} "
                "only: such layers would see other tokens than in inference",
                fix="set model.path to a model without such layers",
            )
        recurrent = tuple(sorted(set(types) & RECURRENT))
        windows = types.count(_WINDOW)
        return cls(
            recurrent=recurrent,
            count=None if any(name.startswith("hybrid") for name in recurrent) else types.count(_FULL) + windows,
            windows=windows,
            window=window if windows else None,
            states=sum(each in RECURRENT for each in types),
            by_sample=bool(recurrent) and text.model_type in BY_SAMPLE,
        )

    def refuse_sharing(self, key: str | None) -> None:
        """Raise a ConfigError where layers with a state would read other samples of their row.

        Args:
            key: What puts several samples into one row: a key of the configuration that can be set to false, or
                `ALWAYS_SHARED`; None where a row holds one.
        """
        if not self.recurrent or self.by_sample or key is None:
            return
        raise ConfigError(
            f"the model has layers of the type {self.recurrent[0]}, whose state runs through a row from one sample to "
            f"the next, and {key} puts several samples into one row",
            fix="set model.path to a model without such layers" if key == ALWAYS_SHARED else f"set {key}: false",
        )

    def refuse_joining(self, attention: str, *, automatic: bool = False) -> None:
        """Raise a ConfigError where layers with a state would read other rows of a micro-batch.

        Args:
            automatic: Whether `auto` is that, because the backend or `sequence_parallel` needs joined rows.
        """
        if self.recurrent:
            named, fix = attention, "set training.attention: dense"
            if automatic:
                named = f"auto ({attention} here)"
                fix = "set training.backend to deepspeed or fsdp2, with training.sequence_parallel: 1"
            raise ConfigError(
                f"training.attention: {named} joins rows, and the state of {self.recurrent[0]} layers would run "
                "through all of them",
                fix=fix,
            )


def keeps_states(path: Path, *, trust_remote_code: bool) -> bool:
    """Return whether the model in a directory has layers with a state; False where its config.json cannot be read."""
    from roll_like.models.modules import load_model_config

    if not (path / "config.json").is_file():
        return False
    text: Any = load_model_config(path, trust_remote_code=trust_remote_code).get_text_config()
    return not RECURRENT.isdisjoint(getattr(text, "layer_types", None) or ())


def refuse_undivided_heads(config: PretrainedConfig, ranks: int) -> None:
    """Raise a ConfigError for attention heads that ranks cannot divide among themselves."""
    text: Any = config.get_text_config()
    heads = int(text.num_attention_heads)
    keys = int(getattr(text, "num_key_value_heads", None) or heads)
    if heads % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0):
        return
    possible = [n for n in range(1, heads + 1) if heads % n == 0 and (keys % n == 0 or n % keys == 0)]
    raise ConfigError(
        f"sequence_parallel: {ranks} divides attention heads among {ranks} ranks, and the model has {heads} query "
        f"heads and {keys} key heads",
        fix=f"set it to one of {', '.join(map(str, possible))}",
    )
