"""One reward made of others: their weighted sum, their product, or some behind a gate.

- type: composite
  combine: gated
  use: [{type: format, tags: [think, answer]}, {type: math, boxed: true}]   # no form, no pay
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Self, cast

from pydantic import Field, WithJsonSchema, model_validator

from roll_like import Completion, Outcome, Reward, RewardConfig, RewardResult, register_reward
from roll_like.config.base import PluginConfig, PluginSetting
from roll_like.errors import DataError, RewardError
from roll_like.registry import REWARDS
from roll_like.rewards.call import ResultOrError
from roll_like.rewards.scorer import Scorer, reward_name
from roll_like.types import Task
from roll_like.values import at_least

# the schema stops here: a composite may hold composites
_PART_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "object", "required": ["type"]}]}
_Part = Annotated[PluginConfig, PluginSetting(REWARDS), WithJsonSchema(_PART_SCHEMA)]


class CompositeConfig(RewardConfig):
    """Settings of the `composite` reward."""

    type: Literal["composite"] = "composite"
    use: Annotated[tuple[_Part, ...], Field(min_length=2)] = Field(
        description="The rewards it is made of, each with its own settings."
    )
    combine: Literal["weighted", "product", "gated"] = Field(
        default="weighted",
        description="weighted: sum of weight × value. product: product of the values. gated: the weighted sum of all "
        "but the first, where the first reaches `threshold`; else `closed`.",
    )
    threshold: float = Field(default=1.0, description="With gated: value of the first reward that opens the gate.")
    closed: float = Field(default=0.0, description="With gated: value of a response before a closed gate.")
    timeout_seconds: float = Field(default=60.0, gt=0, description="Limit of one part's call. Seconds.")

    @property
    def parts(self) -> tuple[RewardConfig, ...]:
        """The settings of the rewards it is made of."""
        return cast(tuple[RewardConfig, ...], self.use)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        names = [reward_name(part) for part in self.parts]
        for name in sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two parts are called {name!r}; give each a `name` of its own")
        for part, name in zip(self.parts, names, strict=True):
            for key in ("sources", "domains"):
                if getattr(part, key) is not None:
                    raise ValueError(
                        f"the part {name!r} has `{key}`, which only the composite itself can have; move them"
                    )
        weighed = {"weighted": self.parts, "product": (), "gated": self.parts[1:]}[self.combine]
        for part, name in zip(self.parts, names, strict=True):
            if part.weight != 1.0 and part not in weighed:
                raise ValueError(
                    f"the weight of the part {name!r} has no effect with combine: {self.combine}; remove it"
                )
        return self


@register_reward("composite")
class Composite(Reward):
    """A combination of other rewards; each part's value and figures are reported below its name.

    A sample that one needed part cannot score is lost. Behind a closed gate no part is called, so a gate
    saves the calls of an expensive reward; a part that compares answers sees those that passed the gate.
    """

    Config: ClassVar[type[RewardConfig]] = CompositeConfig

    config: CompositeConfig

    def __init__(self, config: CompositeConfig) -> None:
        super().__init__(config)
        self._scorer: Scorer | None = None

    @cached_property
    def _unstarted(self) -> list[Reward]:
        """The parts, for checks of rows."""
        return [REWARDS.get(part.type)(part) for part in self.config.parts]

    @property
    def hung(self) -> int:
        """Threads of synchronous parts that still run past their time-out."""
        return 0 if self._scorer is None else self._scorer.hung

    @property
    def side_by_side(self) -> int | None:
        """As many groups as its most restricted part."""
        return min((part.side_by_side for part in self._unstarted if part.side_by_side is not None), default=None)

    def start(self) -> None:
        """Start the parts."""
        if self._scorer is None:
            # the composite as a whole is tried again
            self._scorer = Scorer(self.config.parts, timeout_seconds=self.config.timeout_seconds, retries=0)

    def check_row(self, task: Task) -> None:
        """Check that every part can score the row.

        Raises:
            DataError: One cannot.
        """
        for reward in self._unstarted:
            for field in reward.required_fields:
                if (task.answer if field == "answer" else task.metadata.get(field)) is None:
                    raise DataError(
                        f"{task.origin}: the part {reward_name(reward.config)!r} needs the field {field!r}",
                        fix="add it to the row (for `answer`: set `answer_field` of the source)",
                    )
            reward.check_row(task)

    async def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        """Return the combined value for each completion; a `RewardError` where a needed part failed."""
        self.start()
        names = [reward_name(part) for part in self.config.parts]
        results: list[dict[str, ResultOrError]] = [{} for _ in completions]
        pending = list(range(len(completions)))
        if self.config.combine == "gated":
            await self._score_parts(names[:1], completions, pending, results)
            pending = [index for index in pending if self._open(results[index][names[0]])]
            names = names[1:]
        await self._score_parts(names, completions, pending, results)
        return [self._combine(of_parts) for of_parts in results]

    def close(self) -> None:
        """Free what the parts hold."""
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None
        for reward in self.__dict__.pop("_unstarted", ()):
            reward.close()

    async def _score_parts(
        self,
        names: Sequence[str],
        completions: Sequence[Completion],
        pending: Sequence[int],
        results: list[dict[str, ResultOrError]],
    ) -> None:
        """Write the named parts' results on the completions at the indices `pending` into `results`."""
        if not pending:
            return
        assert self._scorer is not None
        found = await self._scorer.score_by(names, [completions[index] for index in pending])
        for name, of_part in found.items():
            for index, result in zip(pending, of_part, strict=True):
                results[index][name] = result

    def _open(self, gate: ResultOrError) -> bool:
        return isinstance(gate, RewardResult) and at_least(gate.value, self.config.threshold)

    def _combine(self, results: Mapping[str, ResultOrError]) -> Outcome:
        values: dict[str, float] = {}
        details: dict[str, float] = {}
        answer: str | None = None
        for name, result in results.items():
            if isinstance(result, RewardError):
                return RewardError(f"the part {name!r} failed: {result}")
            values[name] = details[name] = result.value
            answer = result.answer if answer is None else answer
            details |= {f"{name}/{key}": value for key, value in result.details.items()}
        if self.config.combine == "product":
            return RewardResult(math.prod(values.values()), details, answer)
        weighed = self.config.parts
        if self.config.combine == "gated":
            weighed = weighed[1:]
            if reward_name(weighed[0]) not in values:
                return RewardResult(self.config.closed, details | {"gate": 0.0}, answer)
            details["gate"] = 1.0
        return RewardResult(sum(part.weight * values[reward_name(part)] for part in weighed), details, answer)
