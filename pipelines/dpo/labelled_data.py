"""Datasets of preferences in DPO runs: pairs, or single responses with a label each.

    {"prompt": "Hi", "completion": "Hello", "label": true}

Labelled rows are those of `roll_like.data.conversations` with a label; pairs are read by `roll_like.data.pairs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from roll_like.builtin.pipelines.dpo.config import LabelledData, LabelledSource
from roll_like.config.data import PairData, without_rows
from roll_like.data.bad_rows import RowCounter
from roll_like.data.chat import Renderer
from roll_like.data.conversations import read_conversation, usable, whole
from roll_like.data.loss_flags import left_out, yes_or_no
from roll_like.data.messages import require_fields, short
from roll_like.data.pairs import PairSample, load_pairs
from roll_like.data.rows import Row
from roll_like.data.samples import ConversationSample, Reader, SampleSet, SampleSource, fit, load_source, load_sources
from roll_like.data.turns import Piece
from roll_like.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSample:
    """A response that is desirable or not.

    Attributes:
        sample: The conversation; what is trained is the response.
        label: Whether it is desirable.
    """

    sample: ConversationSample
    label: bool

    @property
    def origin(self) -> str:
        """`file:line` of its row."""
        return self.sample.origin

    @property
    def sequences(self) -> tuple[ConversationSample, ...]:
        """Its sequence of tokens."""
        return (self.sample,)

    def content(self) -> bytes:
        """Return everything that training sees of it, for fingerprints."""
        return self.sample.content() + bytes([self.label])


#: What preferences are told by.
Preference: TypeAlias = PairSample | LabelledSample


def load_preferences(
    data: PairData | LabelledData, renderer: Renderer, *, section: str = "data"
) -> SampleSet[Preference]:
    """Read pairs, or responses with a label each, as `load_pairs` and `load_labelled` do."""
    load: Any = load_pairs if isinstance(data, PairData) else load_labelled
    return cast("SampleSet[Preference]", load(data, renderer, section=section))


def load_labelled(data: LabelledData, renderer: Renderer, *, section: str = "data") -> SampleSet[LabelledSample]:
    """Read responses with a label each.

    Of a row with messages, the last assistant turn is what the label is about. Arguments and errors are those of
    `load_conversations`.
    """

    def load(source: LabelledSource, key: str) -> SampleSource[LabelledSample]:
        reader = LabelledReader(source=source, key=key, data=data, section=section)
        return load_source(source, reader, renderer, data, key=key, section=section)

    return load_sources(data.sources, load, section)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledReader(Reader[LabelledSample]):
    """How rows become responses with a label each.

    Attributes:
        source: The dataset.
        key: Its place in the configuration, for messages.
        data: What happens to rows that are too long.
        section: Its place in the configuration, for messages.
    """

    source: LabelledSource
    key: str
    data: LabelledData
    section: str

    def draft(self, row: Row, renderer: Renderer) -> list[list[Piece]]:
        """Return the text of a response, after its prompt."""
        _label(row, self.source, self.key)
        found = read_conversation(row, self.source, self.key)
        turns = found.assistant_turns()[0 if found.response else -1 :]
        if found.untrained.intersection(turns):
            raise left_out("the labelled response")
        return whole(found.sequences(renderer, turns))

    def finish(self, row: Row, parts: list[ConversationSample], counter: RowCounter) -> list[LabelledSample]:
        """Return the response with its label."""
        sample = fit(usable(parts[0]), self.data, counter, self.section)
        return [LabelledSample(sample=sample, label=_label(row, self.source, self.key))]

    def value(self, sample: LabelledSample) -> float:
        """Return the label, which is kept beside the response."""
        return float(sample.label)

    def join(self, parts: Sequence[ConversationSample], value: float) -> LabelledSample:
        """Return a response with its label."""
        return LabelledSample(sample=parts[0], label=bool(value))

    def sent(self) -> LabelledReader:
        """Return the same without rows."""
        return replace(self, source=without_rows(self.source), data=self.data.reading(()))


def labelled_samples(preferences: Iterable[Preference]) -> Iterator[LabelledSample]:
    """Yield responses with a label each: of a pair, the chosen one and then the rejected one."""
    for each in preferences:
        if isinstance(each, LabelledSample):
            yield each
        else:
            yield LabelledSample(sample=each.chosen, label=True)
            yield LabelledSample(sample=each.rejected, label=False)


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
