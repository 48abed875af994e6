"""Environments that a random model can learn in a few steps: write many letters e, turn by turn."""

from __future__ import annotations

import random
import time

import gymnasium

from roll_like.envs import FreeText


class Letters(gymnasium.Env):
    observation_space = FreeText()
    action_space = FreeText()

    def __init__(self, turns: int = 2, failing: int = 0) -> None:
        self.turns, self.failing = turns, failing

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.failing and seed is not None and seed % self.failing == self.failing - 1:
            raise RuntimeError(f"seed {seed} is broken on purpose")
        self.at = 0
        return f"Say something about the number {self.np_random.integers(40)}.", {"state": "begun"}

    def step(self, action):
        self.at += 1
        share = action.count("e") / max(len(action), 1)
        over = self.at == self.turns
        info = {"state": f"turn {self.at}"} | ({"success": share > 0.4} if over else {})
        return f"And about {self.at}?", share, over, False, info


class SlowLetters(Letters):
    """Takes its time by its seed, lognormal: half of the turns under 7 ms, some over 100 ms. One seed hangs."""

    def __init__(self, turns: int = 2, hangs: int = -1) -> None:
        super().__init__(turns)
        self.hangs = hangs

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        self.pause = min(random.Random(seed).lognormvariate(-5.0, 1.5), 0.3)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        time.sleep(3600 if self.seed == self.hangs else self.pause)
        return super().step(action)


gymnasium.register("tiny/Letters-v0", entry_point=Letters)
gymnasium.register("tiny/SlowLetters-v0", entry_point=SlowLetters)
