r"""Rollouts as lines for a terminal: a line of a list, a whole episode turn by turn.

Everything is lines of `rich` text, so that colour is a matter of where they go. What a policy or an environment wrote
is untrusted: control characters are shown as `\x1b`, so that none moves the cursor or rings a bell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from roll_like.metrics import files, progress
from roll_like.metrics.rollouts import RolloutRow, message_text, solved

#: Who says something, or what it is, and the text.
Block: TypeAlias = tuple[str, str]

#: Characters of an answer that are shown.
ANSWER_CHARACTERS = 300
#: Columns before a text, for who says it.
_GUTTER = 10
_END = "the end"
_STYLES = {"policy": "green", "tool": "magenta", "call": "magenta", "reward": "yellow", "invalid": "bold red"}
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a text with nothing in it that a terminal would act on.

    >>> printable("red\x1b[31m and\tblue")
    'red\\x1b[31m and blue'
    """

    def escape(match: re.Match[str]) -> str:
        code = ord(match[0])
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(_UNPRINTABLE.sub(escape, line).expandtabs(4) for line in lines)


def sample_line(row: Mapping[str, Any]) -> str:
    """Return a rollout in one line: its id, reward and reference, and how its text begins."""
    text = " ".join(printable(str(row["text"])).split())
    if len(text) > ANSWER_CHARACTERS:
        text = f"{text[:ANSWER_CHARACTERS]}…"
    reference = (
        "" if row.get("reference") is None else f", reference {' '.join(printable(str(row['reference'])).split())}"
    )
    return f"{row['id']}: reward {progress.format_number(float(row['reward']))}{reference}: {text or '(empty)'}"


def wrapped(text: str, width: int) -> list[str]:
    r"""Return a text in lines of at most `width` columns; a line that fits stays as it is, spaces and all.

    >>> wrapped("S F\n  G", 10), wrapped("one two three", 8)
    (['S F', '  G'], ['one two', 'three'])
    """
    lines: list[str] = []
    for line in printable(text).split("\n"):
        rest = line
        while cell_len(rest) > width:
            head = chop_cells(rest, width)[0]
            space = head.rfind(" ") if rest[len(head)] != " " else len(head)
            # a long word is cut where the line ends
            cut = space if head[: max(space, 0)].strip() else len(head)
            lines.append(rest[:cut].rstrip())
            rest = rest[cut:].lstrip()
        lines.append(rest)
    return lines


def table_head() -> Text:
    """Return the line above a list."""
    return Text(_columns("id", "domain", "reward", "turns", "tokens", "solved", "first words"), style="bold")


def rollout_line(row: RolloutRow, domain: str, width: int) -> Text:
    """Return a rollout as a line: `solved` is what the environment says, else whether its reward is 1."""
    turns = row.get("turns")
    words = turns[0]["text"] if turns else row["text"]
    success = solved(row)
    line = _columns(
        str(row["id"]),
        printable(domain).replace("\n", " "),
        _number(row["reward"]),
        str(len(turns)) if turns else "",
        str(row.get("tokens", "")),
        "yes" if success else "no",
        " ".join(printable(str(words)).split()),
    )
    return Text(set_cell_size(line, width).rstrip(), style="" if success else "dim")


def _columns(name: str, domain: str, reward: str, turns: str, tokens: str, success: str, words: str) -> str:
    return f"{name:<12} {set_cell_size(domain, 14)} {reward:>7} {turns:>5} {tokens:>6} {success:>6}  {words}"


def heading(row: RolloutRow, run: str) -> list[Text]:
    """Return what a rollout is, and what came of it."""
    of = [f"run {run}", f"{row['kind']} step {row['step']}"]
    of += [
        f"{name} {row[key]}"
        for name, key in (("domain", "domain"), ("task", "task_id"), ("seed", "seed"))
        if key in row
    ]
    return [
        Text(printable(f"rollout {row['id']}"), style="bold"),
        Text(printable(", ".join(of)).replace("\n", " ")),
        *(Text(line) for line in _figures(row)),
        Text(),
    ]


def _figures(row: RolloutRow) -> list[str]:
    """Return reward, success and counts in one line, each reward and detail in further ones."""
    turns = row.get("turns")
    first = [f"reward {_number(row['reward'])}", "solved" if solved(row) else "not solved"]
    counts = {"turn": len(turns or ()), "token": row.get("tokens", 0), "cut": row.get("cuts", 0)}
    first += [f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items() if count]
    first += [f"ended by {row['stop_reason']}"] if "stop_reason" in row else []
    first += [f"policy version {row['policy_version']}"] if "policy_version" in row else []
    lines = [", ".join(first)]
    for title in ("rewards", "details"):
        # a detail that is 0 says that something was not so
        values = {name: value for name, value in row.get(title, {}).items() if title == "rewards" or float(value)}
        if values and set(values) != {"return"} and not set(values) <= {"turns", "cuts", "success"}:
            lines.append(f"{title}: " + ", ".join(f"{name} {_number(value)}" for name, value in values.items()))
    return [printable(line) for line in lines]


def rollout_lines(row: RolloutRow, width: int) -> list[Text]:
    """Return a whole rollout, turn by turn: its observations, the policy's text and calls, and its rewards."""
    lines: list[Text] = []
    for title, blocks in _turns(row):
        lines += [Text(f"── {title} ".ljust(width, "─"), style="bold blue")] if title else []
        for label, text in blocks:
            style = _STYLES.get(label, "cyan")
            for number, line in enumerate(wrapped(text, max(width - _GUTTER, 20))):
                name = printable(label)[: _GUTTER - 1] if number == 0 else ""
                told = style if label in {"policy", "invalid"} else ""
                lines.append(Text.assemble((name.ljust(_GUTTER), style), (line, told)))
    return lines


def _turns(row: RolloutRow) -> Iterator[tuple[str, list[Block]]]:
    """Yield each turn's title and its blocks: label and text. A single answer is a turn without a title."""
    turns = row.get("turns")
    if not turns:
        yield "", [*_messages(row.get("messages") or [{"role": "prompt", "content": row["prompt"]}])]
        reference = [("reference", str(row["reference"]))] if "reference" in row else []
        yield "answer", [("policy", str(row["text"])), *reference, ("reward", _number(row["reward"]))]
        return
    for number, turn in enumerate(turns):
        last = number + 1 == len(turns)
        following = turn.get("after", ()) if last else turns[number + 1]["shown"]
        answered = any(message.get("role") == "tool" for message in following)
        seconds = [float(turn["sampled"]) - float(turn["began"]), float(turn["ended"]) - float(turn["sampled"])]
        title = f"turn {number + 1}: {turn['tokens']} tokens after {turn['prompt_tokens']}; policy {seconds[0]:.2f} s, "
        title += f"environment {seconds[1]:.2f} s"
        blocks = [*_messages(turn["shown"]), ("policy", str(turn["text"]))]
        blocks += [("call", _call(call, result=not answered)) for call in turn.get("tool_calls", ())]
        if turn.get("invalid"):
            blocks.append(("invalid", "there was no valid action in this turn"))
        blocks.append(("reward", _number(turn["reward"])))
        yield title, blocks
        if last and _messages(following):
            yield _END, _messages(following)


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[Block]:
    blocks = [(str(message.get("role", "?")), message_text(message)) for message in messages]
    return [(role, text) for role, text in blocks if text.strip()]


def _call(call: Mapping[str, Any], *, result: bool) -> str:
    """Return a call and, where no message shows it, what came of it."""
    arguments = call.get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(files.plain(arguments), ensure_ascii=False)
    text = f"{call.get('name') or 'unreadable'}{' (failed)' if call.get('error') else ''} {written.strip()}"
    return f"{text}\n→ {call.get('result')}" if result else text


def _number(value: Any) -> str:
    return f"{float(value) + 0.0:.4g}"  # −0 is 0
