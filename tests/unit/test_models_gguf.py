from __future__ import annotations

import os
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from roll_like.config.model import ModelConfig
from roll_like.errors import ConfigError
from roll_like.models import gguf as converter
from roll_like.models.load import load_tokenizer, resolve_model
from roll_like.models.modules import load_causal_lm

# how llama.cpp's format names what transformers calls …
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Order rows as the format has them: rotary pairs side by side instead of in two halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(model_dir: Path, file: Path) -> dict[str, torch.Tensor]:
    """Write the tiny model as 8-bit GGUF, and return the weights that dequantising must give."""
    model, tokenizer = load_causal_lm(model_dir, "float32"), load_tokenizer(ModelConfig(path=str(model_dir)))
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("Tiny title")
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_rope_dimension_count(32)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_vocab_size(512)
    writer.add_tokenizer_model("gpt2")
    tokens = tokenizer.convert_ids_to_tokens(range(512))
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if number < 3 else gguf.TokenType.NORMAL for number in range(512)])
    writer.add_token_merges(merges(tokenizer))
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    expected = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = tensor.numpy()
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name(name), array)
            expected[name] = tensor
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        # blocks run along rows, so that reordering rows and quantising can be swapped
        expected[name] = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind))
        heads = {"q": 4, "k": 2}.get(name.rsplit(".", 2)[1].removesuffix("_proj"))
        stored = array if heads is None else interleave(array, heads)
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def merges(tokenizer) -> list[str]:
    import json

    return [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]


@pytest.fixture(scope="module")
def tiny_gguf(tiny_model, tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return file, write_gguf(tiny_model, file)


def config(file: Path, cache: Path, **settings: object) -> ModelConfig:
    return ModelConfig(path=str(file), cache_dir=cache, **settings)


def test_every_weight_is_dequantised_exactly_and_in_its_place(tiny_gguf, tiny_model, tmp_path, capfd):
    file, expected = tiny_gguf
    lines: list[str] = []
    found = resolve_model(config(file, tmp_path, dtype="float32"), say=lines.append)
    assert capfd.readouterr().err == ""  # neither progress bars nor warnings
    assert found.path.parent == tmp_path / "models"
    assert found.path.name.startswith("tiny-")
    assert lines == [f"model: dequantising tiny.gguf to float32, once, into {found.path}"]
    model = load_causal_lm(found.path, "float32")
    weights = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=0, msg=name)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    settings = (found.path / "config.json").read_text()
    assert "quantization_config" not in settings
    assert "Tiny title" not in settings
    assert model.generation_config.eos_token_id == 2
    # near enough to the model before quantisation that its rotary halves cannot be swapped
    prompt = torch.arange(3, 60)[None]
    difference = model(prompt).logits - load_causal_lm(tiny_model, "float32")(prompt).logits
    assert difference.abs().max() < 0.05


def test_the_tokenizer_comes_along(tiny_gguf, tiny_model, tmp_path):
    converted = load_tokenizer(config(tiny_gguf[0], tmp_path))
    original = load_tokenizer(ModelConfig(path=str(tiny_model)))
    turns = [{"role": "user", "content": "Every river counts, à 12.50 €!\n"}]
    options = {"add_generation_prompt": True, "return_dict": False}
    assert converted.apply_chat_template(turns, **options) == original.apply_chat_template(turns, **options)
    assert (converted.eos_token_id, converted.pad_token_id) == (2, 0)


def test_a_conversion_is_kept_by_content_and_precision(tiny_gguf, tmp_path):
    file, _ = tiny_gguf
    copy = tmp_path / "elsewhere" / "tiny.gguf"
    copy.parent.mkdir()
    copy.write_bytes(file.read_bytes())
    lines: list[str] = []
    paths = [resolve_model(config(place, tmp_path), say=lines.append).path for place in (file, copy)]
    assert paths[0] == paths[1]
    assert len(lines) == 1
    other = resolve_model(config(file, tmp_path, dtype="float16"), say=lines.append).path
    assert other != paths[0]
    assert {parameter.dtype for parameter in load_causal_lm(other, "float16").parameters()} == {torch.float16}
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    assert resolve_model(config(copy, tmp_path), say=lines.append).path not in (*paths, other)
    assert len(lines) == 3


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, (1 << 24) + 12345, 1 << 26])
def test_the_hash_sees_both_ends_and_the_size(tmp_path, size):
    file = tmp_path / "x.gguf"
    seen = set()
    for length, change in ((size, None), (size + 1, None), (size, 0), (size, size - 1)):
        with file.open("wb") as stream:
            stream.truncate(length)
            if change is not None and size:
                stream.seek(change)
                stream.write(b"!")
        seen.add(converter._identity(file, "float32"))
    assert len(seen) == {0: 2, 1: 3}.get(size, 4)


def test_small_files_are_hashed_whole(tmp_path):
    file = tmp_path / "x.gguf"
    data = bytearray(3_000_000)
    file.write_bytes(data)
    before = converter._identity(file, "float32")
    for position in range(0, len(data), 99_991):
        changed = bytearray(data)
        changed[position] = 1
        file.write_bytes(changed)
        assert converter._identity(file, "float32") != before, position


def test_two_that_ask_at_once_convert_once(tiny_gguf, tmp_path):
    lines: list[str] = []
    paths: list[Path] = []
    both = threading.Barrier(2)

    def ask() -> None:
        both.wait()
        paths.append(resolve_model(config(tiny_gguf[0], tmp_path), say=lines.append).path)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(paths) == 2
    assert len(lines) == 1


def test_what_a_killed_conversion_left_is_removed(tiny_gguf, tmp_path):
    path = resolve_model(config(tiny_gguf[0], tmp_path), say=lambda line: None).path
    path.rename(path.with_name(f".{path.name}.k1ll3d"))
    assert resolve_model(config(tiny_gguf[0], tmp_path), say=lambda line: None).path.is_dir()
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]


def test_files_that_cannot_be_converted(tiny_gguf, tmp_path):
    (tmp_path / "text.gguf").write_text("no weights")
    with pytest.raises(ConfigError, match="does not begin with GGUF"):
        resolve_model(config(tmp_path / "text.gguf", tmp_path), say=lambda line: None)
    writer = gguf.GGUFWriter(tmp_path / "strange.gguf", "unheard_of")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"cannot be converted by transformers(.|\n)*Hugging Face directory"):
        resolve_model(config(tmp_path / "strange.gguf", tmp_path), say=lambda line: None)
    whole = tiny_gguf[0].read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot be converted by transformers"):
        resolve_model(config(tmp_path / "cut.gguf", tmp_path), say=lambda line: None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_by_permission(tiny_gguf, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match=r"cannot be made(.|\n)*model\.cache_dir"):
        resolve_model(config(tiny_gguf[0], tmp_path / "closed" / "cache"))


def test_a_cache_that_is_a_file(tiny_gguf, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be made(.|\n)*model\.cache_dir"):
        resolve_model(config(tiny_gguf[0], tmp_path / "file"))
