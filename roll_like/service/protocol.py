"""Requests of the protocol that come as JSON: what of each is served, and what is refused by name.

Names and defaults are those of the client (tinker 0.38). A key that is not declared here is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from roll_like.config.training import OptimizerConfig
from roll_like.service.types import RequestError
from roll_like.types import IntArray

#: What checkpoints may be called: a part of a path.
CheckpointName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=200)]
#: The oldest client that sends what is read here: earlier ones send batches as JSON.
OLDEST_CLIENT = (0, 38)


class JsonBody(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    type: str | None = None


class AnyBody(BaseModel):
    """A body whose keys say nothing that is needed."""

    model_config = ConfigDict(extra="allow")


class ClientBody(JsonBody):
    """Of `client/config` and `client/dynamic_config`."""

    sdk_version: str


class SessionBody(JsonBody):
    """Of `create_session`."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None

    @model_validator(mode="after")
    def _new_enough(self) -> Self:
        numbers = tuple(int(part) for part in self.sdk_version.split(".")[:2] if part.isdigit())
        if len(numbers) == 2 and numbers < OLDEST_CLIENT:
            oldest = ".".join(map(str, OLDEST_CLIENT))
            raise ValueError(
                f"the client is tinker {self.sdk_version}, which sends requests that are not read here; install "
                f"tinker {oldest} or later"
            )
        return self


class HeartbeatBody(JsonBody):
    """Of `session_heartbeat`."""

    session_id: str


class AdapterBody(JsonBody):
    """The adapter of a model that is to be created; a rank of 0 asks for the whole model."""

    rank: Annotated[int, Field(ge=0)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _all_layers(self) -> Self:
        for name in ("train_mlp", "train_attn"):
            if not getattr(self, name):
                raise ValueError(
                    f"{name}=False is not served: the service's `training.lora.target_modules` says which layers have "
                    "adapters, of all models alike"
                )
        return self


class OptimizerKind(BaseModel):
    """Which optimizer a model has."""

    model_config = ConfigDict(extra="allow")

    type: str = "adamw"

    @model_validator(mode="after")
    def _adamw(self) -> Self:
        if self.type != "adamw":
            raise ValueError(f"the optimizer {self.type!r} is not served; use the default, adamw")
        return self


class CreateModelBody(JsonBody):
    """Of `create_model`."""

    session_id: str
    model_seq_id: Annotated[int, Field(ge=0)]
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: AdapterBody | None = None
    optimizer_config: OptimizerKind = OptimizerKind()


class ModelBody(JsonBody):
    """Of `get_info` and `unload_model`."""

    model_id: str


class AdamBody(BaseModel):
    """Settings of one optimizer step."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0

    def settings(self) -> OptimizerConfig:
        """Return them as the trainer's optimizer takes them; a `grad_clip_norm` of 0 does not clip."""
        return OptimizerConfig.model_construct(
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.grad_clip_norm or math.inf,
        )


class OptimStepBody(JsonBody):
    """Of `optim_step`."""

    model_id: str
    seq_id: int
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None

    def settings(self) -> OptimizerConfig:
        """Return the optimizer's settings.

        Raises:
            RequestError: They are of another optimizer.
        """
        if self.adam_params is None:
            kind = (self.optimizer_params or {}).get("type")
            raise RequestError(f"the optimizer {kind!r} is not served; send AdamParams")
        return self.adam_params.settings()


class SaveBody(JsonBody):
    """Of `save_weights`."""

    model_id: str
    path: CheckpointName | None = None
    seq_id: int
    ttl_seconds: Annotated[int, Field(gt=0)] | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSamplerBody(SaveBody):
    """Of `save_weights_for_sampler`."""

    sampling_session_seq_id: Annotated[int, Field(ge=0)] | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadBody(JsonBody):
    """Of `load_weights`: into a model, or into a new one of a session."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: Annotated[int, Field(ge=0)] | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerKind | None = None
    weights_access_token: str | None = None

    @model_validator(mode="after")
    def _into_something(self) -> Self:
        old, new = (self.model_id, self.seq_id), (self.session_id, self.model_seq_id)
        if (None in old) == (None in new):
            raise ValueError("expected model_id and seq_id, or session_id and model_seq_id")
        if self.weights_access_token is not None:
            raise ValueError("weights_access_token is not served: every key of this service reads its checkpoints")
        return self


class SamplingSessionBody(JsonBody):
    """Of `create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: Annotated[int, Field(ge=0)]
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(BaseModel):
    """A part of a prompt."""

    model_config = ConfigDict(extra="allow")

    type: str = "encoded_text"
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]] = []

    @model_validator(mode="after")
    def _text(self) -> Self:
        if self.type != "encoded_text":
            raise ValueError(f"chunks of type {self.type!r} are not served; this service takes text tokens only")
        return self


class PromptBody(BaseModel):
    """A prompt."""

    model_config = ConfigDict(extra="forbid")

    chunks: list[TextChunk]

    @property
    def tokens(self) -> IntArray:
        """All tokens, shape [P]."""
        return np.asarray([token for chunk in self.chunks for token in chunk.tokens], np.int32)


class SamplingBody(BaseModel):
    """How tokens are drawn."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a response."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(each for each in stop if isinstance(each, str))

    @property
    def stop_ids(self) -> tuple[int, ...] | None:
        """Tokens that end it; None for those that end the model's responses."""
        if self.stop is None:
            return None
        return tuple(each for each in self.stop if isinstance(each, int))


class SampleBody(JsonBody):
    """Of `asample`."""

    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    prompt: PromptBody
    sampling_params: SamplingBody
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None

    def refuse(self, *, top_logprobs: int) -> None:
        """Raise where something is asked for that is not served.

        Args:
            top_logprobs: How many of the likeliest tokens the engine tells at each position.

        Raises:
            RequestError: Names it.
        """
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
            if getattr(self, name):
                raise RequestError(f"{name} is not served; leave it out")
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if getattr(self, name) > top_logprobs:
                raise RequestError(
                    f"{name} is {getattr(self, name)}; this service's engine tells {top_logprobs} or less"
                )


class FutureBody(JsonBody):
    """Of `retrieve_future` and `cancel_future`."""

    request_id: str
    allow_metadata_only: bool = False


class PathBody(JsonBody):
    """Of `weights_info`."""

    tinker_path: str


class JoinBody(JsonBody):
    """Of `join_sampling_session`."""

    sampling_session_id: str


class CopyBody(JsonBody):
    """Of `copy_weights`."""

    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: Annotated[int, Field(gt=0)] | None = None
    weights_access_token: str | None = None


class TTLBody(JsonBody):
    """Of a checkpoint's `ttl`."""

    ttl_seconds: Annotated[int, Field(gt=0)] | None = None


def parsed_body(raw: bytes, kind: type[BaseModel]) -> Any:
    """Return a request's body.

    Raises:
        RequestError: It is no JSON, or not what was expected; says what.
    """
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body of {len(raw)} bytes is no JSON: {error}") from error
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise RequestError(f"the request is refused: {'; '.join(_problems(error))}") from error


def numbered_place(raw: bytes) -> tuple[str, int] | None:
    """Return the model that a request names, and its place among the model's requests; None where it has neither."""
    try:
        values = json.loads(raw)
        model, number = values["model_id"], values["seq_id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return (model, number) if isinstance(model, str) and isinstance(number, int) else None


def _problems(error: ValidationError) -> Iterable[str]:
    for problem in error.errors(include_url=False, include_input=False)[:5]:
        place = ".".join(map(str, problem["loc"]))
        what = "this key is not served" if problem["type"] == "extra_forbidden" else problem["msg"]
        yield f"{place}: {what.removeprefix('Value error, ')}" if place else what.removeprefix("Value error, ")
