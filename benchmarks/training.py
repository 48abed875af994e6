"""Trainer tokens per second: this package's DeepSpeed engines against a bare PyTorch loop, and against TRL.

    python benchmarks/training.py                      # policy gradient, as the quickstart trains
    python benchmarks/training.py --no-share-prompts   # without computing a group's prompt once
    make oracle-setup                                  # installs TRL, apart from .venv
    python benchmarks/training.py --task sft           # configs/sft_quickstart.yaml; TRL's SFTTrainer
    python benchmarks/training.py --task dpo           # configs/dpo_quickstart.yaml; TRL's DPOTrainer
    python benchmarks/training.py --device cuda        # one GPU, shared by the sides
    python benchmarks/training.py --profile            # also: kernels, launches and waits of the engine's step

A token counts once a sample (in pairs, once an answer), prompts included, on all sides: the tokens of the batch
as its user sees them, padding not counted. The bare loop is what one would write by hand for speed
(benchmarks/trainers/bare.py): padded micro-batches sorted by length, logits only where a token is learned, weights in
`model.dtype` (bfloat16 with a float32 master copy), fused AdamW, no metrics, no Ray. TRL has the same samples of each
step as tokens, weights in `model.dtype` without a master copy, fused AdamW, no gradient checkpointing, and
micro-batches of `--trl-micro-batch`. Reference log-probabilities of pairs are computed before the first step on all
sides. MFU (benchmarks/mfu.py) has the same model FLOPs on all sides, a prompt once a group and no padding, and
compares with matrix products of as many rows as the engine's micro-batches have.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from common import (
    Options,
    Peer,
    add_common_arguments,
    add_device_argument,
    environment_of,
    find_trl,
    finish,
    interleaved,
    say,
    serve,
)
from mfu import PRODUCTS, matrix_products, utilisation
from trainers.batches import work_of

TASKS = ("grpo", "sft", "dpo")


def parser() -> Options:
    arguments = Options(__doc__, repetitions=1, prompts=2, samples=4, steps=1, trl_micro_batch=4)
    add_common_arguments(arguments)
    add_device_argument(arguments)
    arguments.add_argument("--task", choices=TASKS, default="grpo", help="what is trained; default: policy gradient")
    arguments.add_argument("--max-tokens", type=int, help="micro-batch budget of both sides; default: the quickstart's")
    arguments.add_argument("--bare-max-tokens", type=int, help="micro-batch budget of the bare loop, if another")
    arguments.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), help="default: the quickstart's")
    arguments.add_argument("--profile", action="store_true", help="also tell where the engine's step spends its time")
    arguments.add_argument("overrides", nargs="*", help="key=value of the configuration: model.dtype=float32")
    policy = arguments.add_argument_group("--task grpo")
    policy.add_argument("--prompts", type=int, default=16, help="groups in the batch")
    policy.add_argument("--samples", type=int, default=8, help="samples of each group")
    policy.add_argument("--shortest", type=int, default=15, help="tokens of the shortest response")
    policy.add_argument("--longest", type=int, default=40, help="tokens of the longest response")
    policy.add_argument("--no-share-prompts", action="store_true", help="compute a group's prompt once a sample")
    given = arguments.add_argument_group("--task sft and --task dpo")
    given.add_argument("--steps", type=int, default=2, help="optimizer steps of a turn, each on its own samples")
    given.add_argument("--without-trl", action="store_true", help="only the engine and the bare loop")
    given.add_argument("--trl-micro-batch", type=int, default=16, help="samples, or pairs, of TRL's micro-batches")
    given.add_argument(
        "--trl-packing", choices=("none", "padding_free", "bfd"), default="none", help="how TRL packs, --task sft only"
    )
    return arguments


def side(name: str, reading: int, writing: int, options: argparse.Namespace) -> None:
    """Be one of the other sides, in a process of its own."""
    work = work_of(options)
    if name == "bare":
        from trainers.bare import bare_loop

        loop = bare_loop(options.task, work)
        serve(reading, writing, lambda message: loop.turn())
        return
    find_trl()
    from trainers.trl_side import Turns, train

    turns = Turns()
    answering = threading.Thread(target=serve, args=(reading, writing, lambda message: turns.take()), daemon=True)
    answering.start()
    train(work, options, turns)  # here, so that its failure ends the process
    answering.join()


def other_sides(
    options: argparse.Namespace, environment: Mapping[str, str], stack: ExitStack
) -> Mapping[str, Callable[[], float]]:
    """Start the other sides; return how each takes its turn."""
    names = ["bare"]
    if options.task != "grpo" and not options.without_trl:
        find_trl()
        names.append("TRL")
    return {name: stack.enter_context(Peer(Path(__file__), [name, *sys.argv[1:]], environment)).call for name in names}


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        side(sys.argv[4], int(sys.argv[2]), int(sys.argv[3]), parser().parse_args(sys.argv[5:]))
        return
    from trainers.engines import engine_turns
    from trainers.profiled import profiled_step

    options = parser().parse_args()
    environment = environment_of(options.threads, plain=options.plain_environment)
    with ExitStack() as stack:
        others = other_sides(options, environment, stack)  # they load their models while the engine starts
        work = work_of(options)
        say(f"{options.task}: {len(work.batches)} steps of {len(work.batches[0])} samples, {work.tokens} tokens")
        products = stack.enter_context(matrix_products(work.products, environment))
        engine = stack.enter_context(engine_turns(options.task, work))
        seconds = interleaved({**engine.turns, **others, PRODUCTS: products.call}, repetitions=options.repetitions)
        profiled = {"profile": profiled_step(engine.engine, engine.step)} if options.profile else {}
    matmul = 1e9 / seconds.pop(PRODUCTS)
    columns = {name: name.lower().replace(", ", "_") for name in seconds}
    rates = {name: work.tokens / each for name, each in seconds.items()}
    flops = {columns[name]: work.flops / each for name, each in seconds.items()}
    finish(
        options,
        {
            "benchmark": "training",
            "task": options.task,
            **{f"{columns[name]}_tokens_per_second": rate for name, rate in rates.items()},
            "ratio": rates["engine"] / rates["bare"],
            **({"ratio_to_trl": rates["engine"] / rates["TRL"]} if "TRL" in rates else {}),
            "dtype": work.config.model.dtype,
            "max_tokens_per_micro_batch": work.config.training.max_tokens_per_micro_batch,
            "bare_max_tokens": work.bare_max_tokens,
            "plain_environment": options.plain_environment,
            **utilisation(flops, matmul),
            **profiled,
        },
    )


if __name__ == "__main__":
    main()
