"""Who holds how much of each GPU in which phase of a step: by formulas, without a GPU.

Phases and moves are those of `policy_gradient/gpu_sharing.py`: where inference engines and models share GPUs, engines
sleep while a model computes, and models are in host memory while engines sample; elsewhere all models stay on their
GPUs. Not counted: fragmentation of the allocator, and models of rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from roll_like.check.activations import forward_bytes, head_bytes, training_bytes
from roll_like.check.plan import (
    ASIDE,
    DRAFT,
    DRAFT_WEIGHTS,
    GIB,
    adapter_room,
    aside_bytes,
    bytes_per_value,
    copies_bytes,
    trained_parameters,
    training_states,
)
from roll_like.config.inference import GPU_BUCKET_BYTES, NCCL, engines_share_gpus, weight_backend
from roll_like.config.resources import DeviceRange, RolePlan
from roll_like.config.run import RunConfig
from roll_like.config.sampling import PolicyGradientConfig, SamplingRunConfig
from roll_like.config.training import TrainerConfig, TrainingConfig
from roll_like.models.shape import ModelShape
from roll_like.models.stages import kept_passes, layers_of_stage
from roll_like.registry import TRAINING_BACKENDS
from roll_like.training.rows import MAX_SHARED_ROW_TOKENS

#: What a process holds on a GPU before it has a tensor: a CUDA context with its kernels, and a communicator.
#: From users' reports for recent GPUs and CUDA 12 and 13; `nvidia-smi` shows what it is on one.
CONTEXT_BYTES = int(0.6 * GIB)
COMMUNICATOR_BYTES = int(0.5 * GIB)
#: What CUDA graphs of decoding hold, also while an engine sleeps: 0.36 to 0.58 GiB in users' logs of vLLM.
GRAPHS = "CUDA graphs"
GRAPH_BYTES = int(0.6 * GIB)
#: Tokens of one forward pass of an engine: more than vLLM's default on GPUs, unless many guesses ask for more.
ENGINE_TOKENS = 8192
#: Share of a GPU that a plan should leave, because allocators lose some of it to fragmentation.
FRAGMENTATION = 0.08

#: Role and part → bytes.
Parts: TypeAlias = dict[tuple[str, str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUPhase:
    """What one GPU holds in one phase of a step.

    Attributes:
        name: `sampling`, `weight update`, or the role that computes: `training`, `critic`, `reference`, a teacher.
        parts: Role and part → bytes, in the order in which they are shown.
    """

    name: str
    parts: Mapping[tuple[str, str], int]

    @property
    def total(self) -> int:
        """All parts together, in bytes."""
        return sum(self.parts.values())

    def largest(self, *, count: int) -> list[tuple[tuple[str, str], int]]:
        """Return the largest parts, the largest first."""
        return sorted(self.parts.items(), key=lambda part: -part[1])[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUPlan:
    """What each GPU of a range holds, phase by phase.

    Attributes:
        devices: The GPUs: all hold the same.
        phases: In the order of a step.
        host: What one GPU's roles hold in host memory, with what makes room for others there, at most, in bytes.
        cache: Key-value cache of an engine on one GPU in bytes, where it follows from the GPU's memory.
        cache_per_token: What one token takes of it, in bytes.
        left_out: Roles on these GPUs whose memory is not counted.
        stages: Of trained models whose layers are divided: role → which stage is shown, and of how many. It is the one
            that holds most while it computes.
    """

    devices: DeviceRange
    phases: tuple[GPUPhase, ...]
    host: int = 0
    cache: int | None = None
    cache_per_token: int | None = None
    left_out: tuple[str, ...] = ()
    stages: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Model:
    """A model on a GPU: what it holds, what it takes to compute, and whether it makes room for engines.

    `in_host` is what it keeps in host memory throughout.
    """

    role: str
    moves: bool
    processes: int
    weights: int
    in_host: int = 0
    optimizer: dict[str, int] = field(default_factory=dict)
    computing: dict[str, int] = field(default_factory=dict)
    stage: tuple[int, int] = (0, 1)

    def held(self, *, optimizer: bool = True) -> Parts:
        states = {"weights": self.weights, **(self.optimizer if optimizer else {})}
        return {(self.role, part): size for part, size in states.items() if size}

    def while_computing(self) -> Parts:
        return self.held() | {(self.role, part): size for part, size in self.computing.items() if size}


def gpu_plans(config: RunConfig, shapes: Mapping[str, ModelShape], memory: int | None) -> tuple[GPUPlan, ...]:
    """Return the plan of each range of GPUs that models or engines have.

    Args:
        config: A validated configuration with `resources.device: cuda`.
        shapes: Sizes of the models, by role, and of `DRAFT`; a role without is left out.
        memory: Memory of one GPU in bytes, where it is known.
    """
    ranges: dict[tuple[int, int], list[RolePlan]] = {}
    for role in config.roles:
        ranges.setdefault((role.devices.start, role.devices.stop), []).append(role)
    return tuple(_plan_of(config, roles, shapes, memory) for roles in ranges.values())


def _plan_of(
    config: RunConfig, roles: Sequence[RolePlan], shapes: Mapping[str, ModelShape], memory: int | None
) -> GPUPlan:
    models = [
        model
        for role in roles
        if role.name in shapes and role.name != "inference" and (model := _model(config, role, shapes[role.name]))
    ]
    known = {model.role for model in models}
    engine = next((role for role in roles if role.name == "inference" and "inference" in shapes), None)
    left_out = tuple(role.name for role in roles if role.name not in known and role is not engine)
    processes: Parts = {(model.role, "CUDA"): model.processes for model in models}
    judge = getattr(config, "judge", None)
    if "judge" in left_out and memory is not None and judge is not None and judge.gpu_share is not None:
        processes[("judge", "server")] = int(judge.gpu_share * memory) + CONTEXT_BYTES
        left_out = tuple(role for role in left_out if role != "judge")
    phases: list[GPUPhase] = []
    cache = per_token = None

    def phase(name: str, *parts: Parts) -> None:
        phases.append(GPUPhase(name=name, parts=_joined(*parts, processes)))

    def staying(*, but: _Model | None = None, all_of_them: bool = False) -> Parts:
        return _joined(*(model.held() for model in models if model is not but and (all_of_them or not model.moves)))

    awake: Parts = {}
    graphs: Parts = {}
    whole: Parts = {}
    if engine is not None:
        assert isinstance(config, SamplingRunConfig)
        processes[("inference", "CUDA")] = CONTEXT_BYTES
        models_of_engine = [shapes["inference"]]
        if config.inference.draft_model is not None or config.inference.guesses_by_itself:
            models_of_engine += [shapes[DRAFT]] if DRAFT in shapes else []
            left_out += () if DRAFT in shapes else ("the draft of inference",)
        whole, cache = _engine(config, engine, models_of_engine, memory)
        phase("sampling", whole, staying())
        per_token = _cache_per_token(config, engine, models_of_engine)
        sleeps = config.inference.capabilities.sleep and getattr(config.inference, "sleep", None) is not False
        awake = {} if sleeps and models else whole
        graphs = {part: size for part, size in whole.items() if part[1] == GRAPHS}
    for model in models:
        together = engine is None or not model.moves
        phase(model.role, model.while_computing(), awake or graphs, staying(but=model, all_of_them=together))
    policy = next((model for model in models if model.role == "training"), None)
    loaded = {part: size for part, size in whole.items() if part[1] in ("weights", "adapters", DRAFT_WEIGHTS)}
    states = {} if policy is None else policy.held(optimizer=not policy.moves)
    here = {"training": policy is not None, "inference": engine is not None}
    transit = {part: size for part, size in _in_transit(config, shapes).items() if here[part[0]]}
    if transit:
        phase("weight update", awake or loaded | graphs, states, transit, staying(but=policy))
    return GPUPlan(
        devices=roles[0].devices,
        phases=tuple(phases),
        host=_in_host(models, 0 if awake else sum(loaded.values())) + sum(model.in_host for model in models),
        cache=cache,
        cache_per_token=per_token,
        left_out=left_out,
        stages={model.role: model.stage for model in models if model.stage[1] > 1},
    )


def _in_transit(config: RunConfig, shapes: Mapping[str, ModelShape]) -> Parts:
    """Return what a weight update takes beside what trainer and engine hold: the largest tensor travels whole.

    Of a mixture, one of a layer's two tensors of all experts travels where the checkpoint has it. Elsewhere experts
    travel one by one; a backend puts them together before, all or a few at a time.
    """
    if not isinstance(config, SamplingRunConfig) or config.replay is not None or "training" not in shapes:
        return {}
    shape, width = shapes["training"], bytes_per_value(config)
    experts = 2 * shape.expert_parameters // 3 * width
    largest = max(shape.embedding_parameters * width, experts if shape.joined_experts else 0)
    few = TRAINING_BACKENDS.get(config.training.backend).streams_experts
    gathered = max(largest, 0 if few else experts)
    backend = weight_backend(config.inference, config.resources)
    if backend == NCCL.name:
        # vLLM fills a bucket with up to a tensor more than its size, on each side while two others are on their way
        bucket = GPU_BUCKET_BYTES + largest
        sent = {
            ("training", "tensors in transit"): bucket + gathered - largest,
            ("training", "transfer buffers"): 2 * bucket,
        }
        return sent | {("inference", "transfer buffers"): 2 * bucket}
    if _shared(config, config.resources.devices_of("training")):
        buffers = 2 * max(GPU_BUCKET_BYTES, largest)
        return {("training", "tensor in transit"): gathered, ("training", "transfer buffers"): buffers}
    return {("training", "tensor in transit"): gathered, ("inference", "tensor in transit"): largest}


def _in_host(models: Sequence[_Model], engine: int) -> int:
    """Return the most that one GPU's roles have in host memory: all models, or all but one and a sleeping engine's."""
    moved = [sum(model.held().values()) for model in models if model.moves]
    return max(sum(moved), engine + sum(moved) - min(moved, default=0)) if models else 0


def _joined(*parts: Parts) -> Parts:
    return {key: size for each in parts for key, size in each.items()}


def _shared(config: RunConfig, devices: DeviceRange) -> bool:
    """Return whether engines take turns with the models on these GPUs."""
    if not isinstance(config, SamplingRunConfig) or config.replay is not None:
        return False
    return engines_share_gpus(config.resources) and devices.overlaps(config.resources.devices_of("inference"))


def _model(config: RunConfig, role: RolePlan, shape: ModelShape) -> _Model | None:
    """Return what a model takes that is trained, or that scores; None for what has no formula."""
    processes = CONTEXT_BYTES + (COMMUNICATOR_BYTES if role.workers > 1 else 0)
    settings = config.trained.get(role.name)
    moves = _shared(config, role.devices)
    width = bytes_per_value(config)
    if settings is not None:
        model = _trained_model(config, role.name, settings, shape)
        model.processes, model.moves = processes, moves and settings.sleep is not False
        return model
    section = config.frozen.get(role.name)
    if section is None:
        return None
    tokens = section.max_tokens_per_micro_batch
    frozen = config.training.frozen(workers=role.workers, max_tokens_per_micro_batch=tokens)
    stages = frozen.pipeline_parallel
    states = [training_states(frozen, shape, 0, width, stage=stage) for stage in range(stages)]
    largest = max(range(stages), key=lambda stage: (states[stage].weights, stage))
    ranks, row = frozen.tensor_parallel, _masked_row(config, config.training, shape, tokens)
    computing = {
        "activations": forward_bytes(shape, tokens, width=width, dense_row=row, ranks=ranks),
        "logits": _head(config, frozen, shape, tokens, trained=False) if largest == stages - 1 else 0,
        "buffers": states[largest].buffers,
    }
    return _Model(
        role=role.name,
        moves=moves,
        processes=processes,
        weights=states[largest].weights,
        computing=computing,
        stage=(largest, stages),
    )


def _trained_model(config: RunConfig, role: str, settings: TrainerConfig, shape: ModelShape) -> _Model:
    """Return what a trained model takes of a GPU; of a pipeline, the stage that takes most."""
    stages = [_trained_stage(config, role, settings, shape, stage) for stage in range(settings.pipeline_parallel)]
    return max(stages, key=lambda stage: sum(stage.while_computing().values()))


def _trained_stage(config: RunConfig, role: str, settings: TrainerConfig, shape: ModelShape, stage: int) -> _Model:
    width, tokens = bytes_per_value(config), settings.max_tokens_per_micro_batch
    trained = trained_parameters(config, shape, role)
    quantized = shape.quantized_parameters if role == "training" else shape.critic_quantized_parameters
    states = training_states(settings, shape, trained, width, quantized, stage=stage)
    stages, virtual, layers = settings.pipeline_parallel, settings.virtual_pipeline, None
    under_way, parts = kept_passes(stages, virtual, stage)
    if stages > 1:
        layers = len(layers_of_stage(shape.layers, stages, virtual, stage)) // parts
    activations = training_bytes(
        shape,
        tokens,
        width=width,
        checkpointing=settings.gradient_checkpointing,
        keys=_keys_per_token(config, settings),
        dense_row=_masked_row(config, settings, shape, tokens),
        ranks=settings.tensor_parallel,
        layers=layers,
        under_way=under_way,
    )
    head = 0
    if isinstance(settings, TrainingConfig) and config.task == "text-generation" and stage == stages - 1:
        head = _head(config, settings, shape, tokens, trained=settings.lora is None)
    computing = {"activations": activations, "logits": head, "buffers": states.buffers}
    if states.step > activations + head:  # activations are gone when the optimizer moves
        computing = {"optimizer step": states.step, "buffers": states.buffers}
    return _Model(
        role=role,
        moves=False,
        processes=0,
        weights=states.weights,
        in_host=copies_bytes(config, shape, states) if role == "training" else 0,
        optimizer={
            "gradients": states.gradients,
            "optimizer": states.optimizer,
            ASIDE: aside_bytes(config, states) if role == "training" else 0,
        },
        computing=computing,
        stage=(stage, stages),
    )


def _masked_row(config: RunConfig, settings: TrainerConfig, shape: ModelShape, tokens: int) -> int:
    """Return the longest row that has a mask, in tokens; 0 where attention needs none.

    `auto` needs one in float32, and for models whose rows cannot be joined; of bounded scores and sinks it is not known
    here whether their machine has Triton, with which they need none.
    """
    masked = settings.attention == "auto" and (shape.masked or bytes_per_value(config) == 4)
    if TRAINING_BACKENDS.get(settings.backend).joins_rows:
        return 0
    if settings.sequence_parallel > 1 or (settings.attention != "dense" and not masked):
        return 0
    shared = not isinstance(config, PolicyGradientConfig) or settings.share_prompts
    return min(tokens, max(config.longest_sample, MAX_SHARED_ROW_TOKENS if shared else 0))


def _head(config: RunConfig, settings: TrainingConfig, shape: ModelShape, tokens: int, *, trained: bool) -> int:
    part = replace(shape, vocab_size=-(-shape.vocab_size // settings.tensor_parallel))
    chunks = {"chunk_tokens": settings.logprob_chunk_tokens, "chunk_vocab": settings.logprob_chunk_vocab}
    products = None if config.model.head_dtype is None else 4
    return head_bytes(part, tokens, width=bytes_per_value(config), **chunks, trained=trained, products=products)


def _keys_per_token(config: RunConfig, settings: TrainerConfig) -> float:
    """Return how many keys attention gathers for a token of a row whose samples, of full length, share their prompt."""
    if not isinstance(config, PolicyGradientConfig) or not settings.share_prompts:
        return 1.0
    response, samples = config.longest_response, config.rollout.samples_per_group
    prompt = config.longest_sample - response
    # a row has as many responses as the budget has room for
    samples = max(1, min(samples, (settings.max_tokens_per_micro_batch - prompt) // max(response, 1)))
    return samples * (prompt + response) / (prompt + samples * response)


def _cache_per_token(config: SamplingRunConfig, role: RolePlan, shapes: Sequence[ModelShape]) -> int:
    return sum(shape.kv_bytes_per_token(bytes_per_value(config), role.devices_per_worker) for shape in shapes)


def _engine(
    config: SamplingRunConfig, role: RolePlan, shapes: Sequence[ModelShape], memory: int | None
) -> tuple[Parts, int | None]:
    """Return what an engine holds of one GPU, and its cache where that follows from the GPU's memory.

    Its GPUs divide the policy and a draft alike, and both have a cache; the draft has the policy's precision.
    """
    width, gpus = bytes_per_value(config), role.devices_per_worker
    shape, *drafts = shapes
    loaded = {"weights": shape.parameters * width // gpus}
    for draft in drafts:
        loaded[DRAFT_WEIGHTS] = draft.parameters * width // gpus
    if adapters := adapter_room(config, shape):
        loaded["adapters"] = adapters
    running = min(config.inference.max_running, config.rollout.max_in_flight)
    # widest tensors of a forward pass, and float32 logits with two copies for the sampler
    inner = shape.intermediate_size * max(shape.experts, 1)
    logits = running * config.inference.tokens_per_pass
    tokens = max(ENGINE_TOKENS, logits)
    compute = tokens * (2 * shape.hidden_size + 3 * inner // gpus) * width + 3 * 4 * logits * shape.vocab_size
    graphs = {GRAPHS: GRAPH_BYTES} if config.inference.captures_graphs else {}
    share = config.inference.gpu_share
    if memory is None or share is None:
        cache = running * config.longest_sample * _cache_per_token(config, role, shapes)
        parts = {**loaded, "activations": compute, "KV cache at most": cache, **graphs}
        return {("inference", part): size for part, size in parts.items()}, None
    inside = sum(graphs.values()) if config.inference.graphs_in_share else 0
    cache = max(int(share * memory) - sum(loaded.values()) - compute - inside, 0)
    parts = {**loaded, "activations": compute, "KV cache": cache, **graphs}
    return {("inference", part): size for part, size in parts.items()}, cache
