"""Rows of a benchmark become tasks: examples, prompt and reference answer are written as its protocol says."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
from jinja2 import TemplateError

from roll_like.config.benchmarks import Benchmark, BenchmarkShots, BenchmarkUse, template_of
from roll_like.data.chat import WITHOUT_UNKNOWN, Renderer
from roll_like.data.messages import field_names, short
from roll_like.data.rows import Row, read_rows
from roll_like.errors import DataError, EnvError
from roll_like.types import IntArray, Message, Task

_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "text": str,
    "number": (int, float),
    "list": (list, tuple),
    "any": object,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkPrompt:
    """What a model is asked.

    Attributes:
        description: Before examples and question; the system message of a chat.
        question: Examples and question.
        prefix: What the answer begins with.
    """

    description: str
    question: str
    prefix: str

    @property
    def text(self) -> str:
        """All of it as one text."""
        return self.description + self.question + self.prefix

    @property
    def messages(self) -> list[Message]:
        """The messages of a chat; the answer goes on behind `prefix`."""
        system = [Message(role="system", content=self.description)] if self.description else []
        return [*system, Message(role="user", content=self.question)]


def benchmark_tasks(use: BenchmarkUse, renderer: Renderer, key: str) -> list[Task]:
    """Return the tasks of a benchmark.

    Args:
        key: Place of `use` in the configuration, for messages.

    Raises:
        DataError: Its rows cannot be read, are not of its schema, or a prompt is longer than its limit.
    """
    written = list(written_prompts(use, key))
    if not written:
        where = use.benchmark.where
        wanted = "".join(f" with {field}: {value}" for field, value in where.items())
        filtered = f"correct `where` in the benchmark's file, or set {key}.path to data that has such rows"
        fix = filtered if where else f"correct {key}.path"
        raise DataError(f"{use.data().place} holds no rows{wanted}", fix=fix)
    chat = use.asked_form != "completion"
    pieces = [_text_of(prompt, renderer, row.origin) if chat else prompt.text for row, prompt in written]
    encoded = renderer.encode_pieces([(text, True) for text in pieces]) if chat else _plain_tokens(renderer, pieces)
    answer = use.benchmark.answer
    tasks = []
    for number, ((row, prompt), text, ids) in enumerate(zip(written, pieces, encoded, strict=True), 1):
        if (unknown := renderer.unknown(ids)) is not None:
            raise DataError(f"{row.origin}: the prompt has {unknown}", fix=WITHOUT_UNKNOWN)
        limit = use.sampling.max_prompt_tokens
        if len(ids) > limit:
            raise DataError(
                f"{row.origin}: the prompt of benchmark {use.label!r} has {len(ids)} tokens, above its limit of "
                f"{limit}, and a benchmark leaves no row out",
                fix=f"raise {key}.max_prompt_tokens",
            )
        tasks.append(
            Task(
                task_id=":".join((use.domain, *_subset(use, row), str(number))),
                source=use.domain,
                domain=use.domain,
                messages=tuple(prompt.messages),
                prompt_ids=ids,
                answer=None if answer is None else _render(answer, row, f"{use.label}: answer"),
                metadata=_with_derived(use, row),
                origin=row.origin,
                images=(),
                reasoning=renderer.reasoning_after(text) if chat else None,
            )
        )
    return tasks


def written_prompts(use: BenchmarkUse, key: str) -> Iterator[tuple[Row, BenchmarkPrompt]]:
    """Yield each row of a benchmark, with its options in their order, and what a model is asked."""
    one = use.benchmark
    orders = None if one.shuffle is None else random.Random(one.shuffle.seed)
    examples = _Examples(use, key)
    for row in islice(_asked_rows(use, key), use.limit):
        asked = row if orders is None else _in_order(row, one, orders)
        where = f"benchmark {use.label!r}"
        yield (
            asked,
            BenchmarkPrompt(
                description="" if one.description is None else _render(one.description, asked, where),
                question=examples.before(asked) + _render(one.prompt, asked, where),
                prefix="" if one.prefix is None else _render(one.prefix, asked, where),
            ),
        )


def _asked_rows(use: BenchmarkUse, key: str) -> Iterator[Row]:
    """Yield the rows that are questions."""
    one = use.benchmark
    for row in _rows_of(use, key):
        _require(row, one, key)
        if all(row.fields[field] == value for field, value in one.where.items()):
            yield row


def _rows_of(use: BenchmarkUse, key: str, split: str | None = None) -> Iterator[Row]:
    """Yield the rows of a split; those of several subsets in turn, so that the first rows are of all of them."""
    subsets = use.benchmark.subsets
    if not subsets or (use.path is not None and Path(use.path).expanduser().is_file()):
        yield from _read(use, key, split)
        return
    for rows in zip_longest(*(_read(use, key, split, subset) for subset in subsets)):
        for subset, row in zip(subsets, rows, strict=True):
            if row is not None:
                yield replace(row, fields={**row.fields, "subset": subset})


def _read(use: BenchmarkUse, key: str, split: str | None, subset: str | None = None) -> Iterator[Row]:
    """Yield the rows of a split and a subset. What to change is `path`: a benchmark that is used has no other key."""
    try:
        yield from read_rows(use.data(split, subset), key)
    except DataError as error:
        if not any(f"{key}.{name}" in (error.fix or "") for name in ("split", "subset")):
            raise
        one = use.benchmark
        named = f" of the subset {subset or one.subset!r}" if subset or one.subset else ""
        raise DataError(
            error.message, fix=f"set {key}.path to data of {one.path} that has the split {split or one.split!r}{named}"
        ) from error


class _Examples:
    """The solved examples of a benchmark, as text."""

    def __init__(self, use: BenchmarkUse, key: str) -> None:
        self._use, self._key = use, key
        self._texts: dict[Any, str] = {}
        self._rows: Sequence[Row] | None = None

    def before(self, asked: Row) -> str:
        """Return the examples before a question."""
        shots = self._use.benchmark.shots
        if shots is None:
            return ""
        kind = None if shots.same is None else asked.fields[shots.same]
        if kind not in self._texts:
            self._texts[kind] = self._text(shots, kind, asked)
        return self._texts[kind]

    def _text(self, shots: BenchmarkShots, kind: Any, asked: Row) -> str:
        one = self._use.benchmark
        if self._rows is None:
            self._rows = self._read(shots)
        chosen = [row for row in self._rows if shots.same is None or row.fields.get(shots.same) == kind]
        if shots.count is not None and len(chosen) < shots.count:
            of_kind = "" if shots.same is None else f" with {shots.same}: {short(kind)}"
            raise DataError(
                f"{asked.origin}: benchmark {self._use.label!r} needs {shots.count} examples{of_kind} of split "
                f"{shots.split!r}, and there are {len(chosen)}",
                fix=f"set {self._key}.path to a directory that has that split too",
            )
        where = f"an example of benchmark {self._use.label!r}"
        return "".join(
            _render(one.example_prompt or one.prompt, row, where) + _render(shots.answer, row, where) + shots.separator
            for row in chosen[: shots.count]
        )

    def _read(self, shots: BenchmarkShots) -> Sequence[Row]:
        if shots.split is None:
            name = self._use.label
            return [Row(dict(fields), f"{name}: example {number}") for number, fields in enumerate(shots.rows, 1)]
        rows = list(_rows_of(self._use, self._key, shots.split))
        for row in rows:
            _require(row, self._use.benchmark, self._key)
        return rows


def _subset(use: BenchmarkUse, row: Row) -> tuple[str, ...]:
    return (row.fields["subset"],) if use.benchmark.subsets else ()


def _require(row: Row, one: Benchmark, key: str) -> None:
    """Refuse a row that is not of the benchmark's schema.

    Raises:
        DataError: A field is missing, or holds something else.
    """
    for field, kind in one.columns.items():
        found = row.fields.get(field)
        right = isinstance(found, _KINDS[kind]) and not isinstance(found, bool) and found is not None
        if right or (kind == "any" and field in row.fields):
            continue
        if field in row.fields:
            problem = f"expected {kind} in {field!r}, found {short(found)}"
        else:
            problem = f"there is no field {field!r}; it has {field_names(row.fields)}"
        folders = ", with a directory for each of its subsets" if field == "subset" else ""
        raise DataError(
            f"{row.origin}: {problem}: {one.title} has rows with {', '.join(one.columns)}",
            fix=f"set {key}.path to data of {one.path}{folders}, or write a benchmark file for this data",
        )


def _in_order(row: Row, one: Benchmark, orders: random.Random) -> Row:
    """Return a row with its options in the next order."""
    assert one.shuffle is not None
    fields = one.shuffle.fields
    order = orders.sample(range(len(fields)), len(fields))
    options = [row.fields[fields[place]] for place in order]
    # of equal options the first is right, as in the published code
    letter = ascii_uppercase[options.index(row.fields[fields[0]])]
    return Row({**row.fields, "options": options, "letter": letter}, row.origin, typed=row.typed)


def _with_derived(use: BenchmarkUse, row: Row) -> dict[str, Any]:
    derived = {field: _render(text, row, use.label) for field, text in use.benchmark.derived.items()}
    return {**row.fields, **derived}


def _render(text: str, row: Row, where: str) -> str:
    try:
        return template_of(text).render(**row.fields)
    except (TemplateError, TypeError, KeyError, IndexError, ValueError) as error:
        raise DataError(
            f"{row.origin}: {where} cannot be written: {error}", fix="correct the row, or the benchmark's file"
        ) from error


def _text_of(prompt: BenchmarkPrompt, renderer: Renderer, origin: str) -> str:
    try:
        return renderer.render(prompt.messages, ()) + prompt.prefix
    except EnvError as error:
        raise DataError(
            f"{origin}: {error.message}", fix="change model.chat_template, or set form: completion"
        ) from error


def _plain_tokens(renderer: Renderer, texts: Sequence[str]) -> list[IntArray]:
    """Return the tokens of plain texts, with what the tokenizer begins a text with, such as `<bos>`."""
    encoded = renderer.tokenizer(list(texts))["input_ids"]
    end = renderer.tokenizer.eos_token_id
    return [np.asarray(ids[:-1] if len(ids) > 1 and ids[-1] == end else ids, np.int32) for ids in encoded]
