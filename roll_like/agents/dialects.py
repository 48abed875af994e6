"""Formats in which agents ask for a turn: OpenAI's Responses and Anthropic's Messages are translated to chat and back.

A dialect turns a request's body into that of a chat request, which `chat_api.py` reads and checks, and the answer into
its own objects and events. So an agent that speaks it is recorded as any other. A request that leaves its history to
the server gets it back out of the earlier answers of its episode.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from roll_like.agents.chat_api import ApiError, ChatResponse, kind_of

Body = Mapping[str, Any]


class Dialect(ABC):
    """A format of requests and answers.

    Attributes:
        path: Where its requests are sent.
        count_path: Where the same requests only have their prompt counted; None: nowhere.
    """

    path: ClassVar[str]
    count_path: ClassVar[str | None] = None

    def whole(self, body: Body, kept: Mapping[str, Body]) -> Body:
        """Return a request with the history that it leaves to the server.

        Args:
            body: As the client sent it.
            kept: What `history` returned for answers in this format, by their ids.

        Raises:
            ApiError: It goes on from an answer that is not kept.
        """
        del kept
        return body

    def history(self, whole: Body, answered: Body) -> Body | None:
        """Return what requests that go on from an answer leave out, the answer included; None where none may."""
        del whole, answered
        return None

    @abstractmethod
    def to_chat(self, body: Body) -> dict[str, Any]:
        """Return the body of a chat request that asks for the same.

        Raises:
            ApiError: It has a wrong shape, or asks for what is not served.
        """

    @abstractmethod
    def body(self, answer: ChatResponse, request: Body) -> dict[str, Any]:
        """Return an answer as one object."""

    @abstractmethod
    def events(self, answer: ChatResponse, request: Body) -> Iterator[str]:
        """Yield an answer as server-sent events."""

    def counted(self, tokens: int) -> dict[str, Any]:
        """Return the length of a prompt as its clients read it."""
        return {"input_tokens": tokens}

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return an error as its clients read it."""
        return error.body


class ChatCompletions(Dialect):
    """OpenAI's chat completions: what all others are translated to."""

    path = "/v1/chat/completions"

    def to_chat(self, body: Body) -> dict[str, Any]:
        """Return it as it is."""
        return dict(body)

    def body(self, answer: ChatResponse, request: Body) -> dict[str, Any]:
        """Return the answer's own body."""
        del request
        return answer.body()

    def events(self, answer: ChatResponse, request: Body) -> Iterator[str]:
        """Yield the answer's own events."""
        options = request.get("stream_options") or {}
        return answer.events(include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")))


class Responses(Dialect):
    """OpenAI's Responses API, as https://platform.openai.com/docs/api-reference/responses describes it."""

    path = "/v1/responses"
    count_path = "/v1/responses/input_tokens"
    _read = (
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "text",
        "reasoning",
        "include",
        "background",
        "previous_response_id",
    )

    def whole(self, body: Body, kept: Mapping[str, Body]) -> Body:
        """Return a request with the items before `previous_response_id`; instructions and tools come with each."""
        previous = body.get("previous_response_id")
        if previous is None:
            return body
        if not isinstance(previous, str) or previous not in kept:
            what = f"previous_response_id: no answer of this episode is {previous!r}; send the whole history"
            raise ApiError(400, what, code="previous_response_not_found", param="previous_response_id")
        return {**body, "input": [*kept[previous]["input"], *self._items(body)]}

    def history(self, whole: Body, answered: Body) -> Body | None:
        """Return the items so far, unless the client said that it sends them all."""
        if whole.get("store") is False:
            return None
        return {"input": [*self._items(whole), *map(_without_logprobs, answered["output"])]}

    @staticmethod
    def _items(body: Body) -> Sequence[Any]:
        items = body.get("input")
        return [{"role": "user", "content": items}] if isinstance(items, str) else _listed(items, "input")

    def to_chat(self, body: Body) -> dict[str, Any]:
        """Return input items as messages; neighbouring calls and text of the assistant are one message, as in chat."""
        for key in ("conversation", "prompt"):
            if body.get(key) is not None:
                raise ApiError(400, f"{key} is not served; send the whole history, or previous_response_id", param=key)
        if body.get("background"):
            raise ApiError(400, "background is not served; wait for the answer", param="background")
        messages = [] if not body.get("instructions") else [{"role": "system", "content": body["instructions"]}]
        for index, item in enumerate(self._items(body)):
            _add(messages, self._message(item, f"input[{index}]"))
        if messages and _only_reasons(messages[-1]):
            messages.pop()
        chat = _renamed(body, {"max_output_tokens": "max_completion_tokens"}, self._read)
        choice = body.get("tool_choice")
        return {
            **chat,
            **_nested(body, "text", "format", "response_format"),
            **_nested(body, "text", "verbosity", "verbosity"),
            **_nested(body, "reasoning", "effort", "reasoning_effort"),
            "logprobs": "message.output_text.logprobs" in _listed(body.get("include") or [], "include"),
            "messages": messages,
            **({"tools": self._tools(body["tools"])} if body.get("tools") else {}),
            **({} if choice is None else {"tool_choice": choice}),
        }

    def _message(self, item: Any, at: str) -> dict[str, Any] | None:
        if not isinstance(item, Mapping):
            raise ApiError(400, f"{at}: expected an object, found {kind_of(item)}", param=at)
        kind = item.get("type", "message")
        if kind == "message":
            return {"role": item.get("role"), "content": _content(item.get("content"), at)}
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        if kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else _content(output, at)
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        if kind == "reasoning":  # what follows is of the same turn; others' may be encrypted
            parts = [] if item.get("content") is None else _listed(item["content"], f"{at}.content")
            text = "".join(_thought(part.get("text"), at) for part in parts if isinstance(part, Mapping))
            return {"role": "assistant", "content": None, "reasoning_content": text} if text else None
        raise ApiError(400, f"{at}: items of type {kind!r} are not served", param=at)

    @staticmethod
    def _tools(tools: Any) -> list[Any]:
        functions: list[Any] = []
        for tool in _listed(tools, "tools"):
            if not isinstance(tool, Mapping) or tool.get("type") != "function":
                functions.append(tool)
                continue
            kept = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
            functions.append({"type": "function", "function": kept})
        return functions

    def counted(self, tokens: int) -> dict[str, Any]:
        """Return the length of a prompt."""
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def body(self, answer: ChatResponse, request: Body) -> dict[str, Any]:
        """Return a finished response."""
        cut = answer.finish_reason == "length"
        usage = answer.usage
        return {
            **self._head(answer, request),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output(answer),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"] or 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": dict(usage["completion_tokens_details"]),
                "total_tokens": usage["total_tokens"],
            },
        }

    @staticmethod
    def _head(answer: ChatResponse, request: Body) -> dict[str, Any]:
        return {
            "id": answer.answer_id.replace("chatcmpl-", "resp_"),
            "object": "response",
            "created_at": answer.created,
            "model": answer.model,
            "error": None,
            "incomplete_details": None,
            "instructions": request.get("instructions"),
            "metadata": request.get("metadata") or {},
            "parallel_tool_calls": True,
            "previous_response_id": request.get("previous_response_id"),
            "temperature": request.get("temperature"),
            "top_p": request.get("top_p"),
            "tool_choice": request.get("tool_choice") or "auto",
            "tools": request.get("tools") or [],
            "output": [],
            "usage": None,
        }

    @staticmethod
    def _output(answer: ChatResponse) -> list[dict[str, Any]]:
        ended = "incomplete" if answer.finish_reason == "length" else "completed"
        items: list[dict[str, Any]] = []
        calls = answer.message.get("tool_calls") or ()
        if reasoning := answer.message.get("reasoning_content"):
            name, thought = answer.answer_id.replace("chatcmpl-", "rs_"), {"type": "reasoning_text", "text": reasoning}
            items.append({"type": "reasoning", "id": name, "status": ended, "summary": [], "content": [thought]})
        if answer.message["content"] or not calls:
            part: dict[str, Any] = {"type": "output_text", "text": answer.message["content"] or "", "annotations": []}
            part["logprobs"] = [] if answer.logprobs is None else answer.logprobs["content"]
            name = answer.answer_id.replace("chatcmpl-", "msg_")
            items.append({"type": "message", "id": name, "status": ended, "role": "assistant", "content": [part]})
        for call in calls:
            name, function = call["id"].replace("call_", "fc_"), call["function"]
            items.append({"type": "function_call", "id": name, "call_id": call["id"], "status": ended, **function})
        return items

    def events(self, answer: ChatResponse, request: Body) -> Iterator[str]:
        """Yield the events of each output item, numbered through."""
        whole = self.body(answer, request)
        begun = {**self._head(answer, request), "status": "in_progress"}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for place, item in enumerate(whole["output"]):
            events += _item_events(item, place)
        events.append({"type": f"response.{whole['status']}", "response": whole})
        for number, event in enumerate(events):
            yield _event({**event, "sequence_number": number})


def _without_logprobs(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an output item as requests send it back."""
    if item["type"] != "message":
        return dict(item)
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _item_events(item: Mapping[str, Any], place: int) -> Iterator[dict[str, Any]]:
    """Yield the events of one output item of a response."""
    at = {"item_id": item["id"], "output_index": place}
    calls = item["type"] == "function_call"
    empty = {**item, "status": "in_progress", **({"arguments": ""} if calls else {"content": []})}
    yield {"type": "response.output_item.added", "output_index": place, "item": empty}
    if item["type"] == "reasoning":
        (part,) = item["content"]
        at["content_index"] = 0
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        yield {"type": "response.reasoning_text.delta", **at, "delta": part["text"]}
        yield {"type": "response.reasoning_text.done", **at, "text": part["text"]}
        yield {"type": "response.content_part.done", **at, "part": part}
    elif not calls:
        (part,) = item["content"]
        at["content_index"] = 0
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": "", "logprobs": []}}
        yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": part["logprobs"]}
        yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": part["logprobs"]}
        yield {"type": "response.content_part.done", **at, "part": part}
    else:
        arguments = item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
        yield {
            "type": "response.function_call_arguments.done",
            **at,
            "name": item["name"],
            "arguments": arguments,
        }
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


#: How Messages choose tools, and chat.
_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class Messages(Dialect):
    """Anthropic's Messages API, as https://docs.claude.com/en/api/messages describes it."""

    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"
    _read = ("system", "messages", "tools", "tool_choice", "thread")

    def whole(self, body: Body, kept: Mapping[str, Body]) -> Body:
        """Return a request with the thread that it continues: messages, and the system text and tools it began with."""
        thread = body.get("thread")
        kind = thread.get("type") if isinstance(thread, Mapping) else thread
        if kind not in (None, "create", "continue"):
            what = f"thread: expected an object of type 'create' or 'continue', found {json.dumps(thread)}"
            raise ApiError(400, what, param="thread")
        if not isinstance(thread, Mapping) or kind != "continue":
            return body
        previous = thread.get("previous_message_id")
        if not isinstance(previous, str) or previous not in kept:
            what = f"thread: no answer of this episode's threads is {previous!r}; send the whole history"
            raise ApiError(404, what, code="thread_not_found", param="thread")
        for key in ("system", "tools"):
            if body.get(key) is not None:
                raise ApiError(
                    400, f"{key}: a thread keeps what it began with; begin a new one to change it", param=key
                )
        earlier = kept[previous]
        return {**body, **earlier, "messages": [*earlier["messages"], *_listed(body.get("messages"), "messages")]}

    def history(self, whole: Body, answered: Body) -> Body | None:
        """Return the thread so far, if it is one."""
        if whole.get("thread") is None:
            return None
        said = {"role": "assistant", "content": answered["content"]}
        began = {key: whole[key] for key in ("system", "tools") if key in whole}
        return {**began, "messages": [*whole["messages"], said]}

    def to_chat(self, body: Body) -> dict[str, Any]:
        """Return blocks as messages: results of tools are messages of their own, and come before the user's text."""
        messages: list[dict[str, Any]] = []
        if body.get("system"):
            messages.append({"role": "system", "content": _text(body["system"], "system")})
        for index, message in enumerate(_listed(body.get("messages"), "messages")):
            at = f"messages[{index}]"
            if not isinstance(message, Mapping):
                raise ApiError(400, f"{at}: expected an object, found {kind_of(message)}", param=at)
            messages += self._split(message, at)
        if messages and messages[-1]["role"] == "assistant":
            what = "the last message is the assistant's; an answer that is begun for the policy is not sampled by it"
            raise ApiError(400, what, param="messages")
        chat = _renamed(body, {"stop_sequences": "stop"}, self._read)
        choice = body.get("tool_choice") or {}
        kind = str(choice.get("type", "auto")) if isinstance(choice, Mapping) else kind_of(choice)
        if kind not in _CHOICES:
            what = f"tool_choice: expected an object whose type is one of {', '.join(_CHOICES)}, found {kind}"
            raise ApiError(400, what, param="tool_choice")
        alone = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
        return {
            **chat,
            **alone,
            "messages": messages,
            **({"tools": self._tools(body["tools"]), "tool_choice": _CHOICES[kind]} if body.get("tools") else {}),
        }

    @staticmethod
    def _split(message: Mapping[str, Any], at: str) -> Iterator[dict[str, Any]]:
        content = message.get("content")
        if isinstance(content, str):
            yield {"role": message.get("role"), "content": content}
            return
        parts: list[dict[str, Any]] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for place, block in enumerate(_listed(content, f"{at}.content")):
            kind = block.get("type") if isinstance(block, Mapping) else kind_of(block)
            if kind in ("text", "image"):
                parts += _parts([block], f"{at}.content[{place}]")
            elif kind == "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            elif kind == "tool_result":
                result = block.get("content")
                shown = _content(result, f"{at}.content[{place}]")
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": shown}
            elif kind == "thinking" and message.get("role") == "assistant":
                thoughts.append(_thought(block.get("thinking"), f"{at}.content[{place}]"))
            elif kind == "thinking":
                what = f"a block of type 'thinking' is the assistant's; the role is {message.get('role')!r}"
                raise ApiError(400, f"{at}.content[{place}]: {what}", param=at)
            elif kind != "redacted_thinking":
                what = f"blocks of type {kind!r} are not served; the policy reads text, images and the results of tools"
                raise ApiError(400, f"{at}.content[{place}]: {what}", param=at)
        reasoning = {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
        shown = _joined(parts)
        if calls:
            yield {"role": message.get("role"), "content": shown or None, **reasoning, "tool_calls": calls}
        elif parts or message.get("role") == "assistant":  # what was sampled may be an empty answer
            yield {"role": message.get("role"), "content": shown, **reasoning}

    @staticmethod
    def _tools(tools: Any) -> list[Any]:
        functions: list[Any] = []
        for tool in _listed(tools, "tools"):
            if not isinstance(tool, Mapping) or (tool.get("type") or "custom") != "custom":
                functions.append(tool)
                continue
            function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
            about = {"description": tool["description"]} if tool.get("description") else {}
            functions.append({"type": "function", "function": {**function, **about}})
        return functions

    def body(self, answer: ChatResponse, request: Body) -> dict[str, Any]:
        """Return a finished message.

        Its reasoning is a block if the request asks for thinking; other clients expect text in the first block.
        """
        blocks: list[dict[str, Any]] = []
        thinking = request.get("thinking")
        asked = isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "adaptive")
        if asked and (reasoning := answer.message.get("reasoning_content")):
            blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        if answer.message["content"]:
            blocks.append({"type": "text", "text": answer.message["content"]})
        for call in answer.message.get("tool_calls") or ():
            function = call["function"]
            blocks.append(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": function["name"],
                    "input": json.loads(function["arguments"]),
                }
            )
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        cached = answer.usage["prompt_tokens_details"]["cached_tokens"] or 0
        return {
            "id": answer.answer_id.replace("chatcmpl-", "msg_"),
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": blocks,
            "stop_reason": reasons[answer.finish_reason],
            "stop_sequence": None,
            "usage": {
                "input_tokens": answer.usage["prompt_tokens"] - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": answer.usage["completion_tokens"],
            },
        }

    def events(self, answer: ChatResponse, request: Body) -> Iterator[str]:
        """Yield the events of each block."""
        whole = self.body(answer, request)
        begun = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
        yield _event({"type": "message_start", "message": begun})
        for index, block in enumerate(whole["content"]):
            if block["type"] == "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            elif block["type"] == "thinking":
                empty, delta = {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
            else:
                empty = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield _event({"type": "content_block_start", "index": index, "content_block": empty})
            yield _event({"type": "content_block_delta", "index": index, "delta": delta})
            yield _event({"type": "content_block_stop", "index": index})
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield _event({"type": "message_delta", "delta": ended, "usage": whole["usage"]})
        yield _event({"type": "message_stop"})

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return it as Anthropic's clients read it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
        kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        details = {} if error.code is None else {"details": {"error_code": error.code}}
        return {"type": "error", "error": {"type": kind, "message": error.message, **details}}


DIALECTS: Sequence[Dialect] = (ChatCompletions(), Responses(), Messages())


def _event(event: Mapping[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _listed(value: Any, at: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ApiError(400, f"{at}: expected a list, found {kind_of(value)}", param=at)
    return value


def _renamed(body: Body, names: Mapping[str, str], read: Sequence[str]) -> dict[str, Any]:
    """Return a request's options by their names in chat requests; null ones are left out.

    What chat requests do not have goes along, so that they say that it is ignored.

    Args:
        body: The request.
        names: Names in chat requests of those that are called otherwise.
    """
    return {names.get(key, key): value for key, value in body.items() if value is not None and key not in read}


def _nested(body: Body, section: str, key: str, name: str) -> dict[str, Any]:
    """Return an option of a section by its name in chat requests; nothing where there is none."""
    inner = body.get(section)
    value = inner.get(key) if isinstance(inner, Mapping) else None
    return {} if value is None else {name: value}


def _text(value: Any, at: str) -> str:
    """Return a text, or that of parts."""
    content = _content(value, at)
    if isinstance(content, str):
        return content
    raise ApiError(400, f"{at}: found an image, expected text", param=at)


def _content(value: Any, at: str) -> str | list[dict[str, Any]]:
    """Return a content as chat has it: a text, or parts with images."""
    return value or "" if value is None or isinstance(value, str) else _joined(_parts(value, at))


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return parts as one text, where all are texts."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "".join(texts) if len(texts) == len(parts) else parts


def _parts(value: Any, at: str) -> list[dict[str, Any]]:
    """Return parts as chat has them: texts, and images by their addresses."""
    parts: list[dict[str, Any]] = []
    for part in _listed(value, at):
        kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in ("image", "input_image"):
            parts.append({"type": "image_url", "image_url": {"url": _address(part, at)}})
        else:
            raise ApiError(400, f"{at}: a part is {kind!r}; the policy reads text and images", param=at)
    return parts


def _address(part: Mapping[str, Any], at: str) -> str:
    """Return the address of an image: of Responses as it is, of Messages made of its base64."""
    source = part.get("source") if part["type"] == "image" else {"type": "url", "url": part.get("image_url")}
    if isinstance(source, Mapping) and source.get("type") == "base64" and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type') or 'image/*'};base64,{source['data']}"
    if isinstance(source, Mapping) and source.get("type") == "url" and isinstance(source.get("url"), str):
        return str(source["url"])
    what = "expected its bytes as base64; there are no files of a server here"
    raise ApiError(400, f"{at}: an image is {json.dumps(part)[:80]}; {what}", param=at)


def _thought(value: Any, at: str) -> str:
    """Return a text of reasoning, empty for null."""
    if value is not None and not isinstance(value, str):
        raise ApiError(400, f"{at}: expected a text of reasoning, found {kind_of(value)}", param=at)
    return value or ""


def _add(messages: list[dict[str, Any]], message: dict[str, Any] | None) -> None:
    """Append a message; calls join the assistant's message before them, and so does reasoning between calls."""
    if message is None:
        return
    last = messages[-1] if messages else {}
    if _only_reasons(last):
        if message.get("tool_calls") and len(messages) > 1 and messages[-2].get("tool_calls"):
            messages.pop()
            calls = messages[-1]
            thoughts = calls.get("reasoning_content", "") + last["reasoning_content"]
            joined = [*calls["tool_calls"], *message["tool_calls"]]
            messages[-1] = {**calls, "reasoning_content": thoughts, "tool_calls": joined}
        elif message["role"] == "assistant":
            last |= {**message, "reasoning_content": last["reasoning_content"] + message.get("reasoning_content", "")}
        else:
            messages[-1] = message
    elif message.get("tool_calls") and last.get("role") == "assistant":
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    else:
        messages.append(message)


def _only_reasons(message: Mapping[str, Any]) -> bool:
    """Return whether a message is reasoning whose text or calls have not come yet."""
    return message.get("content") is None and not message.get("tool_calls") and "reasoning_content" in message
