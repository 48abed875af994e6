"""vLLM's CPU kernel rotates every head of queries that have a dimension of heads."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.integration


@pytest.mark.filterwarnings("ignore")  # of what vLLM's imports warn of
@pytest.mark.parametrize("neox", [True, False])
def test_every_head_is_rotated(neox: bool) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    from roll_like.inference.vllm.cpu_kernels import forward_cpu

    if not current_platform.is_cpu():
        pytest.skip("vLLM for GPUs")
    current_platform.import_kernels()
    with set_current_vllm_config(VllmConfig()):
        layer = RotaryEmbedding(32, 32, 64, 10000.0, neox, torch.float32)
    positions = torch.arange(20)
    query, key = torch.randn(20, 4, 32), torch.randn(20, 2, 32)
    expected = layer.forward_native(positions, query.clone(), key.clone())
    for shape in ((20, -1), (20, -1, 32)):
        queries, keys = query.clone().view(shape), key.clone().view(shape)
        rotated = forward_cpu(layer, positions, queries, keys)
        for found, own, right in zip(rotated, (queries, keys), expected, strict=True):
            assert found is not None
            assert found.shape == own.shape
            torch.testing.assert_close(found.reshape(right.shape), right)
    assert forward_cpu(layer, positions, query.clone(), None)[1] is None
