"""Demonstrations: a prompt with an example of a good answer, which the teacher reads and the student does not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from roll_like.builtin.pipelines.on_policy_distill.config import DemonstrationConfig
from roll_like.check.findings import Finding
from roll_like.data.chat import ChatMessage, Renderer
from roll_like.data.tasks import TaskSource
from roll_like.errors import DataError
from roll_like.types import IntArray, Task

_PLACES = re.compile(r"\{(prompt|demonstration)\}")


def demonstration_text(task: Task, config: DemonstrationConfig) -> str:
    """Return the demonstration of a task's row.

    Raises:
        DataError: The row has none.
    """
    found = task.metadata.get(config.field)
    if not isinstance(found, str) or not found.strip():
        known = ", ".join(sorted(task.metadata)) or "none"
        there = f"{found!r} in it" if config.field in task.metadata else f"no such field (the row has {known})"
        raise DataError(
            f"{task.origin}: expected a demonstration, a text in {config.field!r}, found {there}",
            fix="correct the row, or distillation.demonstration.field",
        )
    return found


def demonstrated(task: Task, config: DemonstrationConfig) -> list[ChatMessage]:
    """Return a task's messages with the demonstration in the last one of the user, as the template says.

    Raises:
        DataError: The row has no demonstration, or its prompt no message of a user.
    """
    messages: list[dict[str, str]] = [{**message} for message in task.messages]  # type: ignore[dict-item]
    last = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise DataError(
            f"{task.origin}: the prompt has no message of the user to put a demonstration into",
            fix="add one, or leave distillation.demonstration out",
        )
    texts = {"prompt": messages[last]["content"], "demonstration": demonstration_text(task, config)}
    # in one pass: what a row says is no template
    messages[last]["content"] = _PLACES.sub(lambda place: texts[place[1]], config.template)
    return list(messages)


class Demonstrations:
    """Prompts with demonstrations, as tokens.

    Args:
        config: The section `distillation.demonstration`.
    """

    def __init__(self, renderer: Renderer, config: DemonstrationConfig) -> None:
        self._renderer = renderer
        self._config = config

    def prompt_ids(self, task: Task) -> IntArray:
        """Return the tokens of a task's prompt with its demonstration, shape [T].

        Raises:
            DataError: The row has no demonstration, or it is too long.
        """
        prompt_ids = self._renderer.encode(self._renderer.render(demonstrated(task, self._config), ()))
        if len(prompt_ids) > self._config.max_prompt_tokens:
            raise DataError(
                f"{task.origin}: the prompt with its demonstration has {len(prompt_ids)} tokens, more than "
                f"{self._config.max_prompt_tokens}",
                fix="raise distillation.demonstration.max_prompt_tokens, or shorten the demonstration",
            )
        return prompt_ids

    def findings(self, tasks: Mapping[str, Sequence[TaskSource]]) -> Iterator[Finding]:
        """Yield rows without a demonstration, or with one that is too long: the first of each source.

        Args:
            tasks: The sources whose answers teachers score, by section.
        """
        for source in (source for sources in tasks.values() for source in sources):
            wrong: list[str] = []
            for task in source.items:
                try:
                    self.prompt_ids(task)
                except DataError as error:
                    wrong.append(f"{error.message}; {error.fix}")
            if wrong:
                more = f" (and {len(wrong) - 1} more rows)" if len(wrong) > 1 else ""
                yield Finding.error(source.key, wrong[0] + more)
