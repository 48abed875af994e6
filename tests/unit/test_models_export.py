from __future__ import annotations

import copy
import json
import resource
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from roll_like.config.model import ModelConfig
from roll_like.errors import CheckpointError
from roll_like.models.card import ModelCard, render_model_card
from roll_like.models.export import _exchanged, save_hf_directory
from roll_like.models.load import load_tokenizer
from roll_like.models.modules import load_causal_lm

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def trained(tiny_model):
    """A model whose weights differ from the files, and its tokenizer."""
    model = load_causal_lm(tiny_model, "float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    return model, load_tokenizer(ModelConfig(path=str(tiny_model)))


def assert_same(directory: Path, model) -> None:
    prompt = torch.arange(40)[None]
    loaded = load_causal_lm(directory, "float32")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    torch.testing.assert_close(loaded(prompt).logits, model(prompt).logits, rtol=0, atol=0)


def test_an_export_is_the_model(trained, tmp_path):
    model, tokenizer = trained
    out = save_hf_directory(model.state_dict(), model.config, tokenizer, tmp_path / "runs" / "export")
    assert_same(out, model)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    again = load_tokenizer(ModelConfig(path=str(out)))
    turns = [{"role": "user", "content": "hi"}]
    assert again.apply_chat_template(turns, tokenize=False) == tokenizer.apply_chat_template(turns, tokenize=False)
    assert [path.name for path in out.parent.iterdir()] == ["export"]  # no temporary directory stays
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert HEAD not in file.keys()  # noqa: SIM118 - safe_open is no mapping


@pytest.mark.parametrize("left_out", [HEAD, EMBEDDING])
def test_one_copy_of_tied_weights_is_enough(trained, tmp_path, left_out):
    model, tokenizer = trained
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != left_out}
    assert_same(save_hf_directory(weights, model.config, tokenizer, tmp_path / "out"), model)


def test_tied_weights_that_differ_are_refused(trained, tmp_path):
    model, tokenizer = trained
    weights = dict(model.state_dict())
    weights[HEAD] = weights[HEAD] + 1
    with pytest.raises(CheckpointError, match=r"ties model\.embed_tokens\.weight and lm_head\.weight, but .* differ"):
        save_hf_directory(weights, model.config, tokenizer, tmp_path / "out")


def test_views_of_one_flat_buffer_are_written(trained, tmp_path):
    model, tokenizer = trained
    state = model.state_dict()
    flat = torch.cat([tensor.flatten() for tensor in state.values()])
    parts = flat.split([tensor.numel() for tensor in state.values()])
    views = {name: part.view(state[name].shape) for name, part in zip(state, parts, strict=True)}
    assert_same(save_hf_directory(views, model.config, tokenizer, tmp_path / "out"), model)


def test_no_more_than_one_file_is_in_memory(trained, tmp_path, monkeypatch):
    model, tokenizer = trained
    small, largest = 60_000, max(tensor.nbytes for tensor in model.state_dict().values())
    monkeypatch.setattr("roll_like.models.shards.SHARD_BYTES", small)
    live: dict[int, int] = {}
    peak = [0]

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        live[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(storage, live.pop, storage.data_ptr())
        return tensor

    def weights():
        for name, tensor in model.named_parameters():
            yield name, counted(tensor.detach().clone())

    def save(tensors, *arguments, **options):
        peak.append(sum(live.values()) + sum(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, *arguments, **options)

    monkeypatch.setattr("safetensors.torch.save_file", save)
    out = save_hf_directory(weights(), model.config, tokenizer, tmp_path / "out")
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert max(peak) <= max(small, largest) + largest < size  # a file, and the parameter that comes next
    assert_same(out, model)


def test_files_are_split_and_indexed_as_transformers_does(trained, tmp_path, monkeypatch):
    model, tokenizer = trained
    monkeypatch.setattr("roll_like.models.shards.SHARD_BYTES", 60_000)
    out = save_hf_directory(model.state_dict(), model.config, tokenizer, tmp_path / "out")
    copy.deepcopy(model).save_pretrained(tmp_path / "theirs", max_shard_size=60_000)  # writes into the configuration
    ours, theirs = (
        json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (out, tmp_path / "theirs")
    )
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    files = sorted({*ours["weight_map"].values()})
    assert files == [f"model-{index:05d}-of-{len(files):05d}.safetensors" for index in range(1, len(files) + 1)]
    assert sorted(path.name for path in out.glob("model*")) == [*files, "model.safetensors.index.json"]
    assert len(files) > 2
    for name, tensor in model.state_dict().items():
        if name != HEAD:
            with safe_open(out / ours["weight_map"][name], framework="pt") as file:
                assert torch.equal(file.get_tensor(name), tensor)
    assert all((out / file).stat().st_size < 60_000 + 4_000 or len(load_file(out / file)) == 1 for file in files)


def test_the_precision_that_is_asked_for(trained, tmp_path):
    model, tokenizer = trained
    out = save_hf_directory(model.state_dict(), model.config, tokenizer, tmp_path / "out", dtype="bfloat16")
    with safe_open(out / "model.safetensors", framework="pt") as file:
        stored = file.get_tensor(EMBEDDING)
    assert torch.equal(stored, model.state_dict()[EMBEDDING].bfloat16())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.dtype == model.config.dtype == torch.float32  # the trainer's own model is left alone


def test_an_export_generates_with_a_cache(trained, tmp_path):
    model, tokenizer = trained
    assert model.config.use_cache is False
    out = save_hf_directory(model.state_dict(), model.config, tokenizer, tmp_path / "out")
    for file in ("config.json", "generation_config.json"):
        assert json.loads((out / file).read_text())["use_cache"] is True
    assert model.config.use_cache is False


def test_weights_that_do_not_fit(trained, tmp_path):
    model, tokenizer = trained
    name = "model.layers.0.mlp.up_proj.weight"
    for change, message in (
        ({name: None}, f"{name}, of shape"),
        ({name: torch.zeros(3)}, rf"hold {name} in shape \(3,\); the model's configuration says \(128, 64\)"),
        ({"stranger": torch.zeros(3)}, "1 tensors that the model's configuration does not know; first: stranger"),
    ):
        weights = {key: value for key, value in (model.state_dict() | change).items() if value is not None}
        with pytest.raises(CheckpointError, match=message):
            save_hf_directory(weights, model.config, tokenizer, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_earlier_export(trained, tmp_path, monkeypatch):
    model, tokenizer = trained
    out = save_hf_directory(model.state_dict(), model.config, tokenizer, tmp_path / "out")

    changed = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    message = r"cannot be written to (.|\n)*(No space left|File too large)(.|\n)*free space"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the weights do not fit
    try:
        with pytest.raises(CheckpointError, match=message):
            save_hf_directory(changed, model.config, tokenizer, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def full(directory: Path) -> None:
        raise Exception("No space left on device (os error 28)")  # what tokenizers raises

    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with pytest.raises(CheckpointError, match=message):
        save_hf_directory(changed, model.config, tokenizer, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert_same(out, model)
    monkeypatch.undo()
    save_hf_directory(changed, model.config, tokenizer, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor(EMBEDDING), changed[EMBEDDING])


def test_generation_settings_of_the_base_model_are_kept(trained, tmp_path):
    model, tokenizer = trained
    base = tmp_path / "base"
    base.mkdir()
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.6}')
    out = save_hf_directory(model.state_dict(), model.config, tokenizer, tmp_path / "out", base_dir=base)
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [2, 7], "temperature": 0.6}


@pytest.mark.parametrize(
    ("stated", "of_config", "expected"),
    [
        ('{"eos_token_id": 0, "top_p": 0.9}', 0, [0, 2]),
        ('{"eos_token_id": 0, "top_p": 0.9}', [0, 7], [0, 2]),
        ('{"top_p": 0.9}', [7, 0], [0, 7, 2]),
        (None, 0, [0, 2]),
        (None, [0, 7], [0, 7, 2]),
    ],
)
def test_what_ends_a_turn_ends_what_engines_generate(trained, tmp_path, stated, of_config, expected):
    """A base model's files name the end of a document; its training on conversations taught the template's end."""
    model, tokenizer = trained
    base = tmp_path / "base"
    base.mkdir()
    if stated is not None:
        (base / "generation_config.json").write_text(stated)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    config = copy.deepcopy(model.config)
    config.eos_token_id = of_config
    out = save_hf_directory(model.state_dict(), config, tokenizer, tmp_path / "out", base_dir=base)
    written = json.loads((out / "generation_config.json").read_text())
    assert written["eos_token_id"] == expected
    assert stated is None or written["top_p"] == 0.9
    assert GenerationConfig.from_pretrained(out).eos_token_id == expected


def test_added_tokens_and_templates_survive(trained, tiny_model, tmp_path):
    """Tokens that are added after pretraining, special and ordinary, and the files of chat templates."""
    model, tokenizer = trained
    base = shutil.copytree(tiny_model, tmp_path / "base")
    changed = copy.deepcopy(tokenizer)
    changed.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    changed.add_tokens(["<think>"])
    changed.save_pretrained(base)
    (base / "chat_template.jinja").write_text("[{{ messages[0].content }}]<|call|>")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("({{ messages[0].content }})")
    before = load_tokenizer(ModelConfig(path=str(base)))
    assert before.convert_tokens_to_ids(["<|call|>", "<think>"]) == [512, 513]

    out = save_hf_directory(model.state_dict(), model.config, before, tmp_path / "out", base_dir=base)
    after = load_tokenizer(ModelConfig(path=str(out)))
    assert (out / "chat_template.jinja").read_text() == "[{{ messages[0].content }}]<|call|>"
    assert after.get_added_vocab() == before.get_added_vocab()
    assert after.all_special_tokens == before.all_special_tokens
    turns = [{"role": "user", "content": "<think>hi"}]
    for name, written in ((None, "[<think>hi]<|call|>"), ("tool_use", "(<think>hi)")):
        assert after.apply_chat_template(turns, chat_template=name, tokenize=False) == written
        tokens = after.encode(written)
        assert tokens == before.encode(written)
        assert 513 in tokens
    assert after.encode("<|call|>") == [512]
    assert after.decode([512, 513], skip_special_tokens=True) == "<think>"


def test_the_card_and_its_picture_are_beside_the_weights(trained, tmp_path):
    model, tokenizer = trained
    curves = tmp_path / "curves.png"
    curves.write_bytes(b"picture")
    card = ModelCard(name="quickstart", base_model="org/base", pipeline="rlvr", steps=40, curves=curves)
    out = save_hf_directory(model.state_dict(), model.config, tokenizer, tmp_path / "out", card)
    assert (out / "README.md").read_text() == render_model_card(card)
    assert (out / "curves.png").read_bytes() == b"picture"


#: Killed before each step in which Python changes files: prints what a reader then finds.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from roll_like.models import export

folder, exchanges = Path(sys.argv[1]), sys.argv[2] == "True"
if not exchanges:
    export._exchanged = lambda one, other: False
killed, steps = True, 0
while killed:
    new, out = folder / f"{steps}-new", folder / f"{steps}-out"
    for place in (new, out):
        place.mkdir()
        (place / "config.json").write_text(place.name[-3:])
    child = os.fork()
    if child == 0:
        left = steps

        def step(event, arguments):
            global left
            if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(step)
        export._swap(new, out)
        shutil.rmtree(new, ignore_errors=True)
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    config = out / "config.json"
    print(config.read_text() if config.exists() else "nothing")
    steps += 1
"""


@pytest.mark.parametrize("exchanges", [True, False])
def test_there_is_a_model_whenever_the_process_is_killed(tmp_path, exchanges):
    """But for an instant where the file system cannot let two directories change places."""
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    if exchanges and not _exchanged(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system cannot")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(exchanges)], capture_output=True, text=True, check=True
    )
    found = done.stdout.split()
    assert found[-1] == "new"
    if exchanges:
        assert set(found) == {"new"}  # the first step that Python sees removes the earlier model
        assert len(found) > 2
    else:
        assert found.count("nothing") == 1
        assert found[0] == "out"
