"""Writes the quickstart's model with another tokenizer: python scripts/make_other_tokenizer.py FOLDER.

For runs with `other_tokenizer` on a machine without a hub. A token that both vocabularies have keeps its embedding; any
other gets the mean of those of the tokens that spell it, as in Gee et al. 2022, Fast Vocabulary Transfer for Language
Model Compression. The model has to be trained a little before it writes well. The tokenizer is Qwen2.5's (`make
tokenizers`), which is of bytes, as the model's own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from roll_like.config.model import ModelConfig
from roll_like.models.load import QUICKSTART_MODEL, resolve_model

QWEN = Path(__file__).resolve().parent.parent / ".tokenizers" / "qwen2_5"


def spelled(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return for each token of `other`, by id, the tokens of `own` that spell it; none where none do."""
    vocabulary, model = own.get_vocab(), own.backend_tokenizer.model
    names = sorted(other.get_vocab().items(), key=lambda item: item[1])
    return [
        [vocabulary[name]] if name in vocabulary else [piece.id for piece in model.tokenize(name)] for name, _ in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=QWEN)
    options = parser.parse_args()
    found = resolve_model(ModelConfig(path=QUICKSTART_MODEL))
    own, other = AutoTokenizer.from_pretrained(found.tokenizer_path), AutoTokenizer.from_pretrained(options.tokenizer)
    model = AutoModelForCausalLM.from_pretrained(found.path, dtype=torch.bfloat16)
    old = model.get_input_embeddings().weight.detach().float()
    everything = old.mean(0)
    rows = [old[ids].mean(0) if ids else everything for ids in spelled(own, other)]
    model.resize_token_embeddings(len(rows), mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.stack(rows))
    for role in ("bos", "eos", "pad"):
        number = getattr(other, f"{role}_token_id")
        setattr(model.config, f"{role}_token_id", number)
        setattr(model.generation_config, f"{role}_token_id", number)
    model.save_pretrained(options.folder)
    other.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
