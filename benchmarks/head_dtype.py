"""How far engine and trainer are apart in bfloat16, and what `model.head_dtype: float32` leaves of it.

    python benchmarks/head_dtype.py                     # SmolLM2-135M-Instruct, 16 answers of 32 tokens
    python benchmarks/head_dtype.py --engine vllm

The engine samples with bfloat16 weights, a token at a time over cached keys and values; the trainer computes the same
tokens in rows, where sums are rounded in another order. For each sampled token the two log-probabilities are compared:
with the output layer's products in bfloat16 on both sides, in float32 on both sides, and in float32 on one side only.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
from common import Options, finish, quickstart, say

TOPICS = ("the sea", "a lost key", "rain", "two friends", "a slow train", "bread", "the moon", "an old map")


def parser() -> Options:
    arguments = Options(__doc__, samples=2, response=3)
    arguments.add_argument("--samples", type=int, default=16, help="answers")
    arguments.add_argument("--response", type=int, default=32, help="their length. Tokens.")
    arguments.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    arguments.add_argument("--threads", type=int, default=2, help="cores")
    return arguments


async def sampled(path: Path, tokenizer: Path, options: Any, *, float32: bool) -> list[Any]:
    """Return samples of the engine, ready for training."""
    from transformers import AutoTokenizer

    from roll_like.inference.interface import EngineSpec, GenerateRequest, Sampling
    from roll_like.registry import INFERENCE_ENGINES
    from roll_like.types import PolicySample

    encode = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    prompts = [np.asarray(encode(f"A short story about {topic}.")["input_ids"], np.int32) for topic in TOPICS]
    spec = EngineSpec(
        model_path=str(path),
        tokenizer_path=str(tokenizer),
        dtype="bfloat16",
        device="cpu",
        threads=options.threads,
        tensor_parallel_size=1,
        max_model_len=64 + options.response,
        seed=0,
        float32_head=float32,
    )
    plugin: Any = INFERENCE_ENGINES.get(options.engine)
    engine = plugin.engine()(plugin.Config(type=options.engine, max_running=options.samples), spec)
    await engine.start()
    sampling = Sampling(max_tokens=options.response)
    await engine.submit(
        [
            GenerateRequest(
                request_id=str(number), prompt_ids=prompts[number % len(prompts)], sampling=sampling, seed=number
            )
            for number in range(options.samples)
        ]
    )
    finished: list[Any] = []
    while len(finished) < options.samples:
        finished += await engine.poll(60.0)
    await engine.close()
    samples = []
    for each in sorted(finished, key=lambda one: int(one.request_id)):
        prompt = prompts[int(each.request_id) % len(prompts)]
        tokens = np.concatenate([prompt, each.token_ids])
        drawn = np.arange(len(tokens)) >= len(prompt)
        samples.append(
            PolicySample(
                group_id=each.request_id,
                token_ids=tokens,
                prompt_length=len(prompt),
                loss_mask=drawn,
                turns=np.where(drawn, 0, -1).astype(np.int32),
                behaviour_logprobs=np.concatenate([np.zeros(len(prompt), np.float32), each.logprobs]),
                advantages=np.zeros(len(tokens), np.float32),
                reward=0.0,
                policy_version=0,
            )
        )
    return samples


def differences(path: Path, samples: list[Any], options: Any, *, float32: bool) -> dict[str, float]:
    """Return how far the trainer's log-probabilities are from the engine's."""
    import torch

    from roll_like.models.modules import load_causal_lm
    from roll_like.training.backbone import use_row_attention
    from roll_like.training.layout import micro_batches, per_sample
    from roll_like.training.policy import PolicyModule, tensors_of

    torch.set_num_threads(options.threads)
    model = load_causal_lm(path, "bfloat16").eval()
    use_row_attention(model, row_sharing=None)
    policy = PolicyModule(model, chunk_tokens=1024, chunk_vocab=65536, float32_head=float32)
    (batches,) = micro_batches(samples, ranks=1, max_tokens=1024, share_prompts=False)
    with torch.no_grad():
        found = [policy(*tensors_of(batch, torch.device("cpu")), 1.0)[0].numpy() for batch in batches]
    trainer = per_sample(samples, [batches], [found])
    pairs = [(mine - one.behaviour_logprobs)[one.loss_mask] for one, mine in zip(samples, trainer, strict=True)]
    ratio = np.concatenate(pairs).astype(np.float64)
    return {
        "mean": float(np.abs(ratio).mean()),
        "p99": float(np.quantile(np.abs(ratio), 0.99)),
        "max": float(np.abs(ratio).max()),
        "kl": float((np.expm1(ratio) - ratio).mean()),
    }


def main() -> None:
    from roll_like.models.load import resolve_model

    options = parser().parse_args()
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_PROGRESS_BARS="1")
    model = resolve_model(quickstart(smoke=options.smoke).model)
    figures: dict[str, Any] = {"benchmark": "head_dtype"}
    rows = {}
    for engine in (False, True):
        samples = asyncio.run(sampled(model.path, model.tokenizer_path, options, float32=engine))
        for trainer in (False, True):
            name = {(False, False): "bfloat16", (True, True): "float32"}.get(
                (engine, trainer), "engine_only" if engine else "trainer_only"
            )
            rows[name] = differences(model.path, samples, options, float32=trainer)
            say(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in rows[name].items()))
    for name, row in rows.items():
        figures |= {f"{name}_{key}": f"{value:.2e}" for key, value in row.items()}
    figures["kl_ratio"] = rows["bfloat16"]["kl"] / max(rows["float32"]["kl"], 1e-30)
    finish(options, figures)


if __name__ == "__main__":
    main()
