"""The sections of models: `training`, `critic` and `reference`, and what a model in training holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from roll_like.config.base import ConfigModel, Fraction, PositiveFloat, PositiveFraction, PositiveInt, Violation
from roll_like.config.resources import DeviceRange
from roll_like.errors import PluginError
from roll_like.registry import TRAINING_BACKENDS

#: How the layers of a trained model attend: `TrainerConfig.attention`.
Attention = Literal["auto", "dense", "varlen", "flex", "cudnn"]
#: Those that join the rows of a micro-batch, without padding and without masks.
JOINING: tuple[Attention, ...] = ("varlen", "flex", "cudnn")


#: Most matrix elements that a rank orthogonalises for Muon between two exchanges, unless one matrix has more.
MUON_ROUND = 2**25
#: A running mean with 1 never moves, and Adam's correction of its start divides by 0.
DecayRate = Annotated[float, Field(ge=0, lt=1)]


def budget_violations(
    section: tuple[str, ...], budget: int, longest: int, terms: str, *, sharing: int = 1, pairs: bool = False
) -> Iterator[Violation]:
    """Yield a token budget of a micro-batch that is less than one sample, or the two answers of a pair.

    Args:
        budget: Of one rank, in tokens.
        longest: Longest sample, in tokens.
        pairs: Whether two samples have to fit.
    """
    needed = 2 * longest if pairs else longest
    if budget * sharing < needed:
        found = f"{budget} tokens" if sharing == 1 else f"{budget} tokens on each of {sharing} ranks"
        text = f"{found} cannot hold one longest sample"
        if pairs:
            text = f"{found} cannot hold the two answers of one pair: 2 × {longest} = {needed}"
        yield Violation(
            (*section, "max_tokens_per_micro_batch"), f"{text} ({terms}); set it to {-(-needed // sharing)} or more"
        )


class MuonConfig(ConfigModel):
    """Muon: steps of weight matrices along their momentum, made orthogonal (Jordan et al. 2024; arXiv:2502.16982)."""

    common: ClassVar[tuple[str, ...]] = ("lr",)

    lr: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="Peak learning rate of the matrices, with the same schedule; default: `optimizer.lr`."
    )
    momentum: DecayRate = Field(default=0.95, description="Decay rate of the momentum; below 1.")
    nesterov: bool = Field(default=True, description="Look ahead: mix the gradient into the momentum once more.")
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = Field(default=5, description="Steps of Newton-Schulz's iteration.")
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw",
        description="What the rate of a matrix [A, B] is multiplied by: `match_rms_adamw` 0.2·√max(A, B), for the "
        "rates and the decay of AdamW; `original` √max(1, A / B), for rates near 0.02.",
    )


class OptimizerConfig(ConfigModel):
    """The optimizer and its learning rate: AdamW, and Muon for weight matrices if it is set."""

    common: ClassVar[tuple[str, ...]] = ("lr", "schedule", "warmup_steps")

    lr: Annotated[float, Field(gt=0, lt=1)] = Field(default=1e-6, description="Peak learning rate; below 1.")
    betas: tuple[DecayRate, DecayRate] = Field(default=(0.9, 0.999), description="Adam's decay rates; below 1.")
    eps: PositiveFloat = Field(default=1e-8, description="Adam's denominator term.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Decoupled weight decay of all that is trained, biases and norms included."
    )
    schedule: Literal["constant", "cosine", "linear"] = Field(default="constant", description="After the warm-up.")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(default=0, description="Optimizer steps of linear warm-up.")
    min_lr_ratio: Fraction = Field(default=0.0, description="Final learning rate as a share of `lr`.")
    max_grad_norm: PositiveFloat = Field(default=1.0, description="Clip the global gradient norm to this.")
    muon: MuonConfig | None = Field(
        default=None,
        description="Move the weights of linear layers and of experts with Muon, and the rest (embeddings, output "
        "head, routers, norms, biases) with AdamW; `{}` for its defaults. Default: AdamW moves all.",
    )

    def moment_bytes(self, sizes: StateSizes) -> int:
        """Return the memory of the running means of all that is trained: two of AdamW, one of Muon, in float32."""
        return 8 * sizes.trained - (4 * sizes.matrices if self.muon is not None else 0)

    def step_bytes(self, sizes: StateSizes) -> int:
        """Return what a step takes beside gradients and states: a round of Muon's, in bfloat16.

        A round's pieces are there as they are sent, as they came, put together, and made orthogonal; with products of
        one matrix.
        """
        if self.muon is None:
            return 0
        largest = min(sizes.largest, sizes.layer, sizes.matrices)
        return 2 * (4 * min(max(MUON_ROUND, largest), sizes.matrices) + 4 * largest)


class LoRAConfig(ConfigModel):
    """Trains a low-rank product beside each weight matrix, and not the matrix (Hu et al. 2021, arXiv:2106.09685)."""

    common: ClassVar[tuple[str, ...]] = ("rank", "alpha")

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


def _backends_with(capability: str) -> str:
    """Return the names of the training backends that have a capability, for messages."""
    return " or ".join(
        name for name in sorted(TRAINING_BACKENDS.names()) if getattr(TRAINING_BACKENDS.get(name), capability)
    )


#: Keys of the sizes by which ranks divide one model.
PARALLEL_SIZES = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "expert_parallel",
    "expert_tensor_parallel",
    "sequence_parallel",
)


class TrainerConfig(ConfigModel):
    """What all trained models have in common."""

    backend: str = Field(
        default="deepspeed",
        description="Training backend: `deepspeed`, `fsdp2` (PyTorch's fully sharded data parallelism), `megatron` "
        "(Megatron-Core), or one that is registered.",
    )
    workers: PositiveInt = Field(
        default=1, description="Data-parallel ranks. A device range is divided evenly among them."
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="What is sharded over the `workers`: 1 optimizer, 2 gradients too, 3 weights too. With 3, weights "
        "of a reference and of teachers with several `workers` are sharded as well. `fsdp2` has 3 only, `megatron` 0 "
        "and 1.",
    )
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig, description="AdamW or Muon, and the schedule of the rate."
    )
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
        "that have their experts, in place of weights (docs/moe.md). `fsdp2` and `megatron` only. Must divide "
        "`workers` and the number of experts in a layer.",
    )
    tensor_parallel: PositiveInt = Field(
        default=1,
        description="Ranks that divide the matrices of each layer, the vocabulary, and between them the tokens; they "
        "compute the same rows (docs/architecture.md, with the families of models). `fsdp2` and `megatron` "
        "only. Must divide `workers`, the model's attention and key heads and the inner width of its feed-forward "
        "layers; experts are divided by `expert_parallel`.",
    )
    pipeline_parallel: PositiveInt = Field(
        default=1,
        description="Ranks that divide the layers; they compute the same rows, one micro-batch each at a time. "
        "`megatron` only. Must divide `workers`; times `virtual_pipeline` it is at most the number of layers.",
    )
    virtual_pipeline: PositiveInt = Field(
        default=1,
        description="Parts of the layers that each rank of `pipeline_parallel` has: with more, ranks wait less for "
        "each other and send more (interleaved 1F1B). `megatron` only.",
    )
    expert_tensor_parallel: PositiveInt = Field(
        default=1,
        description="Ranks that divide the matrices of each expert; `tensor_parallel` divides all others. `megatron` "
        "only.",
    )
    share_prompts: bool = Field(
        default=True, description="Compute the prompt of a group once instead of once per sample. Same gradients."
    )
    attention: Attention = Field(
        default="auto",
        description="`dense`: with masks, whose memory grows with the square of a row's length; the fastest for short "
        "rows on CPU. `varlen`: over the samples of joined rows without padding or masks, by torch's flash kernel on "
        "GPUs; for long rows. `flex`: over joined rows by torch's flex attention, GPUs with Triton only; for long rows "
        "of models with soft-capped scores, attention sinks or heads wider than 256, which varlen computes "
        "slowly. `cudnn`: varlen, with cuDNN's kernel for sequences of 4,096 tokens and more on an H100 and newer, in "
        "half the time. `auto`: on GPUs in 16-bit precision cudnn where torch itself prefers it (from cuDNN 9.15.1 on, "
        "since earlier ones computed some lengths wrong, on an H100 or B200, unless TORCH_CUDNN_SDPA_DEPRIORITIZED is "
        "set), else varlen or, for such models, flex; else dense.",
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations: less memory, more time.")
    compile: bool = Field(
        default=False,
        description="Compile the layers of the model that is trained with torch.compile (Inductor), which fuses what "
        "lies between matrix products: less time and memory a step, for a minute or so at the start. For GPUs; not "
        "with DeepSpeed's `zero_stage` 3, `lora.quantization`, `sequence_parallel`, `expert_parallel` or "
        "`algorithm.router_replay`.",
    )
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

    @property
    def data_ranks(self) -> int:
        """Groups of neighbouring ranks that have rows of their own."""
        return int(TRAINING_BACKENDS.get(self.backend).data_ranks(self))

    @property
    def sharing(self) -> int:
        """Ranks of such a group, which get the same rows."""
        return self.workers // self.data_ranks

    def violations(self, key: str, device: str) -> Iterator[Violation]:
        """Yield what cannot work in the section at a key, or has no effect.

        Args:
            key: `training` or `critic`.
            device: `resources.device`.
        """
        if device == "cpu" and self.offload != "none":
            yield Violation(
                (key, "offload"),
                f"{self.offload!r} moves states from a GPU to host memory, and resources.device is cpu, "
                "where they are already; set offload: none",
            )
        if device == "cpu" and self.attention in ("flex", "cudnn"):
            what = "has a backward pass on GPUs only" if self.attention == "flex" else "is a kernel of GPUs"
            yield Violation(
                (key, "attention"),
                f"{self.attention!r} {what}, and resources.device is cpu; use varlen, or dense",
            )
        if self.optimizer.schedule == "constant" and self.optimizer.min_lr_ratio:
            yield Violation(
                (key, "optimizer", "min_lr_ratio"),
                "a constant schedule keeps the peak learning rate to the end, so this has no effect; remove it, or set "
                "schedule: cosine (or linear)",
            )
        yield from self._compiles(key)
        yield from self._ranks_divide_rows_and_experts(key)
        yield from self._ranks_divide_matrices(key)
        yield from self._orthogonalises(key)
        yield from self._backend_takes_it(key)

    def _compiles(self, key: str) -> Iterator[Violation]:
        """Yield what compiled layers were not shown to compute."""
        if not self.compile:
            return
        quantization = None if self.lora is None else self.lora.quantization
        for name, found, needed in (
            ("lora.quantization", quantization, None),
            ("sequence_parallel", self.sequence_parallel, 1),
            ("expert_parallel", self.expert_parallel, 1),
        ):
            if found != needed:
                yield Violation(
                    (key, "compile"),
                    f"layers are not compiled together with {key}.{name}, and that is {found}; remove one of the two",
                )

    def _in_groups(self, key: str, of: str, what: str) -> Iterator[Violation]:
        """Yield workers that do not make up whole groups of the size that a key has."""
        size = getattr(self, of)
        if self.workers % size:
            yield Violation(
                (key, of),
                f"{self.workers} workers cannot be divided into groups of {size} that {what}; set {key}.workers to a "
                f"multiple of {size}",
            )

    def _ranks_divide_rows_and_experts(self, key: str) -> Iterator[Violation]:
        sharing, ranks = self.sequence_parallel, self.expert_parallel
        yield from self._in_groups(key, "sequence_parallel", "share rows")
        if sharing > 1 and self.attention == "dense":
            yield Violation(
                (key, "attention"),
                f"'dense' computes whole rows with masks, and sequence_parallel: {sharing} divides rows; use varlen, "
                "or leave it out",
            )
        for name in ("pipeline_parallel", "virtual_pipeline", "expert_tensor_parallel"):
            if getattr(self, name) > 1 and not TRAINING_BACKENDS.get(self.backend).divides_layers:
                able = _backends_with("divides_layers")
                yield Violation(
                    (key, name), f"{self.backend} divides no layers; set {key}.backend: {able}, or remove the key"
                )
        if ranks > 1 and not TRAINING_BACKENDS.get(self.backend).divides_experts:
            able = _backends_with("divides_experts")
            yield Violation(
                (key, "expert_parallel"),
                f"{self.backend} divides no experts among ranks; set {key}.backend: {able}, or "
                "remove the key: zero_stage 3 shards experts like other weights",
            )
        else:
            yield from self._in_groups(key, "expert_parallel", "divide experts")

    def _ranks_divide_matrices(self, key: str) -> Iterator[Violation]:
        ranks = self.tensor_parallel
        if ranks == 1:
            return
        if not TRAINING_BACKENDS.get(self.backend).divides_matrices:
            yield Violation(
                (key, "tensor_parallel"),
                f"{self.backend} divides no matrices among ranks; set {key}.backend: "
                f"{_backends_with('divides_matrices')}, or remove the key: zero_stage 3 shards weights too",
            )
        else:
            yield from self._in_groups(key, "tensor_parallel", "divide matrices")
        if self.sequence_parallel > 1 and not TRAINING_BACKENDS.get(self.backend).divides_layers:
            yield Violation(
                (key, "sequence_parallel"),
                f"does not go together with tensor_parallel: {ranks}, which divides tokens and heads already; remove "
                "one of the two",
            )
        if self.compile:
            yield Violation(
                (key, "compile"),
                f"tensor_parallel: {ranks} replaces the forward passes that would be compiled; remove one of the two",
            )

    def _orthogonalises(self, key: str) -> Iterator[Violation]:
        """Yield what keeps Muon from the whole of a matrix."""
        if self.optimizer.muon is None:
            return
        if not TRAINING_BACKENDS.get(self.backend).orthogonalises:
            yield Violation(
                (key, "optimizer", "muon"),
                f"{self.backend} steps with AdamW alone; set {key}.backend: {_backends_with('orthogonalises')}, or "
                "remove the key",
            )
        if self.tensor_parallel > 1:
            yield Violation(
                (key, "tensor_parallel"),
                f"{self.tensor_parallel} ranks have columns of a matrix each, and Muon puts matrices together by rows; "
                f"remove it, or {key}.optimizer.muon",
            )
        if self.offload != "none":
            yield Violation(
                (key, "offload"),
                f"{self.offload!r} takes the optimizer's step in host memory, and Muon multiplies matrices on the GPU; "
                f"set offload: none, or remove {key}.optimizer.muon",
            )

    def _backend_takes_it(self, key: str) -> Iterator[Violation]:
        backend = TRAINING_BACKENDS.get(self.backend)
        for violation in backend.violations(self):
            yield Violation((key, *violation.path), violation.message)
        quantization = None if self.lora is None else self.lora.quantization
        if quantization is not None and "weights" in backend.divided(self):
            yield Violation(
                (key, "lora", "quantization"),
                f"{quantization!r} keeps 4-bit weights whole on each rank, and {key}.zero_stage: "
                f"{self.zero_stage} of {self.backend!r} shards weights; use {key}.backend: deepspeed with "
                "zero_stage 2 or less, or remove the key",
            )

    def budget_violations(self, key: str, longest: int, terms: str, *, pairs: bool = False) -> Iterator[Violation]:
        """Yield a budget of the micro-batches at a key that one sample, or the two answers of a pair, do not fit into.

        Args:
            key: `training` or `critic`.
            longest: Longest sample, in tokens.
            terms: The keys that this follows from.
            pairs: Whether two samples have to fit.
        """
        budget, sharing = self.max_tokens_per_micro_batch, self.sequence_parallel
        yield from budget_violations((key,), budget, longest, terms, sharing=sharing, pairs=pairs)

    def ranks_have_work(self, count: int, of: str, what: str, more: str) -> Iterator[Violation]:
        """Yield more ranks of the policy than there are rows to compute.

        Args:
            count: Samples, pairs or tokens that ranks divide among themselves.
            of: What they are of: a step or an update.
            what: What they are.
            more: What would give every rank something to do.
        """
        ranks = self.data_ranks
        if count < ranks:
            sharing = self.sharing
            computing = f"{ranks} workers" if sharing == 1 else f"{ranks} times {sharing} workers"
            yield Violation(
                ("training", "workers"),
                f"one {of} has {count} {what}, fewer than {computing}, so some would have nothing to do; use at most "
                f"{count * sharing} workers, or {more}",
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

    common: ClassVar[tuple[str, ...]] = (
        "workers",
        "zero_stage",
        "optimizer",
        "max_tokens_per_micro_batch",
        "gradient_checkpointing",
        "offload",
        "lora",
    )

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

        Its weights are sharded over its ranks where those of the trained model are: also by that model's parallel
        sizes, where there are ranks for them and a backend divides by nothing else.
        """
        sizes: dict[str, int] = {}
        experts = self.pipeline_parallel * self.expert_parallel * self.expert_tensor_parallel
        fits = workers % self.sharing == 0 and workers % experts == 0
        if TRAINING_BACKENDS.get(self.backend).divides_layers and fits:
            sizes = {name: getattr(self, name) for name in PARALLEL_SIZES}
        return TrainingConfig(
            **sizes,
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


class CopySection(ConfigModel):
    """How a copy of the policy's weights follows them, as in TR-DPO (arXiv:2404.09656)."""

    sync_steps: PositiveInt | None = Field(
        default=None, description="Steps after which the copy moves, each time; null: it stays what the policy was."
    )
    mixup_alpha: PositiveFraction = Field(
        default=1.0,
        description="Share of the policy in the copy when it moves: copy ← α·policy + (1 − α)·copy. 1: a hard reset to "
        "the policy; a small one with `sync_steps: 1`: a moving average (EMA).",
    )
    reset_optimizer: bool = Field(
        default=False,
        description="Whether the optimizer forgets its moments when the copy moves (ProRL, arXiv:2505.24864).",
    )

    def copy_violations(self, section: tuple[str, ...], steps: int | None) -> Iterator[Violation]:
        """Yield what would have no effect.

        Args:
            section: Where this is.
            steps: Steps of the run; None where they are not known.
        """
        if self.sync_steps is None:
            for key in self.changed("mixup_alpha", "reset_optimizer"):
                yield Violation(
                    (*section, key),
                    f"without {'.'.join(section)}.sync_steps nothing moves, so this has no effect; set sync_steps, or "
                    "remove it",
                )
        elif steps is not None and self.sync_steps >= steps:
            yield Violation(
                (*section, "sync_steps"),
                f"{self.sync_steps} steps are not over before the last of {steps}, so nothing would be computed with "
                "what has moved; lower it, or set it to null",
            )


class ReferenceSection(CopySection):
    """The model that the policy is compared with."""

    if TYPE_CHECKING:  # each pipeline has its own modes
        mode: str

    path: str | None = Field(default=None, description="Another model with the same vocabulary; default: `model.path`.")
    workers: PositiveInt = Field(default=1, description="Ranks of the frozen model.")
    max_tokens_per_micro_batch: PositiveInt = Field(default=8192, description="Budget of one forward pass. Tokens.")

    @property
    def on_trainer(self) -> bool:
        """Whether the trainer's own ranks compute it, with other weights than the policy's."""
        return self.mode in ("adapter_off", "copy")

    def violations(
        self, training: TrainingConfig, devices: DeviceRange | None, steps: int | None
    ) -> Iterator[Violation]:
        """Yield what does not go with the mode.

        Args:
            training: The `training` section.
            devices: `resources.device_mapping.reference`.
            steps: Steps of the run; None where they are not known.
        """
        if self.mode == "copy":
            yield from self.copy_violations(("reference",), steps)
            yield from keeps_copies(training, ("reference", "mode"), "mode: cluster")
        for key in self.changed(*CopySection.model_fields) if self.mode != "copy" else ():
            stays = {
                "precomputed": "its log-probabilities are computed once, before the first step",
                "adapter_off": "without its adapters the trainer stays the model that training started from",
                "iteration": "it is the policy at the start of each iteration already",
            }
            yield Violation(
                ("reference", key),
                f"a reference of mode {self.mode!r} does not move this way: "
                f"{stays.get(self.mode, 'its ranks have a frozen model of their own')}; set reference.mode: copy, "
                f"with which the trainer's ranks keep a copy of what is trained, or remove {key}",
            )
        if self.on_trainer:
            yield from self._trainer_violations(training, devices)

    def _trainer_violations(self, training: TrainingConfig, devices: DeviceRange | None) -> Iterator[Violation]:
        """Yield what the trainer's ranks cannot do, or do by settings of their own."""
        if self.mode == "adapter_off" and training.lora is None:
            yield Violation(
                ("reference", "mode"),
                "'adapter_off' uses the trainer with its adapters switched off, and it has none; add "
                "`training.lora: {}`, or use mode: cluster",
            )
        if self.path is not None:
            yield Violation(
                ("reference", "path"),
                f"{self.path} would never be loaded: the trainer starts from model.path, and so does this reference; "
                "remove the key, or use mode: cluster",
            )
        for key in self.changed("workers", "max_tokens_per_micro_batch"):
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


class ReferenceConfig(ReferenceSection):
    """A frozen copy of the starting model, for KL terms."""

    mode: Literal["cluster", "adapter_off", "copy"] = Field(
        default="cluster",
        description="`cluster`: a frozen model of its own. `adapter_off`: the trainer with its adapters switched off "
        "(`training.lora`), and no second model. `copy`: the trainer with a copy of what it trains, kept in host "
        "memory; the one that can move (`sync_steps`).",
    )


def keeps_copies(training: TrainerConfig, section: tuple[str, ...], instead: str) -> Iterator[Violation]:
    """Yield a backend whose ranks cannot keep copies of what they train."""
    if not TRAINING_BACKENDS.get(training.backend).keeps_copies:
        able = [name for name in sorted(TRAINING_BACKENDS.names()) if TRAINING_BACKENDS.get(name).keeps_copies]
        yield Violation(
            section,
            f"the backend {training.backend!r} keeps no copies of what it trains; use training.backend: "
            f"{' or '.join(able)}, or {instead}",
        )


#: Bytes of a weight in 4 bits: with an 8-bit scale for 64 of them, and a float32 one for 256 scales.
QUANTIZED_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """What the memory of a model in training follows from; of one stage, where ranks divide the layers.

    Attributes:
        parameters: Number of parameters, adapters included.
        trained: How many of them are trained.
        largest: Elements of the largest tensor.
        layer: Parameters of one layer.
        experts: Those of them that are of experts which its router chooses from.
        outside: Parameters outside of the layers: embedding, final norm, and the head where it is not the embedding.
        width: Bytes of a weight in the forward pass.
        matrices: How many of the trained are weights that Muon can move.
        routed: Parameters of all layers' experts which their routers choose from.
        undivided: Parameters that each of the ranks holds which divide matrices.
    """

    parameters: int
    trained: int
    largest: int
    layer: int
    outside: int
    width: int
    experts: int = 0
    matrices: int = 0
    routed: int = 0
    undivided: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Memory of one rank between and during forward passes, apart from activations.

    Attributes:
        weights: What the forward pass computes with.
        gradients: What is added up until an optimizer step.
        optimizer: Moments, and master weights where the forward pass has less precise ones.
        buffers: What the backend gathers, reduces and copies through while it trains.
        step: What an optimizer step takes beside all of these; no activations exist then.
    """

    weights: int
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    step: int = 0
