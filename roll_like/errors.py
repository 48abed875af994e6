"""Every error that roll_like raises on purpose.

    RollLikeError
    ├── ConfigError        (ValueError)    a key, a value or a combination is wrong
    ├── DataError          (ValueError)    a dataset row is wrong; names file and line
    ├── PluginError        (LookupError)   a plugin is unknown, registered twice or unimportable
    ├── ResourceError      (RuntimeError)  the cluster has fewer devices than configured
    ├── WorkerError        (RuntimeError)  a worker process raised or died
    ├── EnvError           (RuntimeError)  an environment failed
    ├── RewardError        (RuntimeError)  a reward failed
    │   └── RefusedAnswerError (RuntimeError)  an answer is beyond what it scores
    ├── GenerationError    (RuntimeError)  the inference engine failed
    ├── SandboxError       (RuntimeError)  a sandbox failed
    ├── EngineError        (RuntimeError)  the training engine failed
    │   └── NonFiniteGradientError (RuntimeError)  several gradients were not finite; the weights are
    ├── WeightSyncError    (RuntimeError)  trainer and inference hold different weights
    ├── GuardError         (RuntimeError)  figures say that learning breaks down, and a guard ends the run
    ├── HubError           (OSError)       the hub of Hugging Face cannot be reached, or did not take what was sent
    └── CheckpointError    (OSError)       a checkpoint cannot be written or read
        └── DiskFullError      (OSError)       not written for want of space, and a later attempt may succeed

Each carries one message that says what was found, what was expected and which key to change.
All of them survive pickling, because they cross Ray's process borders.
"""

from __future__ import annotations

import signal
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: Exit codes of the command line. `RETRY` is EX_TEMPFAIL of sysexits.h: the same command may succeed later.
OK, FAILED, WRONG_CONFIG, RETRY, INTERRUPTED = 0, 1, 2, 75, 130

#: Signals that ask a run to end: schedulers send one of the first two before they end a job, a closed terminal SIGHUP.
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

#: What code of users and of other libraries ends with. `sys.exit()` in it is its mistake, and ends no command.
FOREIGN_ERRORS = (Exception, SystemExit)

#: Folders of code that no plugin's author looks for a mistake in.
_NOT_THEIRS = (
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")),
    f"{Path(__file__).resolve().parent}/",
)
#: Lines of a message from its beginning and from its end that are shown of a long one.
_FIRST, _LAST = 5, 3


class RollLikeError(Exception):
    """Base of every error of this package.

    Args:
        message: What was found and what was expected.
        fix: What the reader should change; printed after the message.
    """

    #: Whether the run may succeed where it is simply continued: a process or a machine was lost.
    retry: ClassVar[bool] = False
    #: Role and rank of the worker that raised it or died, where one did: ("inference", 1).
    worker: tuple[str, int] | None = None

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message}\n  fix: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.fix, self.worker))


def _rebuild(cls: type[RollLikeError], message: str, fix: str | None, worker: tuple[str, int] | None) -> RollLikeError:
    error = cls(message, fix=fix)
    error.worker = worker
    return error


class ConfigError(RollLikeError, ValueError):
    """A configuration key, value or combination is wrong."""


class DataError(RollLikeError, ValueError):
    """A dataset or one of its rows is wrong."""


class PluginError(RollLikeError, LookupError):
    """A plugin is unknown, registered twice or cannot be imported."""


class ResourceError(RollLikeError, RuntimeError):
    """The cluster has fewer resources than configured."""


class WorkerError(RollLikeError, RuntimeError):
    """A worker process raised or died; the message ends with its traceback."""


class EnvError(RollLikeError, RuntimeError):
    """An environment failed; the episode is left out of training."""


class RewardError(RollLikeError, RuntimeError):
    """A reward failed; the sample is left out of training."""


class RefusedAnswerError(RewardError):
    """A reward's own limits keep it from scoring an answer, one that is too long, say; the sample is left out."""


class GenerationError(RollLikeError, RuntimeError):
    """The inference engine failed to start or to generate."""


class SandboxError(RollLikeError, RuntimeError):
    """A sandbox failed to start or to isolate."""


class EngineError(RollLikeError, RuntimeError):
    """The training engine failed to start or to step."""


class NonFiniteGradientError(EngineError):
    """Updates were skipped because their gradients were not finite, also when they were computed again: too many.

    None of them has changed weights, moments or the schedule. All ranks are alive, and are where the last update that
    was taken has left them. The same data would give the same gradients again, so that `retry` is False.
    """


class WeightSyncError(RollLikeError, RuntimeError):
    """Trainer and inference engine do not hold the same weights."""


class GuardError(RollLikeError, RuntimeError):
    """Figures of a step say that learning breaks down, and `guards.stop` names that guard."""


class HubError(RollLikeError, OSError):
    """The hub of Hugging Face cannot be reached, or did not take what was sent."""


class CheckpointError(RollLikeError, OSError):
    """A checkpoint cannot be written or read."""


class DiskFullError(CheckpointError):
    """A checkpoint was not written, for want of space; everything is as before, so a later attempt may succeed."""


def whole_call(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call foreign code in a thread that a task waits for: no future takes a StopIteration, and the task would hang."""
    try:
        return function(*arguments, **options)
    except StopIteration as error:
        raise RuntimeError(f"StopIteration {error}".strip()).with_traceback(error.__traceback__) from error


def describe_error(error: BaseException) -> str:
    """Return an error with the innermost line of the plugin's own code that it passed through.

    Lines of installed packages, of Python's library and of roll_like are left out where there are others.
    """
    if isinstance(error, SyntaxError):  # says itself where it is
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_NOT_THEIRS, "<frozen "))]
    where = "".join(f" ({frame.filename}:{frame.lineno}, `{frame.line}`)" for frame in (own or frames)[-1:])
    return f"{type(error).__name__}: {error}{where}"


def shortened(message: str, rest: str = "") -> str:
    """Return the first and the last lines of a message that another library wrote at length.

    Args:
        message: The whole.
        rest: What shows the rest, in words.
    """
    lines = message.splitlines()
    if len(lines) <= _FIRST + _LAST + 1:
        return message
    left_out = f"… {len(lines) - _FIRST - _LAST} lines are left out" + (f"; {rest}" if rest else "")
    return "\n".join([*lines[:_FIRST], left_out, *lines[-_LAST:]])
