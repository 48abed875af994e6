"""The probe after a sync, with engines that are functions."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import make_tiny_tokenizer

from roll_like.config.training import TrainingConfig
from roll_like.errors import EngineError, WeightSyncError
from roll_like.inference.interface import Fingerprints
from roll_like.inference.weight_transfer.interface import SendReport
from roll_like.inference.weight_transfer.probe import PROBE_TEXT, PROBE_TOKENS, TOLERANCES, LogprobProbe, probe_tokens
from roll_like.inference.weight_transfer.sync import WeightSync
from roll_like.policy_gradient.probe import logprobs_on_ranks
from roll_like.training.interface import RankModel
from roll_like.training.language_model import LanguageModelObjective
from roll_like.values import Max

TOKENS = np.array([5, 3, 8, 1], np.int32)
TRUE = np.array([-1.0, -2.0, -3.0], np.float32)


class Engines:
    """Engines of which each is `offset` nats off, and which cannot read some tensors back."""

    def __init__(self, *offsets: float, unknown: Sequence[str] = ()) -> None:
        self.offsets = offsets
        self.unknown = unknown
        self.calls: list[str] = []

    def everywhere(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        self.calls.append(method.__name__)
        if method.__name__ == "fingerprints":
            held = {name: "same" for name in args[0] if name not in self.unknown}
            return [Fingerprints(tensors=held, tied={})] * len(self.offsets)
        if method.__name__ == "prompt_logprobs":
            np.testing.assert_array_equal(args[0], TOKENS)
            return [TRUE + np.float32(offset) for offset in self.offsets]
        return [None] * len(self.offsets)


def sync_of(engines: Engines, every: int = 10, *, probes: bool = True) -> WeightSync:
    def trainer(tokens: np.ndarray) -> np.ndarray:
        engines.calls.append("trainer")
        np.testing.assert_array_equal(tokens, TOKENS)
        return TRUE

    report = SendReport(fingerprints={"a": "same", "b": "same"}, bytes=8, buckets=1)
    probe = LogprobProbe(tokens=TOKENS, trainer=trainer, tolerance=0.1, every=every)
    handle: Any = engines
    return WeightSync(lambda seed: report, handle, version=7, probe=probe if probes else None)


def probed(sync: WeightSync, pushes: int) -> list[bool]:
    return [sync.push().probe is not None for _ in range(pushes)]


def test_the_first_two_pushes_are_probed_and_then_every_so_many() -> None:
    assert probed(sync_of(Engines(0.0), every=3), 8) == [True, True, False, True, False, False, True, False]
    assert probed(sync_of(Engines(0.0), every=1), 3) == [True, True, True]
    assert probed(sync_of(Engines(0.0), every=0), 4) == [True, True, False, False]
    assert probed(sync_of(Engines(0.0), probes=False), 2) == [False, False]


def test_the_trainer_is_asked_before_and_engines_after_they_go_on() -> None:
    engines = Engines(0.0)
    sync_of(engines).push()
    assert engines.calls == [
        "start_weight_update",
        "finish_weight_update",
        "fingerprints",
        "trainer",
        "resume",
        "prompt_logprobs",
    ]


def test_the_largest_difference_of_any_engine_is_a_metric() -> None:
    sync = sync_of(Engines(0.01, -0.05))
    report = sync.push()
    assert report.probe == pytest.approx(0.05)
    assert report.metrics["sync/probe"] == Max(report.probe)
    assert report.metrics["time/sync_probe"].value > 0
    sync.push()
    assert not {"sync/probe", "time/sync_probe"} & sync.push().metrics.keys()


@pytest.mark.parametrize("offset", [0.5, -0.2, float("nan"), float("inf")])
def test_an_engine_that_drifts_stops_the_run(offset: float) -> None:
    sync = sync_of(Engines(0.0, offset))
    with pytest.raises(EngineError, match=r"after sync 8, inference engine 1 .* expected at most 0\.1") as caught:
        sync.push()
    assert sync.version == 7
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    for key in ("model.path", "model.dtype", "inference.type", "attention"):
        assert key in str(caught.value)


def test_unreadable_tensors_are_probed_at_every_push_or_fail() -> None:
    assert probed(sync_of(Engines(0.0, unknown=["b"]), every=0), 3) == [True, True, True]
    engines = Engines(0.0, unknown=["b"])
    with pytest.raises(WeightSyncError, match=r"could not read back 1 of 2 tensors \(b\).*inference\.type"):
        sync_of(engines, probes=False).push()
    assert "resume" not in engines.calls


def test_probe_tokens_are_the_same_in_every_run_and_fit_the_window() -> None:
    tokenizer = make_tiny_tokenizer()
    tokens = probe_tokens(tokenizer.encode, 4096)
    assert (len(tokens), tokens.dtype) == (PROBE_TOKENS, np.int32)
    assert PROBE_TEXT.startswith(tokenizer.decode(tokens))
    assert len(probe_tokens(tokenizer.encode, 10)) == 9
    assert probe_tokens(lambda text: [4, 5, 6], 8).tolist() == [4, 5, 6, 4, 5, 6, 4]
    assert TOLERANCES["float32"] < TOLERANCES["float16"] < TOLERANCES["bfloat16"]


def test_the_trainer_computes_them_at_temperature_1_and_without_dropout(tiny_model: Path) -> None:
    objective = LanguageModelObjective[Any, Any](settings=TrainingConfig(), temperature=0.5)
    spec: Any = SimpleNamespace(
        objective=objective,
        model_path=str(tiny_model),
        dtype="float32",
        trust_remote_code=False,
        device="cpu",
        frozen=True,
        seed=0,
        float32_head=False,
        window=64,
    )
    module: Any = objective.load(spec).train()
    model = RankModel(module=module, forward=module, device=torch.device("cpu"))
    ranks: Any = SimpleNamespace(everywhere=lambda ask, function, batch: [function(objective, model, batch)] * 2)
    modes: list[bool] = []
    module.register_forward_pre_hook(lambda *_: modes.append(module.training))
    found = logprobs_on_ranks(ranks)(TOKENS)
    ids_T = torch.from_numpy(TOKENS.astype(np.int64))
    with torch.no_grad():
        expected_TV = torch.log_softmax(module.causal_lm(ids_T[None]).logits[0, :-1], -1)
    np.testing.assert_allclose(found, expected_TV.gather(1, ids_T[1:, None])[:, 0].numpy(), atol=1e-5)
    assert modes == [False]
    assert module.training
