"""The training backend `megatron`: Megatron-Core's layers, schedules, distributed optimizer and checkpoints.

Ranks divide a model in four ways: the matrices of a layer (`tensor_parallel`), the layers (`pipeline_parallel`), the
experts of a layer (`expert_parallel`), and the tokens of a row (`sequence_parallel`). Those that have one model
together get the same rows. A rank builds its part in Megatron-Core's modules and fills it from the transformers model,
whose skeleton stays, without memory, as what names weights.

A forward pass runs through an objective as with every backend. On a rank that has not the last layers it ends where
those would begin (`NextStage`), and Megatron-Core's schedule sends the hidden states on.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from roll_like.algorithms.lazy import torch  # the registry imports this file to know the names of backends
from roll_like.config.base import Violation
from roll_like.config.model import Precision
from roll_like.config.training import StateBytes, StateSizes, TrainerConfig
from roll_like.models.megatron_plan import refuse_no_converter
from roll_like.registry import TRAINING_BACKENDS
from roll_like.training.backend import (
    COLLECTIVE_TIMEOUT,
    BatchT,
    State,
    StatePart,
    TrainingBackend,
    join_ranks,
    refuse_float16,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig

    from roll_like.training.megatron_stages import StageWeights

R = TypeVar("R")
#: The first version whose calls this file makes.
NEEDED = (0, 19, 2)
#: Newer versions than `NEEDED` are for this Python or a newer one; that one runs on older ones, too.
PYTHON, FOUND_PYTHON = (3, 12), sys.version_info[:2]
#: Name of the folder of weights and optimizer within a checkpoint.
TAG = "megatron"
#: Name of the file beside it that says what its tensors are called in the trained module.
_NAMES = "megatron.json"
#: End of the names of what Transformer Engine's layers keep in a checkpoint beside tensors; others keep None.
_NOTHING = "_extra_state"
_INSTALL = "run scripts/megatron.sh and set PYTHONPATH to the .megatron folder that it makes"


@TRAINING_BACKENDS.register("megatron")
class MegatronBackend(TrainingBackend):
    """One rank's part of a model in Megatron-Core: a `TrainingBackend`.

    Raises:
        ConfigError: The precision is float16, whose gradients would have to be scaled.
    """

    start_keys: ClassVar[tuple[str, ...]] = (
        "tensor_parallel",
        "pipeline_parallel",
        "expert_parallel",
        "expert_tensor_parallel",
        "sequence_parallel",
    )
    reads_late: ClassVar[bool] = True
    keeps_copies: ClassVar[bool] = True
    divides_experts: ClassVar[bool] = True
    divides_matrices: ClassVar[bool] = True
    divides_layers: ClassVar[bool] = True
    streams_experts: ClassVar[bool] = True
    joins_rows: ClassVar[bool] = True

    def __init__(self, settings: TrainerConfig, *, dtype: Precision, device: str, world_size: int) -> None:
        refuse_float16(dtype, "megatron")
        super().__init__(settings, dtype=dtype, device=device, world_size=world_size)
        self._chunks: list[Any]  # as Megatron-Core calls them: of this rank, one for each virtual stage
        self._models: list[Any]  # the same, each within its wrapper for data parallelism where they are trained
        self._optimizer: Any = None
        self._backbone: Any
        self._weights: StageWeights
        self._scheduled = 0  # micro-batches of the schedule that ran last; above 0 while one runs
        self._running = False

    # ---- before ranks start --------------------------------------------------------------------

    @staticmethod
    def violations(settings: TrainerConfig) -> Iterator[Violation]:
        """Yield a missing package, sizes that do not divide the ranks, and what this backend does not do."""
        yield from _package()
        if settings.zero_stage not in (0, 1):
            yield Violation(
                ("zero_stage",),
                "the backend megatron divides weights by its own sizes (tensor_parallel, pipeline_parallel, "
                "expert_parallel), and the optimizer among data-parallel ranks with zero_stage: 1; found zero_stage: "
                f"{settings.zero_stage}. Set it to 1 or 0",
            )
        for key, found, needed, instead in (
            ("offload", settings.offload, "none", "deepspeed"),
            ("lora", settings.lora and "adapters", None, "fsdp2 or deepspeed"),
            ("compile", settings.compile or None, None, "fsdp2"),
        ):
            if found != needed:
                yield Violation((key,), f"the backend megatron has no {key}; remove the key, or set backend: {instead}")
        if settings.attention == "dense":
            yield Violation(
                ("attention",),
                "the backend megatron joins rows without masks, and 'dense' computes with masks; use varlen or auto",
            )
        sizes = _sharing(settings)
        if settings.workers % sizes:
            yield Violation(
                ("workers",),
                f"{settings.workers} workers cannot be divided into groups of {sizes} (tensor_parallel: "
                f"{settings.tensor_parallel}, pipeline_parallel: {settings.pipeline_parallel}, sequence_parallel: "
                f"{settings.sequence_parallel}); set it to a multiple of {sizes}",
            )
        experts = settings.expert_parallel * settings.expert_tensor_parallel
        if not settings.workers % sizes and settings.workers // settings.pipeline_parallel % experts:
            yield Violation(
                ("expert_parallel",),
                f"{settings.workers // settings.pipeline_parallel} workers of a pipeline stage cannot be divided into "
                f"groups of {experts} that divide experts (expert_parallel: {settings.expert_parallel}, "
                f"expert_tensor_parallel: {settings.expert_tensor_parallel})",
            )
        if settings.virtual_pipeline > 1 and settings.pipeline_parallel == 1:
            yield Violation(
                ("virtual_pipeline",),
                f"{settings.virtual_pipeline} virtual stages on each rank need several ranks that divide layers; set "
                "pipeline_parallel: 2 or more, or remove the key",
            )

    @staticmethod
    def refuse_model(config: PretrainedConfig, settings: TrainerConfig) -> None:
        """Raise a ConfigError for a model without a converter, or that the ranks cannot divide evenly."""
        refuse_no_converter(config, settings)

    @staticmethod
    def merged(directory: Path) -> Mapping[str, Tensor]:
        """Return whole parameters from the files of any number of ranks, each read when it is asked for."""
        from roll_like.training.megatron_files import read_parameters

        return read_parameters(directory / TAG, json.loads((directory / _NAMES).read_text()))

    @staticmethod
    def divided(settings: TrainerConfig) -> frozenset[StatePart]:
        """Return what ranks divide: all of it by the parallel sizes; no rank has what transformers would have."""
        del settings
        return frozenset({"weights", "gradients", "optimizer"})

    @staticmethod
    def data_ranks(settings: TrainerConfig) -> int:
        return settings.workers // _sharing(settings)

    @classmethod
    def state_bytes(cls, settings: TrainerConfig, sizes: StateSizes) -> StateBytes:
        """Return the memory of one rank: weights in the forward pass's precision, gradients and moments in float32.

        The distributed optimizer divides moments among the ranks with the same part: of experts other ranks than of
        the rest. As counted on CPU ranks (`tests/integration/test_training_megatron.py`).
        """
        stage = settings.workers // settings.pipeline_parallel
        experts = settings.expert_parallel * settings.expert_tensor_parallel
        divided = sizes.parameters - sizes.routed - sizes.undivided
        own, routed = divided // settings.tensor_parallel + sizes.undivided, sizes.routed // experts
        if not sizes.trained:
            return StateBytes(weights=(own + routed) * sizes.width)
        moments = 8 if sizes.width == 4 else 12  # two of AdamW, and master weights
        alike = (stage // settings.tensor_parallel, stage // experts) if settings.zero_stage == 1 else (1, 1)
        return StateBytes(
            weights=(own + routed) * sizes.width,
            gradients=4 * (own + routed),
            optimizer=moments * own // alike[0] + moments * routed // alike[1],
        )

    # ---- ranks ---------------------------------------------------------------------------------

    def join(self) -> None:
        """Meet the other ranks; stages of one model are neighbours, which Megatron-Core numbers otherwise.

        Its order has the stages outermost: with 2 stages and 2 models, ranks 0 1 2 3 are its ranks 0 2 1 3.
        """
        settings, rank = self._settings, int(os.environ["RANK"])
        inner = settings.tensor_parallel * settings.sequence_parallel
        models = self._world_size // (inner * settings.pipeline_parallel)
        model, within = divmod(rank, inner * settings.pipeline_parallel)
        stage, place = divmod(within, inner)
        pickled_by = torch.storage._load_from_bytes
        if self._device == "cuda":
            torch.cuda.set_device(0)  # each rank's process sees one
        else:
            from roll_like.training import megatron_cpu

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of packages for GPUs that are not there
                megatron_cpu.install()
        join_ranks(self._device, (stage * models + model) * inner + place)
        with self._on_device():
            from megatron.core import parallel_state
            from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

            # it puts its own there: who gets a tensor of this rank may not have the package
            torch.storage._load_from_bytes = pickled_by
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=settings.tensor_parallel,
                pipeline_model_parallel_size=settings.pipeline_parallel,
                virtual_pipeline_model_parallel_size=(
                    settings.virtual_pipeline if settings.virtual_pipeline > 1 else None
                ),
                context_parallel_size=settings.sequence_parallel,
                expert_model_parallel_size=settings.expert_parallel,
                expert_tensor_parallel_size=settings.expert_tensor_parallel,
                distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT / timedelta(minutes=1)),
                create_gloo_process_groups=False,
            )
            state = torch.get_rng_state()
            model_parallel_cuda_manual_seed(torch.initial_seed() % 2**31)
            torch.set_rng_state(state)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Let Megatron-Core's code run, whatever the device; without warnings of packages that are missing."""
        mode: AbstractContextManager[Any] = nullcontext()
        if self._device == "cpu":
            from roll_like.training.megatron_cpu import OnCPU

            mode = OnCPU()
        with mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield

    def wrap(self, module: nn.Module) -> None:
        """Build this rank's part of the model in a module on the CPU, and let the module compute with it."""
        from megatron.core import parallel_state
        from transformers import PreTrainedModel

        from roll_like.algorithms.divided import DividedVocabulary
        from roll_like.training.megatron_model import (
            Backbone,
            Routes,
            attention_of,
            build_chunks,
            output_weight,
            own_place,
            transformer_config,
        )
        from roll_like.training.megatron_stages import StageWeights
        from roll_like.training.policy import RowModule, TokenLogprobHead
        from roll_like.training.sequence_parallel import SequenceParallel

        assert isinstance(module, RowModule), "objectives of language models load no other"
        language: Any = next(each for each in module.modules() if isinstance(each, PreTrainedModel))
        backbone, config, dtype = language.base_model, language.config, getattr(torch, self._dtype)
        trained = any(each.requires_grad for each in module.parameters())
        heads = [each for each in module.modules() if isinstance(each, TokenLogprobHead)]
        with self._on_device():
            place = own_place(config)
            size = place.tensor.size()
            described = transformer_config(config, self._settings, dtype)
            self._chunks = build_chunks(
                config,
                described,
                attention=attention_of(language),
                backbone=backbone,
                vocabulary=-(-place.vocabulary // size) * size,
                tied=bool(heads) and heads[0].weight is backbone.embed_tokens.weight,
                head=bool(heads),
            )
            stages = parallel_state.get_pipeline_model_parallel_group()
            alike = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            self._weights = StageWeights(place, stages, dtype, rank=alike * size + place.tensor.rank())
            self._weights.fill(module, backbone, heads, self._chunks)
            self._models = self._trained_together(described) if trained else self._chunks
            if trained:
                self._optimizer = self._adamw()
        weight = output_weight(self._chunks)
        for head in heads:
            if weight is not None:
                head.weight = weight
            if size > 1:
                head.divided = DividedVocabulary.of(place.tensor, place.vocabulary)
        module.computed_by = self._backbone = Backbone(backbone.config)
        if module.router is not None:
            routes: Any = Routes(self._chunks)
            module.router = self._backbone.routes = routes
        if self._settings.sequence_parallel > 1:
            group = parallel_state.get_context_parallel_group()
            module.parallel = SequenceParallel(group, group.rank(), group.size())
        self.module = module

    def _trained_together(self, described: Any) -> list[Any]:
        """Return the chunks within what adds their gradients up over data-parallel ranks."""
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        together = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=self._settings.zero_stage == 1,
        )
        # losses are shares of the whole batch: gradients are summed, not divided by tokens
        described.finalize_model_grads_func = lambda models, _, **more: finalize_model_grads(models, None, **more)
        return [DistributedDataParallel(described, together, chunk) for chunk in self._chunks]

    def _adamw(self) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from roll_like.training.megatron_optimizer import use_adamw

        use_adamw()
        settings, half = self._settings.optimizer, self._dtype == "bfloat16"
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=0.0,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.eps,
                clip_grad=settings.max_grad_norm,
                use_distributed_optimizer=self._settings.zero_stage == 1,
                bf16=half,
                params_dtype=getattr(torch, self._dtype),
            ),
            self._models,
            use_gloo_process_groups=False,
        )
        for group in optimizer.param_groups:  # Megatron-Core spares norms and biases; other backends do not
            group["weight_decay"] = settings.weight_decay
        return optimizer

    # ---- computing -----------------------------------------------------------------------------

    def forward(self, *inputs: Any) -> Any:
        if self._running:
            return self.module(*inputs)
        return self.forward_only([inputs], lambda each: self.module(*each))[0]

    def forward_backward(self, batches: Sequence[BatchT], loss_of: Callable[[BatchT], Tensor]) -> None:
        """Add the gradient; the stages of a model compute different micro-batches at a time."""
        for model in self._models:
            model.zero_grad_buffer()
        self._schedule(batches, loss_of, learn=True)

    def forward_only(self, batches: Sequence[BatchT], result_of: Callable[[BatchT], R]) -> list[R]:
        """Return what becomes of each micro-batch; the stages compute different ones at a time."""
        found: list[R] = []
        with torch.no_grad():
            self._schedule(batches, lambda batch: found.append(result_of(batch)), learn=False)
        return self.of_last_layers(found)

    def of_last_layers(self, found: list[R]) -> list[R]:
        """Return what the ranks with the last layers found, without what filled the schedule up."""
        from megatron.core import parallel_state

        group = parallel_state.get_pipeline_model_parallel_group()
        told: list[Any] = [found[: self._scheduled]]
        if group.size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            torch.distributed.broadcast_object_list(told, src=last, group=group)
        found = told[0]
        return found

    def _schedule(self, batches: Sequence[BatchT], compute: Callable[[BatchT], Any], *, learn: bool) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from roll_like.training.megatron_model import NextStage

        self._weights.forget()
        self._scheduled = len(batches)
        if not batches:
            return
        # virtual stages take as many micro-batches at a time as there are ranks: others are computed for nothing
        more = -len(batches) % self._settings.pipeline_parallel if self._settings.virtual_pipeline > 1 else 0
        numbered = [*enumerate(batches), *((len(batches), batches[-1]) for _ in range(more))]
        device = torch.cuda.current_device() if self._device == "cuda" else "cpu"

        def step(iterator: Iterator[tuple[int, BatchT]], chunk: Any) -> tuple[Tensor, Any]:
            number, batch = next(iterator)
            self._backbone.chunk = chunk
            try:
                loss = compute(batch)
            except NextStage as passed:
                return passed.states, None
            if not learn:
                return torch.zeros(1, device=device), None
            if number == len(batches):
                loss = loss * 0.0
            return loss, lambda loss: (loss, torch.ones((), dtype=torch.int, device=device), {})

        iterators = [iter(numbered) for _ in self._models]
        several = len(self._models) > 1
        self._running = True
        for chunk in self._chunks:
            if chunk.training != learn:
                chunk.train(learn)
        if self.module.training != learn:
            self.module.train(learn)
        try:
            with self._on_device():
                get_forward_backward_func()(
                    forward_step_func=step,
                    data_iterator=iterators if several else iterators[0],
                    model=self._models if several else self._models[0],
                    num_microbatches=len(numbered),
                    seq_length=1,
                    micro_batch_size=1,
                    forward_only=not learn,
                )
        finally:
            self._running = False
            self._backbone.chunk = None

    def optimizer_step(self, learning_rate: float) -> float:
        self._weights.forget()
        with self._on_device(), torch.no_grad():
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.prepare_grads()
            norm = float(self._optimizer.get_grad_norm())
            if math.isfinite(norm):
                self._clip(norm)
                self._optimizer.step_with_ready_grads()
            self._optimizer.zero_grad()
        return norm

    def _clip(self, norm: float) -> None:
        share = self._settings.optimizer.max_grad_norm / (norm + 1e-6)
        if share < 1.0:
            torch._foreach_mul_([each.grad for each in self._stepped() if each.grad is not None], share)

    def _stepped(self) -> Iterator[Tensor]:
        """Yield what the optimizer moves: this rank's share of the weights in float32."""
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _optimizers(self) -> Sequence[Any]:
        """Return Megatron-Core's optimizers: divided experts have one of their own."""
        found: Sequence[Any] = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return found

    # ---- weights and states --------------------------------------------------------------------

    @contextmanager
    def gathered(self, parameters: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Hold the whole of some weights: its stage puts them together and tells the other stages."""
        yield [self._weights.whole(parameter) for parameter in parameters]

    def experts(self, parameter: Tensor) -> Iterator[tuple[range, Tensor]]:
        """Yield a few experts of a parameter at a time: their stage puts them together and tells the other stages."""
        return self._weights.experts(parameter)

    @property
    def stage(self) -> StageWeights | None:
        return self._weights if self._settings.pipeline_parallel > 1 else None

    def trained_shares(self) -> dict[str, Tensor]:
        """Return this rank's weights, by chunk and Megatron-Core's names."""
        return {
            f"{index}.{name}": each.data
            for index, chunk in enumerate(self._chunks)
            for name, each in chunk.named_parameters()
            if each.requires_grad
        }

    def reset_optimizer(self) -> None:
        for inner in self._optimizers():
            inner.optimizer.state.clear()
        for group in self._optimizer.param_groups:
            group["step"] = 0

    def save(self, directory: str) -> None:
        """Write this rank's share of model and optimizer; ranks with other sizes can take it back."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        # threads of this process write; for what they say Megatron-Core would start a process that nobody ends
        filesystem_async._results_queue = Queue()
        folder = Path(directory) / TAG
        with self._on_device(), _plain_errors():
            if torch.distributed.get_rank() == 0:
                folder.mkdir(exist_ok=True)
                # written first: a checkpoint counts when all is written
                (Path(directory) / _NAMES).write_text(json.dumps(self._weights.described(self.module)))
            torch.distributed.barrier()
            dist_checkpointing.save(self._states(loading=False), str(folder))

    def load(self, directory: str) -> None:
        """Take back what `save` wrote, on ranks of these or other sizes."""
        from megatron.core import dist_checkpointing

        folder = Path(directory) / TAG
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is missing: the checkpoint was not written by training.backend: megatron"
            )
        self._weights.forget()
        with self._on_device(), _plain_errors():
            wanted = self._states(loading=True)
            own = _without_tensors(wanted["optimizer"])
            state = dist_checkpointing.load(wanted, str(folder))
            for index, chunk in enumerate(self._chunks):
                nothing: dict[str, Any] = {name: None for name in chunk.state_dict() if name.endswith(_NOTHING)}
                chunk.load_state_dict(nothing | state[f"model{index}"])
            self._optimizer.load_state_dict(_with_tensors(own, state["optimizer"]))
            steps = next(_steps_in(state["optimizer"]), 0)
            for group in self._optimizer.param_groups:
                group["step"] = steps

    def _states(self, *, loading: bool) -> dict[str, Any]:
        from megatron.core import parallel_state

        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        models = {}
        for index, chunk in enumerate(self._chunks):
            last = chunk.post_process
            chunk.post_process = last and chunk.output_layer is not None  # else it looks for an output projection
            found = chunk.sharded_state_dict(metadata=metadata)
            models[f"model{index}"] = {name: each for name, each in found.items() if not name.endswith(_NOTHING)}
            chunk.post_process = last
        for inner in self._optimizers():
            if not inner.optimizer.state:  # before the first step there are no moments, and loading asks for them
                inner.init_state_fn(inner.optimizer, inner.config)
        optimizer = self._optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata)
        return {**models, "optimizer": optimizer}

    def tensors(self, part: State) -> Iterator[Tensor]:
        """Yield this rank's weights; or gradients, master weights and moments."""
        if part == "weights":
            for chunk in self._chunks:
                yield from chunk.parameters()
                yield from chunk.buffers()
            return
        for model in self._models if self._optimizer is not None else ():
            yield from (buffer.grad_data for buffer in (*model.buffers, *model.expert_parallel_buffers))
        if self._optimizer is not None:
            yield from self._stepped()
            for inner in self._optimizers():
                for states in inner.optimizer.state.values():
                    yield from (each for each in states.values() if isinstance(each, torch.Tensor))

    def close(self) -> None:
        """Leave all process groups."""
        if torch.distributed.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
        super().close()


def _sharing(settings: TrainerConfig) -> int:
    """Return how many ranks have one model, and the same rows."""
    return settings.tensor_parallel * settings.pipeline_parallel * settings.sequence_parallel


def _package() -> Iterator[Violation]:
    """Yield that Megatron-Core is missing, too old or too new, or cannot be imported."""
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        yield Violation(("backend",), f"megatron needs the package megatron-core, which is not installed; {_INSTALL}")
        return
    engine = getattr(find_spec("transformer_engine"), "origin", None)
    if engine is not None and not _has_torch_part(Path(engine).parent):
        yield Violation(
            ("backend",),
            "Transformer Engine is installed without its part for PyTorch, and Megatron-Core cannot be imported beside "
            "it; nothing here needs it: pip uninstall transformer-engine. Or install all of it: pip install "
            "--no-build-isolation 'transformer-engine[pytorch]'",
        )
    try:
        found = version("megatron-core")
    except PackageNotFoundError:  # a checkout on the path
        return
    numbers, needed = tuple(int(each) for each in re.findall(r"\d+", found)[:3]), ".".join(map(str, NEEDED))
    if numbers < NEEDED:
        yield Violation(
            ("backend",),
            f"megatron needs megatron-core {needed} or newer, and {found} is installed (pip takes no newer one on "
            f"Python below 3.12); {_INSTALL}",
        )
    elif numbers > NEEDED and FOUND_PYTHON < PYTHON:
        yield Violation(
            ("backend",),
            f"megatron-core {found} needs Python 3.12 or newer, and this is {'.'.join(map(str, FOUND_PYTHON))}, where "
            f"only {needed} has been tried; for that version {_INSTALL}",
        )


def _has_torch_part(engine: Path) -> bool:
    """Return whether the folder of Transformer Engine's package has its library for PyTorch, or the one above it."""
    places = (engine.parent, engine, engine / "wheel_lib")
    return any(True for place in places for _ in place.glob("transformer_engine_torch*.so"))


def _without_tensors(states: Any) -> Any:
    """Return an optimizer's states, for `_with_tensors`, with None for what a checkpoint has divided among ranks."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    def alone(each: Any) -> Any:
        return each.unwrap() if isinstance(each, LocalNonpersistentObject) else each

    return dict_list_map_outplace(lambda each: None if isinstance(each, ShardedBase) else alone(each), states)


def _with_tensors(own: Any, read: Any) -> Any:
    """Return an optimizer's states with the tensors that were read, and all else as it is here.

    All else has another form where ranks did not divide experts, or did: Megatron-Core steps divided ones apart.
    """
    if own is None:
        return read
    if isinstance(own, dict):
        found = read if isinstance(read, dict) else {}
        return {key: _with_tensors(each, found.get(key)) for key, each in own.items()}
    if isinstance(own, list) and isinstance(read, list) and len(own) == len(read):
        return [_with_tensors(*pair) for pair in zip(own, read, strict=True)]
    return own


def _steps_in(read: Any) -> Iterator[int]:
    """Yield how many steps an optimizer in a checkpoint has taken, from each of its groups that says so."""
    for key, each in read.items() if isinstance(read, dict) else ():
        if key == "param_groups":
            yield from (int(group["step"]) for group in each if "step" in group)
        yield from _steps_in(each)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise RuntimeError where Megatron-Core's checkpoints raise errors of their own."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (CheckpointingException, CheckpointException) as error:
        raise RuntimeError(str(error)) from error
