"""Small objects that several tests need."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from roll_like.data.kept import kept_tokens
from roll_like.types import (
    Group,
    Pair,
    Part,
    PolicySample,
    Scored,
    Segment,
    StopReason,
    Task,
    TrainingSample,
    Trajectory,
)


def policy_sample(*, group: str = "g", prompt: int = 2, response: int = 3, advantage: float = 1.0) -> PolicySample:
    """A sample of `prompt` + `response` tokens."""
    loss_mask = np.arange(prompt + response) >= prompt
    return PolicySample(
        group_id=group,
        token_ids=np.arange(1, prompt + response + 1, dtype=np.int32),
        prompt_length=prompt,
        loss_mask=loss_mask,
        turns=np.where(loss_mask, 0, -1).astype(np.int32),
        behaviour_logprobs=np.where(loss_mask, -1, 0).astype(np.float32),
        advantages=np.where(loss_mask, advantage, 0).astype(np.float32),
        reward=0.0,
        policy_version=0,
    )


def task(index: int = 0, *, source: str = "fake", prompt: int = 2) -> Task:
    """A task with `prompt` tokens."""
    return Task(
        task_id=f"{source}/{index}",
        source=source,
        domain=source,
        messages=({"role": "user", "content": f"task {index}"},),
        prompt_ids=np.full(prompt, index, np.int32),
        answer=None,
        metadata={},
        origin=f"{source}.jsonl:{index + 1}",
    )


def scored(
    owner: Task,
    reward: float,
    *,
    sample: int = 0,
    response: int = 3,
    version: int = 0,
    stop_reason: StopReason = StopReason.STOP,
) -> Scored:
    """A scored trajectory of `response` sampled tokens."""
    prompt = len(owner.prompt_ids)
    sampled = np.arange(prompt + response) >= prompt
    trajectory = Trajectory(
        task=owner,
        sample_index=sample,
        token_ids=np.arange(prompt + response, dtype=np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -1, 0).astype(np.float32),
        turns=np.where(sampled, 0, -1).astype(np.int32),
        parts=(Part(start=0, end=prompt + response, prompt_length=prompt),),
        segments=(Segment(start=prompt, end=prompt + response, policy_version=version),),
        text="text",
        stop_reason=stop_reason,
    )
    return Scored(
        trajectory=trajectory, reward=reward, rewards={"r": reward}, details={"r/strict": reward}, weights={"r": 1.0}
    )


def group(owner: Task, rewards: list[float], **changes) -> Group[Scored]:  # type: ignore[no-untyped-def]
    """A scored group."""
    samples = tuple(scored(owner, reward, sample=index, **changes) for index, reward in enumerate(rewards))
    return Group(task=owner, samples=samples, failures=())


def ragged_policy_samples(vocabulary: int = 400, seed: int = 0) -> list[PolicySample]:
    """Groups of ragged samples, one of them with zero reward variance, one with tool tokens in the middle."""
    random = np.random.default_rng(seed)
    samples = []
    for group in range(5):
        prompt = random.integers(5, vocabulary, random.integers(3, 12))
        for _ in range(3):
            response = random.integers(5, vocabulary, random.integers(2, 14))
            tokens = np.concatenate([prompt, response]).astype(np.int32)
            loss_mask = np.arange(len(tokens)) >= len(prompt)
            if group == 1 and len(response) > 4:
                loss_mask[len(prompt) + 2] = False
            advantage = 0.0 if group == 4 else random.normal()
            samples.append(
                PolicySample(
                    group_id=str(group),
                    token_ids=tokens,
                    prompt_length=len(prompt),
                    loss_mask=loss_mask,
                    turns=np.where(loss_mask, _turns_around_gaps(loss_mask), -1).astype(np.int32),
                    behaviour_logprobs=np.where(loss_mask, -6 + 0.1 * random.normal(size=len(tokens)), 0).astype(
                        np.float32
                    ),
                    advantages=np.where(loss_mask, advantage, 0).astype(np.float32),
                    reward=0.0,
                    policy_version=0,
                )
            )
    return samples


def with_kept(samples: Sequence[PolicySample], vocabulary: int = 400, seed: int = 0) -> list[PolicySample]:
    """The same, each sampled token drawn from some random ones beside it; a few from all."""
    random = np.random.default_rng(seed)
    found = []
    for sample in samples:
        told = [
            sorted({int(token), *random.integers(0, vocabulary, random.integers(0, 20)).tolist()})
            if sampled and random.random() < 0.9
            else []
            for token, sampled in zip(sample.token_ids, sample.loss_mask, strict=True)
        ]
        found.append(replace(sample, kept=kept_tokens(told, sample.token_ids.tolist())))
    return found


def _turns_around_gaps(sampled: np.ndarray) -> np.ndarray:
    """A turn for each run of sampled tokens."""
    starts = sampled & ~np.concatenate([[False], sampled[:-1]])
    return np.cumsum(starts) - 1


def pairs_of(sequences: Sequence[TrainingSample]) -> list[Pair]:
    """The pairs of sequences, chosen and rejected in turn."""
    return [Pair(chosen=one, rejected=two) for one, two in zip(sequences[::2], sequences[1::2], strict=True)]


async def all_follows() -> None:
    """Let an event loop do what follows from something: so many turns, whereas a sleep may end after one of them."""
    for _ in range(100):
        await asyncio.sleep(0)


def answer_logprobs(model: Any, sample: TrainingSample) -> torch.Tensor:
    """Return the log-probability of each trained token of a sample under a transformers model."""
    ids_T = torch.from_numpy(sample.token_ids).long()
    logprobs_T = model(ids_T[None]).logits[0, :-1].log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]
    return logprobs_T[torch.from_numpy(sample.loss_mask[1:])]


@torch.no_grad()
def given_logprobs(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """Return the log-probability of each token but the first under a transformers model, in float32."""
    ids_T = torch.from_numpy(token_ids.astype(np.int64))
    logprobs_TV = torch.log_softmax(model(ids_T[None]).logits[0, :-1].float(), -1)
    return logprobs_TV.gather(1, ids_T[1:, None])[:, 0].numpy()
