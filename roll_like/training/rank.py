"""One rank of a model, whatever it learns and whatever trains it: a process with a share of its weights."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn

from roll_like.cluster.address import free_port, node_address
from roll_like.cluster.progress import PROGRESS, shared_phase
from roll_like.config.load import import_plugins, register_sent
from roll_like.config.model import ModelConfig
from roll_like.errors import CheckpointError, ConfigError, DiskFullError, EngineError
from roll_like.inference.plugin import ADAPTERS_KEY
from roll_like.inference.weight_transfer.fingerprint import fingerprint
from roll_like.models.card import ModelCard
from roll_like.models.checkpoint_names import TensorGroup, checkpoint_tensors, expert_tensors, tensor_groups
from roll_like.models.export import save_hf_directory
from roll_like.models.identity import identity_of, same_model
from roll_like.models.load import from_anywhere, load_tokenizer
from roll_like.models.lora import (
    Adapter,
    NamedWeight,
    adapter_names,
    adapter_parameters,
    adapters_off,
    named_weights,
)
from roll_like.models.modules import persistent_buffers
from roll_like.models.quantized import scales
from roll_like.models.vision import processor_files
from roll_like.registry import TRAINING_BACKENDS
from roll_like.training.backbone import joins_rows
from roll_like.training.backend import Stage, State, TrainingBackend, whole_shape
from roll_like.training.host_copies import HostCopies
from roll_like.training.interface import CopyShare, RankModel, RankSpec, Share
from roll_like.training.language_model import score_energies
from roll_like.training.layout import MicroBatch
from roll_like.training.optimizer import learning_rate
from roll_like.training.policy import RowModule
from roll_like.training.profiled import RankProfile, RankProfiler
from roll_like.training.sequence_parallel import SequenceParallel
from roll_like.training.skipped import COMPUTE_SECONDS
from roll_like.training.speed import Speed
from roll_like.training.weight_copy import WeightCopy
from roll_like.values import Last, Max, Mean, Metric, Metrics, merge

if TYPE_CHECKING:
    from roll_like.inference.weight_transfer.interface import SendReport, WeightSender, WeightTransfer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
R = TypeVar("R")

#: Keys that say how ranks divide the weights; a copy of them is read as it was written.
COPY_KEYS = ("backend", "workers", "zero_stage", "tensor_parallel", "pipeline_parallel", "expert_parallel")
#: What reading a damaged checkpoint raises.
_UNREADABLE = (
    OSError,
    LookupError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    EOFError,
    UnpicklingError,
)

#: Variables of a launcher that started the driver or Ray. DeepSpeed compares its rank with theirs, torch looks for a
#: store that they have started.
_LAUNCHERS = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MV2_COMM_WORLD_", "TORCHELASTIC_")


class TrainingRank:
    """Computes an objective, takes optimizer steps, saves, loads, makes room, hands out weights.

    Args:
        spec: Model, objective, device and schedule.
        rank: This process's place among the ranks.
        world_size: Their number.
    """

    def __init__(self, spec: RankSpec[Any], rank: int, world_size: int) -> None:
        self._spec = spec
        self._objective = spec.objective
        self._settings = spec.objective.settings
        self.rank = rank
        self.world_size = world_size
        self.updates = 0
        self._backend: TrainingBackend
        self._model: RankModel
        self._sender: WeightSender | None = None
        self._host: dict[State, HostCopies] = {state: HostCopies(spec.device) for state in get_args(State)}
        self._groups: list[TensorGroup] | None = None
        self._sends_adapters = False
        self._base_is_known = False
        self._speed: Speed | None = None
        self._random_states: dict[str, Any] = {}  # before the gradient was computed
        self._profiler: RankProfiler | None = None
        self._copies: dict[str, WeightCopy] = {}

    # ---- start and end -------------------------------------------------------------------------

    def address(self) -> tuple[str, int]:
        """Return a host and a free port of this rank, for the others to meet at."""
        # one rank on CPU meets nobody from elsewhere, and is independent of how the machine's network is set up
        alone = self.world_size == 1 and self._spec.device == "cpu"
        return ("127.0.0.1" if alone else node_address()), free_port()

    @shared_phase
    def start(self, address: tuple[str, int]) -> None:
        """Join the process group and load the model.

        Raises:
            EngineError: The backend or the model failed to start; says why.
        """
        for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
            del os.environ[name]
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK="0",
            MASTER_ADDR=address[0],
            MASTER_PORT=str(address[1]),
        )
        spec, section = self._spec, self._objective.section
        seed_everything(spec.seed)
        import_plugins(spec.imports)
        register_sent(spec.plugins)
        if spec.device == "cpu":
            torch.set_num_threads(spec.threads)
        # its gradients with a mask can be NaN (pytorch#196678), and torch would take it; long sequences ask by name
        torch.backends.cuda.enable_cudnn_sdp(False)
        backend = TRAINING_BACKENDS.get(self._settings.backend)
        self._backend = backend(self._settings, dtype=spec.dtype, device=spec.device, world_size=self.world_size)
        try:
            self._backend.join()
            module = self._objective.load(spec)
            if self._settings.sequence_parallel > 1:
                share_rows(module, self._settings.sequence_parallel)
            self.take(module)
            self._copies = {
                name: WeightCopy(self._backend.trained_shares, precise=precise) for name, precise in spec.copies.items()
            }
            self._speed = None if spec.frozen else Speed.of(self._hf_model(), spec)
        except ConfigError as error:
            raise EngineError(
                f"the {section} engine did not start on rank {self.rank}: {error.message}", fix=error.fix
            ) from error
        except (RuntimeError, ValueError, OSError, AssertionError, NotImplementedError) as error:
            keys = ("model.path", "model.dtype", *(f"{section}.{key}" for key in backend.start_keys))
            raise EngineError(
                f"the {section} engine did not start on rank {self.rank}: {type(error).__name__}: {error}",
                fix=f"check {', '.join(keys[:-1])} and {keys[-1]}",
            ) from error
        if spec.device == "cuda":
            # each `offload` collects garbage: a quarter of a second where it looks at all that libraries hold for good
            gc.collect()
            gc.freeze()

    def take(self, module: nn.Module) -> None:
        """Compute with a module on the CPU from now on; the backend trains it unless it is frozen."""
        device, joined = torch.device(self._spec.device), joins_rows(module)
        forward: Callable[..., Any]
        if self._spec.frozen:
            module.requires_grad_(False).eval()
        if self._spec.frozen and not self._backend.sharded:
            forward = module = module.to(device)
        else:
            self._backend.wrap(module)
            forward, module = self._backend.forward, self._backend.module
        self._model = RankModel(module=module, forward=forward, device=device, joined=joined)

    def joins_rows(self) -> bool:
        """Return whether the rows of a micro-batch are joined, so that they need neither padding nor masks."""
        return self._model.joined

    def close(self) -> None:
        """Let go of the inference engines, where there are any, and leave the process group."""
        if self._sender is not None:
            self._sender.close()
        if hasattr(self, "_backend"):  # `start` may have failed before
            self._backend.close()
        gc.unfreeze()

    def begin_profile(self, *, stacks: bool, memory: bool) -> None:
        """Record what this rank computes, until `end_profile`."""
        self._profiler = RankProfiler(self._spec.device, stacks=stacks, memory=memory)

    def end_profile(self, stem: str) -> RankProfile:
        """Write what was recorded to files whose names begin with `stem`, on a disk that the driver sees."""
        assert self._profiler is not None, "it was begun"
        profiler, self._profiler = self._profiler, None
        return profiler.finish(Path(f"{stem}_{self.rank}"))

    def drop_profile(self) -> None:
        """Record no longer, if `begin_profile` was called, and write nothing."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.drop()

    # ---- computing -----------------------------------------------------------------------------

    @shared_phase
    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch]) -> list[Any]:
        """Return what the objective says of each micro-batch's targets."""
        return self._passed(batches, lambda batch: self._objective.forward(self._model, batch))

    @shared_phase
    def forward_without_adapters(self, batches: Sequence[MicroBatch]) -> list[Any]:
        """Return the same of the model without its adapters: what training started from."""
        with adapters_off(self._hf_model()):
            return self.forward(batches)

    @shared_phase
    def compute_with(self, share: CopyShare) -> list[Any]:
        """Return what `forward` or `teach` returns with a copy of what is trained in its place."""
        with self._copies[share.copy].in_place():
            found: list[Any] = getattr(self, share.method)(share.batches)
        return found

    @shared_phase
    def move_copy(self, name: str, share: float) -> tuple[float, int]:
        """Move a copy towards what is trained (`WeightCopy.follow`)."""
        return self._copies[name].follow(share)

    @shared_phase
    def reset_optimizer(self) -> None:
        """Let the optimizer begin anew; the schedule of the learning rate goes on."""
        self._backend.reset_optimizer()

    @shared_phase
    @torch.no_grad()
    def teach(self, batches: Sequence[MicroBatch]) -> list[Any]:
        """Return what the model, as a teacher, says of each micro-batch's targets."""
        return self._passed(batches, lambda batch: self._objective.teach(self._model, batch))

    @shared_phase
    @torch.no_grad()
    def score_energies(self, batches: Sequence[MicroBatch]) -> list[Any]:
        """Return ‖∇ log π‖² in the logits at each micro-batch's targets, of a language model."""
        passes = (
            self._passed(batches, lambda batch: self._objective.forward(self._model, batch)),
            self._passed(batches, lambda batch: self._objective.colder(self._model, batch)),
        )
        return [score_energies(*found) for found in zip(*passes, strict=True)]

    @shared_phase
    @torch.no_grad()
    def evaluate(self, share: Share[Any]) -> dict[str, Metric]:
        """Return the metrics of micro-batches under the current weights, without a gradient."""
        shared = self._objective.bind(share.shared, self._model.device)
        return merge(self._passed(share.batches, lambda batch: self._objective.loss(self._model, batch, shared)[1]))

    @shared_phase
    def forward_backward(self, share: Share[Any]) -> dict[str, Metric]:
        """Add up the gradient of an optimizer step; return this rank's metrics, which merge over ranks.

        Every rank has equally many micro-batches.
        """
        started = time.perf_counter()
        self._random_states = random_states()
        shared = self._objective.bind(share.shared, self._model.device)
        collected: list[Metrics] = []

        def loss_of(batch: MicroBatch) -> Tensor:
            loss, metrics = self._objective.loss(self._model, batch, shared)
            collected.append(metrics)
            PROGRESS.tick()
            return loss

        self._backend.forward_backward(share.batches, loss_of)
        seconds = time.perf_counter() - started
        self._trained(seconds, share.batches)
        return merge([*self._backend.of_last_layers(collected), {COMPUTE_SECONDS: Max(seconds)}])

    @shared_phase
    def optimizer_step(self) -> dict[str, Metric]:
        """Move the weights by the gradient that was added up; return its norm and the learning rate.

        Where the gradient is not finite, all is as it was before `forward_backward`, random states and the schedule of
        the learning rate included, and the metrics hold `skipped_updates`.
        """
        started = time.perf_counter()
        rate = learning_rate(self._settings.optimizer, self.updates, self._spec.total_updates)
        grad_norm = self._backend.optimizer_step(rate)
        seconds = time.perf_counter() - started  # the norm was waited for, and with it what a GPU had still to compute
        self._trained(seconds)
        prefix = self._objective.metric_prefix
        metrics: dict[str, Metric] = {
            f"{prefix}/grad_norm": Mean(grad_norm),
            f"{prefix}/lr": Last(rate),
            COMPUTE_SECONDS: Max(seconds),
        }
        if math.isfinite(grad_norm):
            self.updates += 1
        elif self._spec.dtype != "float16":
            # in float16 such gradients are no fault: the losses' scale is raised until they come, and halved by them
            restore_random_states(self._random_states)
            metrics[f"{prefix}/skipped_updates"] = Max(1.0)
        return metrics

    def _passed(self, batches: Sequence[MicroBatch], result_of: Callable[[MicroBatch], R]) -> list[R]:
        """Return what becomes of each micro-batch without gradients."""

        def counted(batch: MicroBatch) -> R:
            result = result_of(batch)
            PROGRESS.tick()
            return result

        if self._spec.frozen and not self._backend.sharded:
            return [counted(batch) for batch in batches]
        return self._backend.forward_only(batches, counted)

    def speed(self) -> dict[str, Metric]:
        """Return how fast this rank has trained since the last call."""
        return {} if self._speed is None else self._speed.metrics(self._objective.role_name)

    def _trained(self, seconds: float, batches: Sequence[MicroBatch] = ()) -> None:
        if self._speed is not None:
            self._speed.add(seconds, batches)

    @shared_phase
    def ask(self, method: Callable[..., R], *arguments: Any) -> R:
        """Return what a method of the objective's own makes of this rank's model."""
        return method(self._objective, self._model, *arguments)

    @shared_phase
    def ask_each(self, asked: tuple[Callable[..., R], Sequence[MicroBatch]]) -> list[R]:
        """Return what a function, as of `ask`, makes of this rank's model and each of its micro-batches."""
        method, batches = asked
        return self._passed(batches, lambda batch: method(self._objective, self._model, batch))

    # ---- weights -------------------------------------------------------------------------------

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of what engines are sent, whole, in the forward pass's precision.

        These are the tensors of a checkpoint, adapters merged, or the adapters alone (`connect_weights`). Where the
        backend shards parameters, every rank must walk through this at the same time: each group of parameters that is
        converted together (nearly always one parameter) is gathered when its turn comes.
        """
        return self._adapters() if self._sends_adapters else self._checkpoint(merged=True)

    def own_weights(self, stage: Stage) -> Iterator[tuple[str, Tensor]]:
        """Yield those of `full_weights` that this rank's stage has; all its ranks walk through them together."""
        return self._checkpoint(merged=True, stage=stage)

    def _checkpoint(self, *, merged: bool, stage: Stage | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a checkpoint, or of a stage's layers, with or without what adapters add."""
        model = self._hf_model()
        weights = {weight.name: weight if merged else weight.frozen for weight in named_weights(model)}
        for group in self._tensor_groups():
            members = [weights[name] for name in group.parameters]
            if stage is not None and stage.owner(members[0].parameter) != stage.number:
                continue
            if not (group.experts and self._backend.streams_experts):
                with self._whole(members, stage) as whole:
                    yield from checkpoint_tensors(model, group, whole)
                continue
            (weight,) = members
            backend, parameter = self._backend, weight.parameter
            for numbers, few in backend.experts(parameter) if stage is None else stage.experts(parameter, told=False):
                PROGRESS.tick()
                yield from expert_tensors(model, group, numbers, weight.merged(DTYPES[self._spec.dtype], [few]))

    def _adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the matrices of all adapters, B times its scale, named after the checkpoint's tensors beside them."""
        dtype, sharded, renamed = DTYPES[self._spec.dtype], self._backend.sharded, {}
        for group in self._tensor_groups():
            if len(group.parameters) == len(group.tensors) == 1:
                renamed[group.parameters[0]] = group.tensors[0]
        for weight in named_weights(self._hf_model()):
            if weight.layer is None:
                continue
            if weight.name not in renamed:
                raise EngineError(
                    f"the adapter of {weight.name} cannot be sent alone: the model's checkpoint format has this weight "
                    "in another form",
                    fix=f"set {ADAPTERS_KEY}: false, or leave this layer out of training.lora.target_modules",
                )
            with self._gathered(weight.parts[1:]) as parts:
                PROGRESS.tick()
                pair = weight.adapter(dtype, parts, copy=sharded)
                yield from zip(adapter_names(renamed[weight.name]), pair, strict=True)

    def _tensor_groups(self) -> list[TensorGroup]:
        if self._groups is None:
            model = self._hf_model()
            shapes = {weight.name: whole_shape(weight.parameter) for weight in named_weights(model)}
            self._groups = tensor_groups(model, shapes)
        return self._groups

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, adapters merged, as the model has them in memory, by its own names."""
        for weight in named_weights(self._hf_model()):
            with self._whole([weight]) as whole:
                yield from whole.items()

    @contextmanager
    def _whole(self, weights: Sequence[NamedWeight], stage: Stage | None = None) -> Iterator[dict[str, Tensor]]:
        """Hold whole parameters, with their adapters merged, by name; those of a stage on its ranks alone."""
        dtype, sharded = DTYPES[self._spec.dtype], self._backend.sharded
        parameters = [part for weight in weights for part in weight.parts]
        with self._gathered(parameters) if stage is None else stage.gathered(parameters) as gathered:
            PROGRESS.tick()
            parts = iter(gathered)
            yield {
                weight.name: weight.merged(dtype, [next(parts) for _ in weight.parts], copy=sharded)
                for weight in weights
            }

    @shared_phase
    def connect_weights(self, transfer: WeightTransfer, adapters: bool = False) -> None:
        """Prepare this rank's end of the way to the inference engines. They have started.

        Args:
            transfer: The way.
            adapters: Whether they have the frozen weights, and are sent adapters alone.
        """
        self._sends_adapters, self._base_is_known = adapters, False
        if self._sender is not None:  # the way to engines of which one was replaced; it may keep a model's memory
            self._sender.close()
            self._sender = None
        stage = None if adapters or not transfer.in_parts else self._sending_stage()
        if stage is None:
            self._sender = transfer.connect(self, self.rank)
        else:
            self._sender = transfer.connect(OwnLayers(self, stage), stage.rank, stage.number)

    def _sending_stage(self) -> Stage | None:
        """Return the stage that sends its own weights; None if others have a share of what becomes one tensor."""
        stage = self._backend.stage
        if stage is None:
            return None
        parameters = {weight.name: weight.parameter for weight in named_weights(self._hf_model())}
        owners = ({stage.owner(parameters[name]) for name in group.parameters} for group in self._tensor_groups())
        return stage if all(len(each) == 1 for each in owners) else None

    @shared_phase
    def send_weights(self, seed: int) -> SendReport:
        """Take part in moving what engines are sent; the reports of all ranks together say what that was.

        The first report after `connect_weights` also has fingerprints of frozen weights that engines loaded themselves.
        """
        if self._sender is None:
            raise EngineError("weights are sent before connect_weights")
        report = self._sender.send(seed)
        if self._sends_adapters and not self._base_is_known:
            self._base_is_known = True
            report = replace(report, fingerprints={**report.fingerprints, **self._base_fingerprints(seed)})
        # an engine may keep buffers in another precision, and nothing trains them
        buffers = self._buffers()
        if not buffers:
            return report
        compared = {name: found for name, found in report.fingerprints.items() if name not in buffers}
        return replace(report, fingerprints=compared)

    def _buffers(self) -> frozenset[str]:
        """Return the names that buffers have in a checkpoint."""
        names = {name for name, _ in persistent_buffers(self._hf_model())}
        if not names:
            return frozenset()
        return frozenset(
            tensor for group in self._tensor_groups() if names & {*group.parameters} for tensor in group.tensors
        )

    def _base_fingerprints(self, seed: int) -> dict[str, str]:
        """Return the fingerprints of the weights without adapters, on rank 0; the others take part in gathering."""
        found = {}
        for name, tensor in self._checkpoint(merged=False):
            if self.rank == 0:
                found[name] = fingerprint(tensor, seed)
        return found

    @shared_phase
    def export(self, directory: str, tokenizer: ModelConfig, card: ModelCard) -> None:
        """Write a Hugging Face directory from rank 0; the other ranks take part in gathering.

        Rank 0 holds one file's tensors at a time (`ShardWriter`), the others one parameter.

        Raises:
            CheckpointError: It cannot be written; says whether the disk is the reason.
        """
        spec, task, model = self._spec, self._objective.task, self._hf_model()
        lora = None if spec.frozen else self._settings.lora
        trained = {} if lora is None else self._trained_weights()
        weights = self._parameters()
        try:
            if self.rank != 0:
                return
            base = from_anywhere(card.base_model, Path(spec.model_path))
            save_hf_directory(
                weights,
                model.config,
                load_tokenizer(tokenizer),
                Path(directory),
                card,
                base_dir=Path(spec.model_path),
                trust_remote_code=spec.trust_remote_code,
                task=task,
                more_files=processor_files(Path(spec.model_path)),
                adapter=None if lora is None else Adapter.of(model, lora, trained, base=base, task=task),
            )
        finally:
            for _ in weights:  # also after a failure on rank 0: the others gather all weights
                pass

    def _trained_weights(self) -> dict[str, Tensor]:
        """Return what is trained of a model with adapters, whole, on every rank, by the names of peft's files."""
        trained: dict[str, Tensor] = {}
        for name, parameter in adapter_parameters(self._hf_model()):
            with self._gathered([parameter]) as (whole,):
                trained[name] = whole.detach().to("cpu", copy=True)
            PROGRESS.tick()
        return trained

    def _hf_model(self) -> Any:
        return self._objective.hf_model(self._model.module)

    @cached_property
    def _base(self) -> str | None:
        """Which model's frozen weights adapters are trained beside; None without adapters."""
        return None if self._settings.lora is None else identity_of(Path(self._spec.model_path))

    def _tensors(self, state: State) -> Iterator[Tensor]:
        yield from self._backend.tensors(state)
        if state == "weights":
            yield from scales(self._model.module)

    def _gathered(self, parameters: Sequence[Tensor]) -> AbstractContextManager[Sequence[Tensor]]:
        return self._backend.gathered(parameters) if self._backend.sharded else nullcontext(parameters)

    # ---- states --------------------------------------------------------------------------------

    def state_bytes(self) -> int:
        """Return how much memory this rank's weights and optimizer take, wherever they are."""
        found: dict[int, int] = {}  # by storage: what is emptied now counts as well, views of one tensor count once
        for state in get_args(State):
            for tensor in self._tensors(state):
                storage = tensor.untyped_storage()._cdata
                found[storage] = max(found.get(storage, 0), tensor.nbytes)
        return sum(found.values()) + sum(copy.bytes for copy in self._copies.values())

    @shared_phase
    def save(self, directory: str) -> None:
        """Write this rank's share of model, optimizer and random states under `directory`.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        state = {"updates": self.updates, "rng": random_states(), "base": self._base}
        try:
            self._backend.save(directory)
            PROGRESS.tick()
            torch.save(state, Path(directory) / f"rank_{self.rank}.pt")
            for name, copy in self._copies.items() if self._backend.sharded or self.rank == 0 else ():
                copy.save(self._copy_file(directory, name))
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            # other ranks may wait in a collective that this one left
            kind = DiskFullError if self.world_size == 1 else CheckpointError
            raise kind(
                f"rank {self.rank} cannot write its checkpoint to {directory}: {error}",
                fix="free disk space, or lower checkpoint.keep",
            ) from error
        release_free_memory()

    @shared_phase
    def load(self, directory: str) -> None:
        """Take back what `save` wrote.

        Raises:
            CheckpointError: Something is missing or unreadable.
        """
        try:
            self._backend.load(directory)
            # ranks that divide matrices draw the same numbers, so that all of them drop the same inputs
            drawing = self.rank - self.rank % self._settings.tensor_parallel
            own = Path(directory) / f"rank_{drawing}.pt"
            # rank 0's where more ranks load than have saved
            state = torch.load(own if own.exists() else own.with_name("rank_0.pt"), weights_only=True)
        except _UNREADABLE as error:
            raise CheckpointError(
                f"rank {self.rank} cannot read its checkpoint in {directory}: {error}",
                fix="continue with the model, the adapters and the critic of the run (config.yaml in the checkpoint), "
                "or leave --resume out to start a new one",
            ) from error
        base = state.get("base")
        if base is not None and not (self._base and same_model(base, self._base)):
            raise CheckpointError(
                f"the adapters in {directory} were trained beside another base model: its fingerprint was {base}, and "
                f"that of {self._spec.model_path} is {self._base}",
                fix="set model.path and model.revision to those of the run (config.yaml in the checkpoint), or leave "
                "--resume out to start a new one",
            )
        for name, copy in self._copies.items():
            try:
                copy.load(self._copy_file(directory, name))
            except _UNREADABLE as error:
                raise CheckpointError(
                    f"rank {self.rank} cannot read its copy of the policy's weights, the {name}: {error}",
                    fix=f"continue with training.{', training.'.join(COPY_KEYS)} and training.lora of the run "
                    "(config.yaml in the checkpoint), or leave --resume out to start a new one",
                ) from error
        self.updates = state["updates"]
        if own.exists():
            restore_random_states(state["rng"])
        else:  # random states of its own, not those of rank 0
            sequence = np.random.SeedSequence([self._spec.seed, self.updates, drawing])
            seed_everything(int(sequence.generate_state(1)[0]))

    def _copy_file(self, directory: str, name: str) -> Path:
        # ranks that do not divide the weights have the same copy
        return Path(directory) / f"copy_{name}_{self.rank if self._backend.sharded else 0}.pt"

    @shared_phase
    def offload(self, state: State) -> None:
        """Move the weights, or all else of training, to host memory, for other roles on the same GPU.

        Until `reload` nothing that needs them may be called.
        """
        module = self._model.module
        if not self._spec.frozen:
            # an optimizer of plain float32 training has the weights themselves as its parameters
            keep = self._backend.tensors("weights") if state == "optimizer" else ()
            self._host[state].offload(self._tensors(state), keep)
        elif state == "weights":
            sharded = self._backend.sharded
            self._host[state].offload(
                self._backend.tensors(state) if sharded else (*module.parameters(), *module.buffers())
            )

    @shared_phase
    def reload(self, state: State) -> None:
        """Move it back."""
        self._host[state].reload()


class OwnLayers:
    """The weights that one stage of the layers sends: a `WeightSource`."""

    def __init__(self, rank: TrainingRank, stage: Stage) -> None:
        self._rank, self._stage = rank, stage

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of the stage's layers."""
        return self._rank.own_weights(self._stage)


def share_rows(module: nn.Module, ranks: int) -> None:
    """Let a module compute rows together with its neighbours; all ranks must call this together.

    Raises:
        ConfigError: It is not made for that.
    """
    if not isinstance(module, RowModule):
        raise ConfigError(
            f"{type(module).__name__} cannot compute rows together with other ranks, because it is no RowModule "
            "(roll_like.training.policy)",
            fix="set sequence_parallel: 1",
        )
    module.parallel = SequenceParallel.of(ranks)


def release_free_memory() -> None:
    """Give pages of freed memory back, which the allocator keeps for the next micro-batch (`thread_environment`).

    Freed blocks of many sizes leave gaps that later ones do not fit into, so what it keeps grows without end.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc only
    if trim is not None:
        trim(0)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Return the state of every global random generator of this process, as what can be read without running code."""
    state: Any = np.random.get_state()
    kind, keys, *rest = state
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Undo `random_states`."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
