"""vLLM computes what transformers does with an exported model of every family that it knows, also after an update."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from all_families import families
from family_in_vllm import TORCHVISION, FamilyServer

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TOLERANCE = 1e-3  # nats


@dataclass(frozen=True)
class Case:
    """How a family's random model is made, and what comes of it.

    Attributes:
        config: Its configuration's sizes that vLLM's kernels take, or that released models have.
        entries: Entries that released models have in config.json, and transformers' configuration has not.
        zero: Ends of names of weights that are 0.
        engine: Arguments of vLLM.
        tolerance: The largest difference, in nats.
    """

    config: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Any] = field(default_factory=dict)
    zero: tuple[str, ...] = ()
    engine: dict[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE

    def settings(self) -> dict[str, Any]:
        return {"config": self.config, "entries": self.entries, "zero": self.zero, "engine": self.engine}


@dataclass(frozen=True)
class Different:
    """Why vLLM computes other numbers than transformers.

    Attributes:
        reason: In short.
        instead: A model of the same family to which that does not apply; None if nothing is known to help.
    """

    reason: str
    instead: Case | None = None


#: Latent attention of the only size that vLLM's CPU kernel has.
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
#: vLLM's linear attention on a CPU takes bfloat16 and heads of 128 only.
_LINEAR = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_HALF = Case(config=_LINEAR, engine={"dtype": "bfloat16"}, tolerance=0.1)
#: With all experts for every token: rounding would choose others.
_HALF_EXPERTS = replace(_HALF, config={**_LINEAR, "num_experts_per_tok": 4})
CASES: dict[str, Case] = {
    "afmoe": Case(
        entries={"score_func": "sigmoid", "n_group": 1, "topk_group": 1, "route_norm": True, "route_scale": 1.0}
    ),
    "axk1": Case(config={**_LATENT, "head_dim": 64}),
    "bloom": Case(config={"hidden_size": 128}),
    "deepseek_v2": Case(config={**_LATENT, "n_group": 1, "topk_group": 1}),
    "deepseek_v3": Case(config={**_LATENT, "head_dim": 64}, entries=_SIGMOID),
    "falcon": Case(config={"ffn_hidden_size": 512}),
    "glm4_moe": Case(config={"head_dim": 32}),
    "glm4_moe_lite": Case(config=_LATENT, entries={**_SIGMOID, "first_k_dense_replace": 1}),
    "hunyuan_v1_dense": Case(config={"head_dim": 32}),
    "hunyuan_v1_moe": Case(config={"head_dim": 32}),
    "hy_v3": Case(entries={"first_k_dense_replace": 1, "expert_hidden_dim": 64, "route_norm": True, "qk_norm": True}),
    "lfm2": Case(entries={"block_dim": 128}),
    "llama4": Case(config={"text_config": {"attention_chunk_size": 32}}),
    "llama4_text": Case(config={"attention_chunk_size": 32}),
    "longcat_flash": Case(
        config={**_LATENT, "qk_head_dim": 192, "head_dim": 64},
        entries={"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    ),
    "minimax_m2": Case(entries={"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True}),
    "qwen3_5": replace(_HALF, config={"text_config": _LINEAR}),
    "qwen3_5_moe": replace(_HALF, config={"text_config": _HALF_EXPERTS.config}),
    "qwen3_5_moe_text": _HALF_EXPERTS,
    "qwen3_5_text": _HALF,
    "qwen3_next": _HALF_EXPERTS,
}
_UNBIASED = ("e_score_correction_bias",)
_WIDE = Case(config={"sliding_window": 512})
#: Families of which vLLM computes other numbers; an export cannot help that.
DIFFERENT: dict[str, Different] = {
    "apertus": Different("keeps the parameters of xIELU in bfloat16", Case(tolerance=1e-2)),
    "cohere2": Different("windows are one token wider", _WIDE),
    "cohere2_moe": Different("windows are one token wider", _WIDE),
    "ernie4_5_moe": Different("experts are chosen without the router's bias on a CPU", Case(zero=_UNBIASED)),
    "gemma3n_text": Different("not known"),
    "hrm_text": Different("not known"),
    "mamba2": Different("the gated norm is one of each group", Case(config={"n_groups": 1})),
}
#: Families that vLLM on a CPU does not run, or does not update: the stage, and what it says.
NOT_RUN: dict[str, str] = {
    "axk1": r"load: .*not initialized from checkpoint.*layers\.0\.post_mlp_layernorm",
    "deepseek_v32": "Sparse Attention is not supported on CPU",
    "deepseek_v4": r"load: .*mlp_layer_types.*hash_moe",
    "falcon_mamba": "no attribute 'selective_scan_fwd'",
    "gemma3": "load: .*Can't load image processor",
    "gemma4": "load: .*default_output_length",
    "gemma4_unified": "load: .*num_soft_tokens",
    "glm_moe_dsa": "Sparse Attention is not supported on CPU",
    "gpt_oss": "update: .*put none of the tensors that it was sent into 4 of its layers",
    "hy_v4": "no valid sparse MLA backend",
    "inkling_text": "load: .*tokenizer is missing special tokens",
    "jamba": "no attribute 'selective_scan_fwd'",
    "kimi_linear": "load: .*_lib_fn_wrapper",
    "laguna": "compute: AssertionError",
    "longcat_flash": r"load: KeyError: 'layers\.0\.mlp\.experts\.4\.gate_proj",
    "mamba": "no attribute 'selective_scan_fwd'",
    "mimo_v2_flash": r"load: .*MiMoV2FlashConfig.*no attribute",
    "minimax_m2": "compute: AssertionError",
    "nemotron_h": "is_act_and_mul=False is supported only for CUDA",
    "olmo_hybrid": "triton.*set_allocator",
}
#: Models of such families that vLLM runs.
INSTEAD: dict[str, Case] = {
    "axk1": replace(CASES["axk1"], config={**CASES["axk1"].config, "first_k_dense_replace": 0}),
    "nemotron_h": Case(config={"layers_block_type": ["mamba", "attention", "mlp"]}),
}

#: Families whose layers have a state.
STATES = (
    *("falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "mamba2", "nemotron_h"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)


def known_to_vllm() -> list[str]:
    """Return the families that the installed vLLM has, by its source: importing it takes many seconds."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [Path(folder) / "model_executor" / "models" / "registry.py" for folder in folders]
    known = {name for file in files if file.is_file() for name in re.findall(r'"(\w+)": \(', file.read_text())}
    return [family for family in families() if NAMES[family] in known]


@pytest.fixture(scope="module")
def server() -> Iterator[FamilyServer]:
    if not TORCHVISION.is_dir():
        pytest.skip("vLLM needs torchvision for models of images: make torchvision")
    server = FamilyServer()
    yield server
    server.close()


@pytest.mark.parametrize("family", known_to_vllm())
def test_an_exported_family_in_vllm(family: str, server: FamilyServer, tmp_path: Path) -> None:
    def difference(case: Case, folder: str) -> float:
        (tmp_path / folder).mkdir()
        answer = server.compare(family, tmp_path / folder, case.settings())
        assert "error" not in answer, f"{answer}; {tmp_path / folder / 'log'}"
        assert family in DIFFERENT or not answer["drifted"], "what vLLM holds after an update is what was sent"
        assert family not in STATES or not answer["unchecked"], "and all of it is compared"
        return float(max(answer["exported"], answer["updated"]))

    case = CASES.get(family, Case())
    if family in NOT_RUN:
        answer = server.compare(family, tmp_path, case.settings())
        said = f"{answer.get('stage')}: {answer.get('error')}"
        assert re.search(NOT_RUN[family], said, re.DOTALL), f"no longer what vLLM says: {answer}"
        assert answer.get("exported", 0.0) < case.tolerance
        assert family not in INSTEAD or difference(INSTEAD[family], "instead") < TOLERANCE
    elif family in DIFFERENT:
        instead = DIFFERENT[family].instead
        assert difference(case, "usual") > TOLERANCE, "it is equal now: take it out of DIFFERENT"
        assert instead is None or difference(instead, "instead") < instead.tolerance
    else:
        assert difference(case, "usual") < case.tolerance


def test_every_exception_is_of_a_known_family() -> None:
    assert CASES.keys() | DIFFERENT.keys() | NOT_RUN.keys() <= set(known_to_vllm())
    assert not DIFFERENT.keys() & NOT_RUN.keys()
    assert INSTEAD.keys() <= NOT_RUN.keys()
