"""Demonstrations of rows as the policy would have written them: behind its prompt, in its tokens, with its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from roll_like.config.demonstrations import DemonstrationsConfig, OffPolicyConfig
from roll_like.data.bad_rows import BadRow, Problem
from roll_like.data.chat import WITHOUT_UNKNOWN, Renderer
from roll_like.data.messages import field_names, short
from roll_like.data.turns import find_turn, render
from roll_like.errors import DataError
from roll_like.inference.stops import ResponseDecoder
from roll_like.rollout.experience import ExperiencePool, solves
from roll_like.rollout.scheduler import OffPolicyAnswers
from roll_like.types import Group, IntArray, Origin, Part, Scored, StopReason, Task, Trajectory

_KEY = "demonstrations.field"


class TaskDemonstrations:
    """The demonstrations of tasks: exactly the tokens that the policy would have to sample.

    Args:
        renderer: The policy's tokenizer with its chat template; None where there is none: then `problem` looks at texts
            alone.
        config: The section `demonstrations`.
        limit: `rollout.max_response_tokens`.
    """

    def __init__(self, renderer: Renderer | None, config: DemonstrationsConfig, limit: int) -> None:
        self._renderer = renderer
        self._decode = None if renderer is None else ResponseDecoder(renderer.tokenizer, renderer.kept_tokens)
        self._config = config
        self._limit = limit
        self._known: dict[str, tuple[Trajectory, ...]] = {}

    def of(self, task: Task) -> tuple[Trajectory, ...]:
        """Return a task's demonstrations, at most as many as are used; their `sample_index` counts from 0.

        Raises:
            DataError: It has none that can be used, and `demonstrations.unusable` refuses that.
        """
        known = self._known.get(task.task_id)
        # a task that a checkpoint or a file brought is another object, and may have another prompt
        if known is not None and all(np.array_equal(each.task.prompt_ids, task.prompt_ids) for each in known):
            return tuple(replace(each, task=task, images=task.images) for each in known)
        try:
            return tuple(self._read(task))
        except BadRow as bad:
            if self._config.unusable == "refuse":
                raise DataError(f"{task.origin}: {bad.message}", fix=bad.fix) from bad
            return ()

    def keep(self, tasks: Iterable[Task]) -> list[Task]:
        """Read the demonstrations of tasks now, and keep them; return the tasks that have none.

        Raises:
            DataError: A task has none that can be used, and that is refused.
        """
        without = []
        for task in tasks:
            self._known[task.task_id] = self.of(task)
            if not self._known[task.task_id]:
                without.append(task)
        return without

    def problem(self, task: Task) -> BadRow | None:
        """Return why a task's demonstration cannot be used; None where it can."""
        try:
            list(self._texts(task) if self._renderer is None else self._read(task))
        except BadRow as bad:
            return bad
        return None

    def _read(self, task: Task) -> Iterator[Trajectory]:
        for index, text in enumerate(islice(self._texts(task), self._config.wanted)):
            response_ids = self._tokens(task, text)
            if len(response_ids) > self._limit:
                raise BadRow(
                    Problem.TOO_LONG,
                    f"the demonstration has {len(response_ids)} tokens, more than rollout.max_response_tokens "
                    f"({self._limit})",
                    fix="raise rollout.max_response_tokens, shorten the demonstration, or set "
                    "demonstrations.unusable: skip",
                )
            yield self._trajectory(task, index, response_ids)

    def _texts(self, task: Task) -> Sequence[str]:
        found = task.metadata.get(self._config.field)
        texts = [found] if isinstance(found, str) else found
        if isinstance(texts, list | tuple) and texts and all(isinstance(text, str) and text.strip() for text in texts):
            return texts
        there = f"found {short(found)}" if self._config.field in task.metadata else "there is no such field"
        raise BadRow(
            Problem.EMPTY,
            f"expected a demonstration in {self._config.field!r}, a text or a list of texts that are not empty; "
            f"{there} (the row has {field_names(task.metadata) or 'no other fields'})",
            fix=f"correct the row, or {_KEY}; demonstrations.unusable: skip trains on such prompts without one",
        )

    def _tokens(self, task: Task, text: str) -> IntArray:
        """Return the tokens after the prompt of an answer with this text, its end included, shape [T]."""
        assert self._renderer is not None, "runs have one"
        renderer, messages = self._renderer, [*task.messages, {"role": "assistant", "content": text}]
        prompt = render(renderer, task.messages, (), generation_prompt=True)
        turn = find_turn(renderer, messages, len(task.messages), ())
        begin, end = turn.trained[0][0], turn.trained[-1][1]
        if turn.text[:begin] != prompt or len(turn.trained) > 1:
            raise BadRow(
                Problem.REWRITTEN,
                f"the prompt ends with {prompt[-40:]!r}, and the chat template writes the demonstration behind "
                f"{turn.text[max(begin - 40, 0) : begin]!r}",
                fix="write the demonstration with its reasoning, as the model answers (<think>…</think> and the "
                "answer), or set model.template_options so that the prompt opens none (enable_thinking: false)",
            )
        (ids,) = renderer.encode_pieces([(turn.text[begin:end], False)])
        if (unknown := renderer.unknown(ids)) is not None:
            raise BadRow(Problem.UNKNOWN, f"the demonstration has {unknown}", fix=WITHOUT_UNKNOWN)
        ends = [at for at, token in enumerate(ids.tolist()) if token in renderer.stop_ids]
        if not ends or ends[-1] != len(ids) - 1:
            raise BadRow(
                Problem.REWRITTEN,
                "the chat template writes no token behind an answer that ends it, so the policy would learn not to "
                "stop",
                fix="set model.chat_template to one that ends an assistant's turn",
            )
        if len(ends) > 1:
            raise BadRow(
                Problem.REWRITTEN,
                f"the demonstration spells {renderer.decode([ids[ends[0]]])!r}, which ends an answer, before its end",
                fix="take it out of the demonstration",
            )
        _refuse_rewritten(text, turn.text[begin:end].removesuffix(renderer.decode([ids[-1]])), prompt)
        return ids

    def _trajectory(self, task: Task, index: int, response_ids: IntArray) -> Trajectory:
        assert self._decode is not None, "runs have a tokenizer"
        start, length = len(task.prompt_ids), len(task.prompt_ids) + len(response_ids)
        sampled = np.arange(length) >= start
        return Trajectory(
            task=task,
            sample_index=index,
            token_ids=np.concatenate([task.prompt_ids, response_ids], dtype=np.int32),
            sampled=sampled,
            logprobs=np.zeros(length, np.float32),
            turns=sampled.astype(np.int32) - 1,
            parts=(Part(start=0, end=length, prompt_length=start),),
            segments=(),
            text=self._decode(response_ids[:-1].tolist()),
            stop_reason=StopReason.STOP,
            images=task.images,
            origin=Origin.DEMONSTRATION,
        )


def _refuse_rewritten(text: str, written: str, prompt: str) -> None:
    """Check that a chat template writes a demonstration as it is; what opens its reasoning may be in the prompt.

    Raises:
        BadRow: It writes another text.
    """
    opening = text.removesuffix(written)
    opens = len(opening) + len(written) == len(text) and opening.strip()
    if text == written or (opens and prompt.rstrip().endswith(opening.rstrip())):
        return
    raise BadRow(
        Problem.REWRITTEN,
        f"the chat template writes the demonstration {short(text)} as {short(written)}",
        fix="write the demonstration as the template does, white space included; or set model.chat_template to one "
        "that does not change it, or model.template_options (enable_thinking: false, for answers without reasoning)",
    )


class DemonstrationsInGroups:
    """Demonstrations as samples of their groups (LUFFY): what `GroupPlan.off_policy` asks.

    Args:
        config: The section `demonstrations.off_policy`.
    """

    def __init__(self, demonstrations: TaskDemonstrations, config: OffPolicyConfig) -> None:
        self._demonstrations = demonstrations
        self._config = config

    def to_score(self, task: Task) -> Sequence[Trajectory]:
        """Return a task's demonstrations: the run's rewards say what they are worth."""
        return self._demonstrations.of(task)

    def join(self, group: Group[Scored], scored: Sequence[Scored]) -> Group[Scored]:
        """Return a scored group with its demonstrations, where it is to have some."""
        if self._config.only_unsolved and solves(group.samples, self._config.solved_reward):
            return group
        own = [one for one in scored if one.trajectory.origin is Origin.DEMONSTRATION]
        return replace(group, off_policy=(*group.off_policy, *own))


class AllOf:
    """Several kinds of off-policy answers, one after another."""

    def __init__(self, parts: Sequence[OffPolicyAnswers]) -> None:
        self._parts = parts

    def to_score(self, task: Task) -> Sequence[Trajectory]:
        """Return what all of them have scored."""
        return [one for part in self._parts for one in part.to_score(task)]

    def join(self, group: Group[Scored], scored: Sequence[Scored]) -> Group[Scored]:
        """Return a group with what joins it of each."""
        for part in self._parts:
            group = part.join(group, scored)
        return group


def off_policy_answers(
    demonstrations: TaskDemonstrations | None, config: DemonstrationsConfig | None, pool: ExperiencePool | None
) -> OffPolicyAnswers | None:
    """Return what joins the groups of a run beside its policy's samples; None where nothing does."""
    parts: list[OffPolicyAnswers] = []
    if demonstrations is not None and config is not None and config.off_policy is not None:
        parts.append(DemonstrationsInGroups(demonstrations, config.off_policy))
    if pool is not None:
        parts.append(pool)
    return AllOf(parts) if parts else None
