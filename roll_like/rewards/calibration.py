"""How far a reward agrees with labels: pairs of a better and a worse answer, and criteria that are met or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import TYPE_CHECKING

from roll_like.errors import RewardError
from roll_like.rewards.base import RewardCase, RewardResult
from roll_like.rewards.call import ResultOrError

if TYPE_CHECKING:
    from rich.console import Console


#: Fewer answers with one of the two labels leave kappa to chance: among 19 and 1, a single error can make it 0.
_FEWEST = 5


@dataclass(slots=True)
class PairAgreement:
    """Labelled pairs, by what the reward made of them.

    Attributes:
        better: The better answer got more.
        tied: Both got the same.
        worse: The worse answer got more.
        lost: One could not be scored.
        changed: Scored twice, the two differ in which got more.
    """

    better: int = 0
    tied: int = 0
    worse: int = 0
    lost: int = 0
    changed: int = 0

    @property
    def scored(self) -> int:
        """Pairs of which both answers were scored."""
        return self.better + self.tied + self.worse

    @property
    def accuracy(self) -> float:
        """Share of the scored pairs that the reward orders as the label does; a tie counts half."""
        return (self.better + self.tied / 2) / self.scored if self.scored else nan


@dataclass(slots=True)
class CriterionAgreement:
    """A criterion's confusion matrix: what the label says, and what the reward.

    Attributes:
        met: Both say that it is met.
        wrongly_met: The reward alone says so.
        missed: The label alone says so.
        unmet: Both say that it is not.
        undecided: Half of the votes each.
    """

    met: int = 0
    wrongly_met: int = 0
    missed: int = 0
    unmet: int = 0
    undecided: int = 0

    def add(self, label: bool, share: float) -> None:
        """Count an answer of which this share of votes said that the criterion is met."""
        if share == 0.5:
            self.undecided += 1
        elif label:
            self.met += share > 0.5
            self.missed += share < 0.5
        else:
            self.wrongly_met += share > 0.5
            self.unmet += share < 0.5

    def merge(self, other: CriterionAgreement) -> None:
        """Add another criterion's counts."""
        for name in ("met", "wrongly_met", "missed", "unmet", "undecided"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def decided(self) -> int:
        """Answers on which the reward said one or the other."""
        return self.met + self.wrongly_met + self.missed + self.unmet

    @property
    def has_kappa(self) -> bool:
        """Whether both labels are frequent enough for kappa to tell something."""
        return min(self.met + self.missed, self.wrongly_met + self.unmet) >= _FEWEST

    @property
    def accuracy(self) -> float:
        """Share of all labels that the reward agrees with; what it leaves undecided counts half."""
        every = self.decided + self.undecided
        return (self.met + self.unmet + self.undecided / 2) / every if every else nan

    @property
    def kappa(self) -> float:
        """Cohen's kappa: agreement beyond what the two rates of "met" give by chance; NaN where that is certain."""
        if not self.decided:
            return nan
        observed = (self.met + self.unmet) / self.decided
        labelled = (self.met + self.missed) / self.decided
        said = (self.met + self.wrongly_met) / self.decided
        chance = labelled * said + (1 - labelled) * (1 - said)
        return (observed - chance) / (1 - chance) if chance < 1 else nan


@dataclass(slots=True)
class Calibration:
    """Agreement with all labels of some rows.

    Attributes:
        pairs: Of labelled pairs.
        criteria: Of labelled criteria, by name.
        lost: Labelled answers that could not be scored.
        problems: What is suspicious.
    """

    pairs: PairAgreement = field(default_factory=PairAgreement)
    criteria: dict[str, CriterionAgreement] = field(default_factory=dict)
    lost: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def all_criteria(self) -> CriterionAgreement:
        """The counts of all criteria together."""
        together = CriterionAgreement()
        for each in self.criteria.values():
            together.merge(each)
        return together

    def add_pair(self, number: int, trials: Sequence[tuple[ResultOrError, ResultOrError]]) -> None:
        """Count a pair that was scored some times: the outcomes of the better and of the worse answer."""
        orders = []
        for outcomes in trials:
            results = [outcome for outcome in outcomes if isinstance(outcome, RewardResult)]
            if len(results) < len(outcomes):
                self.pairs.lost += 1
                self._fail(number, "a labelled pair", outcomes)
                return
            orders.append((results[0].value > results[1].value) - (results[0].value < results[1].value))
        self.pairs.better += orders[0] > 0
        self.pairs.tied += orders[0] == 0
        self.pairs.worse += orders[0] < 0
        self.pairs.changed += len(set(orders)) > 1

    def add_verdicts(self, number: int, case: RewardCase, outcomes: Sequence[ResultOrError]) -> None:
        """Count a row's labelled answers."""
        for (text, labels), outcome in zip(case.judged, outcomes, strict=True):
            if not isinstance(outcome, RewardResult):
                self.lost += 1
                self._fail(number, "a labelled answer", [outcome])
                continue
            names = list(outcome.verdicts)
            named = dict(zip(names, labels, strict=False)) if isinstance(labels, tuple) else dict(labels)
            if not names and not text.strip():
                self.problems.append(
                    f"row {number + 1} labels criteria of an empty `response`, which no judge reads; remove it"
                )
            elif not names:
                self.problems.append(f"row {number + 1} labels criteria with `met`, and the reward judges no criteria")
            elif len(labels) != len(names) or set(named) != set(names):
                given = f"{len(labels)} labels" if isinstance(labels, tuple) else ", ".join(map(repr, named))
                wanted = ", ".join(map(repr, names))
                self.problems.append(f"row {number + 1}: `met` has {given}, and the rubric has {len(names)}: {wanted}")
            else:
                for name, share in outcome.verdicts.items():
                    self.criteria.setdefault(name, CriterionAgreement()).add(named[name], share)

    def suspicions(self) -> Iterator[str]:
        """Yield where the reward agrees no better than chance."""
        yield from self.problems
        if self.pairs.scored and self.pairs.accuracy <= 0.5:
            yield (
                f"of {self.pairs.scored} labelled pairs it orders {self.pairs.accuracy:.0%} as the labels do, no more "
                "than chance would"
            )
        for name, each in self.criteria.items():
            if each.has_kappa and each.kappa <= 0:
                yield f"on the criterion {name!r} it agrees with the labels no more than chance would"
        every = self.all_criteria
        if every.kappa <= 0 if every.has_kappa else every.accuracy <= 0.5:
            yield "on all criteria together it agrees with the labels no more than chance would"

    def show(self, console: Console) -> None:
        """Print a table of the pairs and one of the criteria, where there are some."""
        from rich.table import Table
        from rich.text import Text

        if self.pairs.scored or self.pairs.lost:
            table = Table("labelled pairs", title="Agreement with labelled pairs", title_justify="left")
            figures = {
                "better one higher": self.pairs.better,
                "equal": self.pairs.tied,
                "worse one higher": self.pairs.worse,
                "lost": self.pairs.lost,
                "accuracy": _share(self.pairs.accuracy),
                "changed the second time": self.pairs.changed,
            }
            for column in figures:
                table.add_column(column, justify="right")
            table.add_row(str(self.pairs.scored + self.pairs.lost), *map(str, figures.values()))
            console.print(table)
        if self.criteria or self.lost:
            title = "Agreement with labelled criteria" + (f"; answers lost: {self.lost}" if self.lost else "")
            table = Table("criterion", title=title, title_justify="left")
            for column in (
                "both: met",
                "only judge: met",
                "only label: met",
                "both: not",
                "undecided",
                "accuracy",
                "κ",
            ):
                table.add_column(column, justify="right")
            rows = [*self.criteria.items(), *([("all", self.all_criteria)] if len(self.criteria) > 1 else [])]
            for name, each in rows:
                counts = (each.met, each.wrongly_met, each.missed, each.unmet, each.undecided)
                shown = "–" if isnan(each.kappa) else f"{each.kappa:.2f}"
                table.add_row(Text(name), *map(str, counts), _share(each.accuracy), shown)
            console.print(table)

    def _fail(self, number: int, what: str, outcomes: Sequence[ResultOrError]) -> None:
        error = next(outcome for outcome in outcomes if isinstance(outcome, RewardError))
        self.problems.append(f"row {number + 1}: {what} cannot be scored: {error.message.strip().splitlines()[-1]}")


def _share(value: float) -> str:
    return "–" if isnan(value) else f"{value:.0%}"
