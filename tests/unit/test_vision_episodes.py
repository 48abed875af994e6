"""Images in episodes: every turn's tokens, what engine and trainer compute with them, agents' requests, and files."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Hashable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from engine_specs import engine_spec
from fake_policy import FakePolicy, Unqueued, episode_settings
from PIL import Image
from proxy_rig import rig
from tiny_model import make_tiny_tokenizer
from tiny_vision import make_vision_model, picture, plain_logprobs, renderer

from roll_like.agents.chat_api import data_url
from roll_like.agents.conversation import Conversation, Segmented
from roll_like.agents.env_manager import _with_shared_tasks, episode_task
from roll_like.agents.env_worker import HostedEnvironment
from roll_like.agents.episode import EnvironmentSpec, EpisodeLimits, Started, Stepped, play
from roll_like.algorithms.advantages.base import policy_samples
from roll_like.data.chat import Renderer
from roll_like.data.images import encoded as encoded_picture
from roll_like.data.images import pictures_of
from roll_like.data.shown_images import picture_of
from roll_like.envs import DiscreteActions, FewShot, History, ImageText, check_env, make_env
from roll_like.envs.returns import shown_messages, state_of
from roll_like.errors import ConfigError, EnvError, GenerationError
from roll_like.inference.hf.config import HFConfig
from roll_like.inference.hf.engine import HFEngine
from roll_like.inference.interface import FailedGeneration, GenerateRequest, Generation, Sampling
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import VLLMEngine
from roll_like.inference.vllm.images import image_input, image_prompt
from roll_like.models.modules import load_causal_lm
from roll_like.rollout.collection import Collected
from roll_like.rollout.metrics import rollout_metrics, rollout_rows
from roll_like.rollout.storage import read_groups, write_groups
from roll_like.rollout.thumbnails import keep_thumbnails, thumbnails_folder
from roll_like.training.backbone import use_row_attention
from roll_like.training.layout import micro_batches
from roll_like.training.policy import PolicyModule, tensors_of
from roll_like.training.rows import build_rows
from roll_like.types import Group, Picture, Scored, Segment, StopReason


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen2_vl", "qwen3_5"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(request.param, tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("vision"))


def shown(*parts: Picture | str, role: str = "user") -> dict[str, Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": role, "content": content}


def said(render: Renderer, text: str) -> tuple[np.ndarray, np.ndarray]:
    ids = np.asarray([*render.encode(text), *render.end_ids], np.int32)
    return ids, np.zeros(len(ids), np.float32)


def places(segment: Segmented | Any) -> list[int]:
    return [place for image in segment.images for place in range(image.start, image.start + image.length)]


# ---- conversations ---------------------------------------------------------------------------------


def test_turns_have_the_tokens_of_one_rendering_and_say_where_images_are(folder: Path) -> None:
    render = renderer(folder)
    token = render.images.token
    first = [shown("Where?", picture(1, 56, 28)), shown("More.", role="system")][::-1]
    later = [shown(picture(2, 56, 56), picture(3, 28, 28), "And now?")]
    conversation = Conversation(render)
    prompt = conversation.start(first)
    assert np.flatnonzero(prompt == token).tolist() == places(conversation)
    conversation.sampled(*said(render, "left"))
    prompt = conversation.observe(later)
    assert [image.picture.label for image in conversation.images] == ["1.png", "2.png", "3.png"]
    assert [image.length for image in conversation.images] == [2, 4, 1]
    assert np.flatnonzero(prompt == token).tolist() == places(conversation)
    conversation.sampled(*said(render, "up"))
    (segment,) = conversation.segments()
    history = [*first, {"role": "assistant", "content": "left"}, *later]
    written = render.encode(render.render(history, ()))
    whole, images = render.expanded(written, [picture(1, 56, 28), picture(2, 56, 56), picture(3, 28, 28)], "here")
    assert segment.token_ids[: len(whole)].tolist() == whole.tolist()
    assert segment.images == images
    assert conversation.cuts == 0


def test_images_after_the_last_answer_are_left_out(folder: Path) -> None:
    render = renderer(folder)
    conversation = Conversation(render)
    conversation.start([shown(picture(1, 56, 28))])
    conversation.sampled(*said(render, "left"))
    conversation.observe([shown(picture(2, 56, 56))])
    (segment,) = conversation.segments()
    assert [image.picture.label for image in segment.images] == ["1.png"]
    assert len(places(segment)) == np.count_nonzero(segment.token_ids == render.images.token)


def test_a_copy_goes_on_by_itself(folder: Path) -> None:
    render = renderer(folder)
    conversation = Conversation(render)
    conversation.start([shown(picture(1, 56, 28))])
    conversation.sampled(*said(render, "left"))
    other = conversation.copy()
    conversation.observe([shown(picture(2, 56, 56))])
    other.observe([shown("Nothing to see.")])
    assert len(conversation.images) == 2
    assert len(other.images) == 1


def test_only_images_are_images_whatever_texts_spell(folder: Path) -> None:
    render = renderer(folder)
    token = render.images.token
    conversation = Conversation(render)
    prompt = conversation.start([shown("It says <|image_pad|>:", picture(1, 56, 28))])
    assert np.flatnonzero(prompt == token).tolist() == places(conversation)
    conversation.sampled(*said(render, "a<|image_pad|>b"))  # the policy may sample the token
    prompt = conversation.observe([shown("You wrote a<|image_pad|>b", picture(2, 56, 56))])
    assert conversation.cuts == 0
    sampled = set(np.flatnonzero(prompt == token).tolist()) - set(places(conversation))
    assert len(sampled) == 1
    assert [image.length for image in conversation.images] == [2, 4]
    conversation.sampled(*said(render, "c"))
    prompt = conversation.observe([shown(picture(3, 28, 28))])
    assert len(conversation.images) == 3


def test_a_history_that_is_rendered_again_has_its_images_and_no_more(folder: Path) -> None:
    render = renderer(folder)
    template = render.tokenizer.chat_template
    try:  # the first answer is written otherwise once there is another
        render.tokenizer.chat_template = template.replace(
            "{{ message.content }}",
            "{% if message.role == 'assistant' and not loop.last %}Earlier: {{ message.content }}"
            "{% else %}{{ message.content }}{% endif %}",
        )
        conversation = Conversation(Renderer(render.tokenizer, images=render.images))
        conversation.start([shown(picture(1, 56, 28), "Where?")])
        conversation.sampled(*said(render, "ab<|image_pad|>c"))
        prompt = conversation.observe([shown("And?", picture(2, 56, 56))])
        assert conversation.cuts == 1
        assert np.flatnonzero(prompt == render.images.token).tolist() == places(conversation)
        assert [image.length for image in conversation.images] == [2, 4]
        conversation.sampled(*said(render, "c"))
        first, second = conversation.segments()
        assert len(first.images) == 1
        assert len(second.images) == 2
        # what follows the turn was read for the first time: from its end on
        assert render.decode(second.token_ids[second.observed_from :]).startswith("\n<|im_start|>user\nAnd?")
    finally:
        render.tokenizer.chat_template = template


@pytest.mark.parametrize(
    ("size", "found"), [((6000, 20), "aspect ratio"), ((1, 1), None), ((3000, 1000), None)], ids=str
)
def test_sizes_are_those_of_the_processor(size: tuple[int, int], found: str | None, folder: Path) -> None:
    conversation = Conversation(renderer(folder))
    if found is not None:
        with pytest.raises(EnvError, match=found):
            conversation.start([shown(picture(1, *size))])
        return
    conversation.start([shown(picture(1, *size))])
    (image,) = conversation.images
    assert 1 <= image.length <= 16  # the processor's largest image has 112 × 112 pixels


# ---- episodes with an engine -----------------------------------------------------------------------


class Seen:
    """Shows a picture, then two, then a text, then a picture in the result of a tool."""

    turns: Sequence[Sequence[Picture | str]] = (
        (picture(11, 56, 84), picture(12, 84, 56), "Which?"),
        ("Go on.",),
        (picture(13, 56, 56),),
    )

    def __init__(self, first: int = 10) -> None:
        self.first, self.number = first, 0

    async def reset(self, seed: int) -> Started:
        return Started(messages=[shown(picture(self.first, 70, 90), "Where?")], tools=[], state="0")

    async def step(self, text: str) -> Stepped:
        parts = self.turns[self.number] if self.number < len(self.turns) else ("The end.",)
        role, self.number = "tool" if self.number == 2 else "user", self.number + 1
        over = self.number > len(self.turns)
        return Stepped(
            messages=[shown(*parts, role=role)],
            reward=float(over),
            terminated=over,
            truncated=False,
            success=None,
            state=str(self.number),
            fresh=self.fresh,
        )

    fresh = False

    async def close(self) -> None:
        """Nothing is open."""


class Sampled(Unqueued):
    """Samples with an engine, one request at a time."""

    def __init__(self, engine: HFEngine) -> None:
        super().__init__()
        self.engine, self.requests = engine, list[GenerateRequest]()

    async def generate(self, request: GenerateRequest, affinity_key: Hashable, urgent: bool = False) -> Generation:
        self.requests.append(request)
        await self.engine.submit([request])
        while True:
            for one in await self.engine.poll(10):
                assert isinstance(one, Generation), one
                return one


def settings_of(**changes: Any) -> Any:
    spec = EnvironmentSpec(name="seen", env_id="test/Seen-v0", kwargs={})
    return episode_settings(task=episode_task(spec, 7), sampling=Sampling(max_tokens=5), **changes)


async def played(folder: Path, environments: Sequence[Any]) -> tuple[Group[Scored], list[GenerateRequest]]:
    engine = HFEngine(HFConfig(), engine_spec(folder))
    await engine.start()
    generator, samples = Sampled(engine), list[Scored]()
    for index, environment in enumerate(environments):
        settings = settings_of(sample_index=index, sampling_seed=index)
        samples += await play(environment, generator, renderer(folder), settings)
    await engine.close()
    shared = _with_shared_tasks(samples)
    return Group(task=shared[0].trajectory.task, samples=shared, failures=()), generator.requests


def trained(folder: Path, group: Group[Scored], **layout: Any) -> list[np.ndarray]:
    """Return what the trainer computes for each sequence's sampled tokens."""
    model = load_causal_lm(folder, "float32").eval()
    use_row_attention(model, row_sharing=None)
    policy = PolicyModule(model, chunk_tokens=64, chunk_vocab=512)
    samples = policy_samples([group])
    found = [np.zeros(len(sample), np.float32) for sample in samples]
    (batches,) = micro_batches(samples, ranks=1, max_tokens=600, **layout)
    for batch in batches:
        with torch.no_grad():
            logprobs, _ = policy(*tensors_of(batch, torch.device("cpu")), 1.0)
        for sample, token, value in zip(batch.sample_ids, batch.target_ids, logprobs.tolist(), strict=True):
            found[sample][token] = value
    return found


@pytest.mark.parametrize(
    "layout", [{"share_prompts": True}, {"share_prompts": False}, {"share_prompts": True, "packing": True}], ids=str
)
async def test_engine_and_trainer_see_the_same_images_in_every_turn(layout: dict[str, Any], family: Path) -> None:
    group, requests = await played(family, [Seen(), Seen()])
    assert [len(request.images) for request in requests[:4]] == [1, 3, 3, 4]
    samples, plain = policy_samples([group]), load_causal_lm(family, "float32").eval()
    for sample, found in zip(samples, trained(family, group, **layout), strict=True):
        assert [image.picture.label for image in sample.images] == ["10.png", "11.png", "12.png", "13.png"]
        at = sample.loss_mask
        assert np.abs(found[at] - sample.behaviour_logprobs[at]).max() < 1e-4
        with torch.no_grad():
            theirs = plain_logprobs(plain, family, sample.token_ids, sample.images).numpy()
        assert np.abs(theirs[at[1:]] - sample.behaviour_logprobs[at]).max() < 1e-4
    first = group.samples[0].trajectory
    assert [turn.prompt_tokens for turn in first.record] == [len(request.prompt_ids) for request in requests[:4]]
    # each image is held once, however often it was shown
    held = {id(image.picture) for sample in group.samples for image in sample.trajectory.images}
    assert len(held | {id(one) for sample in group.samples for one in sample.trajectory.pictures}) == 4


async def test_prompts_that_differ_in_their_images_alone_are_computed_apart(folder: Path) -> None:
    group, _ = await played(folder, [Seen(first=10), Seen(first=20)])
    samples = policy_samples([group])
    assert samples[0].token_ids[: samples[0].prompt_length].tolist() == (
        samples[1].token_ids[: samples[1].prompt_length].tolist()
    )
    for layout in ({"share_prompts": True}, {"share_prompts": True, "packing": True}):
        for sample, found in zip(samples, trained(folder, group, **layout), strict=True):
            assert np.abs(found - sample.behaviour_logprobs).max() < 1e-4
    rows = build_rows([samples[0], samples[0], samples[1]], share_prompts=True, max_row_tokens=600)
    assert [len(row.images) for row in rows] == [7, 4]


async def test_turns_that_begin_anew_have_their_own_images(folder: Path) -> None:
    environment = Seen()
    environment.fresh = True
    group, requests = await played(folder, [environment])
    assert [len(request.images) for request in requests] == [1, 2, 0, 1]
    samples = policy_samples([group])
    assert [[image.picture.label for image in sample.images] for sample in samples] == [
        ["10.png"],
        ["11.png", "12.png"],
        [],
        ["13.png"],
    ]
    for sample, found in zip(samples, trained(folder, group, share_prompts=True), strict=True):
        assert np.abs(found - sample.behaviour_logprobs).max() < 1e-4


class Spells(Unqueued):
    """A policy that samples a placeholder in each turn."""

    def __init__(self, render: Renderer) -> None:
        super().__init__()
        self.render = render

    async def generate(self, request: GenerateRequest, affinity_key: Hashable, urgent: bool = False) -> Generation:
        ids, logprobs = said(self.render, "a<|image_pad|>b")
        segments = (Segment(start=0, end=len(ids), policy_version=0),)
        return Generation(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=logprobs,
            segments=segments,
            text="a<|image_pad|>b",
            stop_reason=StopReason.STOP,
        )


async def test_parts_of_a_rewritten_history_have_all_images_shown_so_far(folder: Path, tmp_path: Path) -> None:
    render = renderer(folder)
    template = render.tokenizer.chat_template.replace(
        "{{ message.content }}",
        "{% if message.role == 'assistant' and not loop.last %}Then: {{ message.content }}"
        "{% else %}{{ message.content }}{% endif %}",
    )
    render.tokenizer.chat_template = template
    render = Renderer(render.tokenizer, images=render.images)
    assert render.images is not None
    (sample,) = await play(Seen(), Spells(render), render, settings_of())
    whole, token = sample.trajectory, render.images.token
    group = Group(task=whole.task, samples=(sample,), failures=())
    write_groups(tmp_path / "step_000001", [group])
    (read,) = read_groups(tmp_path / "step_000001")
    for samples in (policy_samples([group]), policy_samples([read])):
        assert [[image.picture.label for image in one.images] for one in samples] == [
            ["10.png"],
            ["10.png", "11.png", "12.png"],
            ["10.png", "11.png", "12.png"],
            ["10.png", "11.png", "12.png", "13.png"],
        ]
        for one in samples:  # the sampled placeholder of the latest turn is the only one that is no image
            others = set(np.flatnonzero(one.token_ids == token).tolist()) - set(places(one))
            assert [bool(one.loss_mask[place]) for place in others] == [True]
    assert whole.text == "\n".join(["a<|image_pad|>b"] * 4)


async def test_the_context_limit_counts_the_tokens_of_images(folder: Path) -> None:
    render = renderer(folder)
    policy = FakePolicy(render, ["left"])
    limits = EpisodeLimits(turns=9, tokens=60)
    (sample,) = await play(Seen(), policy, render, settings_of(limits=limits))
    assert sample.details["turns"] == 1
    assert len(sample.trajectory.images) == 1
    with pytest.raises(EnvError, match=r"the first prompt has .* tokens, and a conversation 20 at most"):
        await play(Seen(), policy, render, settings_of(limits=EpisodeLimits(turns=9, tokens=20)))


async def test_a_text_model_refuses_with_the_environment_and_the_keys() -> None:
    text = Renderer(make_tiny_tokenizer())
    with pytest.raises(ConfigError, match=r"environment 'seen' shows images.*texts only.*(?s:.)*set model\.path"):
        await play(Seen(), FakePolicy(text, ["left"]), text, settings_of())


async def test_rollouts_are_stored_and_shown_with_every_image_once(folder: Path, tmp_path: Path) -> None:
    render = renderer(folder)
    samples = []
    for index in range(2):
        samples += await play(Seen(), FakePolicy(render, ["left"]), render, settings_of(sample_index=index))
    shared = _with_shared_tasks(samples)
    group = Group(task=shared[0].trajectory.task, samples=shared, failures=())
    write_groups(tmp_path / "a", [group])
    (again,) = read_groups(tmp_path / "a")
    assert again.samples[1].trajectory.images == group.samples[1].trajectory.images
    assert again.samples[1].record[1].images == group.samples[1].record[1].images
    text = (tmp_path / "a.json").read_text()
    assert text.count('"~Picture"') == 4
    (row, _) = rollout_rows([group])
    assert [one["label"] for one in row["images"]] == ["10.png", "11.png", "12.png", "13.png"]
    assert row["turns"][1]["shown"][0]["content"] == "[image: 11.png][image: 12.png]Which?"
    assert "images" not in row["turns"][1]
    keep_thumbnails(tmp_path, [group])
    assert {one["file"] for one in row["images"]} == {path.name for path in thumbnails_folder(tmp_path).iterdir()}
    metrics = rollout_metrics(Collected(groups=(group,), rejected=(), failures=(), started=1, tokens=9), 0)
    assert metrics["rollout/images/mean"].value == 4
    assert metrics["rollout/images/tokens"].value == sum(image.length for image in group.samples[0].trajectory.images)


# ---- environments ----------------------------------------------------------------------------------


def png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


@pytest.mark.parametrize(
    "value",
    [
        PIXELS,
        Image.fromarray(PIXELS),
        png(Image.fromarray(PIXELS)),
        {"type": "image", "image": PIXELS},
        {"type": "image_url", "image_url": {"url": data_url(png(Image.fromarray(PIXELS)))}},
    ],
    ids=["array", "Pillow", "bytes", "part", "data URL"],
)
def test_every_form_of_an_image_is_the_same_pixels(value: Any) -> None:
    (message,) = shown_messages("Where?", {"messages": [{"role": "tool", "content": ["seen:", value]}]})
    text, part = message["content"]
    assert text == {"type": "text", "text": "seen:"}
    assert np.array_equal(np.asarray(part["image"].image()), PIXELS)
    assert part["image"].label == part["image"].digest.hex()[:12]


def test_images_of_files_grey_ones_and_those_with_alpha(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(Image.fromarray(PIXELS)))
    assert picture_of(path).label == str(path) == picture_of(str(path)).label
    grey = picture_of(PIXELS[..., 0])
    assert np.array_equal(np.asarray(grey.image())[..., 1], PIXELS[..., 0])
    assert grey.digest == picture_of(PIXELS[..., :1]).digest
    clear = np.concatenate([PIXELS, np.zeros((4, 4, 1), np.uint8)], 2)
    assert np.asarray(picture_of(clear).image()).min() == 255


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (PIXELS / 255, r"array of float64 with the shape \[4, 4, 3\].*(?s:.)*multiply values from 0 to 1 by 255"),
        (np.zeros((3, 5, 6), np.uint8), r"uint8 with the shape \[3, 5, 6\].*(?s:.)*transpose"),
        (np.zeros((0, 4, 3), np.uint8), r"the shape \[0, 4, 3\]"),
        (b"no image", "no image that Pillow can read"),
        (png(Image.fromarray(np.tile(PIXELS, (40, 40, 1))))[:-400], "no image that Pillow can read"),
        (Path("nowhere.png"), "nowhere.png cannot be read: No such file"),
        ({"type": "image", "image": 7}, "expected an image as a Pillow image.*found int"),
    ],
    ids=["floats", "channels first", "empty", "no image", "cut", "no file", "a number"],
)
def test_what_is_no_image_is_said(value: Any, said: str) -> None:
    with pytest.raises(EnvError, match=said):
        shown_messages("", {"messages": [{"role": "user", "content": [value]}]})


def test_images_come_before_the_text_and_make_the_state() -> None:
    (message,) = shown_messages("Where?", {"images": [PIXELS, PIXELS[:2]]})
    assert [part["type"] for part in message["content"]] == ["image", "image", "text"]
    assert shown_messages(PIXELS, {})[0]["content"][0]["type"] == "image"
    assert shown_messages("Where?", {"images": []}) == [{"role": "user", "content": "Where?"}]
    states = {state_of("Where?", {"images": [one]}) for one in (PIXELS, PIXELS[:2])}
    assert len(states | {state_of("Where?", {})}) == 3
    assert state_of(np.zeros(3, np.float32), {}) == "[0. 0. 0.]"


class Pixels(gymnasium.Env[Any, Any]):
    """Shows its pixels: a grey that each action changes."""

    observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - Gymnasium declares it so
    render_mode = "rgb_array"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.grey = int(self.np_random.integers(100))
        return self.render(), {}

    def step(self, action: Any) -> Any:
        self.grey += 10 + int(action)
        return self.render(), 0.0, self.grey > 120, False, {"success": True}

    def render(self) -> Any:
        return np.full((8, 8, 3), self.grey, np.uint8)


@pytest.mark.parametrize("wrapped", ["pixels", "text and image", "history", "examples"])
def test_environments_of_pixels_are_played(wrapped: str) -> None:
    def make() -> gymnasium.Env[Any, Any]:
        env: Any = DiscreteActions(Pixels(), ["a", "b"])
        if wrapped != "pixels":
            env = DiscreteActions(ImageText(Pixels(), "Where?"), ["a", "b"])
        if wrapped == "history":
            return History(FewShot(env, [("What?", "<action>a</action>")]), 2)
        return FewShot(env, [("What?", "<action>a</action>")]) if wrapped == "examples" else env

    assert check_env(make).errors == ()
    entry: Any = make
    gymnasium.register("test/Pixels-v0", entry_point=entry)
    try:
        hosted = HostedEnvironment(EnvironmentSpec(name="p", env_id="test/Pixels-v0", kwargs={}))
        started = hosted.reset(3)
        states, seen = [started.state], [pictures_of(started.messages)]
        for action in ("<action>a</action>", "nothing", "<action>b</action>"):
            stepped = hosted.step(action)
            states.append(stepped.state)
            seen.append(pictures_of(stepped.messages))
        assert [len(one) for one in seen] == [1, 1, 1, 1]
        # an answer without an action shows the same image again
        assert states[1] == states[2]
        assert seen[1][0].digest == seen[2][0].digest
        assert len({one[0].digest for one in seen}) == len(set(states)) == 3
    finally:
        del gymnasium.registry["test/Pixels-v0"]


def test_a_space_without_text_or_image_names_the_wrapper_for_renderings() -> None:
    with pytest.raises(EnvError, match=r"render_mode='rgb_array' and wrap it in roll_like\.envs\.ImageText"):
        make_env("CartPole-v1")
    with pytest.raises(EnvError, match="ImageText needs image observations or a rendering"):
        ImageText(gymnasium.make("CartPole-v1"))


def test_the_lake_is_drawn() -> None:
    env = make_env("roll_like/FrozenLake-v0", lake=["SF", "HG"], view="image", tile=8)
    text, info = env.reset(seed=0)
    assert text == "Where to?"
    pixels = np.asarray(info["images"][0].image())
    assert pixels.shape == (16, 16, 3)
    middles = [tuple(pixels[row, column].tolist()) for row in (4, 12) for column in (4, 12)]
    assert middles == [(215, 45, 40), (205, 230, 245), (25, 55, 110), (70, 175, 75)]
    _, _, _, _, info = env.step("<action>right</action>")
    moved = np.asarray(info["images"][0].image())
    assert tuple(moved[4, 12].tolist()) == (215, 45, 40)
    assert tuple(moved[4, 4].tolist()) == (205, 230, 245)
    with pytest.raises(EnvError, match="examples are texts"):
        make_env("roll_like/FrozenLake-v0", view="image", examples=2)


# ---- agent programs --------------------------------------------------------------------------------


def part(one: Picture) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(one.data), "detail": "high"}}


async def test_an_agents_images_are_recorded_in_every_turn(folder: Path) -> None:
    async with rig("go", "look", "done", render=renderer(folder)) as one:
        messages: list[Any] = [
            {"role": "user", "content": [{"type": "text", "text": "Where?"}, part(picture(1, 56, 28))]}
        ]
        answer = await one.client.chat.completions.create(model="any", messages=messages)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(one.policy.requests[0].prompt_ids)
        for shown_next in (picture(2, 56, 56), picture(1, 56, 28)):
            messages += [answer.choices[0].message.model_dump(exclude_none=True)]
            messages += [{"role": "user", "content": [part(shown_next)]}]
            answer = await one.client.chat.completions.create(model="any", messages=messages)
        await one.reward(1)
        scored = one.episode.scored()
    assert scored.details["conversations"] == 1
    assert [len(request.images) for request in one.policy.requests] == [1, 2, 3]
    trajectory = scored.trajectory
    assert [image.length for image in trajectory.images] == [2, 4, 2]
    assert trajectory.images[0].picture is trajectory.images[2].picture  # sent four times, held once
    token = renderer(folder).images.token
    assert np.flatnonzero(trajectory.token_ids == token).tolist() == places(trajectory)
    assert trajectory.task.images == trajectory.images[:1]
    assert trajectory.record[1].shown[0]["content"] == f"[image: {trajectory.images[1].picture.label}]"


def test_an_image_that_is_sent_again_is_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    data = picture(32).data
    url, damaged = data_url(picture(31).data), data_url(data[:500] + bytes(1000) + data[1500:])
    held = picture_of(url)
    with pytest.raises(EnvError, match="damaged"):
        picture_of(damaged)
    decoded: list[Picture] = []
    monkeypatch.setattr("roll_like.data.shown_images.require_whole_images", decoded.extend)
    assert picture_of(url) is held
    assert decoded == []
    picture_of(damaged)  # what was refused is not held
    assert len(decoded) == 1


async def test_responses_and_messages_show_images_too(folder: Path) -> None:
    async with rig("go", "done", render=renderer(folder)) as one:
        first, second = picture(1, 56, 28), picture(2, 56, 56)
        items: list[Any] = [
            {"role": "user", "content": [{"type": "input_image", "image_url": data_url(first.data)}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_image", "image_url": data_url(second.data)},
                ],
            },
        ]
        assert (await one.post("responses", {"input": items})).status_code == 200
        block: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}
        said: list[Any] = [
            {"role": "user", "content": [{**block, "source": {**block["source"], "data": encoded(first)}}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [
                            {"type": "text", "text": "a"},
                            {**block, "source": {**block["source"], "data": encoded(second)}},
                        ],
                    }
                ],
            },
        ]
        counted = await one.post("messages/count_tokens", {"messages": said, "max_tokens": 9})
        assert (await one.post("messages", {"messages": said, "max_tokens": 9})).status_code == 200
    chat, messages = one.policy.requests
    assert [image.length for image in chat.images] == [2, 4]
    assert messages.prompt_ids.tolist() == chat.prompt_ids.tolist()
    assert counted.json() == {"input_tokens": len(chat.prompt_ids)}


def encoded(one: Picture) -> str:
    return base64.b64encode(one.data).decode()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.com/a.png", "found 'https://example.com/a.png'; nothing is downloaded"),
        ("/etc/hostname", "found '/etc/hostname'; nothing is downloaded"),
        ("data:image/png;base64,AAAA", "no image that Pillow can read"),
        ("data:image/png;base64,!", "is not base64"),
        (data_url(picture(1).data[:300]), "no image that Pillow can read"),
    ],
    ids=["http", "path", "bytes", "base64", "cut"],
)
async def test_images_that_are_not_served_are_said(url: str, said: str, folder: Path) -> None:
    async with rig("go", render=renderer(folder)) as one:
        content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
        answer = await one.post("chat/completions", {"messages": [{"role": "user", "content": content}]})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["param"] == "messages[0].content[1]"
        assert said in error["message"]
        assert not one.policy.requests


async def test_an_environments_images_reach_the_program_that_it_scores(folder: Path) -> None:
    first = shown(picture(1, 56, 28), "Which colour?")
    async with rig("red", render=renderer(folder), shown=[first]) as one:
        task = await one.http.get(
            f"{one.episode.base_url}/task", headers={"Authorization": f"Bearer {one.episode.key}"}
        )
        answer = await one.client.chat.completions.create(model="any", messages=task.json()["messages"])
        assert answer.choices[0].message.content == "red"
    (request,) = one.policy.requests
    assert [image.picture.data for image in request.images] == [picture(1, 56, 28).data]


# ---- vLLM ------------------------------------------------------------------------------------------


def test_a_sampled_placeholder_is_no_image_for_vllm(folder: Path) -> None:
    render = renderer(folder)
    conversation = Conversation(render)
    conversation.start([shown(picture(1, 56, 28))])
    conversation.sampled(*said(render, "a<|image_pad|>b"))
    prompt = conversation.observe([shown(picture(2, 56, 56))])
    request = GenerateRequest(
        request_id="r", prompt_ids=prompt, sampling=Sampling(max_tokens=1), seed=0, images=conversation.images
    )
    given = image_prompt(request)
    token = render.images.token
    assert given["prompt_token_ids"].count(token) == 2
    assert len(given["multi_modal_data"]["image"]) == 2
    made, _ = render.expanded(np.asarray(given["prompt_token_ids"], np.int32), conversation_pictures(conversation), "")
    assert image_input(request, {"prompt_token_ids": made.tolist(), "a": 1}) == {
        "prompt_token_ids": prompt.tolist(),
        "a": 1,
    }
    with pytest.raises(GenerationError, match=r"vLLM sees .* prompt tokens with the images of request r"):
        image_input(request, {"prompt_token_ids": [*made.tolist(), 1]})


def conversation_pictures(conversation: Conversation) -> list[Picture]:
    return [image.picture for image in conversation.images]


class Frontend:
    """vLLM's frontend: its process has forgotten the images of the first requests, and rendering waits for `may`."""

    def __init__(self, render: Renderer, forgotten: int = 0) -> None:
        self.renderer, self._render, self._forgotten = self, render, forgotten
        self.may, self.sent, self.aborted = asyncio.Event(), list[list[int]](), list[list[str]]()

    async def render_cmpl_async(self, prompts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        await self.may.wait()
        (given,) = prompts
        pictures = [encoded_picture(image, "") for image in given["multi_modal_data"]["image"]]
        made, _ = self._render.expanded(np.asarray(given["prompt_token_ids"], np.int32), pictures, "")
        return [{"prompt_token_ids": made.tolist()}]

    async def generate(self, prompt: Any, params: Any, request_id: str, lora_request: Any) -> AsyncIterator[Any]:
        del params, request_id, lora_request
        self.sent.append(prompt["prompt_token_ids"])
        reason = "error" if len(self.sent) <= self._forgotten else "abort"
        unset = ("logprobs", "weight_versions", "routed_experts", "sampling_mask", "spec_decode_metrics")
        completion = SimpleNamespace(token_ids=[], finish_reason=reason, **dict.fromkeys(unset))
        yield SimpleNamespace(outputs=[completion], num_cached_tokens=0)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted.append(request_ids)


class FakeVLLM(VLLMEngine):
    """The engine with that frontend, and without processes."""

    def __init__(self, folder: Path, frontend: Frontend) -> None:
        super().__init__(VLLMConfig(), engine_spec(folder))
        stops: Any = SimpleNamespace(of=lambda *_: None, text=lambda *_: "")
        self._engine, self._stops = frontend, stops

    def _look(self) -> None:
        """Nothing can end."""

    def _is_death(self, error: Exception) -> bool:
        del error
        return False


def with_image(render: Renderer, name: str = "r") -> GenerateRequest:
    conversation = Conversation(render)
    prompt = conversation.start([shown(picture(1, 56, 28))])
    return GenerateRequest(
        request_id=name, prompt_ids=prompt, sampling=Sampling(max_tokens=1), seed=0, images=conversation.images
    )


@pytest.fixture
def _without_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_like.inference.vllm.engine._sampling_params", lambda *_: None)


@pytest.mark.usefixtures("_without_parameters")
@pytest.mark.parametrize("forgotten", [1, 3])
async def test_images_that_vllms_process_has_forgotten_are_sent_again(forgotten: int, folder: Path) -> None:
    frontend = Frontend(renderer(folder), forgotten)
    frontend.may.set()
    engine, request = FakeVLLM(folder, frontend), with_image(renderer(folder))
    await engine.submit([request])
    (outcome,) = await engine.poll(5)
    assert frontend.sent == [request.prompt_ids.tolist()] * min(forgotten + 1, 3)
    if forgotten < 3:
        assert isinstance(outcome, Generation)
    else:
        assert isinstance(outcome, FailedGeneration)
        assert "vLLM ended the request with 'error'" in str(outcome.error)


@pytest.mark.usefixtures("_without_parameters")
async def test_a_request_whose_images_are_processed_is_aborted_when_vllm_knows_it(folder: Path) -> None:
    frontend = Frontend(renderer(folder))
    engine = FakeVLLM(folder, frontend)
    await engine.submit([with_image(renderer(folder))])
    aborting = asyncio.create_task(engine.abort(["r", "unknown"]))
    await asyncio.sleep(0.05)
    assert frontend.aborted == []
    assert not aborting.done()
    frontend.may.set()
    await aborting
    assert (await engine.poll(5))[0].request_id == "r"
    assert len(frontend.sent) == 1


# ---- tools -----------------------------------------------------------------------------------------


def crop(left: int) -> list[Any]:
    """Cut a part out of the image.

    Args:
        left: Where it begins.
    """
    return [f"from {left}", Image.fromarray(PIXELS[:, left:])]


@pytest.mark.parametrize("role", ["tool", "user"])
def test_tools_results_show_images_where_the_environment_says_so(role: str) -> None:
    call = '<tool_call>{"name": "crop", "arguments": {"left": 1}}</tool_call>'
    rows: Any = [{"prompt": "Which?", "answer": "1", "origin": "here:1"}]
    contents = []
    for images in (False, True):
        options: Any = {"tools": [{"type": "function", "target": f"{__name__}:crop"}], "result_role": role}
        env = make_env("roll_like/Tools-v0", path=rows, images=images, **options)
        env.reset(seed=0)
        observation, _, _, _, info = env.step(call)
        env.close()
        (message,) = shown_messages(observation, info)
        contents.append(message["content"])
        assert observation == "from 1\n[image, 3 × 4 pixels]"
    text, shown_parts = contents
    assert "[image, 3 × 4 pixels]" in text
    assert [one["type"] for one in shown_parts][:2] == (["text", "image"] if role == "tool" else ["text", "text"])
    (cut,) = pictures_of([{"content": shown_parts}])
    assert np.array_equal(np.asarray(cut.image()), PIXELS[:, 1:])
