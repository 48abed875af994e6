"""The proxy over real HTTP: limits, what is refused and how, failures, closing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest
from chat_templates import renderer
from fake_policy import FakePolicy, episode_settings, parts_of
from proxy_rig import CHATML, HELLO, rig, until

from roll_like.agents import proxy
from roll_like.agents.proxy import Proxy
from roll_like.errors import EnvError, GenerationError
from roll_like.inference.interface import Sampling
from roll_like.rollout.router import SampleLost
from roll_like.types import StopReason

# ---- limits --------------------------------------------------------------------------------------


async def test_no_more_turns_than_the_run_allows() -> None:
    async with rig("fox", turns=2) as one:
        await one.ask("hello")
        await one.ask("hello", "fox", "and?")
        with pytest.raises(openai.BadRequestError, match="has had its 2 turns; end it now") as caught:
            await one.ask("hello", "fox", "and?", "fox", "and?")
        assert caught.value.code == "episode_turn_limit"
        assert one.episode.truncated
        await one.reward(1)  # what it is worth is still its agent's to say
        scored = one.episode.scored()
    assert scored.trajectory.stop_reason is StopReason.LENGTH
    assert len(scored.record) == 2


@pytest.mark.parametrize(("asked", "reason"), [({}, StopReason.LENGTH), ({"max_tokens": 2}, StopReason.STOP)])
async def test_a_last_answer_that_the_run_cut_makes_an_episode_truncated(asked: Any, reason: StopReason) -> None:
    """One that the agent asked to be no longer is what it wanted."""
    async with rig("fox", sampling=Sampling(max_tokens=3)) as one:
        await one.ask("hello", **asked)
        await one.reward(1)
        assert one.episode.scored().trajectory.stop_reason is reason


async def test_turns_that_are_being_sampled_count() -> None:
    async with rig("fox", turns=2) as one:
        one.policy.open.clear()
        two = [asyncio.create_task(one.ask(f"{number}")) for number in range(2)]
        await until(lambda: len(one.policy.requests) == 2)
        with pytest.raises(openai.BadRequestError, match="2 turns"):
            await one.ask("another")
        one.policy.open.set()
        await asyncio.gather(*two)
        await one.reward(1)
        assert one.episode.scored().trajectory.stop_reason is StopReason.LENGTH


async def test_no_more_tokens_than_the_window_holds() -> None:
    async with rig("fox", tokens=60) as one:
        await one.ask("hello")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 60 tokens") as caught:
            await one.ask("hello", "fox", "many words " * 40)
        assert caught.value.code == "context_length_exceeded"
        assert one.episode.truncated
        await one.ask("hello", "fox", "few words")  # an agent may go on with less
        assert not one.episode.truncated
        await one.reward(1)
        scored = one.episode.scored()
    assert scored.trajectory.stop_reason is StopReason.STOP
    assert len(parts_of(scored)) == 1


# ---- what is refused -----------------------------------------------------------------------------


async def test_a_key_that_nobody_gave_out() -> None:
    async with rig("fox") as one:
        client = one.client.with_options(api_key="sk-other")
        with pytest.raises(openai.AuthenticationError, match="belongs to no open episode") as caught:
            await client.chat.completions.create(model="any", messages=HELLO)
        assert caught.value.code == "invalid_api_key"
        for path in ("reward", "chat/completions"):
            for wrong in ("", "Bearer x", f"Basic {one.episode.key}"):
                assert (await one.post(path, {"reward": 1}, Authorization=wrong)).status_code == 401
        assert not one.policy.requests
        await one.episode.close()
        with pytest.raises(openai.AuthenticationError):
            await one.ask("hello")


async def test_keys_tell_episodes_apart() -> None:
    async with rig("fox") as one:
        other = one.proxy.open(episode_settings())
        assert other.key != one.episode.key
        await one.ask("hello")
        assert (one.episode.turns, other.turns) == (1, 0)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n": 2}, "n is 2; expected 1"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_what_a_policy_in_training_cannot_do_is_refused(fields: dict[str, Any], says: str) -> None:
    async with rig("fox") as one:
        with pytest.raises(openai.BadRequestError, match=says) as caught:
            await one.ask("hello", **fields)
        assert caught.value.code == "unsupported_value"
        assert one.episode.turns == 0
        await one.ask("hello")  # and does no harm


async def test_log_probabilities_of_the_sampled_tokens() -> None:
    async with rig("fox") as one:
        content = (await one.ask("hello", logprobs=True)).choices[0].logprobs.content
    assert [token.logprob for token in content] == one.policy.generations[0].logprobs.tolist()
    assert "".join(token.token for token in content) == "fox<|im_end|>"


async def test_messages_that_the_template_refuses() -> None:
    async with rig("fox", render=renderer("wants tool calls")) as one:
        with pytest.raises(openai.BadRequestError, match="a tool answered that was not called") as caught:
            await one.client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": "1+1?"}, {"role": "tool", "tool_call_id": "c", "content": "2"}],
            )
        assert caught.value.code == "invalid_messages"


async def test_paths_and_bodies_that_are_not_there() -> None:
    async with rig("fox") as one:
        missing = await one.post("completions", {})
        assert missing.status_code == 404
        assert (
            "POST /v1/completions is not served; there are POST chat/completions" in missing.json()["error"]["message"]
        )
        key = {"Authorization": f"Bearer {one.episode.key}"}
        assert (await one.http.get(f"{one.episode.base_url}/reward", headers=key)).status_code == 405
        broken = await one.http.post(f"{one.episode.base_url}/chat/completions", content=b"{", headers=key)
        assert broken.status_code == 400
        large = await one.http.post(f"{one.episode.base_url}/reward", content=b" " * (65 * 2**20), headers=key)
        assert large.status_code == 413
        assert "64 MiB" in large.json()["error"]["message"]


async def test_what_an_agent_may_look_up() -> None:
    async with rig("fox") as one:
        (model,) = [model async for model in one.client.models.list()]
        assert (model.id, model.model_extra) == ("policy", {"max_model_len": 2000})  # by which agents shorten histories
        key = {"Authorization": f"Bearer {one.episode.key}"}
        assert (await one.http.get(f"{one.episode.base_url}/task", headers=key)).json() == {"name": "agent", "seed": 11}


async def test_a_server_of_many_episodes_may_look_up_without_naming_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig("fox", tokens=300) as one:
        one.proxy.share("sk-many", max_tokens=300)
        client = one.client.with_options(api_key="sk-many")
        monkeypatch.setattr(proxy, "SESSION_SECONDS", 60.0)
        began = time.monotonic()
        (model,) = [model async for model in client.models.list()]
        assert model.model_extra == {"max_model_len": 300}
        many = {"Authorization": "", "x-api-key": "sk-many"}
        asked = {"messages": HELLO, "max_tokens": 5}
        alone = await one.post("messages/count_tokens", asked)
        assert (await one.post("messages/count_tokens", asked, **many)).json() == alone.json()
        empty = await one.post("messages/count_tokens", {"messages": []}, **many)
        assert (empty.status_code, empty.json()["error"]["type"]) == (400, "invalid_request_error")
        assert time.monotonic() - began < proxy.SESSION_SECONDS  # it waits for no session
        monkeypatch.setattr(proxy, "SESSION_SECONDS", 0.01)
        with pytest.raises(openai.AuthenticationError):  # what is sampled is of an episode
            await client.chat.completions.create(model="any", messages=HELLO)
        assert not one.policy.requests


async def test_rewards_that_make_no_sense() -> None:
    async with rig("fox") as one:
        early = await one.post("reward", {"reward": 1})
        assert "before the first answer" in early.json()["error"]["message"]
        await one.ask("hello")
        for body in ({}, {"reward": "1"}, {"reward": 1, "done": "yes"}, {"answer": "fox"}, [1]):
            assert (await one.post("reward", body)).status_code == 400
        assert not one.episode.rewarded
        await one.reward(1)
        for again in (one.post("reward", {"reward": 1}), one.post("chat/completions", {"messages": HELLO})):
            late = await again
            assert (late.status_code, late.json()["error"]["code"]) == (400, "episode_over")
        assert one.episode.scored().reward == 1


async def test_an_environment_wants_an_answer_and_no_reward() -> None:
    async with rig("fox", shown=HELLO) as one:
        assert (await one.post("reward", {"answer": "fox"})).status_code == 400  # before the first turn
        await one.ask("hello")
        assert 'expected {"answer": "…"}' in (await one.post("reward", {"reward": 1})).json()["error"]["message"]
        assert (await one.post("reward", {"answer": "a fox"})).json() == {"turns": 1, "done": True}
        assert one.episode.answer == "a fox"
        one.episode.add_reward(0.5, True)
        assert one.episode.scored().reward == 0.5


# ---- failures ------------------------------------------------------------------------------------


async def test_an_episode_without_turns_or_without_a_reward_is_no_sample() -> None:
    async with rig("fox") as one:
        with pytest.raises(EnvError, match="sent no chat request"):
            one.episode.scored()
        await one.ask("hello")
        with pytest.raises(EnvError, match="posted no reward\n"):
            one.episode.scored()


async def test_an_episode_at_its_limit_without_a_reward_says_so() -> None:
    async with rig("fox", turns=1) as one:
        await one.ask("hello")
        with pytest.raises(openai.BadRequestError):
            await one.ask("hello", "fox", "and?")
        with pytest.raises(EnvError, match=r"it had no turns left(.|\n)*program\.limit_reward"):
            one.episode.scored()


@pytest.mark.parametrize("error", [SampleLost("engine hiccup"), GenerationError("every replica is gone")])
async def test_a_lost_sample_fails_the_episode_whatever_the_agent_does(error: GenerationError) -> None:
    async with rig("fox", error, "dog", retries=2) as one:
        await one.ask("hello")
        with pytest.raises(openai.InternalServerError, match="this episode has failed") as caught:
            await one.ask("hello", "fox", "and?")
        assert caught.value.status_code == 503
        assert len(one.policy.requests) == 2  # the client is told not to try again
        assert (await one.post("reward", {"reward": 1})).status_code == 503
        assert one.episode.over
        with pytest.raises(type(error), match=str(error)):
            one.episode.scored()


@pytest.mark.parametrize("error", [ValueError("broken engine"), ConnectionResetError("broken engine")])
async def test_an_error_inside_is_told_to_all(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async with rig(error) as one:
        with pytest.raises(openai.InternalServerError, match=f"the proxy failed: {type(error).__name__}: broken eng"):
            await one.ask("hello")
        with pytest.raises(type(error), match="broken engine"):
            one.episode.scored()
    assert "a request of an agent failed" in caplog.text


async def test_closing_an_episode_takes_back_what_is_being_sampled() -> None:
    async with rig("fox") as one:
        one.policy.open.clear()
        asking = asyncio.create_task(one.ask("hello"))
        await until(lambda: one.policy.requests)
        await one.episode.close()
        assert one.policy.cancelled == 1
        with pytest.raises(openai.BadRequestError, match="this episode is over"):
            await asking


async def test_closing_the_proxy_closes_its_episodes() -> None:
    policy = FakePolicy(CHATML, ["fox"])
    proxy = Proxy(policy, CHATML)
    await proxy.start()
    episode = proxy.open(episode_settings())
    await proxy.close()
    assert episode.over
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{episode.base_url}/models", trust_env=False)


async def test_a_port_that_is_taken() -> None:
    async with rig("fox") as one:
        port = int(one.proxy.base_url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(OSError, match="address already in use"):
            await Proxy(one.policy, CHATML, port=port).start()
