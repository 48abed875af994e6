"""What a reward is, and how one is registered.

    @register_reward("short")
    def short(completion: Completion) -> float:
        return float(len(completion.text.split()) < 20)

A class sees a whole group, takes settings and may be asynchronous:

    @register_reward("judge")
    class Judge(Reward):
        class Config(RewardConfig):
            url: str

        async def score(self, completions: Sequence[Completion]) -> Sequence[RewardResult]: ...
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import Field

from roll_like.config.base import PluginConfig
from roll_like.data.reasoning import split_reasoning
from roll_like.errors import FOREIGN_ERRORS, DataError, PluginError, RewardError, describe_error
from roll_like.registry import REWARDS
from roll_like.types import THINK, Message, Picture, ReasoningTags, StepScore, StopReason, Task, TurnRecord


class RewardConfig(PluginConfig):
    """Settings that every reward has."""

    #: True for rewards that trainers compute (`roll_like.rewards.of_policy`), no reward worker.
    by_policy: ClassVar[bool] = False

    @property
    def extra_tokens(self) -> int:
        """Most tokens that a reward of the policy puts behind a sample."""
        return 0

    name: str | None = Field(default=None, description="Name in metrics; default: its `type`.")
    weight: float = Field(default=1.0, allow_inf_nan=False, description="Factor in the sum of all rewards.")
    sources: tuple[str, ...] | None = Field(default=None, description="Data sources it scores; default: all.")
    domains: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None, description="Domains it scores, `*` for any text (`codegen__*`); default: all."
    )


@contextmanager
def refusing_row(task: Task, fix: str) -> Iterator[None]:
    """Raise a `ValueError` about a row as a `DataError` that says which row it is."""
    try:
        yield
    except ValueError as error:
        raise DataError(f"{task.origin}: {error}", fix=fix) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer or one episode, as a reward sees it.

    Made of `text` alone, without `reasoning` and `full_text`, it is split at `<think>` and `</think>`; a run splits at
    the model's own tags (`model.reasoning`).

    Attributes:
        text: The answer: what follows the reasoning, special tokens removed. Empty where the reasoning has no end. Of
            an episode the policy's last turn.
        messages: The prompt; of an episode its first messages.
        answer: Reference answer, where the dataset has one.
        metadata: The other fields of the row; of an episode `environment` (its name) and `seed`.
        stop_reason: Why the response ended.
        response_tokens: Its length in tokens, reasoning included; of an episode the tokens of all turns.
        turns: The turns of an episode, with tool calls and the environment's rewards; empty for single answers.
        images: The images of the prompt, in order; of an episode those of all its turns.
        reasoning: What was thought before the answer, without the tags; None where there is no reasoning.
        full_text: Everything that was sampled: reasoning, tags and answer.
        tags: What delimits the reasoning, and whether the prompt ended with the opening tag, so that `full_text` lacks
            it; None where the model does not reason.
    """

    text: str
    messages: tuple[Message, ...]
    answer: str | None
    metadata: Mapping[str, Any]
    stop_reason: StopReason
    response_tokens: int
    turns: tuple[TurnRecord, ...] = ()
    images: tuple[Picture, ...] = ()
    reasoning: str | None = None
    full_text: str = ""
    tags: ReasoningTags | None = THINK

    def __post_init__(self) -> None:
        """Split a text that was given alone."""
        if self.full_text or not (self.text or self.reasoning):
            return
        if self.reasoning is not None:
            object.__setattr__(self, "full_text", f"{THINK.open}{self.reasoning}{THINK.close}{self.text}")
            return
        object.__setattr__(self, "full_text", self.text)
        reasoning, answer = split_reasoning(self.full_text)
        object.__setattr__(self, "reasoning", reasoning)
        object.__setattr__(self, "text", answer)
        if reasoning is not None and THINK.open not in self.full_text:
            object.__setattr__(self, "tags", replace(THINK, opened=True))

    @property
    def answer_start(self) -> int:
        """Characters of `full_text` before `text`.

        >>> given_completion("<think>3?</think>5", messages=(), answer=None, metadata={}).answer_start
        17
        """
        if not self.text:
            return len(self.full_text)
        before = self.full_text
        for mark in () if self.tags is None else self.tags.around:  # which may spell the answer
            if before.rstrip().endswith(mark):
                before = before.rstrip().removesuffix(mark)
        return before.rindex(self.text)

    @property
    def conversation(self) -> tuple[Mapping[str, Any], ...]:
        """Every message from the prompt to the end, without reasoning; the policy's have the role `assistant`."""
        if not self.turns:
            return (*self.messages, Message(role="assistant", content=self.text))
        played = (
            message
            for turn in self.turns
            for message in (
                *turn.shown,
                Message(role="assistant", content=split_reasoning(turn.text, turn.reasoning)[1]),
            )
        )
        return (*played, *self.turns[-1].after)


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What a reward gives for one completion.

    Attributes:
        value: The reward.
        details: Figures to report beside it.
        answer: The final answer that was compared, written so that equal answers are equal texts; evaluations vote over
            it (`eval/maj@k`). Empty where the completion has none, None where the reward compares no answers.
        verdicts: Of a reward with criteria, how far each was found to be met, 0 to 1, by its name in the rubric's
            order; `check-reward` compares them with labels.
        steps: Scores of the answer's steps, in order; `value` is what they come to. Estimators that supervise the
            process use them in the place of `value`.
    """

    value: float
    details: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    verdicts: Mapping[str, float] = field(default_factory=dict)
    steps: Sequence[StepScore] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCase:
    """A row with answers whose correct score is known; `roll-like check-reward` scores them.

    Attributes:
        gold: Right answers.
        wrong: Answers that look like right ones and are not.
        hostile: Answers written to be paid without being right.
        prompt: The prompt.
        answer: Reference answer, where the row has one.
        metadata: The row's other fields.
        gold_value: What a right answer should get at least.
        empty_value: What an empty answer may get at most.
        pairs: A better and a worse answer each, as someone has labelled them.
        judged: Answers, and which of the row's criteria someone has found to be met: in the rubric's order, or by name.
    """

    gold: tuple[str, ...]
    wrong: tuple[str, ...] = ()
    hostile: tuple[str, ...] = ()
    prompt: str = ""
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    gold_value: float = 1.0
    empty_value: float = 0.0
    pairs: tuple[tuple[str, str], ...] = ()
    judged: tuple[tuple[str, tuple[bool, ...] | Mapping[str, bool]], ...] = ()


#: What a reward gives for one completion. A `RewardError` in a result's place loses that sample alone.
Outcome: TypeAlias = RewardResult | float | RewardError


class Reward:
    """Base of rewards: scores one group at a time.

    A reward that cannot score raises (the whole group is lost) or returns a `RewardError` in the
    place of one result (that sample is lost). It never returns 0 for a failure: 0 is a score.

    A synchronous `score` runs in a thread, one group at a time. It cannot be stopped from outside, so
    it should bound its own waiting. An `async` one runs beside others, for any number of groups.
    """

    Config: ClassVar[type[RewardConfig]] = RewardConfig
    #: Row fields that must be there; checked for every row before a run starts.
    required_fields: ClassVar[tuple[str, ...]] = ()
    #: True when a result depends on its own completion alone: then only failed samples are tried again.
    per_sample: ClassVar[bool] = False
    #: True when a value says how a sample compares with its group's, and nothing of how good it is: `--check` warns of
    #: evaluations with it.
    relative: ClassVar[bool] = False

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    @property
    def hung(self) -> int:
        """Threads that it left running past their time-out; its process is replaced because of them."""
        return 0

    @property
    def side_by_side(self) -> int | None:
        """Groups that an `async` `score` takes at a time; None for any number.

        For rewards that bound their own work: a group that waits for another's requests or executions would
        run out of its time without being looked at. Its time begins with its turn.
        """
        return None

    def start(self) -> None:
        """Take what scoring needs: a model, processes. Called once, in the reward worker, before anything is scored.

        Checks of a configuration make rewards too, and never start them.
        """

    def cases(self) -> Sequence[RewardCase]:
        """Return rows with answers whose correct score is known, for `roll-like check-reward`; none by default."""
        return ()

    def check_row(self, task: Task) -> None:
        """Check what `required_fields` cannot say about a row, before a run starts.

        Raises:
            DataError: The row cannot be scored; the message begins with `task.origin`.
        """

    def score(self, completions: Sequence[Completion]) -> Sequence[Outcome] | Awaitable[Sequence[Outcome]]:
        """Return one outcome for each completion of a group, in order."""
        raise TypeError(f"{type(self).__name__} defines no `score` to score {len(completions)} completions")

    def answers(self, completions: Sequence[Completion]) -> Sequence[str | RewardError]:
        """Return the final answer of each completion of a group, equal texts for equal answers, `""` where it has none.

        Optional, for rewards that compare answers: the reward `consensus` votes with it. No reference answer is needed.
        """
        raise TypeError(f"{type(self).__name__} defines no `answers` for {len(completions)} completions")

    def close(self) -> None:
        """Free what the reward holds: processes, connections. Called once, at the end of a run."""


RewardFunction: TypeAlias = Callable[[Completion], Any]


def register_reward(name: str) -> Callable[[Any], Any]:
    """Register a `Reward` class, or a function `Completion -> float` (also an async one), under `name`.

    Raises:
        PluginError: The decorated thing is neither, or `name` is taken.
    """

    def add(plugin: Any) -> Any:
        if isinstance(plugin, type):
            if not issubclass(plugin, Reward):
                raise PluginError(
                    f"reward {name!r}: the class {plugin.__qualname__} is not a Reward",
                    fix=f"write `class {plugin.__name__}(Reward)`",
                )
            if not issubclass(plugin.Config, RewardConfig):
                raise PluginError(
                    f"reward {name!r}: the settings {plugin.Config.__qualname__} are not a RewardConfig",
                    fix=f"write `class {plugin.Config.__name__}(RewardConfig)`",
                )
            for method in ("start", "close", "check_row", "cases"):
                if inspect.iscoroutinefunction(getattr(plugin, method)):
                    raise PluginError(
                        f"reward {name!r}: `{method}` is async, and only `score` is awaited",
                        fix=f"write `def {method}`; make what needs an event loop, such as an HTTP session, in `score`",
                    )
            REWARDS.register(name)(plugin)
        elif callable(plugin):
            REWARDS.register(name)(reward_class(plugin))
        else:
            raise PluginError(f"reward {name!r} should be a class or a function, found {plugin!r}")
        return plugin

    return add


def given_completion(
    text: str, *, messages: Sequence[Message], answer: str | None, metadata: Mapping[str, Any]
) -> Completion:
    """Return an answer that no model has sampled, as rewards see it; its tokens are its words.

    Args:
        text: The answer, with or without reasoning in `<think>` tags.
        answer: The reference answer, if there is one.
    """
    return Completion(
        text=text,
        messages=tuple(messages),
        answer=answer,
        metadata=metadata,
        stop_reason=StopReason.STOP,
        response_tokens=len(text.split()),
    )


def failure(error: BaseException) -> RewardError:
    """Return what stands in the place of a result of a reward that raised; its cause is the error."""
    found = RewardError(describe_error(error))
    found.__cause__ = error
    return found


def reward_class(function: RewardFunction) -> type[Reward]:
    """Return a `Reward` class that calls `function` on each completion and loses only those that raise.

    Raises:
        PluginError: It cannot be called with one argument.
    """
    _refuse_other_signatures(function)

    def score_one(completion: Completion) -> Outcome:
        try:
            outcome: Outcome = function(completion)
        except FOREIGN_ERRORS as error:  # its sample becomes a Failure
            return failure(error)
        return outcome

    async def score_one_async(completion: Completion) -> Outcome:
        try:
            outcome: Outcome = await function(completion)
        except FOREIGN_ERRORS as error:
            return failure(error)
        return outcome

    def score(_: Reward, completions: Sequence[Completion]) -> Sequence[Outcome]:
        return [score_one(completion) for completion in completions]

    async def score_async(_: Reward, completions: Sequence[Completion]) -> Sequence[Outcome]:
        return list(await asyncio.gather(*(score_one_async(completion) for completion in completions)))

    namespace = {
        "score": score_async if inspect.iscoroutinefunction(function) else score,
        "per_sample": True,
        "__module__": function.__module__,
        "__qualname__": getattr(function, "__qualname__", repr(function)),
        "__doc__": function.__doc__,
    }
    return type(getattr(function, "__name__", "reward"), (Reward,), namespace)


def _refuse_other_signatures(function: RewardFunction) -> None:
    try:
        inspect.signature(function).bind(object())
    except TypeError:
        name = getattr(function, "__name__", "reward")
        code = getattr(inspect.unwrap(function), "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        raise PluginError(
            f"the reward {name}{inspect.signature(function)} cannot be called with one completion{where}",
            fix=f"write `def {name}(completion: Completion) -> float`; {SIGNATURE}",
        ) from None
    except ValueError:
        return  # what is written in C may not say what it takes


#: What a reward takes and returns, for those who know another library's.
SIGNATURE = (
    "a reward takes one completion and returns a number: `completion.text` is the response, `completion.answer` the "
    "reference answer, `completion.metadata` the row's other columns; functions of verl, TRL, OpenRLHF, slime and "
    "AReaL run as they are with `type: function`"
)
