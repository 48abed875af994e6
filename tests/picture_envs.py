"""An environment that shows a picture in every turn, and rewards the letter e."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from roll_like.envs import FreeText


class Pictures(gymnasium.Env[str, str]):
    """Three turns, of which the second shows two pictures, of sizes that no processor changes."""

    observation_space = action_space = FreeText()
    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so
    system_prompt = "Look."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.turn = 0
        return "One.", {"images": self.pictures(1)}

    def step(self, action: str) -> Any:
        self.turn += 1
        over = self.turn == 3
        reward = float(action.count("e"))
        return "More.", reward, over, False, {"images": self.pictures(2 if self.turn == 1 else 1), "success": over}

    def pictures(self, count: int) -> list[Any]:
        return [self.np_random.integers(0, 255, (56, 56, 3), np.uint8) for _ in range(count)]


gymnasium.register("tiny/Pictures-v0", entry_point=Pictures)
