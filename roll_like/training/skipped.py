"""Updates that are skipped because their gradient is not finite: one is bad luck, several of them end a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from roll_like.errors import NonFiniteGradientError
from roll_like.values import Metric, Sum, merge

#: The metric of the seconds that ranks compute.
COMPUTE_SECONDS = "time/train_compute"

#: How many updates are looked back on.
LAST_UPDATES = 100
#: How many of them end a run, and how many in a row.
MOST_SKIPPED, MOST_IN_A_ROW = 3, 2


class SkippedUpdates:
    """Remembers which of a model's last updates were skipped.

    No part of checkpoints: a run that continues from one meets each of its later updates for the first time.

    Args:
        section: The model's section of the configuration, for messages.

    Attributes:
        metric: Counts skipped updates; an update that was skipped has it.
    """

    def __init__(self, section: str, prefix: str) -> None:
        self._section, self._prefix = section, prefix
        self.metric = f"{prefix}/skipped_updates"
        self._last: deque[float | None] = deque(maxlen=LAST_UPDATES)

    def attempts(self, parts: list[dict[str, Metric]]) -> Iterator[list[dict[str, Metric]]]:
        """Yield a list for the metrics of an update's phases: once, and again where the gradient was not finite.

        What a fault of the hardware or a kernel whose results vary has caused is gone the second time.

        Args:
            parts: Gets the update's metrics at the end.

        Raises:
            NonFiniteGradientError: Too many updates were skipped.
        """
        phases: list[dict[str, Metric]] = []
        yield phases
        metrics = _attempt(phases)
        if self.metric in metrics:
            first, phases = metrics[COMPUTE_SECONDS], []
            yield phases
            metrics = merge([{COMPUTE_SECONDS: first}, _attempt(phases)])
            if self.metric not in metrics:
                metrics[f"{self._prefix}/recomputed_updates"] = Sum(1.0)
        if self.metric in metrics:
            grad_norm = f"{self._prefix}/grad_norm"
            self.note(metrics[grad_norm].value)
            # no figures of the loss: they may be NaN as well, and what follows from them (a KL coefficient) stays so
            metrics = {self.metric: Sum(1.0), **{name: metrics[name] for name in (grad_norm, COMPUTE_SECONDS)}}
        else:
            self.note(None)
        parts.append(metrics)

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


def _attempt(phases: Sequence[dict[str, Metric]]) -> dict[str, Metric]:
    seconds = sum(phase.pop(COMPUTE_SECONDS).value for phase in phases)
    return merge([*phases, {COMPUTE_SECONDS: Sum(seconds)}])
