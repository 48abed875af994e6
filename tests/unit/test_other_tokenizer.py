"""`scripts/make_other_tokenizer.py`: embeddings of another vocabulary."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_model import make_other_model
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]


def test_tokens_of_both_keep_their_embedding_and_others_get_the_mean_of_what_spells_them(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = importlib.import_module("make_other_tokenizer")
    other = make_other_model(tmp_path / "other")  # "a" and "b" have each other's ids
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] |= {"qxq": len(tokenizer["model"]["vocab"])}
    file.write_text(json.dumps(tokenizer))
    monkeypatch.setattr(script, "resolve_model", lambda _: SimpleNamespace(path=tiny_model, tokenizer_path=tiny_model))
    monkeypatch.setattr(sys, "argv", ["make_other_tokenizer.py", str(tmp_path / "made"), "--tokenizer", str(other)])
    script.main()
    own, made = (AutoModelForCausalLM.from_pretrained(path) for path in (tiny_model, tmp_path / "made"))
    ids, new_ids = (AutoTokenizer.from_pretrained(path).get_vocab() for path in (tiny_model, tmp_path / "made"))
    old, new = (model.get_input_embeddings().weight.detach().float() for model in (own, made))
    assert (ids["a"], ids["b"]) == (new_ids["b"], new_ids["a"])
    for token in ("a", "b", "<|im_end|>"):
        assert torch.equal(new[new_ids[token]], old[ids[token]].bfloat16().float())
    mean = (2 * old[ids["q"]] + old[ids["x"]]) / 3
    assert torch.allclose(new[new_ids["qxq"]], mean, atol=1e-3)
    assert made(torch.tensor([[new_ids["qxq"]]])).logits.shape[-1] == len(new) == len(old) + 1
    assert made.config.eos_token_id == new_ids["<|im_end|>"]
