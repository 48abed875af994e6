"""The contract of vLLM and the trainer, for the families that users train: equal numbers before and after a sync."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_trainer import FamilyTrainer, differences, vllm_of
from tiny_families import FAMILIES, make_family

from roll_like.errors import WeightSyncError

pytestmark = pytest.mark.integration

#: Largest difference of a log-probability, in nats. Both sides compute in float32.
TOLERANCE = 2e-4
#: What changed weights make of one, at least.
FAR = 0.1
#: vLLM's loader of it copies experts and sinks past vLLM's own reload.
REFUSED = "gpt_oss"
NAMES = [name for name in FAMILIES if name != REFUSED]


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_vllm_computes_what_the_trainer_computes(family: str, tmp_path: Path) -> None:
    path = make_family(family, tmp_path / family)
    trainer = FamilyTrainer(path, family)
    with vllm_of(path) as engine:
        before = differences(trainer, engine, "before")
        print(f"{family}: before a sync {before[0]:.1e} (prompt), {before[1]:.1e} (sampled)")
        assert max(before) < TOLERANCE
        sync = trainer.sync(engine)
        for seed in (1, 2):
            trainer.change(seed)
            assert max(differences(trainer, engine, f"stale-{seed}")) > FAR
            report = sync.push()
            assert report.unchecked == ()
            after = differences(trainer, engine, f"after-{seed}")
            print(f"{family}: after sync {seed} {after[0]:.1e} (prompt), {after[1]:.1e} (sampled)")
            assert max(after) < TOLERANCE
            assert report.checked == len(list(trainer.full_weights()))


@pytest.mark.slow
def test_a_model_that_vllm_cannot_reload_is_refused_at_the_first_sync(tmp_path: Path) -> None:
    path = make_family(REFUSED, tmp_path / REFUSED)
    trainer = FamilyTrainer(path, REFUSED)
    with vllm_of(path) as engine:
        before = differences(trainer, engine, "before")
        print(f"{REFUSED}: before a sync {before[0]:.1e} (prompt), {before[1]:.1e} (sampled)")
        assert max(before) < TOLERANCE
        layers = r"model\.layers\.0\.attn, model\.layers\.0\.mlp\.experts\.routed_experts"
        with pytest.raises(WeightSyncError, match=rf"GptOssForCausalLM put none .* into 4 of its layers \({layers}"):
            trainer.sync(engine, trainer.probe()).push()
