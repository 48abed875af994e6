"""Run the cookbook's two loops against a service, and draw what they logged: docs/images/service_curves.png.

    .venv/bin/roll-like service --config service_quickstart.yaml    # of docs/service.md
    .venv/bin/python scripts/run_recipes.py

The loops run in .tinker (`make tinker`) with rows from here, one after the other: `sl_loop` learns the form of an
answer from sums of one digit, and `rl_loop` goes on from its last checkpoint. What they log stays in `runs/recipes`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_like.metrics.curves import Line, Panel, smoothed
from roll_like.metrics.plots import draw_panels

ROOT = Path(__file__).resolve().parent.parent
#: The model's own chat format is that of the renderer that the cookbook has for this name.
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
#: Of each recipe: its options, and the metric that is drawn.
RECIPES: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "sl": ({"learning_rate": 1e-3, "batch_size": 16, "max_length": 128}, "train_mean_nll"),
    "rl": (
        {"learning_rate": 4e-4, "batch_size": 4, "group_size": 6, "max_tokens": 16, "max_steps": 20}
        | {"loss_fn": "importance_sampling"},
        "reward/total",
    ),
}
#: Rows of each: of `sl_loop` twelve batches.
COUNTS = {"sl": 192, "rl": 400}
TITLES = {"sl": "sl_loop: loss per trained token", "rl": "rl_loop: mean reward"}
#: What `rl_loop` adds to its questions.
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."


def sums(recipe: str) -> Iterator[dict[str, Any]]:
    """Yield rows of a recipe, all pairs of numbers before one comes again; those of `rl_loop` have three digits."""
    first = range(10, 50) if recipe == "rl" else range(1, 10)
    draws, pairs = random.Random(0), list(itertools.product(first, range(1, 10)))
    for number in range(COUNTS[recipe]):
        if number % len(pairs) == 0:
            draws.shuffle(pairs)
        one, other = pairs[number % len(pairs)]
        question, answer = f"What is {one} + {other}?", one + other
        if recipe == "rl":
            yield {"question": question, "answer": f"#### {answer}"}
            continue
        said = (("user", question + SUFFIX), ("assistant", f"{one} + {other} = \\boxed{{{answer}}}"))
        yield {"messages": [{"role": role, "content": content} for role, content in said]}


def run(recipe: str, folder: Path, options: Mapping[str, Any]) -> None:
    """Run a recipe to its end; what it logs goes to a folder of its name."""
    shutil.rmtree(folder / recipe, ignore_errors=True)
    (folder / f"{recipe}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sums(recipe)))
    learned = folder / "sl" / "checkpoints.jsonl"
    if recipe == "rl" and learned.exists():  # a recipe goes on from the last checkpoint in its folder
        last = json.loads(learned.read_text().splitlines()[-1])
        (folder / recipe).mkdir()
        (folder / recipe / "checkpoints.jsonl").write_text(json.dumps({**last, "batch": 0}) + "\n")
    program = ROOT / "tests" / "tinker_client" / "recipes.py"
    command = [str(ROOT / ".tinker" / "bin" / "python"), str(program), recipe, str(folder), json.dumps(options)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def drawn(folder: Path, recipe: str) -> tuple[Panel, list[Line]]:
    """Return what a recipe logged as a panel."""
    name = RECIPES[recipe][1]
    values = [json.loads(line)[name] for line in (folder / recipe / "metrics.jsonl").read_text().splitlines()]
    steps = list(range(1, len(values) + 1))
    return Panel(title=TITLES[recipe], names=(name,), smooth=recipe == "rl"), [
        Line(name, "", (steps, smoothed(values)), faint=(steps, values))
    ]


def main() -> None:
    """Write rows, run both recipes, and draw them."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--url", default="http://127.0.0.1:8100", help="address of the service")
    arguments.add_argument("--keys", type=Path, default=ROOT / "runs" / "service_quickstart" / "api_keys")
    arguments.add_argument("--folder", type=Path, default=ROOT / "runs" / "recipes", help="where loops log")
    arguments.add_argument("--image", type=Path, default=ROOT / "docs" / "images" / "service_curves.png")
    arguments.add_argument("--set", type=json.loads, default={}, help="other options of a recipe, as JSON")
    arguments.add_argument("recipes", nargs="*", default=list(RECIPES), help="which to run")
    given = arguments.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").unlink(missing_ok=True)
    (folder / "model").symlink_to(ROOT / ".tokenizers" / "smollm2")
    os.environ |= {"TINKER_BASE_URL": given.url, "TINKER_API_KEY": given.keys.read_text().split()[0]}
    for recipe in given.recipes:
        run(recipe, folder, {"model_name": MODEL, "lora_rank": 16, "save_every": 10, **RECIPES[recipe][0], **given.set})
    panels = [drawn(folder, recipe) for recipe in RECIPES if (folder / recipe / "metrics.jsonl").exists()]
    draw_panels(given.image, panels)


if __name__ == "__main__":
    main()
