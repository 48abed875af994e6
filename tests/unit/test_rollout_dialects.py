"""Agents that speak OpenAI's Responses or Anthropic's Messages, through those libraries' own clients."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from fake_policy import logprobs_of
from proxy_rig import Rig, rig
from tiny_vision import picture

from roll_like.agents.chat_api import ApiError
from roll_like.agents.dialects import Messages, Responses
from roll_like.types import Scored

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
PARAMETERS: Any = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS}
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}


def anthropic_client(each: Rig) -> anthropic.AsyncAnthropic:
    url = each.episode.base_url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=url, api_key=each.episode.key, max_retries=0, timeout=10)


def finished(each: Rig) -> Scored:
    each.episode.add_reward(1.0, None)
    return each.episode.scored()


def check_tokens(each: Rig, scored: Scored) -> None:
    """Every sampled token is the engine's, in order, with its log-probability."""
    trajectory = scored.trajectory
    sampled = np.concatenate([one.token_ids for one in each.policy.generations])
    np.testing.assert_array_equal(trajectory.token_ids[trajectory.sampled], sampled)
    np.testing.assert_array_equal(trajectory.logprobs[trajectory.sampled], logprobs_of(sampled))
    assert len(trajectory.parts) == 1  # its history was recognised


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_in_responses(stream: bool) -> None:
    async with rig(CALL, "it is 5", "bye") as each:

        async def ask(items: Any) -> Any:
            if not stream:
                return await each.client.responses.create(
                    model="any", instructions="be brief", input=items, tools=[FUNCTION], store=False
                )
            async with each.client.responses.stream(
                model="any", instructions="be brief", input=items, tools=[FUNCTION], store=False
            ) as events:
                kinds = [event.type async for event in events]
                assert kinds[0] == "response.created"
                assert kinds[-1] == "response.completed"
                return await events.get_final_response()

        items: list[Any] = [{"role": "user", "content": "what is 2 + 3?"}]
        counted = await each.client.responses.input_tokens.count(
            model="any", instructions="be brief", input=items, tools=[FUNCTION]
        )
        first = await ask(items)
        assert counted.object == "response.input_tokens"
        assert first.usage.input_tokens == counted.input_tokens == len(each.policy.requests[0].prompt_ids)
        (call,) = first.output
        assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 2, "b": 3}')
        assert first.status == "completed"
        items += [call.model_dump(exclude_none=True, exclude={"parsed_arguments"})]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
        second = await ask(items)
        assert second.output_text == "it is 5"
        assert second.usage.output_tokens == len(each.policy.generations[1].token_ids)
        items += [item.model_dump(exclude_none=True, exclude={"content": {0: {"parsed"}}}) for item in second.output]
        items += [{"role": "user", "content": [{"type": "input_text", "text": "thanks"}]}]
        assert (await ask(items)).output_text == "bye"
        scored = finished(each)
    check_tokens(each, scored)
    assert [turn.tool_calls[0]["result"] for turn in scored.record if turn.tool_calls] == ["5"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_in_messages(stream: bool) -> None:
    async with rig(f"Let me see.\n{CALL}", "it is 5", "bye") as each, anthropic_client(each) as client:

        async def ask(messages: Any) -> Any:
            options: Any = {"model": "any", "max_tokens": 90, "system": "be brief", "tools": [TOOL]}
            if not stream:
                return await client.messages.create(messages=messages, **options)
            async with client.messages.stream(messages=messages, **options) as events:
                return await events.get_final_message()

        messages: list[Any] = [{"role": "user", "content": "what is 2 + 3?"}]
        counted = await client.messages.count_tokens(model="any", system="be brief", messages=messages, tools=[TOOL])
        first = await ask(messages)
        assert first.usage.input_tokens == counted.input_tokens == len(each.policy.requests[0].prompt_ids)
        text, call = first.content
        assert text.text == "Let me see."
        assert (call.name, call.input, first.stop_reason) == ("add", {"a": 2, "b": 3}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]}
        messages += [{"role": "assistant", "content": [one.model_dump(exclude_none=True) for one in first.content]}]
        messages += [{"role": "user", "content": [result]}]
        second = await ask(messages)
        assert (second.content[0].text, second.stop_reason) == ("it is 5", "end_turn")
        messages += [{"role": "assistant", "content": second.content[0].text}, {"role": "user", "content": "thanks"}]
        assert (await ask(messages)).content[0].text == "bye"
        scored = finished(each)
    check_tokens(each, scored)


async def test_what_has_no_meaning_here_is_refused_in_the_clients_words() -> None:
    async with rig("fine") as each, anthropic_client(each) as client:
        ask: Any = each.client.responses.create
        refused = {
            "previous_response_id: no answer of this": {"input": "hi", "previous_response_id": "resp_1"},
            "conversation is not served": {"input": "hi", "conversation": "conv_1"},
            "found 'x'; nothing is downloaded": {
                "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
            },
            "found web_search and no function": {"input": "hi", "tools": [{"type": "web_search"}]},
            r"input\[0\]": {"input": [3]},
            "'item_reference'": {"input": [{"type": "item_reference", "id": "x"}]},
        }
        for words, body in refused.items():
            with pytest.raises(openai.BadRequestError, match=words):
                await ask(model="any", **body)
        user: Any = [{"role": "user", "content": "hi"}]
        image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
        options: Any = {"model": "any", "max_tokens": 5}
        with pytest.raises(anthropic.BadRequestError, match="found 'x'; nothing is downloaded"):
            await client.messages.create(messages=image, **options)
        with pytest.raises(anthropic.BadRequestError, match="found bash_20250124 and no function"):
            await client.messages.create(messages=user, tools=[{"type": "bash_20250124", "name": "bash"}], **options)
        with pytest.raises(anthropic.BadRequestError, match="the last message is the assistant's"):
            await client.messages.create(messages=[*user, {"role": "assistant", "content": "I"}], **options)
        other = client.with_options(api_key="wrong")
        with pytest.raises(anthropic.AuthenticationError, match="belongs to no open episode"):
            await other.messages.create(messages=user, **options)
        assert not each.policy.requests
        assert (await client.messages.create(messages=user, **options)).content[0].text == "fine"


async def test_a_history_that_is_left_to_the_server() -> None:
    """`previous_response_id` in Responses and `thread` in Messages: one conversation, as if all had been sent."""
    async with rig(CALL, "it is 5", "bye") as each:
        ask: Any = partial(each.client.responses.create, model="any", instructions="be brief", tools=[FUNCTION])
        first = await ask(input="what is 2 + 3?")
        result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "5"}
        second = await ask(input=[result], previous_response_id=first.id)
        assert (second.output_text, second.previous_response_id) == ("it is 5", first.id)
        async with each.client.responses.stream(
            model="any", instructions="be brief", tools=[FUNCTION], input="thanks", previous_response_id=second.id
        ) as events:
            assert (await events.get_final_response()).output_text == "bye"
        scored = finished(each)
        assert [len(record.shown) for record in scored.record] == [2, 1, 1]
        check_tokens(each, scored)
    async with rig(CALL, "", "bye") as each, anthropic_client(each) as client:
        send: Any = partial(client.messages.create, model="any", max_tokens=90)
        asked: Any = [{"role": "user", "content": "what is 2 + 3?"}]
        create: Any = {"thread": {"type": "create"}}
        begun = await send(messages=asked, system="be brief", tools=[TOOL], extra_body=create)
        result = {"type": "tool_result", "tool_use_id": begun.content[0].id, "content": "5"}
        goes_on: Any = {"thread": {"type": "continue", "previous_message_id": begun.id}}
        more: Any = [{"role": "user", "content": [result]}]
        counted = await client.messages.count_tokens(model="any", messages=more, extra_body=goes_on)
        empty = await send(messages=more, extra_body=goes_on)
        assert counted.input_tokens == len(each.policy.requests[1].prompt_ids)
        goes_on = {"thread": {"type": "continue", "previous_message_id": empty.id}}
        last = await send(messages=[{"role": "user", "content": "and?"}], extra_body=goes_on)
        assert last.content[0].text == "bye"
        check_tokens(each, finished(each))
        goes_on = {"thread": {"type": "continue", "previous_message_id": "msg_of_another"}}
        with pytest.raises(anthropic.NotFoundError, match="threads is 'msg_of_another'") as lost:
            await send(messages=asked, extra_body=goes_on)
        told: Any = lost.value.body
        assert told["error"]["details"] == {"error_code": "thread_not_found"}  # clients then send all


@pytest.mark.parametrize("path", ["responses", "messages", "responses/input_tokens", "messages/count_tokens"])
async def test_histories_that_are_not_kept_are_asked_for(path: str) -> None:
    """Ids of other formats, of answers to requests that keep nothing, and made up ones."""
    hello = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    async with rig("fine") as each:
        answers = [
            await each.post("chat/completions", hello),
            await each.post("responses", {"input": "hi", "store": False}),
            await each.post("messages", hello),
        ]
        kept = await each.post("messages" if "responses" in path else "responses", {**hello, "input": "hi"})
        ids = [answer.raise_for_status().json()["id"] for answer in (*answers, kept)]
        for name in (*ids, "resp_none", 3, [], None if "messages" in path else ""):
            if path.startswith("responses"):
                body = {"input": "more", "previous_response_id": name}
            else:
                body = {**hello, "thread": {"type": "continue", "previous_message_id": name}}
            answer = await each.post(path, body)
            assert answer.status_code in (400, 404)
            assert "send the whole history" in answer.text
        assert each.episode.error is None


async def test_threads_of_a_wrong_shape_and_with_other_tools_are_refused() -> None:
    hello = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    async with rig("fine") as each:
        for thread in ("abc", 3, [], {"type": "resume"}, {"type": []}):
            answer = await each.post("messages", {**hello, "thread": thread})
            assert (answer.status_code, "thread: expected an object of type" in answer.text) == (400, True)
        begun = (await each.post("messages", {**hello, "thread": {"type": "create"}})).json()
        goes_on = {**hello, "thread": {"type": "continue", "previous_message_id": begun["id"]}}
        for key, value in (("system", "be brief"), ("tools", [TOOL])):
            answer = await each.post("messages", {**goes_on, key: value})
            assert (answer.status_code, f"{key}: a thread keeps what it began with" in answer.text) == (400, True)
        assert (await each.post("messages", goes_on)).status_code == 200
        assert (await each.post("messages", goes_on)).status_code == 200  # twice from one answer
        each.episode.award(1.0)
        answer = await each.post("messages", {**goes_on, "thread": {"type": "continue", "previous_message_id": "x"}})
        assert "this episode is over" in answer.text


async def test_what_histories_share_is_held_once() -> None:
    async with rig("fine", turns=40) as each:
        items: list[Any] = [{"role": "user", "content": "hi"}]
        for turn in range(8):  # a client that sends all, and does not say so
            answer = (await each.post("responses", {"input": items})).json()
            items += [*answer["output"], {"role": "user", "content": f"and {turn}?"}]
        first, *_, last = each.episode.kept["/v1/responses"].values()
        assert all(one is other for one, other in zip(first["input"], last["input"], strict=False))
        assert len({id(item) for kept in each.episode.kept["/v1/responses"].values() for item in kept["input"]}) == 16
        await each.post("responses", {"input": items, "store": False})
        assert len(each.episode.kept["/v1/responses"]) == 8
        await each.episode.close()
        assert not each.episode.kept


async def test_names_that_clients_make_up_do_no_harm() -> None:
    hello = {"messages": [{"role": "user", "content": "hi"}]}
    tools = [{"type": "function", "function": {"name": "add"}}]
    async with rig("fine", turns=20) as each:
        for more, named in (
            ({"a\nb": 1}, "a\\nb"),
            ({"a\r\0": 1, "ü": 1}, "\\xfc,a\\r\\x00"),
            ({"x" * 100_000: 1}, "x" * 64),
            ({"tools": [*tools, {"type": "x\ny"}]}, "tools.x\\ny"),
        ):
            answer = await each.post("chat/completions", {**hello, **more})
            assert (answer.status_code, answer.headers["x-roll-like-ignored"]) == (200, named)
        answer = await each.post("chat/completions", {**hello, **{f"key{number:04}": 1 for number in range(5000)}})
        assert answer.headers["x-roll-like-ignored"].count(",") == 29
        deep: Any = {}
        for _ in range(400):
            deep = {"properties": deep}
        answer = await each.post("chat/completions", {**hello, "metadata": deep})
        assert (answer.status_code, "nested more than 200 deep" in answer.text) == (400, True)
        assert each.episode.error is None


async def test_tools_and_choices_of_agents_that_expect_more_than_a_policy_does() -> None:
    """Coding agents offer a provider's tools beside their own; frameworks force the call that holds a typed answer."""
    provided: Any = [{"type": "web_search"}, {"type": "namespace", "name": "agents", "description": "d", "tools": []}]
    async with rig(f"Let me see. {CALL}", "fine") as each, anthropic_client(each) as client:
        raw = await each.client.responses.with_raw_response.create(
            model="any", input="2 + 3?", tools=[FUNCTION, *provided], tool_choice="required", parallel_tool_calls=False
        )
        assert raw.headers["x-roll-like-ignored"] == "parallel_tool_calls,tool_choice,tools.namespace,tools.web_search"
        assert [item.type for item in raw.parse().output] == ["message", "function_call"]
        options: Any = {
            "tools": [TOOL, {"type": "bash_20250124", "name": "bash"}],
            "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
            "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        }
        user: Any = [{"role": "user", "content": "2 + 3?"}]
        answer = await client.messages.with_raw_response.create(model="any", max_tokens=50, messages=user, **options)
        assert answer.headers["x-roll-like-ignored"] == (
            "output_config,parallel_tool_calls,tool_choice,tools.bash_20250124"
        )
        assert (await answer.parse()).content[0].text == "fine"
        with pytest.raises(
            anthropic.BadRequestError,
            match="tool_choice: expected an object whose type is one of auto, any, tool, none, found a text",
        ):
            await client.messages.create(
                model="any", max_tokens=5, messages=user, extra_body={"tools": [TOOL], "tool_choice": "any"}
            )
        assert finished(each).details["ignored_options"] == 2
    shown = [each.policy.renderer.decode(request.prompt_ids) for request in each.policy.requests]
    assert not any(word in text for text in shown for word in ("web_search", "namespace", "bash"))


PIXEL = base64.b64encode(picture(1, 1, 1).data).decode()
PICTURE = f"data:image/png;base64,{PIXEL}"


async def test_several_answers_images_and_other_tokens_are_refused_in_every_format() -> None:
    async with rig("fine") as each, anthropic_client(each) as client:

        async def chat(content: Any = "hi", **more: Any) -> None:
            await each.client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": content}], **more
            )

        async def responses(content: Any = "hi", **more: Any) -> None:
            items: Any = [{"role": "user", "content": content}]
            await each.client.responses.create(model="any", input=items, **more)

        async def messages(content: Any = "hi", **more: Any) -> None:
            said: Any = [{"role": "user", "content": content}]
            await client.messages.create(model="any", max_tokens=5, messages=said, extra_body=more)

        shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
        asked: list[tuple[Any, Any, str, str]] = [
            (chat, {"n": 2}, "n is 2; expected 1: an agent goes on with one answer", "n"),
            (responses, {"extra_body": {"n": 2}}, "n is 2; expected 1", "n"),
            (messages, {"n": 2}, "n is 2; expected 1", ""),
            (chat, {"logprobs": True, "top_logprobs": 2}, "top_logprobs is 2; expected 0: only", "top_logprobs"),
            (responses, {"top_logprobs": 2}, "top_logprobs is 2; expected 0: only", "top_logprobs"),
            (messages, {"top_logprobs": 2}, "top_logprobs is 2; expected 0: only", ""),
            (
                chat,
                {"content": [{"type": "image_url", "image_url": {"url": PICTURE}}]},
                "the messages have images, and the policy takes texts only",
                "messages",
            ),
            (
                responses,
                {"content": [{"type": "input_image", "detail": "auto", "image_url": PICTURE}]},
                "the messages have images, and the policy takes texts only",
                "messages",
            ),
            (messages, {"content": [shown]}, "the messages have images, and the policy takes texts only", ""),
            (
                messages,
                {"content": [{"type": "tool_result", "tool_use_id": "c", "content": [shown]}]},
                "the messages have images, and the policy takes texts only",
                "",
            ),
            (responses, {"include": 3}, "include: expected a list, found a number", "include"),
        ]
        for ask, options, words, param in asked:
            with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as found:
                await ask(**options)
            assert words in found.value.message
            assert getattr(found.value, "param", None) == (param or None)
        assert not each.policy.requests  # nothing of it was sampled
        for harmless in ({"n": 1}, {"top_logprobs": 0}):
            await chat(**harmless)
            await responses(extra_body=harmless)
            await messages(**harmless)
        assert len(each.policy.requests) == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_have_log_probabilities_where_they_are_asked_for(stream: bool) -> None:
    async with rig("so it is") as each:
        options: Any = {"model": "any", "input": "hi", "include": ["message.output_text.logprobs"]}
        if stream:
            async with each.client.responses.stream(**options) as events:
                deltas = [event async for event in events if event.type == "response.output_text.delta"]
                answer: Any = await events.get_final_response()
            assert [one.logprob for event in deltas for one in event.logprobs]
        else:
            answer = await each.client.responses.create(**options)
        (part,) = answer.output[0].content
        (sampled,) = each.policy.generations
        assert [one.logprob for one in part.logprobs] == sampled.logprobs.tolist()
        assert "".join(one.token for one in part.logprobs[:-1]) == "so it is"
        plain: Any = await each.client.responses.create(model="any", input="hi")
        assert plain.output[0].content[0].logprobs == []


async def test_options_of_responses_that_the_run_decides_are_named() -> None:
    async with rig("fine") as each:
        asked: Any = {"text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "high"}, "temperature": 0.1}
        answer = await each.client.responses.with_raw_response.create(model="any", input="hi", **asked)
        assert answer.headers["x-roll-like-ignored"] == "reasoning_effort,response_format,temperature"
        plain: Any = {"text": {"format": {"type": "text"}}, "reasoning": {"effort": None}}
        answer = await each.client.responses.with_raw_response.create(model="any", input="hi", **plain)
        assert "x-roll-like-ignored" not in answer.headers


async def test_options_that_a_format_has_alone_are_named_too() -> None:
    tool = {"name": "add", "input_schema": {"type": "object"}}
    said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "tools": [tool]}
    async with rig("fine") as each:
        for path, body, named in (
            ("responses", {"input": "hi", "max_tool_calls": 1, "truncation": "auto"}, "max_tool_calls,truncation"),
            ("responses", {"input": "hi", "parallel_tool_calls": False, "store": False}, "parallel_tool_calls"),
            ("responses", {"input": "hi", "text": {"verbosity": "low"}, "truncation": "disabled"}, "verbosity"),
            ("messages", {**said, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
            (
                "messages",
                {**said, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
                "parallel_tool_calls",
            ),
            ("messages", {**said, "metadata": {"user_id": "u"}, "stop_sequences": ["x"]}, None),
        ):
            answer = await each.post(path, body)
            assert (answer.status_code, answer.headers.get("x-roll-like-ignored")) == (200, named)
        for choice in ("auto", {"type": []}):
            answer = await each.post("messages", {**said, "tool_choice": choice})
            assert (answer.status_code, "tool_choice" in answer.text) == (400, True)
        assert each.episode.error is None  # an agent's mistake is no failure of the machine


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_an_item_of_its_own_in_responses(stream: bool) -> None:
    async with rig(f"I look. <think>Sum.</think>{CALL}", "<think>hm</think>It is 5.", "bye", apart=True) as each:

        async def ask(items: Any) -> Any:
            if not stream:
                return await each.client.responses.create(model="any", input=items, tools=[FUNCTION], store=False)
            async with each.client.responses.stream(model="any", input=items, tools=[FUNCTION], store=False) as events:
                deltas = [event.delta async for event in events if event.type == "response.reasoning_text.delta"]
                final = await events.get_final_response()
                thought = [item.content[0].text for item in final.output if item.type == "reasoning" and item.content]
                assert deltas == thought
                return final

        items: list[Any] = [{"role": "user", "content": "what is 2 + 3?"}]
        first = await ask(items)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.output[0].content[0].text == "Sum."
        assert first.usage.output_tokens_details.reasoning_tokens == len("Sum.")  # a token is a character here
        assert first.output_text == "I look."
        dumped = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
        items += [*dumped, {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "5"}]
        second = await ask(items)
        assert (second.output[0].content[0].text, second.output_text) == ("hm", "It is 5.")
        items += [item.model_dump(exclude_none=True) for item in second.output]
        # an item of another provider, whose text is encrypted, and one that nothing follows
        items += [{"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": "x"}]
        items += [{"role": "user", "content": "thanks"}]
        assert (await ask(items)).output_text == "bye"
        scored = finished(each)
    check_tokens(each, scored)


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_have_the_reasoning_where_thinking_is_asked_for(stream: bool) -> None:
    answers = (f"<think>Sum.</think>{CALL}", "<think>hm</think>It is 5.", "<think>hm</think>bye")
    async with rig(*answers, apart=True) as each, anthropic_client(each) as client:

        async def ask(messages: Any, **more: Any) -> Any:
            options: Any = {"model": "any", "max_tokens": 90, "tools": [TOOL], **more}
            if not stream:
                return await client.messages.create(messages=messages, **options)
            async with client.messages.stream(messages=messages, **options) as events:
                return await events.get_final_message()

        thinking: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        messages: list[Any] = [{"role": "user", "content": "what is 2 + 3?"}]
        first = await ask(messages, **thinking)
        assert [block.type for block in first.content] == ["thinking", "tool_use"]
        assert first.content[0].thinking == "Sum."
        messages += [{"role": "assistant", "content": [block.to_dict() for block in first.content]}]
        result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "5"}
        messages += [{"role": "user", "content": [result]}]
        second = await ask(messages, **thinking)
        assert [block.type for block in second.content] == ["thinking", "text"]
        messages += [{"role": "assistant", "content": [block.to_dict() for block in second.content]}]
        messages += [{"role": "user", "content": "thanks"}]
        assert [block.to_dict() for block in (await ask(messages)).content] == [{"type": "text", "text": "bye"}]
        scored = finished(each)
    check_tokens(each, scored)


def test_reasoning_that_comes_back_is_of_the_answer_that_follows_it() -> None:
    chat = Responses().to_chat(
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "five"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "unanswered"}]},
                {"role": "user", "content": "sure?"},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "cut"}]},
            ]
        }
    )
    assert chat["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "five", "reasoning_content": "hm"},
        {"role": "user", "content": "sure?"},
    ]


def test_reasoning_between_parallel_calls_keeps_them_in_one_message() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": "add", "arguments": "{}"}

    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}, {"text": None}]}
    output = {"type": "function_call_output", "call_id": "one", "output": "5"}
    chat = Responses().to_chat({"input": [call("one"), thought, call("two"), output]})
    assert [message["role"] for message in chat["messages"]] == ["assistant", "tool"]
    assert [each["id"] for each in chat["messages"][0]["tool_calls"]] == ["one", "two"]
    assert chat["messages"][0]["reasoning_content"] == "hm"


@pytest.mark.parametrize("content", [5, "hm", [{"type": "reasoning_text", "text": 5}]])
def test_reasoning_of_a_wrong_shape_is_refused(content: Any) -> None:
    with pytest.raises(ApiError, match=r"input\[0\].*found a (number|text)"):
        Responses().to_chat({"input": [{"type": "reasoning", "content": content}]})


def test_thinking_is_the_assistants() -> None:
    thinking = {"type": "thinking", "thinking": "hm"}
    with pytest.raises(ApiError, match=r"messages\[0\].content\[0\]: .*the role is 'user'"):
        Messages().to_chat({"messages": [{"role": "user", "content": [thinking, {"type": "text", "text": "hi"}]}]})
    with pytest.raises(ApiError, match="expected a text of reasoning, found a number"):
        Messages().to_chat({"messages": [{"role": "assistant", "content": [{**thinking, "thinking": 5}]}]})


async def test_an_answer_that_was_cut_says_so() -> None:
    async with rig("a long answer") as each, anthropic_client(each) as client:
        cut = await each.client.responses.create(model="any", input="hi", max_output_tokens=4)
        assert (cut.status, cut.output_text) == ("incomplete", "a lo")
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
        message = await client.messages.create(model="any", max_tokens=4, messages=[{"role": "user", "content": "hi"}])
        assert message.stop_reason == "max_tokens"
