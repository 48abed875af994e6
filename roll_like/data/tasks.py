"""Datasets become tasks: rows are checked, prompts are tokenised once, and what is left out is counted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, product

from roll_like.config.data import DataSource
from roll_like.data.bad_rows import LeftOut, RowsReport, refuse_odd_text, refused
from roll_like.data.chat import WITHOUT_UNKNOWN, ChatMessage, Renderer, UnseenImages
from roll_like.data.choice import RowChoice, by_domain, refuse_weights
from roll_like.data.fields import final_answer
from roll_like.data.images import as_text, download_images, pictures_of
from roll_like.data.messages import field_names, read_last_answer, read_prompt, require_fields, short, with_system
from roll_like.data.order import ItemSet, ItemSource, Order
from roll_like.data.rows import Row, read_rows
from roll_like.data.streamed import FIRST_ROWS, MOST_ROWS, Stream
from roll_like.errors import CheckpointError, DataError, EnvError
from roll_like.types import Message, Task

#: What a report says of prompts that are left out for their length.
TOO_LONG = "prompts over the limit"
_BATCH = 1024  # prompts tokenised in one call


@dataclass(frozen=True, kw_only=True)
class TaskSource(ItemSource[Task]):
    """The tasks of one source, in file order.

    Attributes:
        answer_field: Field that became `Task.answer`.
        report: What was kept and what was left out.
        domain_weights: How often tasks of each domain are drawn; empty: as often as there are.
    """

    answer_field: str | None
    report: RowsReport
    domain_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def require(self, fields: Sequence[str], why: str, tasks: Iterable[Task] | None = None) -> None:
        """Check that tasks have what a reward needs.

        Args:
            fields: Row fields; `answer` means the task's reference answer.
            why: Who needs them, for the message: `reward 'math'`.
            tasks: Those that it scores; default: all.

        Raises:
            DataError: A field is missing in a row, or is null; names file and line.
        """
        for task, field in product(self.items if tasks is None else tasks, fields):
            if (task.answer if field == "answer" else task.metadata.get(field)) is not None:
                continue
            found = f"it has fields {field_names(task.metadata)}"
            if field == "answer":
                fix = f"set {self.key}.answer_field to the field that holds the reference answer"
            else:
                found = "it is null" if field in task.metadata else found
                fix = (
                    f"add {field!r} to every row that it scores, or leave the source out of that reward's `sources`, "
                    "or the row's domain out of its `domains`"
                )
            raise DataError(f"{task.origin}: {why} needs the field {field!r}; {found}", fix=fix)


@dataclass(frozen=True, kw_only=True)
class TaskSet(ItemSet[Task]):
    """All tasks of a run, by source."""

    sources: tuple[TaskSource, ...]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every task, source after source."""
        return tuple(self)

    @property
    def report(self) -> tuple[RowsReport, ...]:
        """What became of each source's rows."""
        return tuple(source.report for source in self.sources)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of every task: equal for equal data, wherever the files lie."""
        digest = hashlib.sha256()
        for task in self:
            digest.update(_content(task))
        for source in self.sources:
            if source.stream is not None:
                digest.update(source.stream.settings.encode())
        return digest.hexdigest()[:16]


class TaskOrder(Order[Task]):
    """An endless sequence of tasks.

    Args:
        seed: As for `Order`.
        shuffle: As for `Order`.

    Raises:
        ConfigError: There is nothing to draw from, or a weight is infinite.
    """

    def __init__(self, taskset: TaskSet, *, seed: int, shuffle: bool = True) -> None:
        sources = [part for source in taskset.sources for part in by_domain(source, source.domain_weights)]
        super().__init__(sources, taskset.fingerprint, seed=seed, shuffle=shuffle, limit="max_prompt_tokens")

    def find(self, task_id: str) -> Task:
        """Return a task by its id.

        Raises:
            CheckpointError: There is none.
        """
        for source in self._sources:
            for task in source.items:
                if task.task_id == task_id:
                    return task
            name, _, number = task_id.rpartition(":")
            if source.stream is not None and name == source.name and number.isdecimal():
                found = source.stream.at(int(number))
                if found is not None:
                    return found
        raise CheckpointError(f"the checkpoint names the task {task_id!r}, which the data no longer has")


def load_tasks(
    sources: Sequence[DataSource],
    renderer: Renderer,
    max_prompt_tokens: int,
    *,
    key: str = "data.sources",
) -> TaskSet:
    """Read datasets and return their tasks.

    Args:
        renderer: Turns messages into `Task.prompt_ids`, generation prompt included.
        max_prompt_tokens: Longer prompts are left out and counted.
        key: Where the sources stand in the configuration, for messages.

    Raises:
        DataError: A source cannot be read, a row is wrong (names file, line and key), or nothing is left of a source.
    """
    return TaskSet(
        sources=tuple(
            load_task_source(source, renderer, max_prompt_tokens, f"{key}.{index}")
            for index, source in enumerate(sources)
        )
    )


def _content(task: Task) -> bytes:
    """Return all that a run sees of a task."""
    parts = [task.source, task.task_id, task.answer, task.metadata]
    # what JSON cannot say (an image, a date) counts by its type: its text may hold an address
    text = json.dumps(parts, sort_keys=True, default=lambda value: type(value).__name__)
    images = b"".join(image.picture.digest for image in task.images)
    return text.encode() + task.prompt_ids.tobytes() + images


def load_task_source(source: DataSource, renderer: Renderer, limit: int, key: str) -> TaskSource:
    """Read one dataset, as `load_tasks` does each; `key` is its place in the configuration."""
    kept: list[Task] = []
    left: list[str] = []
    longest = 0
    domains: Counter[str] = Counter()
    chosen = RowChoice(source, key)
    rows = islice(read_rows(source, key), MOST_ROWS if source.streaming else None)
    for task in islice(_tasks(rows, renderer, chosen), FIRST_ROWS if source.streaming else None):
        domains[task.domain] += 1
        longest = max(longest, len(task.prompt_ids))
        if len(task.prompt_ids) <= limit:
            kept.append(task)
        else:
            left.append(f"{task.origin} ({len(task.prompt_ids)} tokens)")
    chosen.refuse_none()
    if not kept:
        raise DataError(
            f"{source.path}: all {len(left)} prompts are longer than {limit} tokens; first: {left[0]}",
            fix=f"raise data.max_prompt_tokens (the longest prompt has {longest} tokens)",
        )
    _refuse_no_answers(source, kept, key)
    refuse_weights(source, kept, domains, key)
    too_long = (LeftOut(problem=TOO_LONG, count=len(left), first=left[0]),) if left else ()
    left_out = (*chosen.left_out(), *too_long)
    report = RowsReport(name=source.label, rows=chosen.rows, kept=len(kept), longest=longest, left_out=left_out)
    return TaskSource(
        name=source.label,
        key=key,
        weight=source.weight,
        items=tuple(kept),
        stream=_stream(source, renderer, limit, key) if source.streaming else None,
        answer_field=source.answer_field,
        report=report,
        domain_weights=source.domain_weights,
    )


def first_tasks(source: DataSource, renderer: Renderer, key: str) -> Iterator[Task]:
    """Yield the tasks of one dataset, reading each row when it is asked for; of one that is streamed, of first rows."""
    chosen = RowChoice(source, key)
    for number, row in enumerate(islice(read_rows(source, key), MOST_ROWS if source.streaming else None), 1):
        yield from _tasks([row], renderer, chosen, number)
    chosen.refuse_none()


def _refuse_no_answers(source: DataSource, tasks: Sequence[Task], key: str) -> None:
    """Check that a task has an answer, where some may have none; first rows of a stream say nothing of later ones."""
    if source.answer_field is None or source.streaming or any(task.answer is not None for task in tasks):
        return
    raise DataError(
        f"{source.place}: none of {len(tasks)} rows has an answer in {source.answer_field!r}; the first has the fields "
        f"{field_names(tasks[0].metadata)}",
        fix=f"correct {key}.answer_field, or set it to null if there are no reference answers",
    )


def _stream(source: DataSource, renderer: Renderer, limit: int, key: str) -> Stream[Task]:
    def items(rows: Sequence[Row], number: int) -> list[Task]:
        tasks = _tasks(rows, renderer, RowChoice(source, key), number)
        return [task for task in tasks if len(task.prompt_ids) <= limit]

    # not in the settings if unset, so that checkpoints from before these keys are continued
    unset = {name for name in ("domain_field", "domain_weights", "where") if not getattr(source, name)}
    return Stream(
        label=source.label,
        block=source.stream_block,
        settings=f"{source.model_dump_json(exclude=unset)} {limit} {renderer.fingerprint}",
        rows=partial(read_rows, source, key),
        items=items,
        content=_content,
    )


def _tasks(rows: Iterable[Row], renderer: Renderer, chosen: RowChoice, first: int = 1) -> Iterator[Task]:
    """Yield a task for each row that is chosen; many prompts are tokenised at a time, which is much faster.

    Args:
        first: Number of the first row; those that are not chosen count.
    """
    source, key = chosen.source, chosen.key
    numbered = ((number, row) for number, row in enumerate(rows, first) if chosen.keeps(row))
    while some := list(islice(numbered, _BATCH)):
        batch = [row for _, row in some]
        if renderer.images is not None:
            download_images(batch)
        messages = [_messages(row, source, key) for row in batch]
        answers = [_answer(row, source, key) for row in batch]
        texts = [(_render(renderer, prompt, row), True) for prompt, row in zip(messages, batch, strict=True)]
        encoded = renderer.encode_pieces(texts)
        for (number, row), prompt, answer, (text, _), ids in zip(some, messages, answers, texts, encoded, strict=True):
            if (unknown := renderer.unknown(ids)) is not None:
                raise DataError(f"{row.origin}: the prompt has {unknown}", fix=WITHOUT_UNKNOWN)
            with refused(row.origin):
                prompt_ids, images = renderer.expanded(ids, pictures_of(prompt), row.origin)
            yield Task(
                task_id=f"{source.label}:{number}",
                source=source.label,
                domain=chosen.domain(row),
                messages=tuple(Message(role=each["role"], content=as_text(each["content"])) for each in prompt),
                prompt_ids=prompt_ids,
                answer=answer,
                metadata={field: value for field, value in row.fields.items() if field != source.prompt_field},
                origin=row.origin,
                images=images,
                reasoning=renderer.reasoning_after(text),
            )


def _render(renderer: Renderer, messages: Sequence[ChatMessage], row: Row) -> str:
    try:
        return renderer.render(messages, ())
    except EnvError as error:
        fix = "change the row's roles, the source's system_prompt, or model.chat_template"
        raise DataError(
            f"{row.origin}: {error.message}", fix=error.fix if isinstance(error, UnseenImages) else fix
        ) from error


def _messages(row: Row, source: DataSource, key: str) -> list[ChatMessage]:
    require_fields(row, {source.prompt_field: f"{key}.prompt_field"})
    with refused(row.origin):
        refuse_odd_text(row.fields)
        return with_system(read_prompt(row, source, key, plain=True), row, source, key)


def _answer(row: Row, source: DataSource, key: str) -> str | None:
    if source.answer_field is None:
        return None
    if source.holds_conversations:
        return final_answer(read_last_answer(row, source, key), source, row.origin, key)
    if source.domain_field is not None and row.fields.get(source.answer_field) is None:
        return None  # another domain's rewards may need none; those that do need one say so
    require_fields(row, {source.answer_field: f"{key}.answer_field to null if there are no reference answers, or"})
    answer = row.fields[source.answer_field]
    if isinstance(answer, str):
        return final_answer(answer, source, row.origin, key)
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        return str(answer)
    raise DataError(
        f"{row.origin}: expected a text or a number in {source.answer_field!r}, found {short(answer)}",
        fix=f"correct the row, or {key}.answer_field",
    )
