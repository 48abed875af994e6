"""Megatron-Core on GPUs: updates over NCCL, on as many GPUs as there are, and what its layers for GPUs are called."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_installed import FOLDER
from rank_specs import cpu_rank
from tests_support import ragged_policy_samples
from tiny_families import COMMON, make_family

from roll_like.builtin.pipelines.sft.objective import SupervisedObjective
from roll_like.cluster.address import free_port
from roll_like.config.training import TrainingConfig
from roll_like.training.interface import Share
from roll_like.training.rank import TrainingRank
from roll_like.values import reduce

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not FOLDER.is_dir() and find_spec("megatron") is None, reason="Megatron-Core is not installed"),
]
DEVICE = "cuda"
#: Of the ranks of a test. Seconds.
TIMEOUT = 120
Options = dict[str, Any]
#: Settings of the backend, by number of ranks and family.
LAYOUTS: list[tuple[int, str, Options]] = [
    (1, "qwen3", {}),
    (1, "qwen3_moe", {"gradient_checkpointing": True}),
    (2, "qwen3", {}),
    (2, "qwen3", {"tensor_parallel": 2}),
    (2, "qwen3", {"pipeline_parallel": 2}),
    (2, "qwen3", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    (2, "qwen3", {"sequence_parallel": 2}),
    (2, "qwen3_moe", {"expert_parallel": 2}),
    (4, "qwen3_moe", {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}),
]


def gpus() -> list[str]:
    """Return the visible GPUs, by number or by UUID."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(each) for each in range(torch.cuda.device_count())] if told is None else told.split(",")


def on_gpus(function: Callable[..., Any], *arguments: Any, ranks: int) -> list[Any]:
    """Call `function(rank, ranks, address, *arguments)` in a new process for each rank, with a GPU of its own."""
    address, context = ("127.0.0.1", free_port()), multiprocessing.get_context("spawn")
    pools = [ProcessPoolExecutor(1, mp_context=context) for _ in range(ranks)]
    try:
        futures = []
        for rank, pool in enumerate(pools):
            with pytest.MonkeyPatch.context() as patch:
                if DEVICE == "cuda":
                    patch.setenv("CUDA_VISIBLE_DEVICES", gpus()[rank])
                futures.append(pool.submit(function, rank, ranks, address, DEVICE, *arguments))
        return [future.result(timeout=TIMEOUT) for future in futures]
    finally:
        for pool in pools:  # one that waits for a rank that failed ends, too
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown()


def learned(
    rank: int, ranks: int, address: Any, device: str, model: str, options: Options
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of three updates, and the weights that engines would be sent."""
    sys.path.append(str(FOLDER))
    optimizer = {"lr": 1e-2, "max_grad_norm": 0.5, "eps": 1e-2}
    settings = TrainingConfig(workers=ranks, max_tokens_per_micro_batch=64, optimizer=optimizer, **options)
    assert not list(settings.violations("training", device))
    objective: Any = SupervisedObjective(settings=settings, packing=True)
    trainer = TrainingRank(cpu_rank(objective, model, device=device), rank, ranks)
    trainer.start(address)
    losses, norms = [], []
    for seed in range(3):
        engine: Any = SimpleNamespace(layout=objective.layout(ranks))
        (update,) = objective.updates(ragged_policy_samples(seed=seed), engine)
        share = Share(batches=update.shards[rank // settings.sharing], shared=update.shared)
        report = reduce({**trainer.forward_backward(share), **trainer.optimizer_step()})
        losses.append(report["train/loss"])
        norms.append(report["train/grad_norm"])
    weights = {name: tensor.float().cpu() for name, tensor in trainer.full_weights()}
    trainer.close()
    return losses, norms, weights


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COMMON, "num_hidden_layers", 4)
        return {family: make_family(family, tmp_path_factory.mktemp(family)) for family in ("qwen3", "qwen3_moe")}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, Any]:
    alone = {"backend": "fsdp2", "zero_stage": 3}
    return {family: on_gpus(learned, str(path), alone, ranks=1)[0] for family, path in models.items()}


@pytest.mark.parametrize(("ranks", "family", "options"), LAYOUTS)
def test_updates_are_those_of_fsdp2_on_one_gpu(
    models: dict[str, Path], expected: dict[str, Any], ranks: int, family: str, options: Options
) -> None:
    if DEVICE == "cuda" and len(gpus()) < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    options = {"backend": "megatron", "zero_stage": 1, **options}
    found = on_gpus(learned, str(models[family]), options, ranks=ranks)
    losses, norms, weights = expected[family]
    sharing = TrainingConfig(workers=ranks, **options).sharing
    assert [sum(each) for each in zip(*(losses for losses, *_ in found[::sharing]), strict=True)] == pytest.approx(
        losses, rel=1e-4
    )
    for _, each_norms, each in found:
        assert each_norms == pytest.approx(norms, rel=1e-4)
        assert each.keys() == weights.keys()
        assert max(float((each[name] - weights[name]).abs().max()) for name in weights) < 1e-4


def named_by_transformer_engine(rank: int, ranks: int, address: Any, device: str) -> set[str]:
    """The parameters of two layers of Transformer Engine, one dense and one with experts, after a backward pass."""
    sys.path.append(str(FOLDER))
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    torch.distributed.init_process_group(
        "nccl", init_method=f"tcp://{address[0]}:{address[1]}", rank=rank, world_size=ranks
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=256,
        num_moe_experts=4,
        moe_ffn_hidden_size=128,
        moe_router_topk=2,
        moe_layer_freq=[0, 1],
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    layers = [
        get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=True, qk_layernorm=True)
        for experts in (None, 4)
    ]
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm),
        vocab_size=256,
        max_sequence_length=64,
        position_embedding_type="rope",
    ).to(device, torch.bfloat16)
    tokens = torch.arange(64, device=device)[None]
    model(tokens, tokens, attention_mask=None).float().logsumexp(-1).sum().backward()
    without = [name for name, each in model.named_parameters() if each.grad is None or not each.grad.isfinite().all()]
    assert not without, f"no finite gradient of {without}"
    return {name for name, _ in model.named_parameters()}


def test_what_transformer_engine_calls_its_parameters() -> None:
    """A converter for its layers would need these names; the backend does not use them."""
    pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    attention = ("linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_proj.weight")
    attention += ("q_layernorm.weight", "k_layernorm.weight")
    dense = ("linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight")
    experts = [f"experts.linear_fc{part}.weight{expert}" for part in (1, 2) for expert in range(4)]
    (found,) = on_gpus(named_by_transformer_engine, ranks=1)
    assert found == {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
        *(f"decoder.layers.{layer}.self_attention.{name}" for layer in (0, 1) for name in attention),
        *(f"decoder.layers.0.mlp.{name}" for name in dense),
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.1.mlp.router.weight",
        *(f"decoder.layers.1.mlp.{name}" for name in experts),
    }
