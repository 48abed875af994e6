"""The conversations of distillation, each with its teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from roll_like.builtin.pipelines.distill.config import DistillationDataConfig, DistillationSource, DistillConfig
from roll_like.builtin.pipelines.distill.other_tokens import Translation
from roll_like.config.teachers import teacher_model, teacher_of
from roll_like.data.bad_rows import BadRow, Problem, RowCounter
from roll_like.data.chat import Renderer
from roll_like.data.conversations import ConversationReader
from roll_like.data.kept_samples import kept_samples
from roll_like.data.samples import SampleSet, load_samples
from roll_like.errors import DataError
from roll_like.models.load import load_renderer
from roll_like.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtSample(TrainingSample):
    """A conversation with the name of its teacher."""

    teacher: str

    def content(self) -> bytes:
        """Return everything that training sees of it, for fingerprints."""
        return TrainingSample.content(self) + self.teacher.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedSample(TaughtSample):
    """A conversation whose teacher has another tokenizer.

    Attributes:
        theirs: The conversation in the teacher's tokens and chat template; the same text is trained.
    """

    theirs: TrainingSample

    def content(self) -> bytes:
        """Return everything that training sees of it, for fingerprints."""
        return TaughtSample.content(self) + self.theirs.content()


@dataclass(frozen=True, kw_only=True)
class TaughtReader(ConversationReader):
    """How rows become conversations with their teacher."""

    teacher: str

    def join(self, parts: Sequence[TrainingSample], value: float) -> TaughtSample:  # noqa: ARG002
        """Return a conversation, which is its one sequence."""
        return TaughtSample(**parts[0].shared_fields, teacher=self.teacher)


def load_samples_of_teachers(
    config: DistillConfig, data: DistillationDataConfig, renderer: Renderer, section: str
) -> SampleSet[TaughtSample]:
    """Return the conversations of a section, each with its teacher."""

    def reader(source: DistillationSource, **places: Any) -> TaughtReader:
        return TaughtReader(source=source, teacher=teacher_of(config.teachers, source.domain_label), **places)

    found = cast("SampleSet[TaughtSample]", load_samples(data, renderer, reader, section))
    if not any(teacher.other_tokenizer for teacher in config.teachers.values()):
        return found
    sources, reports = [], []
    for index, (source, loaded, report) in enumerate(zip(data.sources, found.sources, found.report, strict=True)):
        name = teacher_of(config.teachers, source.domain_label)
        if not config.teachers[name].other_tokenizer:
            sources.append(loaded)
            reports.append(report)
            continue
        teacher = load_renderer(teacher_model(config.model, config.teachers[name]))
        reads = reader(source=source, key=f"{section}.sources.{index}", limits=data, section=section)
        try:
            theirs, _ = kept_samples(reads, teacher)
        except DataError as error:
            raise DataError(f"in the tokens of teachers.{name}: {error.message}", fix=error.fix) from error
        left = RowCounter(data.bad_rows, section)
        kept = _translated(loaded.items, theirs, Translation(renderer, teacher, name=name), left)
        if not kept:
            raise DataError(
                f"{loaded.key}: no row can be compared with teachers.{name}: {left.report(loaded.name)}",
                fix=f"use a teacher whose chat template writes answers as they are, or raise {section}.max_tokens",
            )
        sources.append(replace(loaded, items=kept))
        reports.append(
            replace(
                report,
                kept=len({sample.origin for sample in kept}),
                samples=len(kept),
                tokens=sum(map(len, kept)),
                trained=sum(sample.trained_tokens for sample in kept),
                left_out=(*report.left_out, *left.report(loaded.name).left_out),
            )
        )
    return SampleSet(sources=tuple(sources), report=tuple(reports))


def _translated(
    ours: Sequence[TaughtSample], theirs: Sequence[TrainingSample], translation: Translation, left: RowCounter
) -> tuple[TranslatedSample, ...]:
    """Return samples with the teacher's tokens of them, and count those that train other text in the teacher's."""
    places = {(sample.origin, sample.part): sample for sample in theirs}
    kept = []
    for sample in ours:
        seen = places.get((sample.origin, sample.part))
        why = "is left out in the teacher's tokens" if seen is None else translation.difference(sample, seen)
        if seen is not None and why is None:
            kept.append(TranslatedSample(**sample.shared_fields, teacher=sample.teacher, theirs=seen))
        else:
            left.leave(sample.origin, BadRow(Problem.OTHER_TEXT, str(why), fix="leave the row out"))
    return tuple(kept)
