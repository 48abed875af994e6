"""Long rows: memory, time and equality of `training.attention` dense and varlen, by the length of a row.

    python benchmarks/attention.py                        # rows of 1k to 64k tokens on CPU, float32
    python benchmarks/attention.py --lengths 1024 16384

A row holds a prompt of half its tokens and four responses to it. Each case is the forward and the backward pass of a
random Llama of one layer in a process of its own: the peak of its memory is above what the process had before, and
log-probabilities and gradients are compared with those of the same samples one after the other, through transformers'
own causal attention without masks. Dense rows stop at `--dense-up-to`, since their masks grow with the square.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Options, finish, say

RESPONSES = 4
VOCABULARY = 256


def parser() -> Options:
    arguments = Options(__doc__, lengths=[256], dense_up_to=256)
    arguments.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192, 16384, 32768, 65536])
    arguments.add_argument("--dense-up-to", type=int, default=8192, help="longest row with masks. Tokens.")
    arguments.add_argument("--threads", type=int, default=2, help="cores")
    arguments.add_argument("--case", nargs=3, metavar=("ATTENTION", "LENGTH", "FILE"), help="of one process, by itself")
    return arguments


def samples_of(length: int) -> list[Any]:
    """Return responses to one prompt that make a row of about `length` tokens; they begin inside of tiles."""
    from roll_like.types import TrainingSample

    random = np.random.default_rng(0)
    prompt = random.integers(0, VOCABULARY, length // 2 - 5)
    own = length // 2 // RESPONSES + 1  # the last token of each is not computed
    return [
        TrainingSample(
            group_id="0",
            token_ids=np.concatenate([prompt, random.integers(0, VOCABULARY, own)]).astype(np.int32),
            prompt_length=len(prompt),
            loss_mask=np.arange(len(prompt) + own) >= len(prompt),
        )
        for _ in range(RESPONSES)
    ]


def model_of(positions: int) -> Any:
    """Return a random Llama of one layer, two heads of 32 with one key head."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=positions,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def compute(attention: str, length: int) -> dict[str, Any]:
    """Return log-probabilities, gradients, seconds and the peak of memory of a case; `alone` shares nothing."""
    import torch

    from roll_like.training.backbone import use_row_attention
    from roll_like.training.layout import micro_batches
    from roll_like.training.policy import PolicyModule, tensors_of

    model = model_of(length)
    policy = PolicyModule(model, chunk_tokens=1024, chunk_vocab=VOCABULARY)
    samples, joined = samples_of(length), attention == "varlen"
    if attention != "alone":
        use_row_attention(model, attention, row_sharing=None)  # type: ignore[arg-type]
    before, started = peak(), time.perf_counter()
    if attention == "alone":
        parts = []
        for sample in samples:
            tokens = torch.from_numpy(sample.token_ids).long()
            at = torch.from_numpy(np.flatnonzero(sample.loss_mask))
            hidden = model.base_model(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state[0]
            logprobs, _ = policy.head(hidden[at - 1], tokens[at], 1.0)
            logprobs.sum().backward()
            parts.append(logprobs.detach())
        found = torch.cat(parts)
    else:
        layout = {"share_prompts": True, "joined": joined}
        ((batch,),) = micro_batches(samples, ranks=1, max_tokens=length, **layout)  # type: ignore[arg-type]
        found, _ = policy(*tensors_of(batch, torch.device("cpu")), 1.0)
        found.sum().backward()
    gradient = torch.cat([each.grad.flatten() for each in model.base_model.layers.parameters()])
    return {
        "seconds": time.perf_counter() - started,
        "mib": (peak() - before) / 2**10,
        "logprobs": found.detach().numpy(),
        "gradient": gradient.numpy(),
    }


def peak() -> float:
    """Return the most memory that this process had, in KiB."""
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def run_case(attention: str, length: int, threads: int, folder: Path) -> dict[str, Any]:
    """Return the same from a process of its own."""
    file = folder / f"{attention}_{length}.npz"
    command = [sys.executable, __file__, "--case", attention, str(length), str(file)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    with np.load(file) as arrays:
        return dict(arrays)


def main() -> None:
    options = parser().parse_args()
    if options.case:
        attention, length, file = options.case
        np.savez(file, **compute(attention, int(length)))
        return
    figures: dict[str, Any] = {"benchmark": "attention"}
    with tempfile.TemporaryDirectory() as folder:
        for length in options.lengths:
            alone = run_case("alone", length, options.threads, Path(folder))
            for attention in ("dense", "varlen"):
                if attention == "dense" and length > options.dense_up_to:
                    continue
                case = run_case(attention, length, options.threads, Path(folder))
                row = {
                    "mib": float(case["mib"]),
                    "seconds": float(case["seconds"]),
                    "logprob_error": float(np.abs(case["logprobs"] - alone["logprobs"]).max()),
                    "gradient_error": float(
                        np.abs(case["gradient"] - alone["gradient"]).max() / np.abs(alone["gradient"]).max()
                    ),
                }
                say(f"{attention} {length}: {json.dumps(row)}")
                figures |= {f"{attention}_{length}_{name}": value for name, value in row.items() if "error" not in name}
                for name in ("logprob_error", "gradient_error"):
                    figures[f"{attention}_{name}"] = max(figures.get(f"{attention}_{name}", 0.0), row[name])
    for name in [name for name in figures if name.endswith("error")]:
        figures[name] = f"{figures[name]:.1e}"  # smaller than the places that `finish` keeps
    finish(options, figures)


if __name__ == "__main__":
    main()
