"""Losses that compare log-probabilities get those of one model: nothing is dropped while it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_specs import cpu_rank

from roll_like.builtin.pipelines.distill.objective import DistillationObjective
from roll_like.builtin.pipelines.dpo.labelled_objective import LabelledObjective
from roll_like.builtin.pipelines.dpo.objective import PairedObjective
from roll_like.builtin.pipelines.on_policy_distill.objective import TaughtPolicyObjective
from roll_like.builtin.pipelines.reward_model.objective import RewardModelObjective
from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.config.training import LoRAConfig, TrainingConfig
from roll_like.policy_gradient.critic import ValueObjective
from roll_like.policy_gradient.objective import PolicyObjective
from roll_like.training.language_model import LanguageModelObjective, prepared

TOKENS = torch.arange(3, 27)[None]
SIZES: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {**SIZES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
#: By the name of a family: what its configuration may say of dropout.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {**SIZES, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.3, "resid_pdrop": 0.3},
    "granite": {**SMALL, "intermediate_size": 48, "attention_dropout": 0.3},
    "starcoder2": {
        **SMALL,
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "attention_dropout": 0.3,
        "residual_dropout": 0.3,
        "embedding_dropout": 0.3,
    },
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.3, "layerdrop": 0.5},
    "mixtral": {
        **SMALL,
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "router_jitter_noise": 0.9,
    },
}


def made(family: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**FAMILIES[family])).eval()


def moved_by_training(model: Any) -> float:
    """How far logits move when gradients are computed."""
    with torch.no_grad():
        calm, trained = (model.train(mode)(input_ids=TOKENS, use_cache=False).logits for mode in (False, True))
    return float((calm - trained).abs().max())


@pytest.mark.filterwarnings("ignore")  # of transformers, for models that are old
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_dropped_where_log_probabilities_are_compared(family: str) -> None:
    settings = TrainingConfig(attention="dense")
    objective: LanguageModelObjective[Any, Any] = LanguageModelObjective(settings=settings)
    assert moved_by_training(made(family)) > 1e-3
    model = made(family)
    stated = model.config.to_dict()
    ready = prepared(model, cpu_rank(objective, Path("unused")), settings)
    assert moved_by_training(ready) == 0
    assert {key: value for key, value in ready.config.to_dict().items() if "drop" in key} == {
        key: value for key, value in stated.items() if "drop" in key
    }


@pytest.mark.filterwarnings("ignore")
def test_supervised_training_drops_what_the_configuration_says() -> None:
    settings = TrainingConfig(attention="dense")
    spec = cpu_rank(SupervisedObjective(settings=settings), Path("unused"))
    assert moved_by_training(prepared(made("granite"), spec, settings)) > 1e-3


def test_dropout_of_adapters_is_left() -> None:
    settings = TrainingConfig(attention="dense", lora=LoRAConfig(dropout=0.5))
    objective: LanguageModelObjective[Any, Any] = LanguageModelObjective(settings=settings)
    model = prepared(made("granite"), cpu_rank(objective, Path("unused")), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    assert moved_by_training(model) > 1e-3


def test_which_objectives_drop() -> None:
    assert SupervisedObjective.drops
    assert DistillationObjective.drops
    compare = (PolicyObjective, TaughtPolicyObjective, ValueObjective, PairedObjective, LabelledObjective)
    assert not any(each.drops for each in (*compare, RewardModelObjective, LanguageModelObjective))
