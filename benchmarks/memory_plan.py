"""Formulas of `--check` for activations against PyTorch's memory tracker, on tensors without content.

    python benchmarks/memory_plan.py

A model of one layer and one of two run forward and backward as fake tensors, which have sizes and no memory, and
`torch.distributed._tools.mem_tracker.MemTracker` adds up what would exist at a time. The difference is one layer's;
more layers add as much each. Attention is a stand-in that keeps what flash attention keeps, because fake tensors of a
CPU build cannot run the kernel. Gradients of weights go at once, as into a bucket.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import Options, finish, say
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AttentionInterface, AutoConfig, AutoModel

from roll_like.check.activations import training_bytes
from roll_like.models.renames import recompute_activations
from roll_like.models.shape import load_model_shape

#: Published shapes: config.json of each model, without weights.
SHAPES = Path(__file__).resolve().parent.parent / "tests" / "data" / "shapes"
MODELS = ("Qwen2.5-0.5B-Instruct", "Qwen3-0.6B", "Qwen2.5-7B-Instruct", "Llama-3.1-8B-Instruct")
GIB = 2**30
ATTENTION = "stand_in"


class _Flash(torch.autograd.Function):
    """Keeps queries, keys, values, outputs and log-sum-exps, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query_1HTD: Tensor, key_1GTD: Tensor, value_1GTD: Tensor) -> Tensor:
        heads, tokens, width = query_1HTD.shape[1:]
        output_1THD = query_1HTD.new_empty(1, tokens, heads, width)
        logsumexp_HT = query_1HTD.new_empty(heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query_1HTD, key_1GTD, value_1GTD, output_1THD, logsumexp_HT)
        return output_1THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        del grads
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    del module, mask, options
    return _Flash.apply(query, key, value), None  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured: a model's shape, tokens of a micro-batch, whether activations are recomputed."""

    model: str
    tokens: int
    checkpointing: bool

    def tracked(self, layers: int) -> int:
        """Return the most that existed beside the weights, in bytes, of a model with so many layers."""
        AttentionInterface.register(ATTENTION, _attention)
        config = AutoConfig.from_pretrained(SHAPES / self.model)
        config.num_hidden_layers, config.use_cache = layers, False
        config.vocab_size = 1024  # the embedding's gradient could be more than all activations of one layer
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        with FakeTensorMode():
            model = AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION).train()
            if self.checkpointing:
                recompute_activations(model)
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
            weights = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
            tokens_1T = torch.zeros(1, self.tokens, dtype=torch.long)
            tracker = MemTracker()
            tracker.track_external(model, tokens_1T)
            with tracker:
                model(input_ids=tokens_1T).last_hidden_state.sum().backward()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        return int(snapshot["Total"]) - weights

    def expected(self, layers: int) -> int:
        """Return what the plan says of it."""
        shape = replace(load_model_shape(SHAPES / self.model), layers=layers)
        return training_bytes(shape, self.tokens, width=2, checkpointing=self.checkpointing)

    def compare(self) -> dict[str, float]:
        """Return tracked and expected GiB of the whole model, and the error of the latter."""
        layers = load_model_shape(SHAPES / self.model).layers
        one, two = self.tracked(1), self.tracked(2)
        whole = one + (layers - 1) * (two - one)
        planned = self.expected(layers)
        return {"tracked_gib": whole / GIB, "planned_gib": planned / GIB, "error": planned / whole - 1}


def parser() -> argparse.ArgumentParser:
    made = Options(__doc__, tokens=512, models=MODELS[:1])
    made.add_argument("--tokens", type=int, default=8192, help="tokens of the micro-batch")
    made.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    return made


def main() -> None:
    options = parser().parse_args()
    figures: dict[str, float] = {}
    for model in options.models:
        for checkpointing in (False, True):
            case = Case(model=model, tokens=options.tokens, checkpointing=checkpointing)
            found = case.compare()
            name = f"{model}{' recomputed' if checkpointing else ''}"
            say(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in found.items()))
            figures |= {f"{name} {key}": value for key, value in found.items()}
    finish(options, {"benchmark": "memory_plan", **figures})


if __name__ == "__main__":
    main()
