"""The conversations of distillation, each with its teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from roll_like.builtin.pipelines.distill.config import DistillationDataConfig, DistillationSource, DistillConfig
from roll_like.config.teachers import teacher_of
from roll_like.data.chat import Renderer
from roll_like.data.conversations import ConversationReader
from roll_like.data.samples import SampleSet, load_samples
from roll_like.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtSample(TrainingSample):
    """A conversation with the name of its teacher."""

    teacher: str

    def content(self) -> bytes:
        """Return everything that training sees of it, for fingerprints."""
        return TrainingSample.content(self) + self.teacher.encode()


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

    return cast("SampleSet[TaughtSample]", load_samples(data, renderer, reader, section))
