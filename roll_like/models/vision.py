"""Vision-language models: their image processor, and what a language model sees of tokens with images.

An image becomes features, one for each of its placeholders among the tokens; each takes the place of a placeholder's
embedding. Where placeholders are is known from the prompt (`PlacedImage`), never looked for among tokens: a policy may
sample the placeholder's token, which stands for no image.

Torch and transformers are imported only by the functions that need them, so that planning stays quick.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from roll_like.config.training import JOINING, TrainerConfig
from roll_like.errors import ConfigError, DataError, EngineError
from roll_like.models.stored import stated_json
from roll_like.types import Picture, PlacedImage

if TYPE_CHECKING:
    from torch import Tensor

#: `model_type`s whose images are supported.
FAMILIES = ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl")
#: Which micro-batches run the vision tower: those with images; also all with gradients; or all.
TowerRuns: TypeAlias = Literal["where there are images", "with gradients", "always"]
#: Files of a model's directory that say how images are processed.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def sees_images(config: Any) -> bool:
    """Return whether images of a model's rows are supported; `config` is its configuration."""
    return getattr(config, "model_type", None) in FAMILIES


def is_vision_model(path: Path) -> bool:
    """Return whether images are supported of the model in a directory; False where its config.json cannot be read."""
    return stated_json(path / "config.json").get("model_type") in FAMILIES


def processor_files(path: Path) -> tuple[Path, ...]:
    """Return the files of a model's directory that say how images are processed."""
    return tuple(path / name for name in _PROCESSOR_FILES if (path / name).is_file())


class ImageProcessor:
    """What a model makes of images before it sees them.

    transformers processes them with torchvision, which vLLM needs; where it is missing, with Pillow.
    """

    def __init__(self, path: Path, token: int) -> None:
        from transformers import AutoImageProcessor

        self.token = token
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"no image processor can be loaded from {path}: {error}",
                fix="set model.path to a complete model: its preprocessor_config.json says how images are processed",
            ) from error

    def count(self, picture: Picture) -> int:
        """Return how many placeholders an image becomes; its pixels are not read.

        Raises:
            DataError: The processor refuses its size.
        """
        width, height = picture.size()
        try:
            patches = int(self._processor.get_number_of_image_patches(height, width, {}))
        except ValueError as error:
            raise DataError(
                f"{picture.label} has {width} × {height} pixels: {error}", fix="take it out, or cut it"
            ) from error
        return patches // int(self._processor.merge_size) ** 2

    def inputs(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        """Return the vision tower's inputs: `pixel_values`, the patches of all images, and `image_grid_thw`, [I, 3].

        Raises:
            EngineError: An image is damaged.
        """
        decoded = []
        for picture in pictures:
            try:
                decoded.append(picture.image())
            except OSError as error:
                raise EngineError(f"the image {picture.label} is damaged: {error}", fix="replace the file") from error
        found = self._processor(decoded, return_tensors="pt")
        return {"pixel_values": found["pixel_values"], "image_grid_thw": found["image_grid_thw"]}


@lru_cache(maxsize=4)
def image_processor(path: Path) -> ImageProcessor | None:
    """Return the image processor of a model; None where images of such a model are not supported.

    Raises:
        ConfigError: It cannot be loaded.
    """
    config = stated_json(path / "config.json")
    return ImageProcessor(path, int(config["image_token_id"])) if config.get("model_type") in FAMILIES else None


@dataclass(frozen=True, eq=False, slots=True)
class SeenTokens:
    """Tokens with images, in the place of tokens alone.

    Attributes:
        token_ids_BL: The tokens.
        images: Each starts at an index into the flattened [B·L]. Without any, the vision tower runs all the same.
    """

    token_ids_BL: Tensor
    images: tuple[PlacedImage, ...]


@contextmanager
def seen_inputs(backbone: Any, seen: SeenTokens, visible_B1LL: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yield what a backbone computes with instead of tokens: `inputs_embeds` [B, L, D] and `position_ids` [3, B, L].

    Within the context, layers of the language model that see features of the tower's inner layers are given them.

    Without images the tower runs on a blank one and none of its features is taken. So embeddings keep their bits, and
    the tower's gradient is zero and not None, so that it is added to that of other ranks. Positions are left out then:
    they are those of a text.

    Args:
        backbone: The model without its output.
        visible_B1LL: Which tokens each token sees, itself included; True where it does.
    """
    import torch

    ids_BL = seen.token_ids_BL
    pixels, grid_I3 = (each.to(ids_BL.device) for each in _tower_inputs(backbone, seen.images))
    features = backbone.get_image_features(pixels, grid_I3, return_dict=True)
    embeddings_BLD = backbone.get_input_embeddings()(ids_BL)
    taken = [torch.arange(image.start, image.start + image.length) for image in seen.images]
    places_T = torch.cat([torch.arange(0), *taken]).to(ids_BL.device)
    flat_XD = embeddings_BLD.reshape(-1, embeddings_BLD.shape[-1])
    found_TD, *inner = (
        torch.cat(tuple(layer))[: len(places_T)].to(flat_XD)
        for layer in (features.pooler_output, *getattr(features, "deepstack_features", ()))
    )
    inputs = {"inputs_embeds": flat_XD.index_copy(0, places_T, found_TD).view_as(embeddings_BLD)}
    if seen.images:
        inputs["position_ids"] = image_positions(backbone, seen, visible_B1LL, grid_I3)
    with _inner_features(backbone, inner, places_T, ids_BL):
        yield inputs


@contextmanager
def _inner_features(backbone: Any, features: Sequence[Tensor], places_T: Tensor, ids_BL: Tensor) -> Iterator[None]:
    """Give the language model the features of the tower's inner layers (DeepStack, https://arxiv.org/abs/2406.04334).

    The model itself looks for their places among the tokens, where sampled placeholders stand as well.
    """
    import torch

    if not features:
        yield
        return
    shown_X = torch.zeros(ids_BL.numel(), dtype=torch.bool, device=ids_BL.device)
    shown_X[places_T] = True
    order_T = places_T.argsort()  # the language model adds them in the order of the tokens
    given = {
        "visual_pos_masks": shown_X.view_as(ids_BL),
        "deepstack_visual_embeds": [layer_TD[order_T] for layer_TD in features],
    }
    hook = backbone.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, **given}), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()


def _tower_inputs(backbone: Any, images: Sequence[PlacedImage]) -> tuple[Tensor, Tensor]:
    """Return the patches of images and the grid of each, [I, 3]; without images, those of a smallest one."""
    import torch

    if images:
        processor = image_processor(Path(backbone.config._name_or_path))
        assert processor is not None, "images came from a data loader that had one"
        inputs = processor.inputs([image.picture for image in images])
        return inputs["pixel_values"], inputs["image_grid_thw"]
    side, patches = backbone.config.vision_config.spatial_merge_size, backbone.visual.patch_embed.proj
    pixels = patches.in_channels * math.prod(patches.kernel_size)
    return torch.zeros(side**2, pixels), torch.tensor([[1, side, side]])  # patches that become one token


def image_positions(backbone: Any, seen: SeenTokens, visible_B1LL: Tensor, grid_I3: Tensor) -> Tensor:
    """Return rotary positions (time, height, width) of each token in its own sample, shape [3, B, L].

    An image's tokens have the places of its patches, and what follows goes on after the larger side: so positions
    depend on the images before. Each branch of a row is numbered as the sequence that its last token sees.
    """
    import torch

    ids_BL = seen.token_ids_BL
    batch, length = ids_BL.shape
    positions_3BL = torch.zeros(3, batch, length, dtype=torch.long, device=ids_BL.device)
    kinds_BL = torch.zeros(batch * length, dtype=torch.int, device=ids_BL.device)
    for image in seen.images:
        kinds_BL[image.start : image.start + image.length] = 1
    kinds_BL = kinds_BL.view(batch, length)
    starts_I = torch.tensor([image.start for image in seen.images], device=ids_BL.device)
    for row in range(batch):
        visible_LL = visible_B1LL[row, 0]
        # the last token of a branch is seen by none after it; padding sees itself only
        last_L = (visible_LL.sum(0) == 1) & (visible_LL.sum(1) > 1)
        for end in last_L.nonzero()[:, 0].tolist():
            at_K = visible_LL[end].nonzero()[:, 0]
            own_I = torch.isin(starts_I, at_K + row * length)
            found_31K, _ = backbone.get_rope_index(
                ids_BL[row, at_K][None],
                mm_token_type_ids=kinds_BL[row, at_K][None],
                image_grid_thw=grid_I3[own_I] if bool(own_I.any()) else None,
            )
            positions_3BL[:, row, at_K] = found_31K[:, 0]
    return positions_3BL


def language_model(causal_lm: Any) -> Any:
    """Return the part of a model that sees tokens: of a vision-language model, all but its vision tower."""
    return causal_lm.base_model.language_model if sees_images(causal_lm.config) else causal_lm


def vision_tower(causal_lm: Any) -> Any | None:
    """Return the part of a model that sees images; None where there is none."""
    return causal_lm.base_model.visual if sees_images(causal_lm.config) else None


def tower_runs(*, ranks: int, divided: bool, trained: bool) -> TowerRuns:
    """Return which micro-batches run the vision tower: more than those with images where other ranks depend on it.

    Ranks that divide weights gather those of the tower's layers in each pass, and ranks that train the tower add up its
    gradients. A rank that left the tower out would not take part, and the others would wait for it.

    Args:
        divided: Whether ranks divide the model's weights.
        trained: Whether the tower is.
    """
    if ranks == 1 or not (divided or trained):
        return "where there are images"
    return "always" if divided else "with gradients"


def refuse_vision(config: Any, settings: TrainerConfig, key: str) -> None:
    """Raise a ConfigError for settings, of the section `key`, that a vision-language model is not trained with."""
    if not sees_images(config):
        return
    what = f"the model sees images (model_type: {config.model_type}), and"
    if key == "critic":
        raise ConfigError(f"{what} critics are for text models", fix="set algorithm.advantage.type: grpo, for example")
    if settings.attention in JOINING:
        raise ConfigError(
            f"{what} {key}.attention: {settings.attention} has one position a token, where images have three",
            fix=f"set {key}.attention: dense",
        )
    if settings.sequence_parallel > 1:
        raise ConfigError(
            f"{what} {key}.sequence_parallel: {settings.sequence_parallel} divides rows whose images are whole",
            fix=f"set {key}.sequence_parallel: 1",
        )
    if settings.lora is not None and not getattr(settings, "freeze_vision", True):
        raise ConfigError(
            f"{what} {key}.freeze_vision: false trains the vision tower, where {key}.lora trains adapters in the "
            "language model and nothing else",
            fix=f"set {key}.freeze_vision: true, or remove {key}.lora",
        )
