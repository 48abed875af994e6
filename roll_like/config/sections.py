"""The sections that pipelines of every kind share: model, data, inference, training, resources and so on."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_serializer, model_validator
from pydantic_core import CoreSchema

from roll_like.config.base import ConfigModel, PluginConfig, PluginSetting
from roll_like.config.gpus import GPU_KINDS, GPUName
from roll_like.config.python_rows import Rows, as_section, is_dataset
from roll_like.errors import PluginError
from roll_like.registry import TRACKERS, TRAINING_BACKENDS
from roll_like.types import ReasoningTags

Precision = Literal["float32", "bfloat16", "float16"]
#: What a trained model is for, by the hub's names: it writes, or it scores what others wrote.
ModelTask = Literal["text-generation", "text-classification"]
#: How the layers of a trained model attend: `TrainerConfig.attention`.
Attention = Literal["auto", "dense", "varlen", "flex"]
PositiveInt = Annotated[int, Field(ge=1)]
Steps = Annotated[int, Field(ge=1, le=1_000_000_000)]
PositiveFloat = Annotated[float, Field(gt=0)]
Epochs = Annotated[float, Field(gt=0, le=1_000_000)]
Fraction = Annotated[float, Field(ge=0, le=1)]
#: A running mean with 1 never moves, and Adam's correction of its start divides by 0.
DecayRate = Annotated[float, Field(ge=0, lt=1)]


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

    def at(self, path: str) -> ModelConfig:
        """Return the section for another model as it is: with all its layers, and no revision of this one's."""
        return self.model_copy(update={"path": path, "revision": None, "keep_layers": None})


class SourceConfig(ConfigModel):
    """One dataset."""

    path: str = Field(
        default="",
        description="A file (`.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`), a directory of them, or a hub dataset id.",
    )
    rows: Rows | None = Field(
        default=None, description="The rows themselves, in place of a `path`: a list of mappings from fields to values."
    )
    name: str | None = Field(default=None, description="Name in metrics; default: stem of its path.")
    subset: str | None = Field(
        default=None,
        description="Subset (configuration) of a dataset, such as `main` of `openai/gsm8k`; default: its only one.",
    )
    split: str = Field(
        default="train",
        description="Split of a hub dataset or of a directory, such as `test`, `train[:100]` or `train+test`.",
    )
    revision: str | None = Field(
        default=None, description="Revision of a hub dataset (branch, tag or commit); default: its newest."
    )
    streaming: bool = Field(
        default=False,
        description="Read rows as steps need them, for data that fits neither in memory nor on disk: they come in the "
        "order of the files, shuffled within blocks of `stream_block`. Such a run lasts a number of `steps`.",
    )
    stream_block: PositiveInt = Field(
        default=4096, description="With `streaming`: rows that are shuffled with each other, and are in memory at once."
    )
    weight: PositiveFloat = Field(
        default=1.0, description="How often rows of this source are drawn, relative to the other sources."
    )
    prompt_field: str = Field(default="prompt", description="Field with the prompt: a string or a list of messages.")
    system_prompt: str | None = Field(default=None, description="System message put before every conversation.")
    images_field: str | None = Field(
        default="images",
        description="Field with the row's images: paths from the file's folder, `data:` URLs or bytes. null: none.",
    )
    transcripts: bool = Field(
        default=False,
        description="Texts of conversations are transcripts, as in hh-rlhf, and become messages: a blank line and "
        "`Human:` begin a user's message, a blank line and `Assistant:` the assistant's.",
    )

    @model_validator(mode="before")
    @classmethod
    def _rows_alone(cls, value: Any) -> Any:
        """In Python, rows may stand for a source that has nothing besides."""
        return {"rows": value} if isinstance(value, list) or is_dataset(value) else value

    @model_validator(mode="after")
    def _path_or_rows(self) -> Self:
        if bool(self.path) == (self.rows is not None):
            found = "both are set" if self.path else "neither is set"
            raise ValueError(f"a source has a `path` or `rows`, and {found}")
        if self.rows is not None:
            useless = [key for key in ("subset", "revision", "streaming") if getattr(self, key)]
            if useless:
                raise ValueError(f"`rows` are here as they are, and have no {useless[0]}; remove it, or set a `path`")
        return self

    @property
    def label(self) -> str:
        """Its `name`, or the stem of its path."""
        return self.name or (Path(self.path).stem if self.path else "rows")

    @property
    def place(self) -> str:
        """What it is called in messages: its path, or that it is rows."""
        return self.path or "`rows`"

    @property
    def fields(self) -> dict[str, str]:
        """The fields of rows that are read by name: each key with what it is set to."""
        values = ((key, getattr(self, key)) for key in type(self).model_fields if key.endswith("_field"))
        return {key: value for key, value in values if isinstance(value, str)}


class DataSource(SourceConfig):
    """One dataset and how its rows become tasks."""

    name: str | None = Field(default=None, description="Name in metrics and in `rewards.use[].sources`; default: stem.")
    domain: str | None = Field(
        default=None, description="Domain of its tasks, in metrics and in `domains`; default: its name."
    )
    answer_field: str | None = Field(
        default=None,
        description="Field with the reference answer, if there is one. That of `prompt_field`: its conversations end "
        "with the assistant's answer, and what is before it is the prompt.",
    )

    answer_after: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="The reference answer is what follows this text in `answer_field`, its last occurrence: `####` in "
        "GSM8K. Default: the whole field.",
    )
    answer_boxed: bool = Field(
        default=False,
        description="The reference answer is what the last `\\boxed{…}` in `answer_field` holds, as in MATH's "
        "solutions.",
    )

    @model_validator(mode="after")
    def _answers_have_a_field(self) -> Self:
        asked = [key for key in ("answer_after", "answer_boxed") if getattr(self, key)]
        if asked and self.answer_field is None:
            raise ValueError(f"{asked[0]} says where in `answer_field` the reference answer is; set that too")
        if len(asked) > 1:
            raise ValueError("answer_after and answer_boxed both say where the reference answer is; remove one of them")
        return self

    @property
    def holds_conversations(self) -> bool:
        """Whether prompts and reference answers are in one field."""
        return self.answer_field == self.prompt_field

    @property
    def domain_label(self) -> str:
        """Its `domain`, or its label."""
        return self.domain or self.label


class DataConfig(ConfigModel):
    """What the policy is trained on."""

    @model_validator(mode="before")
    @classmethod
    def _rows_alone(cls, value: Any) -> Any:
        return as_section(value)

    sources: Annotated[tuple[DataSource, ...], Field(min_length=1)] = Field(description="Datasets, weighted.")
    max_prompt_tokens: PositiveInt = Field(default=512, description="Longer prompts are left out, and counted. Tokens.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over a source, seeded by `seed`.")

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [source.label for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sources are called {twice[0]!r}; give each a `name` of its own")
        return self


class SamplingConfig(ConfigModel):
    """How tokens are drawn."""

    temperature: Annotated[float, Field(ge=0, le=100)] = Field(default=1.0, description="0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus; 1 keeps all tokens.")
    top_k: Annotated[int, Field(ge=0)] = Field(default=0, description="Keep the k likeliest tokens; 0 keeps all.")
    max_response_tokens: PositiveInt = Field(default=512, description="Longer responses are cut. Tokens.")
    stop: tuple[str, ...] = Field(default=(), description="Strings that end a response.")


class OptimizerConfig(ConfigModel):
    """AdamW and its learning rate."""

    lr: Annotated[float, Field(gt=0, lt=1)] = Field(default=1e-6, description="Peak learning rate; below 1.")
    betas: tuple[DecayRate, DecayRate] = Field(default=(0.9, 0.999), description="Adam's decay rates; below 1.")
    eps: PositiveFloat = Field(default=1e-8, description="Adam's denominator term.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="Decoupled weight decay.")
    schedule: Literal["constant", "cosine", "linear"] = Field(default="constant", description="After the warm-up.")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(default=0, description="Optimizer steps of linear warm-up.")
    min_lr_ratio: Fraction = Field(default=0.0, description="Final learning rate as a share of `lr`.")
    max_grad_norm: PositiveFloat = Field(default=1.0, description="Clip the global gradient norm to this.")


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
        description="Names of linear layers, such as `q_proj`; default: all in the model's blocks, without the head "
        "and without a vision tower.",
    )
    init: Literal["kaiming", "gaussian"] = Field(
        default="kaiming",
        description="How A is drawn: uniform as linear layers are, or normal with deviation 1 / rank. B starts at 0.",
    )
    quantization: Literal["nf4", "fp4"] | None = Field(
        default=None,
        description="Keep the frozen linear layers in 4 bits (QLoRA, arXiv:2305.14314): `nf4`, whose values are spaced "
        "as those of a normal distribution, or `fp4`. Needs the extra `qlora` and `zero_stage` 2 or less.",
    )


class TrainerConfig(ConfigModel):
    """What all trained models have in common."""

    backend: str = Field(
        default="deepspeed",
        description="Training backend: `deepspeed`, `fsdp2` (PyTorch's fully sharded data parallelism), or one that is "
        "registered.",
    )
    workers: PositiveInt = Field(
        default=1, description="Data-parallel ranks. A device range is divided evenly among them."
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="What is sharded over the `workers`: 1 optimizer, 2 gradients too, 3 weights too. With 3, weights "
        "of a reference and of teachers with several `workers` are sharded as well. `fsdp2` has 3 only.",
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW and its schedule.")
    max_tokens_per_micro_batch: PositiveInt = Field(
        default=4096, description="Budget of one forward pass of one rank. Tokens, padding included."
    )
    sequence_parallel: PositiveInt = Field(
        default=1,
        description="Ranks that share each row; every one computes a part of its tokens (DeepSpeed-Ulysses). For rows "
        "that do not fit on one GPU: a row may be as long as the budgets of these ranks together. Must divide "
        "`workers` and the model's attention heads.",
    )
    expert_parallel: PositiveInt = Field(
        default=1,
        description="For mixtures of experts: ranks that divide the experts of each layer. Tokens travel to the ranks "
        "that have their experts, in place of weights (docs/moe.md). `fsdp2` only. Must divide `workers` and the "
        "number of experts in a layer.",
    )
    share_prompts: bool = Field(
        default=True, description="Compute the prompt of a group once instead of once per sample. Same gradients."
    )
    attention: Attention = Field(
        default="auto",
        description="`dense`: with masks, whose memory grows with the square of a row's length; the fastest for short "
        "rows on CPU. `varlen`: over the samples of joined rows without padding or masks, by torch's flash kernel on "
        "GPUs; for long rows. `flex`: over joined rows by torch's flex attention, GPUs with Triton only; for long rows "
        "of models with soft-capped scores, attention sinks or heads wider than 256, which varlen refuses or computes "
        "slowly. `auto`: on GPUs in 16-bit precision varlen or, for such models, flex; else dense.",
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations: less memory, more time.")
    offload: Literal["none", "optimizer", "optimizer_and_parameters"] = Field(
        default="none", description="What DeepSpeed keeps in host memory during a step. GPUs only."
    )
    lora: LoRAConfig | None = Field(
        default=None,
        description="Train low-rank adapters and leave the model frozen; default: train all of it. A critic's value "
        "head and a reward model's output are trained in full.",
    )
    sleep: bool | None = Field(
        default=None,
        description="Move weights and optimizer to host memory while an inference engine generates on the same GPUs. "
        "Default: yes. No effect if no GPU is shared.",
    )

    @field_validator("backend")
    @classmethod
    def _known_backend(cls, name: str) -> str:
        try:
            TRAINING_BACKENDS.get(name)
        except PluginError as error:
            raise ValueError(f"{error.message}; {error.fix}") from error
        return name


class TrainingConfig(TrainerConfig):
    """The training engine."""

    freeze_vision: bool = Field(
        default=True,
        description="Leave the vision tower of a vision-language model as it is; with `lora` it has to be true. Text "
        "models have none.",
    )
    logprob_chunk_tokens: PositiveInt = Field(default=1024, description="Rows of logits that exist at a time. Tokens.")
    logprob_chunk_vocab: PositiveInt = Field(
        default=65536, description="Columns of logits that exist at a time. Vocabulary entries."
    )

    def frozen(self, *, workers: int, max_tokens_per_micro_batch: int) -> TrainingConfig:
        """Return what a model computes with that is not trained: ranks and budget of its own, the rest as here.

        Its weights are sharded over its ranks where those of the trained model are.
        """
        return TrainingConfig(
            backend=self.backend,
            workers=workers,
            zero_stage=3 if self.zero_stage == 3 and workers > 1 else 0,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            share_prompts=self.share_prompts,
            attention=self.attention,
            logprob_chunk_tokens=self.logprob_chunk_tokens,
            logprob_chunk_vocab=self.logprob_chunk_vocab,
        )


class CriticConfig(TrainerConfig):
    """A value model of its own, for advantage estimators that need one."""

    path: str | None = Field(default=None, description="Model that the critic starts from; default: `model.path`.")
    value_clip: PositiveFloat | None = Field(
        default=0.2, description="How far a value may move from the one before the step; null: any distance."
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="First steps, in which the critic learns and the policy does not."
    )
    updates_per_step: PositiveInt = Field(default=1, description="Optimizer steps of the critic over a step's samples.")


class ReferenceSection(ConfigModel):
    """The model that the policy is compared with."""

    if TYPE_CHECKING:  # each pipeline has its own modes
        mode: str

    path: str | None = Field(default=None, description="Another model with the same vocabulary; default: `model.path`.")
    workers: PositiveInt = Field(default=1, description="Ranks of the frozen model.")
    max_tokens_per_micro_batch: PositiveInt = Field(default=8192, description="Budget of one forward pass. Tokens.")


class ReferenceConfig(ReferenceSection):
    """A frozen copy of the starting model, for KL terms."""

    mode: Literal["cluster", "adapter_off"] = Field(
        default="cluster",
        description="`cluster`: a frozen model of its own. `adapter_off`: the trainer with its adapters switched off "
        "(`training.lora`), and no second model.",
    )


_SPAN = re.compile(r"(\d+)(?:-(\d+))?")


class DeviceRange(ConfigModel):
    """Devices `[start, stop)`, counted through all nodes. Written `"0-3"` (inclusive) or `"5"` in YAML."""

    start: Annotated[int, Field(ge=0)] = Field(description="First device.")
    stop: PositiveInt = Field(description="The device after the last one.")

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, list | float):
            raise ValueError(f'expected a device range like "0-3" or "5", found {value!r}')
        if not isinstance(value, str):
            return value
        match = _SPAN.fullmatch(value.strip())
        if match is None:
            raise ValueError(f'expected a device range like "0-3" or "5", found {value!r}')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the device range {value!r} ends before it starts")
        return {"start": first, "stop": last + 1}

    @model_serializer
    def _written(self) -> str:
        return str(self)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {
            "description": "Devices counted through all nodes from 0, ends included: `0-3`, or one: `5`.",
            "anyOf": [{"type": "string", "pattern": r"^\s*\d+(-\d+)?\s*$"}, {"type": "integer", "minimum": 0}],
        }

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return str(self.start) if len(self) == 1 else f"{self.start}-{self.stop - 1}"

    def overlaps(self, other: DeviceRange) -> bool:
        """Return whether the two share a device."""
        return self.start < other.stop and other.start < self.stop


class TrainerDeviceMappingConfig(ConfigModel):
    """Which devices the trainer has."""

    training: DeviceRange = Field(description="Devices of the training engine.")


class SamplingDeviceMappingConfig(TrainerDeviceMappingConfig):
    """Which devices each role has. Equal device ranges are colocated (time-shared), disjoint ones run side by side."""

    inference: DeviceRange = Field(description="Devices of the inference engines.")
    reference: DeviceRange | None = Field(
        default=None, description="Devices of the reference model; default: `training`."
    )
    judge: DeviceRange | None = Field(default=None, description="Devices of the judge model; default: `inference`.")

    @property
    def models(self) -> tuple[DeviceRange, ...]:
        """Devices of the models that are trained, and of the one that they are compared with."""
        return (self.training, self.reference or self.training)


class DeviceMappingConfig(SamplingDeviceMappingConfig):
    """Which devices each role has. Equal device ranges are colocated (time-shared), disjoint ones run side by side."""

    critic: DeviceRange | None = Field(default=None, description="Devices of the critic; default: `training`.")

    @property
    def models(self) -> tuple[DeviceRange, ...]:
        """Devices of the models that are trained, and of the one that they are compared with."""
        return (*super().models, self.critic or self.training)


class HardwareConfig(ConfigModel):
    """What hardware the run takes. A device is a GPU, or a core with `device: cpu`."""

    device: Literal["cpu", "cuda"] = Field(description="What a device is: a CPU core or a GPU.")
    nodes: PositiveInt = Field(default=1, description="Machines.")
    devices_per_node: PositiveInt = Field(description="Cores or GPUs to take on each machine.")
    gpu: GPUName | None = Field(
        default=None,
        description="Kind of the GPUs, for the plan of `--check`: their memory, and rates for the least seconds of a "
        "step. Default: those of this machine's GPUs, if it has some. A run on GPUs with less memory is refused.",
    )
    gpu_memory_gib: PositiveFloat | None = Field(
        default=None,
        description="Memory of one GPU, for the plan of `--check`, if it differs from that of `gpu`. GiB.",
    )
    cpus_per_device: PositiveFloat = Field(default=4.0, description="CPU cores reserved beside each GPU.")
    address: str | None = Field(
        default=None, description="Ray cluster to join (`auto` or `host:port`); default: start one on this machine."
    )
    start_timeout_seconds: PositiveFloat = Field(
        default=600.0,
        description="How long each role's workers may take to start: load a model, build rewards. Afterwards, how long "
        "work may stand still whose duration is not known yet.",
    )

    @property
    def gpu_memory(self) -> int | None:
        """Memory of one GPU in bytes, where it is configured."""
        kind = None if self.gpu is None else GPU_KINDS[self.gpu].memory_gib
        gib = self.gpu_memory_gib or kind
        return None if gib is None else int(gib * 2**30)


class TrainerResourcesConfig(HardwareConfig):
    """What hardware the run takes. A device is a GPU, or a core with `device: cpu`."""

    device_mapping: TrainerDeviceMappingConfig = Field(description="Devices of each role.")


class SamplingResourcesConfig(TrainerResourcesConfig):
    """What hardware the run takes and how roles divide it. A device is a GPU, or a core with `device: cpu`."""

    device_mapping: SamplingDeviceMappingConfig = Field(description="Devices of each role.")


class ResourcesConfig(SamplingResourcesConfig):
    """What hardware the run takes and how roles divide it. A device is a GPU, or a core with `device: cpu`."""

    device_mapping: DeviceMappingConfig = Field(description="Devices of each role.")


class CheckpointConfig(ConfigModel):
    """When states are written and how many are kept."""

    every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Steps between checkpoints; 0: only by time (`every_minutes`) and at the end."
    )
    every_minutes: Annotated[float, Field(ge=0)] = Field(
        default=10.0,
        description="Write a checkpoint between two steps when the last one is this old; later if the run would wait "
        "for checkpoints more than 2 % of the time; 0: never by time. Minutes.",
    )
    keep: PositiveInt = Field(default=2, description="How many of the latest to keep.")
    keep_best: bool = Field(default=True, description="Also keep the one with the best evaluation score.")
    at_end: bool | Literal["auto"] = Field(
        default="auto",
        description="Write one after the last step. `auto`: yes, unless the whole run took less than `every_minutes` "
        "and its model is exported. Such a run leaves `model/` and no checkpoint: it can be chatted with, served and "
        "trained further (`model.path`), but `--resume` with more `steps` repeats it.",
    )
    export: bool = Field(default=True, description="Write a Hugging Face directory after the last step.")


class MetricsConfig(ConfigModel):
    """Where figures go. `metrics.jsonl` is always written."""

    trackers: tuple[Annotated[PluginConfig, PluginSetting(TRACKERS)], ...] = Field(
        default_factory=lambda: (TRACKERS.get("mlflow").Config(),),
        description="Any of `mlflow`, `tensorboard`, `wandb`, or a registered one.",
    )
    console: Literal["auto", "live", "plain", "quiet"] = Field(
        default="auto", description="`auto` is a live view on a terminal, plain lines elsewhere."
    )
    sampled_rollouts: Annotated[int, Field(ge=0)] = Field(
        default=10, description="Rollouts shown at the end of the run, next to those of the first step."
    )
    traces_per_step: Annotated[int, Field(ge=0)] | None = Field(
        default=16,
        description="Rollouts of each step, and of each evaluation, that trackers get as traces, evenly over groups. "
        "`null`: all; 0: none. Rollouts.",
    )
