"""Agreement with the group's majority: a reward for prompts without a reference answer (TTRL, arXiv:2504.16084).

- type: consensus
  compare: {type: math}

The answers of a group are its votes. The answer with the most votes stands in the place of the reference answer.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from roll_like import Completion, Outcome, Reward, RewardConfig, RewardResult, register_reward
from roll_like.config.base import PluginConfig, PluginSetting
from roll_like.errors import RewardError
from roll_like.registry import REWARDS
from roll_like.types import Task
from roll_like.values import at_least

_COMPARE_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "object", "required": ["type"]}]}


class ConsensusConfig(RewardConfig):
    """Settings of the `consensus` reward."""

    type: Literal["consensus"] = "consensus"
    compare: Annotated[PluginConfig, PluginSetting(REWARDS), WithJsonSchema(_COMPARE_SCHEMA)] = Field(
        default_factory=lambda: REWARDS.get("math").Config(),
        description="The reward that finds and compares answers, with its settings: `math`, `exact_match`, "
        "`multiple_choice`, or one of your own with `answers`.",
    )
    reward: Literal["majority", "share"] = Field(
        default="majority",
        description="majority: 1 for the answer with the most votes, 0 for others. share: the share of the votes that "
        "the answer has (EMPO, arXiv:2504.05812). A response without an answer gets 0.",
    )
    ties: Literal["none", "all", "first"] = Field(
        default="none",
        description="With majority, which answers get 1 where several have the most votes: none of them, all, or the "
        "one that comes first in the group.",
    )
    min_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the group's samples that the most frequent answer needs; below it every sample gets 0, "
        "so the group teaches nothing where advantages compare its samples.",
    )

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        plugin, name = REWARDS.get(self.compare.type), self.compare.type
        if plugin.answers is Reward.answers:
            known = "math, exact_match, multiple_choice, or a reward of your own with a method `answers`"
            raise ValueError(f"compare: the reward {name!r} finds no answers that could be compared; use {known}")
        if inspect.iscoroutinefunction(plugin.score) or inspect.iscoroutinefunction(plugin.answers):
            raise ValueError(f"compare: the reward {name!r} is async; write its `score` and `answers` without async")
        for key in ("name", "weight", "sources", "domains"):
            if getattr(self.compare, key) != type(self.compare).model_fields[key].default:
                raise ValueError(f"compare: {key} has no effect there; set it beside `type: consensus`")
        if self.reward == "share" and self.ties != "none":
            raise ValueError("ties has no effect with reward: share; remove it")
        return self


@register_reward("consensus")
class Consensus(Reward):
    """1 for the answer that most samples of the group give, else 0; reports how far the group agrees.

    Where the row has a reference answer, it is only reported how well the majority would have replaced it.
    """

    Config: ClassVar[type[RewardConfig]] = ConsensusConfig
    relative: ClassVar[bool] = True

    config: ConsensusConfig

    def __init__(self, config: ConsensusConfig) -> None:
        super().__init__(config)
        self._compare: Reward = REWARDS.get(config.compare.type)(config.compare)
        self._started = False

    @property
    def hung(self) -> int:
        """Threads of the reward that compares which still run past their time-out."""
        return self._compare.hung

    def check_row(self, task: Task) -> None:
        """Check a reference answer, where the row has one, because it is compared with the majority.

        Raises:
            DataError: It cannot be compared.
        """
        if task.answer is not None:
            self._compare.check_row(task)

    def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        """Return the reward of each completion of a group; a `RewardError` where its answer could not be read."""
        if not self._started:
            self._compare.start()
            self._started = True
        found = self._compare.answers(completions)
        answers = [answer for answer in found if not isinstance(answer, RewardError)]
        votes = Counter(answer for answer in answers if answer)
        most = max(votes.values(), default=0)
        leading = [answer for answer, count in votes.items() if count == most]  # in the order of the samples
        share = most / max(len(answers), 1)
        enough = most > 0 and at_least(share, self.config.min_share)
        values = self._values(votes, leading) if enough else {}
        figures = {"share": share, "tie": float(len(leading) > 1), "accepted": float(enough)}
        right = self._right(completions)
        if right is not None:
            # of tied answers each is equally likely to be the label, as in `eval/maj@k`
            of_label = [is_right for answer, is_right in zip(found, right, strict=True) if answer in leading]
            figures["label_accuracy"] = sum(of_label) / max(len(of_label), 1)
        outcomes: list[Outcome] = []
        for index, answer in enumerate(found):
            if isinstance(answer, RewardError):
                outcomes.append(answer)
                continue
            value = values.get(answer, 0.0)
            details = {"parsed": float(bool(answer)), **figures}
            if right is not None and self.config.reward == "majority":
                details["reward_accuracy"] = float(value == right[index])
            outcomes.append(RewardResult(value, details, answer))
        return outcomes

    def close(self) -> None:
        """Free what the reward that compares holds."""
        self._compare.close()

    def _values(self, votes: Counter[str], leading: Sequence[str]) -> dict[str, float]:
        """Return the reward of each answer that gets one."""
        if self.config.reward == "share":
            return {answer: count / votes.total() for answer, count in votes.items()}
        if len(leading) > 1 and self.config.ties == "none":
            return {}
        return dict.fromkeys(leading if self.config.ties == "all" else leading[:1], 1.0)

    def _right(self, completions: Sequence[Completion]) -> list[float] | None:
        """Return whether each completion gives the reference answer; None without one, or if one cannot be compared."""
        if any(completion.answer is None for completion in completions):
            return None
        results = self._compare.score(completions)
        assert isinstance(results, Sequence), "an async reward has been refused"
        values = [result.value if isinstance(result, RewardResult) else result for result in results]
        if any(isinstance(value, RewardError) for value in values):
            return None
        return [float(at_least(value, 1.0)) for value in values if not isinstance(value, RewardError)]
