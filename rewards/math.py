r"""Mathematical answers: whether the response's final answer equals the reference answer.

`mathematics` reads both (LaTeX, plain notation, units, lists, intervals, …) and compares them as mathematics, with
sympy and math-verify's parser. A response's final answer is in its last `\boxed{…}`; without one on its last line
`#### 42`, as in GSM8K; without that after "the answer is", or at its end. What is written after it does not count.
It runs in processes of its own, because sympy never finishes with some expressions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll_like import Completion, Outcome, Reward, RewardCase, RewardConfig, RewardResult, register_reward
from roll_like.builtin.rewards.child_pool import ChildPool
from roll_like.builtin.rewards.mathematics import GivenAnswer, SameAnswer, Verdict
from roll_like.data.numbers import read_number
from roll_like.errors import DataError, RewardError
from roll_like.types import Task

_HIGHER_LIMITS = "raise `timeout_seconds` or `memory_mib` of the math reward"


class MathConfig(RewardConfig):
    """Settings of the `math` reward."""

    type: Literal["math"] = "math"
    compare: Literal["mathematics", "math_verify"] = Field(
        default="mathematics",
        description="mathematics: as described in docs/rewards.md. math_verify: as the library math-verify alone, "
        "which lm-evaluation-harness and lighteval report; for figures to compare with theirs.",
    )
    boxed: bool = Field(default=False, description="Take the answer from `\\boxed{…}` only.")
    relative_tolerance: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Numbers of which one is a decimal also count as equal if they differ by at most this factor of "
        "the larger, for example 0.01 for answers of physics. Default: decimals agree to the reference's last place.",
    )
    timeout_seconds: float = Field(
        default=5.0, gt=0, description="Limit of one comparison; its process is killed and the sample is lost. Seconds."
    )
    processes: int = Field(default=1, ge=1, description="Processes in which one reward worker runs math-verify.")
    memory_mib: int = Field(default=2048, ge=512, description="Address space of one such process. MiB.")

    @model_validator(mode="after")
    def _math_verify_has_no_settings(self) -> Self:
        useless = [key for key in ("boxed", "relative_tolerance") if getattr(self, key)]
        if self.compare == "math_verify" and useless:
            raise ValueError(f"`compare: math_verify` decides alone, so {useless[0]} has no effect; remove it")
        return self


@register_reward("math")
class Math(Reward):
    """1 where the response's answer equals the reference answer, else 0; `parsed` tells whether it had one."""

    Config: ClassVar[type[RewardConfig]] = MathConfig
    required_fields: ClassVar[tuple[str, ...]] = ("answer",)
    per_sample: ClassVar[bool] = True

    config: MathConfig

    def __init__(self, config: MathConfig) -> None:
        super().__init__(config)
        self._pool = ChildPool(
            Path(__file__).with_name("math_child.py"),
            size=config.processes,
            timeout_seconds=config.timeout_seconds,
            arguments=(str(2 * config.timeout_seconds + 10), str(config.memory_mib << 20)),
        )

    def check_row(self, task: Task) -> None:
        """Check that the reference answer is mathematics.

        Raises:
            DataError: It cannot be parsed, or not in time.
        """
        gold = task.answer or ""
        if read_number(gold) is not None:
            return
        result = self._pool.run([(gold, None, False, 0.0, self.config.compare)])[0]
        cause = result if isinstance(result, Exception) else result.unreadable
        if cause:
            raise DataError(
                f"{task.origin}: the answer {gold!r} cannot be parsed as mathematics: {cause}",
                fix="write a number or LaTeX, for example `$\\frac{1}{2}$`; or score this source with another reward",
            )

    def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        """Return 1 or 0 for each completion; a `RewardError` where the comparison failed."""
        settings = (self.config.boxed, self.config.relative_tolerance, self.config.compare)
        requests = [(completion.answer or "", completion.text, *settings) for completion in completions]
        results = self._pool.run(requests)
        return [_outcome(result, request[0]) for result, request in zip(results, requests, strict=True)]

    def answers(self, completions: Sequence[Completion]) -> Sequence[str | RewardError]:
        """Return the answer of each completion, the same text where `math` takes two for the same."""
        read = self._same([(completion.text, ()) for completion in completions])
        givers: dict[str, str] = {}  # of each answer the first response that gives it
        texts: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for completion, one in zip(completions, read, strict=True):
            if not isinstance(one, RewardError) and one.text:
                givers.setdefault(one.read, completion.text)
                texts[one.read] = one.text
                counts[one.read] += 1
        named = self._classes(sorted(counts, key=lambda one: (-counts[one], texts[one], one)), givers, texts)
        return [one if isinstance(one, RewardError) else named[one.read] if one.text else "" for one in read]

    def _classes(
        self, answers: Sequence[str], givers: Mapping[str, str], texts: Mapping[str, str]
    ) -> dict[str, str | RewardError]:
        """Return a text for each answer, equal for the same answers.

        That two answers are the same as a third does not make them the same (50 and 0.5, both right for 50 %), so an
        answer joins the first of those that are the same as all of its own, the more frequent ones first.
        """
        classes: dict[str, list[str]] = {}
        named: dict[str, str | RewardError] = {}
        for answer in answers:
            before = [one for one in named if not isinstance(named[one], RewardError)]
            (compared,) = self._same([(givers[answer], tuple(givers[one] for one in before))])
            if isinstance(compared, RewardError):
                named[answer] = compared
                continue
            same = {before[place] for place in compared.same}
            name = next((name for name, members in classes.items() if same.issuperset(members)), None)
            if name is None:
                text = texts[answer]
                others = (f"{text} [{number}]" for number in count(2))  # 3 cm beside 3 m
                name = text if text not in classes else next(one for one in others if one not in classes)
            classes.setdefault(name, []).append(answer)
            named[answer] = name
        return named

    def _same(self, pairs: Sequence[tuple[str, tuple[str, ...]]]) -> list[GivenAnswer | RewardError]:
        """Return what `same_answer` finds for responses and others; a `RewardError` where it failed."""
        settings = (self.config.boxed, self.config.relative_tolerance, self.config.compare)
        results = self._pool.run([SameAnswer(response, others, *settings) for response, others in pairs])
        return [
            RewardError(f"comparing answers failed: {result}", fix=_HIGHER_LIMITS)
            if isinstance(result, Exception)
            else result
            for result in results
        ]

    def cases(self) -> Sequence[RewardCase]:
        """Return a sum, with answers in the usual forms; none for math-verify, which may grade them otherwise."""
        if self.config.compare == "math_verify":
            return ()
        boxed = ("6 × 7 = 42, so \\boxed{42}.", "\\boxed{42} it is. I hope this helps 7 days a week!")
        plain = ("The answer is 42.", "6 × 7 = 42\n#### 42")
        return (
            RewardCase(
                prompt="What is 6 × 7?",
                answer="42",
                gold=boxed if self.config.boxed else (*boxed, *plain),
                wrong=("\\boxed{43}", "The answer is 43.", "\\boxed{4.2}"),
                hostile=("\\boxed{41} or \\boxed{43}", "1 2 3 41 43", "\\boxed{}", "\\boxed{x}"),
            ),
            RewardCase(
                prompt="What is one half?",
                answer="\\frac{1}{2}",
                gold=("It is \\boxed{0.5}.", "\\boxed{\\frac{2}{4}}"),
                wrong=("\\boxed{2}",),
            ),
        )

    def close(self) -> None:
        """End the processes that run math-verify."""
        self._pool.close()


def _outcome(result: Verdict | Exception, gold: str) -> Outcome:
    if isinstance(result, Exception):
        return RewardError(
            f"comparing with {gold!r} failed: {result}",
            fix=_HIGHER_LIMITS,
        )
    if result.unreadable:
        return RewardError(
            f"the reference answer {gold!r} cannot be parsed as mathematics: {result.unreadable}", fix="correct the row"
        )
    return RewardResult(float(result.equal), {"parsed": float(bool(result.answer))}, result.answer)
