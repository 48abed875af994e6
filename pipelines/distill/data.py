"""The conversations of distillation, each with its teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from sys import maxsize
from typing import Any, cast

from roll_like.builtin.pipelines.distill.config import DistillationDataConfig, DistillationSource, DistillConfig
from roll_like.builtin.pipelines.distill.other_tokens import Translation
from roll_like.config.teachers import teacher_key, teacher_model, teacher_of
from roll_like.data.bad_rows import BadRow, Problem, RowCounter, SamplesReport
from roll_like.data.chat import Renderer
from roll_like.data.conversations import ConversationReader
from roll_like.data.kept_samples import kept_samples
from roll_like.data.samples import SampleSet, load_samples
from roll_like.errors import DataError
from roll_like.models.load import load_renderer
from roll_like.types import TrainingSample

_WITHOUT = "leave the row out"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtSample(TrainingSample):
    """A conversation with the name of its teacher."""

    teacher: str

    def content(self) -> bytes:
        return TrainingSample.content(self) + self.teacher.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedSample(TaughtSample):
    """A conversation whose teacher has another tokenizer.

    Attributes:
        theirs: The conversation in the teacher's tokens and chat template; the same text is trained.
    """

    theirs: TrainingSample

    def content(self) -> bytes:
        return TaughtSample.content(self) + self.theirs.content()


@dataclass(frozen=True, kw_only=True)
class TaughtReader(ConversationReader):
    """How rows become conversations with their teacher."""

    teacher: str

    def join(self, parts: Sequence[TrainingSample], values: Sequence[float]) -> TaughtSample:  # noqa: ARG002
        return TaughtSample(**parts[0].shared_fields, teacher=self.teacher)


def load_samples_of_teachers(
    config: DistillConfig, data: DistillationDataConfig, renderer: Renderer, section: str
) -> SampleSet[TaughtSample]:
    """Return the conversations of a section, each with its teacher.

    Raises:
        ConfigError: A teacher has no tokenizer, or none that can be compared.
        DataError: As `load_samples` says, of the student's tokens or of a teacher's.
    """

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
        teacher = load_renderer(teacher_model(config.model, config.teachers[name]), key=teacher_key(name))
        # of any length, so that what is longer in these tokens alone is counted here
        limits = data.model_copy(update={"max_tokens": maxsize})
        reads = reader(source=source, key=f"{section}.sources.{index}", limits=limits, section=section)
        try:
            theirs, there = kept_samples(reads, teacher)
        except DataError as error:
            raise DataError(
                f"in the tokens of teachers.{name}, with its own chat template: {error.message}", fix=error.fix
            ) from error
        left = RowCounter.after(report, data.bad_rows, section)
        kept = _translated(loaded.items, theirs, Translation(renderer, teacher, name=name), data, there, left)
        left.kept, left.samples = len({sample.origin for sample in kept}), len(kept)
        left.tokens, left.trained = sum(map(len, kept)), sum(sample.trained_tokens for sample in kept)
        if not kept:
            raise DataError(
                f"{loaded.key}: no row can be compared with teachers.{name}: {left.report(loaded.name)}",
                fix="use a teacher whose chat template writes answers as they are, or raise data.max_tokens",
            )
        sources.append(replace(loaded, items=kept))
        reports.append(left.report(loaded.name))
    return SampleSet(sources=tuple(sources), report=tuple(reports))


def _translated(
    ours: Sequence[TaughtSample],
    theirs: Sequence[TrainingSample],
    translation: Translation,
    limits: DistillationDataConfig,
    there: SamplesReport,
    left: RowCounter,
) -> tuple[TranslatedSample, ...]:
    """Return samples with the teacher's tokens of them, and count those that it cannot be asked about.

    Args:
        theirs: The teacher's of the same rows, of any length.
        translation: Compares what they train.
        limits: The limit that counts for both, and what happens to rows over it.
        there: What became of rows that have no sample of the teacher's.
        left: Counts what is left out.
    """
    places = {(sample.origin, sample.part): sample for sample in theirs}
    reasons = "; ".join(f"{each.count} {each.problem}, first {each.first}" for each in there.left_out)
    kept = []
    for sample in ours:
        seen = places.get((sample.origin, sample.part))
        if seen is None:
            message = f"the teacher's chat template makes no sample of it; left out there: {reasons or 'nothing else'}"
            why = BadRow(Problem.OTHER_TEXT, message, _WITHOUT)
        elif len(seen) > limits.max_tokens:
            why = BadRow(Problem.TOO_LONG, f"{len(seen)} of the teacher's tokens, the limit is {limits.max_tokens}")
            if limits.too_long == "refuse":
                fix = "raise data.max_tokens, or set data.too_long: skip"
                raise DataError(f"{sample.origin}: {why.message}", fix=fix)
        elif (difference := translation.difference(sample, seen)) is not None:
            why = BadRow(Problem.OTHER_TEXT, difference, _WITHOUT)
        else:
            kept.append(TranslatedSample(**sample.shared_fields, teacher=sample.teacher, theirs=seen))
            continue
        left.leave(sample.origin, why)
    return tuple(kept)
