"""An exported model is the one that was trained, for every family that transformers can train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from all_families import NOT_MADE, families, make_model, save_model
from safetensors.torch import load_file
from tiny_model import make_tiny_tokenizer

from roll_like.errors import ConfigError
from roll_like.models.export import save_hf_directory
from roll_like.models.lora import named_weights
from roll_like.models.modules import load_causal_lm, persistent_buffers
from roll_like.models.suited import refuse_unsuited

#: Encoders among transformers' causal language models: found by what their tokens see, in the slow test below.
ENCODERS = frozenset(
    {
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "cpmant",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlnet",
        "xmod",
    }
)
TRAINED = [name for name in families() if name not in ENCODERS]
#: What `make test` tries: buffers of every kind, experts that are fused, tied embeddings, layers of many kinds.
ALWAYS = (
    "apertus", "deepseek_v3", "dots1", "gemma4_text", "glm4_moe", "gpt2", "gpt_oss", "lfm2_moe", "minimax_m2",
    "nemotron_h", "qwen2", "qwen3_moe",
)  # fmt: skip
WITH_BUFFERS = ("apertus", "deepseek_v3", "dots1", "gemma4_text", "glm4_moe", "lfm2_moe", "minimax_m2", "nemotron_h")
IDS = torch.arange(3, 27)[None]


def some(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow]) for name in names]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return found


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", some(TRAINED))
@pytest.mark.filterwarnings("ignore")  # of what transformers' models warn of is nothing our concern
def test_an_export_is_the_model_that_was_trained(family: str, tmp_path: Path) -> None:
    base = save_model(make_model(family), tmp_path / "base")
    refuse_unsuited(base)
    trained = load_causal_lm(base, "float32")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.01)
    expected, files = logits(trained), stored(base)
    weights = ((weight.name, weight.merged(torch.float32)) for weight in named_weights(trained))
    from_ranks = save_hf_directory(weights, trained.config, make_tiny_tokenizer(), tmp_path / "live", base_dir=base)
    # the shards of a checkpoint hold parameters, and nothing else
    parameters = {name: parameter.detach() for name, parameter in trained.named_parameters()}
    from_shards = save_hf_directory(
        parameters, trained.config, make_tiny_tokenizer(), tmp_path / "shards", base_dir=base
    )
    for exported in (from_ranks, from_shards):
        assert stored(exported).keys() == files.keys()
        assert torch.equal(logits(load_causal_lm(exported, "float32")), expected)


@pytest.mark.parametrize("family", WITH_BUFFERS)
@pytest.mark.filterwarnings("ignore")
def test_buffers_keep_the_bits_of_the_base(family: str, tmp_path: Path) -> None:
    base = save_model(make_model(family), tmp_path / "base")
    half = load_causal_lm(base, "bfloat16")
    names = {name.rpartition(".")[2] for name, _ in persistent_buffers(half)}
    assert names
    weights = [(weight.name, weight.merged(torch.bfloat16)) for weight in named_weights(half)]
    out = save_hf_directory(
        weights, half.config, make_tiny_tokenizer(), tmp_path / "out", dtype="bfloat16", base_dir=base
    )
    before, after = stored(base), stored(out)
    kept = [name for name in before if name.rpartition(".")[2] in names]
    assert kept
    for name in kept:
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], before[name])


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
@pytest.mark.filterwarnings("ignore")
def test_encoders_are_told_by_their_configuration(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    other = IDS.clone()
    other[0, -4:] += 100
    with torch.no_grad():
        first, second = (model(input_ids=ids, use_cache=False).logits[0, :-4] for ids in (IDS, other))
    sees_what_follows = not torch.allclose(first, second, atol=1e-4)
    assert sees_what_follows == (family in ENCODERS)
    save_model(model, tmp_path)
    if sees_what_follows:
        with pytest.raises(ConfigError, match="holds an encoder"):
            refuse_unsuited(tmp_path)
    else:
        refuse_unsuited(tmp_path)


def test_no_family_is_left_out_without_a_reason() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert NOT_MADE.keys() <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert set(families()) > ENCODERS
    assert len(TRAINED) > 140
