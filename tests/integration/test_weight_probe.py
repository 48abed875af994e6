"""Experts after a reload, and the probe: what stops a run whose engine computes something else than the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_thread import EngineThread
from family_trainer import PROMPT, FamilyTrainer, differences, hf_of, vllm_of
from tiny_families import make_family

from roll_like.errors import EngineError, WeightSyncError
from roll_like.inference.vllm import arguments

pytestmark = pytest.mark.integration

FAR = 0.1
PADDED = "qwen3_moe_padded"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE whose experts vLLM's CPU kernel has to pad."""
    return make_family(PADDED, tmp_path_factory.mktemp("mixture"))


@contextmanager
def broken(engine: EngineThread, verb: str, wrong: object, right: object) -> Iterator[None]:
    """Break vLLM in its process for a while."""
    client: Any = engine.engine
    engine.run(client._engine.collective_rpc(verb, args=(wrong,)))
    try:
        yield
    finally:
        engine.run(client._engine.collective_rpc(verb, args=(right,)))


@pytest.fixture(scope="module")
def vllm_mixture(mixture: Path) -> Iterator[EngineThread]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "WORKER_EXTENSION", "broken_worker.WorkerExtension")
        with vllm_of(mixture) as engine:
            yield engine


@pytest.mark.parametrize("kind", ["vllm", "hf"])
def test_engines_tell_the_log_probabilities_of_given_tokens(
    kind: str, mixture: Path, request: pytest.FixtureRequest
) -> None:
    trainer = FamilyTrainer(mixture, PADDED)
    engine = request.getfixturevalue("vllm_mixture") if kind == "vllm" else request.getfixturevalue("hf_mixture")
    trainer.sync(engine).push()
    for _ in range(2):  # the second time vLLM has the prompt in its cache
        found = engine.run(engine.engine.prompt_logprobs(PROMPT))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, trainer.logprobs(PROMPT), atol=2e-4)


@pytest.fixture(scope="module")
def hf_mixture(mixture: Path) -> Iterator[EngineThread]:
    with hf_of(mixture) as engine:
        yield engine


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_transformers_engine_takes_experts_by_checkpoint_names(family: str, tmp_path: Path) -> None:
    path = make_family(family, tmp_path)
    trainer = FamilyTrainer(path, family)
    with hf_of(path) as engine:
        trainer.change(seed=1)
        assert max(differences(trainer, engine, "stale")) > FAR
        report = trainer.sync(engine, trainer.probe()).push()
        assert report.unchecked == ()
        assert report.checked == len(list(trainer.full_weights()))
        assert max(differences(trainer, engine, "fresh")) < 1e-5


@pytest.mark.slow
def test_experts_that_are_not_packed_again_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The negative control: vLLM as it is. Padded experts it refuses to reload."""
    monkeypatch.setattr(arguments, "WORKER_EXTENSION", "broken_worker.WorkerExtension")
    path = make_family("qwen3_moe", tmp_path)
    trainer = FamilyTrainer(path, "qwen3_moe")
    with vllm_of(path) as engine:
        assert max(differences(trainer, engine, "start")) < 2e-4
        with broken(engine, "pack_experts", False, True):
            with pytest.raises(WeightSyncError, match=r"weights differ on .*experts\.0\.gate_proj\.weight"):
                trainer.sync(engine).push()
            sync = trainer.sync(engine, trainer.probe())
            monkeypatch.setattr(sync, "_check", lambda sent, version: ())
            with pytest.raises(
                EngineError, match=r"different log-probabilities of 63 tokens: .* expected at most 0\.001"
            ):
                sync.push()
            found = max(differences(trainer, engine, "unpacked"))
            print(f"experts that are not packed again: {found:.2f} nats off")
            assert found > FAR
        trainer.sync(engine, trainer.probe()).push()
        assert max(differences(trainer, engine, "packed")) < 2e-4


def test_a_probe_finds_what_no_fingerprint_sees(vllm_mixture: EngineThread, mixture: Path) -> None:
    trainer = FamilyTrainer(mixture, PADDED)
    sync = trainer.sync(vllm_mixture, trainer.probe())
    report = sync.push()
    assert report.probe is not None
    assert report.probe < 1e-4
    assert report.unchecked == ()
    with (
        broken(vllm_mixture, "scale_attention", 3.0, 1 / 3),
        pytest.raises(EngineError, match="inference engine 0 and the trainer compute different") as caught,
    ):
        sync.push()
    assert sync.version == 1
    for key in ("model.path", "model.dtype", "inference.type", "inference.probe_tolerance"):
        assert key in str(caught.value)
    assert sync.push().probe == pytest.approx(report.probe, abs=1e-5)


def test_tensors_that_cannot_be_read_back_need_a_probe(vllm_mixture: EngineThread, mixture: Path) -> None:
    trainer = FamilyTrainer(mixture, PADDED)
    first = r"model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight"
    with broken(vllm_mixture, "read_experts", False, True):
        with pytest.raises(WeightSyncError, match=rf"could not read back 24 of \d+ tensors \({first}"):
            trainer.sync(vllm_mixture).push()
        sync = trainer.sync(vllm_mixture, trainer.probe(every=0))
        for _ in range(3):  # every push is probed, whatever `every` says
            report = sync.push()
            assert len(report.unchecked) == 24
            assert report.probe is not None
            trainer.change(seed=1)


def test_changed_experts_are_found_and_named(vllm_mixture: EngineThread, mixture: Path) -> None:
    trainer = FamilyTrainer(mixture, PADDED)
    expert = r"model\.layers\.1\.mlp\.experts\.3\.down_proj\.weight"
    with (
        broken(vllm_mixture, "spoil_expert", True, False),
        pytest.raises(WeightSyncError, match=rf"in 1 of \d+ tensors: {expert}"),
    ):
        trainer.sync(vllm_mixture).push()
    trainer.sync(vllm_mixture, trainer.probe()).push()


def test_the_places_of_packed_numbers_undo_the_packing() -> None:
    from vllm._custom_ops import cpu_prepack_moe_weight

    from roll_like.inference.vllm.experts import packed_places

    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(3, 96, 64).to(dtype)
        places = packed_places(96, 64, dtype, "vec")
        assert places is not None
        packed = cpu_prepack_moe_weight(weight, "vec")
        assert torch.equal(packed.flatten(1)[:, places.flatten()].view(weight.shape), weight)
        assert not torch.equal(packed, weight)
