"""A training backend of one process: plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roll_like.config.base import Violation
from roll_like.config.model import Precision
from roll_like.config.training import TrainerConfig
from roll_like.registry import TRAINING_BACKENDS
from roll_like.training.backend import BatchT, State, TrainingBackend
from roll_like.training.host_copies import tensors_within
from roll_like.training.optimizer import optimizer_of


class PlainBackend(TrainingBackend):
    """One rank of plain PyTorch."""

    module: nn.Module
    sharded = False
    start_keys = ("optimizer",)

    def __init__(self, settings: TrainerConfig, *, dtype: Precision, device: str, world_size: int) -> None:
        assert (dtype, device, world_size) == ("float32", "cpu", 1)
        super().__init__(settings, dtype=dtype, device=device, world_size=world_size)
        self._summed = False

    @staticmethod
    def violations(settings: TrainerConfig) -> Iterator[Violation]:
        if settings.workers > 1:
            yield Violation(("workers",), "plain PyTorch has one rank; set it to 1")

    @staticmethod
    def merged(directory: Path) -> dict[str, Tensor]:
        module, _ = torch.load(directory / "plain.pt")
        return dict(module)

    def join(self) -> None:
        pass

    def wrap(self, module: nn.Module) -> None:
        for parameter in module.parameters():  # those of a file cannot be emptied
            parameter.data = parameter.data.clone()
        self.module = module
        self._optimizer = optimizer_of(module, self._settings.optimizer)

    def forward(self, *inputs: Any) -> Any:
        return self.module.train(torch.is_grad_enabled())(*inputs)

    def forward_backward(self, batches: Sequence[BatchT], loss_of: Callable[[BatchT], Tensor]) -> None:
        assert not self._summed, "the gradient of one step is added up at once"
        for batch in batches:
            loss_of(batch).backward()
        self._summed = True

    def optimizer_step(self, learning_rate: float) -> float:
        assert self._summed
        self._summed = False
        norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), self._settings.optimizer.max_grad_norm))
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Sequence[Tensor]]:
        return nullcontext(parameters)

    def save(self, directory: str) -> None:
        torch.save([self.module.state_dict(), self._optimizer.state_dict()], Path(directory) / "plain.pt")

    def load(self, directory: str) -> None:
        module, optimizer = torch.load(Path(directory) / "plain.pt")
        self.module.load_state_dict(module)
        self._optimizer.load_state_dict(optimizer)

    def tensors(self, part: State) -> Iterator[torch.Tensor]:
        if part == "weights":
            return iter(self.module.parameters())
        return tensors_within(self._optimizer)

    def close(self) -> None:
        pass


def plain_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have ranks of plain PyTorch in this process as the backend `plain`; a generator for a fixture."""
    TRAINING_BACKENDS.names()  # the built-in ones
    monkeypatch.setitem(TRAINING_BACKENDS._plugins, "plain", PlainBackend)
    monkeypatch.setattr("roll_like.training.rank.seed_everything", torch.manual_seed)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
