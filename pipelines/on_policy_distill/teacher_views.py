"""What a teacher sees of a student's answer: the same tokens, another prompt, or the text in tokens of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from roll_like.algorithms.distillation.on_policy import after_own_prompt, with_prompt
from roll_like.algorithms.distillation.spans import character_ends, common_spans
from roll_like.builtin.pipelines.on_policy_distill.demonstrations import Demonstrations
from roll_like.data.chat import Renderer
from roll_like.errors import ConfigError
from roll_like.types import FloatArray, IntArray, PolicySample, Task, TrainingSample


class ShownSample(NamedTuple):
    """A sample as a teacher sees it.

    Attributes:
        scored: What the teacher scores.
        spans: The stretch of each token that the student sampled, shape [S].
        answer_spans: The stretch of each token of the answer in what the teacher scores.
    """

    scored: TrainingSample
    spans: IntArray
    answer_spans: IntArray


class TeacherView(Protocol):
    """How one teacher sees samples."""

    def shown(self, sample: PolicySample, task: Task) -> ShownSample:
        """Return what the teacher scores for a sample."""

    def told(self, sample: PolicySample, shown: ShownSample, logprobs_T: FloatArray) -> FloatArray:
        """Return what it says of the sample's own tokens, shape [T]; a stretch has the sum over its tokens."""


@dataclass(frozen=True)
class SameTokens:
    """A teacher with the student's tokenizer.

    Attributes:
        demonstrations: What it reads beside the prompt; None where it reads the same.
    """

    demonstrations: Demonstrations | None = None

    def shown(self, sample: PolicySample, task: Task) -> ShownSample:
        """Return the sample, after the prompt that the teacher reads; every token is a stretch."""
        scored = sample if self.demonstrations is None else with_prompt(sample, self.demonstrations.prompt_ids(task))
        spans = np.arange(sample.trained_tokens, dtype=np.int32)
        return ShownSample(scored, spans, spans)

    def told(self, sample: PolicySample, shown: ShownSample, logprobs_T: FloatArray) -> FloatArray:
        """Return the same figures."""
        return logprobs_T if shown.scored is sample else after_own_prompt(sample, shown.scored, logprobs_T)


class OtherTokens:
    """A teacher with another tokenizer and chat template: it reads the prompt's messages and the answer's text.

    Args:
        teacher: The teacher's.
        demonstrations: What it reads beside the prompt, in its own tokens; None where it reads the prompt alone.
        name: The teacher's, for messages.

    Raises:
        ConfigError: The teacher's chat template does not tell how an answer ends.
    """

    def __init__(
        self, student: Renderer, teacher: Renderer, demonstrations: Demonstrations | None = None, *, name: str = ""
    ) -> None:
        if teacher.turn_end is None:
            raise ConfigError(
                f"teachers.{name}.path: its chat template writes no token after an answer, so the student's end of an "
                "answer has nothing to be compared with",
                fix="use a teacher whose template ends turns with a special token",
            )
        self._student, self._teacher, self._end = student, teacher, teacher.turn_end
        self._demonstrations = demonstrations

    def shown(self, sample: PolicySample, task: Task) -> ShownSample:
        """Return the prompt and the answer's text in the teacher's tokens."""
        if self._demonstrations is not None:
            prompt_ids = self._demonstrations.prompt_ids(task)
        else:
            prompt_ids = self._teacher.encode(self._teacher.render(task.messages, ()))
        response_ids, spans = self._answer(sample)
        scored = TrainingSample(
            token_ids=np.concatenate([prompt_ids, response_ids]).astype(np.int32),
            loss_mask=np.arange(len(prompt_ids) + len(response_ids)) >= len(prompt_ids),
            group_id=sample.group_id,
            prompt_length=len(prompt_ids),
        )
        return ShownSample(scored, *spans)

    def told(self, sample: PolicySample, shown: ShownSample, logprobs_T: FloatArray) -> FloatArray:
        """Return the teacher's log-probability of each stretch at its last token, 0 at its others."""
        ours_S, of_answer = shown.spans, logprobs_T[shown.scored.prompt_length :]
        of_spans = np.bincount(shown.answer_spans, weights=of_answer, minlength=int(ours_S.max()) + 1)
        own_T = np.zeros(len(sample.token_ids), np.float32)
        last_S = np.flatnonzero(np.diff(ours_S, append=-1))
        own_T[np.flatnonzero(sample.loss_mask)[last_S]] = of_spans[ours_S[last_S]]
        return own_T

    def _answer(self, sample: PolicySample) -> tuple[IntArray, tuple[IntArray, IntArray]]:
        """Return an answer in the teacher's tokens, and the stretches of the student's and of the teacher's."""
        ids = sample.token_ids[sample.loss_mask].tolist()
        ended = ids[-1] in self._student.end_ids
        body = ids[:-1] if ended else ids
        text = self._student.decode(body)
        theirs = self._teacher.encode(text).tolist()
        ends = character_ends(body, self._student.decode), character_ends(theirs, self._teacher.decode)
        if self._teacher.decode(theirs) != text:  # its tokenizer changes texts: one stretch
            ends = [None] * len(body), [None] * len(theirs)
        if ended:
            theirs.append(self._end)
            ends = [*ends[0], len(text) + 1], [*ends[1], len(text) + 1]
        return np.array(theirs, np.int32), common_spans(*ends)
