"""Models of a service after a rank has died: what their last finished request had made of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll_like.cluster.worker_restarts import WorkerDied
from roll_like.config.training import OptimizerConfig
from roll_like.errors import WorkerError
from roll_like.service import trainer as trainer_module
from roll_like.service.objective import DatumOutput
from roll_like.service.rank import AdapterRequest
from roll_like.service.trainer import ModelsTrainer, datum_bytes
from roll_like.service.types import Datum, RequestError


class ArithmeticRank:
    """A rank whose models are numbers: a gradient adds up tokens, and a step with momentum moves the weight by it."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, float]] = {}

    def prepare(self, untrained: str) -> None:
        pass

    def create(self, model: str, adapter: AdapterRequest | None) -> None:
        self.models[model] = {"weight": 0.0 if adapter is None else float(adapter.rank), "moment": 0.0, "gradient": 0.0}

    def drop(self, model: str) -> None:
        self.models.pop(model, None)

    def train(self, share: Any) -> list[DatumOutput]:
        state = self.models[share.model]
        tokens = sum(float(batch.token_ids_BL.sum()) for batch in share.batches)
        if share.backward:
            state["gradient"] += tokens + 0.1 * state["weight"]
        return [DatumOutput(index=0, loss=state["weight"] + tokens, logprobs=np.zeros(1, np.float32))]

    def step(self, model: str, optimizer: OptimizerConfig) -> float:
        state = self.models[model]
        gradient, state["gradient"] = state["gradient"], 0.0
        if optimizer.lr == 0:
            return math.nan
        state["moment"] = 0.5 * state["moment"] + gradient
        state["weight"] -= optimizer.lr * state["moment"]
        return gradient

    def keep_model(self, model: str, file: str) -> None:
        Path(file).write_text(json.dumps(self.models[model]))

    def take_model(self, model: str, file: str) -> None:
        self.models[model] = json.loads(Path(file).read_text())

    def save_model(self, model: str, directory: str) -> None:
        Path(directory, "state").write_text(json.dumps(self.models[model]))

    def load_model(self, model: str, directory: str, optimizer: bool) -> None:
        state = json.loads(Path(directory, "state").read_text())
        self.models[model] = {**state, "gradient": 0.0, "moment": state["moment"] if optimizer else 0.0}


class MortalRanks:
    """One rank, which dies or fails before or after some of its calls."""

    name = "training"

    def __init__(self) -> None:
        self.rank = ArithmeticRank()
        self.calls, self.rebuilt = 0, 0
        self.fatal: dict[int, str] = {}

    def everywhere(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.calls += 1
        when = self.fatal.pop(self.calls, None)
        if when == "before":
            raise self._dead(WorkerDied("the rank was killed"))
        result = getattr(self.rank, method.__name__)(*arguments)
        if when is not None:
            raise self._dead(WorkerDied("the rank was killed") if when == "after" else WorkerError("out of memory"))
        return [result]

    def _dead(self, error: WorkerError) -> WorkerError:
        self.rank = ArithmeticRank()
        error.worker = ("training", 0)
        return error


def trainer_of(ranks: MortalRanks, folder: Path, reports: list[str], max_loaded: int = 4) -> ModelsTrainer:
    def rebuild() -> None:
        ranks.rebuilt += 1

    engine: Any = SimpleNamespace(
        cluster=ranks,
        rebuild=rebuild,
        layout={"ranks": 1, "max_tokens": 100, "share_prompts": False},
        scatter=lambda method, shares: ranks.everywhere(method, *shares),
    )

    def report(role: str, text: str, *, seconds: float | None) -> None:
        reports.append(text)

    return ModelsTrainer(engine, folder, recovery_steps=2, max_loaded=max_loaded, report=report)


def datum(*tokens: int) -> list[Datum]:
    return [Datum(tokens=np.asarray(tokens, np.int32), inputs={"target_tokens": np.asarray(tokens)})]


def settings(lr: float) -> OptimizerConfig:
    return OptimizerConfig.model_construct(lr=lr)


def losses(logprobs: Any, inputs: Any) -> Any:
    raise AssertionError("the rank of these tests has none")


def work(trainer: ModelsTrainer, folder: Path) -> Sequence[float]:
    """Train two models by turns, one of them from a checkpoint that is deleted; return what was told."""
    told: list[float] = []
    trainer.create("a", AdapterRequest(rank=4))
    trainer.create("b", None)
    for number in range(1, 6):
        told += [each.loss for each in trainer.train("a", losses, datum(number), backward=True)]
        told += [each.loss for each in trainer.train("b", losses, datum(number, 2), backward=True)]
        trainer.train("a", losses, datum(9), backward=True)
        told.append(trainer.step("a", settings(0.1)))
        if number % 2:
            told.append(trainer.step("b", settings(0.2)))
        if number == 2:
            trainer.save("a", folder / "saved")
            trainer.load("a", folder / "saved", optimizer=True)
            (folder / "saved" / "state").unlink()
    told += [each.loss for each in trainer.train("b", losses, datum(1), backward=False)]
    return told


@pytest.mark.parametrize("journal", [1 << 20, 30], ids=["steps", "bytes"])
@pytest.mark.parametrize("loaded", [2, 1], ids=["in memory", "by turns on disk"])
def test_after_a_death_models_are_what_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: int, journal: int
) -> None:
    (tmp_path / "calm").mkdir()
    undisturbed = MortalRanks()
    expected = work(trainer_of(undisturbed, tmp_path / "calm", []), tmp_path / "calm")
    monkeypatch.setattr(trainer_module, "JOURNAL_BYTES", journal)
    calm = MortalRanks()
    assert work(trainer_of(calm, tmp_path / "calm", [], loaded), tmp_path / "calm") == expected
    for call in range(2, calm.calls + 1):
        for when in ("before", "after"):
            folder = tmp_path / f"{call}-{when}"
            folder.mkdir()
            ranks, reports = MortalRanks(), list[str]()
            trainer = trainer_of(ranks, folder, reports, loaded)
            ranks.fatal[call] = when
            assert work(trainer, folder) == expected, (call, when)
            assert ranks.rank.models == calm.rank.models, (call, when)
            assert ranks.rebuilt == 1
            assert "models become what they were" in reports[0]
            assert len(list(folder.glob("copies/*"))) == 2  # one of each model


def test_a_client_that_never_steps_has_a_journal_that_does_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "JOURNAL_BYTES", 1000)
    ranks = MortalRanks()
    trainer = trainer_of(ranks, tmp_path, [])
    trainer.create("a", None)
    for _ in range(500):
        trainer.train("a", losses, datum(1, 2, 3), backward=True)
        history = trainer._histories["a"]
        assert history.since_bytes == sum(datum_bytes(*work.args[2]) for work in history.since) <= 1000  # type: ignore[attr-defined]
    assert len(list(tmp_path.glob("copies/*"))) == 1
    ranks.fatal[ranks.calls + 1] = "after"
    assert trainer.step("a", settings(1.0)) == 500 * 6  # the gradient was in the copy


def test_a_disk_that_takes_no_copy_does_not_fail_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer_module, "JOURNAL_BYTES", 10)
    (tmp_path / "copies").touch()  # no folder can be made in it
    trainer = trainer_of(MortalRanks(), tmp_path, [])
    trainer.create("a", None)
    trainer.train("a", losses, datum(1, 2, 3), backward=True)
    assert "no copy of the model a could be written" in caplog.text
    assert trainer.step("a", settings(1.0)) == 6


def test_idle_models_are_on_disk_until_they_are_asked_for(tmp_path: Path) -> None:
    ranks = MortalRanks()
    trainer = trainer_of(ranks, tmp_path, [])
    for name in ("fresh", "trained"):
        trainer.create(name, AdapterRequest(rank=4))
    trainer.train("trained", losses, datum(1, 2), backward=True)
    trainer.park_idle(60)
    assert set(ranks.rank.models) == {"fresh", "trained"}
    trainer.park_idle(0)
    assert not ranks.rank.models
    assert not trainer.is_loaded("trained")
    trainer.park_idle(0)  # nothing is left to do
    assert trainer.step("trained", settings(1.0)) == pytest.approx(3.4)  # with the gradient that it had
    assert set(ranks.rank.models) == {"trained"}
    assert [each.loss for each in trainer.train("fresh", losses, datum(1), backward=False)] == [5]
    trainer.park_idle(0)
    trainer.drop("trained")
    assert not list(tmp_path.glob("copies/*"))


def test_an_error_on_a_rank_fails_the_request_and_leaves_no_part_of_its_gradient(tmp_path: Path) -> None:
    ranks = MortalRanks()
    trainer = trainer_of(ranks, tmp_path, [])
    trainer.create("a", None)
    trainer.train("a", losses, datum(1, 2), backward=True)
    ranks.fatal[ranks.calls + 1] = "error"
    with pytest.raises(WorkerError, match="out of memory"):
        trainer.train("a", losses, datum(50), backward=True)
    assert ranks.rank.models["a"]["gradient"] == 3
    assert trainer.step("a", settings(1.0)) == 3


def test_what_dies_twice_fails_and_the_service_goes_on(tmp_path: Path) -> None:
    ranks = MortalRanks()
    trainer = trainer_of(ranks, tmp_path, [])
    trainer.create("a", None)
    # the call itself, then `prepare`, `create` and the second attempt
    ranks.fatal |= {ranks.calls + 1: "after", ranks.calls + 4: "after"}
    with pytest.raises(WorkerDied):
        trainer.train("a", losses, datum(50), backward=True)
    assert ranks.rank.models == {"a": {"weight": 0.0, "moment": 0.0, "gradient": 0.0}}
    trainer.train("a", losses, datum(7), backward=True)
    assert trainer.step("a", settings(1.0)) == 7


def test_a_step_needs_a_gradient_that_is_finite(tmp_path: Path) -> None:
    trainer = trainer_of(MortalRanks(), tmp_path, [])
    trainer.create("a", None)
    with pytest.raises(RequestError, match="call forward_backward before optim_step"):
        trainer.step("a", settings(1.0))
    trainer.train("a", losses, datum(1), backward=True)
    with pytest.raises(RequestError, match="norm of the gradient is nan"):
        trainer.step("a", settings(0.0))
    with pytest.raises(RequestError, match="call forward_backward before"):
        trainer.step("a", settings(1.0))
