"""What the ranks of every model that DeepSpeed trains have in common."""

from __future__ import annotations

import os
import random
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor, nn

from roll_like.config.load import import_plugins
from roll_like.config.lora import LoRAConfig
from roll_like.config.sections import DeepSpeedConfig, ModelConfig, Precision, Task
from roll_like.errors import CheckpointError, EngineError
from roll_like.models.export import ModelCard, save_hf_directory
from roll_like.models.load import from_anywhere, load_causal_lm, load_tokenizer
from roll_like.models.lora import Adapter, adapter_parameters, named_weights
from roll_like.training.attention import use_dense_attention
from roll_like.training.deepspeed_config import deepspeed_config, learning_rate
from roll_like.types import FloatArray
from roll_like.values import Last, Max, Mean, Metric, Metrics, Sum, merge

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: What one micro-batch of an update is, for the objective of a model.
PartT = TypeVar("PartT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What a rank of any model needs to know.

    Attributes:
        model_path: Local Hugging Face directory.
        dtype: Precision of the forward pass; master weights are float32.
        device: `cpu` or `cuda`.
        threads: Cores of this rank on CPU.
        seed: Seed of everything random.
        total_updates: Optimizer steps of the whole run, for the schedule.
        trust_remote_code: Whether the model may bring code.
        imports: Modules to import first; they register plugins.
    """

    model_path: str
    dtype: Precision
    device: str
    threads: int
    seed: int
    total_updates: int
    trust_remote_code: bool
    imports: tuple[str, ...] = ()


class DeepSpeedRank(ABC):
    """Starts an engine around a module, takes optimizer steps, saves, loads, makes room.

    Args:
        spec: Model, device and schedule.
        settings: The section of this model.
        rank: This process's place among the ranks.
        world_size: Their number.
    """

    #: The section of the configuration, for messages.
    section: ClassVar[str]
    #: First part of the names of this model's metrics.
    metric_prefix: ClassVar[str]
    #: Names the rank's memory in metrics.
    memory_name: ClassVar[str]

    def __init__(self, spec: RankSpec, settings: DeepSpeedConfig, rank: int, world_size: int) -> None:
        self._common = spec
        self._settings = settings
        self.rank = rank
        self.world_size = world_size
        self.updates = 0
        self._device = torch.device(spec.device)
        self._engine: Any = None

    @abstractmethod
    def _module(self, causal_lm: Any) -> nn.Module:
        """Return the module to train around the model that was loaded."""

    # ---- start and end -------------------------------------------------------------------------

    def address(self) -> tuple[str, int]:
        """Return a host and a free port of this rank, for the others to meet at."""
        with socket.socket() as free:
            free.bind(("", 0))
            port: int = free.getsockname()[1]
        host = socket.gethostbyname(socket.gethostname()) if self.world_size > 1 else "127.0.0.1"
        return host, port

    def start(self, address: tuple[str, int]) -> None:
        """Join the process group and build the engine.

        Raises:
            EngineError: DeepSpeed or the model failed to start; says why.
        """
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK="0",
            MASTER_ADDR=address[0],
            MASTER_PORT=str(address[1]),
        )
        seed_everything(self._common.seed)
        import_plugins(self._common.imports)
        if self._common.device == "cpu":
            torch.set_num_threads(self._common.threads)
        try:
            self._join()
            self._engine = self._build(self._module(self._load()).to(self._device))
        except (RuntimeError, ValueError, OSError, AssertionError, NotImplementedError) as error:
            raise EngineError(
                f"the {self.section} engine did not start on rank {self.rank}: {type(error).__name__}: {error}",
                fix=f"check model.path, model.dtype, {self.section}.zero_stage and {self.section}.offload",
            ) from error

    def _join(self) -> None:
        import deepspeed  # takes seconds, and reads the environment set above

        if self._common.device == "cpu":
            # without this, DeepSpeed compiles a shared-memory backend with g++ for a minute
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        backend = "gloo" if self._common.device == "cpu" else "nccl"
        deepspeed.init_distributed(dist_backend=backend, verbose=False)

    def _load(self) -> Any:
        spec = self._common
        causal_lm = self._pretrained()
        if spec.device == "cpu":
            use_dense_attention(causal_lm)
        if self._settings.gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return causal_lm

    def _pretrained(self) -> Any:
        """Return the Hugging Face model that the module is made around."""
        spec = self._common
        return load_causal_lm(Path(spec.model_path), dtype=spec.dtype, trust_remote_code=spec.trust_remote_code)

    def _build(self, module: nn.Module) -> Any:
        import deepspeed

        options = self._settings.optimizer
        optimizer = torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=self._settings.offload == "none",
        )
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=deepspeed_config(self._settings, self._common.dtype)
        )
        engine.train()
        return engine

    def close(self) -> None:
        """Leave the process group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    # ---- computing -----------------------------------------------------------------------------

    def _update(
        self, parts: Sequence[PartT], objective: Callable[[PartT], tuple[Tensor, Metrics]]
    ) -> dict[str, Metric]:
        """Take one optimizer step over micro-batches, and return its metrics.

        Args:
            parts: One a micro-batch; every rank has equally many.
            objective: Returns the micro-batch's share of the loss, a sum whose weights divide by the
                whole global batch, and its metrics.

        Raises:
            EngineError: The gradient is not finite.
        """
        rate = learning_rate(self._settings.optimizer, self.updates, self._common.total_updates)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        collected: list[Metrics] = []
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            self._engine.set_gradient_accumulation_boundary(last)
            loss, metrics = objective(part)
            # DeepSpeed averages over ranks; the weights already divide by the global batch
            self._engine.backward(loss * self.world_size)
            collected.append(metrics)
            if not last:
                self._engine.step()  # only counts the micro-batch; the optimizer moves at the boundary
        grad_norm = self._norm_where_deepspeed_has_none()
        self._engine.step()
        if grad_norm is None:
            grad_norm = float(self._engine.get_global_grad_norm())
        self.updates += 1
        if not np.isfinite(grad_norm) and self._common.dtype != "float16":  # float16 skips the step and rescales
            raise EngineError(
                f"the gradient norm of the {self.section} engine's update {self.updates} is {grad_norm}",
                fix=f"lower {self.section}.optimizer.lr, or use model.dtype: float32 to find the cause",
            )
        return merge(
            [*collected, {f"{self.metric_prefix}/grad_norm": Mean(grad_norm), f"{self.metric_prefix}/lr": Last(rate)}]
        )

    def _norm_where_deepspeed_has_none(self) -> float | None:
        """DeepSpeed reports no gradient norm for plain float32 data parallelism; its gradients are all here."""
        if self._common.dtype != "float32" or self._settings.zero_stage > 0:
            return None
        norms = [p.grad.norm() for p in self._engine.module.parameters() if p.grad is not None]
        return float(torch.stack(norms).norm())

    def _memory(self) -> Metrics:
        memory: dict[str, Metric] = {f"memory/{self.memory_name}_gib": Sum(psutil.Process().memory_info().rss / 2**30)}
        if self._common.device == "cuda":
            memory[f"memory/{self.memory_name}_gpu_gib"] = Max(torch.cuda.max_memory_allocated() / 2**30)
        return memory

    def _set_mode(self) -> None:
        """Switch dropout off where there is no gradient."""
        learning = torch.is_grad_enabled()
        if self._handed_out().training != learning:
            self._engine.train(learning)

    def _tensor(self, array: FloatArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    # ---- weights -------------------------------------------------------------------------------

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every parameter, whole, in the forward pass's precision; adapters are merged.

        Under ZeRO-3 every rank must walk through this at the same time: each parameter is gathered
        when its turn comes.
        """
        dtype = DTYPES[self._common.dtype]
        for weight in named_weights(self._handed_out()):
            with self._gathered(weight.parts):
                yield weight.name, weight.merged(dtype, copy=self._is_sharded())

    def _gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        """Hold parameters whole; every rank must ask for the same ones."""
        if not self._is_sharded():
            return nullcontext()
        import deepspeed

        gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(parameters))
        return gathered

    def snapshot(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return every parameter, whole, on rank 0; nothing on the others."""
        weights = {name: tensor.float().cpu().numpy().copy() for name, tensor in self.full_weights()}
        return weights if self.rank == 0 else {}

    def _write_model(
        self,
        directory: str,
        tokenizer: ModelConfig,
        card: ModelCard,
        *,
        task: Task = "text-generation",
        lora: LoRAConfig | None = None,
    ) -> None:
        """Write what is handed out, a Hugging Face model, as a directory from rank 0; the others help gathering."""
        weights = {name: tensor.cpu().clone() for name, tensor in self.full_weights()}
        trained = {} if lora is None else self._trained_weights()
        if self.rank != 0:
            return
        model: Any = self._handed_out()
        base = from_anywhere(card.base_model, Path(self._common.model_path))
        adapter = None if lora is None else Adapter.of(model, lora, trained, base=base, task=task)
        try:
            save_hf_directory(
                weights,
                model.config,
                load_tokenizer(tokenizer),
                Path(directory),
                card,
                trust_remote_code=self._common.trust_remote_code,
                task=task,
                adapter=adapter,
            )
        except OSError as error:
            raise CheckpointError(
                f"the trained model cannot be written to {directory}: {error}", fix="free disk space"
            ) from error

    def _trained_weights(self) -> dict[str, Tensor]:
        """Return what is trained of a model with adapters, whole, on every rank, by the names of peft's files."""
        trained: dict[str, Tensor] = {}
        for name, parameter in adapter_parameters(self._handed_out()):
            with self._gathered([parameter]):
                trained[name] = parameter.detach().to("cpu", copy=True)
        return trained

    def _handed_out(self) -> nn.Module:
        module: nn.Module = self._engine.module
        return module

    def _is_sharded(self) -> bool:
        return self._settings.zero_stage == 3

    # ---- states --------------------------------------------------------------------------------

    def save(self, directory: str) -> None:
        """Write this rank's share of model, optimizer and random states under `directory`.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        state = {"updates": self.updates, "rng": random_states()}
        try:
            self._engine.save_checkpoint(
                directory, tag="engine", client_state={}, save_latest=False, exclude_frozen_parameters=True
            )
            torch.save(state, Path(directory) / f"rank_{self.rank}.pt")
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            raise CheckpointError(
                f"rank {self.rank} cannot write its checkpoint to {directory}: {error}",
                fix="free disk space, or lower checkpoint.keep",
            ) from error

    def load(self, directory: str) -> None:
        """Take back what `save` wrote.

        Raises:
            CheckpointError: Something is missing or unreadable.
        """
        try:
            path, _ = self._engine.load_checkpoint(directory, tag="engine", custom_load_fn=load_trained)
            state = torch.load(Path(directory) / f"rank_{self.rank}.pt", weights_only=False)
        except (OSError, RuntimeError, ValueError, KeyError, AssertionError, EOFError) as error:
            raise CheckpointError(f"rank {self.rank} cannot read its checkpoint in {directory}: {error}") from error
        if path is None:
            raise CheckpointError(f"there is no engine state in {directory}")
        self.updates = state["updates"]
        restore_random_states(state["rng"])

    def offload(self) -> None:
        """Move states to host memory, so that a colocated engine has the GPU."""
        if self._sleeps():
            self._engine.offload_states()
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move states back."""
        if self._sleeps():
            self._engine.reload_states()

    def _sleeps(self) -> bool:
        return self._common.device == "cuda" and self._settings.sleep and self._settings.zero_stage == 3


def load_trained(*, src: Mapping[str, Tensor], dst: nn.Module) -> None:
    """Load a module strictly, but for what is frozen: that is not in checkpoints."""
    result = dst.load_state_dict(src, strict=False)
    frozen = {name for name, each in dst.named_parameters(remove_duplicate=False) if not each.requires_grad}
    missing = sorted(set(result.missing_keys) - frozen)
    if missing or result.unexpected_keys:
        raise RuntimeError(
            f"it is of another model or of other adapters: it lacks {', '.join(missing[:3]) or 'nothing'}, and has "
            f"{', '.join(result.unexpected_keys[:3]) or 'nothing'} besides"
        )


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Return the state of every global random generator of this process."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
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
