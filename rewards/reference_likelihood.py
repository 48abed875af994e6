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
from typing import ClassVar, Literal, Self, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from roll_like import Completion, Outcome, RewardConfig, RewardResult, register_reward
from roll_like.config.base import PositiveInt
from roll_like.data.steps import characters_told
from roll_like.errors import RewardError
from roll_like.rewards.of_policy import Answered, PolicyForward, PolicyReward, Renderer
from roll_like.types import FloatArray, IntArray, Task, TrainingSample

_ANSWER = "{answer}"
_Key: TypeAlias = tuple[int | str, ...]


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
        asked: dict[_Key, TrainingSample | RewardError] = {}  # of a group, what differs
        keys: list[tuple[_Key, ...]] = []  # of each sample: with its reasoning, and without any
        for index, sample in enumerate(samples):
            place = self._place(sample.completion)
            if place is None:
                keys.append(())
                continue
            task = sample.scored.trajectory.task
            before, tail = _up_to(place, sample, renderer)
            asked[index,] = self._with_answer(task, before, tail, renderer)
            keys.append(((index,),))
            if self.config.debias:
                opened, tail = self._without_reasoning(sample.completion, place, tail)
                key: _Key = (task.task_id, opened, tail)
                if key not in asked:
                    (written,) = renderer.encode_pieces([(opened, False)])
                    before = np.concatenate([task.prompt_ids, written], dtype=np.int32)
                    asked[key] = self._with_answer(task, before, tail, renderer)
                keys.append((*keys.pop(), key))
        computed = {key: one for key, one in asked.items() if isinstance(one, TrainingSample)}
        found = policy.logprobs([*computed.values()]) if computed else []
        scores: dict[_Key, float | RewardError] = {
            key: one for key, one in asked.items() if isinstance(one, RewardError)
        }
        for (key, one), logprobs_T in zip(computed.items(), found, strict=True):
            scores[key] = self._likelihood(logprobs_T[one.loss_mask])
        return [self._outcome([scores[key] for key in of_sample]) for of_sample in keys]

    def _outcome(self, scores: Sequence[float | RewardError]) -> Outcome:
        """Return what becomes of a sample's likelihood, and that without reasoning; of neither, it has no place."""
        reached: list[float] = []
        for score in scores:
            if isinstance(score, RewardError):
                return score
            reached.append(score)
        return self._result(*reached) if reached else RewardResult(self.config.missing or 0.0, {"placed": 0.0})

    def _result(self, score: float, bare: float | None = None) -> RewardResult:
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

    def _place(self, completion: Completion) -> int | None:
        if self.config.after is not None:
            found = completion.full_text.rfind(self.config.after)
            return None if found < 0 else found + len(self.config.after)
        # an answer that is not written has no place that could be found
        return completion.answer_start if completion.reasoning is not None and completion.text else None

    def _without_reasoning(self, completion: Completion, place: int, tail: str) -> tuple[str, str]:
        """Return what stands before the answer where nothing was thought, and what of it is scored with the answer.

        Both end as in the sample, so that the same tokens are scored.
        """
        tags = completion.tags
        text = "" if tags is None or not tags.opened else tags.close
        if self.config.after is not None:
            text += self.config.after
        elif tags is not None:
            if not tags.opened:
                text = tags.open + tags.close
            _, closed, between = completion.full_text[:place].rpartition(tags.close)
            text += between if closed else ""
        shared = next(tail[cut:] for cut in range(len(tail) + 1) if text.endswith(tail[cut:]))
        return text.removesuffix(shared), shared

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


def _up_to(place: int, sample: Answered, renderer: Renderer) -> tuple[IntArray, str]:
    """Return the prompt and the sampled tokens up to a place in the text, and what they lack of the text before it.

    A token that goes on behind the place is left out; what it says before the place is written again, with the answer.
    """
    text, trajectory = sample.completion.full_text, sample.scored.trajectory
    sampled = trajectory.token_ids[trajectory.sampled]
    told = characters_told(sampled, text, spell=renderer.token_bytes, special=renderer.special_ids)
    kept = bisect_left(told, place)
    tail = ""
    if place in told:
        kept += 1
    else:
        tail = text[told[kept - 1] if kept else 0 : place]
    return np.concatenate([trajectory.task.prompt_ids, sampled[:kept]], dtype=np.int32), tail
