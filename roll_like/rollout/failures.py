"""When infrastructure loses too much to go on."""

from __future__ import annotations

from roll_like.errors import GenerationError
from roll_like.rollout.collection import Collected


def refuse_too_many_failures(collected: Collected, accepted: float, what: str) -> None:
    """Raise when infrastructure lost more samples than the configuration accepts.

    Args:
        collected: What came back.
        accepted: `rollout.max_failure_fraction`.
        what: What the samples were for, in words.

    Raises:
        GenerationError: Says how many, and shows the first failure whole.
    """
    judged = sum(len(group.samples) for group in (*collected.groups, *collected.rejected))
    lost = len(collected.failures)
    if not lost or lost <= accepted * (judged + lost):
        return
    first = collected.failures[0]
    raise GenerationError(
        f"{lost} of {judged + lost} samples of {what} were lost to failures, above "
        f"rollout.max_failure_fraction: {accepted:g}. The first, at {first.stage} "
        f"{first.name!r} for {first.origin}:\n{first.error}",
        fix=f"mend the {first.stage} that failed; a lost sample is never counted as reward 0",
    )
