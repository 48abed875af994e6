"""A frozen base in 4 bits beside the same base in 16: bytes of its weights, and how far its log-probabilities move.

    python benchmarks/quantised_base.py                 # the quickstart's model, 105 answers of sft_quickstart

Log-probabilities are those of the answers' tokens, without adapters. NLL is their negative mean.
"""

from __future__ import annotations

import json
from typing import Any

from common import CONFIGS, SMOKE_MODEL, Options, configuration, finish, say


def parser() -> Options:
    arguments = Options(__doc__, rows=2)
    arguments.add_argument("--rows", type=int, default=105, help="answers")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of what computes")
    arguments.add_argument("--threads", type=int, default=1, help="cores")
    return arguments


def answers(tokenizer: Any, rows: int) -> list[tuple[Any, int]]:
    """Return the tokens of conversations of two turns, and where the answer of each begins."""
    import torch

    found = []
    for line in (CONFIGS / "data" / "sft_eval.jsonl").read_text().splitlines()[:rows]:
        row = json.loads(line)
        asked = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        begin = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        found.append(
            (torch.tensor(tokenizer(prompt + row["completion"], add_special_tokens=False)["input_ids"]), begin)
        )
    return found


def logprobs_of(model: Any, ids: Any, begin: int) -> Any:
    """Return the log-probabilities of the tokens from `begin` on."""
    logits = model(ids[None]).logits[0, begin - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ids[begin:, None])[:, 0]


def main() -> None:
    options = parser().parse_args()
    import torch

    from roll_like.builtin.pipelines.sft.config import SFTConfig
    from roll_like.config.training import LoRAConfig
    from roll_like.models.load import load_tokenizer, resolve_model
    from roll_like.models.lora import quantized_layers
    from roll_like.models.modules import load_causal_lm
    from roll_like.models.quantized import quantize, scales

    torch.set_num_threads(options.threads)
    smaller = SMOKE_MODEL if options.smoke else ()
    config = configuration(SFTConfig, CONFIGS / "sft_quickstart.yaml", f"model.dtype={options.dtype}", *smaller)
    path = resolve_model(config.model).path
    conversations = answers(load_tokenizer(config.model), options.rows)
    figures: dict[str, Any] = {"benchmark": "quantised_base", "dtype": options.dtype}
    unquantised: Any = None
    for kind in (None, "nf4", "fp4"):
        model = load_causal_lm(path, options.dtype)
        if kind is not None:
            quantize(model, quantized_layers(model, LoRAConfig(quantization=kind)), kind)
        held = sum(each.nbytes for each in (*model.parameters(), *scales(model)))
        with torch.no_grad():
            logprobs = torch.cat([logprobs_of(model.eval(), *each) for each in conversations])
        unquantised = logprobs if kind is None else unquantised
        difference = float((logprobs - unquantised).abs().mean())
        name = kind or options.dtype
        figures |= {f"{name}_mb": held / 1e6, f"{name}_nll": -float(logprobs.mean()), f"{name}_difference": difference}
        say(f"{name}: {held / 1e6:.1f} MB, NLL {-float(logprobs.mean()):.4f}, difference {difference:.4f} nats")
    finish(options, figures)


if __name__ == "__main__":
    main()
