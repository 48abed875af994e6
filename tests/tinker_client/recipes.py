"""The cookbook's own loops, unchanged: `python recipes.py sl|rl|letters FOLDER OPTIONS`. Runs in .tinker.

What a recipe takes from the network is taken from the folder: its rows (`sl.jsonl`, `rl.jsonl`, …) and the tokenizer in
`model`. `letters` is `rl` with a reward that counts a letter: a model of some hundred kilobytes cannot do arithmetic.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
from tinker_cookbook import tokenizer_utils
from tinker_cookbook.recipes import rl_loop, sl_loop
from transformers import AutoTokenizer


def main() -> None:
    recipe, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    rows = [json.loads(line) for line in (folder / f"{recipe}.jsonl").read_text().splitlines()]
    local = datasets.DatasetDict(train=datasets.Dataset.from_list(rows))
    datasets.load_dataset = lambda *_: local
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer_utils.register_tokenizer(options["model_name"], lambda: tokenizer)
    module: Any = sl_loop if recipe == "sl" else rl_loop
    if recipe == "letters":
        rl_loop.get_reward = lambda response, answer: min(response.count(answer), 12) / 12
    module.main(module.Config(log_path=str(folder / recipe), **options))


if __name__ == "__main__":
    main()
