"""The proxy over real HTTP, asked by the `openai` client: what is recorded, and what comes out."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from chat_templates import renderer
from fake_policy import FakePolicy, assert_token_exact, episode_settings, parts_of, spelled
from proxy_rig import CHATML, HELLO, TOOL, rig, until

from roll_like.agents.proxy import Proxy
from roll_like.data.reasoning import answer_of
from roll_like.errors import EnvError
from roll_like.inference.interface import GenerateRequest, Sampling
from roll_like.rollout.router import Router
from roll_like.types import Scored, StopReason

# ---- recording -----------------------------------------------------------------------------------


async def test_three_turns_are_one_token_exact_sequence() -> None:
    async with rig("the fox", "a dog", "the end") as one:
        first = await one.ask("hello")
        await one.ask("hello", "the fox", "and?")
        await one.ask("hello", "the fox", "and?", "a dog", "so?")
        assert await one.reward(0.5, success=True) == {"turns": 3, "done": True}
        assert one.episode.over
        scored = one.episode.scored()
    assert first.choices[0].message.content == "the fox"
    assert first.choices[0].finish_reason == "stop"
    assert first.usage.completion_tokens == len(spelled(CHATML, "the fox"))
    assert first.usage.prompt_tokens == len(one.policy.requests[0].prompt_ids)
    assert_token_exact(scored, one.policy)
    assert len(parts_of(scored)) == 1
    assert scored.reward == 0.5
    assert scored.turn_rewards == (0.0, 0.0, 0.5)
    assert scored.details == {"turns": 3.0, "cuts": 0.0, "conversations": 1.0, "ignored_options": 0.0, "success": 1.0}
    whole = scored.trajectory
    assert (whole.sample_index, whole.stop_reason) == (2, StopReason.STOP)
    assert whole.task.messages == ({"role": "user", "content": "hello"},)
    assert whole.task.prompt_ids.tolist() == one.policy.requests[0].prompt_ids.tolist()
    assert {segment.policy_version for segment in whole.segments} == {3}
    assert [record.text for record in scored.record] == ["the fox", "a dog", "the end"]
    assert scored.record[1].shown == ({"role": "user", "content": "and?"},)
    assert len(set(scored.turn_states)) == 3


async def test_what_the_run_decides_is_sent_to_the_engine() -> None:
    sampling = Sampling(temperature=0.7, max_tokens=50, stop=("#",))
    async with rig("fox", sampling=sampling, tokens=100) as one:
        raw = await one.client.chat.completions.with_raw_response.create(
            model="any",
            messages=[{"role": "user", "content": "hello"}],
            temperature=0,
            max_tokens=7,
            stop=["!", "?"],
        )
        await one.ask("hello", "fox", "more")
        await one.reward(1)
        scored = one.episode.scored()
    first, second = one.policy.requests
    assert raw.headers["x-roll-like-ignored"] == "temperature"
    assert scored.details["ignored_options"] == 1
    assert first.sampling == Sampling(temperature=0.7, max_tokens=7, stop=("#", "!", "?"))
    assert second.sampling == Sampling(temperature=0.7, max_tokens=min(50, 100 - len(second.prompt_ids)), stop=("#",))
    assert first.request_id != second.request_id
    assert first.seed != second.seed
    assert first.seed is not None


async def test_an_answer_that_its_limit_cut() -> None:
    async with rig("the quick fox") as one:
        cut = await one.ask("hello", max_completion_tokens=3)
        await one.ask("hello", cut.choices[0].message.content, "go on")
        await one.reward(1)
        scored = one.episode.scored()
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("the", "length")
    assert_token_exact(scored, one.policy)
    assert len(parts_of(scored)) == 1


async def test_a_history_that_the_agent_rewrote_becomes_a_part_of_its_own() -> None:
    async with rig("fox", "dog", "cat") as one:
        await one.ask("hello")
        await one.ask("hello", "fox", "and?")
        await one.ask("in short: fox, dog", "fine", "so?")
        await one.reward(1)
        scored = one.episode.scored()
    assert_token_exact(scored, one.policy)
    assert [sorted(set(turns)) for _, turns in parts_of(scored)] == [[-1, 0, 1], [-1, 2]]
    assert scored.details["conversations"] == 2


async def test_a_template_that_rewrites_history_cuts() -> None:
    async with rig("<think>hm</think>fox", "dog", render=renderer("drops reasoning")) as one:
        await one.ask("hello")
        await one.ask("hello", "<think>hm</think>fox", "and?")
        await one.reward(1)
        scored = one.episode.scored()
    assert_token_exact(scored, one.policy)
    assert scored.details["cuts"] == 1
    assert len(parts_of(scored)) == 2


async def test_many_requests_at_the_same_time() -> None:
    async with rig("fox", turns=20) as one:
        await asyncio.gather(*(one.ask(f"sub-agent {number}") for number in range(10)))
        await asyncio.gather(*(one.ask(f"sub-agent {number}", "fox", "and?") for number in range(10)))
        await one.reward(1)
        scored = one.episode.scored()
    assert_token_exact(scored, one.policy)
    assert len(parts_of(scored)) == 10


async def test_rewards_by_turn() -> None:
    async with rig("fox") as one:
        await one.ask("hello")
        assert await one.reward(0.25, done=False) == {"turns": 1, "done": False}
        assert not one.episode.over
        await one.ask("hello", "fox", "and?")
        await one.reward(0.5, done=False)
        await one.reward(0.5, success=False)
        scored = one.episode.scored()
    assert scored.turn_rewards == (0.25, 1.0)
    assert (scored.reward, scored.details["success"]) == (1.25, 0.0)


# ---- tools ---------------------------------------------------------------------------------------

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


async def test_tool_calls_go_out_and_come_back() -> None:
    async with rig(f"Let me see. {CALL}", "it is two") as one:
        history: list[Any] = [{"role": "user", "content": "1+1?"}]
        first = (await one.client.chat.completions.create(model="any", messages=history, tools=[TOOL])).choices[0]
        (call,) = first.message.tool_calls
        history += [first.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        await one.client.chat.completions.create(model="any", messages=history, tools=[TOOL])
        await one.reward(1)
        scored = one.episode.scored()
    assert (first.finish_reason, first.message.content) == ("tool_calls", "Let me see.")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert_token_exact(scored, one.policy)
    assert len(parts_of(scored)) == 1  # the call stays in the policy's own words
    assert scored.record[0].tool_calls == ({"name": "add", "arguments": {"a": 1}, "result": "2", "error": False},)


async def test_calls_of_tools_that_were_not_offered_are_text() -> None:
    async with rig(CALL) as one:
        for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            message = (await one.ask("1+1?", **more)).choices[0].message
            assert (message.content, message.tool_calls) == (CALL, None)


async def test_a_call_that_cannot_be_read_is_text() -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a": </tool_call>'
    async with rig(broken) as one:
        choice = (await one.ask("1+1?", tools=[TOOL])).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (broken, None, "stop")


async def test_the_template_is_given_the_tools() -> None:
    qwen = renderer("Qwen2.5")
    async with rig("fox", render=qwen) as one:
        await one.ask("1+1?", tools=[TOOL])
    assert '"description": "Adds."' in qwen.decode(one.policy.requests[0].prompt_ids)


# ---- streams -------------------------------------------------------------------------------------


async def test_a_stream_is_recorded_like_any_answer() -> None:
    async with rig("the fox", f"so {CALL}") as one:
        stream = await one.ask("hello", stream=True, stream_options={"include_usage": True}, logprobs=True)
        parts = [part async for part in stream]
        async with one.client.chat.completions.stream(
            model="any",
            messages=[
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "the fox"},
                {"role": "user", "content": "1+1?"},
            ],
        ) as events:
            final = await events.get_final_completion()
        await one.reward(1)
        scored = one.episode.scored()
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "the fox"
    assert parts[-1].usage.completion_tokens == len(spelled(CHATML, "the fox"))
    (logprobs,) = (part.choices[0].logprobs for part in parts if part.choices and part.choices[0].logprobs)
    assert [token.logprob for token in logprobs.content] == one.policy.generations[0].logprobs.tolist()
    assert final.choices[0].message.content == f"so {CALL}"
    assert_token_exact(scored, one.policy)
    assert len(parts_of(scored)) == 1


# ---- clients that try again ----------------------------------------------------------------------


async def test_a_client_that_gave_up_waiting_and_asks_again_is_recorded_once() -> None:
    async with rig("fox", retries=2) as one:
        one.policy.open.clear()
        asking = asyncio.create_task(
            one.client.with_options(timeout=1).chat.completions.create(
                model="any", messages=[{"role": "user", "content": "hello"}]
            )
        )
        await until(lambda: one.policy.cancelled)  # it went away, and what was sampled for it is taken back
        one.policy.open.set()
        assert (await asking).choices[0].message.content == "fox"
        await one.reward(1)
        scored = one.episode.scored()
    assert len(one.policy.requests) == one.policy.cancelled + 1
    assert len(scored.record) == 1
    assert len(parts_of(scored)) == 1


async def test_an_answer_that_was_lost_on_its_way_is_given_again() -> None:
    body = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
    async with rig("fox", "dog") as one:
        sent = [
            (await one.post("chat/completions", body, **{"x-stainless-retry-count": str(count)})).json()
            for count in range(3)
        ]
        await one.reward(1)
        scored = one.episode.scored()
    assert sent[0] == sent[1] == sent[2]
    assert len(one.policy.requests) == len(scored.record) == 1


async def test_a_reward_that_was_sent_twice_counts_once() -> None:
    async with rig("fox") as one:
        await one.ask("hello")
        for body, counts in (({"reward": 0.5, "done": False}, (0, 1)), ({"reward": 0.25}, (0, 1, 2))):
            sent = [
                (await one.post("reward", body, **{"x-stainless-retry-count": str(count)})).json() for count in counts
            ]
            assert all(one == sent[0] for one in sent)
            assert "error" not in sent[0]
        scored = one.episode.scored()
    assert scored.turn_rewards == (0.75,)


async def test_the_client_posts_rewards_itself() -> None:
    async with rig("fox") as one:
        await one.ask("hello")
        sent = await one.client.post("/reward", body={"reward": 0.5}, cast_to=object)
        assert sent == {"turns": 1, "done": True}
        assert one.episode.scored().reward == 0.5


async def test_asking_the_same_on_purpose_is_another_sample() -> None:
    async with rig("fox", "dog") as one:
        answers = [(await one.ask("hello")).choices[0].message.content for _ in range(2)]
        await one.reward(1)
        scored = one.episode.scored()
    assert answers == ["fox", "dog"]
    assert_token_exact(scored, one.policy)
    assert len(parts_of(scored)) == 2


async def test_a_client_that_goes_while_it_is_answered_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    def answer(_: GenerateRequest) -> str:
        writer.transport.abort()  # noticed only by what is written next
        return "fox"

    body = json.dumps({"model": "any", "stream": True, "messages": [{"role": "user", "content": "hello"}]})
    policy = FakePolicy(CHATML, answer)
    async with Proxy(cast(Router, policy), CHATML) as proxy:
        episode = proxy.open(episode_settings())
        address = urlsplit(episode.base_url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        head = ["POST /v1/chat/completions HTTP/1.1", f"Authorization: Bearer {episode.key}"]
        head += ["Host: policy", f"Content-Length: {len(body)}", "", body]
        writer.write("\r\n".join(head).encode())
        await until(lambda: policy.requests)
        await asyncio.sleep(0.05)
        assert episode.turns == 0
        await episode.close()
    assert not caplog.records


async def test_a_client_that_went_away_leaves_no_turn() -> None:
    async with rig("fox") as one:
        one.policy.open.clear()
        asking = asyncio.create_task(one.ask("hello"))
        await until(lambda: one.policy.requests)
        asking.cancel()
        await until(lambda: one.policy.cancelled)
        one.policy.open.set()
        await one.ask("other")
        await one.reward(1)
        scored = one.episode.scored()
    assert scored.record[0].shown == ({"role": "user", "content": "other"},)
    assert len(scored.record) == 1


# ---- scale ---------------------------------------------------------------------------------------


async def test_a_hundred_episodes_at_the_same_time() -> None:
    async with rig("fox", "dog") as one:

        async def play(number: int) -> Scored:
            episode = one.proxy.open(episode_settings(name=f"e{number}", sample_index=number))
            client = one.client.with_options(base_url=episode.base_url, api_key=episode.key)
            history: list[Any] = [{"role": "user", "content": f"episode {number}"}]
            for _ in range(4):
                answer = await client.chat.completions.create(model="any", messages=history)
                history += [answer.choices[0].message.to_dict(), {"role": "user", "content": "and?"}]
            key = {"Authorization": f"Bearer {episode.key}"}
            (await one.http.post(f"{episode.base_url}/reward", json={"reward": number}, headers=key)).raise_for_status()
            scored = episode.scored()
            await episode.close()
            return scored

        all_scored = await asyncio.gather(*(play(number) for number in range(100)))
    assert [scored.reward for scored in all_scored] == list(range(100))
    by_name = {generation.request_id: generation for generation in one.policy.generations}
    for number, scored in enumerate(all_scored):
        assert len(parts_of(scored)) == 1
        assert len(scored.record) == 4
        sampled = [by_name[f"e{number}-{turn}"].token_ids.tolist() for turn in range(4)]
        whole = scored.trajectory
        assert [whole.token_ids[whole.turns == turn].tolist() for turn in range(4)] == sampled
        assert f"episode {number}<" in CHATML.decode(whole.token_ids)


@pytest.mark.parametrize("name", ["chatml", "sentencepiece"])
async def test_bytes_of_tokens_are_those_of_the_answer_also_of_parts_of_characters(name: str) -> None:
    said = "naïve 😀 the fox"
    async with rig(said, render=renderer(name)) as played:
        answer = await played.ask("hello", logprobs=True)
        tokens = answer.choices[0].logprobs.content
        assert len(tokens) == len(played.policy.generations[0].token_ids)
    spelled = [bytes(token.bytes) for token in tokens]
    assert [token.token for token in tokens] == [each.decode(errors="replace") for each in spelled]
    assert any(token.token == "\ufffd" for token in tokens)
    ends = "".join(played.policy.renderer.decode([each]) for each in played.policy.renderer.end_ids)
    assert b"".join(spelled).decode().replace(" ", "") == f"{said}{ends}".replace(" ", "")


# ---- what an agent is shown ------------------------------------------------------------------------


async def test_reasoning_comes_apart_from_what_a_user_or_a_tool_is_shown() -> None:
    async with rig(f"<think>\nFirst I ask.\n</think>\n\n{CALL}", "<think>hm</think>It is two.", apart=True) as one:
        history: list[Any] = [{"role": "user", "content": "1+1?"}]
        first: Any = (await one.client.chat.completions.create(model="any", messages=history, tools=[TOOL])).choices[0]
        (call,) = first.message.tool_calls
        # as most agents do, this one sends back text and calls alone
        calls = [{"id": call.id, "type": "function", "function": call.function.to_dict()}]
        history += [{"role": "assistant", "content": None, "tool_calls": calls}]
        history += [{"role": "tool", "tool_call_id": call.id, "content": "2"}]
        second: Any = (await one.client.chat.completions.create(model="any", messages=history, tools=[TOOL])).choices[0]
        await one.reward(1)
        scored = one.episode.scored()
    assert (first.message.content, first.message.reasoning_content) == (None, "First I ask.")
    assert (second.message.content, second.message.reasoning_content) == ("It is two.", "hm")
    assert one.episode.final == "It is two."
    assert_token_exact(scored, one.policy)
    assert len(parts_of(scored)) == 1
    assert scored.record[0].text.startswith("<think>\nFirst I ask.")  # what is trained on is whole


async def test_words_before_the_reasoning_are_part_of_the_answer() -> None:
    async with rig(f"I look. <think>First I ask.</think>{CALL}", apart=True) as one:
        asked: list[Any] = [{"role": "user", "content": "1+1?"}]
        answer: Any = (await one.client.chat.completions.create(model="any", messages=asked, tools=[TOOL])).choices[0]
    assert (answer.message.content, answer.message.reasoning_content) == ("I look.", "First I ask.")
    assert len(answer.message.tool_calls) == 1


async def test_an_answer_may_quote_the_end_of_reasoning() -> None:
    said = "Write `</think>` at the end."
    async with rig(f"<think>hm</think>{said}", apart=True) as one:
        await one.ask("How do I end it?")
    assert answer_of(one.episode.final) == said


async def test_a_history_goes_on_from_the_answer_whose_reasoning_came_back() -> None:
    ask = {"role": "user", "content": "5?"}
    async with rig("<think>first</think>five", "<think>second</think>five", "yes", apart=True) as one:
        for _ in range(2):
            await one.client.chat.completions.create(model="any", messages=[ask])  # type: ignore[list-item]
        answer = {"role": "assistant", "content": "five", "reasoning_content": "first"}
        history: Any = [ask, answer, {"role": "user", "content": "sure?"}]
        await one.client.chat.completions.create(model="any", messages=history)
        await one.reward(1)
        scored = one.episode.scored()
    texts = [one.policy.renderer.decode(tokens) for tokens, _ in parts_of(scored)]
    (going_on,) = [text for text in texts if "sure?" in text]
    assert "first" in going_on
    assert "second" not in going_on


async def test_reasoning_without_an_end_is_no_answer() -> None:
    async with rig("<think>Shall I", apart=True) as one:
        message = (await one.ask("hello")).choices[0].message
        assert (message.content, message.reasoning_content) == ("", "Shall I")


async def test_a_stream_has_the_reasoning_before_the_answer() -> None:
    async with rig("<think>hm</think>fox", apart=True) as one:
        deltas = [part.choices[0].delta.to_dict() async for part in await one.ask("hello", stream=True)]
    assert deltas == [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "fox"}, {}]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_requests_for_another_model_are_refused_where_the_policys_names_are_known(path: str) -> None:
    body: Any = {"messages": HELLO, "input": HELLO, "max_tokens": 9, "max_output_tokens": 9}
    body = {key: body[key] for key in (("input",) if path == "responses" else ("messages",))}
    async with rig("fox", models=("policy", "small")) as one:
        refused = await one.post(path, body | {"model": "gpt-5"})
        assert (refused.status_code, one.policy.requests) == (404, [])
        assert "is not the policy, which is asked as policy or small" in refused.json()["error"]["message"]
        assert (await one.post(path, body | {"model": "small"})).status_code == 200


async def test_a_first_prompt_that_is_too_long_is_named() -> None:
    async with rig("fox", tokens=4) as one:
        assert (await one.post("chat/completions", {"messages": HELLO})).json()["error"]["param"] == "messages"
        with pytest.raises(EnvError, match=r"first messages are \d+ tokens long, .*; expected fewer than 4"):
            one.episode.scored()
