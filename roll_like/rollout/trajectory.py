"""From what an engine generated to a trajectory."""

from __future__ import annotations

import numpy as np

from roll_like.inference.interface import Generation
from roll_like.types import Part, Segment, Task, Trajectory


def trajectory_of(task: Task, sample_index: int, generation: Generation) -> Trajectory:
    """Join a prompt and its response; nothing is decoded or tokenised again."""
    prompt_length = len(task.prompt_ids)
    length = prompt_length + len(generation.token_ids)
    sampled = np.zeros(length, np.bool_)
    sampled[prompt_length:] = True
    logprobs = np.zeros(length, np.float32)
    logprobs[prompt_length:] = generation.logprobs
    return Trajectory(
        task=task,
        sample_index=sample_index,
        token_ids=np.concatenate([task.prompt_ids, generation.token_ids]).astype(np.int32),
        sampled=sampled,
        logprobs=logprobs,
        turns=np.where(sampled, 0, -1).astype(np.int32),
        parts=(Part(start=0, end=length, prompt_length=prompt_length),),
        segments=tuple(
            Segment(
                start=prompt_length + segment.start,
                end=prompt_length + segment.end,
                policy_version=segment.policy_version,
            )
            for segment in generation.segments
        ),
        text=generation.text,
        stop_reason=generation.stop_reason,
    )
