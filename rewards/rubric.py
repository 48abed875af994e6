"""Rubrics as rewards (Gunjal et al. 2025, arXiv:2507.17746): judges say which of a row's criteria a response meets.

    - type: rubric
      judges: [{url: "http://localhost:8000/v1", model: Qwen/Qwen3-8B}]
      rubric_field: rubric

A row: `{"prompt": "…", "rubric": [{"criterion": "Names scattering.", "weight": 5}, …]}`.

With weights w and the shares c of votes that found a criterion met, the value is Σ w·c / Σ max(w, 0) (the paper's
explicit aggregation; with negative weights that of HealthBench, arXiv:2505.08775), or one score that a judge gives
with all criteria before it (implicit aggregation).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll_like import Completion, Outcome, Reward, RewardConfig, RewardResult, register_reward
from roll_like.builtin.rewards import judge_prompts
from roll_like.builtin.rewards.judge_answer import MalformedError
from roll_like.builtin.rewards.jury import Jury, JuryConfig, judged_text, object_schema, read_score
from roll_like.config.base import ConfigModel, repeated
from roll_like.errors import RewardError
from roll_like.rewards.base import refusing_row
from roll_like.types import Task

if TYPE_CHECKING:
    import httpx

#: Names that public data sets give to a criterion's text and weight (RaR, HealthBench).
_TEXTS = ("criterion", "description")
_WEIGHTS = ("weight", "points")
_MET = {"true": True, "yes": True, "met": True, "false": False, "no": False, "not met": False, "unmet": False}
_SHAPE = 'expected a list such as [{"criterion": "Names scattering.", "weight": 5}, …]'


@dataclass(frozen=True, slots=True)
class Criterion:
    """What a response should do, or with a negative weight should not."""

    text: str
    weight: float
    name: str


class CriterionConfig(ConfigModel):
    """A criterion that counts for all rows."""

    criterion: str = Field(min_length=1, description="What a response does, as a statement.")
    weight: float = Field(
        default=1.0, allow_inf_nan=False, description="Its factor; below 0 where a response should not do it."
    )
    name: str | None = Field(default=None, description="Name in metrics: `rollout/rubric/criterion/NAME`; none.")


class RubricConfig(JuryConfig):
    """Settings of the `rubric` reward."""

    type: Literal["rubric"] = "rubric"
    criteria: tuple[CriterionConfig, ...] = Field(default=(), description="Criteria of all rows.")
    rubric_field: str | None = Field(
        default=None, description="Row field with the row's own criteria, which follow those of all rows."
    )
    aggregation: Literal["explicit", "implicit"] = Field(
        default="explicit",
        description="explicit: each criterion is judged, and the weights of those that are met are added. implicit: "
        "the judge reads all criteria with their weights, and gives one score.",
    )
    ask: Literal["each", "together"] = Field(
        default="each",
        description="With explicit: one request for each criterion, or one for all of a response.",
    )
    clip: bool = Field(
        default=True, description="With explicit: values below 0, where criteria with negative weights are met, are 0."
    )
    template: str | None = Field(
        default=None,
        description="Text for the judge with $prompt, $answer, $response, and $criterion (ask: each) or $criteria; "
        "with implicit also $lowest, $highest; default: one that is built in.",
    )
    lowest: float = Field(default=1.0, description="With implicit: the worst number; it becomes 0.")
    highest: float = Field(default=10.0, description="With implicit: the best number; it becomes 1.")

    @property
    def form(self) -> Literal["each", "together", "implicit"]:
        """What one request asks."""
        return "implicit" if self.aggregation == "implicit" else self.ask

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.lowest >= self.highest:
            raise ValueError(f"lowest: {self.lowest:g} should be below highest: {self.highest:g}")
        if not self.criteria and self.rubric_field is None:
            raise ValueError("there are no criteria; set rubric_field, the rows' field with them, or criteria")
        other = ("ask", "clip") if self.aggregation == "implicit" else ("lowest", "highest")
        for key in other:
            if key in self.model_fields_set:
                raise ValueError(f"{key} has no effect with aggregation: {self.aggregation}; remove it")
        for index, each in enumerate(self.criteria):
            if each.weight == 0:
                raise ValueError(f"criteria.{index}.weight: a criterion of weight 0 does not count; remove it")
        for name in repeated(each.name or each.criterion for each in self.criteria):
            raise ValueError(f"criteria: two are called {name!r}; give each a `name` of its own")
        if self.rubric_field is None and all(each.weight < 0 for each in self.criteria):
            raise ValueError("criteria: no weight is above 0, so no response could score more than 0")
        if self.template is not None:
            judge_prompts.check_template(self.template, self.form)
        return self


@register_reward("rubric")
class Rubric(Reward):
    """What the criteria that a response meets are worth, 0 to 1. An empty response gets 0 without being judged.

    A judge that cannot be reached, is too slow or answers malformed about one criterion loses the sample: a sum
    without it would be on another scale.
    """

    Config: ClassVar[type[RewardConfig]] = RubricConfig
    per_sample: ClassVar[bool] = True

    config: RubricConfig

    def __init__(self, config: RubricConfig) -> None:
        super().__init__(config)
        built_in = {
            "each": judge_prompts.EACH,
            "together": judge_prompts.TOGETHER,
            "implicit": judge_prompts.IMPLICIT,
        }
        self._template = config.template or built_in[config.form]
        self._jury = Jury(config)
        self._own = tuple(
            Criterion(each.criterion, each.weight, each.name or each.criterion) for each in config.criteria
        )
        self._reported = {each.name for each in config.criteria if each.name is not None}

    @property
    def side_by_side(self) -> int:
        """As many groups as keep `concurrency` requests under way."""
        return self._jury.side_by_side

    def check_row(self, task: Task) -> None:
        """Check that the row has criteria, with weights that can be added.

        Raises:
            DataError: It has none, or one cannot be read.
        """
        with refusing_row(task, "correct the row, or `rubric_field` of the reward"):
            self._criteria(task.metadata)

    async def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        """Return a value for each completion; a `RewardError` where a judge failed."""
        async with self._jury.connections() as client:
            return list(await asyncio.gather(*(self._score_one(client, completion) for completion in completions)))

    async def _score_one(self, client: httpx.AsyncClient, completion: Completion) -> Outcome:
        response = judged_text(completion)
        if not response:
            return RewardResult(0.0, {"empty": 1.0})
        try:
            criteria = self._criteria(completion.metadata)
            values = {
                "prompt": judge_prompts.conversation(completion.messages),
                "answer": completion.answer or "none is given",
                "response": judge_prompts.fenced(response),
            }
            if self.config.aggregation == "implicit":
                return await self._implicit(client, criteria, values)
            if self.config.ask == "together":
                answers = await self._together(client, criteria, values)
            else:
                answers = await asyncio.gather(*(self._each(client, each.text, values) for each in criteria))
        except ValueError as error:
            return RewardError(str(error), fix="correct the row")
        except RewardError as error:
            return error
        return self._explicit(criteria, answers)

    def _explicit(self, criteria: Sequence[Criterion], answers: Sequence[Sequence[float]]) -> RewardResult:
        """Return the sum of the weights that are met, out of all that can be earned.

        Args:
            answers: For each of them what each vote said, 0 or 1.
        """
        shares = [self.config.counted(votes) for votes in answers]
        earned = sum(each.weight * share for each, share in zip(criteria, shares, strict=True))
        value = earned / sum(max(each.weight, 0.0) for each in criteria)
        details = {"empty": 0.0, "met": fmean(shares)}
        if len(answers[0]) > 1:
            details["agreement"] = fmean(max(fmean(votes), 1.0 - fmean(votes)) for votes in answers)
        verdicts = {each.name: share for each, share in zip(criteria, shares, strict=True)}
        details |= {f"criterion/{name}": verdicts[name] for name in self._reported}
        return RewardResult(max(value, 0.0) if self.config.clip else value, details, verdicts=verdicts)

    async def _each(self, client: httpx.AsyncClient, text: str, values: Mapping[str, str]) -> list[float]:
        """Return the votes on one criterion."""
        messages = judge_prompts.fill(self._template, {**values, "criterion": text})
        schema = object_schema({"met": {"type": "boolean"}})
        votes = await self._jury.ask(client, messages, schema, "met", _read_met)
        return [float(vote) for vote in itertools.chain.from_iterable(votes)]

    async def _together(
        self, client: httpx.AsyncClient, criteria: Sequence[Criterion], values: Mapping[str, str]
    ) -> list[list[float]]:
        """Return the votes on every criterion."""
        listed = "\n".join(f"{number}. {each.text}" for number, each in enumerate(criteria, 1))
        size = len(criteria)
        verdict = object_schema({"criterion": {"type": "integer"}, "met": {"type": "boolean"}})
        verdicts = {"type": "array", "items": verdict, "minItems": size, "maxItems": size}
        schema = {
            "type": "object",
            "properties": {"verdicts": verdicts},
            "required": ["verdicts"],
            "additionalProperties": False,
        }
        answers = await self._jury.ask(
            client,
            judge_prompts.fill(self._template, {**values, "criteria": listed}),
            schema,
            "verdicts",
            lambda found: _read_verdicts(found, size),
        )
        return [[float(vote) for vote in votes] for votes in zip(*itertools.chain.from_iterable(answers), strict=True)]

    async def _implicit(
        self, client: httpx.AsyncClient, criteria: Sequence[Criterion], values: Mapping[str, str]
    ) -> RewardResult:
        """Return the judges' one score."""
        lowest, highest = self.config.lowest, self.config.highest
        listed = "\n".join(f"{n}. (weight {each.weight:g}) {each.text}" for n, each in enumerate(criteria, 1))
        scale = {"lowest": f"{lowest:g}", "highest": f"{highest:g}"}
        answers = await self._jury.ask(
            client,
            judge_prompts.fill(self._template, {**values, **scale, "criteria": listed}),
            object_schema({"score": {"type": "number", "minimum": lowest, "maximum": highest}}),
            "score",
            lambda found: read_score(found, lowest, highest),
        )
        scores = list(itertools.chain.from_iterable(answers))
        return RewardResult(self.config.counted(scores), {"empty": 0.0, "spread": max(scores) - min(scores)})

    def _criteria(self, metadata: Mapping[str, Any]) -> list[Criterion]:
        """Return the criteria of all rows and the row's own; ValueError if they cannot be judged and added."""
        field = self.config.rubric_field
        if field is None:
            return list(self._own)
        found = metadata.get(field)
        if isinstance(found, str) and found.lstrip().startswith("["):
            try:
                found = json.loads(found)
            except ValueError as error:
                raise ValueError(f"the field {field!r} is a text that is not JSON: {error}; {_SHAPE}") from error
        if not isinstance(found, list | tuple) or not found:
            raise ValueError(f"the field {field!r} should hold criteria, found {found!r}; {_SHAPE}")
        own = [_read_criterion(row, f"{field}[{index}]") for index, row in enumerate(found)]
        double = repeated(each.name for each in (*self._own, *own))
        criteria = [*self._own, *(replace(each, name=each.text) if each.name in double else each for each in own)]
        for name in repeated(each.name for each in criteria):
            raise ValueError(f"the field {field!r} has the criterion {name!r} twice; remove one")
        if all(each.weight < 0 for each in criteria):
            raise ValueError(f"the field {field!r} has no weight above 0, so no response could score more than 0")
        return criteria


def _read_criterion(row: Any, where: str) -> Criterion:
    """Return one of a row's criteria: a text, or an object with its text and weight; ValueError if it is neither."""
    if isinstance(row, str):
        row = {"criterion": row}
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} should be a criterion, found {row!r}; {_SHAPE}")
    texts = [row[key] for key in _TEXTS if row.get(key) is not None]
    if len(texts) != 1 or not isinstance(texts[0], str) or not texts[0].strip():
        raise ValueError(f"{where} should have a text as {' or '.join(map(repr, _TEXTS))}, found {dict(row)!r}")
    weights = [row[key] for key in _WEIGHTS if row.get(key) is not None] or [1.0]
    weight = weights[0]
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
    if len(weights) != 1 or not is_number or weight == 0:
        raise ValueError(
            f"{where} should have one number other than 0 as {' or '.join(map(repr, _WEIGHTS))}, found {dict(row)!r}"
        )
    return Criterion(texts[0], float(weight), str(row.get("title") or texts[0]))


def _read_met(found: Any) -> bool:
    said = _MET.get(found.strip(" .*").casefold()) if isinstance(found, str) else found
    if not isinstance(said, bool):
        raise MalformedError(f"`met` should be true or false, found {found!r}")
    return said


def _read_verdicts(found: Any, size: int) -> list[bool]:
    """Return a verdict for each criterion, in order; a criterion that is left out is not one that is not met."""
    if not isinstance(found, list) or len(found) != size:
        got = len(found) if isinstance(found, list) else repr(found)
        raise MalformedError(f"`verdicts` should be a list of {size}, one for each criterion, found {got}")
    if not all(isinstance(each, Mapping) for each in found):
        return [_read_met(each) for each in found]
    numbered = {str(each.get("criterion")).strip(): each.get("met") for each in found}
    if set(numbered) != {str(number) for number in range(1, size + 1)}:
        raise MalformedError(f"`verdicts` should number the criteria 1 to {size}, found {', '.join(numbered)}")
    return [_read_met(numbered[str(number)]) for number in range(1, size + 1)]
