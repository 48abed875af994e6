r"""Datasets of answers in steps with a label for each step, as a process reward model reads them.

    {"prompt": "6 × 7 + 1?", "completions": ["6 × 7 is 42.", "42 + 1 is 44."], "labels": [true, false]}
    {"problem": "6 × 7 + 1?", "steps": ["6 × 7 is 42.", "42 + 1 is 44."], "label": 1}
    {"input": "6 × 7 + 1? Step 1: 6 × 7 is 42. ки\nStep 2: 42 + 1 is 44. ки", "label": "… 42. +\nStep 2: … 44. -"}

The first form is TRL's (with soft labels OpenRLHF's), the second ProcessBench's, the third Math-Shepherd's. How they
are written and where scores are read: `roll_like.data.steps`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from roll_like.builtin.pipelines.reward_model.config import StepData, StepSource
from roll_like.builtin.pipelines.reward_model.scored_answers import score_in
from roll_like.data.bad_rows import BadRow, Problem, RowCounter
from roll_like.data.chat import ChatMessage, Renderer
from roll_like.data.messages import (
    list_in,
    read_prompt,
    read_tools,
    require_fields,
    short,
    with_lists,
    with_system,
)
from roll_like.data.reader import Reader
from roll_like.data.rows import Row
from roll_like.data.samples import SampleSet, load_samples
from roll_like.data.steps import last_of_runs, step_pieces
from roll_like.data.turns import Piece
from roll_like.errors import DataError, EnvError
from roll_like.types import TrainingSample

_SIGNS = {"+": 1.0, "-": 0.0}
_FIRST = re.compile(r"\s*(?=Step 1:(?!.*Step 1:))", flags=re.S)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer(TrainingSample):
    """An answer in steps; the last token of a labelled step's separator is trained.

    Attributes:
        labels: Of the labelled steps, in order: 1 is right, 0 wrong.
    """

    labels: tuple[float, ...]

    def content(self) -> bytes:
        return TrainingSample.content(self) + struct.pack(f"<{len(self.labels)}d", *self.labels)


def load_steps(data: StepData, renderer: Renderer, *, section: str = "data") -> SampleSet[StepAnswer]:
    """Read answers in steps; further arguments and errors are those of `load_samples`."""
    return load_samples(data, renderer, StepReader, section)


@dataclass(frozen=True, kw_only=True)
class StepReader(Reader[StepAnswer]):
    """How rows become answers in steps."""

    source: StepSource
    limits: StepData

    def draft(self, row: Row, renderer: Renderer) -> list[list[Piece]]:
        """Return the text of an answer."""
        prompt, steps, _ = self._read(row)
        tools = read_tools(row, self.source, self.key)
        try:
            return [step_pieces(renderer, prompt, tools, steps, self.limits.step_separator)]
        except EnvError as error:
            raise BadRow(Problem.REWRITTEN, error.message, fix="change the row, or model.chat_template") from error

    def finish(self, row: Row, parts: list[TrainingSample], counter: RowCounter) -> list[StepAnswer]:
        """Return the answer with its labels."""
        _, _, labels = self._read(row)
        labelled = [at for at, label in enumerate(labels) if label is not None]
        if not labelled:
            raise BadRow(Problem.UNTRAINED, f"no step has a label in {self.source.labels_field!r}", "correct the row")
        if self.limits.train_on == "last":
            labelled = labelled[-1:]
        (part,) = parts
        ends = np.flatnonzero(last_of_runs(part.loss_mask))
        if len(ends) != len(labels):
            raise BadRow(
                Problem.UNTRAINED,
                f"{len(labels)} steps have {len(ends)} separators: the tokenizer has no token for a part of "
                f"{self.limits.step_separator!r}",
                f"change {self.section}.step_separator",
            )
        length = int(ends[labelled[-1]]) + 1  # what follows changes no score
        mask_T = np.isin(np.arange(length), ends[labelled])
        read = replace(part, token_ids=part.token_ids[:length], loss_mask=mask_T)
        return [self.join([self.fit(read, counter)], [label for at in labelled if (label := labels[at]) is not None])]

    def values(self, sample: StepAnswer) -> Sequence[float]:
        """Return the labels, which are kept beside the answer."""
        return sample.labels

    def join(self, parts: Sequence[TrainingSample], values: Sequence[float]) -> StepAnswer:
        """Return an answer with its labels."""
        return StepAnswer(**parts[0].shared_fields, labels=tuple(values))

    def _read(self, row: Row) -> tuple[list[ChatMessage], list[str], list[float | None]]:
        """Return the prompt of a row, the steps and their labels.

        Raises:
            DataError: A field is missing or holds something else, or there is not one label for each step.
            BadRow: There is no step, or an empty one.
        """
        source, key = self.source, self.key
        fields = {source.steps_field: f"{key}.steps_field", source.labels_field: f"{key}.labels_field"}
        if source.step_tag is not None:
            require_fields(row, fields)
            question, steps, labels = self._tagged(row, source.step_tag)
            prompt: list[ChatMessage] = [{"role": "user", "content": question}]
        else:
            require_fields(row, {source.prompt_field: f"{key}.prompt_field", **fields})
            prompt = read_prompt(with_lists(row, source.prompt_field), source, key)
            steps = self._steps(row)
            labels = self._labels(row, len(steps))
        if not steps:
            raise BadRow(Problem.EMPTY, f"{source.steps_field!r} has no steps", fix="correct the row")
        empty = next((at for at, step in enumerate(steps) if not step.strip()), None)
        if empty is not None:
            raise BadRow(Problem.EMPTY, f"step {empty} in {source.steps_field!r} is empty", fix="correct the row")
        return with_system(prompt, row, source, key), steps, labels

    def _steps(self, row: Row) -> list[str]:
        field = self.source.steps_field
        steps = list_in(row, field)
        if isinstance(steps, list) and all(isinstance(step, str) for step in steps):
            return steps
        tagged = isinstance(steps, str)
        raise DataError(
            f"{row.origin}: expected a list of texts in {field!r}, found {short(row.fields[field])}",
            fix=f"correct the row, or {self.key}.steps_field"
            + (f", or set {self.key}.step_tag where a tag ends each step of one text" if tagged else ""),
        )

    def _labels(self, row: Row, steps: int) -> list[float | None]:
        field = self.source.labels_field
        labels = list_in(row, field)
        if isinstance(labels, int) and not isinstance(labels, bool):
            if -1 <= labels < steps:
                # what comes after the first wrong step has no label
                return [1.0 if labels < 0 or at < labels else 0.0 if at == labels else None for at in range(steps)]
            raise self._bad_labels(row, f"the first wrong one of {steps} steps, counted from 0, or −1", labels)
        if not isinstance(labels, list):
            raise self._bad_labels(row, "a list of labels, or the number of the first wrong step,", labels)
        if len(labels) != steps:
            raise self._bad_labels(row, f"one label for each of {steps} steps", labels, f"{len(labels)} labels")
        return [self._label(row, at, label) for at, label in enumerate(labels)]

    def _label(self, row: Row, at: int, label: Any) -> float | None:
        if label is None:
            return None
        found = _SIGNS.get(label.strip()) if isinstance(label, str) else None
        found = score_in(label) if found is None else found
        if found is None or not 0 <= found <= 1:
            more = "; ratings of −1, 0 and 1 have to be written as labels first" if found is not None else ""
            raise self._bad_labels(row, f"true, false or a number from 0 to 1 for step {at}", label, more=more)
        return found

    def _bad_labels(self, row: Row, expected: str, found: Any, shown: str | None = None, more: str = "") -> DataError:
        return DataError(
            f"{row.origin}: expected {expected} in {self.source.labels_field!r}, found {shown or short(found)}{more}",
            fix=f"correct the row, or {self.key}.labels_field",
        )

    def _tagged(self, row: Row, tag: str) -> tuple[str, list[str], list[float | None]]:
        """Return the question, the steps and the labels of a row that is told as in Math-Shepherd."""
        field, other = self.source.steps_field, self.source.labels_field
        text = row.fields[field]
        if not isinstance(text, str):
            raise DataError(
                f"{row.origin}: expected a text in {field!r}, found {short(text)}",
                fix=f"correct the row, or remove {self.key}.step_tag where steps are a list",
            )
        parts = text.split(tag)
        if parts[-1].strip():
            raise DataError(
                f"{row.origin}: {field!r} goes on after its last {tag!r}: {short(parts[-1].strip())}",
                fix="correct the row: a tag follows every step",
            )
        begun = _FIRST.search(parts[0])
        if begun is None or not parts[0][: begun.start()].strip():
            raise BadRow(Problem.EMPTY, f"no question stands before 'Step 1:' in {field!r}", fix="correct the row")
        question, steps = parts[0][: begun.start()], [parts[0][begun.end() :], *parts[1:-1]]
        labelled = list_in(row, other)
        if not isinstance(labelled, str):
            return question, steps, self._labels(row, len(steps))
        signs = _signs(parts, labelled)
        if signs is None:
            raise DataError(
                f"{row.origin}: the text in {other!r} is not that in {field!r} with '+' or '-' in place of each "
                f"{tag!r}",
                fix=f"correct the row, or {self.key}.step_tag",
            )
        return question, steps, signs


def _signs(parts: Sequence[str], labelled: str) -> list[float | None] | None:
    """Return what stands between parts of a text that has one sign there; None where it is another text."""
    found: list[float | None] = []
    for part, _ in pairwise(parts):
        sign = labelled[len(part) : len(part) + 1]
        if not labelled.startswith(part) or sign not in _SIGNS:
            return None
        found.append(_SIGNS[sign])
        labelled = labelled[len(part) + 1 :]
    return found if labelled == parts[-1] else None
