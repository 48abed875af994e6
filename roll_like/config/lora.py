"""Low-rank adapters: the section, and what a reference without them goes with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from pydantic import Field

from roll_like.config.base import ConfigModel
from roll_like.config.violations import Violation

if TYPE_CHECKING:
    from roll_like.config.sections import DeviceRange, TrainingConfig


class LoRAConfig(ConfigModel):
    """Trains a low-rank product beside each weight matrix, and not the matrix (Hu et al. 2021, arXiv:2106.09685)."""

    rank: Annotated[int, Field(ge=1)] = Field(default=16, description="Rank r of each product B·A.")
    alpha: Annotated[int, Field(ge=1)] = Field(default=32, description="Products are multiplied by alpha / rank.")
    rslora: bool = Field(default=False, description="Multiply them by alpha / √rank instead (arXiv:2312.03732).")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="Share of an adapter's inputs that are dropped while gradients are computed, and only then.",
    )
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="Names of linear layers, such as `q_proj`; default: all in the model's blocks, without the head.",
    )
    init: Literal["kaiming", "gaussian"] = Field(
        default="kaiming",
        description="How A is drawn: uniform as linear layers are, or normal with deviation 1 / rank. B starts at 0.",
    )


class _Reference(Protocol):
    """What both kinds of reference sections have."""

    @property
    def mode(self) -> str: ...
    @property
    def path(self) -> str | None: ...
    @property
    def workers(self) -> int: ...
    @property
    def max_tokens_per_micro_batch(self) -> int: ...


def adapter_off_means_something(
    reference: _Reference | None, training: TrainingConfig, devices: DeviceRange | None
) -> Iterator[Violation]:
    """Yield what does not go with `reference.mode: adapter_off`.

    Args:
        reference: The `reference` section.
        training: The `training` section.
        devices: `resources.device_mapping.reference`.
    """
    if reference is None or reference.mode != "adapter_off":
        return
    if training.lora is None:
        yield Violation(
            ("reference", "mode"),
            "'adapter_off' asks the trainer with its adapters switched off, and it has none; add `training.lora: {}`, "
            "or use mode: cluster",
        )
    if reference.path is not None:
        yield Violation(
            ("reference", "path"),
            f"{reference.path} would never be loaded: without adapters the trainer is model.path; remove the key, or "
            "use mode: cluster",
        )
    defaults = type(reference)()
    for key in ("workers", "max_tokens_per_micro_batch"):
        if getattr(reference, key) != getattr(defaults, key):
            yield Violation(
                ("reference", key),
                f"the trainer's own ranks are the reference, so training.{key} holds; remove the key, or use mode: "
                "cluster",
            )
    if devices is not None:
        yield Violation(
            ("resources", "device_mapping", "reference"),
            "these devices would stay idle, because the trainer is its own reference; remove the key, or use "
            "reference.mode: cluster",
        )
