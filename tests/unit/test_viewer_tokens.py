"""Tokens of a step as the viewer reads them: exact through the files, and texts that join to the whole text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rollout_storage import assert_same
from tests_support import group, scored, task

from roll_like.algorithms.advantages.base import policy_samples
from roll_like.algorithms.kl import KLController
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.policy_gradient.advantages import Advantages
from roll_like.policy_gradient.pipeline import PolicyGradientPipeline
from roll_like.registry import ADVANTAGES
from roll_like.rollout.replay import tokens_stem
from roll_like.rollout.storage import read_groups, read_groups_and_values, write_groups
from roll_like.types import Group, Part, PolicySample, Scored, Segment, StopReason, TrainingValues
from roll_like.viewer.tokens import step_tokens, token_texts


def decode(token_ids: Any) -> str:
    return "".join(f"<{one}>" for one in token_ids)


def rewritten() -> Scored:
    """Two turns whose history was rewritten between them: two sequences, of versions 3 and 4."""
    turns = np.array([-1, -1, 0, 0, -1, -1, -1, 1, -1], np.int32)
    sampled = turns >= 0
    sample = scored(task(0), 0.25, sample=1)
    trajectory = replace(
        sample.trajectory,
        token_ids=np.arange(10, 19, dtype=np.int32),
        sampled=sampled,
        turns=turns,
        logprobs=np.where(sampled, -np.arange(9) / 8, 0).astype(np.float32),
        parts=(Part(start=0, end=4, prompt_length=2), Part(start=4, end=9, prompt_length=3)),
        segments=(Segment(start=2, end=4, policy_version=3), Segment(start=7, end=8, policy_version=4)),
    )
    return replace(sample, trajectory=trajectory)


def a_step() -> list[Group[Scored]]:
    """A group with a rewritten history and a masked sample, and the same task once more."""
    first = group(task(0), [1.0])
    return [
        replace(first, samples=(*first.samples, rewritten(), scored(task(0), 0.5, sample=3))),
        group(task(0), [0.0]),
    ]


#: The trainer finds each token of `a_step` less likely than the engine, by an eighth.
LESS = 0.125


class Actor:
    """A trainer that answers with the engine's log-probabilities, less an eighth."""

    def logprobs(self, samples: list[PolicySample]) -> list[np.ndarray]:
        return [np.where(one.loss_mask, one.behaviour_logprobs - LESS, 0).astype(np.float32) for one in samples]


def values_of(groups: list[Group[Scored]], trained: list[bool], **state: Any) -> TrainingValues | None:
    """What a pipeline writes if the update's advantages are 1 for the first part, 2 for the second, and so on."""
    parts = policy_samples(groups)
    kept = [one for one, stays in zip(parts, [trained[0], trained[1], *trained[1:]], strict=True) if stays]
    used = [
        replace(one, advantages=np.where(one.loss_mask, number, 0).astype(np.float32))
        for number, one in enumerate(kept, start=1)
    ]
    pipeline: Any = SimpleNamespace(
        config=SimpleNamespace(rollout=SimpleNamespace(save_logprobs=True)),
        run_state=SimpleNamespace(**{"replaying": False, **state}),
        workers=SimpleNamespace(actor=Actor()),
    )
    return PolicyGradientPipeline.training_values(pipeline, groups, trained, used)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "rollouts").mkdir()
    return tmp_path


def test_numbers_are_the_engines_and_the_trainers(run_dir: Path) -> None:
    groups = a_step()
    values = values_of(groups, [True, True, False, True])
    write_groups(tokens_stem(run_dir, 7), groups, values)
    tokens = step_tokens(run_dir, 7, decode)
    assert list(tokens) == ["7/0.0", "7/0.1", "7/0.3", "7/1.0"]
    assert tokens["7/0.0"] == {
        "pieces": [
            "<0><1>",
            {
                "turn": 0,
                "texts": ["<2>", "<3>", "<4>"],
                "versions": [0, 0, 0],
                "engine": [-1.0, -1.0, -1.0],
                "trainer": [-1.125, -1.125, -1.125],
                "advantages": [1.0, 1.0, 1.0],
            },
        ],
        "parts": [],
        "trained": True,
    }
    assert tokens["7/0.1"] == {  # of an episode that was cut, the sequences stand one after the other
        "pieces": [
            "<10><11>",
            {
                "turn": 0,
                "texts": ["<12>", "<13>"],
                "versions": [3, 3],
                "engine": [-0.25, -0.375],
                "trainer": [-0.375, -0.5],
                "advantages": [2.0, 2.0],
            },
            "<14><15><16>",
            {
                "turn": 1,
                "texts": ["<17>"],
                "versions": [4],
                "engine": [-0.875],
                "trainer": [-1.0],
                "advantages": [3.0],
            },
            "<18>",
        ],
        "parts": [2],
        "trained": True,
    }
    masked = tokens["7/0.3"]
    assert masked["trained"] is False
    assert masked["pieces"][1]["trainer"] == [-1.125] * 3
    assert "advantages" not in masked["pieces"][1]
    assert tokens["7/1.0"]["pieces"][1]["advantages"] == [4.0] * 3


def test_values_come_back_exactly_and_go_with_their_groups(run_dir: Path) -> None:
    stem, groups = tokens_stem(run_dir, 1), a_step()
    values = values_of(groups, [True] * 4)
    assert values is not None
    write_groups(stem, groups, values)
    read, found = read_groups_and_values(stem)
    assert_same(read, groups)
    assert_same(found, values)
    assert_same(read_groups(stem), groups)
    write_groups(stem, groups)  # a resumed run does the step again
    assert read_groups_and_values(stem)[1] is None
    tokens = step_tokens(run_dir, 1, decode)["1/0.0"]
    assert "trained" not in tokens
    assert set(tokens["pieces"][1]) == {"turn", "texts", "versions", "engine"}


@pytest.mark.parametrize(("warmup_steps", "trained"), [(0, [True, False, True, True]), (1, [False] * 4)])
def test_an_update_says_which_samples_it_uses(warmup_steps: int, trained: list[bool]) -> None:
    first, second = a_step()
    cut = replace(first.samples[1], trajectory=replace(rewritten().trajectory, stop_reason=StopReason.LENGTH))
    groups = [replace(first, samples=(first.samples[0], cut, first.samples[2])), second]
    algorithm = AlgorithmConfig.model_validate({"mask": {"truncated": True}})
    plugin = ADVANTAGES.get("reinforce")
    estimator = plugin(plugin.Config())
    assigned = Advantages(
        estimator,
        algorithm,
        KLController(algorithm.kl),
        None,
        max_response_tokens=8,
        warmup_steps=warmup_steps,
    ).assign(groups)
    assert assigned.trained == trained
    # the sample that was cut has two parts, and neither is trained on
    assert [sample.reward for sample in assigned.samples] == [1.0, 0.5, 0.0] * (warmup_steps == 0)


def test_a_warm_up_uses_no_sample_and_a_repeated_step_computes_nothing() -> None:
    groups = a_step()
    values = values_of(groups, [False] * 4)
    assert values is not None
    assert values.trained == [False] * 4
    assert not any(array_T.any() for array_T in values.advantages)
    assert values_of(groups, [True] * 4, replaying=True) is None


def from_bytes(token_ids: Any) -> str:
    """Decode as byte-level tokenizers do: a token is a byte."""
    return bytes(token_ids).decode("utf-8", "replace")


#: U+FFFD is what a part of a character is decoded to.
texts = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"))


@given(texts, st.integers(0, 4))
def test_texts_of_tokens_join_to_the_text(text: str, length: int) -> None:
    token_ids = list(text.encode())
    texts = token_texts(token_ids, from_bytes)
    assert "".join(texts) == text
    assert len(texts) == len(token_ids)
    assert [one for one in texts if one] == list(text)  # a character is whole, with its last token
    start = len(text[:length].encode())
    assert "".join(token_texts(token_ids[start:], from_bytes, token_ids[:start][-1:])) == text[length:]


@given(st.binary())
def test_bytes_that_are_no_text_lose_no_token(data: bytes) -> None:
    assert len(token_texts(list(data), from_bytes)) == len(data)


def test_a_tokenizer_that_drops_the_first_space_is_asked_with_the_token_before() -> None:
    words = ["▁Two", "▁and", "▁three", "!"]

    def decode_words(token_ids: Any) -> str:
        return "".join(words[one] for one in token_ids).replace("▁", " ").removeprefix(" ")

    assert token_texts([0, 1, 2, 3], decode_words) == ["Two", " and", " three", "!"]
    assert token_texts([1, 2], decode_words, [0]) == [" and", " three"]
