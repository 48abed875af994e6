r"""How likely the policy finds the reference answer after its own reasoning: for tasks that no verifier can grade.

- type: reference_likelihood
  after: <answer>
  debias: true

    prompt  <think> sampled </think><answer> | 42      the sampled answer is replaced by the reference answer
                                               ▔▔
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from roll_like import Completion, Outcome, RewardConfig, RewardResult, register_reward
from roll_like.config.base import PositiveInt
from roll_like.data.steps import characters_told
from roll_like.errors import RewardError
from roll_like.rewards.of_policy import Answered, PolicyForward, PolicyReward, Renderer
from roll_like.types import FloatArray, IntArray, Task, TrainingSample

_ANSWER = "{answer}"


class ReferenceLikelihoodConfig(RewardConfig):
    """Settings of the `reference_likelihood` reward."""

    by_policy: ClassVar[bool] = True

    type: Literal["reference_likelihood"] = "reference_likelihood"
    after: str | None = Field(
        default=None,
        min_length=1,
        description="Text of the response behind which the reference answer is put, where it stands last; default: the "
        "end of the reasoning.",
    )
    template: str = Field(
        default=_ANSWER,
        description="What is put there, all of which is scored: `{answer}` is the reference answer. With what ends the "
        "answer, `{answer}</answer>`, an answer that only begins like the reference counts less.",
    )
    likelihood: Literal["mean_probability", "probability", "mean_logprob", "logprob"] = Field(
        default="mean_probability",
        description="mean_probability: mean over the answer's tokens (RLPR, arXiv:2506.18254). probability: of the "
        "whole answer (VeriFree, arXiv:2505.21493). mean_logprob, logprob: mean or sum of log-probabilities, in nats.",
    )
    debias: bool = Field(
        default=False,
        description="Subtract the same figure without any reasoning, and keep the difference of probabilities at 0 or "
        "more (RLPR, equation 4).",
    )
    missing: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Value of a response without a place for the answer; default: 0 for probabilities. "
        "Log-probabilities need one.",
    )
    max_answer_tokens: PositiveInt = Field(
        default=256, description="Longest `template`; a row with a longer one is a failure. Tokens."
    )

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.template.count(_ANSWER) != 1:
            raise ValueError(f"template: {self.template!r} should hold {_ANSWER} once, for the answer")
        if self.missing is None and not self.is_probability:
            raise ValueError(
                f"missing: a response without a place for the answer has no {self.likelihood}; set a number below "
                "those of bad answers, such as -10"
            )
        return self

    @property
    def extra_tokens(self) -> int:
        """The reference answer is put behind a sample."""
        return self.max_answer_tokens

    @property
    def is_probability(self) -> bool:
        """Whether values are between 0 and 1."""
        return self.likelihood in ("mean_probability", "probability")


@register_reward("reference_likelihood")
class ReferenceLikelihood(PolicyReward):
    """The policy's likelihood of the reference answer, given the prompt and the sampled reasoning."""

    Config: ClassVar[type[RewardConfig]] = ReferenceLikelihoodConfig
    required_fields: ClassVar[tuple[str, ...]] = ("answer",)

    config: ReferenceLikelihoodConfig

    def measure(self, samples: Sequence[Answered], policy: PolicyForward, renderer: Renderer) -> Sequence[Outcome]:
        """Return a likelihood for each sample; a `RewardError` where its reference answer is too long."""
        asked: dict[int, TrainingSample | RewardError] = {}
        bare: dict[str, TrainingSample] = {}
        for index, sample in enumerate(samples):
            placed = self._placed(sample, renderer)
            if placed is None:
                continue
            asked[index] = placed
            task = sample.scored.trajectory.task
            if self.config.debias and isinstance(placed, TrainingSample) and task.task_id not in bare:
                bare[task.task_id] = self._without_reasoning(task, sample.completion, renderer)
        computed = {index: one for index, one in asked.items() if isinstance(one, TrainingSample)}
        found = policy.logprobs([*computed.values(), *bare.values()]) if computed else []
        scores = [
            self._likelihood(logprobs_T[sample.loss_mask])
            for sample, logprobs_T in zip([*computed.values(), *bare.values()], found, strict=True)
        ]
        of_samples = dict(zip(computed, scores, strict=False))
        of_tasks = dict(zip(bare, scores[len(computed) :], strict=True))
        outcomes: list[Outcome] = []
        for index, sample in enumerate(samples):
            placed = asked.get(index)
            if isinstance(placed, RewardError):
                outcomes.append(placed)
            elif placed is None:
                outcomes.append(RewardResult(self.config.missing or 0.0, {"placed": 0.0}))
            else:
                outcomes.append(self._result(of_samples[index], of_tasks.get(sample.scored.trajectory.task.task_id)))
        return outcomes

    def _result(self, score: float, bare: float | None) -> RewardResult:
        if bare is None:
            return RewardResult(score, {"placed": 1.0})
        gain = score - bare
        value = max(gain, 0.0) if self.config.is_probability else gain
        return RewardResult(value, {"placed": 1.0, "likelihood": score, "without_reasoning": bare})

    def _likelihood(self, logprobs_A: FloatArray) -> float:
        wide_A = logprobs_A.astype(np.float64)
        match self.config.likelihood:
            case "mean_probability":
                return float(np.exp(wide_A).mean())
            case "probability":
                return float(np.exp(wide_A.sum()))
            case "mean_logprob":
                return float(wide_A.mean())
            case _:
                return float(wide_A.sum())

    def _placed(self, sample: Answered, renderer: Renderer) -> TrainingSample | RewardError | None:
        """Return prompt and reasoning with the reference answer behind them; None where the response has no place."""
        text, trajectory = sample.completion.full_text, sample.scored.trajectory
        place = self._place(sample.completion)
        if place is None:
            return None
        sampled = trajectory.token_ids[trajectory.sampled]
        told = characters_told(sampled, text, spell=renderer.token_bytes, special=renderer.special_ids)
        kept = bisect_left(told, place)
        tail = ""
        if place in told:
            kept += 1
        else:  # a token goes on behind the place: what it says before it is written again, with the answer
            tail = text[told[kept - 1] if kept else 0 : place]
        before = np.concatenate([trajectory.task.prompt_ids, sampled[:kept]], dtype=np.int32)
        return self._with_answer(trajectory.task, before, tail, renderer)

    def _place(self, completion: Completion) -> int | None:
        if self.config.after is not None:
            found = completion.full_text.rfind(self.config.after)
            return None if found < 0 else found + len(self.config.after)
        # an answer that is not written has no place that could be found
        return completion.answer_start if completion.reasoning is not None and completion.text else None

    def _without_reasoning(self, task: Task, completion: Completion, renderer: Renderer) -> TrainingSample:
        tags = completion.tags
        text = "" if tags is None or not tags.opened else tags.close
        if self.config.after is not None:
            text += self.config.after
        elif tags is not None and not tags.opened:
            text = tags.open + tags.close
        (opened,) = renderer.encode_pieces([(text, False)])
        before = np.concatenate([task.prompt_ids, opened], dtype=np.int32)
        placed = self._with_answer(task, before, "", renderer)
        assert isinstance(placed, TrainingSample), "the same answer was short enough"
        return placed

    def _with_answer(self, task: Task, before: IntArray, tail: str, renderer: Renderer) -> TrainingSample | RewardError:
        written = self.config.template.replace(_ANSWER, task.answer or "")
        (answer,) = renderer.encode_pieces([(tail + written, False)])
        if not 0 < len(answer) <= self.config.max_answer_tokens:
            return RewardError(
                f"the reference answer takes {len(answer)} tokens; 1 to {self.config.max_answer_tokens} were expected",
                fix="raise max_answer_tokens of the reward, or leave such rows out",
            )
        token_ids = np.concatenate([before, answer], dtype=np.int32)
        return TrainingSample(
            token_ids=token_ids,
            loss_mask=np.arange(len(token_ids)) >= len(before),
            group_id=task.task_id,
            prompt_length=len(task.prompt_ids),
            images=task.images,
        )
