"""The tokens of rollouts as people read them: their texts, log-probabilities, advantages and policy versions.

They come from files of runs with `rollout.save_tokens: true`; what training made of them also needs
`rollout.save_logprobs: true`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from roll_like.config.model import ModelConfig
from roll_like.data.chat import Renderer
from roll_like.errors import ConfigError
from roll_like.metrics.rollouts import with_ids
from roll_like.models.load import load_tokenizer
from roll_like.rollout.replay import tokens_stem
from roll_like.rollout.storage import read_groups_and_values
from roll_like.types import FloatArray, Trajectory

#: Returns the text of token ids, special tokens included.
Decode: TypeAlias = Callable[[Sequence[int]], str]
#: Most tokens that are taken for one character: a policy may write bytes that never become one.
_LONGEST = 8
#: What a tokenizer writes for a part of a character.
_PART = "\ufffd"
#: Digits after the point; a float32 of the size of a log-probability has no more.
_DIGITS = 6


def decoder(config: Mapping[str, Any]) -> Decode:
    """Return what decodes the tokens of a run.

    Raises:
        ConfigError: Its model has no tokenizer here.
    """
    model = config.get("model")
    if not isinstance(model, Mapping):
        raise ConfigError("its configuration names no model")
    return Renderer(load_tokenizer(ModelConfig(**model))).decode


def step_tokens(run_dir: Path, step: int, decode: Decode) -> dict[str, dict[str, Any]]:
    """Return the tokens of each rollout of a training step that were saved, by its id.

    Each is a mapping of plain JSON:

    - `pieces`: in order, the text of each stretch that the policy was shown, and a mapping for each that it sampled,
      with one item a token in each of these lists: `texts`, `versions` (the policy version that sampled it) and
      `engine` (its log-probability as the engine reported it, in nats). With `rollout.save_logprobs` also `trainer`
      (that under the weights that the step began with) and, of what the update used, `advantages`. `turn` counts
      from 0.
    - `parts`: where in `pieces` each further sequence begins, if history was rewritten.
    - `trained`: whether the update used it. Only with `rollout.save_logprobs`.

    Raises:
        CheckpointError: The files cannot be read.
    """
    groups, values = read_groups_and_values(tokens_stem(run_dir, step))
    samples = [sample.trajectory for group in groups for sample in group.samples]
    rows = with_ids(step, "step", [{"task_id": one.task.task_id, "sample_index": one.sample_index} for one in samples])
    found = {}
    for index, (row, trajectory) in enumerate(zip(rows, samples, strict=True)):
        figures = {"engine": trajectory.logprobs}
        trained = {}
        if values is not None:
            trained["trained"] = values.trained[index]
            figures["trainer"] = values.logprobs[index]
            if values.trained[index]:
                figures["advantages"] = values.advantages[index]
        found[row["id"]] = {**_pieces(trajectory, figures, decode), **trained}
    return found


def _pieces(trajectory: Trajectory, figures: Mapping[str, FloatArray], decode: Decode) -> dict[str, Any]:
    """Return `pieces` and `parts` of a trajectory; each figure has an item for each of its tokens."""
    versions = np.zeros(len(trajectory.token_ids), np.int64)
    for segment in trajectory.segments:
        versions[segment.start : segment.end] = segment.policy_version
    pieces: list[Any] = []
    parts: list[int] = []
    for part in trajectory.parts:
        parts.append(len(pieces))
        turns = trajectory.turns[part.start : part.end]
        edges = [0, *(np.flatnonzero(np.diff(turns)) + 1).tolist(), len(turns)]
        for start, end in itertools.pairwise(edges):
            place = slice(part.start + start, part.start + end)
            token_ids = trajectory.token_ids[place].tolist()
            before = trajectory.token_ids[part.start : place.start][-1:].tolist()
            if turns[start] < 0:
                pieces.append(decode([*before, *token_ids])[len(decode(before)) :])
                continue
            numbers = {name: [round(float(value), _DIGITS) for value in of[place]] for name, of in figures.items()}
            texts = token_texts(token_ids, decode, before)
            pieces.append({"turn": int(turns[start]), "texts": texts, "versions": versions[place].tolist(), **numbers})
    return {"pieces": pieces, "parts": parts[1:]}


def token_texts(token_ids: Sequence[int], decode: Decode, before: Sequence[int] = ()) -> list[str]:
    """Return the text that each token adds; joined they are the text of all.

    Tokens that together make one character share it: the last of them has it, and the others have no text.

    Args:
        decode: Decodes them. A tokenizer may write a token otherwise where a text begins with it, so each is decoded
            with the one before it.
        before: The token before the first, if there is one.
    """
    token_ids = [*before, *token_ids]
    start, known = 0, decode(before)  # what is decoded again, and its text
    unit = len(before)  # the first token of the character at hand
    texts: list[str] = []
    for end in range(unit + 1, len(token_ids) + 1):
        text = decode(token_ids[start:end])
        if text.endswith(_PART) and end < len(token_ids) and end - unit < _LONGEST:
            texts.append("")
            continue
        texts.append(text[len(known) :])
        start, known, unit = unit, decode(token_ids[unit:end]), end
    return texts
