"""Datasets of preferences in DPO runs: pairs, or single responses with a label each.

    {"prompt": "Hi", "completion": "Hello", "label": true}

Labelled rows are those of `roll_like.data.conversations` with a label; pairs are read by `roll_like.data.pairs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from roll_like.builtin.pipelines.dpo.config import LabelledData, LabelledSource
from roll_like.config.data import PairData
from roll_like.data.bad_rows import RowCounter
from roll_like.data.chat import Renderer
from roll_like.data.conversations import read_conversation, usable, whole
from roll_like.data.loss_flags import left_out, yes_or_no
from roll_like.data.messages import require_fields, short
from roll_like.data.pairs import load_pairs
from roll_like.data.reader import Reader
from roll_like.data.rows import Row
from roll_like.data.samples import SampleSet, load_samples
from roll_like.data.turns import Piece
from roll_like.errors import DataError
from roll_like.types import Pair, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSample(TrainingSample):
    """A response that is desirable or not.

    Attributes:
        desirable: Whether it is one to make likelier.
    """

    desirable: bool

    def content(self) -> bytes:
        return TrainingSample.content(self) + bytes([self.desirable])


#: What preferences are told by.
Preference: TypeAlias = Pair | LabelledSample


def load_preferences(
    data: PairData | LabelledData, renderer: Renderer, *, section: str = "data"
) -> SampleSet[Preference]:
    """Read pairs, or responses with a label each, as `load_pairs` and `load_labelled` do."""
    load: Any = load_pairs if isinstance(data, PairData) else load_labelled
    return cast("SampleSet[Preference]", load(data, renderer, section=section))


def load_labelled(data: LabelledData, renderer: Renderer, *, section: str = "data") -> SampleSet[LabelledSample]:
    """Read responses with a label each.

    Of a row with messages, the last assistant turn is what the label is about. Arguments and errors are those of
    `load_samples`.
    """
    return load_samples(data, renderer, LabelledReader, section)


@dataclass(frozen=True, kw_only=True)
class LabelledReader(Reader[LabelledSample]):
    """How rows become responses with a label each."""

    source: LabelledSource

    def draft(self, row: Row, renderer: Renderer) -> list[list[Piece]]:
        """Return the text of a response, after its prompt."""
        _label(row, self.source, self.key)
        found = read_conversation(row, self.source, self.key)
        turns = found.assistant_turns()[0 if found.response else -1 :]
        if found.untrained.intersection(turns):
            raise left_out("the labelled response")
        return whole(found.sequences(renderer, turns))

    def finish(self, row: Row, parts: list[TrainingSample], counter: RowCounter) -> list[LabelledSample]:
        """Return the response with its label."""
        return [self.join([self.fit(usable(parts[0]), counter)], [_label(row, self.source, self.key)])]

    def values(self, sample: LabelledSample) -> Sequence[float]:
        """Return the label, which is kept beside the response."""
        return (float(sample.desirable),)

    def join(self, parts: Sequence[TrainingSample], values: Sequence[float]) -> LabelledSample:
        """Return a response with its label."""
        return LabelledSample(**parts[0].shared_fields, desirable=bool(values[0]))


def labelled_samples(preferences: Iterable[Preference]) -> Iterator[LabelledSample]:
    """Yield responses with a label each: of a pair, the chosen one and then the rejected one."""
    for each in preferences:
        if isinstance(each, LabelledSample):
            yield each
        else:
            yield LabelledSample(**each.chosen.shared_fields, desirable=True)
            yield LabelledSample(**each.rejected.shared_fields, desirable=False)


def _label(row: Row, source: LabelledSource, key: str) -> bool:
    require_fields(row, {source.label_field: f"{key}.label_field"})
    found = row.fields[source.label_field]
    label = yes_or_no(found)
    if label is not None:
        return label
    raise DataError(
        f"{row.origin}: expected true or false (or 1 or 0) in {source.label_field!r}, found {short(found)}",
        fix=f"correct the row, or {key}.label_field",
    )
