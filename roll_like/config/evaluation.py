"""The section `evaluation`: when and on what progress is measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Generic

from pydantic import Field, field_validator

from roll_like.config.base import ConfigModel, PositiveInt, Violation, repeated
from roll_like.config.benchmarks import BenchmarkUse
from roll_like.config.data import DataSource, SourcesSection, SourceT
from roll_like.config.inference import BASE, POLICY


class ScheduleConfig(ConfigModel):
    """When progress is measured."""

    common: ClassVar[tuple[str, ...]] = ("every", "temperature", "samples_per_prompt", "seeds")

    every: Annotated[int, Field(ge=0)] = Field(default=0, description="Steps between evaluations; 0: before and after.")
    before: bool = Field(default=True, description="Evaluate before the first step.")
    after: bool = Field(default=True, description="Evaluate after the last step.")

    def violations(self, key: str) -> Iterator[Violation]:
        """Yield what keeps the evaluation at a key from measuring something."""
        if not (self.before or self.after or self.every):
            yield Violation(
                (key,), "it would never run: before and after are false and every is 0; set one, or remove it"
            )

    def due(self, finished: int, steps: int) -> bool:
        """Return whether to evaluate after so many of all steps."""
        if finished == 0:
            return self.before
        if finished == steps:
            return self.after
        return self.every > 0 and finished % self.every == 0

    def steps_due(self, steps: int) -> list[int]:
        """Return after how many of all steps to evaluate."""
        return [finished for finished in range(steps + 1) if self.due(finished, steps)]


class EvaluationSchedule(ScheduleConfig):
    """When progress is measured, and how answers are sampled for it."""

    temperature: Annotated[float, Field(ge=0, le=100)] = Field(default=1.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus.")
    top_k: Annotated[int, Field(ge=0)] = Field(default=0, description="Keep the k likeliest tokens; 0 keeps all.")
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0,
        description="Keep tokens whose probability is at least this share of the likeliest token's; 0 keeps all.",
    )
    max_response_tokens: PositiveInt | None = Field(default=None, description="Default: the training limit. Tokens.")
    stop: tuple[str, ...] = Field(
        default=(), description="Strings that end an evaluated response, also in its reasoning."
    )

    #: The key that says k of avg@k and pass@k.
    samples_key: ClassVar[str]

    @property
    def samples_per_group(self) -> int:
        """K of avg@k and pass@k."""
        return int(getattr(self, self.samples_key))

    def violations(self, key: str) -> Iterator[Violation]:
        yield from super().violations(key)
        if self.temperature == 0 and self.samples_per_group > 1:
            yield Violation(
                (key, self.samples_key),
                f"at temperature 0 all {self.samples_per_group} samples of a group are equal; set it to 1, or "
                f"{key}.temperature above 0",
            )


#: Keys of the answers to an evaluation's own sources, and what changes the same of a benchmark.
_OF_BENCHMARKS = {
    **{
        key: f"set `{key}` of each benchmark"
        for key in ("temperature", "top_p", "top_k", "samples_per_prompt", "max_response_tokens")
    },
    "max_tasks": "set `limit` of each benchmark",
    "stop": "set `sampling.stop` in a benchmark's YAML file",
    "min_p": "bound the benchmarks by their `top_p` or `top_k`",
}


class EvaluationConfig(SourcesSection, EvaluationSchedule):
    """How progress is measured on tasks that are not trained on."""

    samples_key: ClassVar[str] = "samples_per_prompt"

    sources: tuple[DataSource, ...] = Field(default=(), description="Datasets; these or `benchmarks`, or both.")
    benchmarks: tuple[BenchmarkUse, ...] = Field(
        default=(),
        description="Benchmarks, by name: `[gsm8k, {name: math500, limit: 100}]`. Each brings its own prompts, graders "
        "and sampling, and is measured as `eval/benchmark/NAME/…`.",
    )
    samples_per_prompt: PositiveInt = Field(default=4, description="k of avg@k and pass@k.")
    max_tasks: PositiveInt | None = Field(default=None, description="Use the first so many tasks; default: all.")
    base_model: bool = Field(
        default=False,
        description="With `training.lora`: also measure the model without adapters, as `eval/base/…`. The engine has "
        "it anyway. It is sampled at the first evaluation, and its figures are reported with each.",
    )
    adapters: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")], str] = Field(
        default_factory=dict,
        description="With `training.lora`: further adapters of the same base model, by name, to measure as "
        "`eval/adapter/NAME/…`, as `base_model` is. Each is a directory in PEFT's format, such as the `model/adapter` "
        "of a run.",
    )

    @property
    def longest_of_benchmarks(self) -> int:
        """Longest prompt plus longest answer of the benchmarks; 0 without any. Tokens."""
        return max((use.longest for use in self.benchmarks), default=0)

    def violations(self, key: str) -> Iterator[Violation]:
        if self.sources or not self.benchmarks:
            yield from super().violations(key)
        else:
            yield from ScheduleConfig.violations(self, key)
            for name in self.changed(*_OF_BENCHMARKS):
                yield Violation(
                    (key, name),
                    f"has no effect: it is for {key}.sources, and there are none; add some, or remove it and "
                    f"{_OF_BENCHMARKS[name]}",
                )
        if not (self.sources or self.benchmarks):
            yield Violation((key,), "it measures nothing; set sources, or benchmarks: [gsm8k]")
        for name in repeated(use.label for use in self.benchmarks):
            yield Violation((key, "benchmarks"), f"two benchmarks are called {name!r}; remove one")
        for name in repeated(source.label for source in self.sources):
            yield Violation(
                (key, "sources"), f"two evaluation sources are called {name!r}; give each a `name` of its own"
            )

    @field_validator("adapters")
    @classmethod
    def _names_are_free(cls, adapters: dict[str, str]) -> dict[str, str]:
        for name in (POLICY, BASE):
            if name in adapters:
                raise ValueError(f"{name!r} has a meaning of its own; give the adapter another name")
        return adapters


class RowsEvaluationConfig(SourcesSection, ScheduleConfig, Generic[SourceT]):
    """How progress is measured: on data that is not trained on."""

    sources: Annotated[tuple[SourceT, ...], Field(min_length=1)] = Field(
        description="Datasets; their limits are those of `data`."
    )
