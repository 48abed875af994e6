"""The chat messages of a row, checked; a plain text stands for one message."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from roll_like.config.data import DataSource, RowSource
from roll_like.data.chat import ChatMessage
from roll_like.data.images import is_image, placed
from roll_like.data.loss_flags import without_flags
from roll_like.data.rows import Row
from roll_like.errors import DataError

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


#: How a text begins that is a list of messages, of JSON or as Python writes it.
_LISTED = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content|from|value)\1\s*:""")


def read_messages(row: Row, field: str, role: str, key: str, *, plain: bool = False) -> list[ChatMessage]:
    """Return the messages in a field of a row; a content with images is a list of parts (`roll_like.data.images`).

    Args:
        field: Holds a list of messages (as JSON text too), or a text.
        key: The configuration key that names the field, for messages.
        plain: Whether messages have a role and a content, and nothing else.

    Raises:
        DataError: It holds neither; names file and line.
    """
    value = _listed(row, field)
    if isinstance(value, str):
        return placed([{"role": role, "content": value}], row)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list) and value:
        messages = [
            _message(entry, f"{row.origin}: message {index} in {field!r}", plain=plain, typed=row.typed)
            for index, entry in enumerate(value)
        ]
        return placed(messages, row)
    raise DataError(
        f"{row.origin}: expected a text or a list of messages in {field!r}, found {short(value)}",
        fix=f"correct the row, or set {key} to the field that has it",
    )


def with_lists(row: Row, *fields: str) -> Row:
    """Return a row with lists of messages in the place of their JSON text: cells of a table have no other form.

    Raises:
        DataError: A field holds such a list as Python writes it.
    """
    found = {field: value for field in fields if (value := _listed(row, field)) is not row.fields.get(field)}
    return replace(row, fields=row.fields | found) if found else row


def _listed(row: Row, field: str) -> Any:
    """Return what a field holds; the list where that is the JSON text of a list of messages, from end to end."""
    text = row.fields.get(field)
    if not isinstance(text, str) or not _LISTED.match(text):
        return text
    if _is_conversation(found := _parsed(text)):
        return found
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    if not _is_conversation(found):
        return text
    raise DataError(
        f"{row.origin}: {field!r} is the text of a list of messages, and no JSON: {short(text)}",
        fix="write such a list with json.dumps, or as a list in a file of JSON lines; if the text is meant as it "
        f'stands, put it into a message: {{"{field}": [{{"role": "user", "content": …}}]}}',
    )


def list_in(row: Row, field: str) -> Any:
    """Return what a field holds; the list where that is the JSON text of a list, as in a cell of a table."""
    value = row.fields[field]
    found = _parsed(value) if isinstance(value, str) and value.lstrip().startswith("[") else value
    return found if isinstance(found, list) else value


def read_prompt(row: Row, source: RowSource | DataSource, key: str, *, plain: bool = False) -> list[ChatMessage]:
    """Return the messages of a row's prompt: all of its field, or those before the reference answer.

    Raises:
        DataError: It is blank, ends with an assistant's message, or lacks the answer that it is said to end with.
    """
    messages = read_messages(row, source.prompt_field, "user", f"{key}.prompt_field", plain=plain)
    if isinstance(source, DataSource) and source.holds_conversations:
        *messages, _ = _answered(messages, row, source, key)
    if messages[-1]["role"] == "assistant":
        remedy = "move it into the field with the response or the reference answer"
        if isinstance(source, DataSource):
            remedy = f"set {key}.answer_field: {source.prompt_field} too, which makes it the reference answer"
        raise DataError(
            f"{row.origin}: the last message in {source.prompt_field!r} is the assistant's: nothing is left to answer",
            fix=f"remove that message, or {remedy}",
        )
    if not str(messages[-1]["content"]).strip():
        raise DataError(
            f"{row.origin}: expected a text or a list of messages in {source.prompt_field!r}, "
            f"found {short(messages[-1]['content'])}",
            fix=f"correct the row, or set {key}.prompt_field to the field with the prompt",
        )
    return messages


def read_last_answer(row: Row, source: DataSource, key: str) -> str:
    """Return the reference answer of a row whose conversation ends with it.

    Raises:
        DataError: It does not.
    """
    messages = read_messages(row, source.prompt_field, "user", f"{key}.prompt_field", plain=True)
    return str(_answered(messages, row, source, key)[-1]["content"])


def _answered(messages: list[ChatMessage], row: Row, source: DataSource, key: str) -> list[ChatMessage]:
    """Return a conversation that ends with an answer."""
    if len(messages) > 1 and messages[-1]["role"] == "assistant":
        return messages
    found = "one message" if len(messages) == 1 else f"that the last message is of the role {messages[-1]['role']!r}"
    raise DataError(
        f"{row.origin}: expected a conversation in {source.prompt_field!r} that ends with the assistant's answer, "
        f"found {found}",
        fix=f"correct the row, or {key}.answer_field, which names the same field as prompt_field",
    )


def with_system(
    messages: Sequence[ChatMessage], row: Row, source: RowSource | DataSource, key: str
) -> list[ChatMessage]:
    """Return the conversation with the source's system message before it.

    Raises:
        DataError: It has one of its own.
    """
    if source.system_prompt is None:
        return list(messages)
    if messages[0]["role"] == "system":
        raise DataError(
            f"{row.origin}: the row has a system message of its own, and {key}.system_prompt is set",
            fix=f"remove one of the two (set {key}.system_prompt: null)",
        )
    return [{"role": "system", "content": source.system_prompt}, *messages]


def read_tools(row: Row, source: RowSource, key: str) -> tuple[Mapping[str, Any], ...]:
    """Return the function schemas of a row: a list of objects, or that list as JSON text.

    Raises:
        DataError: The field holds something else.
    """
    value = row.fields.get(source.tools_field)
    found = _parsed(value) if isinstance(value, str) else value
    if found is None or found == "":
        return ()
    if isinstance(found, list) and all(isinstance(tool, Mapping) for tool in found):
        return tuple(_without_filler(tool) if row.typed and found is value else tool for tool in found)
    raise DataError(
        f"{row.origin}: expected a list of function schemas in {source.tools_field!r}, found {short(value)}",
        fix=f"correct the row, or {key}.tools_field",
    )


def require_fields(row: Row, fields: Mapping[str, str]) -> None:
    """Check that a row has fields, given with the configuration key that names each.

    Raises:
        DataError: One is missing.
    """
    for field, key in fields.items():
        if field not in row.fields:
            talk = next((name for name, value in row.fields.items() if _is_conversation(value)), None)
            raise DataError(
                f"{row.origin}: the row has no field {field!r}; it has {field_names(row.fields)}",
                fix=f"set {key} to the field that has it"
                + (f"; {talk!r} holds a conversation" if talk and key.endswith(".prompt_field") else ""),
            )


def _is_conversation(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(each, Mapping) and bool(each.keys() & {"role", "from"}) for each in value)


def field_names(fields: Mapping[str, Any]) -> str:
    """Return the names of fields, for messages."""
    return ", ".join(map(repr, fields)) or "none"


def says_nothing(message: ChatMessage) -> bool:
    """Return whether a message has neither text nor calls."""
    return not str(message["content"]).strip() and not message.get("tool_calls")


def short(value: Any) -> str:
    """Return a value's type and its beginning, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '…'}"


def _message(entry: Any, place: str, *, plain: bool, typed: bool) -> ChatMessage:
    if not isinstance(entry, Mapping):
        raise DataError(f"{place}: expected {{role, content}}, found {short(entry)}", fix="correct the row")
    # Parquet gives every message the fields that any message has, as null
    message = {name: value for name, value in without_flags(entry, place).items() if value is not None}
    if "role" not in message and "from" in message:
        message = dict(_of_sharegpt(message, place))
    if not isinstance(message.get("role"), str):
        raise DataError(f"{place}: expected a text in 'role', found {short(entry.get('role'))}", fix="correct the row")
    further = sorted(message.keys() - {"role", "content"})
    if plain and further:
        raise DataError(
            f"{place}: has fields besides role and content: {', '.join(further)}",
            fix="remove them: prompts are plain chat messages",
        )
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = [_call(call, place, typed=typed) for call in calls]
    else:
        message.pop("tool_calls", None)
    if isinstance(message.get("content"), list):
        message["content"] = _joined(message["content"], place)
        if not isinstance(message["content"], str) and message["role"] == "assistant":
            raise DataError(f"{place}: the assistant's message has an image", fix="correct the row: answers are texts")
    content = message.setdefault("content", "" if message["role"] == "assistant" and not plain else None)
    if not isinstance(content, str | list):
        raise DataError(
            f"{place}: expected a text in 'content', found {short(content)}", fix="correct the row: messages are texts"
        )
    return message


def _of_sharegpt(message: Mapping[str, Any], place: str) -> ChatMessage:
    """Return a message of ShareGPT's, which has `from` and `value`, as one with a role and a content."""
    role = _SHAREGPT_ROLES.get(str(message["from"]).lower())
    if role is None:
        raise DataError(
            f"{place}: expected one of {', '.join(_SHAREGPT_ROLES)} in 'from', found {short(message['from'])}",
            fix="correct the row",
        )
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {"role": role, "content": message.get("value"), **others}


def _joined(parts: Sequence[Any], place: str) -> str | list[Any]:
    """Return the text of a content in parts, as OpenAI's API takes it; the parts themselves where one is an image."""
    for part in parts:
        text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not text and not is_image(part):
            raise DataError(
                f"{place}: expected parts {{type: text, text: …}} or {{type: image_url, image_url: …}} in 'content', "
                f"found {short(part)}",
                fix="correct the row: messages are texts and images",
            )
    return list(parts) if any(map(is_image, parts)) else "".join(part["text"] for part in parts)


def _call(call: Any, place: str, *, typed: bool) -> Mapping[str, Any]:
    """Return a tool call with its arguments as an object, as templates take them.

    Of a typed table, arguments that are null are dropped: what other calls have. As JSON text they are kept.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{place}: expected {{function: {{name, arguments}}}} in 'tool_calls', found {short(call)}",
            fix="correct the row",
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments) if arguments.strip() else {}
    elif typed:
        arguments = _without_nulls(arguments)
    outer, inner = _present(call), _present(function)
    return {**outer, "function": {**inner, "arguments": {} if arguments is None else arguments}}


def _present(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in value.items() if each is not None}


def _parsed(text: str) -> Any:
    """Return what a JSON text means, and any other text as it is."""
    try:
        found = json.loads(text)
        json.dumps(found, allow_nan=False)  # templates would write Infinity for 1e400
    except (ValueError, RecursionError):
        return text
    return found


def _without_nulls(value: Any) -> Any:
    """Return objects without the fields that are null, at any depth."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _without_filler(value: Any) -> Any:
    """Return a schema, or what holds one, without the nulls that a table with types put in: the fields of all objects.

        {"properties": {"city": {"type": "string"}}}                                as written
        {"properties": {"city": {"type": "string", "enum": null}, "days": null}}    as read from Parquet

    A null is kept where it can be meant: in a list, and as `default` or `const` of a schema that allows null.
    """
    if isinstance(value, list):
        return [_without_filler(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    meant = ("default", "const") if _allows_null(value) else ()
    return {name: _without_filler(each) for name, each in value.items() if each is not None or name in meant}


def _allows_null(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    options = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return (
        kind == "null"
        or (isinstance(kind, list) and "null" in kind)
        or schema.get("nullable") is True
        or any(isinstance(option, Mapping) and _allows_null(option) for option in options)
    )
