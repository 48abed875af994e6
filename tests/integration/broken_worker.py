"""A worker extension that tests can break in the engine's process, and mend again."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from roll_like.inference.vllm import experts, worker_extension

Transfer = worker_extension.SharedMemoryWeightTransfer
_finish = Transfer.finish_weight_update
_setup_kernel = experts.RepackedExperts._setup_kernel
_readable = experts._Readable.__dict__["of"]


class WorkerExtension(worker_extension.WorkerExtension):
    def pack_experts(self, on: bool) -> None:
        """Reload experts as roll_like does, or as vLLM does by itself."""
        experts.RepackedExperts._setup_kernel = _setup_kernel if on else UnquantizedFusedMoEMethod._setup_kernel

    def read_experts(self, on: bool) -> None:
        """Let experts be read back for fingerprints, or not."""
        experts._Readable.of = _readable if on else classmethod(lambda cls, layer, seed: None)

    def spoil_expert(self, on: bool) -> None:
        """After each update, change the down projection of expert 3 of layer 1 a little."""

        def finish(transfer: Any) -> None:
            _finish(transfer)
            layer = transfer.model.model.layers[1].mlp.experts.routed_experts
            layer.w2_weight.data[3].mul_(1 + 2**-20)

        Transfer.finish_weight_update = finish if on else _finish

    def scale_attention(self, factor: float) -> None:
        """Change what attention multiplies scores by, which is no tensor."""
        self.model_runner.get_model().model.layers[0].self_attn.attn.impl.scale *= factor
