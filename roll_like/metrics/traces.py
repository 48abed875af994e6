"""Rollouts as MLflow traces: an episode is a tree of spans, a single answer one span.

    frozen_lake                 AGENT        task and first messages → all that followed; reward, success, tokens
    ├── turn 1                  CHAIN        what the turn earned, and the state it acted in
    │   ├── policy              CHAT_MODEL   messages that were new to it → its answer; tokens
    │   └── environment         TASK         the answer → the next observation; reward
    │       └── calculator      TOOL         arguments → result
    └── turn 2: reward 1 …

Ids are derived from the run and the rollout's id, so that sending a trace again replaces it. MLflow's own pipeline
(`mlflow.start_span` and a queue) is not used: it logs its failures and goes on, and these are counted and tried again.

MLflow draws texts as Markdown: they are written so that their lines and boards stay (`as_markdown`). The files under
`rollouts/` have them as they were.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from roll_like.content.unicode import whole_text
from roll_like.metrics import files
from roll_like.metrics.rollouts import RolloutKind, RolloutRow, message_text

#: Longest beginning of a prompt or an answer that lists of traces show. Characters.
PREVIEW = 1000
_PAGE = 500
_HEADING = re.compile(r"^( {0,3})(#{1,6}(?:\s|$)|[-=_*](?:[-=_* ])*$)")


def as_markdown(text: str) -> str:
    r"""Return a text that looks as it is once it is drawn as Markdown: lines end, and boards are blocks of code.

    A board is three or more lines of equal length. What would make a heading or a rule of another line is escaped.

    >>> as_markdown("You are at S.\nSFF\nFHF\nFFG\nGo on.")
    'You are at S.\n```text\nSFF\nFHF\nFFG\n```\nGo on.'
    >>> as_markdown("First\nsecond")
    'First  \nsecond'
    """
    if "```" in text:
        return text
    stretches = [list(lines) for _, lines in groupby(text.split("\n"), key=len)]
    blocks = ["\n".join(["```text", *lines, "```"]) if len(lines) > 2 and lines[0] else None for lines in stretches]
    parts: list[str] = []
    for number, (lines, block) in enumerate(zip(stretches, blocks, strict=True)):
        followed = number + 1 < len(stretches) and blocks[number + 1] is None
        plain = "  \n".join(_HEADING.sub(r"\1\\\2", line) for line in lines)
        parts.append(block if block is not None else plain + ("  " if followed else ""))
    return "\n".join(parts)


class TraceStore:
    """One run's traces in an MLflow store.

    Args:
        client: An `MlflowClient`.
        uri: Of its store: a server or a database.
    """

    def __init__(self, client: Any, uri: str, experiment: str, run_id: str) -> None:
        from mlflow.tracing.client import TracingClient

        self._client = client
        self._writer: Any = TracingClient(uri)
        self._experiment = experiment
        self._run_id = run_id

    def write(self, step: int, kind: RolloutKind, rows: Sequence[RolloutRow]) -> None:
        """Write a trace for each row, or replace it.

        Args:
            step: Training steps that were finished.
            kind: Whether it was a training step's rollout or an evaluation's.
            rows: As `with_ids` returns them.

        Raises:
            MlflowException: The store refuses one.
            NotImplementedError: The server keeps no spans: it is older than 3.4, or has no database.
        """
        spans: list[Any] = []
        for row in rows:
            trace = _Trace(self._run_id, step, kind, row)
            self._writer.start_trace(trace.info(self._experiment))
            spans += trace.spans()
        if spans:
            self._writer.log_spans(self._experiment, spans)

    def cut(self, last_step: int) -> None:
        """Delete the traces of steps after `last_step`, which will be run again."""
        later: list[str] = []
        token: str | None = None
        while True:
            page = self._client.search_traces(
                locations=[self._experiment],
                run_id=self._run_id,
                include_spans=False,
                max_results=_PAGE,
                page_token=token,
            )
            later += [one.info.trace_id for one in page if int(one.info.tags.get("step", -1)) > last_step]
            token = page.token
            if not token:
                break
        for start in range(0, len(later), 100):
            self._client.delete_traces(self._experiment, trace_ids=later[start : start + 100])


class _Trace:
    """One rollout as MLflow stores it."""

    def __init__(self, run_id: str, step: int, kind: RolloutKind, row: RolloutRow) -> None:
        self._run_id = run_id
        self._step = step
        self._kind = kind
        self._row = row
        self._turns: list[Mapping[str, Any]] = list(row.get("turns", ()))
        self._digest = hashlib.sha256(f"{run_id} {row['id']}".encode()).digest()[:16]
        self.trace_id = f"tr-{self._digest.hex()}"
        now = time.time()  # when a single answer was sampled is not recorded
        # conversations of one agent may go on side by side
        self._began = min((float(turn["began"]) for turn in self._turns), default=now)
        self._ended = max((float(turn["ended"]) for turn in self._turns), default=now)

    def info(self, experiment: str) -> Any:
        """Return the trace without its spans."""
        from mlflow.entities import TraceInfo, TraceLocation, TraceState

        row = self._row
        answer = self._turns[-1]["text"] if self._turns else row["text"]
        tags = {
            "mlflow.traceName": str(row.get("domain", row.get("source", "rollout")))[:250],
            "step": str(self._step),
            "kind": self._kind,
            "domain": str(row.get("domain", "")),
            "task": str(row["task_id"])[:1000],
            "rollout": row["id"],
            "reward": f"{float(row['reward']) + 0.0:.6g}",
            **({"success": str(row["success"]).lower()} if "success" in row else {}),
        }
        return TraceInfo(
            trace_id=self.trace_id,
            trace_location=TraceLocation.from_experiment_id(experiment),
            request_time=int(self._began * 1000),
            execution_duration=int((self._ended - self._began) * 1000),
            state=TraceState.OK,
            request_preview=str(row["prompt"])[:PREVIEW],
            response_preview=str(answer)[:PREVIEW],
            trace_metadata={"mlflow.sourceRun": self._run_id, "mlflow.trace.tokenUsage": json.dumps(self._usage())},
            tags=tags,
            assessments=self._reward_results(),
        )

    def spans(self) -> list[Any]:
        """Return the root span, then those of every turn."""
        row = self._row
        kept = ("reward", "rewards", "details", "success", "cuts", "seed", "tokens", "stop_reason", "policy_version")
        root_attributes = {"step": self._step, "kind": self._kind, **{key: row[key] for key in kept if key in row}}
        task = {"task": row["task_id"]}
        if not self._turns:
            attributes = {**root_attributes, "mlflow.chat.tokenUsage": self._usage()}
            inputs = {**task, "messages": _drawn(row.get("messages", ()))}
            return [self._span("answer", "CHAT_MODEL", inputs, _answer(row["text"]), attributes=attributes)]
        reward_result = {key: row[key] for key in ("reward", "success") if key in row}
        root = self._span(
            str(row.get("domain", "episode")),
            "AGENT",
            {"messages": _drawn(self._turns[0]["shown"]), **task},
            {"messages": self._conversation(), **reward_result},
            attributes={**root_attributes, "turns": len(self._turns)},
        )
        return [root, *(span for number in range(len(self._turns)) for span in self._turn_spans(number))]

    def _conversation(self) -> list[dict[str, Any]]:
        """Return every answer and observation after the first prompt."""
        messages: list[dict[str, Any]] = []
        for number, turn in enumerate(self._turns):
            messages += [*(_drawn(turn["shown"]) if number else ()), _assistant_message(turn["text"])]
        return [*messages, *(one for one in _drawn(self._turns[-1].get("after", ())) if message_text(one).strip())]

    def _turn_spans(self, number: int) -> list[Any]:
        """Return a turn's own span, the policy's, the environment's, and those of what was called."""
        turn = self._turns[number]
        key, policy, environment = f"turn {number + 1}", f"policy {number + 1}", f"environment {number + 1}"
        began, sampled, ended = (float(turn[key]) for key in ("began", "sampled", "ended"))
        last = number + 1 == len(self._turns)
        shown = turn.get("after", ()) if last else self._turns[number + 1]["shown"]
        usage = _usage(int(turn["prompt_tokens"]), int(turn["tokens"]))
        invalid = bool(turn.get("invalid", False))
        reward = float(turn["reward"])
        reward_result = {"reward": turn["reward"], "invalid": invalid}
        answer = as_markdown(str(turn["text"]))
        # the tree shows in which turn a reward was given
        marks = [*(["invalid"] if invalid else []), *([f"reward {reward:.4g}"] if reward else [])]
        name = f"{key}: {', '.join(marks)}" if marks else key
        observed = "\n".join(as_markdown(message_text(message)) for message in turn["shown"][-1:])
        spans = [
            self._span(
                name,
                "CHAIN",
                observed,
                {"text": answer, **reward_result},
                key=key,
                parent="",
                times=(began, ended),
                attributes={**reward_result, "state": turn["state"]},
            ),
            self._span(
                "policy",
                "CHAT_MODEL",
                {"messages": _drawn(turn["shown"])},
                _answer(turn["text"], turn.get("tool_calls", ())),
                key=policy,
                parent=key,
                times=(began, sampled),
                attributes={"mlflow.chat.tokenUsage": usage},
            ),
            self._span(
                "environment",
                "TASK",
                {"text": answer},
                {"messages": _drawn(shown), "reward": turn["reward"]},
                key=environment,
                parent=key,
                times=(sampled, ended),
                attributes=reward_result,
                error="the environment found no valid action in this turn" if invalid else None,
            ),
        ]
        for place, call in enumerate(turn.get("tool_calls", ())):
            spans.append(
                self._span(
                    str(call.get("name") or "unreadable call"),
                    "TOOL",
                    call.get("arguments"),
                    call.get("result"),
                    key=f"{environment} call {place}",
                    parent=environment,
                    times=(sampled, ended),
                    error=str(call.get("result", "")) if call.get("error") else None,
                )
            )
        return spans

    def _span(
        self,
        name: str,
        kind: str,
        inputs: Any,
        outputs: Any,
        *,
        key: str = "",
        parent: str | None = None,
        times: tuple[float, float] | None = None,
        attributes: Mapping[str, Any] | None = None,
        error: str | None = None,
    ) -> Any:
        """Return a span.

        Args:
            name: As it is shown.
            key: Tells it from the other spans of the trace; the root's is empty.
            parent: Key of the span that it is part of; None for the root.
            times: Begin and end, Unix seconds; default: the whole trace's.
            attributes: Figures to show beside.
            error: Why it failed, if it did.
        """
        from mlflow.entities import Span

        began, ended = times or (self._began, self._ended)
        described = {
            "mlflow.traceRequestId": self.trace_id,
            "mlflow.spanType": kind,
            "mlflow.spanInputs": inputs,
            "mlflow.spanOutputs": outputs,
            **(attributes or {}),
        }
        return Span.from_dict(
            {
                "trace_id": base64.b64encode(self._digest).decode(),
                "span_id": self._span_id(key),
                "parent_span_id": None if parent is None else self._span_id(parent),
                "name": name,
                "start_time_unix_nano": int(began * 1e9),
                "end_time_unix_nano": int(max(began, ended) * 1e9),
                "events": [],
                "status": {"code": "STATUS_CODE_OK" if error is None else "STATUS_CODE_ERROR", "message": error or ""},
                "attributes": {name: _encode(value) for name, value in described.items()},
            }
        )

    def _span_id(self, key: str) -> str:
        return base64.b64encode(hashlib.sha256(self._digest + key.encode()).digest()[:8]).decode()

    def _usage(self) -> dict[str, int]:
        prompts = sum(int(turn["prompt_tokens"]) for turn in self._turns)
        return _usage(prompts, int(self._row.get("tokens", 0)))

    def _reward_results(self) -> list[Any]:
        """Return reward and success as assessments, which MLflow's list of traces shows and filters by."""
        from mlflow.entities import AssessmentSource, Feedback

        values: dict[str, Any] = {"reward": files.plain(float(self._row["reward"]))}
        if "success" in self._row:
            values["success"] = bool(self._row["success"])
        source = AssessmentSource(source_type="CODE", source_id="roll_like")
        results = [Feedback(name=name, value=value, source=source) for name, value in values.items()]
        for result in results:  # the same id again, so that a trace that is sent again has no second result
            digest = hashlib.sha256(f"{self.trace_id} {result.name}".encode()).hexdigest()
            result.assessment_id = f"a-{digest[:32]}"
        return results


def _drawn(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return chat messages with their texts as Markdown."""
    texts = [one["content"] if isinstance(one.get("content"), str) else None for one in messages]
    return [
        {**one, **({} if text is None else {"content": as_markdown(text)})}
        for one, text in zip(messages, texts, strict=True)
    ]


def _assistant_message(text: str, calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return a policy's answer and its tool calls as a chat message, in OpenAI's form."""
    written = [
        {
            "id": f"call_{place}",
            "type": "function",
            "function": {"name": call["name"], "arguments": _encode(call.get("arguments"))},
        }
        for place, call in enumerate(calls)
        if call.get("name")
    ]
    message = {"role": "assistant", "content": as_markdown(str(text))}
    return {**message, "tool_calls": written} if written else message


def _answer(text: str, calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return a policy's answer in the form of a chat completion."""
    return {"choices": [{"message": _assistant_message(text, calls)}]}


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    return {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}


def _encode(value: Any) -> str:
    return whole_text(json.dumps(files.plain(value), ensure_ascii=False, default=str))
