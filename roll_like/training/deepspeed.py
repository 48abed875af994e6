"""The training backend `deepspeed`: all that knows DeepSpeed's engine, its ZeRO stages and its checkpoints.

DeepSpeed sees one micro-batch at a time and is told where an optimizer step ends: micro-batches and the loss are
normalised by the objectives.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from roll_like.algorithms.lazy import torch  # the registry imports this file to know the names of backends
from roll_like.config.base import Violation
from roll_like.config.model import Precision
from roll_like.config.training import StateBytes, StateSizes, TrainerConfig
from roll_like.models.imports import quick_imports
from roll_like.registry import TRAINING_BACKENDS
from roll_like.training import deepspeed_states
from roll_like.training.backend import COLLECTIVE_TIMEOUT, BatchT, State, StatePart, TrainingBackend, join_ranks
from roll_like.training.host_copies import tensors_within

if TYPE_CHECKING:
    from torch import Tensor, nn


#: Name of the folder of states within a checkpoint.
TAG = "engine"
#: Elements of gradients that ranks reduce at a time, at most. DeepSpeed's default of 5 · 10⁸ takes a GB in 16 bit,
#: which lies on the GPU for the whole run and moves to host memory with the optimizer. NCCL reaches its bandwidth with
#: tens of MB already; this is 128 MiB. A larger tensor (an embedding) is reduced by itself, without the bucket.
BUCKET_ELEMENTS = 2**26
#: DeepSpeed's defaults: parameters that ZeRO-3 keeps gathered at most, and that it gathers ahead.
LIVE_PARAMETERS = 10**9
PREFETCHED_PARAMETERS = 5 * 10**7


@TRAINING_BACKENDS.register("deepspeed")
class DeepSpeedBackend(TrainingBackend):
    """A DeepSpeed engine around one rank's module: a `TrainingBackend`."""

    start_keys: ClassVar[tuple[str, ...]] = ("zero_stage", "offload")
    reads_late: ClassVar[bool] = True
    keeps_copies: ClassVar[bool] = True
    orthogonalises: ClassVar[bool] = True
    _engine: Any

    @staticmethod
    def environment(device: str) -> Mapping[str, str]:
        return {"DS_ACCELERATOR": device}

    @staticmethod
    def violations(settings: TrainerConfig) -> Iterator[Violation]:
        """Yield an `offload` of what ZeRO does not shard."""
        needed = {"none": 0, "optimizer": 1, "optimizer_and_parameters": 3}[settings.offload]
        if settings.zero_stage < needed:
            yield Violation(
                ("offload",),
                f"{settings.offload} needs zero_stage ≥ {needed}, because DeepSpeed offloads only what ZeRO shards; "
                f"found zero_stage: {settings.zero_stage}",
            )
        if settings.compile and settings.zero_stage == 3:
            yield Violation(
                ("compile",),
                "DeepSpeed's zero_stage 3 gathers weights by hooks inside of the layers, which would cut what is "
                "compiled to pieces; use zero_stage 2 or less, or backend: fsdp2",
            )

    @staticmethod
    def divided(settings: TrainerConfig) -> frozenset[StatePart]:
        """Return what ZeRO shards: the optimizer from stage 1, gradients from 2, weights from 3."""
        parts: tuple[StatePart, ...] = ("optimizer", "gradients", "weights")
        return frozenset(parts[: settings.zero_stage])

    @classmethod
    def state_bytes(cls, settings: TrainerConfig, sizes: StateSizes) -> StateBytes:
        """Return the memory of one rank, as counted in DeepSpeed 0.19 (`tests/integration/test_state_bytes.py`).

        In 16 bit gradients are summed in float32 from stage 1: whole in stage 1, sharded from 2. Stages 0 and 1 hold
        16-bit ones until the optimizer step, later stages as many as a bucket holds, or one tensor that is larger.
        """
        stage, ranks, width = settings.zero_stage, settings.workers, sizes.width
        parameters, trained = sizes.parameters, sizes.trained
        shard, half = trained // ranks, width < 4
        weights = parameters * width // (ranks if stage == 3 else 1)
        optimizer = (4 * trained if stage or half else 0) + settings.optimizer.moment_bytes(sizes)
        optimizer //= ranks if stage else 1
        gradients = {0: width * trained, 1: (width + 4) * trained if half else width * trained}.get(stage, 4 * shard)
        step = {0: 4 * trained if half else 0, 1: width * trained}.get(stage, 0 if stage == 2 and half else 4 * shard)
        in_transit = min(trained, bucket_elements(trained) + sizes.largest) * width if stage > 1 else 0
        step += settings.optimizer.step_bytes(sizes)
        if settings.offload != "none":
            optimizer = gradients = step = 0
        if settings.offload == "optimizer_and_parameters":
            weights = 0
        if stage == 3 and (ranks > 1 or not weights):
            fetched = max(PREFETCHED_PARAMETERS, sizes.largest)
            in_transit += (min(parameters, LIVE_PARAMETERS) + min(parameters, fetched)) * width
        return StateBytes(weights=weights, gradients=gradients, optimizer=optimizer, buffers=in_transit, step=step)

    @staticmethod
    def merged(directory: Path) -> Mapping[str, Tensor]:
        """Return whole parameters from the files of any ZeRO stage and world size, which are mapped and not read."""
        return deepspeed_states.merged(directory / TAG)

    def join(self) -> None:
        # its autotuner, unused here, would import mlflow: a second and 100 MB a rank
        with quick_imports(), without("mlflow"):
            import deepspeed  # takes seconds, and reads the environment

        if self._device == "cpu":
            # without this, DeepSpeed compiles a shared-memory backend with g++ for a minute
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        backend = join_ranks(self._device, int(os.environ["RANK"]))
        # it takes the group that is there
        deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=COLLECTIVE_TIMEOUT)

    def wrap(self, module: nn.Module) -> None:
        """Take a module on the CPU, to train it on the device; with ZeRO-3 also one that is frozen."""
        import deepspeed

        from roll_like.training.muon import Muon
        from roll_like.training.optimizer import optimizer_of
        from roll_like.training.recurrent import state_mixers

        settings = self._settings
        config = deepspeed_config(settings, self._dtype, parameters_of(module))
        if self.sharded:
            _shard(module, getattr(torch, self._dtype), config)
            for _, mixer in state_mixers(module):  # reads weights of parts that it does not call
                for parameter in mixer.parameters():
                    deepspeed.zero.register_external_parameter(mixer, parameter)
        learns = any(parameter.requires_grad for parameter in module.parameters())
        optimizer = optimizer_of(module, settings.optimizer) if learns else None
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self.module = self._engine.module
        deepspeed_states.forget_first_step(self._engine)
        if isinstance(optimizer, Muon):
            optimizer.lay_out(deepspeed_states.pieces_of_matrices(self._engine, optimizer), str(self._engine.device))
        # ZeRO's collectives use a copy of the process group, which has torch's own time-out
        torch.distributed.distributed_c10d._set_pg_timeout(COLLECTIVE_TIMEOUT, self._engine.data_parallel_group)
        self._engine.train(learns)

    def forward(self, *inputs: Any) -> Any:
        learning = torch.is_grad_enabled()
        if self.module.training != learning:
            self._engine.train(learning)
        return self._engine(*inputs)

    def forward_backward(self, batches: Sequence[BatchT], loss_of: Callable[[BatchT], Tensor]) -> None:
        for index, batch in enumerate(batches, start=1):
            last = index == len(batches)
            self._engine.set_gradient_accumulation_boundary(last)
            # DeepSpeed averages over ranks, where losses add up
            self._engine.backward(loss_of(batch) * self._world_size)
            if not last:
                self._engine.step()  # only counts the micro-batch; the optimizer moves at the boundary

    def optimizer_step(self, learning_rate: float) -> float:
        """Take the step. Where the norm is not finite only DeepSpeed's own counters of steps move on."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = self._norm_where_deepspeed_has_none()
        if norm is not None and not math.isfinite(norm):
            # the one mode in which DeepSpeed would take this step; in the others it discards such gradients itself
            self._engine.zero_grad()
            return norm
        self._engine.step()
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
        self._forget_gradient()
        return norm

    def _forget_gradient(self) -> None:
        """Clear what DeepSpeed 0.19 keeps of the gradient of an update, whether that was taken or discarded.

        ZeRO 3, and any stage with an offloaded optimizer, would take it for the gradient of parameters that the next
        update leaves out, such as experts without tokens. ZeRO 1 and 2 with an offloaded optimizer of 16-bit weights
        would add the next gradients to a discarded one.
        """
        optimizer = self._engine.optimizer
        sums = getattr(optimizer, "averaged_gradients", {})
        for group in sums:
            sums[group] = None
        masters = "fp32_partitioned_groups_flat" if self.sharded else "single_partition_of_fp32_groups"
        kept = [
            *(master.grad for master in getattr(optimizer, masters, ())),
            *getattr(optimizer, "accumulated_grads_in_cpu", {}).values(),
            getattr(optimizer, "grad_partitions_flat_buffer", None),
        ]
        for gradient in kept:
            if gradient is not None:
                gradient.zero_()

    def _norm_where_deepspeed_has_none(self) -> float | None:
        """DeepSpeed reports no gradient norm for plain float32 data parallelism; its gradients are all here."""
        if self._dtype != "float32" or self._settings.zero_stage > 0:
            return None
        norms = [p.grad.norm() for p in self.module.parameters() if p.grad is not None]
        return float(torch.stack(norms).norm())

    def trained_shares(self) -> dict[str, Tensor]:
        """Return the parameters of the forward pass, or what ZeRO-3 keeps of them here, without what fills it up."""
        if self.sharded:
            self._engine.empty_partition_cache()  # small parameters stay whole after a pass
        return deepspeed_states.trained_shares(self._engine, divided=self.sharded)

    def reset_optimizer(self) -> None:
        deepspeed_states.forget_moments(self._engine)

    @contextmanager
    def gathered(self, parameters: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Hold the whole of parameters that ZeRO-3 shards; every rank must ask for the same ones."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parameters)):
            yield parameters

    def save(self, directory: str) -> None:
        """Write this rank's share of model and optimizer; any number of ranks with any ZeRO stage can take it back."""
        (folder := Path(directory) / TAG).mkdir(exist_ok=True)
        deepspeed_states.save(self._engine, folder, self._dtype)

    def load(self, directory: str) -> None:
        deepspeed_states.load(self._engine, Path(directory) / TAG, self._dtype)

    def tensors(self, part: State) -> Iterator[Tensor]:
        """Yield weights with what ZeRO-3 keeps of them, or all that DeepSpeed's optimizer refers to."""
        if part == "weights":
            if self.sharded:
                self._engine.empty_partition_cache()
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                yield tensor
                if self.sharded:
                    yield from (own for own in vars(tensor).values() if isinstance(own, torch.Tensor))
        else:
            yield from tensors_within(self._engine.optimizer, of=("deepspeed", "torch", "roll_like"))
            yield from (parameter.grad for parameter in self.module.parameters() if parameter.grad is not None)


def parameters_of(module: nn.Module) -> int:
    """Return how many parameters a module trains."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def deepspeed_config(config: TrainerConfig, dtype: Precision, parameters: int) -> dict[str, Any]:
    """Return the dictionary that `deepspeed.initialize` takes.

    Args:
        parameters: How many are trained.
    """
    bucket = bucket_elements(parameters)
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if config.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if config.offload == "optimizer_and_parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # its own Adam for offloaded states has to be compiled; torch's fused one computes on either device
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
    elif dtype == "float16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 12}
    if dtype != "float32" and config.zero_stage > 0:
        # many small micro-batches would lose bits in a 16-bit sum; stage 0 has no such option
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def bucket_elements(parameters: int) -> int:
    """Return how many elements DeepSpeed reduces at a time: all of a small model, whose buckets would stay empty.

    A multiple of 128: DeepSpeed refuses odd numbers.
    """
    return max(math.ceil(min(BUCKET_ELEMENTS, parameters) / 128), 1) * 128


def _shard(module: nn.Module, dtype: torch.dtype, config: Mapping[str, Any]) -> None:
    """Shard a module on the CPU over the ranks; a device holds its share and one whole parameter at a time.

    `deepspeed.initialize` would move the whole module to the device first. Loading under `zero.Init`, as transformers
    does, would shard as early, but it also makes rotary frequencies 16-bit numbers; here buffers stay as they are.
    """
    import deepspeed

    from roll_like.models.unread import materialise

    device = deepspeed.get_accelerator().current_device_name()
    converter: Any = None
    for parameter in module.parameters():
        # a copy also on the CPU: rank 0's numbers are written over the others', and pages of a mapped file that are
        # written to stay in memory
        materialise(parameter)
        kept = dtype if parameter.is_floating_point() else parameter.dtype
        parameter.data = parameter.data.to(device, kept, copy=True)
        if converter is None:
            converter = parameter
            deepspeed.zero.Init(
                module=torch.nn.ParameterList([parameter]), config_dict_or_path=dict(config), dtype=dtype
            )
        else:
            converter.convert_to_zero_parameters(param_list=[parameter])
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


@contextmanager
def without(module: str) -> Iterator[None]:
    """Let imports do without an optional module that is not imported yet."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # how Python marks what cannot be imported
    try:
        yield
    finally:
        del sys.modules[module]
