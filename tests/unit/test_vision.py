"""Images of rows: read, expanded into placeholders, trained on as transformers computes them, sampled by the engine."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config_files import changed
from engine_specs import engine_spec
from rank_specs import cpu_rank
from tiny_model import make_tiny_tokenizer
from tiny_vision import make_vision_model, picture, plain_logprobs, prompt, renderer, samples_of

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check.model import check_images
from roll_like.config.data import ConversationData, DataSource, PairData
from roll_like.config.demonstrations import DemonstrationsConfig
from roll_like.config.training import TrainingConfig
from roll_like.data import downloads
from roll_like.data.chat import Renderer
from roll_like.data.conversations import load_conversations
from roll_like.data.pairs import load_pairs
from roll_like.data.tasks import load_tasks
from roll_like.errors import ConfigError, DataError
from roll_like.inference.hf.config import HFConfig
from roll_like.inference.hf.engine import HFEngine
from roll_like.inference.interface import GenerateRequest, Sampling
from roll_like.inference.vllm import images as vllm_images
from roll_like.models.modules import load_causal_lm, load_model_config
from roll_like.models.vision import TowerRuns, image_processor, refuse_vision
from roll_like.policy_gradient.supervised import supervised_samples
from roll_like.rollout.demonstrations import TaskDemonstrations
from roll_like.training.backbone import use_row_attention
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.layout import micro_batches
from roll_like.training.policy import PolicyModule, tensors_of
from roll_like.types import Group


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(request.param, tmp_path_factory.mktemp("vision"))


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(downloads, "_PAUSE_SECONDS", 0.0)
    for seed in (1, 2):
        (tmp_path / f"{seed}.png").write_bytes(picture(seed, 56, 28 * seed).data)
    return tmp_path / "rows.jsonl"


def load(rows: Path, row: dict[str, Any], folder: Path, **source: Any) -> Any:
    rows.write_text(json.dumps(row) + "\n")
    return load_tasks([DataSource(path=str(rows), **source)], renderer(folder), 200).tasks[0]


TEXT = {"type": "text", "text": "What?"}
INLINE = base64.b64encode(picture(1, 56, 28).data).decode()


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "1.png"}}, TEXT]}]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "1.png", "text": None}, TEXT]}]},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, TEXT]}], "images": ["1.png"]},
        {"prompt": "<image>What?", "images": ["1.png"]},
        {"prompt": "What?", "images": [{"bytes": INLINE, "path": None}]},
        {"prompt": "What?", "images": f"data:image/png;base64,{INLINE}"},
    ],
)
def test_every_spelling_of_an_image_gives_the_same_prompt(row: dict[str, Any], rows: Path, folder: Path) -> None:
    task = load(rows, row, folder)
    (image,) = task.images
    assert image.picture.data == picture(1, 56, 28).data
    # 56 × 28 pixels are 4 × 2 patches, and four patches a token
    assert image.length == 2
    expected, _ = prompt(folder, [picture(1, 56, 28)], "What?")
    assert task.prompt_ids.tolist() == expected.tolist()
    token = image_processor(folder).token
    assert np.flatnonzero(task.prompt_ids == token).tolist() == [image.start, image.start + 1]
    assert task.messages[0]["content"] == f"[image: {image.picture.label}]What?"
    assert "images" not in task.metadata


def test_marks_say_where_images_are(rows: Path, folder: Path) -> None:
    task = load(rows, {"prompt": "a<image>b<image>", "images": ["1.png", "2.png"]}, folder)
    assert [image.length for image in task.images] == [2, 4]
    assert task.messages[0]["content"] == f"a[image: {rows.parent}/1.png]b[image: {rows.parent}/2.png]"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "images": ["3.png"]}, r"rows.jsonl:1: the image .*3\.png cannot be read: No such file"),
        ({"prompt": "a", "images": ["rows.jsonl"]}, "rows.jsonl is no image that Pillow can read"),
        ({"prompt": "a", "images": [7]}, "expected an image as a path.* found int"),
        (
            {"prompt": "a", "images": ["http://127.0.0.1:9/1.png"]},
            "jsonl:1: http.*png cannot be downloaded: .*refused",
        ),
        (
            {"prompt": "a", "images": ["https:///1.png"]},
            "jsonl:1: .*1.png cannot be downloaded: .*no host given",
        ),
        ({"prompt": "<image>a", "images": ["1.png", "2.png"]}, "has 2 images, and its messages show 1"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, r"shows more images than the row has \(0\)"),
        ({"prompt": "a<|image_pad|>", "images": ["1.png"]}, "wrote 2 placeholders for 1 images"),
    ],
)
def test_what_is_wrong_with_images_is_said(row: dict[str, Any], said: str, rows: Path, folder: Path) -> None:
    with pytest.raises(DataError, match=said):
        load(rows, row, folder)


def test_demonstrations_are_behind_the_images_of_their_prompt(rows: Path, folder: Path) -> None:
    task = load(rows, {"prompt": "What?", "images": ["1.png"], "demonstration": "A cat."}, folder)
    demonstrations = TaskDemonstrations(renderer(folder), DemonstrationsConfig(off_policy={}), 64)
    (trajectory,) = demonstrations.of(task)
    assert len(task.images) == 1
    assert trajectory.images == task.images
    (sample,) = supervised_samples([Group(task=task, samples=(), failures=())], demonstrations.of)
    assert sample.images == task.images


class ImageServer(ThreadingHTTPServer):
    """Has pictures 1 and 2; the first request for 2 fails, and all for 3. Counts requests."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        super().__init__(("127.0.0.1", 0), _Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: ImageServer

    def do_GET(self) -> None:
        self.server.asked[self.path] += 1
        found = {"/1.png": picture(1, 56, 28), "/2.png": picture(2, 56, 56)}.get(self.path.partition("?")[0])
        failed = self.path == "/2.png" and self.server.asked[self.path] == 1
        self.send_response(503 if failed else 200 if found else 404)
        self.end_headers()
        self.wfile.write(found.data if found and not failed else b"")

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageServer]:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    with ImageServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_images_on_servers_are_downloaded_once_and_kept(rows: Path, folder: Path, server: ImageServer) -> None:
    part = {"type": "image_url", "image_url": {"url": f"{server.url}/2.png"}}
    lines = [
        {"prompt": "<image>What?", "images": [f"{server.url}/1.png?size=7"]},
        {"prompt": [{"role": "user", "content": [part, TEXT]}]},
        {"prompt": "<image>What?", "images": [{"bytes": None, "path": f"{server.url}/2.png"}]},
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(2):
        tasks = load_tasks([DataSource(path=str(rows))], renderer(folder), 200).tasks
        data = [each.images[0].picture.data for each in tasks]
        assert data == [picture(1, 56, 28).data, *[picture(2, 56, 56).data] * 2]
        assert tasks[0].messages[0]["content"] == f"[image: {server.url}/1.png?size=7]What?"
        assert server.asked == {"/1.png?size=7": 1, "/2.png": 2}
    kept = list((Path.home() / ".cache" / "roll_like" / "images").iterdir())
    assert len(kept) == 2
    rows.write_text(json.dumps({"prompt": "a", "images": [f"{server.url}/3.png"]}) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: http.*/3\.png cannot be downloaded: .*404"):
        load_tasks([DataSource(path=str(rows))], renderer(folder), 200)
    assert server.asked["/3.png"] == 2  # once ahead, once for its row


def test_a_text_model_refuses_images_and_can_ignore_a_column(rows: Path) -> None:
    rows.write_text(json.dumps({"prompt": "What?", "images": ["1.png"]}) + "\n")
    text = Renderer(make_tiny_tokenizer())
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row has images, and the model or the pipeline takes texts"):
        load_tasks([DataSource(path=str(rows))], text, 200)
    (task,) = load_tasks([DataSource(path=str(rows), images_field=None)], text, 200).tasks
    assert task.images == ()
    assert task.metadata == {"images": ["1.png"]}


def test_conversations_and_pairs_hold_their_images(rows: Path, folder: Path) -> None:
    shown = {"type": "image", "image": "1.png"}
    turns = [
        {"role": "user", "content": [shown, TEXT]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [{"type": "image", "image": "2.png"}]},
        {"role": "assistant", "content": "blue"},
    ]
    rows.write_text(json.dumps({"messages": turns}) + "\n")
    render = renderer(folder)
    (sample,) = load_conversations(ConversationData(sources=[{"path": str(rows)}]), render)
    token = image_processor(folder).token
    places = [place for image in sample.images for place in range(image.start, image.start + image.length)]
    assert np.flatnonzero(sample.token_ids == token).tolist() == places
    assert [image.length for image in sample.images] == [2, 4]
    assert render.decode(sample.token_ids[sample.loss_mask]) == "red<|im_end|>blue<|im_end|>"
    rows.write_text(json.dumps({"prompt": turns[:1], "chosen": "red", "rejected": "blue"}) + "\n")
    (pair,) = load_pairs(PairData(sources=[{"path": str(rows)}]), render)
    assert pair.chosen.images == pair.rejected.images == sample.images[:1]


@pytest.mark.parametrize(
    "layout", [{"share_prompts": True}, {"share_prompts": False}, {"share_prompts": True, "packing": True}]
)
def test_rows_with_images_give_what_transformers_gives_alone(layout: dict[str, Any], folder: Path) -> None:
    samples = samples_of(folder)
    theirs = load_causal_lm(folder, "float32").eval()
    expected, loss = [], torch.zeros(())
    for index, sample in enumerate(samples):
        found = plain_logprobs(theirs, folder, sample.token_ids, sample.images)[sample.loss_mask[1:]]
        expected.append(found.detach())
        loss = loss + np.sin(index + 1) * found.sum()
    loss.backward()
    ours = load_causal_lm(folder, "float32").eval()
    use_row_attention(ours, row_sharing=None)
    policy = PolicyModule(ours, chunk_tokens=64, chunk_vocab=512)
    (batches,) = micro_batches(samples, ranks=1, max_tokens=400, **layout)
    assert sum(len(batch.images) for batch in batches) == (4 if layout["share_prompts"] else 8)
    total = torch.zeros(())
    places: dict[tuple[int, int], torch.Tensor] = {}
    for batch in batches:
        logprobs, _ = policy(*tensors_of(batch, torch.device("cpu")), 1.0)
        total = total + (logprobs * torch.from_numpy(np.sin(batch.sample_ids + 1.0)).float()).sum()
        places |= {
            (int(sample), int(token)): value
            for sample, token, value in zip(batch.sample_ids, batch.target_ids, logprobs.detach(), strict=True)
        }
    total.backward()
    computed = torch.stack([places[place] for place in sorted(places)])
    assert float((computed - torch.cat(expected)).abs().max()) < 1e-4
    gradients = dict(ours.named_parameters())
    largest = max(float(each.grad.abs().max()) for each in theirs.parameters())
    for name, parameter in theirs.named_parameters():
        assert float((parameter.grad - gradients[name].grad).abs().max()) < 1e-4 * largest, name


def test_a_placeholder_that_was_sampled_stands_for_no_image(folder: Path) -> None:
    sample = samples_of(folder)[0]
    tokens = sample.token_ids.copy()
    tokens[sample.prompt_length + 1] = image_processor(folder).token
    model = load_causal_lm(folder, "float32").eval()
    use_row_attention(model, row_sharing=None)
    policy = PolicyModule(model, chunk_tokens=64, chunk_vocab=512)
    found = []
    for ids in (sample.token_ids, tokens):
        ((batch,),) = micro_batches([replace(sample, token_ids=ids)], ranks=1, max_tokens=99, share_prompts=False)
        found.append(policy(*tensors_of(batch, torch.device("cpu")), 1.0)[0].detach())
    assert float(found[0][0]) == pytest.approx(float(found[1][0]), abs=1e-5)
    assert float((found[0] - found[1])[1:].abs().max()) > 1e-4


async def test_the_transformers_engine_samples_what_the_trainer_computes(folder: Path) -> None:
    begin, images = prompt(folder, [picture(1), picture(2, 100, 60)], "Which?")
    engine = HFEngine(HFConfig(), engine_spec(folder))
    await engine.start()
    request = GenerateRequest(request_id="a", prompt_ids=begin, sampling=Sampling(max_tokens=12), seed=0, images=images)
    await engine.submit([request])
    found: list[Any] = []
    while not found:
        found = await engine.poll(10)
    await engine.close()
    (generation,) = found
    model = load_causal_lm(folder, "float32").eval()
    tokens = np.concatenate([begin, generation.token_ids])
    with torch.no_grad():
        same = plain_logprobs(model, folder, tokens, images)[len(begin) - 1 :].numpy()
    assert np.abs(same - generation.logprobs).max() < 1e-4
    other_begin, other_images = prompt(folder, [picture(5), picture(6, 100, 60)], "Which?")
    assert other_begin.tolist() == begin.tolist()
    with torch.no_grad():
        other = plain_logprobs(model, folder, tokens, other_images)[len(begin) - 1 :].numpy()
    assert np.abs(other - generation.logprobs).max() > 1e-3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attention": "varlen"}, r"set training\.attention: dense"),
        ({"lora": {}, "freeze_vision": False}, r"set training\.freeze_vision: true, or remove training\.lora"),
        ({"workers": 2, "sequence_parallel": 2}, r"set training\.sequence_parallel: 1"),
    ],
)
def test_settings_that_images_are_not_for_are_refused(settings: dict[str, Any], said: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        refuse_vision(load_model_config(folder), TrainingConfig(**settings), "training")
    assert re.search(said, str(error.value))


def test_an_engine_that_takes_no_images_is_refused_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(kind: str, device: str = "cpu") -> list[str]:
        found: list[Any] = []
        where = {"device": device, "devices_per_node": 1, "device_mapping": {"training": "0", "inference": "0"}}
        values = changed(inference={"type": kind}, model={"path": str(folder)}, resources=where)
        config = RLVRConfig.from_values(values)
        # rows with images are counted whatever the engine is
        assert check_images(config, config.model, found) is image_processor(folder)
        return [str(each) for each in found]

    monkeypatch.setattr(vllm_images, "find_spec", lambda name: None)
    (finding,) = said("vllm")
    assert finding.startswith("error: inference.type: ")
    assert re.search(
        "vllm cannot serve .* imports torchvision, which is not installed.*set inference.type: hf", finding
    )
    assert said("hf") == []
    assert said("vllm", "cuda") == []
    (finding,) = said("sglang", "cuda")
    assert "this engine takes no images" in finding
    monkeypatch.setattr(vllm_images, "find_spec", lambda name: object())
    assert said("vllm") == []


@pytest.mark.parametrize("family", ["of the fixture", "qwen2_vl"])
def test_a_text_whose_ranks_run_the_tower_has_the_bits_of_one_without(
    family: str, folder: Path, tmp_path: Path
) -> None:
    model = load_causal_lm(folder if family == "of the fixture" else make_vision_model(family, tmp_path), "float32")
    use_row_attention(model.eval(), row_sharing=None)
    policy, calls = PolicyModule(model, chunk_tokens=64, chunk_vocab=512), []
    tower = model.base_model.visual
    tower.register_forward_hook(lambda *_: calls.append(1))
    texts = [sample for sample in samples_of(folder) if not sample.images]
    ((batch,),) = micro_batches(texts, ranks=1, max_tokens=400, share_prompts=True)
    found = []
    every: list[TowerRuns] = ["where there are images", "with gradients", "always"]
    for runs in every:
        policy.tower = runs
        model.zero_grad()
        calls.clear()
        logprobs, entropies = policy(*tensors_of(batch, torch.device("cpu")), 1.0)
        logprobs.sum().backward()
        assert len(calls) == (runs != "where there are images")
        found.append((logprobs.detach(), entropies.detach(), model.get_input_embeddings().weight.grad.clone()))
        gradients = [each.grad for each in tower.parameters()]
        if not calls:
            assert gradients == [None] * len(gradients)
        else:
            assert all(each is not None and not each.any() for each in gradients)
        with torch.no_grad():
            policy(*tensors_of(batch, torch.device("cpu")), 1.0)
        assert len(calls) == {"where there are images": 0, "with gradients": 1, "always": 2}[runs]
    for other in found[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("settings", "frozen", "runs"),
    [
        ({"zero_stage": 3, "freeze_vision": False}, False, "where there are images"),
        ({"workers": 2, "zero_stage": 2}, False, "where there are images"),
        ({"workers": 2, "zero_stage": 2, "freeze_vision": False}, True, "where there are images"),
        ({"workers": 2, "zero_stage": 1, "freeze_vision": False}, False, "with gradients"),
        ({"workers": 2, "zero_stage": 3}, True, "always"),
        ({"workers": 2, "zero_stage": 3, "backend": "fsdp2"}, False, "always"),
    ],
)
def test_the_tower_runs_without_images_only_where_other_ranks_wait_for_it(
    settings: dict[str, Any], frozen: bool, runs: TowerRuns, folder: Path
) -> None:
    objective: Any = LanguageModelObjective(settings=TrainingConfig(**settings))
    assert objective.load(cpu_rank(objective, folder, frozen=frozen)).tower == runs
