"""What sampling kept of the vocabulary, from the engine to the trainer: both find the same log-probabilities."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from chat_templates import renderer
from config_files import MINIMAL, changed
from engine_thread import float_spec
from test_config_effect import ON_POLICY_DISTILL
from test_config_rules import CUDA
from test_rollout_replay import recorded, replaying
from tests_support import ragged_policy_samples, task, with_kept

from roll_like.agents.conversation import Conversation
from roll_like.algorithms.advantages.base import policy_samples
from roll_like.algorithms.distillation.on_policy import with_prompt
from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check.model import check_kept
from roll_like.config.training import TrainingConfig
from roll_like.data.kept import kept_tokens
from roll_like.errors import ConfigError, GenerationError
from roll_like.inference.hf.config import HFConfig
from roll_like.inference.hf.engine import HFEngine
from roll_like.inference.interface import GenerateRequest, Generation, Sampling
from roll_like.inference.kept import told_kept
from roll_like.inference.vllm.arguments import engine_arguments, known_arguments
from roll_like.inference.vllm.config import VLLMConfig
from roll_like.inference.vllm.engine import drawing
from roll_like.models.load import resolve_model
from roll_like.models.modules import load_causal_lm
from roll_like.policy_gradient import start
from roll_like.rollout.replay import ReplayedRollouts
from roll_like.rollout.scheduler import _trajectory
from roll_like.training.interface import RankModel
from roll_like.training.language_model import LanguageModelObjective
from roll_like.training.layout import micro_batches, per_sample
from roll_like.training.policy import PolicyModule
from roll_like.types import Group, Scored, Task

LAYOUT: Any = {"max_tokens": 60, "share_prompts": True}
TRUNCATIONS: list[dict[str, Any]] = [
    {"top_p": 0.6},
    {"top_k": 7},
    {"min_p": 0.4},
    {"top_p": 0.8, "top_k": 50, "min_p": 0.1, "temperature": 0.7},
]


async def generations(model: Path, **sampling: Any) -> list[Generation]:
    engine = HFEngine(HFConfig(max_running=4), replace(float_spec(model), returns_kept=True))
    await engine.start()
    found: list[Any] = []
    try:
        prompt = np.arange(20, 60, dtype=np.int32)
        options = Sampling(max_tokens=12, **sampling)
        await engine.submit(
            [GenerateRequest(request_id=f"{seed}", prompt_ids=prompt, sampling=options, seed=seed) for seed in range(4)]
        )
        while len(found) < 4:
            found += await engine.poll(20.0)
    finally:
        await engine.close()
    return found


def trained_logprobs(model: Path, task_of: Task, sampled: list[Generation], temperature: float) -> list[np.ndarray]:
    """What the trainer finds of samples, in two micro-batches of rows that share a prompt."""
    scored = tuple(
        Scored(trajectory=_trajectory(task_of, index, each), reward=0.0, rewards={}, details={}, weights={})
        for index, each in enumerate(sampled)
    )
    samples = policy_samples([Group(task=task_of, samples=scored, failures=())])
    module = PolicyModule(load_causal_lm(model, "float32"), chunk_tokens=5, chunk_vocab=100)
    objective: Any = LanguageModelObjective(settings=TrainingConfig(), temperature=temperature)
    shards = micro_batches(samples, ranks=1, max_tokens=90, share_prompts=True)
    held = RankModel(module=module, forward=module, device=torch.device("cpu"))
    with torch.no_grad():
        found = [[objective.forward(held, batch) for batch in shard] for shard in shards]
    return per_sample(samples, shards, found)


@pytest.mark.parametrize("sampling", TRUNCATIONS)
async def test_engine_and_trainer_find_the_same_log_probabilities(tiny_model: Path, sampling: dict[str, Any]) -> None:
    sampled = await generations(tiny_model, **sampling)
    owner = replace(task(), prompt_ids=np.arange(20, 60, dtype=np.int32))
    temperature = sampling.get("temperature", 1.0)
    found = trained_logprobs(tiny_model, owner, sampled, temperature)
    over_all = trained_logprobs(tiny_model, owner, [replace(each, kept=None) for each in sampled], temperature)
    for generation, mine, whole in zip(sampled, found, over_all, strict=True):
        assert generation.kept is not None
        assert len(generation.kept) == len(generation.token_ids)
        assert (generation.kept.counts > 0).all()
        np.testing.assert_allclose(mine[40:], generation.logprobs, atol=1e-5)
        assert np.abs(whole[40:] - generation.logprobs).max() > 0.05


async def test_what_all_tokens_can_be_drawn_from_is_not_listed(tiny_model: Path) -> None:
    for sampling in ({}, {"temperature": 0.0, "top_k": 3}):
        for generation in await generations(tiny_model, **sampling):
            assert generation.kept is not None
            assert not generation.kept.ids.size
            assert generation.kept.counts.tolist() == [0] * len(generation.token_ids)


def test_an_episode_of_several_turns_has_what_each_token_was_drawn_from() -> None:
    conversation = Conversation(renderer("chatml"))
    prompt = conversation.start([{"role": "user", "content": "Which way?"}])
    conversation.sampled([40, 41], [-1.0] * 2, kept=kept_tokens([[40, 50], []], [40, 41]))
    conversation.sampled([42], [-1.0], kept=kept_tokens([[42]], [42]))  # the same turn goes on
    seen = len(conversation.observe([{"role": "user", "content": "You hit a wall."}]))
    conversation.sampled([43], [-1.0], kept=kept_tokens([[9, 10, 43]], [43]))
    conversation.observe([{"role": "user", "content": "Again."}])
    (segment,) = conversation.copy().segments()
    assert segment.kept is not None
    wanted = [0] * (seen + 1)
    wanted[len(prompt) : len(prompt) + 3], wanted[-1] = [2, 0, 1], 3
    assert segment.kept.counts.tolist() == wanted
    assert segment.kept.ids.tolist() == [40, 50, 42, 9, 10, 43]


def test_micro_batches_have_what_their_targets_were_drawn_from() -> None:
    samples = with_kept(ragged_policy_samples())
    for batch in [batch for shard in micro_batches(samples, ranks=2, **LAYOUT) for batch in shard]:
        assert batch.kept is not None
        ids = np.split(batch.kept.ids, np.cumsum(batch.kept.counts)[:-1])
        for sample, target, found in zip(batch.sample_ids, batch.target_ids, ids, strict=True):
            kept = samples[sample].kept
            assert kept is not None
            np.testing.assert_array_equal(found, np.split(kept.ids, np.cumsum(kept.counts)[:-1])[target])
    (shard,) = micro_batches(ragged_policy_samples(), ranks=1, **LAYOUT)
    assert all(batch.kept is None for batch in shard)


# ---- configuration ---------------------------------------------------------------------------------


def findings(minimal: dict[str, Any], **changes: Any) -> list[str]:
    return [str(each) for each in check_kept(RLVRConfig.model_validate(changed(minimal, **changes)))]


def test_engines_that_do_not_tell_what_they_kept_are_refused_before_the_run() -> None:
    assert findings(MINIMAL) == []
    for kind in ("hf", "vllm"):
        assert findings(MINIMAL, inference={"type": kind}, rollout__top_p=0.9) == []
    (refused,) = findings(CUDA, inference={"type": "sglang"}, rollout__top_p=0.9, rollout__min_p=0.1)
    assert refused.startswith(
        "error: rollout.top_p: 0.9 and rollout.min_p: 0.1 leaves tokens out when answers are sampled"
    )
    assert "inference.type: sglang does not tell which: this engine does not tell them" in refused
    assert "set rollout.top_p: 1, rollout.min_p: 0, and for less exploration lower rollout.temperature" in refused
    assert refused.endswith("or use inference.type: vllm or hf")


def test_vllm_needs_a_bound_on_gpus() -> None:
    (refused,) = findings(CUDA, inference={"type": "vllm"}, rollout__top_p=0.9)
    assert "only where every request is greedy or has a top_k, which is missing: rollout.top_k" in refused
    assert "or set rollout.top_k: 512" in refused
    assert findings(CUDA, inference={"type": "vllm"}, rollout__top_p=0.9, rollout__top_k=512) == []
    evaluation: dict[str, Any] = {"sources": [{"path": "data/eval.jsonl"}], "every": 1}
    bounded = {"inference": {"type": "vllm"}, "rollout__top_k": 512}
    (refused,) = findings(CUDA, **bounded, evaluation=evaluation)
    assert "which is missing: evaluation.top_k" in refused
    assert findings(CUDA, **bounded, evaluation={**evaluation, "top_k": 512}) == []
    assert findings(CUDA, **bounded, evaluation={**evaluation, "temperature": 0, "samples_per_prompt": 1}) == []
    evaluation = {"benchmarks": ["gsm8k", "aime24"]}  # the first is greedy, and nothing else is evaluated
    (refused,) = findings(CUDA, **bounded, evaluation=evaluation)
    assert "which is missing: evaluation.benchmarks.1.top_k" in refused
    assert "or set evaluation.benchmarks.1.top_k: 512" in refused
    evaluation = {"benchmarks": ["gsm8k", {"name": "aime24", "top_k": 512}]}
    assert findings(CUDA, **bounded, evaluation=evaluation) == []


def test_what_is_sampled_beside_the_policy_needs_no_bound_of_its_own() -> None:
    bounded = {"inference": {"type": "vllm", "max_model_len": 2048}, "rollout__top_k": 512, "training__lora": {}}
    evaluation = {"sources": [{"path": "data/eval.jsonl"}], "top_k": 512, "base_model": True}
    assert findings(CUDA, **bounded, evaluation=evaluation) == []
    judge: dict[str, Any] = {"type": "llm_judge", "judges": [{"url": "base", "model": "base"}], "rubric": "?"}
    assert findings(CUDA, **bounded, rewards={"use": [judge]}) == []  # greedy
    judge["judges"][0]["temperature"] = 0.5
    (refused,) = findings(CUDA, **bounded, rewards={"use": [judge]})
    assert refused.endswith("or set rewards.use.0.judges.0.temperature: 0")


def test_a_model_that_is_only_measured_needs_no_bound(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {
        "inference": {"type": "vllm"},
        "rollout__top_p": 0.9,
        "model": {"path": str(tiny_model)},
    }
    config = RLVRConfig.model_validate(changed(CUDA, **settings))
    cluster, resources = MagicMock(), Mock()
    monkeypatch.setattr(start, "Cluster", cluster)
    with ExitStack() as stack:
        begin = partial(start.start_inference, config, resolve_model(config.model), resources, stack, Mock())
        with pytest.raises(ConfigError, match=r"which is missing: rollout\.top_k"):
            begin()
        begin(follows=False)
    _, spec = cluster.call_args.kwargs["arguments"](0)
    assert not spec.returns_kept


@pytest.mark.parametrize(
    ("trackers", "watched", "counts"),
    [(["prometheus"], True, True), (["prometheus"], False, False), ([], True, False)],
)
def test_engines_count_where_somebody_reads_it(
    trackers: list[str], watched: bool, counts: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"model": {"path": str(tiny_model)}, "metrics": {"trackers": trackers}}
    config = RLVRConfig.model_validate(changed(CUDA, **settings))
    cluster = MagicMock()
    monkeypatch.setattr(start, "Cluster", cluster)
    with ExitStack() as stack:
        start.start_inference(config, resolve_model(config.model), Mock(), stack, Mock(), watched=watched)
    _, spec = cluster.call_args.kwargs["arguments"](0)
    assert spec.returns_metrics is counts


def test_vllm_is_asked_for_them(tiny_model: Path) -> None:
    spec = replace(float_spec(tiny_model), returns_kept=True)
    assert engine_arguments(VLLMConfig(), spec)["additional_config"] == {"roll_like_tells_kept": True}
    on_gpus = engine_arguments(VLLMConfig(), replace(spec, device="cuda"))
    assert on_gpus["return_sampling_mask"] is True
    assert "additional_config" not in on_gpus
    assert {"additional_config", "return_sampling_mask"} <= known_arguments()
    greedy, random = Sampling(temperature=0, max_tokens=1), Sampling(temperature=0.7, top_k=9, max_tokens=1)
    assert drawing(greedy, replace(spec, device="cuda")) == {"temperature": 1.0, "top_k": 1}
    assert drawing(random, replace(spec, device="cuda")) == {"temperature": 0.7, "top_k": 9}
    assert drawing(greedy, spec) == {"temperature": 0, "top_k": 0}


def test_an_engine_that_tells_too_little_fails_the_request(tiny_model: Path) -> None:
    spec = replace(float_spec(tiny_model), returns_kept=True)
    request = GenerateRequest(
        request_id="one", prompt_ids=np.arange(3, dtype=np.int32), sampling=Sampling(max_tokens=2), seed=0
    )
    assert told_kept([[4, 5]], request, [4], replace(spec, returns_kept=False)) is None
    nothing = told_kept(None, request, [], spec)  # aborted before the first token
    assert nothing is not None
    assert len(nothing) == 0
    with pytest.raises(GenerationError, match="over what request one kept: it told what it kept for 0"):
        told_kept(None, request, [4], spec)


def test_a_replay_needs_what_was_kept(tmp_path: Path) -> None:
    recorded(tmp_path)
    config = replaying(tmp_path, rollout__top_p=0.9)
    assert config.replay is not None
    assert [str(each) for each in check_kept(config)] == []
    rollouts = ReplayedRollouts(config, config.replay, vocabulary=100, note=print)
    with pytest.raises(ConfigError, match=r"was recorded without the tokens that rollout\.top_p kept"):
        rollouts.collect(0)


def test_a_teacher_with_another_prompt_normalises_over_the_same_tokens() -> None:
    sample = with_kept(ragged_policy_samples())[0]
    shown = with_prompt(sample, np.arange(9, dtype=np.int32))
    assert sample.kept is not None
    assert shown.kept is not None
    counts = sample.kept.counts[sample.prompt_length :]
    assert shown.kept.counts.tolist() == [0] * 9 + counts.tolist()
    np.testing.assert_array_equal(shown.kept.ids, sample.kept.ids)


def test_a_teacher_with_another_vocabulary_is_refused() -> None:
    teachers = {"teachers": {"one": {"path": "org/teacher", "other_tokenizer": True}}}
    OnPolicyDistillConfig.model_validate(changed(ON_POLICY_DISTILL, **teachers))
    with pytest.raises(ConfigError, match=r"rollout\.top_p leaves tokens of the student's vocabulary out"):
        OnPolicyDistillConfig.model_validate(changed(ON_POLICY_DISTILL, **teachers, rollout__top_p=0.9))
