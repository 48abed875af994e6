"""The best layouts of large models on 64 to 1,024 GPUs, simulated: the planner's estimates, beside published figures.

    python benchmarks/layout_scale.py

No GPU is used. Memory is counted as `--check` counts it; an update of 512 samples of full length is estimated as
`roll_like/check/layouts.py` says: matrix products at 40 % of the peak, the idle time of a pipeline, and all that ranks
send, one after the other. Sampling is left out. Layouts that Megatron-Core trains here, and FSDP2's.
"""

from __future__ import annotations

from common import Options, finish

from roll_like.check.layouts import GPULayout, Machines, find_layouts
from roll_like.models.shape import PUBLISHED
from roll_like.starters.layout_command import base_config

GIB = 2**30
MODELS = {"Qwen3-30B-A3B": 4096, "Qwen3-235B-A22B": 8192}
HEADER = (
    "| model | GPUs | layout | GiB | seconds of an update | tokens/s per GPU |",
    "|---|---|---|---|---|---|",
)
GPUS = (64, 128, 256, 512, 1024)


def best_layout(model: str, gpus: int, length: int) -> tuple[Machines, GPULayout | None]:
    """Return the best layout of a trainer, if one fits."""
    machines = Machines(gpus=gpus, gpu="H100", length=length)
    found = find_layouts(base_config(model, "sft", machines), PUBLISHED / model, machines)
    return machines, found.fitting[0] if found.fitting else None


def row(model: str, gpus: int, length: int) -> str:
    """Return a row of the table in `docs/large_models.md`."""
    machines, layout = best_layout(model, gpus, length)
    if layout is None:
        return f"| {model} | {gpus:,} | – | – | – | – |"
    again = ", computed again" if layout.training.gradient_checkpointing else ""
    rate = machines.samples * length / layout.seconds / gpus
    held = layout.phase.total / GIB
    return f"| {model} | {gpus:,} | {layout.label}{again} | {held:.1f} | {layout.seconds:.1f} | {rate:,.0f} |"


def parser() -> Options:
    """Return the options."""
    options = Options(__doc__, gpus=[64])
    options.add_argument("--gpus", type=int, nargs="+", default=list(GPUS), help="GPUs that are compared")
    return options


def main() -> None:
    """Print the table, and one line of JSON."""
    options = parser().parse_args()
    rows = [row(model, count, length) for model, length in MODELS.items() for count in options.gpus]
    print("\n".join((*HEADER, *rows)), flush=True)
    finish(options, {"benchmark": "layout_scale", "rows": rows})


if __name__ == "__main__":
    main()
