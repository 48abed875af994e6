"""A training backend of one's own behind the engine's verbs, chosen by name as a plugin's is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bigram_engine import OneRank
from pydantic import ValidationError
from snapshots import snapshot
from tests_support import ragged_policy_samples  # type: ignore[import-not-found]
from torch import Tensor, nn

from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.config.sections import ModelConfig, Precision, TrainerConfig, TrainingConfig
from roll_like.models.export import ModelCard
from roll_like.registry import TRAINING_BACKENDS
from roll_like.training.engine import TrainingEngine
from roll_like.training.interface import RankSpec
from roll_like.training.optimizer import adamw
from roll_like.training.rank import TrainingRank
from roll_like.values import reduce


class PlainBackend:
    """One rank of plain PyTorch."""

    module: nn.Module
    sharded = False

    def __init__(self, settings: TrainerConfig, *, dtype: Precision, device: str, world_size: int) -> None:
        assert (dtype, device, world_size) == ("float32", "cpu", 1)
        self._settings = settings
        self._boundaries: list[bool] = []

    @staticmethod
    def environment(device: str) -> Mapping[str, str]:
        return {}

    def join(self) -> None:
        pass

    def wrap(self, module: nn.Module) -> None:
        self.module = module
        self._optimizer = adamw(module, self._settings.optimizer, fused=True)

    def forward(self, *inputs: Any) -> Any:
        return self.module.train(torch.is_grad_enabled())(*inputs)

    def forward_backward(self, loss_of: Callable[[], Tensor], *, last: bool) -> None:
        loss_of().backward()
        self._boundaries.append(last)

    def optimizer_step(self, learning_rate: float) -> float:
        assert self._boundaries == [False] * (len(self._boundaries) - 1) + [True]
        self._boundaries = []
        norm = float(nn.utils.clip_grad_norm_(self.module.parameters(), self._settings.optimizer.max_grad_norm))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
        return nullcontext()

    def save(self, directory: str) -> None:
        torch.save([self.module.state_dict(), self._optimizer.state_dict()], Path(directory) / "plain.pt")

    def load(self, directory: str) -> None:
        module, optimizer = torch.load(Path(directory) / "plain.pt")
        self.module.load_state_dict(module)
        self._optimizer.load_state_dict(optimizer)

    def offload(self) -> None:
        pass

    def reload(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    TRAINING_BACKENDS.names()  # the built-in one
    monkeypatch.setitem(TRAINING_BACKENDS._plugins, "plain", PlainBackend)
    monkeypatch.setattr("roll_like.training.rank.seed_everything", torch.manual_seed)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Local(OneRank):
    """A cluster of one rank in this process that also takes arguments."""

    def everywhere(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [method(self.worker, *arguments)]


def engine(model: Path, *, frozen: bool = False, **training: Any) -> TrainingEngine[Any]:
    settings = TrainingConfig(backend="plain", optimizer={"lr": 1e-2, "schedule": "linear"}, **training)
    spec = RankSpec(
        objective=SupervisedObjective(settings=settings, packing=True),
        model_path=str(model),
        dtype="float32",
        device="cpu",
        threads=1,
        seed=0,
        total_updates=10,
        trust_remote_code=False,
        frozen=frozen,
    )
    rank = TrainingRank(spec, 0, 1)
    rank.start(("127.0.0.1", 1))
    cluster: Any = Local(rank)
    return TrainingEngine(cluster, spec.objective)


def weights(trainer: TrainingEngine[Any]) -> dict[str, Any]:
    return snapshot(trainer)


def test_a_second_backend_stands_behind_the_same_verbs(tiny_model: Path, tmp_path: Path) -> None:
    samples = ragged_policy_samples()
    trainer = engine(tiny_model, max_tokens_per_micro_batch=48)
    first, second = (reduce(trainer.train_step(samples)) for _ in range(2))
    assert second["train/loss"] < first["train/loss"]
    assert (first["train/lr"], second["train/lr"]) == pytest.approx((1e-2, 0.9e-2))
    trainer.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.pt", "rank_0.pt"]
    third = reduce(trainer.train_step(samples))
    expected = weights(trainer)

    resumed = engine(tiny_model, max_tokens_per_micro_batch=48)
    resumed.load(tmp_path)
    resumed.offload()
    resumed.reload()
    again = reduce(resumed.train_step(samples))
    assert {name: again[name] for name in third if name.startswith("train/")} == {
        name: figure for name, figure in third.items() if name.startswith("train/")
    }
    assert all(np.array_equal(weights(resumed)[name], array) for name, array in expected.items())
    card = ModelCard(name="tiny", base_model=str(tiny_model), pipeline="sft", steps=3)
    resumed.cluster.everywhere(TrainingRank.export, str(tmp_path / "out"), ModelConfig(path=str(tiny_model)), card)
    exported = engine(tmp_path / "out", frozen=True)
    for mine, theirs in zip(resumed.logprobs(samples), exported.logprobs(samples), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    resumed.cluster.everywhere(TrainingRank.close)


def test_updates_do_not_depend_on_the_token_budget(tiny_model: Path) -> None:
    found = []
    for budget in (40, 4096):
        trainer = engine(tiny_model, max_tokens_per_micro_batch=budget)
        trainer.train_step(ragged_policy_samples())
        found.append(weights(trainer))
    assert all(np.abs(found[0][name] - found[1][name]).max() < 1e-4 for name in found[0])


def test_an_unknown_backend_suggests_the_nearest() -> None:
    with pytest.raises(ValidationError, match="unknown training backend 'depspeed'; did you mean 'deepspeed'"):
        TrainingConfig(backend="depspeed")
    assert TrainingConfig().backend == "deepspeed"
    assert TrainingConfig(backend="plain").frozen(workers=1, max_tokens_per_micro_batch=8).backend == "plain"
