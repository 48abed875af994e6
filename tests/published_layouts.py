"""Layouts that other projects publish for large models, for comparison with the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll_like.check.layouts import GPULayout, Machines, count_layout
from roll_like.config.gpus import GPUName
from roll_like.config.training import TrainingConfig
from roll_like.models.shape import PUBLISHED, load_model_shape
from roll_like.starters.layout_command import base_config

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLayout:
    """A layout of a trainer.

    Attributes:
        model: Its name.
        source: Project, and file or page.
        gpus: GPUs of the trainer.
        gpu: Their kind.
        sizes: Tensor, pipeline, expert and context parallelism.
        tokens: Of a micro-batch on each rank.
        recomputed: Whether all layers are computed again.
        in_host: Whether optimizer states are in host memory during the step, which the backend here does not do.
    """

    model: str
    source: str
    gpus: int
    gpu: GPUName
    sizes: tuple[int, int, int, int]
    tokens: int
    recomputed: bool
    in_host: bool = False

    def counted(self) -> tuple[GPULayout, float]:
        """Return what the planner says of it, and GiB of a GPU, without an optimizer in host memory."""
        tensor, pipeline, expert, context = self.sizes
        sizes: dict[str, Any] = {
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "expert_parallel": expert,
            "sequence_parallel": context,
        }
        settings = TrainingConfig(
            backend="megatron",
            workers=self.gpus,
            zero_stage=1,
            max_tokens_per_micro_batch=self.tokens,
            gradient_checkpointing=self.recomputed,
            **sizes,
        )
        machines = Machines(gpus=self.gpus, gpu=self.gpu, length=self.tokens * context)
        shape = load_model_shape(PUBLISHED / self.model, weights=False)
        layout = count_layout(base_config(self.model, "sft", machines), shape, settings, 0, machines)
        away = layout.phase.parts["training", "optimizer"] if self.in_host else 0
        return layout, (layout.phase.total - away) / GIB

    def row(self) -> str:
        """Return a row of the table in `docs/large_models.md`."""
        layout, gib = self.counted()
        tensor, pipeline, expert, context = self.sizes
        whole = layout.phase.total / GIB
        here = f"{gib:.1f}" if not self.in_host else f"{gib:.1f}; {whole:.1f} with the optimizer"
        again = "yes" if self.recomputed else "no"
        return (
            f"| {self.model} | {self.source} | {self.gpus} {self.gpu} | {tensor} | {pipeline} | {expert} | {context} "
            f"| {self.tokens:,} | {again} | {here} |"
        )


NEMO = "NeMo-RL `recipes/llm/"
LAYOUTS = (
    PublishedLayout(
        model="Qwen3-30B-A3B", source=f"{NEMO}performance/grpo-qwen3-30ba3b-4n8g.yaml`",
        gpus=32, gpu="H100", sizes=(1, 1, 8, 1), tokens=4096, recomputed=False,
    ),
    PublishedLayout(
        model="Qwen3-30B-A3B", source="slime `scripts/run-qwen3-30B-A3B.sh`",
        gpus=8, gpu="H100", sizes=(4, 1, 8, 1), tokens=20480, recomputed=True, in_host=True,
    ),
    PublishedLayout(
        model="Qwen3-30B-A3B", source="verl `run_qwen3moe-30b_megatron_96gb.sh`",
        gpus=8, gpu="H20", sizes=(1, 1, 8, 1), tokens=10240, recomputed=True, in_host=True,
    ),
    PublishedLayout(
        model="Qwen3-235B-A22B", source=f"{NEMO}performance/grpo-qwen3-235b-16n8g.yaml`",
        gpus=128, gpu="H100", sizes=(2, 8, 16, 2), tokens=4096, recomputed=True,
    ),
    PublishedLayout(
        model="Qwen3-235B-A22B", source="slime `scripts/run-qwen3-235B-A22B.sh`",
        gpus=64, gpu="H100", sizes=(4, 4, 16, 2), tokens=16384, recomputed=True, in_host=True,
    ),
    PublishedLayout(
        model="Qwen3-235B-A22B", source="verl `run_qwen3-235b_megatron_96gb.sh`",
        gpus=32, gpu="H20", sizes=(4, 8, 4, 1), tokens=11680, recomputed=True, in_host=True,
    ),
    PublishedLayout(
        model="DeepSeek-V3", source=f"{NEMO}performance/grpo-deepseek-v3-32n8g.yaml`",
        gpus=256, gpu="H100", sizes=(1, 16, 16, 1), tokens=1536, recomputed=True,
    ),
    PublishedLayout(
        model="DeepSeek-V3", source=f"{NEMO}dapo-deepseek-v3-671b.yaml`",
        gpus=512, gpu="H100", sizes=(8, 8, 32, 4), tokens=2048, recomputed=True,
    ),
    PublishedLayout(
        model="DeepSeek-V3", source="verl `run_deepseek671b_math_megatron_80gb.sh`",
        gpus=256, gpu="H100", sizes=(1, 16, 16, 1), tokens=6144, recomputed=True, in_host=True,
    ),
    PublishedLayout(
        model="DeepSeek-V3", source="slime `scripts/run-deepseek-r1.sh`",
        gpus=128, gpu="H100", sizes=(8, 4, 32, 4), tokens=16384, recomputed=True, in_host=True,
    ),
)  # fmt: skip


if __name__ == "__main__":
    print("\n".join(layout.row() for layout in LAYOUTS))
