"""Updates that are skipped because their gradient is not finite: one is bad luck, several of them end a run."""

from __future__ import annotations

from collections import deque

from roll_like.errors import NonFiniteGradientError

#: How many updates are looked back on.
LAST_UPDATES = 100
#: How many of them end a run, and how many in a row.
MOST_SKIPPED, MOST_IN_A_ROW = 3, 2


class SkippedUpdates:
    """Remembers which of a model's last updates were skipped.

    No part of checkpoints: a run that continues from one meets each of its later updates for the first time.

    Args:
        section: The model's section of the configuration, for messages.
    """

    def __init__(self, section: str) -> None:
        self._section = section
        self._last: deque[float | None] = deque(maxlen=LAST_UPDATES)

    def note(self, norm: float | None) -> None:
        """Take the next update.

        Args:
            norm: Of the gradient, where the update was skipped; None where it moved the weights.

        Raises:
            NonFiniteGradientError: Too many were skipped.
        """
        self._last.append(norm)
        in_a_row, skipped = (
            [each for each in updates if each is not None]
            for updates in (list(self._last)[-MOST_IN_A_ROW:], self._last)
        )
        if len(in_a_row) == MOST_IN_A_ROW:
            found, norms = f"{MOST_IN_A_ROW} updates in a row", in_a_row
        elif norm is not None and len(skipped) >= MOST_SKIPPED:
            found, norms = f"{len(skipped)} of its last {len(self._last)} updates", skipped
        else:
            return
        raise NonFiniteGradientError(
            f"the {self._section} engine has skipped {found}, because the norms of their gradients are "
            f"{', '.join(map(str, norms))}, also when they are computed again; none of them has moved the weights",
            fix=f"lower {self._section}.optimizer.lr or {self._section}.optimizer.max_grad_norm, or use model.dtype: "
            "float32 to find the cause; --resume continues from the last healthy checkpoint",
        )
