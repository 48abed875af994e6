"""vLLM computes what transformers does with exported models that have buffers or experts, also after an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from all_families import make_model, save_model
from family_trainer import FamilyTrainer, differences, vllm_of
from tiny_model import make_tiny_tokenizer

from roll_like.models.export import save_hf_directory
from roll_like.models.modules import load_causal_lm

pytestmark = [pytest.mark.integration, pytest.mark.slow]


class ModelTrainer(FamilyTrainer):
    """Sends the weights of a model as it is."""

    def __init__(self, model: Any) -> None:
        self.model = model


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_moe", "qwen2"])
def test_an_exported_model_in_vllm(family: str, tmp_path: Path) -> None:
    base = save_model(make_model(family, head_dim=32, max_position_embeddings=1024), tmp_path / "base")
    trained = load_causal_lm(base, "float32").eval()
    weights = {name: parameter.detach() for name, parameter in trained.named_parameters()}
    exported = save_hf_directory(weights, trained.config, make_tiny_tokenizer(), tmp_path / "model", base_dir=base)
    trainer = ModelTrainer(trained)
    with vllm_of(exported) as engine:
        assert max(differences(trainer, engine, "before")) < 2e-4
        trainer.change(seed=1)
        sync = trainer.sync(engine)
        sync.push()
        assert max(differences(trainer, engine, "after")) < 2e-4
