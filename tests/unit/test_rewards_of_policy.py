"""Rewards that the policy gives: what is asked of its forward pass, and what becomes of the answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_samples import make_task
from bigram_engine import OneRank
from plain_backend import plain_ranks
from pydantic import ValidationError
from rank_specs import cpu_rank
from tiny_model import make_tiny_tokenizer
from transformers import AutoModelForCausalLM

from roll_like import AgenticConfig, OnlineDPOConfig, Outcome, RewardResult, RLVRConfig
from roll_like.algorithms.logprobs import token_certainties
from roll_like.builtin.rewards.confidence import Confidence, ConfidenceConfig
from roll_like.builtin.rewards.reference_likelihood import ReferenceLikelihood, ReferenceLikelihoodConfig
from roll_like.config.training import TrainingConfig
from roll_like.data.chat import Renderer
from roll_like.errors import ConfigError, GenerationError, RewardError
from roll_like.policy_gradient.policy_rewards import EngineForward, PolicyRewards
from roll_like.registry import REWARDS
from roll_like.rewards.base import RewardConfig
from roll_like.rewards.of_policy import Answered
from roll_like.rewards.scorer import to_completion
from roll_like.rollout.collection import Collected
from roll_like.training.engine import TrainingEngine
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.rank import TrainingRank
from roll_like.types import (
    THINK,
    FloatArray,
    Group,
    LogitTransform,
    Part,
    ReasoningTags,
    Scored,
    Segment,
    StopReason,
    TrainingSample,
    Trajectory,
)

RENDERER = Renderer(make_tiny_tokenizer())
PROMPT = "<|im_start|>user\n6 x 7?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from plain_ranks(monkeypatch)


# ---- what the policy says ------------------------------------------------------------------------


@pytest.mark.parametrize("logits", [LogitTransform(), LogitTransform(scale=0.5, cap=3.0)])
@pytest.mark.parametrize("bias", [False, True])
def test_certainties_are_divergences_from_the_uniform_distribution(logits: LogitTransform, bias: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    hidden, weight, shift = (torch.randn(*shape, generator=draw) for shape in ((7, 5), (23, 5), (23,)))
    found = token_certainties(
        hidden,
        weight,
        temperature=0.7,
        chunk_tokens=3,
        chunk_vocab=10,
        bias=shift if bias else None,
        logits=logits,
    )
    z = logits.of(hidden @ weight.T + (shift if bias else 0)) / 0.7
    uniform = torch.full_like(z, 1 / 23)
    expected = torch.nn.functional.kl_div(z.log_softmax(1), uniform, reduction="none").sum(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert token_certainties(torch.zeros(1, 5), weight, temperature=1.0, chunk_tokens=3, chunk_vocab=10).item() == (
        pytest.approx(0.0, abs=1e-6)
    )


def engine_of(model: Path) -> TrainingEngine[Any]:
    objective: Any = LanguageModelObjective(
        settings=TrainingConfig(backend="plain", max_tokens_per_micro_batch=100), temperature=0.3
    )
    rank = TrainingRank(cpu_rank(objective, model, frozen=True), 0, 1)
    rank.start(("127.0.0.1", 1))
    cluster: Any = OneRank(rank)
    return TrainingEngine(cluster, objective, frozen=True)


def test_a_forward_pass_is_that_of_the_model_at_temperature_1(tiny_model: Path) -> None:
    forward = EngineForward(engine_of(tiny_model))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    samples = [
        TrainingSample(
            token_ids=np.arange(start, start + 9, dtype=np.int32),
            loss_mask=np.arange(9) > 4,
            group_id="one",
            prompt_length=4 if start == 20 else 0,
        )
        for start in (20, 40)
    ]
    answers = [call(samples) for call in (forward.logprobs, forward.entropies, forward.certainties)]
    for index, sample in enumerate(samples):
        with torch.no_grad():
            logits = plain(torch.from_numpy(sample.token_ids).long()[None]).logits[0, :-1]
        logp = logits.log_softmax(1)
        ids = torch.from_numpy(sample.token_ids[1:]).long()
        expected = [
            logp.gather(1, ids[:, None])[:, 0],
            -(logp.exp() * logp).sum(1),
            -logp.mean(1) - math.log(logp.shape[1]),
        ]
        for found, wanted in zip(answers, expected, strict=True):
            assert not found[index][~sample.loss_mask].any()
            np.testing.assert_allclose(found[index][5:], wanted[4:].numpy(), atol=2e-5)


class Told:
    """A policy that says the same of every token; what it was asked is kept."""

    def __init__(self, logprobs: Mapping[int, float] | None = None) -> None:
        self.asked: list[TrainingSample] = []
        self._logprobs = logprobs or {}

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        self.asked += samples
        return [
            np.where(one.loss_mask, [self._logprobs.get(token, -1.0) for token in one.token_ids.tolist()], 0)
            for one in samples
        ]

    def entropies(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        self.asked += samples
        return [np.where(one.loss_mask, 0.1 * np.arange(len(one)), 9.0).astype(np.float32) for one in samples]

    certainties = entropies


# ---- rewards -------------------------------------------------------------------------------------


def sampled(text: str, answer: str | None = "42", tags: ReasoningTags | None = THINK, index: int = 0) -> Scored:
    """A sample of the tiny tokenizer's tokens of a text, and the end of the turn."""
    task = replace(make_task(), answer=answer, prompt_ids=RENDERER.encode(PROMPT), reasoning=tags)
    response = np.append(RENDERER.encode(text), RENDERER.encode("<|im_end|>"))
    prompt = len(task.prompt_ids)
    token_ids = np.concatenate([task.prompt_ids, response], dtype=np.int32)
    mask = np.arange(len(token_ids)) >= prompt
    trajectory = Trajectory(
        task=task,
        sample_index=index,
        token_ids=token_ids,
        sampled=mask,
        logprobs=np.zeros(len(token_ids), np.float32),
        turns=mask.astype(np.int32) - 1,
        parts=(Part(start=0, end=len(token_ids), prompt_length=prompt),),
        segments=(Segment(start=prompt, end=len(token_ids), policy_version=1),),
        text=text,
        stop_reason=StopReason.STOP,
    )
    return Scored(trajectory=trajectory, reward=0.5, rewards={"toy": 0.5}, details={}, weights={"toy": 1.0})


def answered(text: str, **changed: Any) -> Answered:
    scored = sampled(text, **changed)
    return Answered(scored=scored, completion=to_completion(scored.trajectory))


def likelihood(samples: Sequence[Answered], policy: Told, **settings: Any) -> Sequence[Outcome]:
    reward = ReferenceLikelihood(ReferenceLikelihoodConfig.model_validate(settings))
    return reward.measure(samples, policy, RENDERER)


def texts(policy: Told) -> list[tuple[str, str]]:
    """What was asked: what the model reads, and what is scored of it."""
    return [
        (RENDERER.decode(one.token_ids[~one.loss_mask]), RENDERER.decode(one.token_ids[one.loss_mask]))
        for one in policy.asked
    ]


@pytest.mark.parametrize(
    ("text", "settings", "read", "scored"),
    [
        ("<think>6 x 7</think>41", {}, "<think>6 x 7</think>", "42"),
        ("<think>6 x 7</think>\n\n41 or so", {}, "<think>6 x 7</think>\n\n", "42"),
        ("so <answer>41</answer>", {"after": "<answer>"}, "so <answer>", "42"),
        ("<answer>1</answer> no <answer>41</answer>", {"after": "<answer>"}, "<answer>1</answer> no <answer>", "42"),
        (
            "it is <answer> 41 </answer>",
            {"after": "<answer", "template": "> {answer} </answer>"},
            "it is <answer",
            "> 42 </answer>",
        ),
        ("so <answer>", {"after": "<answer>"}, "so <answer>", "42"),
    ],
)
def test_the_reference_answer_stands_in_the_place_of_the_sampled_one(
    text: str, settings: dict[str, Any], read: str, scored: str
) -> None:
    policy = Told()
    likelihood([answered(text)], policy, **settings)
    assert texts(policy) == [(PROMPT + read, scored)]
    (asked,) = policy.asked
    kept = RENDERER.encode(PROMPT + read)
    assert asked.prompt_length == len(RENDERER.encode(PROMPT))
    assert len(asked.token_ids) >= len(kept)


def test_a_token_that_goes_on_behind_the_place_is_written_again() -> None:
    """The place is within the sampled token: what it says before the place is scored with the answer."""
    whole = next(
        token
        for token in range(RENDERER.tokenizer.vocab_size)
        if len(RENDERER.token_bytes(token)) > 1 and RENDERER.token_bytes(token).decode(errors="replace").isalpha()
    )
    word = RENDERER.token_bytes(whole).decode()
    policy = Told()
    likelihood([answered(f"so {word}")], policy, after=f"so {word[0]}")
    ((read, scored),) = texts(policy)
    assert (read + scored).removeprefix(PROMPT) == f"so {word[0]}42"
    assert len(read) < len(PROMPT) + len(f"so {word[0]}")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mean_probability", lambda p: p.mean()),
        ("probability", lambda p: p.prod()),
        ("mean_logprob", lambda p: np.log(p).mean()),
        ("logprob", lambda p: np.log(p).sum()),
    ],
)
def test_likelihoods(kind: str, expected: Any) -> None:
    tokens = RENDERER.encode_pieces([("42", False)])[0].tolist()
    chances = dict(zip(tokens, (0.5, 0.125), strict=False))
    policy = Told({token: math.log(chance) for token, chance in chances.items()})
    (result,) = likelihood([answered("<think>a</think>41")], policy, likelihood=kind, missing=-3.0)
    assert isinstance(result, RewardResult)
    assert result.value == pytest.approx(float(expected(np.array([chances[token] for token in tokens]))))
    assert result.details == {"placed": 1.0}


@pytest.mark.parametrize("text", ["41", "<think>41", "<think>41</think>", ""])
def test_without_a_place_for_the_answer(text: str) -> None:
    policy = Told()
    assert likelihood([answered(text)], policy) == [RewardResult(0.0, {"placed": 0.0})]
    assert likelihood([answered(text)], policy, likelihood="logprob", missing=-7.0)[0] == (
        RewardResult(-7.0, {"placed": 0.0})
    )
    assert policy.asked == []


@pytest.mark.parametrize(
    ("settings", "tags", "text", "bare"),
    [
        ({}, THINK, "<think>a</think>41", "<think></think>"),
        ({}, replace(THINK, opened=True), "a</think>41", "</think>"),
        ({}, THINK, "<think>a</think>\n\n41", "<think></think>\n\n"),
        ({}, replace(THINK, opened=True), "a</think>\n41", "</think>\n"),
        ({"after": "<answer>"}, THINK, "a<answer>41", "<answer>"),
        ({"after": "<answer>"}, replace(THINK, opened=True), "a</think><answer>41", "</think><answer>"),
    ],
)
def test_the_score_without_reasoning_is_subtracted(
    settings: dict[str, Any], tags: ReasoningTags, text: str, bare: str
) -> None:
    class Reads(Told):
        def logprobs(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
            self.asked += samples
            # the more was read, the likelier
            return [np.where(one.loss_mask, 0.01 * len(one) - 2.0, 0.0) for one in samples]

    policy = Reads()
    group = [answered(text, tags=tags), answered(text, tags=tags, index=1)]
    results = likelihood(group, policy, debias=True, **settings)
    assert texts(policy)[1] == (PROMPT + bare, "42")
    assert len(policy.asked) == 3, "once for a group"
    full, without, _ = (math.exp(0.01 * len(one) - 2.0) for one in policy.asked)
    assert isinstance(results[0], RewardResult)
    assert results[0].value == pytest.approx(full - without)
    assert results[0].details == pytest.approx({"placed": 1.0, "likelihood": full, "without_reasoning": without})


def test_the_same_tokens_are_scored_without_reasoning() -> None:
    """` the` is one token, `the` three: what of it stands before the place is scored with the answer in both."""
    group = [answered("so it is the end", answer="the"), answered("it is 9", answer="the", index=1)]
    policy = Told()
    results = likelihood(group, policy, after="is ", debias=True, max_answer_tokens=3)
    assert texts(policy) == [
        (PROMPT + "so it is", " the"),
        (PROMPT + "is", " the"),
        (PROMPT + "it is ", "the"),
        (PROMPT + "is ", "the"),
    ]
    counts = [int(one.loss_mask.sum()) for one in policy.asked]
    assert counts == [1, 1, 3, 3]
    assert not any(isinstance(result, RewardError) for result in results)


def test_an_answer_that_is_too_long_without_reasoning_loses_its_sample_alone() -> None:
    """Of the token ` the` the mark `t` is a part; `the` without the space is more tokens."""
    group = [answered("so the", answer="he"), answered("so t7", answer="he", index=1)]
    results = likelihood(group, Told(), after="t", debias=True, max_answer_tokens=2)
    assert isinstance(results[0], RewardError)
    assert isinstance(results[1], RewardResult)


def test_reasoning_that_does_harm_gets_nothing_less_than_0_in_probabilities() -> None:
    class Harm(Told):
        def logprobs(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
            return [np.where(one.loss_mask, -0.01 * len(one), 0.0) for one in samples]

    (result,) = likelihood([answered("<think>aaaa</think>41")], Harm(), debias=True)
    assert isinstance(result, RewardResult)
    assert result.value == 0.0
    (result,) = likelihood([answered("<think>aaaa</think>41")], Harm(), debias=True, likelihood="logprob", missing=-9)
    assert isinstance(result, RewardResult)
    assert result.value < 0


def test_an_answer_that_is_too_long_is_a_failure() -> None:
    long, good = answered("<think>a</think>41", answer="1 2 3 4 5 6 7 8"), answered("<think>a</think>41")
    results = likelihood([long, good], Told(), max_answer_tokens=3)
    assert isinstance(results[0], RewardError)
    assert "raise max_answer_tokens" in str(results[0])
    assert isinstance(results[1], RewardResult)


@pytest.mark.parametrize(("measure", "sign"), [("self_certainty", 1.0), ("negative_entropy", -1.0)])
def test_confidence_is_a_mean_over_sampled_tokens(measure: str, sign: float) -> None:
    sample = answered("six times seven")
    (result,) = Confidence(ConfidenceConfig.model_validate({"measure": measure})).measure([sample], Told(), RENDERER)
    places = np.flatnonzero(sample.scored.trajectory.sampled)
    assert isinstance(result, RewardResult)
    assert result.value == pytest.approx(sign * 0.1 * places.mean(), rel=1e-5)


def test_no_worker_computes_them() -> None:
    with pytest.raises(RewardError, match="computed by the policy"):
        Confidence(ConfidenceConfig()).start()


# ---- a step's groups -----------------------------------------------------------------------------


def rewards_of(configs: Sequence[RewardConfig], accepted: float = 0.5) -> PolicyRewards:
    made = PolicyRewards(configs, {}, SimpleNamespace(), lambda: RENDERER, max_failure_fraction=accepted)  # type: ignore[arg-type]
    made._forward = Told()  # type: ignore[assignment]
    return made


def collected(*groups: Sequence[Scored]) -> Collected:
    made = tuple(Group(task=group[0].trajectory.task, samples=tuple(group), failures=()) for group in groups)
    return Collected(groups=made, rejected=(), failures=(), started=len(made), tokens=9)


def test_values_are_added_with_their_weight() -> None:
    step = collected([sampled("<think>a</think>41")], [sampled("41")])
    config = ReferenceLikelihoodConfig.model_validate({"weight": 2.0, "name": "p", "sources": ["toy"]})
    first, second = (group.samples[0] for group in rewards_of([config]).add(step, 0).groups)
    chance = math.exp(-1.0)
    assert first.reward == pytest.approx(0.5 + 2.0 * chance)
    assert first.rewards == pytest.approx({"toy": 0.5, "p": chance})
    assert first.weights == {"toy": 1.0, "p": 2.0}
    assert first.details == {"p/placed": 1.0}
    assert second.rewards == {"toy": 0.5, "p": 0.0}
    elsewhere = config.model_copy(update={"sources": ("other",)})
    assert rewards_of([elsewhere]).add(step, 0) == step
    assert rewards_of([]).add(step, 0) is step


def test_what_cannot_be_scored_is_a_failure_and_an_empty_group_is_rejected() -> None:
    bad = sampled("<think>a</think>41", answer="1 2 3 4 5 6 7 8")
    step = collected([bad], [sampled("<think>a</think>41")] * 3)
    config = ReferenceLikelihoodConfig(max_answer_tokens=3)
    after = rewards_of([config]).add(step, 0)
    assert [len(group.samples) for group in after.groups] == [3]
    assert [len(group.failures) for group in after.rejected] == [1]
    assert [(failure.stage, failure.name) for failure in after.failures] == [("reward", "reference_likelihood")]
    with pytest.raises(GenerationError, match="1 of 4 samples of step 1 were lost"):
        rewards_of([config], accepted=0.1).add(step, 0)


class Raises(Confidence):
    def measure(self, samples: Sequence[Answered], policy: Any, renderer: Renderer) -> Sequence[Outcome]:
        del renderer
        policy.entropies([])
        return [1 / len(samples[5:]) for _ in samples]


class ReturnsOne(Confidence):
    def measure(self, samples: Sequence[Answered], policy: Any, renderer: Renderer) -> Sequence[Outcome]:
        del samples, policy, renderer
        return [1.0]


@pytest.mark.parametrize(
    ("plugin", "message"), [(Raises, "division by zero"), (ReturnsOne, "`measure` returned 1 results for 2")]
)
def test_a_reward_that_fails_loses_samples_and_says_whose_they_are(
    plugin: type[Confidence], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    REWARDS.names()
    monkeypatch.setitem(REWARDS._plugins, "confidence", plugin)
    after = rewards_of([ConfidenceConfig(name="sure")], accepted=1.0).add(collected([sampled("a"), sampled("b")]), 0)
    assert [(failure.stage, failure.name) for failure in after.failures] == [("reward", "sure")] * 2
    assert all(message in failure.error for failure in after.failures)


def test_a_policy_that_fails_ends_the_run_with_its_own_error() -> None:
    class Broken:
        def ask(self, *_: Any) -> Any:
            raise OSError("a rank is gone")

    made = rewards_of([ConfidenceConfig()], accepted=1.0)
    made._forward = EngineForward(Broken())  # type: ignore[arg-type]
    with pytest.raises(OSError, match="a rank is gone"):
        made.add(collected([sampled("a")]), 0)


# ---- configurations ------------------------------------------------------------------------------


BASE: dict[str, Any] = {
    "steps": 2,
    "model": {"path": "model"},
    "data": {"max_prompt_tokens": 64, "sources": [{"path": "train.jsonl"}]},
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 24},
    "resources": {"device": "cpu", "devices_per_node": 1, "device_mapping": {"training": "0", "inference": "0"}},
}


INNER = {"type": "composite", "name": "inner", "use": ["length", "confidence"]}


def test_no_worker_is_started_for_them() -> None:
    config = RLVRConfig.from_values({**BASE, "rewards": {"use": ["confidence"]}})
    assert config.scoring == ()
    assert [reward.type for reward in config.policy_rewards] == ["confidence"]
    assert config.processes == {}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rollout": {**BASE["rollout"], "drop_zero_variance_groups": True, "max_oversampling": 2.0}}, "are dropped"),
        ({"algorithm": {"advantage": "remax"}}, "'remax' compares with a greedy answer"),
        ({"data": {**BASE["data"], "curriculum": {"type": "difficulty"}}}, "a curriculum goes by rewards"),
        ({"evaluation": {"sources": [{"path": "held_out.jsonl"}]}}, "nothing scores 'held_out'"),
        ({"training": {"max_tokens_per_micro_batch": 100}}, r"max_answer_tokens"),
        ({"rewards": {"use": ["confidence"], "pools": {"a": {"rewards": ["confidence"]}}}}, "not a worker's"),
        (
            {"rewards": {"use": [{"type": "composite", "use": ["confidence", "math"]}]}},
            "list it in rewards.use itself",
        ),
        (
            {"rewards": {"use": [{"type": "composite", "use": ["math", INNER]}]}},
            "list it in rewards.use itself",
        ),
    ],
)
def test_what_needs_their_values_earlier_is_refused(changed: dict[str, Any], message: str) -> None:
    values = {**BASE, "rewards": {"use": ["reference_likelihood"]}, **changed}
    with pytest.raises(ValidationError, match=message):
        RLVRConfig.from_values(values)


def test_an_evaluation_with_a_reward_of_its_own() -> None:
    use = [{"type": "confidence", "sources": ["train"]}, {"type": "math", "sources": ["held_out"]}]
    held_out = {"sources": [{"path": "held_out.jsonl"}]}
    assert RLVRConfig.from_values({**BASE, "rewards": {"use": use}, "evaluation": held_out}).scoring != ()


def test_other_pipelines_refuse_them() -> None:
    values = {key: value for key, value in BASE.items() if key not in ("steps", "rollout")}
    iteration = {"prompts_per_iteration": 2, "samples_per_prompt": 2, "max_response_tokens": 24}
    online = {**values, "steps": 2, "rollout": iteration, "pairs": {"pairs_per_step": 2}}
    with pytest.raises(ValidationError, match="which pipeline: online_dpo does not do"):
        OnlineDPOConfig.from_values({**online, "rewards": {"use": ["confidence"]}})
    episodes = {"groups_per_step": 2, "episodes_per_group": 2, "max_turns": 2, "max_response_tokens": 8}
    agentic = {key: value for key, value in values.items() if key != "data"} | {"rollout": episodes, "steps": 2}
    agentic["environments"] = [{"id": "roll_like/Sokoban-v0"}]
    with pytest.raises(ValidationError, match="which pipeline: agentic does not do"):
        AgenticConfig.from_values({**agentic, "rewards": {"use": ["confidence"]}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "42"}, "should hold {answer} once"),
        ({"likelihood": "logprob"}, "set a number below those of bad answers"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReferenceLikelihoodConfig(**settings)
