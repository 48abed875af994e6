"""One rank of the DeepSpeed training engine."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from roll_like.algorithms.correction import correction_from
from roll_like.algorithms.losses import KLTerm, LossInputs, policy_objective
from roll_like.config.load import import_plugins
from roll_like.config.rlvr import AlgorithmConfig
from roll_like.config.sections import ModelConfig, Precision, TrainingConfig
from roll_like.errors import CheckpointError, EngineError
from roll_like.models.export import ModelCard, save_hf_directory
from roll_like.models.load import load_causal_lm, load_tokenizer
from roll_like.registry import LOSSES
from roll_like.training.attention import use_dense_attention
from roll_like.training.deepspeed_config import deepspeed_config, learning_rate
from roll_like.training.layout import MicroBatch
from roll_like.training.policy import PolicyModule, tensors_of
from roll_like.types import FloatArray
from roll_like.values import Last, Max, Mean, Metric, Metrics, Sum, merge

if TYPE_CHECKING:
    from roll_like.weights.transfer import SendReport, WeightSender, WeightTransfer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What a rank needs to know.

    Attributes:
        model_path: Local Hugging Face directory.
        dtype: Precision of the forward pass; master weights are float32.
        device: `cpu` or `cuda`.
        threads: Cores of this rank on CPU.
        seed: Seed of everything random.
        training: The `training` section.
        frozen: Whether the model only computes log-probabilities (a reference).
        algorithm: Loss, KL and correction.
        temperature: Sampling temperature that log-probabilities are taken at.
        total_updates: Optimizer steps of the whole run, for the schedule.
        trust_remote_code: Whether the model may bring code.
        imports: Modules to import first; they register plugins.
    """

    model_path: str
    dtype: Precision
    device: str
    threads: int
    seed: int
    training: TrainingConfig
    frozen: bool
    algorithm: AlgorithmConfig
    temperature: float
    total_updates: int
    trust_remote_code: bool
    imports: tuple[str, ...] = ()


class DeepSpeedWorker:
    """Computes log-probabilities, takes optimizer steps, saves, loads and hands out weights."""

    def __init__(self, spec: TrainerSpec, rank: int, world_size: int) -> None:
        self.spec = spec
        self.rank = rank
        self.world_size = world_size
        self.updates = 0
        self._device = torch.device(spec.device)
        self._engine: Any = None
        self._sender: WeightSender | None = None

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
        seed_everything(self.spec.seed)
        import_plugins(self.spec.imports)
        if self.spec.device == "cpu":
            torch.set_num_threads(self.spec.threads)
        try:
            self._engine = self._build()
        except (RuntimeError, ValueError, OSError, AssertionError, NotImplementedError) as error:
            raise EngineError(
                f"the training engine did not start on rank {self.rank}: {type(error).__name__}: {error}",
                fix="check model.path, model.dtype, training.zero_stage and training.offload",
            ) from error

    def _build(self) -> Any:
        import deepspeed  # takes seconds, and reads the environment set above

        if self.spec.device == "cpu":
            # without this, DeepSpeed compiles a shared-memory backend with g++ for a minute
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        backend = "gloo" if self.spec.device == "cpu" else "nccl"
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
        training = self.spec.training
        causal_lm = load_causal_lm(
            Path(self.spec.model_path), dtype=self.spec.dtype, trust_remote_code=self.spec.trust_remote_code
        )
        if self.spec.device == "cpu":
            use_dense_attention(causal_lm)
        if training.gradient_checkpointing and not self.spec.frozen:
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        module = PolicyModule(
            causal_lm, chunk_tokens=training.logprob_chunk_tokens, chunk_vocab=training.logprob_chunk_vocab
        ).to(self._device)
        if self.spec.frozen:
            return module.requires_grad_(False).eval()
        optimizer = torch.optim.AdamW(
            module.parameters(),
            lr=training.optimizer.lr,
            betas=training.optimizer.betas,
            eps=training.optimizer.eps,
            weight_decay=training.optimizer.weight_decay,
            fused=training.offload == "none",
        )
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=deepspeed_config(training, self.spec.dtype)
        )
        engine.train()
        return engine

    def close(self) -> None:
        """Let go of the inference engines and leave the process group."""
        if self._sender is not None:
            self._sender.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    # ---- computing -----------------------------------------------------------------------------

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        """Return the log-probability of every target of every micro-batch, shape [N] each."""
        return [logprobs.cpu().numpy() for logprobs in self._logprobs_of(batches)]

    @torch.no_grad()
    def _logprobs_of(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [self._forward(batch)[0] for batch in batches]

    def train(self, updates: Sequence[Sequence[MicroBatch]]) -> dict[str, Metric]:
        """Take one optimizer step for each element of `updates`; return this rank's metrics.

        Every rank gets the same number of micro-batches in each update.
        """
        started = time.perf_counter()
        old = self._old_logprobs(updates)
        old_seconds = time.perf_counter() - started
        parts: list[Metrics] = []
        for batches, old_of_batches in zip(updates, old, strict=True):
            update = self._update(batches, old_of_batches)
            # a loss is a sum over the micro-batches and ranks of one update, and a mean over updates
            parts.append({name: _shared(name, metric, len(updates)) for name, metric in update.items()})
        parts.append({"time/old_logprobs": Max(old_seconds), "time/train_compute": Max(time.perf_counter() - started)})
        parts.append(self._memory())
        return merge(parts)

    def _old_logprobs(self, updates: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor | None]]:
        how = self.spec.algorithm.old_logprobs
        if how == "recompute" or (how == "auto" and len(updates) > 1):
            return [[*self._logprobs_of(batches)] for batches in updates]
        if how == "behaviour":
            return [[self._tensor(batch.behaviour_logprobs) for batch in batches] for batches in updates]
        return [[None] * len(batches) for batches in updates]

    def _update(self, batches: Sequence[MicroBatch], old: Sequence[Tensor | None]) -> dict[str, Metric]:
        rate = learning_rate(self.spec.training.optimizer, self.updates, self.spec.total_updates)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        parts: list[Metrics] = []
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            self._engine.set_gradient_accumulation_boundary(last)
            parts.append(self._accumulate(batch, old[index]))
            if not last:
                self._engine.step()  # only counts the micro-batch; the optimizer moves at the boundary
        grad_norm = self._norm_where_deepspeed_has_none()
        self._engine.step()
        if grad_norm is None:
            grad_norm = float(self._engine.get_global_grad_norm())
        self.updates += 1
        if not np.isfinite(grad_norm) and self.spec.dtype != "float16":  # float16 skips the step and rescales
            raise EngineError(
                f"the gradient norm of update {self.updates} is {grad_norm}",
                fix="lower training.optimizer.lr, or use model.dtype: float32 to find the cause",
            )
        parts.append({"train/grad_norm": Mean(grad_norm), "train/lr": Last(rate)})
        return merge(parts)

    def _accumulate(self, batch: MicroBatch, old: Tensor | None) -> Metrics:
        logprobs, entropy = self._forward(batch)
        reference = self._tensor(batch.reference_logprobs) if batch.reference_logprobs.size else None
        inputs = LossInputs(
            logprobs_N=logprobs,
            old_logprobs_N=logprobs.detach() if old is None else old,
            behaviour_logprobs_N=self._tensor(batch.behaviour_logprobs),
            reference_logprobs_N=reference,
            entropy_N=entropy,
            advantages_N=self._tensor(batch.advantages),
            weights_N=self._tensor(batch.weights),
            sequence_N=torch.from_numpy(np.unique(batch.sample_ids, return_inverse=True)[1]).to(self._device),
            sequences=len(np.unique(batch.sample_ids)),
        )
        algorithm = self.spec.algorithm
        kl = KLTerm(algorithm.kl.estimator, algorithm.kl.coefficient) if algorithm.kl.use == "loss" else None
        loss, metrics = policy_objective(
            inputs,
            LOSSES.get(algorithm.loss.type)(algorithm.loss),
            kl,
            algorithm.entropy_coefficient,
            correction_from(algorithm.correction),
        )
        # DeepSpeed averages over ranks; our weights already divide by the global batch
        self._engine.backward(loss * self.world_size)
        counts: Metrics = {
            "train/computed_tokens": Sum(float(batch.tokens)),
            "train/padding_tokens": Sum(float(batch.padding)),
        }
        return merge([metrics, counts])

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self._engine(*tensors_of(batch, self._device), self.spec.temperature)
        return result

    def _tensor(self, array: FloatArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _norm_where_deepspeed_has_none(self) -> float | None:
        """DeepSpeed reports no gradient norm for plain float32 data parallelism; its gradients are all here."""
        if self.spec.dtype != "float32" or self.spec.training.zero_stage > 0:
            return None
        norms = [p.grad.norm() for p in self._engine.module.parameters() if p.grad is not None]
        return float(torch.stack(norms).norm())

    def _memory(self) -> Metrics:
        memory: dict[str, Metric] = {"memory/trainer_gib": Sum(psutil.Process().memory_info().rss / 2**30)}
        if self.spec.device == "cuda":
            memory["memory/trainer_gpu_gib"] = Max(torch.cuda.max_memory_allocated() / 2**30)
        return memory

    # ---- weights -------------------------------------------------------------------------------

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every parameter, whole, in the forward pass's precision.

        Under ZeRO-3 every rank must walk through this at the same time: each parameter is gathered
        when its turn comes. Names are the Hugging Face model's own.
        """
        for name, parameter in self._module().causal_lm.named_parameters():
            if self.spec.training.zero_stage < 3 or self.spec.frozen:
                yield name, parameter.detach().to(DTYPES[self.spec.dtype])
                continue
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().to(DTYPES[self.spec.dtype], copy=True)

    def connect_weights(self, transfer: WeightTransfer) -> None:
        """Prepare this rank's end of the way to the inference engines. They have started."""
        self._sender = transfer.connect(self, self.rank)

    def send_weights(self, salt: int) -> SendReport:
        """Take part in moving all weights; rank 0's report says what was sent."""
        if self._sender is None:
            raise EngineError("weights are sent before connect_weights")
        return self._sender.send(salt)

    def snapshot(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return every parameter, whole, on rank 0; nothing on the others."""
        weights = {name: tensor.float().cpu().numpy().copy() for name, tensor in self.full_weights()}
        return weights if self.rank == 0 else {}

    def export(self, directory: str, tokenizer: ModelConfig, card: ModelCard) -> None:
        """Write a Hugging Face directory from rank 0; the other ranks take part in gathering.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        weights = {name: tensor.cpu().clone() for name, tensor in self.full_weights()}
        if self.rank != 0:
            return
        try:
            save_hf_directory(
                weights,
                self._module().causal_lm.config,
                load_tokenizer(tokenizer),
                Path(directory),
                card,
                trust_remote_code=self.spec.trust_remote_code,
            )
        except OSError as error:
            raise CheckpointError(
                f"the trained model cannot be written to {directory}: {error}", fix="free disk space"
            ) from error

    def _module(self) -> Any:
        return self._engine if self.spec.frozen else self._engine.module

    # ---- states --------------------------------------------------------------------------------

    def save(self, directory: str) -> None:
        """Write this rank's share of model, optimizer and random states under `directory`.

        Raises:
            CheckpointError: The disk is full or not writable.
        """
        state = {"updates": self.updates, "rng": random_states()}
        try:
            self._engine.save_checkpoint(directory, tag="engine", client_state={}, save_latest=False)
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
            path, _ = self._engine.load_checkpoint(directory, tag="engine")
            state = torch.load(Path(directory) / f"rank_{self.rank}.pt", weights_only=False)
        except (OSError, RuntimeError, ValueError, KeyError, AssertionError, EOFError) as error:
            raise CheckpointError(f"rank {self.rank} cannot read its checkpoint in {directory}: {error}") from error
        if path is None:
            raise CheckpointError(f"there is no engine state in {directory}")
        self.updates = state["updates"]
        restore_random_states(state["rng"])

    def offload(self) -> None:
        """Move states to host memory, so that a colocated engine has the GPU."""
        if self.spec.device == "cuda" and self.spec.training.sleep and self.spec.training.zero_stage == 3:
            self._engine.offload_states()
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Move states back."""
        if self.spec.device == "cuda" and self.spec.training.sleep and self.spec.training.zero_stage == 3:
            self._engine.reload_states()


def _shared(name: str, metric: Metric, updates: int) -> Metric:
    losses = {"train/loss", "train/policy_loss", "train/kl_loss"}
    return Sum(metric.value / updates) if name in losses else metric


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
