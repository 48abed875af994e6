"""Guards: figures of a step that say that learning breaks down. They warn, and end the run where configured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from statistics import median

from roll_like.config.run import GuardName, GuardsConfig

Values = Mapping[str, float]

#: Steps that say what is usual of a figure.
USUAL_STEPS = 20
#: Weight of the newest step in a moving mean.
NEWEST = 0.1
#: Steps in a row in which engine and trainer must disagree.
MISMATCH_STEPS = 3
#: A usual mismatch below this counts as this: growth from nearly nothing says nothing. Nats.
LEAST_MISMATCH = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A guard that has just found something.

    Attributes:
        guard: Its name in the configuration.
        text: One sentence: what was found, what is usual, what it may mean.
        stop: Whether it ends the run.
    """

    guard: GuardName
    text: str
    stop: bool


class Guards:
    """Looks at every step's figures. Metrics that a run does not have are not looked at.

    A guard gives an alarm when it starts to find something, and again only after a step in which it found nothing.

    Args:
        config: Which guards end the run, and how long figures must be bad.
    """

    def __init__(self, config: GuardsConfig) -> None:
        self._config = config
        self._found: dict[GuardName, Callable[[Values], str | None]] = {
            "mismatch": _Mismatch(config.mismatch_limit, config.mismatch_growth).found,
            "grad_norm": _GradNorm().found,
            "reward": _Reward(config.patience).found,
            "entropy": _Entropy(config.patience).found,
            "truncation": _Lasting(
                "rollout/truncated",
                0.9,
                config.patience,
                "the token limit cuts nearly all answers: raise it, or look for endless repetition (roll-like "
                "rollouts RUN)",
            ).found,
            "zero_variance": _Lasting(
                "rollout/groups/zero_variance",
                0.98,
                config.patience,
                "nearly all groups have equal rewards, so there is nothing to learn from: the tasks are solved, too "
                "hard, or the reward always says the same",
            ).found,
        }
        self._active: set[GuardName] = set()

    @property
    def healthy(self) -> bool:
        """Whether the policy of the last step is one to go on from."""
        return not self._active & {"mismatch", "grad_norm", "reward", "entropy"}

    def check(self, values: Values) -> list[Alarm]:
        """Return the alarms of the next step."""
        alarms = []
        for name, found in self._found.items():
            text = found(values)
            if text is None:
                self._active.discard(name)
            elif name not in self._active:
                self._active.add(name)
                alarms.append(Alarm(guard=name, text=text, stop=name in self._config.stop))
        return alarms


def skipped_updates(values: Values) -> Iterator[str]:
    """Yield a sentence for each model of which updates were skipped in a step; that leaves it as healthy as it was."""
    for name, count in values.items():
        model, _, figure = name.rpartition("/")
        if figure == "skipped_updates":
            norm = f"{model}/grad_norm"
            yield (
                f"{name} is {count:.0f}: the gradient was not finite ({norm} is {values[norm]}), also when it was "
                "computed again; weights and optimizer are as they were before"
            )


def without_update(values: Values) -> str | None:
    """Return why the weights are as they were before a step in which there was nothing to learn; None if there was.

    >>> without_update({"train/updates": 0, "rollout/groups/accepted": 16, "rollout/groups/zero_variance": 1})
    'all 16 groups have equal rewards'
    >>> without_update({"train/updates": 1})
    """
    if values.get("train/updates", 1) > 0 or "train/skipped_updates" in values:
        return None
    if values.get("rollout/groups/zero_variance") == 1:
        return f"all {values['rollout/groups/accepted']:.0f} groups have equal rewards"
    return "no sample has an advantage"


class NothingLearned:
    """Says that a step had no update: the first, second, fourth, eighth, … time in a run."""

    def __init__(self) -> None:
        self._steps = 0

    def found(self, values: Values) -> Iterator[str]:
        """Yield a sentence where it is time for one."""
        why = without_update(values)
        if why is None:
            return
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:  # a power of two
            yield f"{why}: no update" + (f" ({self._steps} steps of this run had none)" if self._steps > 1 else "")


class _Mismatch:
    """Engine and trainer disagree about the same tokens more than they may, or more than they did at first."""

    def __init__(self, limit: float, growth: float) -> None:
        self._limit = limit
        self._growth = growth
        self._usual: list[float] = []
        self._steps = 0

    def found(self, values: Values) -> str | None:
        now = values.get("mismatch/kl")
        if now is None:
            return None
        if len(self._usual) < USUAL_STEPS:
            self._usual.append(now)
        usual = median(self._usual)
        grown = self._growth * max(usual, LEAST_MISMATCH)
        bad = not now <= self._limit or (len(self._usual) == USUAL_STEPS and now > grown)  # NaN is bad too
        self._steps = self._steps + 1 if bad else 0
        if self._steps < MISMATCH_STEPS:
            return None
        return (
            f"mismatch/kl is {now:.3g} nats, and was {usual:.3g} in the first steps (guards.mismatch_limit is "
            f"{self._limit:g}, mismatch_growth {self._growth:g}): engine and trainer compute different probabilities "
            "of the same tokens; compare their precisions, and look at sync/probe"
        )


class _GradNorm:
    """One update is much larger than those before it."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._steps = 0

    def found(self, values: Values) -> str | None:
        now = values.get("train/grad_norm")
        if now is None or not isfinite(now):  # such an update is not taken
            return None
        mean, self._steps = self._mean, self._steps + 1
        if mean is None:
            self._mean = now
            return None
        self._mean = mean + NEWEST * (min(now, 10 * mean) - mean)
        if self._steps <= USUAL_STEPS or now <= 10 * mean:
            return None
        return (
            f"train/grad_norm is {now:.3g}, and its moving mean was {mean:.3g}: one update may have harmed the policy; "
            "lower training.optimizer.max_grad_norm or lr if this comes again"
        )


class _Reward:
    """The reward has fallen to less than half of the best that it was, and stays there."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._mean: float | None = None
        self._best = 0.0
        self._steps = 0

    def found(self, values: Values) -> str | None:
        now = values.get("rollout/reward/mean")
        if now is None:
            return None
        self._mean = now if self._mean is None else self._mean + NEWEST * (now - self._mean)
        self._best = max(self._best, self._mean)
        self._steps = self._steps + 1 if self._best > 0 and self._mean < self._best / 2 else 0
        if self._steps < self._patience:
            return None
        return (
            f"rollout/reward/mean is {self._mean:.3g} on average, and was {self._best:.3g} at its best, "
            f"{self._steps} steps long: the policy has lost what it had learned; continue from an earlier checkpoint "
            "with a lower training.optimizer.lr, or with a KL term"
        )


class _Entropy:
    """The policy hardly chooses any more."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._first: deque[float] = deque(maxlen=USUAL_STEPS)
        self._steps = 0

    def found(self, values: Values) -> str | None:
        now = values.get("train/entropy")
        if now is None:
            return None
        if len(self._first) < USUAL_STEPS:
            self._first.append(now)
            return None
        usual = median(self._first)
        self._steps = self._steps + 1 if now < usual / 10 else 0
        if self._steps < self._patience:
            return None
        return (
            f"train/entropy is {now:.3g} nats, and was {usual:.3g} in the first steps, {self._steps} steps long: all "
            "answers to a prompt become alike; raise algorithm.entropy_coefficient, rollout.temperature or "
            "algorithm.loss.clip_high"
        )


class _Lasting:
    """A share stays above a bound."""

    def __init__(self, metric: str, bound: float, patience: int, meaning: str) -> None:
        self._metric = metric
        self._bound = bound
        self._patience = patience
        self._meaning = meaning
        self._steps = 0

    def found(self, values: Values) -> str | None:
        now = values.get(self._metric)
        if now is None:
            return None
        self._steps = self._steps + 1 if now > self._bound else 0
        if self._steps < self._patience:
            return None
        return f"{self._metric} was above {self._bound:g} for {self._steps} steps (now {now:.3g}): {self._meaning}"
