"""The base model as a judge: what a chat request becomes, and what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest
from config_files import changed
from pydantic import ValidationError
from reward_support import completion
from tiny_model import make_tiny_tokenizer

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.rewards.llm_judge import LLMJudge, LLMJudgeConfig
from roll_like.cluster.address import free_port
from roll_like.data.chat import Renderer
from roll_like.errors import ConfigError, RewardError
from roll_like.inference.interface import GenerateRequest, Generation
from roll_like.policy_gradient.base_judge import BaseJudge
from roll_like.rollout.router import SampleLost
from roll_like.types import StopReason

SCORE = json.dumps({"reasoning": "good", "score": 10})
MESSAGES = [{"role": "user", "content": "Is it good?"}]


class FakeRouter:
    """Answers each request at once."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.urgent: list[bool] = []
        self.forgotten: list[Any] = []
        self.stop_reason = StopReason.STOP
        self.lost = False

    def submit(self, request: GenerateRequest, key: Any, urgent: bool = False) -> asyncio.Future[Generation]:
        self.requests.append(request)
        self.urgent.append(urgent)
        done: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        if self.lost:
            done.set_exception(SampleLost("no engine has answered"))
        else:
            done.set_result(
                Generation(
                    request_id=request.request_id,
                    token_ids=np.zeros(1, np.int32),
                    logprobs=np.zeros(1, np.float32),
                    segments=(),
                    text=SCORE,
                    stop_reason=self.stop_reason,
                )
            )
        return done

    def forget(self, keys: Any) -> None:
        self.forgotten += keys


def judge_here() -> BaseJudge:
    return BaseJudge(Renderer(make_tiny_tokenizer()), host="127.0.0.1", port=free_port("127.0.0.1"))


async def asked(router: FakeRouter, *bodies: dict[str, Any]) -> list[httpx.Response]:
    judge = judge_here()
    await judge.start(router)  # type: ignore[arg-type]
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            return [await client.post(f"{judge.url}/chat/completions", json=body) for body in bodies]
    finally:
        await judge.close()


async def test_requests_are_sampled_by_the_base_model_before_others() -> None:
    router, schema = FakeRouter(), {"type": "object", "properties": {"score": {"type": "number"}}}
    formed = {"type": "json_schema", "json_schema": {"name": "result", "strict": True, "schema": schema}}
    wanted = {"model": "base", "messages": MESSAGES, "temperature": 0.5, "max_tokens": 99}
    first, second = await asked(
        router, {**wanted, "response_format": formed}, {**wanted, "response_format": {"type": "json_object"}}
    )
    message = {"role": "assistant", "content": SCORE}
    assert first.json()["choices"] == [{"index": 0, "message": message, "finish_reason": "stop"}]
    request = router.requests[0]
    assert request.adapter == "base"
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 99)
    assert [json.loads(each.json_schema or "") for each in router.requests] == [schema, {"type": "object"}]
    renderer = Renderer(make_tiny_tokenizer())
    assert request.prompt_ids.tolist() == renderer.encode(renderer.render(MESSAGES, ())).tolist()
    assert router.urgent == [True, True]
    assert router.forgotten == [each.request_id for each in router.requests]
    assert second.status_code == 200


async def test_what_it_cannot_is_refused() -> None:
    router = FakeRouter()
    body = {"model": "base", "messages": MESSAGES}
    bad = [{**body, "logit_bias": {}}, {**body, "response_format": {"type": "regex"}}, {"model": "base"}]
    found = await asked(router, *bad)
    assert [each.status_code for each in found] == [400] * 3
    assert "logit_bias: this server knows max_tokens, messages," in found[0].text
    assert "expected text, json_object or json_schema" in found[1].text
    assert not router.requests
    router.stop_reason = StopReason.LENGTH
    (cut,) = await asked(router, body)
    assert cut.json()["choices"][0]["finish_reason"] == "length"
    router.lost = True
    (lost,) = await asked(router, body)
    assert (lost.status_code, "no engine has answered" in lost.text) == (503, True)


async def test_a_reward_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = LLMJudge(LLMJudgeConfig.model_validate({"judges": [{"url": "base", "model": "base"}]}))
    monkeypatch.delenv("ROLL_LIKE_BASE_JUDGE_URL", raising=False)
    (missing,) = await reward.score([completion("Yes.")])
    assert isinstance(missing, RewardError)
    assert "no engines with adapters run here" in str(missing)
    router, judge = FakeRouter(), judge_here()
    await judge.start(router)  # type: ignore[arg-type]
    monkeypatch.setenv("ROLL_LIKE_BASE_JUDGE_URL", judge.url)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody is there
    (result,) = await reward.score([completion("Yes.")])
    await judge.close()
    assert getattr(result, "value", None) == 1.0
    assert router.requests[0].json_schema is not None


JUDGED: dict[str, Any] = {"type": "llm_judge", "judges": [{"url": "base", "model": "base"}]}


def values(reward: dict[str, Any] = JUDGED, **changes: Any) -> dict[str, Any]:
    sections = {
        "training": {"lora": {}},
        "inference": {"max_model_len": 4096},
        "rewards": {"use": [reward]},
        "evaluation": {"sources": [{"path": "eval.jsonl"}]},
    }
    return changed(**{**sections, **changes})


def test_configurations_without_a_base_model_or_room_are_refused() -> None:
    config = RLVRConfig.from_values(values())
    assert config.adapter_keys == ("rewards.use.0.judges",)
    with pytest.raises(ConfigError, match=r"rewards.use.0.judges: `url: base` is the model that training starts from"):
        config.evaluating("other/model")
    with pytest.raises(ValidationError, match=r"rewards.use.0.judges\n  engines have the base model beside the policy"):
        RLVRConfig.from_values(values(training={}))
    with pytest.raises(ValidationError, match=r"inference.max_model_len\n  the judge `url: base` reads prompt"):
        RLVRConfig.from_values(values(inference={}))


def test_a_part_of_a_composite_may_be_the_base_model() -> None:
    warm = {**JUDGED, "judges": [*JUDGED["judges"], {**JUDGED["judges"][0], "temperature": 0.5}]}
    config = RLVRConfig.from_values(values({"type": "composite", "use": ["exact_match", warm]}))
    assert config.base_judges == config.adapter_keys == ("rewards.use.0.use.1.judges",)
    assert config.unbounded_sampling[-1] == "rewards.use.0.use.1.judges.1.temperature"
