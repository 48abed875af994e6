"""Tasks that are solved with tools: the policy calls them turn by turn, and its final answer gets the reward."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import gymnasium
from gymnasium.error import ResetNeeded

from roll_like.builtin.envs.qa import MATCHES, Match, references, same
from roll_like.builtin.envs.single_turn import AnswerStyle, read_answer
from roll_like.envs import Commands, FreeText, TaskRows, answer_of, field_of, prompt_messages, read_task_rows, tags_of
from roll_like.errors import DataError, EnvError
from roll_like.tools import (
    AnyCall,
    CallStyle,
    MalformedCall,
    SharedTools,
    ToolHost,
    ToolOutcome,
    parse_tool_calls,
    read_tool_configs,
)
from roll_like.types import ReasoningTags

Role: TypeAlias = Literal["tool", "user"]

#: What the environments of this process run their tools with.
SHARED = SharedTools()

_HOW: dict[str, str] = {
    "tag": "When you know the answer, write it as <answer>…</answer>.",
    "boxed": "When you know the answer, write it as \\boxed{…}.",
    "text": "When you know the answer, write it and nothing else.",
}
_CALL = '<tool_call>\n{"name": NAME, "arguments": {…}}\n</tool_call>'


class Tools(gymnasium.Env[str, str]):
    """`roll_like/Tools-v0`.

    Seed n sets task n modulo the number of tasks. A turn with calls is answered with the tools' results; the first
    turn without calls is the final answer, and ends the episode with reward 1 or 0. `info["invalid_action"]` is
    True for a turn with a call that reached no tool, or a final turn without an answer; `info["tool_calls"]` holds
    what a turn called and what it was told.

    Args:
        path: File, directory or hub dataset of tasks, or the rows themselves. A row may have a `script`: the turns, as
            texts, with which it can be solved.
        tools: Tools by name, or sections such as `{type: search, corpus: FILE}`: see docs/tools.md.
        prompt: Field of the task: a text, or a list of messages. `extra_info.question` is a field of an object.
        answer: Field of the reference answer: one, or a list of which each is right. Also of an object, as
            `reward_model.ground_truth`.
        match: What counts as the same: `exact`, `number` or `contains`.
        style: Where the final answer stands: `<answer>…</answer>`, a box, or the whole text.
        call_style: How calls are written; see `roll_like.tools.parse_tool_calls`.
        max_turns: Turns after which an episode is cut.
        max_calls: Calls of one turn that are carried out.
        invalid_penalty: What a turn with an invalid call, or a final turn without an answer, costs.
        tool_timeout: Longest call. Seconds.
        max_characters: Longest result that is shown.
        images: Whether the images in results are shown, to a model that sees images; otherwise texts describe them.
        system_prompt: First message; default: how to answer.
        describe_tools: Write tools and call format into the system prompt, instead of giving them to the chat
            template. For templates that do not know tools.
        result_role: Role of results; `user` for templates without a role `tool`.
        examples: So many tasks with a `script`, the last of the file, are shown solved before each task, and never set.
        held_out: So many of the others, the last ones, are set in evaluations only, and no others are.
        split: Split of a hub dataset.
        subset: Subset of one, such as `main` of `openai/gsm8k`.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(
        self,
        path: str | Sequence[Mapping[str, Any]],
        tools: Sequence[str | Mapping[str, Any]] = ("calculator",),
        *,
        prompt: str = "prompt",
        answer: str = "answer",
        match: Match = "number",
        style: AnswerStyle = "tag",
        call_style: CallStyle = "auto",
        max_turns: int = 6,
        max_calls: int = 4,
        invalid_penalty: float = 0.0,
        tool_timeout: float = 30.0,
        max_characters: int = 2000,
        images: bool = False,
        system_prompt: str | None = None,
        describe_tools: bool = False,
        result_role: Role = "tool",
        examples: int = 0,
        held_out: int = 0,
        split: str = "train",
        subset: str | None = None,
    ) -> None:
        if match not in MATCHES:
            raise EnvError(f"unknown match {match!r}", fix=f"match is one of {', '.join(MATCHES)}")
        if style not in _HOW:
            raise EnvError(f"unknown answer style {style!r}", fix=f"style is one of {', '.join(_HOW)}")
        if min(max_turns, max_calls) < 1 or min(invalid_penalty, examples) < 0:
            raise EnvError(
                "max_turns and max_calls should be at least 1, invalid_penalty and examples at least 0, found "
                f"{max_turns}, {max_calls}, {invalid_penalty} and {examples}"
            )
        self._prompt, self._answer, self._match, self._style = prompt, answer, match, style
        self._call_style, self._max_turns, self._max_calls = call_style, max_turns, max_calls
        self._penalty, self._role, self._images = invalid_penalty, result_role, images
        self._configs = read_tool_configs(tools, "the environment's tools")
        self._limits = {"timeout": tool_timeout, "max_characters": max_characters}
        self._host: ToolHost | None = None
        rows, shown = _split(read_task_rows(path, (prompt, answer), split=split, subset=subset), examples, path)
        for row in rows:
            prompt_messages(row, prompt)
        self.rows = TaskRows(rows, held_out=held_out)
        self._schemas = self._tools().schemas
        self.tools = [] if describe_tools else self._schemas
        self.system_prompt = system_prompt
        if system_prompt is None:
            self.system_prompt = "\n".join([*([_description(self._schemas)] if describe_tools else []), _HOW[style]])
        self._examples = [message for row in shown for message in self._solved(row)]
        self.observation_space = FreeText()
        self.action_space = Commands([*map(_empty_call, self._schemas), "<answer>0</answer>"])
        self._row: Mapping[str, Any] | None = None  # None: no episode is open
        self._turn = 0
        self._state = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Set a task: a seed's row, any one without a seed."""
        super().reset(seed=seed, options=options)
        self._row, self._turn = self.rows.row(seed, self.np_random), 0
        self._state = str(self._row["origin"])
        messages = prompt_messages(self._row, self._prompt)
        # a system message comes before the examples
        first = 1 if messages[0]["role"] == "system" else 0
        shown = [*messages[:first], *self._examples, *messages[first:]]
        return messages[-1]["content"], {"state": self._state, "messages": shown}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out the turn's calls, or judge its final answer.

        Raises:
            ResetNeeded: The episode is over, or has not begun.
            EnvError: A tool failed.
        """
        if self._row is None:
            raise ResetNeeded("the episode is over; call reset() first")
        self._turn += 1
        # a tag in a call's argument is part of the argument
        tags = tags_of(action) or ReasoningTags()
        _, calls = parse_tool_calls(action, self._call_style, self._schemas, reasoning=tags)
        if not calls:
            return self._scored(answer_of(action), self._row)
        outcomes = self._run(calls)
        invalid = any(outcome.invalid for outcome in outcomes)
        messages = self._messages(calls, outcomes)
        observation = "\n".join(outcome.text for outcome in outcomes)
        self._state = hashlib.sha256(f"{self._state}\n{observation}".encode(errors="replace")).hexdigest()[:16]
        info: dict[str, Any] = {
            "messages": messages,
            "state": self._state,
            "invalid_action": invalid,
            "tool_calls": [_told(call, outcome) for call, outcome in zip(calls, outcomes, strict=True)],
        }
        over = self._turn >= self._max_turns
        if over:
            self._row, info["success"] = None, False
        return observation, -self._penalty if invalid else 0.0, False, over, info

    def close(self) -> None:
        """Give the tools back."""
        host, self._host = self._host, None
        if host is not None:
            SHARED.give_back(host)

    def scripted_action(self) -> str | None:
        """Return the next turn of the task's script; after it, or without one, the right answer."""
        if self._row is None:
            return None
        script = self._row.get("script") or []
        return str(script[self._turn]) if self._turn < len(script) else self._written(self._row)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_host": None}

    def _tools(self) -> ToolHost:
        if self._host is None or self._host.failed:
            self.close()
            self._host = SHARED.take(self._configs, **self._limits)  # type: ignore[arg-type]
        return self._host

    def _run(self, calls: Sequence[AnyCall]) -> list[ToolOutcome]:
        outcomes = self._tools().run(calls[: self._max_calls])
        over = ToolOutcome(f"Error: at most {self._max_calls} calls in one turn", failed=True, invalid=True)
        return [*outcomes, *([over] * (len(calls) - len(outcomes)))]

    def _scored(self, text: str, row: Mapping[str, Any]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._row = None
        answer = read_answer(text, self._style)
        wanted = references(field_of(row, self._answer))
        right = answer is not None and any(same(answer, reference, self._match) for reference in wanted)
        reward = -self._penalty if answer is None else float(right)
        return "", reward, True, False, {"success": right, "invalid_action": answer is None, "state": self._state}

    def _messages(self, calls: Sequence[AnyCall], outcomes: Sequence[ToolOutcome]) -> list[dict[str, Any]]:
        """Return the results as the chat template is given them."""
        if self._role == "user":
            blocks = [["<tool_response>\n", *self._shown(outcome), "\n</tool_response>"] for outcome in outcomes]
            parts = [part for at, block in enumerate(blocks) for part in ([] if not at else ["\n"]) + block]
            return [{"role": "user", "content": _content(parts)}]
        return [
            {
                "role": "tool",
                "name": "" if isinstance(call, MalformedCall) else call.name,
                "tool_call_id": call.call_id,
                "content": _content(self._shown(outcome)),
            }
            for call, outcome in zip(calls, outcomes, strict=True)
        ]

    def _shown(self, outcome: ToolOutcome) -> list[Any]:
        return [outcome.text, *({"type": "image", "image": one} for one in outcome.images if self._images)]

    def _written(self, row: Mapping[str, Any]) -> str:
        answer = references(field_of(row, self._answer))[0]
        return {"tag": f"<answer>{answer}</answer>", "boxed": f"\\boxed{{{answer}}}", "text": answer}[self._style]

    def _solved(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a task with its script played by the real tools, as messages."""
        messages = [one for one in prompt_messages(row, self._prompt) if one["role"] != "system"]
        for turn in row["script"]:
            messages.append({"role": "assistant", "content": str(turn)})
            _, calls = parse_tool_calls(str(turn), self._call_style, self._schemas)
            if calls:
                messages += self._messages(calls, self._run(calls))
        if messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": self._written(row)})
        return messages


def _content(parts: list[Any]) -> str | list[Any]:
    """Return parts as one text, where all are texts."""
    return "".join(parts) if all(isinstance(part, str) for part in parts) else parts


def _split(
    rows: Sequence[dict[str, Any]], examples: int, path: str | Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return tasks to set, and tasks to show."""
    for row in rows:
        if not isinstance(row.get("script", []), list):
            raise DataError(f"{row['origin']}: the script should be a list of texts, found {row['script']!r}")
    scripted = [row for row in rows if row.get("script")]
    if examples > len(scripted) or examples >= len(rows):
        raise DataError(
            f"{path if isinstance(path, str) else 'path'}: {examples} examples are asked for; {len(scripted)} of its "
            f"{len(rows)} tasks have a `script`",
            fix="lower `examples`, or add scripts",
        )
    shown = scripted[len(scripted) - examples :]
    origins = {row["origin"] for row in shown}
    return [row for row in rows if row["origin"] not in origins], shown


def _told(call: AnyCall, outcome: ToolOutcome) -> dict[str, Any]:
    """Return a call and what came of it, for people; one that cannot be read has its text as arguments."""
    name, arguments = ("", call.text) if isinstance(call, MalformedCall) else (call.name, dict(call.arguments))
    return {"name": name, "arguments": arguments, "result": outcome.text, "error": outcome.failed}


def _description(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return tools and call format in words, for templates that do not know tools."""
    lines = []
    for schema in schemas:
        function = schema["function"]
        properties = function["parameters"].get("properties", {})
        arguments = ", ".join(f"{name}: {about.get('type', 'any')}" for name, about in properties.items())
        lines.append(f"- {function['name']}({arguments}): {function['description']}")
    tools = "\n".join(lines)
    return f"You may call tools. To call one, write\n{_CALL}\nand wait for its result.\nTools:\n{tools}"


def _empty_call(schema: Mapping[str, Any]) -> str:
    call = {"name": schema["function"]["name"], "arguments": {}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"
