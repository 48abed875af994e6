"""How a process reward model reads the steps of an answer, and what their scores come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np
from pydantic import Field

from roll_like import Completion, Renderer
from roll_like.config.base import ConfigModel
from roll_like.data.steps import last_of_runs, split_steps, step_pieces
from roll_like.errors import EnvError, RewardError
from roll_like.types import IntArray


class StepsConfig(ConfigModel):
    """How an answer is split into steps, and their scores become one."""

    split: str | None = Field(
        default=None,
        min_length=1,
        description="What stands between the steps of answers; default: `separator` if that is white space, else a "
        "blank line.",
    )
    separator: str | None = Field(
        default=None,
        min_length=1,
        description="What the model reads behind every step; a step is scored at the last token of it. Default: "
        "`step_separator` in the model's config.json.",
    )
    reduce: Literal["min", "last", "product", "mean"] = Field(
        default="min", description="What the scores of an answer's steps come to: the reward."
    )


@dataclass(frozen=True)
class ScoredRow:
    """What the model reads, and where its scores are read.

    Attributes:
        token_ids: Shape [T].
        places: Of scores; None for that of the whole conversation.
        ends: Where steps end, in characters of everything that was sampled.
    """

    token_ids: IntArray
    places: Sequence[int] | None = None
    ends: Sequence[int] = ()


def scores_steps(shape: Any) -> bool:
    """Return whether a model has an output at every token: a token classifier, or one of its own code."""
    names = list(getattr(shape, "architectures", None) or ())
    return any(name.endswith(("ForTokenClassification", "ForProcessRewardModel")) for name in names)


def filled_in(shape: Any, path: str, given: StepsConfig | None) -> StepsConfig | None:
    """Return how a model reads steps, with defaults filled in; None for one that scores whole conversations.

    Raises:
        RewardError: Neither the settings nor the model say what separates steps.
    """
    if not scores_steps(shape):
        return None
    steps = given or StepsConfig()
    separator = steps.separator or getattr(shape, "step_separator", None)
    if not isinstance(separator, str) or not separator:
        raise RewardError(
            f"the config.json of the process reward model {path} has no `step_separator`",
            fix="set steps.separator to what the model read behind every step when it was trained: "
            "`<extra_0>` of Qwen2.5-Math-PRM, a line break (the default of TRL)",
        )
    split = steps.split or ("\n\n" if separator.strip() else separator)
    return StepsConfig(split=split, separator=separator, reduce=steps.reduce)


def in_steps(renderer: Renderer, completion: Completion, prompt: Sequence[Any], steps: StepsConfig) -> ScoredRow:
    """Return the tokens of a prompt and the steps of its answer.

    Raises:
        EnvError: The chat template refuses the messages, or does not write the answer as it is.
    """
    assert steps.split is not None
    assert steps.separator is not None
    found = split_steps(completion.text, steps.split)
    pieces = step_pieces(renderer, prompt, (), [step for step, _ in found], steps.separator)
    tokens = renderer.encode_pieces([(piece.text, at == 0) for at, piece in enumerate(pieces)])
    token_ids = np.concatenate(tokens).astype(np.int32)
    unknown = renderer.unknown(token_ids)
    if unknown is not None:
        raise EnvError(f"a text has {unknown}")
    of_separator = np.repeat([piece.trained for piece in pieces], [len(ids) for ids in tokens])
    places = np.flatnonzero(last_of_runs(of_separator)).tolist()
    if len(places) != len(found):
        raise EnvError(f"the tokenizer has no tokens for the separator {steps.separator!r}")
    return ScoredRow(token_ids, places, [completion.answer_start + end for _, end in found])


#: What the scores of steps come to.
REDUCED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "last": lambda scores: scores[-1],
    "product": math.prod,
    "mean": fmean,
}
