"""Images as observations: of environments whose spaces are pixels, or that render them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space

from roll_like.data.shown_images import is_image_shape, picture_of
from roll_like.envs.returns import state_of
from roll_like.envs.spaces import FreeText
from roll_like.envs.wrappers import AnyEnv, Info, Reset, Step, TextWrapper
from roll_like.errors import EnvError


def is_image_space(space: Space[Any] | None) -> bool:
    """Return whether what a space holds can be shown as an image: bytes [H, W, 3], [H, W, 1] or [H, W]."""
    return isinstance(space, Box) and space.dtype == np.uint8 and is_image_shape(space.shape)


class ImageText(TextWrapper):
    """An image and a text as observation: the text is the observation, and the image is in `info["images"]`.

    The image is the environment's observation where that is one, else its `rgb_array` rendering.

    Args:
        env: Has image observations, or was made with `render_mode="rgb_array"`.
        text: What is written after the image; a function is given the environment's observation.

    Raises:
        EnvError: The environment has no images.
    """

    def __init__(self, env: AnyEnv, text: str | Callable[[Any], str] = "") -> None:
        super().__init__(env)
        self._observes = is_image_space(env.observation_space)
        if not self._observes and env.render_mode != "rgb_array":
            raise EnvError(
                f"ImageText needs image observations or a rendering, found {env.observation_space} and "
                f"render_mode={env.render_mode!r}",
                fix="make it with render_mode='rgb_array'",
            )
        self._text = text
        self.observation_space = FreeText()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._shown(observation, info), info

    def step(self, action: Any) -> Step:
        """Take one action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._shown(observation, info), reward, terminated, truncated, info

    def _shown(self, observation: Any, info: Info) -> str:
        image: Any = observation if self._observes else self.env.render()
        text = self._text if isinstance(self._text, str) else self._text(observation)
        info["images"] = [picture_of(image)]
        info["state"] = state_of(text, info)
        return text
