"""vLLM on a GPU with models whose layers have a state: what it samples, and what it holds after an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_thread import EngineThread, float_spec
from test_engine import CLOSE, FAR, Trainer, sampled
from tiny_families import HYBRIDS, make_family

from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.models.checkpoint_names import checkpoint_tensors, tensor_groups
from roll_like.models.modules import persistent_buffers

pytestmark = pytest.mark.gpu
#: For an engine beside other checks.
CACHE = {"gpu_memory_utilization": 0.1, "engine_args": {"kv_cache_memory_bytes": 1 << 30}}


class CheckpointTrainer(Trainer):
    """Sends tensors by the names of checkpoints, as ranks do."""

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self._models[self._current]
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        tensors |= dict(persistent_buffers(model))
        for group in tensor_groups(model, {name: tensor.shape for name, tensor in tensors.items()}):
            yield from checkpoint_tensors(model, group, {name: tensors[name] for name in group.parameters})


@pytest.mark.parametrize("family", HYBRIDS)
def test_samples_are_the_models_before_and_after_an_update(
    family: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    path = make_family(family, tmp_path)
    spec = replace(float_spec(path), dtype="bfloat16", device="cuda", weight_backend="ipc", shares_gpus=True)
    with EngineThread(VLLMEngine(VLLMConfig(max_running=16, **CACHE), spec)) as engine:
        trainer = CheckpointTrainer(path, engine)
        start = trainer.distance(sampled(engine, "start"), 0)
        trainer.prepare()
        report = trainer.sync.push()
        generations = sampled(engine, "updated")
        updated, stale = (trainer.distance(generations, report.version, weights=each) for each in (report.version, 0))
        trainer.sender.close()
    record_property(f"{family}_distance", round(max(start, updated), 4))
    assert report.unchecked == ()
    assert max(start, updated) < CLOSE
    assert stale > FAR
