"""The section `model`: which model is trained, and what its texts look like."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from roll_like.config.base import ConfigModel, Violation
from roll_like.types import ReasoningTags

Precision = Literal["float32", "bfloat16", "float16"]


#: What a trained model is for, by the hub's names: it writes, or it scores what others wrote.
ModelTask = Literal["text-generation", "text-classification", "token-classification"]


class ReasoningConfig(ConfigModel):
    """What a model writes around its reasoning."""

    open: str = Field(
        min_length=1,
        description="Before it, such as `<think>`. Where the chat template ends prompts with it, responses lack it.",
    )
    close: str = Field(min_length=1, description="After it, such as `</think>`; the answer follows.")

    @model_validator(mode="after")
    def _two_tags(self) -> Self:
        if self.open == self.close:
            raise ValueError(f"`open` and `close` are both {self.open!r}, so beginning and end cannot be told apart")
        return self


class ModelConfig(ConfigModel):
    """Which model is trained."""

    common: ClassVar[tuple[str, ...]] = ("dtype", "chat_template")

    path: str = Field(
        description="A local directory, a hub id (`org/name`), a `.gguf` file, or `package://NAME/FILE` for a file "
        "inside an installed Python package. GGUF weights are dequantised once and cached."
    )
    tokenizer: str | None = Field(default=None, description="Tokenizer directory or hub id; default: the model's own.")
    revision: str | None = Field(default=None, description="Hub revision (branch, tag or commit).")
    chat_template: Path | None = Field(
        default=None, description="Jinja file that replaces the tokenizer's chat template."
    )
    template_options: dict[str, Any] = Field(
        default_factory=dict, description="Further variables of the chat template, such as `enable_thinking: false`."
    )
    reasoning: Literal["auto"] | ReasoningConfig | None = Field(
        default="auto",
        description="What delimits reasoning in responses; rewards and environments score what follows it. `auto`: "
        "what the chat template or the tokenizer shows, else `<think>` and `</think>`. null: nothing, all of a "
        "response is the answer.",
    )
    dtype: Literal["auto"] | Precision = Field(
        default="auto",
        description="Precision of the forward passes and of inference. `auto`: bfloat16, or float32 on CPUs that are "
        "slower in bfloat16 (measured when a run starts; `--check` shows it). A resumed run keeps its precision.",
    )
    head_dtype: Literal["float32"] | None = Field(
        default=None,
        description="`float32`: trainer and engines compute the output layer in float32 even if the model is in "
        "another precision, which its weights keep. That brings their log-probabilities closer together. Default: the "
        "model's precision.",
    )
    date: datetime.date | None = Field(
        default=None,
        description="The day that chat templates write, if they write one. Default: that on which the run began.",
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")
    cache_dir: Path | None = Field(
        default=None, description="Where converted models are kept; default: `~/.cache/roll_like`."
    )
    keep_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None,
        min_length=1,
        description="Start from these layers of the model only, counted from 0: a smaller model, to be distilled. "
        "Default: all.",
    )

    @field_validator("keep_layers")
    @classmethod
    def _ascending(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and list(value) != sorted(set(value)):
            raise ValueError(f"layers are named once each, in their order; found {list(value)}")
        return value

    @property
    def reasoning_tags(self) -> Literal["auto"] | ReasoningTags | None:
        """`reasoning`, as renderers take it."""
        if isinstance(self.reasoning, ReasoningConfig):
            return ReasoningTags(open=self.reasoning.open, close=self.reasoning.close)
        return self.reasoning

    def violations(self, device: str) -> Iterator[Violation]:
        """Yield a precision that the device does not compute in."""
        if device == "cpu" and self.dtype == "float16":
            yield Violation(
                ("model", "dtype"), "float16 is slow and overflows on CPU; use bfloat16, or float32 on CPUs without it"
            )

    def at(self, path: str) -> ModelConfig:
        """Return the section for another model as it is: with all its layers, and no revision of this one's."""
        return self.model_copy(update={"path": path, "revision": None, "keep_layers": None})
