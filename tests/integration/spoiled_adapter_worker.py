"""A vLLM worker in which a test can change the numbers that an adapter is computed with."""

from __future__ import annotations

from roll_like.inference.vllm import worker_extension


class WorkerExtension(worker_extension.WorkerExtension):
    def spoil_adapter(self, path: str, index: int, value: float) -> None:
        self.model_runner.get_model().lora_manager.modules[path].lora_b_stacked[index][0, 0, 3, 1] += value
