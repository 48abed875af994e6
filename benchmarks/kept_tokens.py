"""What it costs to normalise over the tokens that `top_p`, `top_k` and `min_p` kept: time, memory, bytes.

    python benchmarks/kept_tokens.py                      # 1,024 tokens, the sizes of SmolLM2-135M's output head
    python benchmarks/kept_tokens.py --kept 20 500

Log-probabilities of random targets and their gradients, forward and backward, from random hidden states: among the
whole vocabulary (in blocks, as without truncation), and among some tokens. Seconds are those of the processor, which
depend less on the machine's load than those of a clock. The peak of memory is above what the process held before, the
gradient of the output projection included. Bytes are those of one sampled token on its way from the
engine to the trainer. Each case runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from common import Options, finish, say


def parser() -> Options:
    arguments = Options(__doc__, tokens=8, vocabulary=100, width=8, kept=[2])
    arguments.add_argument("--tokens", type=int, default=1024)
    arguments.add_argument("--vocabulary", type=int, default=49152)
    arguments.add_argument("--width", type=int, default=576)
    arguments.add_argument("--kept", type=int, nargs="+", default=[1, 8, 64, 512, 4096], help="tokens kept of each")
    arguments.add_argument("--threads", type=int, default=2, help="cores")
    arguments.add_argument("--case", type=int, help="measure this number of kept tokens, 0 for all, in this process")
    return arguments


def measured(options: Any) -> dict[str, float]:
    """Return processor seconds, the peak of memory in MiB and bytes a token of one case."""
    import torch

    from roll_like.algorithms.kept import KeptIds, kept_logprobs
    from roll_like.algorithms.logprobs import token_logprobs
    from roll_like.types import KeptTokens

    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    shapes = ((options.tokens, options.width), (options.vocabulary, options.width))
    hidden, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes)
    targets = torch.randint(options.vocabulary, (options.tokens,), generator=generator)
    # neighbours of the target, all different
    ids = (targets[:, None] + torch.arange(options.case)) % options.vocabulary
    counts = torch.full((options.tokens,), options.case)
    settings: dict[str, Any] = {"temperature": 1.0, "chunk_tokens": 1024, "chunk_vocab": 65536}
    seconds, before = [], peak()
    for _ in range(3):
        started = time.process_time()
        if options.case:
            found = kept_logprobs(hidden, weight, targets, KeptIds(ids.flatten(), counts), **settings)
        else:
            found = token_logprobs(hidden, weight, targets, **settings)
        torch.autograd.grad(found[0].sum(), (hidden, weight))
        seconds.append(time.process_time() - started)
    kept = KeptTokens(ids=ids.flatten().numpy().astype(np.int32), counts=counts.numpy().astype(np.int32))
    size = len(pickle.dumps(kept, protocol=5)) / options.tokens if options.case else 0.0
    return {"seconds": statistics.median(seconds), "mib": (peak() - before) / 2**10, "bytes": size}


def peak() -> float:
    """Return the most memory that this process had, in KiB."""
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    options = parser().parse_args()
    if options.case is not None:
        print(json.dumps(measured(options)))
        return
    figures: dict[str, Any] = {"benchmark": "kept_tokens"}
    sizes = [word for name in ("tokens", "vocabulary", "width") for word in (f"--{name}", str(getattr(options, name)))]
    for kept in (0, *options.kept):
        command = [sys.executable, __file__, *sizes, "--threads", str(options.threads), "--case", str(kept)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        row = json.loads(done.stdout.splitlines()[-1])
        say(f"{kept or 'all'} tokens kept: {json.dumps(row)}")
        figures |= {f"{kept or 'all'}_{name}": value for name, value in row.items()}
    finish(options, figures)


if __name__ == "__main__":
    main()
