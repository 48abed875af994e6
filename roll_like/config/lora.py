"""Low-rank adapters: the section, and what a reference without them goes with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll_like.config.base import ConfigModel


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
