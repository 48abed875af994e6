"""Benchmarks: what a file of one says, and how a run or `roll-like eval` names one.

A benchmark is a YAML file: where its rows are, how one becomes a prompt, how an answer is read and compared, how
answers are sampled. Those of this package are in `roll_like/data/benchmarks/`; `name` may be the path of another.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from roll_like.config.base import ConfigModel, PluginConfig, PluginSetting, PositiveInt, repeated
from roll_like.config.data import DataSource
from roll_like.config.source import read_source
from roll_like.errors import ConfigError
from roll_like.registry import REWARDS

if TYPE_CHECKING:
    from jinja2 import Template

#: The benchmarks of this package.
FOLDER = Path(__file__).parents[1] / "data" / "benchmarks"
#: What the sources and domains of benchmarks begin with, so that none is called as a source of a run.
PREFIX = "benchmark/"


@cache
def template_of(text: str) -> Template:
    """Return a text with `{{field}}` as a template; a field that a row lacks is an error.

    Raises:
        TemplateSyntaxError: It is none.
    """
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(text)


def _template(text: str) -> str:
    from jinja2 import TemplateSyntaxError

    try:
        template_of(text)
    except TemplateSyntaxError as error:
        raise ValueError(f"is no Jinja template: {error}") from error
    return text


TemplateText = Annotated[str, AfterValidator(_template)]


class BenchmarkShots(ConfigModel):
    """Solved examples before each question."""

    common: ClassVar[tuple[str, ...]] = ("rows", "split", "count", "answer")

    rows: tuple[Mapping[str, Any], ...] = Field(
        default=(), description="The examples themselves, with the row's fields."
    )
    split: str | None = Field(default=None, description="Split that the examples are the first rows of.")
    count: PositiveInt | None = Field(default=None, description="How many rows of the split are taken.")
    same: str | None = Field(
        default=None, description="Field that has to be equal in example and question, such as `category`."
    )
    answer: TemplateText = Field(description="What stands behind an example's prompt.")
    separator: str = Field(default="\n\n", description="What stands behind an example.")

    @model_validator(mode="after")
    def _rows_or_split(self) -> Self:
        if bool(self.rows) == (self.split is not None):
            raise ValueError("set either `rows` or `split`")
        if (self.split is None) != (self.count is None):
            raise ValueError("`split` and `count` say together which rows are taken; set both, or `rows`")
        return self


class BenchmarkShuffle(ConfigModel):
    """Options of a choice question in a seeded order, new for each row."""

    fields: tuple[str, ...] = Field(min_length=2, description="Fields with the options; the right one is the first.")
    seed: int = Field(default=0, description="Seed of the orders of all rows, drawn one after the other.")


class BenchmarkSampling(ConfigModel):
    """How answers are sampled."""

    common: ClassVar[tuple[str, ...]] = ("temperature", "samples_per_prompt", "max_response_tokens")

    temperature: Annotated[float, Field(ge=0, le=100)] = Field(default=0.0, description="Sampling temperature.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus.")
    top_k: Annotated[int, Field(ge=0)] = Field(default=0, description="Keep the k likeliest tokens; 0 keeps all.")
    samples_per_prompt: PositiveInt = Field(default=1, description="k of avg@k, pass@k and maj@k.")
    max_prompt_tokens: PositiveInt = Field(description="A longer prompt is an error. Tokens.")
    max_response_tokens: PositiveInt = Field(description="Longest answer. Tokens.")
    stop: tuple[str, ...] = Field(default=(), description="Strings that end an answer; in reasoning they do not.")


class Benchmark(ConfigModel):
    """A file of a benchmark."""

    common: ClassVar[tuple[str, ...]] = ("prompt", "answer", "graders", "sampling")

    title: str = Field(description="What it is called.")
    protocol: str = Field(description="The published protocol that prompts and grading follow, with its version.")
    source: str = Field(description="Where the protocol is published.")
    licence: str = Field(description="Licences of data and prompt.")
    differs: tuple[str, ...] = Field(default=(), description="Where it differs from the protocol.")
    path: str = Field(description="As `data.sources[].path`.")
    subset: str | None = Field(default=None, description="As `data.sources[].subset`.")
    subsets: tuple[str, ...] = Field(
        default=(),
        description="Subsets that rows are taken from in turn; each row has its own in the field `subset`. In place of "
        "`subset`.",
    )
    split: str = Field(description="As `data.sources[].split`.")
    revision: str | None = Field(default=None, description="As `data.sources[].revision`.")
    columns: Mapping[str, Literal["text", "number", "list", "any"]] = Field(
        min_length=1, description="Fields that each row has, and what they hold."
    )
    where: Mapping[str, str] = Field(
        default_factory=dict, description="Only rows whose fields, which are text, have these values are asked."
    )
    shuffle: BenchmarkShuffle | None = Field(
        default=None, description="Options in a seeded order, as `options`, with the right one's letter as `letter`."
    )
    form: Literal["any", "chat", "completion"] = Field(
        default="any",
        description="any: a chat message where the model has a chat template, else plain text. chat: needs one. "
        "completion: always plain text.",
    )
    description: TemplateText | None = Field(
        default=None, description="Before examples and question; in a chat the system message."
    )
    prompt: TemplateText = Field(description="The question, from the row's fields.")
    example_prompt: TemplateText | None = Field(default=None, description="The same of an example; default: `prompt`.")
    prefix: TemplateText | None = Field(default=None, description="What the answer begins with, given to the model.")
    shots: BenchmarkShots | None = Field(default=None, description="Solved examples.")
    answer: TemplateText | None = Field(default=None, description="The reference answer, from the row's fields.")
    derived: Mapping[str, TemplateText] = Field(
        default_factory=dict, description="Further fields for graders, from the row's fields."
    )
    graders: Annotated[tuple[Annotated[PluginConfig, PluginSetting(REWARDS)], ...], Field(min_length=1)] = Field(
        description="Rewards: the first is the score, the others are figures beside it."
    )
    sampling: BenchmarkSampling

    @field_validator("graders")
    @classmethod
    def _names_differ(cls, graders: tuple[PluginConfig, ...]) -> tuple[PluginConfig, ...]:
        if twice := repeated(_name_of(grader) for grader in graders):
            raise ValueError(f"two graders are called {twice[0]!r}; give each a `name` of its own")
        return graders

    @model_validator(mode="after")
    def _subset_or_subsets(self) -> Self:
        if self.subset is not None and self.subsets:
            raise ValueError("set either `subset` or `subsets`")
        if missing := self.where.keys() - self.columns.keys():
            raise ValueError(f"`where` names {min(missing)!r}, which is not in `columns`; add it there")
        if others := [field for field in self.where if self.columns[field] != "text"]:
            raise ValueError(
                f"`where` compares texts, and `columns` has {others[0]!r} as {self.columns[others[0]]!r}; name a "
                "column that is text"
            )
        if self.subsets and self.columns.get("subset") != "text":
            raise ValueError("rows of `subsets` have theirs in the field `subset`; add `subset: text` to `columns`")
        return self


def _name_of(grader: Any) -> str:
    return str(getattr(grader, "name", None) or grader.type)


def benchmark_names() -> list[str]:
    """Return the names of this package's benchmarks."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_benchmark(name: str) -> Benchmark:
    """Return a benchmark of this package by its name, or of another file by its path.

    Raises:
        ConfigError: There is none, or its file is wrong; lists everything that is.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = FOLDER / f"{name}.yaml"
        known = benchmark_names()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"no benchmark is called {name!r}; {meant}known: {', '.join(known)}",
                fix="correct the name, or give the path of a benchmark's YAML file",
            )
    return Benchmark.from_source(read_source(path))


class BenchmarkUse(ConfigModel):
    """A benchmark that is measured, and what is changed of its protocol."""

    common: ClassVar[tuple[str, ...]] = ("name", "path", "limit", "samples_per_prompt")

    name: str = Field(description="Name of a benchmark (`gsm8k`), or the path of a benchmark's YAML file.")
    path: str | None = Field(
        default=None, description="File or directory with its rows; default: its dataset on the hub."
    )
    limit: PositiveInt | None = Field(default=None, description="Use the first so many rows; default: all.")
    form: Literal["chat", "completion"] | None = Field(
        default=None, description="Ask in a chat, or by plain text; default: what the benchmark says."
    )
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        default=None, description="Sampling temperature; default: the benchmark's."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(default=None, description="Default: the benchmark's.")
    top_k: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Keep the k likeliest tokens; 0 keeps all. Default: the benchmark's."
    )
    samples_per_prompt: PositiveInt | None = Field(
        default=None, description="k of avg@k, pass@k and maj@k; default: the benchmark's."
    )
    max_prompt_tokens: PositiveInt | None = Field(default=None, description="Default: the benchmark's. Tokens.")
    max_response_tokens: PositiveInt | None = Field(default=None, description="Default: the benchmark's. Tokens.")

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            read_benchmark(name)
        except ConfigError as error:
            raise ValueError("; ".join(part for part in (error.message, error.fix) if part)) from error
        return name

    @model_validator(mode="after")
    def _several_samples_differ(self) -> Self:
        sampling = self.sampling
        if sampling.temperature == 0 and sampling.samples_per_prompt > 1:
            raise ValueError(
                f"at temperature 0 all {sampling.samples_per_prompt} samples of a prompt are equal; set "
                "samples_per_prompt: 1, or a temperature above 0"
            )
        return self

    @cached_property
    def benchmark(self) -> Benchmark:
        """What its file says."""
        return read_benchmark(self.name)

    @property
    def label(self) -> str:
        """What it is called in tables and metrics."""
        return Path(self.name).stem

    @property
    def domain(self) -> str:
        """What its tasks have as their source and domain."""
        return f"{PREFIX}{self.label}"

    @property
    def asked_form(self) -> Literal["any", "chat", "completion"]:
        """How it asks; `any`: in a chat where the model has a chat template, else by plain text."""
        return self.form or self.benchmark.form

    @property
    def changed_keys(self) -> dict[str, Any]:
        """What is not as the protocol says, by key. No prompt is cut, so its limit changes nothing."""
        own = {**self.benchmark.sampling.model_dump(), "form": self.benchmark.form, "limit": None}
        changed = self.model_dump(include=own.keys() - {"max_prompt_tokens"}, exclude_none=True)
        return {key: value for key, value in changed.items() if value != own[key]}

    @property
    def sampling(self) -> BenchmarkSampling:
        """How answers are sampled."""
        changed = {
            "samples_per_prompt": self.samples_per_prompt,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_prompt_tokens": self.max_prompt_tokens,
            "max_response_tokens": self.max_response_tokens,
        }
        given = {key: value for key, value in changed.items() if value is not None}
        return self.benchmark.sampling.model_copy(update=given)

    @property
    def longest(self) -> int:
        """Longest prompt plus longest answer. Tokens."""
        return self.sampling.max_prompt_tokens + self.sampling.max_response_tokens

    def data(self, split: str | None = None, subset: str | None = None) -> DataSource:
        """Return where its rows are, or those of its examples; of one of its `subsets`."""
        one = self.benchmark
        place = {"path": one.path, "subset": subset or one.subset, "revision": one.revision}
        if self.path is not None:
            place = {"path": self.path, "subset": subset}
        return DataSource(**place, split=split or one.split, name=self.domain, images_field=None)

    def rewards(self) -> Iterator[PluginConfig]:
        """Yield its graders, named after it; they score nothing else."""
        for number, grader in enumerate(self.benchmark.graders):
            changed = {
                "name": f"{self.domain}/{_name_of(grader)}",
                "weight": 0.0 if number else 1.0,
                "sources": (self.domain,),
            }
            yield grader.model_copy(update=changed)


def chosen_benchmarks(names: Sequence[str], places: Sequence[str], changed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return benchmarks of a command line as `evaluation.benchmarks` has them.

    Args:
        names: Names, or several with commas between.
        places: Where the rows of some are, `NAME=PATH`.
        changed: What is changed of all, by key; None: nothing.

    Raises:
        ConfigError: A place is of no benchmark that is named.
    """
    chosen = [name for text in names for name in text.split(",") if name]
    paths = dict(place.partition("=")[::2] for place in places)
    for name, path in paths.items():
        if name not in chosen or not path:
            raise ConfigError(
                f"--data {name}={path}: expected NAME=PATH with one of the benchmarks {', '.join(chosen)}",
                fix="correct it, or add the benchmark to --benchmark",
            )
    kept = {key: value for key, value in changed.items() if value is not None}
    return [{"name": name, **kept, **({"path": paths[name]} if name in paths else {})} for name in chosen]
