"""Rewards that a random model can learn in a few steps: write many letters e; and one that is broken."""

from __future__ import annotations

import random
import time
from statistics import fmean

from roll_like import Completion, RewardResult, StepScore, register_reward


@register_reward("letter_e")
def letter_e(completion: Completion) -> float:
    return completion.text.count("e") / max(len(completion.text), 1)


@register_reward("letter_e_by_step")
def letter_e_by_step(completion: Completion) -> RewardResult:
    """Each four characters are a step."""
    text = completion.full_text
    ends = [*range(4, len(text), 4), len(text)]
    steps = [StepScore(text[max(end - 4, 0) : end].count("e") / 4, end) for end in ends]
    return RewardResult(fmean(step.value for step in steps), steps=steps)


@register_reward("slow_letter_e")
def slow_letter_e(completion: Completion) -> float:
    """Take its time by its text, lognormal: half of them under 20 ms."""
    time.sleep(min(random.Random(completion.text).lognormvariate(-4.0, 1.5), 0.5))
    return letter_e(completion)


@register_reward("has_letter_e")
def has_letter_e(completion: Completion) -> float:
    return float("e" in completion.text)


@register_reward("broken")
def broken(completion: Completion) -> float:
    if completion.text in ("", completion.answer):  # what a run tries before it starts
        return 0.0
    raise RuntimeError("this reward is broken on purpose")
