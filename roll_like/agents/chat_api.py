"""OpenAI's chat completions format: requests, answers and errors. `proxy.py` serves it."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_like.data.chat import ChatMessage
from roll_like.data.images import is_image, part_value
from roll_like.data.shown_images import picture_of
from roll_like.errors import EnvError
from roll_like.inference.interface import Sampling

ROLES = ("system", "user", "assistant", "tool")
#: Options that are not followed, and the value of each that asks for nothing; of all others that is 0, false or empty.
NEUTRAL: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "length_penalty": 1,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "seed": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncation": "disabled",
    "verbosity": "medium",
}
#: Fields that are followed, or that are about the account and not about the answer.
_KNOWN = {
    "max_completion_tokens", "max_tokens", "messages", "model", "stop", "stream", "stream_options", "tools",
    "tool_choice", "logprobs", "cache_salt", "client_metadata", "metadata", "prompt_cache_key",
    "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip
#: Values of options that can be served, and why no others.
_SERVED_VALUES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": (
        (1,),
        "expected 1: an agent goes on with one answer, and the others would be trained on without a part in its "
        "reward. Send the request again for another sample",
    ),
    "top_logprobs": ((0,), "expected 0: only the sampled tokens' log-probabilities are known; request logprobs alone"),
}
_MOST_STOPS = 16
_MOST_DEPTH = 200


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape.

    Args:
        status: Of HTTP.
        code: Machine-readable code, such as `context_length_exceeded`.
        param: The field of the request that is wrong.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """What the client reads."""
        kinds = {401: "authentication_error", 404: "not_found_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat request of an agent.

    Attributes:
        messages: The whole history, as chat templates take it: contents are texts, or parts with images
            (`{"type": "image", "image": Picture}`); arguments of tool calls are objects.
        tools: Function schemas.
        parse_calls: Whether tool calls are read out of the answer.
        max_tokens: The request's own limit; None leaves it to the run.
        stop: Strings that end the answer, beside the run's own.
        stream: Whether the answer is sent as server-sent events.
        include_usage: Whether a stream ends with the numbers of tokens.
        logprobs: Whether the log-probabilities of the sampled tokens are sent.
        ignored: Options that are not followed, as the run decides how prompts are rendered and tokens are drawn, and
            `tools.TYPE` for tools that are not shown.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...]
    parse_calls: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    ignored: tuple[str, ...]


def read_body(raw: bytes) -> dict[str, Any]:
    """Return the object that a request's body holds.

    Raises:
        ApiError: It is none, or holds text that no tokenizer takes.
    """
    try:
        body = json.loads(raw)
        if b"\\ud" in raw.lower():  # half a character can only come in as an escape
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, f"the body holds text that is not valid Unicode: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"expected a JSON object, found {kind_of(body)}")
    if _deeper(body, _MOST_DEPTH):
        raise ApiError(400, f"the body is nested more than {_MOST_DEPTH} deep")
    return body


def _deeper(body: Any, depth: int) -> bool:
    """Return whether objects and lists are nested deeper: what reads them goes down as far."""
    level = [body]
    for _ in range(depth):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return bool(level)


def read_chat_request(body: Mapping[str, Any], sampling: Sampling) -> ChatRequest:
    """Read the body of a chat request.

    Args:
        body: As the client sent it.
        sampling: The run's settings, which the request's options are compared with.

    Raises:
        ApiError: A field is wrong, or an option is not supported for a policy in training.
    """
    _refuse_unsupported(body)
    tools, not_shown = _tools(body.get("tools"))
    options = body.get("stream_options") or {}
    return ChatRequest(
        messages=_messages(body.get("messages")),
        tools=tools,
        parse_calls=bool(tools) and body.get("tool_choice") != "none",
        max_tokens=_limit(body),
        stop=_stop(body.get("stop")),
        stream=flag(body, "stream", False) is True,
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=flag(body, "logprobs", False) is True,
        ignored=tuple(
            sorted(map(_printable, (*_ignored(body, sampling), *_forced(body.get("tool_choice")), *not_shown)))
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponse:
    """An answer of the policy in OpenAI's format.

    Attributes:
        answer_id: Unique.
        created: Unix seconds.
        model: Name of the policy.
        message: Role, content and, where there are any, tool calls.
        finish_reason: `stop`, `length` or `tool_calls`.
        logprobs: Of the sampled tokens; None unless requested.
        usage: Numbers of tokens.
    """

    answer_id: str
    created: int
    model: str
    message: Mapping[str, Any]
    finish_reason: str
    logprobs: Mapping[str, Any] | None
    usage: Mapping[str, Any]

    def body(self) -> dict[str, Any]:
        """Return it as one object."""
        choice = {
            "index": 0,
            "message": {"refusal": None, **self.message},
            "finish_reason": self.finish_reason,
            "logprobs": self.logprobs,
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": self.usage}

    def events(self, *, include_usage: bool) -> Iterator[str]:
        """Yield it as server-sent events."""
        calls = [{"index": index, **call} for index, call in enumerate(self.message.get("tool_calls") or ())]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": self.message["content"] and ""}]
        deltas += [{"reasoning_content": text}] if (text := self.message.get("reasoning_content")) else []
        deltas += [{"content": self.message["content"]}] if self.message["content"] else []
        deltas += [{"tool_calls": [call]} for call in calls]
        for place, delta in enumerate(deltas):
            # once, and with a token to which they belong
            logprobs = self.logprobs if place == len(deltas) - 1 else None
            choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            yield self._event([choice], include_usage)
        end = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": self.finish_reason}
        yield self._event([end], include_usage)
        if include_usage:
            yield self._event([], include_usage, self.usage)
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[Any], with_usage: bool, usage: Mapping[str, Any] | None = None) -> str:
        chunk = {**self._head("chat.completion.chunk"), "choices": choices}
        if with_usage:
            chunk["usage"] = usage
        return f"data: {json.dumps(chunk)}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}


def read_arguments(value: Any) -> Any:
    """Return a call's arguments as templates take them: the object that a JSON text holds, or what there is."""
    if not isinstance(value, str):
        return {} if value is None else value
    try:
        read = json.loads(value or "{}")
        # what no tokenizer takes stays as it was written, and numbers that no float holds
        json.dumps(read, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return value
    return read if isinstance(read, dict) else value


def finite_number(body: Mapping[str, Any], key: str) -> float:
    """Return a finite number of a body.

    Raises:
        ApiError: There is none.
    """
    value = body.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        found = "nothing" if key not in body else kind_of(value) if not isinstance(value, float) else repr(value)
        raise ApiError(400, f"{key}: expected a finite number, found {found}", param=key)
    return float(value)


def flag(body: Mapping[str, Any], key: str, default: bool | None) -> bool | None:
    """Return a truth value of a body, or the default where there is none or null.

    Raises:
        ApiError: It is something else.
    """
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{key}: expected true or false, found {kind_of(value)}", param=key)
    return default if value is None else value


def refuse_other_models(body: Mapping[str, Any], models: Sequence[str]) -> None:
    """Refuse a request for a model that is not the policy.

    Args:
        body: The request.
        models: Names of the policy; empty: any name is.

    Raises:
        ApiError: It is for another model.
    """
    if models and body.get("model") not in models:
        raise ApiError(
            404,
            f"the model {json.dumps(body.get('model'))} is not the policy, which is asked as {' or '.join(models)}; "
            "answers to other models' requests would be trained on. Give this client an address of its own, or add "
            "the name to program.models",
            code="model_not_found",
            param="model",
        )


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for key, (served, why) in _SERVED_VALUES.items():
        if body.get(key) is not None and body[key] not in served:
            raise ApiError(400, f"{key} is {json.dumps(body[key])}; {why}", code="unsupported_value", param=key)
    for old in ("functions", "function_call"):
        if body.get(old) is not None:
            raise ApiError(400, f"{old} is not served; use tools", code="unsupported_parameter", param=old)


def _messages(value: Any) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"messages: expected a list of messages, found {kind_of(value)}", param="messages")
    return tuple(_message(one, f"messages[{index}]") for index, one in enumerate(value))


def _message(value: Any, at: str) -> ChatMessage:
    if not isinstance(value, Mapping):
        raise ApiError(400, f"{at}: expected an object, found {kind_of(value)}", param=at)
    role = "system" if value.get("role") == "developer" else value.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{at}.role is {role!r}; expected one of {', '.join(ROLES)}", param=f"{at}.role")
    content = _content(value.get("content"), f"{at}.content")
    if role == "assistant" and isinstance(content, list):
        raise ApiError(400, f"{at}.content: the assistant's message has an image; answers are texts", param=at)
    if role == "assistant":
        calls = value.get("tool_calls") or []
        if not isinstance(calls, list):
            raise ApiError(400, f"{at}.tool_calls: expected a list, found {kind_of(calls)}", param=at)
        read = [_call(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(calls)]
        rest = {key: value[key] for key in ("reasoning_content",) if isinstance(value.get(key), str)}
        return {"role": role, "content": content, **rest, **({"tool_calls": read} if read else {})}
    rest = {key: each for key, each in value.items() if each is not None and key not in ("role", "content")}
    return {"role": role, "content": content, **rest}


def _content(value: Any, at: str) -> str | list[dict[str, Any]]:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise ApiError(400, f"{at}: expected a text or a list of parts, found {kind_of(value)}", param=at)
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
        text = part.get(kind) if kind in ("text", "refusal") else None
        if kind == "image_url":
            parts.append(_image(part, f"{at}[{index}]"))
        elif not isinstance(text, str):
            raise ApiError(400, f"{at}: a part is {kind!r}; the policy reads text and image_url", param=at)
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += text
        else:
            parts.append({"type": "text", "text": text})
    return parts if any(map(is_image, parts)) else "".join(part["text"] for part in parts)


def _image(part: Mapping[str, Any], at: str) -> dict[str, Any]:
    url = part_value(part)
    if not isinstance(url, str) or url[:5].lower() != "data:":
        found = f"{url[:40]!r}" if isinstance(url, str) else kind_of(url)
        what = f"{at}: expected an image as `data:image/png;base64,…`, found {found}; nothing is downloaded"
        raise ApiError(400, what, code="invalid_image_url", param=at)
    try:
        return {"type": "image", "image": picture_of(url)}
    except EnvError as error:
        raise ApiError(400, f"{at}: {error.message}", code="invalid_image", param=at) from error


def as_sent(message: ChatMessage) -> dict[str, Any]:
    """Return a message as clients send it: images as `data:` URLs."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(part["image"].data)}} if is_image(part) else dict(part)
        for part in content
    ]
    return {**message, "content": parts}


def data_url(data: bytes) -> str:
    """Return an encoded image as a `data:` URL."""
    kinds = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
    kind = next((kind for begin, kind in kinds.items() if data.startswith(begin)), "*")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _call(value: Any, at: str) -> dict[str, Any]:
    function = _function(value, at, "an object with a function and its name")
    read_function = {"name": function["name"], "arguments": read_arguments(function.get("arguments"))}
    return {"id": str(value.get("id") or ""), "type": "function", "function": read_function}


def _function(value: Any, at: str, expected: str) -> Mapping[str, Any]:
    """Return the function of a tool or of a call."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{at}: expected {expected}", param=at)
    return function


def _tools(value: Any) -> tuple[tuple[Mapping[str, Any], ...], set[str]]:
    """Return the functions among tools, and what other kinds there are: those that a provider runs, for example.

    Raises:
        ApiError: There are only others, or a function has a wrong shape.
    """
    if value is None:
        return (), set()
    if not isinstance(value, list):
        raise ApiError(400, f"tools: expected a list, found {kind_of(value)}", param="tools")
    functions: list[Mapping[str, Any]] = []
    others: set[str] = set()
    for index, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind != "function":
            others.add(f"tools.{kind}")
            continue
        at = f"tools[{index}]"
        function = _function(tool, at, "{type: function, function: {name: …, parameters: …}}")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties") or {}, Mapping):
            raise ApiError(400, f"{at}.function.parameters: expected a JSON Schema of an object", param=at)
        functions.append(tool)
    if others and not functions:
        found = ", ".join(sorted(kind.removeprefix("tools.") for kind in others))
        raise ApiError(400, f"tools: found {found} and no function; the policy calls functions only", param="tools")
    return tuple(functions), others


def _printable(name: str) -> str:
    """Return a name that a client made up as headers and logs can hold it."""
    return name.encode("unicode_escape").decode("ascii")[:64]


def why_ignored(option: str) -> str:
    """Return why one of `ChatRequest.ignored` is."""
    if option.startswith("tools."):
        return "the policy calls functions only, and is not shown tools of other types"
    if option == "tool_choice":
        return "no call is forced on the policy"
    return "the run decides how prompts are rendered and tokens are drawn"


def _forced(choice: Any) -> tuple[str, ...]:
    """Return the option's name where it asks for a call.

    Raises:
        ApiError: It is no choice at all.
    """
    if choice in (None, "none", "auto"):
        return ()
    if choice != "required" and not isinstance(choice, Mapping):
        what = f"tool_choice: expected 'none', 'auto', 'required' or an object, found {json.dumps(choice)}"
        raise ApiError(400, what, param="tool_choice")
    return ("tool_choice",)


def _limit(body: Mapping[str, Any]) -> int | None:
    limits = []
    for key in ("max_completion_tokens", "max_tokens"):
        value = body.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ApiError(400, f"{key}: expected a whole number of at least 1, found {value!r}", param=key)
        limits.append(value)
    return min(limits, default=None)


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise ApiError(400, "stop: expected a text, or a list of texts that are not empty", param="stop")
    if len(stops) > _MOST_STOPS:
        raise ApiError(400, f"stop: {len(stops)} strings; at most {_MOST_STOPS} are taken", param="stop")
    return tuple(stops)


def _ignored(body: Mapping[str, Any], sampling: Sampling) -> tuple[str, ...]:
    decided = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        **NEUTRAL,
    }
    same: dict[str, Sequence[Any]] = {"top_k": (0, -1)} if sampling.top_k == 0 else {}
    others = body.keys() - _KNOWN - _SERVED_VALUES.keys()
    return tuple(key for key in others if _asks(body[key], key, decided) and body[key] not in same.get(key, ()))


def _asks(value: Any, key: str, decided: Mapping[str, Any]) -> bool:
    """Return whether an option asks for something else than what is done without it."""
    return value is not None and (bool(value != decided[key]) if key in decided else bool(value))


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "nothing"}
    return names.get(type(value), "a number")
