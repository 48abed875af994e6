"""Tries a reward on answers whose correct score is known, and reports what is suspicious.

    report = check_reward(my_reward, cases=[RewardCase(prompt="6 × 7?", answer="42", gold=("42",), wrong=("41",))])
    print(report)

A reward that pays for the wrong thing is what a policy learns first, and a curve that goes up shows nothing
of it. Right answers should get 1, wrong ones less, empty ones nothing, and answers that were only written to be
paid no more; the same answer should get the same every time, at once, and without an exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from roll_like.cluster.driver_loop import DriverLoop
from roll_like.errors import (
    FOREIGN_ERRORS,
    ConfigError,
    DataError,
    RefusedAnswerError,
    RewardError,
    RollLikeError,
    describe_error,
    shortened,
)
from roll_like.registry import REWARDS
from roll_like.rewards.base import (
    Completion,
    Reward,
    RewardCase,
    RewardConfig,
    RewardResult,
    given_completion,
    reward_class,
)
from roll_like.rewards.calibration import Calibration
from roll_like.rewards.call import ResultOrError, RewardCaller
from roll_like.rewards.cases import general_hostile, read_cases
from roll_like.types import Message, Task

if TYPE_CHECKING:
    from rich.console import Console

CaseKind: TypeAlias = Literal["gold", "wrong", "empty", "hostile"]
KINDS: tuple[CaseKind, ...] = ("gold", "wrong", "empty", "hostile")

SLOW_SECONDS = 1.0
_EPSILON = 1e-6
_SHOWN = 50  # characters of an answer in a table


@dataclass(frozen=True, slots=True)
class _Trial:
    """An answer's outcome, and the seconds that it took."""

    outcome: ResultOrError
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAnswer:
    """One answer and what the reward made of it.

    Attributes:
        kind: What the answer is.
        text: The answer.
        case: Number of its row, from 0.
        value: What it got the first time; None where it could not be scored.
        seconds: The shortest time that it took; of its whole group for a reward that scores groups.
        problems: What is suspicious about it.
    """

    kind: CaseKind
    text: str
    case: int
    value: float | None
    seconds: float
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReport:
    """What `check_reward` found.

    Attributes:
        name: The reward.
        answers: Every answer that was tried.
        problems: What is suspicious about the reward as a whole, or about a row.
        notes: What was not checked.
        calibration: How far it agrees with labelled pairs and criteria.
    """

    name: str
    answers: tuple[CheckedAnswer, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def suspicious(self) -> list[str]:
        """Everything that is suspicious, one line each."""
        return [*self.problems, *(line for answer in self.answers for line in answer.problems)]

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, color_system=None, force_terminal=False, force_jupyter=False)
        with console.capture() as capture:
            self.show(console)
        return capture.get()

    def show(self, console: Console) -> None:
        """Print a table of the kinds of answer, and one of what is suspicious."""
        from rich.table import Table
        from rich.text import Text

        table = Table("answers", title=f"Reward {self.name!r}", title_justify="left")
        for column in ("tried", "lowest", "mean", "highest", "lost", "slowest", "suspicious"):
            table.add_column(column, justify="right")
        for kind in KINDS:
            of_kind = [answer for answer in self.answers if answer.kind == kind]
            values = [answer.value for answer in of_kind if answer.value is not None]
            table.add_row(
                *(kind, str(len(of_kind))),
                *(f"{figure(values):.3g}" if values else "–" for figure in (min, fmean, max)),
                str(len(of_kind) - len(values)),
                f"{max((answer.seconds for answer in of_kind), default=0.0):.3f} s",
                str(sum(bool(answer.problems) for answer in of_kind)),
            )
        console.print(table)
        self.calibration.show(console)
        for note in self.notes:
            console.print(Text(f"note: {note}"))
        if not self.suspicious:
            console.print("nothing is suspicious")
            return
        found = Table("answer", "text", title=f"Suspicious: {len(self.suspicious)}", title_justify="left")
        found.add_column("why", overflow="fold")
        for problem in self.problems:
            found.add_row("–", "–", Text(shortened(problem)))
        told: dict[str, list[CheckedAnswer]] = {}
        for answer in self.answers:
            for problem in answer.problems:
                told.setdefault(problem, []).append(answer)
        for problem, (first, *others) in told.items():
            which = f"{first.kind}, row {first.case + 1}" + (f", and {len(others)} more" if others else "")
            found.add_row(which, Text(_short(first.text)), Text(shortened(problem)))
        console.print(found)


def check_reward(
    reward: str | type[Reward] | Reward | Callable[[Completion], Any],
    cases: Sequence[RewardCase] | str | Path | None = None,
    *,
    settings: Mapping[str, Any] | RewardConfig | None = None,
    slow_seconds: float = SLOW_SECONDS,
    timeout_seconds: float = 60.0,
) -> RewardReport:
    """Try a reward on right, wrong, empty and hostile answers, each twice.

    Args:
        reward: A registered name, a `Reward` class or object, or a function of a `Completion`.
        cases: Rows with answers, or a file of them (see `read_cases`); default: the reward's own.
        settings: The reward's settings, where `reward` is no object.
        slow_seconds: What takes longer is suspicious.
        timeout_seconds: Limit of one call.

    Returns:
        What was tried and what is suspicious. A word counts as a token, and every answer as finished.

    Raises:
        ConfigError: The settings are wrong.
        DataError: The file cannot be read.
        PluginError: There is no such reward.
        RewardError: The reward cannot be started.
    """
    if isinstance(cases, str | Path):
        cases = read_cases(Path(cases))
    made, name = _made(reward, settings)
    try:
        try:
            made.start()
        except RollLikeError:
            raise
        except FOREIGN_ERRORS as error:
            raise RewardError(f"the reward {name!r} cannot start: {describe_error(error)}") from error
        own = list(made.cases() if cases is None else cases)
        return _check(made, name, own, slow_seconds, timeout_seconds)
    finally:
        made.close()


def _made(reward: Any, settings: Mapping[str, Any] | RewardConfig | None) -> tuple[Reward, str]:
    """Return the reward as an object, and its name."""
    if isinstance(reward, Reward):
        return reward, reward.config.name or reward.config.type
    if isinstance(reward, str):
        plugin, name = REWARDS.get(reward), reward
    else:
        name = getattr(reward, "__name__", "reward")
        plugin = reward if isinstance(reward, type) else reward_class(reward)
    if isinstance(settings, RewardConfig):
        config = settings
    else:
        try:
            config = plugin.Config.model_validate({"type": name, **(settings or {})} | _fixed_type(plugin))
        except ConfigError as error:
            raise ConfigError(
                f"the settings of the reward {name!r} are wrong: {error.message}",
                fix="give them: `roll-like check-reward NAME key=value`, `--config FILE`, or `settings=` from Python",
            ) from error
    try:
        return plugin(config), name
    except RollLikeError:
        raise
    except FOREIGN_ERRORS as error:
        raise RewardError(f"the reward {name!r} cannot be made: {describe_error(error)}") from error


def _fixed_type(plugin: type[Reward]) -> dict[str, Any]:
    """A class that was never registered may still fix its `type`."""
    default = plugin.Config.model_fields["type"].default
    return {"type": default} if isinstance(default, str) else {}


def _check(reward: Reward, name: str, cases: list[RewardCase], slow: float, timeout: float) -> RewardReport:
    notes = []
    if not cases:
        cases = [RewardCase(gold=(), prompt="Say something.")]
        notes.append("the reward brings no answers whose correct score is known: right answers were not tried")
    answers: list[CheckedAnswer] = []
    problems: list[str] = []
    calibration = Calibration()
    with DriverLoop() as loop:
        for number, case in enumerate(cases):
            try:
                _check_row(reward, case, number)
            except RollLikeError as error:
                problems.append(f"row {number + 1} is refused: {error}")
            except FOREIGN_ERRORS as error:
                problems.append(f"row {number + 1} is refused: {describe_error(error)}")
            loop.run(_calibrate(reward, case, number, timeout, calibration))
            if (case.pairs or case.judged) and not (case.gold or case.wrong or case.hostile):
                continue  # labels are all that the row is about
            tried = list(_answers(case, floods=number == 0))
            completions = [_completion(case, text) for _, text in tried]
            trials = [loop.run(_try(reward, completions, timeout)) for _ in range(2)]
            pairs = [list(pair) for pair in zip(*trials, strict=True)]
            answers += _checked(case, number, tried, pairs, slow)
    if all(case.answer is None for case in cases) and any("'NoneType'" in line for a in answers for line in a.problems):
        notes.append(
            "no row has a reference answer, so completion.answer is None; in a configuration, set answer_field of the "
            "sources, and in a file of cases the field `answer`"
        )
    if answers and not any(answer.kind == "gold" for answer in answers) and not notes:
        notes.append(
            "no row has a right answer, so it was not tried whether right answers score 1; write some as `gold` of a "
            "row in a file, and name it with --cases"
        )
    return RewardReport(
        name=name,
        answers=tuple(answers),
        problems=(*problems, *calibration.suspicions()),
        notes=tuple(notes),
        calibration=calibration,
    )


async def _calibrate(reward: Reward, case: RewardCase, number: int, timeout: float, calibration: Calibration) -> None:
    """Score a row's labelled pairs twice, each as a group of two, and its labelled answers once."""
    for pair in case.pairs:
        completions = [_completion(case, text) for text in pair]
        trials = [await _try(reward, completions, timeout) for _ in range(2)]
        calibration.add_pair(number, [(better.outcome, worse.outcome) for better, worse in trials])
    judged = await _try(reward, [_completion(case, text) for text, _ in case.judged], timeout) if case.judged else []
    calibration.add_verdicts(number, case, [trial.outcome for trial in judged])


async def _try(reward: Reward, completions: list[Completion], timeout: float) -> list[_Trial]:
    """Return a trial for each completion: scored alone where a result depends on nothing else, else as a group."""
    groups = [[item] for item in completions] if reward.per_sample else [completions]
    trials: list[_Trial] = []
    caller = RewardCaller(reward, timeout)
    for group in groups:
        began = time.perf_counter()
        outcomes, _ = await caller.call(group)
        seconds = time.perf_counter() - began
        trials += [_Trial(outcome, seconds) for outcome in outcomes]
    return trials


def _check_row(reward: Reward, case: RewardCase, number: int) -> None:
    task = Task(
        task_id=f"check:{number}",
        source="check",
        domain="check",
        messages=_messages(case),
        prompt_ids=np.zeros(0, np.int32),
        answer=case.answer,
        metadata=case.metadata,
        origin=f"row {number + 1}",
    )
    for name in reward.required_fields:
        if (case.answer if name == "answer" else case.metadata.get(name)) is None:
            raise DataError(f"the reward needs the field {name!r}")
    reward.check_row(task)


def _answers(case: RewardCase, *, floods: bool) -> Iterator[tuple[CaseKind, str]]:
    """Yield the case's own answers, empty ones, and ones that no reward should trip over or pay."""
    yield from (("gold", text) for text in case.gold)
    yield from (("wrong", text) for text in case.wrong)
    yield from (("empty", text) for text in ("", " \n\t\n"))
    yield from (("hostile", text) for text in case.hostile)
    yield from (("hostile", text) for text in general_hostile(case.prompt, floods=floods))


def _checked(
    case: RewardCase, number: int, tried: list[tuple[CaseKind, str]], pairs: list[list[_Trial]], slow: float
) -> Iterator[CheckedAnswer]:
    gold = [
        trials[0].outcome.value
        for (kind, _), trials in zip(tried, pairs, strict=True)
        if kind == "gold" and isinstance(trials[0].outcome, RewardResult)
    ]
    # where right answers get 0, as with a penalty, answers that are hostile in general may get it too
    paid = min(gold, default=case.gold_value)
    if paid <= case.empty_value and case.gold_value > case.empty_value:
        paid = case.gold_value  # it is not paid at all, which is reported elsewhere
    own = {*case.wrong, *case.hostile}
    for (kind, text), trials in zip(tried, pairs, strict=True):
        first = trials[0].outcome
        value = first.value if isinstance(first, RewardResult) else None
        problems = list(_instability(kind, trials, slow))
        if value is not None:
            problems += _mispaid(case, kind, value, paid, comparable=text in own or case.gold_value > 0)
        yield CheckedAnswer(
            kind=kind,
            text=text,
            case=number,
            value=value,
            seconds=min(trial.seconds for trial in trials),
            problems=tuple(problems),
        )


def _mispaid(case: RewardCase, kind: CaseKind, value: float, paid: float, *, comparable: bool) -> Iterator[str]:
    if kind == "gold" and value < case.gold_value - _EPSILON:
        yield f"a right answer gets {value:.3g}, below {case.gold_value:g}"
    if kind == "empty" and value > case.empty_value + _EPSILON:
        yield f"an empty answer gets {value:.3g}, above {case.empty_value:g}"
    if kind in ("wrong", "hostile") and comparable and value >= paid - _EPSILON:
        yield f"a {kind} answer gets {value:.3g}, as much as a right one"


def _instability(kind: CaseKind, trials: list[_Trial], slow: float) -> Iterator[str]:
    outcomes = [trial.outcome for trial in trials]
    errors = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
    if kind == "hostile" and all(isinstance(outcome, RefusedAnswerError) for outcome in outcomes):
        return  # refused on purpose: lost, and never paid
    values = {outcome.value for outcome in outcomes if isinstance(outcome, RewardResult)}
    if errors:
        again = "" if len(errors) == len(outcomes) else " (once of twice)"
        yield f"cannot be scored{again}: {_last_line(errors[0])}"
    if len(values) > 1:
        yield f"gets another value the second time: {', '.join(f'{value:.3g}' for value in sorted(values))}"
    seconds = min(trial.seconds for trial in trials)
    if seconds > slow:
        yield f"takes {seconds:.2f} s, more than {slow:g} s"


def _completion(case: RewardCase, text: str) -> Completion:
    return given_completion(text, messages=_messages(case), answer=case.answer, metadata=case.metadata)


def _messages(case: RewardCase) -> tuple[Message, ...]:
    return (Message(role="user", content=case.prompt),)


def _last_line(error: RewardError) -> str:
    """The end of a traceback says what happened; remedies for a run are left out."""
    lines = [line for line in error.message.strip().splitlines() if not line.startswith("  fix: ")]
    return lines[-1] if lines else type(error).__name__


def _short(text: str) -> str:
    shown = repr(text[: _SHOWN + 1])[1:-1]
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"
