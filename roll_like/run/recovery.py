"""What a run does when the process of a model that it trains dies: it starts the ranks anew and goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

from roll_like.cluster.worker_restarts import WorkerRestarts
from roll_like.errors import NonFiniteGradientError, RollLikeError, WorkerError
from roll_like.run.state import RunState

#: A model whose gradients are not finite goes back once in so many steps.
REWIND_STEPS = 100


class Recovery:
    """Replaces the ranks of trained models after a failure, and brings them to where they were.

    All ranks of all trained models are started anew and load the newest checkpoint. The steps since then are computed
    again, on the samples that they were trained on: weights, moments and random states become what they were, to the
    bit where the ranks compute deterministically. Engines, rewards and environments go on.

    A process that died is replaced as often as `RestartBudget` grants; so is one that raised an error that is not of
    this package (of a device, say, or of a network). An error that ends the same step twice ends the run: it does not
    pass by itself.

    A model whose gradients have stopped being finite goes back to its last healthy checkpoint, and on with new samples;
    once in `REWIND_STEPS` steps.

    Args:
        sleep: Waits for so many seconds.
    """

    def __init__(self, state: RunState, sleep: Callable[[float], None] = time.sleep) -> None:
        self._state = state
        self._sleep = sleep
        self._restarts: dict[str, WorkerRestarts] = {}
        self._last: tuple[type[RollLikeError], int] | None = None
        self._rewound: int | None = None

    def after(self, error: RollLikeError) -> None:
        """Go on after an error, where that may help.

        Args:
            error: What ended `Pipeline.run`, which may be called again when this returns.

        Raises:
            RollLikeError: The error, where it would come again or is none of a trained model's ranks; or that of a rank
                that could not be started again.
        """
        if isinstance(error, NonFiniteGradientError):
            self._go_back(error)
            return
        role, _ = error.worker or ("", 0)
        trained = self._state.trained
        failure = (type(error), self._state.reached)
        if role not in {engine.cluster.name for engine in trained} or not isinstance(error, WorkerError):
            raise error
        if failure == self._last:
            error.message += f"; step {self._state.reached + 1} ended like this twice, so it is not tried again"
            raise error
        self._last = failure
        if role not in self._restarts:
            self._restarts[role] = WorkerRestarts(role, "", self._state.recovered)

        def start() -> str:
            self._state.metrics.phase(f"starting {role} again")
            for engine in trained:
                engine.rebuild()
            return self._state.rewind()

        self._restarts[role].replace("every rank of the trained models", error, start, self._sleep)

    def _go_back(self, error: NonFiniteGradientError) -> None:
        step = self._state.finished + 1
        if self._rewound is not None and step - self._rewound < REWIND_STEPS:
            error.message += f"; already rolled back at step {self._rewound}; it did not help"
            raise error
        began = time.monotonic()
        found = self._state.go_back()
        if found is None:
            raise error
        self._rewound = step
        seconds = time.monotonic() - began
        self._state.metrics.event("rewind", step=step, to=found, seconds=seconds)
        self._state.metrics.warn(
            f"{error.message}; after {seconds:.0f} s the models are where they were after step {found}, step {step} is "
            "left out, and the run goes on with new samples"
        )
