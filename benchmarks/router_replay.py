"""Mixtures of experts: how far engine and trainer are apart, and what `algorithm.router_replay` leaves of it.

    python benchmarks/router_replay.py                    # bfloat16, 16 experts of which 4 are taken, 32 samples
    python benchmarks/router_replay.py --dtype float32

The transformers engine samples from a random Qwen3-MoE, a token at a time over cached keys and values; the trainer
computes the same tokens in rows, where sums are rounded in another order. For each sampled token the two
log-probabilities are compared: with the trainer's own choice of experts, with the engine's, and for a model of the
same size without experts, whose difference is rounding alone.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import Options, finish, say

VOCABULARY, PROMPT = 512, 16
EXPERT_WIDTH = 64


def parser() -> Options:
    arguments = Options(__doc__, samples=2, response=4, layers=2)
    arguments.add_argument("--samples", type=int, default=32, help="answers, each to a prompt of its own")
    arguments.add_argument("--response", type=int, default=128, help="their length. Tokens.")
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--experts", type=int, default=16)
    arguments.add_argument("--active", type=int, default=4, help="experts of a token in each layer")
    arguments.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments.add_argument("--threads", type=int, default=2, help="cores")
    return arguments


def make_model(directory: Path, options: Any, *, experts: bool) -> Path:
    """Write a random model and a tokenizer for it; without experts, with as many parameters for each token."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": options.active * EXPERT_WIDTH,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY - 1,
    }
    model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes))
    if experts:
        mixture = {
            "num_experts": options.experts,
            "num_experts_per_tok": options.active,
            "moe_intermediate_size": EXPERT_WIDTH,
            "norm_topk_prob": True,
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **mixture))
    model.to(getattr(torch, options.dtype)).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(VOCABULARY)}, unk_token="t0"))
    end = f"t{VOCABULARY - 1}"
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, pad_token=end).save_pretrained(directory)
    return directory


async def sampled(path: Path, options: Any, *, routes: bool) -> list[Any]:
    """Return samples of the transformers engine, ready for training."""
    from roll_like.inference.hf.config import HFConfig
    from roll_like.inference.hf.engine import HFEngine
    from roll_like.inference.interface import EngineSpec, GenerateRequest, Sampling
    from roll_like.types import PolicySample

    spec = EngineSpec(
        model_path=str(path),
        tokenizer_path=str(path),
        dtype=options.dtype,
        device="cpu",
        threads=options.threads,
        tensor_parallel_size=1,
        max_model_len=PROMPT + options.response,
        seed=0,
        returns_routes=routes,
    )
    engine = HFEngine(HFConfig(max_running=options.samples), spec)
    await engine.start()
    random = np.random.default_rng(0)
    prompts = {
        str(number): random.integers(0, VOCABULARY - 1, PROMPT).astype(np.int32) for number in range(options.samples)
    }
    sampling = Sampling(max_tokens=options.response)
    await engine.submit(
        [
            GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling, seed=int(name))
            for name, prompt in prompts.items()
        ]
    )
    finished: list[Any] = []
    while len(finished) < options.samples:
        finished += await engine.poll(60.0)
    await engine.close()
    samples = []
    for each in sorted(finished, key=lambda one: int(one.request_id)):
        tokens = np.concatenate([prompts[each.request_id], each.token_ids])
        empty = np.zeros(len(tokens), np.float32)
        logprobs = np.concatenate([np.zeros(PROMPT, np.float32), each.logprobs])
        samples.append(
            PolicySample(
                group_id=each.request_id,
                token_ids=tokens,
                prompt_length=PROMPT,
                loss_mask=np.arange(len(tokens)) >= PROMPT,
                routes=each.routes,
                turns=np.where(np.arange(len(tokens)) >= PROMPT, 0, -1).astype(np.int32),
                behaviour_logprobs=logprobs,
                advantages=empty,
                reward=0.0,
                policy_version=0,
            )
        )
    return samples


def differences(path: Path, samples: list[Any], options: Any, *, experts: bool) -> tuple[dict[str, float], float]:
    """Return how far the trainer's log-probabilities are from the engine's, and the share of other experts."""
    import torch

    from roll_like.config.algorithm import ROUTER_REPLAY
    from roll_like.models.modules import load_causal_lm
    from roll_like.models.router import RouterReplay
    from roll_like.training.backbone import use_row_attention
    from roll_like.training.layout import micro_batches, per_sample
    from roll_like.training.policy import PolicyModule, tensors_of

    torch.set_num_threads(options.threads)
    model = load_causal_lm(path, options.dtype).eval()
    use_row_attention(model, row_sharing=None)
    policy = PolicyModule(model, chunk_tokens=1024, chunk_vocab=VOCABULARY)
    if experts:
        policy.router = RouterReplay(model, ROUTER_REPLAY)
    (batches,) = micro_batches(samples, ranks=1, max_tokens=2048, share_prompts=False)
    found, other, given = [], 0.0, 0
    with torch.no_grad():
        for batch in batches:
            found.append(policy(*tensors_of(batch, torch.device("cpu")), 1.0)[0].float().numpy())
            if policy.router is not None:
                share, count = policy.router.disagreement()
                other, given = other + share * count, given + count
    trainer = per_sample(samples, [batches], [found])
    pairs = [(mine - one.behaviour_logprobs)[one.loss_mask] for one, mine in zip(samples, trainer, strict=True)]
    ratio = np.concatenate(pairs).astype(np.float64)
    figures = {
        "mean": float(np.abs(ratio).mean()),
        "p99": float(np.quantile(np.abs(ratio), 0.99)),
        "max": float(np.abs(ratio).max()),
        "kl": float((np.expm1(ratio) - ratio).mean()),
    }
    return figures, other / given if given else 0.0


def main() -> None:
    options = parser().parse_args()
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_PROGRESS_BARS="1")
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        dense = make_model(Path(directory) / "dense", options, experts=False)
        say(f"{options.samples} samples of a model without experts")
        samples = asyncio.run(sampled(dense, options, routes=False))
        rows["dense"], _ = differences(dense, samples, options, experts=False)
        moe = make_model(Path(directory) / "moe", options, experts=True)
        say(f"{options.samples} samples of a mixture of {options.experts} experts")
        samples = asyncio.run(sampled(moe, options, routes=True))
        plain = [replace(one, routes=None) for one in samples]
        rows["own"], _ = differences(moe, plain, options, experts=True)
        rows["replayed"], disagreement = differences(moe, samples, options, experts=True)
    names = {"dense": "no experts", "own": "trainer's own experts", "replayed": "engine's experts"}
    print(f"{'difference of a log-probability, nats':38} {'mean':>9} {'p99':>9} {'max':>9} {'KL (k3)':>9}")
    for row, values in rows.items():
        print(f"{names[row]:38} " + " ".join(f"{value:9.2g}" for value in values.values()))
    print(f"experts that the trainer's router would not have chosen: {disagreement:.2%}")
    figures = {f"{row}_{name}": value for row, values in rows.items() for name, value in values.items()}
    finish(
        options,
        {"benchmark": "router_replay", **figures, "disagreement": disagreement, "dtype": options.dtype},
    )


if __name__ == "__main__":
    main()
