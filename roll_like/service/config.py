"""The configuration of `roll-like service`, and the run's configuration that its workers are started from."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll_like.config.base import (
    PluginConfig,
    PluginSetting,
    PositiveFloat,
    PositiveInt,
    Violation,
    raise_violations,
)
from roll_like.config.inference import InferenceConfig, default_engine, engines_share_gpus
from roll_like.config.load import import_plugins
from roll_like.config.named import NAME_PATTERN, NamedConfig
from roll_like.config.resources import DeviceRoles, ResourcesConfig
from roll_like.config.rollout import RolloutConfig
from roll_like.config.run import CheckpointConfig, MetricsConfig
from roll_like.config.sampling import SamplingRunConfig
from roll_like.config.source import read_source
from roll_like.config.training import TrainingConfig
from roll_like.registry import TRACKERS, TRAINING_BACKENDS

#: Of a service: trainer and engines, and nothing beside them.
ServiceResources = Annotated[ResourcesConfig, DeviceRoles("training", "inference")]
#: Keys of `training` that have no effect here, and why.
_WITHOUT_EFFECT = {
    "optimizer": "clients send the optimizer's settings with each `optim_step`",
    "share_prompts": "every sequence of a request has a row of its own",
    "sleep": "trainer and engines work at the same time",
}


class ServiceTrainingConfig(TrainingConfig):
    """The trainer of a service. With `lora` it trains many adapters over one model, without it one whole model."""

    backend: str = Field(default="fsdp2", description="Training backend; one that can switch between models.")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=3, description="What is sharded over the `workers`; `fsdp2` has 3 only."
    )


class ServiceConfig(NamedConfig):
    """A service: everything its YAML file may say."""

    common: ClassVar[tuple[str, ...]] = ("name", "model", "training", "inference", "resources", "port")

    name: str = Field(default="service", pattern=NAME_PATTERN, description="Name of the service and of its folder.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        default=0, description="Seed of adapters that are created without one."
    )
    model_name: str | None = Field(
        default=None, description="What clients call the model (`base_model`); default: `model.path`."
    )
    training: ServiceTrainingConfig = Field(default_factory=ServiceTrainingConfig)
    inference: InferenceConfig = Field(default_factory=default_engine, description="The engine that samples.")
    resources: ServiceResources
    max_sequence_tokens: PositiveInt = Field(
        default=2048, description="Longest sequence that is trained on, and longest prompt and response. Tokens."
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on; the default is reached from here only.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8100, description="TCP port; 0 takes a free one.")
    api_keys: Path | None = Field(
        default=None,
        description="File with an API key a line, each beginning with `tml-`, as clients want them; default: "
        "`api_keys` in the service's folder, where one is made at the first start.",
    )
    trackers: tuple[Annotated[PluginConfig, PluginSetting(TRACKERS)], ...] = Field(
        default=(),
        description="Where figures go beside `metrics.jsonl`: any of those that runs have as `metrics.trackers`.",
    )
    max_request_mib: PositiveInt = Field(default=64, description="Largest body of a request. MiB.")
    max_models: PositiveInt = Field(
        default=256, description="Models that clients may have at a time, in memory or on disk; one without `lora`."
    )
    max_loaded_models: PositiveInt = Field(
        default=16,
        description="Models in the trainer's memory at a time, each with its optimizer. If more are asked for, those "
        "that were unused for longest go to disk, until their next request.",
    )
    idle_seconds: PositiveFloat = Field(
        default=600.0, description="A model without requests for this long goes to disk too. Seconds."
    )
    max_loras: PositiveInt = Field(
        default=8,
        description="Adapters that an engine holds at a time, and samples with in one batch. No effect where engines "
        "take merged weights instead.",
    )
    recovery_steps: PositiveInt = Field(
        default=10,
        description="Optimizer steps of a model between two copies on disk. When the trainer dies, a model is read "
        "from its copy, and what was asked since is computed once more.",
    )
    session_seconds: PositiveFloat = Field(
        default=300.0,
        description="A client that has not been heard of for so long is taken for dead: its models are unloaded, and "
        "what it waits for is dropped. Clients tell that they live every 10 seconds. Seconds.",
    )

    @property
    def directory(self) -> Path:
        """The service's folder on this machine."""
        return self.runs_dir / self.name

    @property
    def base_model(self) -> str:
        """What clients call the model."""
        return self.model_name or self.model.path

    @cached_property
    def workers(self) -> ServiceRunConfig:
        """The configuration that trainer and engines are started from, as those of a run are."""
        sections = (*NamedConfig.model_fields, "training", "inference", "resources")
        given = {name: getattr(self, name) for name in sections}
        given["import"] = given.pop("import_")
        given["resources"] = given["resources"].model_dump()
        return ServiceRunConfig(
            **given,
            metrics=MetricsConfig(trackers=self.trackers),
            window=self.max_sequence_tokens,
            loaded_models=self.max_loaded_models,
            loras=self.max_loras,
        )

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        raise_violations(type(self).__name__, self.violations())
        self.workers  # noqa: B018 - its own rules
        return self

    def violations(self) -> Iterator[Violation]:
        """Yield every combination of sections that cannot work."""
        for key in self.training.changed(*_WITHOUT_EFFECT):
            why = _WITHOUT_EFFECT[key]
            yield Violation(("training", key), f"this has no effect in a service: {why}; remove it")
        if not TRAINING_BACKENDS.get(self.training.backend).switches_models:
            able = [name for name in sorted(TRAINING_BACKENDS.names()) if TRAINING_BACKENDS.get(name).switches_models]
            yield Violation(
                ("training", "backend"),
                f"{self.training.backend} cannot switch between models with an optimizer each; use {' or '.join(able)}",
            )
        if self.training.lora is not None and self.training.lora.dropout:
            yield Violation(
                ("training", "lora", "dropout"),
                "log-probabilities that clients compare would be of models with and without dropout; remove it",
            )
        if engines_share_gpus(self.resources):
            yield Violation(
                ("resources", "device_mapping"),
                "trainer and engines of a service work at the same time, so they cannot share GPUs; give `training` "
                "and `inference` devices of their own",
            )
        if self.inference.max_model_len is not None and self.inference.max_model_len < self.max_sequence_tokens:
            yield Violation(
                ("inference", "max_model_len"),
                f"{self.inference.max_model_len} tokens cannot hold the longest sequence (max_sequence_tokens: "
                f"{self.max_sequence_tokens}); lower that, or leave this out",
            )


class ServiceRunConfig(SamplingRunConfig):
    """What a service and a run have in common, as trainer and engines want it; no file is of this kind."""

    implementation: ClassVar[str] = "roll_like.service.service:Service"

    pipeline: Literal["service"] = "service"
    training: ServiceTrainingConfig
    rollout: RolloutConfig = Field(
        default_factory=lambda: RolloutConfig(prompts_per_step=1, samples_per_prompt=1, max_response_tokens=1)
    )
    steps: PositiveInt = 1
    evaluation: None = None
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig(every_minutes=0, export=False))
    window: PositiveInt
    loaded_models: PositiveInt
    loras: PositiveInt

    @property
    def engine_adapters(self) -> int:
        """Adapters that an engine has room for: those of samplers, and one that is there from the start."""
        return 1 + self.loras

    @property
    def models_aside(self) -> int:
        """Models in memory beside the one that ranks work on; of whole models there is one."""
        return 0 if self.training.lora is None else self.loaded_models - 1

    @property
    def longest_sample(self) -> int:
        """Most tokens of one sequence."""
        return self.window

    @property
    def longest_sample_terms(self) -> str:
        """The key that says so."""
        return f"max_sequence_tokens = {self.window}"

    @property
    def longest_response(self) -> int:
        """Most tokens that are sampled in one answer."""
        return self.window

    @property
    def row_sharing(self) -> str | None:
        """None: every sequence has a row of its own."""
        return None


def load_service_config(path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> ServiceConfig:
    """Return the validated configuration in `path`.

    Args:
        overrides: `key=value` with dotted keys; values are YAML.

    Raises:
        ConfigError: Everything that is wrong with it, in one message.
        PluginError: A module of `import:` cannot be imported.
    """
    source = read_source(Path(path), overrides)
    import_plugins(source.values.get("import", ()))
    return ServiceConfig.from_source(source)
