from __future__ import annotations

from typing import Any

import pytest
from config_files import MINIMAL, changed, refused

from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.errors import ConfigError
from roll_like.inference.kept import refuse_untold_kept
from roll_like.inference.vllm.config import VLLMConfig

CUDA: dict[str, Any] = changed(
    resources={"device": "cuda", "devices_per_node": 4, "device_mapping": {"training": "0-3", "inference": "0-3"}},
    training__workers=4,
    inference__type="vllm",
    inference__replicas=2,
)
EVALUATION: dict[str, Any] = {"sources": [{"path": "eval.jsonl"}]}
RUBRIC: dict[str, Any] = {"type": "rubric", "rubric_field": "criteria", "judges": [{"url": "judge", "model": "judge"}]}
#: A judge in a composite within a composite.
GATED_JUDGE: dict[str, Any] = {
    "type": "composite",
    "use": ["exact_match", {"type": "composite", "use": ["exact_match", RUBRIC], "name": "inner"}],
}


def problems(values: dict[str, Any]) -> dict[str, str]:
    """Return each violated key's message."""
    return refused(RLVRConfig.from_values, values)


def test_the_bases_of_these_tests_are_valid() -> None:
    assert RLVRConfig.from_values(MINIMAL).steps == 10
    assert RLVRConfig.from_values(CUDA).training.workers == 4
    assert RLVRConfig.from_values(changed(evaluation=EVALUATION)).evaluation is not None


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        # KL and the reference model
        (
            changed(algorithm={"kl": {"use": "loss"}}),
            "algorithm.kl.use",
            "'loss' compares with a reference model, but there is no `reference` section; add `reference: {}`",
        ),
        (changed(reference={}), "reference", "never used, because algorithm.kl.use is none"),
        (
            changed(resources__device_mapping__reference="0"),
            "resources.device_mapping.reference",
            "no `reference` section",
        ),
        # the critic
        (
            changed(algorithm={"advantage": "gae"}),
            "algorithm.advantage.type",
            "'gae' compares rewards with the values of a critic, but there is no `critic` section; add `critic: {}`",
        ),
        (changed(critic={}), "critic", "never used, because algorithm.advantage 'grpo' needs none"),
        (changed(resources__device_mapping__critic="0"), "resources.device_mapping.critic", "no `critic` section"),
        (
            changed(algorithm={"advantage": "gae"}, critic={"warmup_steps": 10}),
            "critic.warmup_steps",
            "the policy does not learn in the first 10 steps, and the run has 10",
        ),
        # shaping and losses
        (
            changed(
                rollout__samples_per_prompt=1,
                algorithm={"advantage": "reinforce", "reward_shaping": {"normalise": {"std": "group"}}},
            ),
            "algorithm.reward_shaping.normalise.std",
            "use batch or running",
        ),
        (
            changed(
                rollout__samples_per_prompt=1,
                algorithm={
                    "advantage": "reinforce",
                    "reward_shaping": {"length_penalty": {"type": "group", "coefficient": 1}},
                },
            ),
            "algorithm.reward_shaping.length_penalty.type",
            "no shortest and longest response",
        ),
        (
            changed(algorithm={"reward_shaping": {"overlong": {"buffer_tokens": 100_000}}}),
            "algorithm.reward_shaping.overlong.buffer_tokens",
            "before the start",
        ),
        (
            changed(algorithm={"advantage": "gdpo", "kl": {"use": "reward"}}, reference={}),
            "algorithm.kl.use",
            "a penalty in the reward is lost; set use: loss",
        ),
        (
            changed(algorithm={"advantage": "gdpo", "reward_shaping": {"clip": 1.0}}),
            "algorithm.reward_shaping",
            "normalise and clip have no effect",
        ),
        (
            changed(algorithm={"advantage": "grpo_process", "reward_shaping": {"clip": 0.3}}),
            "algorithm.reward_shaping",
            "normalise and clip change the reward as a whole",
        ),
        (
            changed(algorithm={"loss": "topr"}),
            "algorithm.old_logprobs",
            "every ratio is 1; set old_logprobs: behaviour",
        ),
        (
            changed(algorithm={"loss": "topr", "old_logprobs": "recompute"}),
            "algorithm.old_logprobs",
            "every ratio is 1; set old_logprobs: behaviour",
        ),
        (
            changed(algorithm={"observation_coefficient": 0.1}),
            "algorithm.observation_coefficient",
            "an answer has one turn",
        ),
        (
            changed(algorithm={"loss": "vespo"}),
            "algorithm.old_logprobs",
            "vespo weighs sequences by the ratio",
        ),
        (
            changed(algorithm={"advantage": "maxrl", "kl": {"use": "reward"}}, reference={}),
            "algorithm.kl.use",
            "takes rewards below 0, and maxrl divides by a group's mean reward",
        ),
        (
            changed(algorithm={"advantage": "maxrl", "reward_shaping": {"normalise": {"mean": "group"}}}),
            "algorithm.reward_shaping.normalise.mean",
            "takes rewards below 0",
        ),
        (
            changed(algorithm={"advantage": "maxrl", "reward_shaping": {"truncated": {"reward": -0.5}}}),
            "algorithm.reward_shaping.truncated.reward",
            "takes rewards below 0",
        ),
        (
            changed(algorithm={"reward_shaping": {"truncated": {}}}),
            "algorithm.reward_shaping.truncated",
            "set one of the two: factor",
        ),
        (
            changed(algorithm={"advantage": "maxrl", "reward_shaping": {"overlong": {"buffer_tokens": 4}}}),
            "algorithm.reward_shaping.overlong",
            "takes rewards below 0",
        ),
        (
            changed(algorithm={"kl": {"importance_weight": True}}),
            "algorithm.kl.importance_weight",
            "there is no KL penalty with use: none",
        ),
        (
            changed(data__curriculum="difficulty", rollout__schedule={"type": "replay", "path": "runs/x"}),
            "data.curriculum",
            "a replay trains on recorded groups",
        ),
        # domains
        (
            changed(domains={"mats": {"rewards": ["ifeval"]}}),
            "domains.mats",
            "no data source is of this domain",
        ),
        (
            changed(
                data__sources=[{"path": "x.jsonl", "domain": "maths"}],
                domains={"maths": {"rewards": ["ifevl", "ifeval"]}},
            ),
            "domains.maths.rewards.0",
            "no reward is called 'ifevl'; did you mean 'ifeval'?",
        ),
        (
            changed(
                data__sources=[{"path": "x.jsonl", "domain": "maths"}],
                domains={"maths": {"rewards": ["math"]}},
                rewards={"use": [{"type": "math", "sources": ["x"]}]},
            ),
            "domains.maths.rewards.0",
            "sets itself which `sources` it scores",
        ),
        (
            changed(
                data__sources=[{"path": "x.jsonl", "domain": "maths"}],
                domains={"maths": {"rewards": ["math"], "drop_zero_variance_groups": True}},
                rewards={"use": [{"type": "math"}]},
            ),
            "domains.maths.drop_zero_variance_groups",
            "allows no replacement",
        ),
        (
            changed(
                data__sources=[{"path": "x.jsonl", "domain": "maths"}],
                domains={"maths": {"rewards": ["math"]}},
                rewards={"use": [{"type": "math"}, {"type": "math", "name": "other"}]},
            ),
            "rewards.use.1",
            "the reward 'other' scores nothing",
        ),
        # reward pools and the judge
        (
            changed(rewards={"use": [{"type": "math"}], "pools": {"slow": {"rewards": ["mth"]}}}),
            "rewards.pools.slow.rewards.0",
            "no reward is called 'mth'; did you mean 'math'?",
        ),
        (
            changed(
                rewards={"use": [{"type": "math"}], "pools": {"a": {"rewards": ["math"]}, "b": {"rewards": ["math"]}}}
            ),
            "rewards.pools.b.rewards.0",
            "is in the pool 'a' already",
        ),
        (
            changed(rewards={"use": [{"type": "math"}], "pools": {"rewards": {"rewards": ["math"]}}}),
            "rewards.pools.rewards",
            "choose another name",
        ),
        (
            changed(rewards={"use": [{"type": "math"}], "pools": {"slow": {"rewards": ["math"], "devices": "7"}}}),
            "rewards.pools.slow.devices",
            "ends after the last device",
        ),
        (changed(judge={"path": "org/judge"}), "judge", "a judge would be loaded and never called"),
        (changed(rewards={"use": [GATED_JUDGE]}), "rewards.use.0.use.1.use.1.judges", "there is no `judge` section"),
        (changed(resources__device_mapping__judge="0"), "resources.device_mapping.judge", "no `judge` section"),
        # groups
        (
            changed(rollout__samples_per_prompt=1),
            "rollout.samples_per_prompt",
            "'grpo' compares a sample with the group",
        ),
        (
            changed(rollout__samples_per_prompt=1, algorithm={"advantage": "rloo"}),
            "rollout.samples_per_prompt",
            "'rloo' compares a sample with the other samples' mean, and a group of one has nothing",
        ),
        (
            changed(rollout__samples_per_prompt=1, algorithm={"advantage": {"type": "dr_grpo"}}),
            "rollout.samples_per_prompt",
            "use algorithm.advantage: reinforce_plus_plus",
        ),
        (
            changed(
                rollout={
                    "prompts_per_step": 8,
                    "samples_per_prompt": 1,
                    "max_response_tokens": 32,
                    "drop_zero_variance_groups": True,
                    "max_oversampling": 2,
                },
                algorithm={"advantage": "reinforce_plus_plus"},
            ),
            "rollout.samples_per_prompt",
            "drop_zero_variance_groups would drop every group",
        ),
        (changed(rollout__temperature=0), "rollout.temperature", "0 is greedy"),
        (changed(rollout__max_in_flight=3), "rollout.max_in_flight", "cannot hold one group of 4"),
        (changed(rollout__samples_per_step=30), "rollout", "8 × 4 = 32"),
        (changed(rollout__drop_zero_variance_groups=True), "rollout", "set max_oversampling above 1"),
        (changed(rollout__save_logprobs=True), "rollout", "set save_tokens: true as well"),
        # batches and lengths
        (
            changed(algorithm={"updates_per_step": 3}),
            "algorithm.updates_per_step",
            "8 prompts cannot be divided into 3 equal updates; use one of 1, 2, 4, 8",
        ),
        (
            changed(
                training__workers=8,
                rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 32},
                resources={
                    "device": "cpu",
                    "devices_per_node": 8,
                    "device_mapping": {"training": "0-7", "inference": "0-7"},
                },
            ),
            "training.workers",
            "one update has 4 samples, fewer than 8 workers",
        ),
        (
            changed(training__max_tokens_per_micro_batch=95),
            "training.max_tokens_per_micro_batch",
            "64 + 32 = 96); set it to 96 or more",
        ),
        (
            changed(algorithm={"kl": {"use": "loss"}}, reference={"max_tokens_per_micro_batch": 95}),
            "reference.max_tokens_per_micro_batch",
            "95 tokens cannot hold one longest sample",
        ),
        (changed(inference={"max_model_len": 95}), "inference.max_model_len", "set it to 96 or more, or leave it out"),
        (
            changed(inference={"max_model_len": 96}, evaluation={**EVALUATION, "max_response_tokens": 33}),
            "inference.max_model_len",
            "evaluation.max_response_tokens = 97",
        ),
        # device_mapping
        (
            changed(resources__device_mapping__training="2-3"),
            "resources.device_mapping.training",
            "nodes × devices_per_node = 1 × 2 = 2, so devices are 0-1",
        ),
        (
            changed(CUDA, resources__device_mapping__inference="2-3"),
            "resources.device_mapping.inference",
            "overlaps training's 0-3 only in part",
        ),
        (changed(CUDA, training__workers=2), "resources.device_mapping.training", "4 GPUs for 2 training workers"),
        (
            changed(CUDA, algorithm={"kl": {"use": "loss"}}, reference={"workers": 2}),
            "resources.device_mapping.reference",
            "4 GPUs for 2 reference workers, and each takes exactly one; set reference.workers: 4",
        ),
        (
            changed(CUDA, inference__replicas=3),
            "resources.device_mapping.inference",
            "cannot be divided evenly among 3",
        ),
        (
            changed(training__workers=4),
            "resources.device_mapping.training",
            "cannot be divided evenly among 4 (training.workers)",
        ),
        (
            changed(
                CUDA,
                resources={
                    "device": "cuda",
                    "nodes": 2,
                    "address": "auto",
                    "devices_per_node": 3,
                    "device_mapping": {"training": "0-1", "inference": "2-5"},
                },
                training__workers=2,
            ),
            "resources.device_mapping.inference",
            "worker 0 of inference would have devices 2-3, across the border between nodes (each has 3)",
        ),
        # devices
        (changed(model__dtype="float16"), "model.dtype", "float16 is slow and overflows on CPU"),
        (
            changed(training={"offload": "optimizer", "zero_stage": 2}),
            "training.offload",
            "resources.device is cpu, where they are already; set offload: none",
        ),
        (
            changed(training__attention="flex"),
            "training.attention",
            "'flex' has a backward pass on GPUs only, and resources.device is cpu; use varlen, or dense",
        ),
        # ranks that share rows
        (
            changed(CUDA, training={"workers": 4, "sequence_parallel": 3}),
            "training.sequence_parallel",
            "4 workers cannot be divided into groups of 3 that share rows; set training.workers to a multiple of 3",
        ),
        (
            changed(CUDA, training={"workers": 4, "sequence_parallel": 2, "attention": "dense"}),
            "training.attention",
            "'dense' computes whole rows with masks, and sequence_parallel: 2 divides rows",
        ),
        (
            changed(CUDA, training={"workers": 4, "sequence_parallel": 2, "max_tokens_per_micro_batch": 47}),
            "training.max_tokens_per_micro_batch",
            "47 tokens on each of 2 ranks cannot hold one longest sample (data.max_prompt_tokens + "
            "rollout.max_response_tokens = 64 + 32 = 96); set it to 48 or more",
        ),
        (
            changed(
                CUDA,
                training={"workers": 8, "sequence_parallel": 2},
                rollout={"prompts_per_step": 1, "samples_per_prompt": 2, "max_response_tokens": 32},
                resources__devices_per_node=8,
                resources__device_mapping__training="0-7",
                resources__device_mapping__inference="0-7",
            ),
            "training.workers",
            "one update has 2 samples, fewer than 4 times 2 workers, so some would have nothing to do; use at most 4",
        ),
        # ranks that divide experts
        (
            changed(CUDA, training={"workers": 4, "expert_parallel": 2}),
            "training.expert_parallel",
            "deepspeed divides no experts among ranks; set training.backend: fsdp2 or megatron, or remove the key",
        ),
        (
            changed(CUDA, training={"workers": 4, "expert_parallel": 3, "backend": "fsdp2", "zero_stage": 3}),
            "training.expert_parallel",
            "4 workers cannot be divided into groups of 3 that divide experts; set training.workers to a multiple of 3",
        ),
        # ranks that divide matrices
        (
            changed(CUDA, training={"workers": 4, "tensor_parallel": 2}),
            "training.tensor_parallel",
            "deepspeed divides no matrices among ranks; set training.backend: fsdp2 or megatron, or remove the key",
        ),
        (
            changed(CUDA, training={"workers": 4, "tensor_parallel": 3, "backend": "fsdp2", "zero_stage": 3}),
            "training.tensor_parallel",
            "4 workers cannot be divided into groups of 3 that divide matrices; set training.workers to a multiple of",
        ),
        (
            changed(
                CUDA,
                training={
                    "workers": 4,
                    "tensor_parallel": 2,
                    "sequence_parallel": 2,
                    "backend": "fsdp2",
                    "zero_stage": 3,
                },
            ),
            "training.sequence_parallel",
            "does not go together with tensor_parallel: 2",
        ),
        (
            changed(
                CUDA,
                training={"workers": 4, "tensor_parallel": 2, "compile": True, "backend": "fsdp2", "zero_stage": 3},
            ),
            "training.compile",
            "tensor_parallel: 2 replaces the forward passes that would be compiled",
        ),
        (
            changed(CUDA, training__offload="optimizer"),
            "training.offload",
            "optimizer needs zero_stage ≥ 1, because DeepSpeed offloads only what ZeRO shards; found zero_stage: 0",
        ),
        (
            changed(CUDA, training={"compile": True, "workers": 4, "zero_stage": 3}),
            "training.compile",
            "which would cut what is compiled to pieces; use zero_stage 2 or less, or backend: fsdp2",
        ),
        (
            changed(CUDA, training={"compile": True, "workers": 4, "lora": {"quantization": "nf4"}}),
            "training.compile",
            "layers are not compiled together with training.lora.quantization, and that is nf4; remove one of the two",
        ),
        (
            changed(CUDA, training={"compile": True, "workers": 4, "sequence_parallel": 2}),
            "training.compile",
            "layers are not compiled together with training.sequence_parallel, and that is 2; remove one of the two",
        ),
        (
            changed(CUDA, training__compile=True, algorithm={"router_replay": True}),
            "training.compile",
            "layers are not compiled together with algorithm.router_replay; remove one of the two",
        ),
        (changed(CUDA, resources__nodes=2), "resources.address", "joins a Ray cluster that is already there"),
        (changed(CUDA, resources__address="ray://10.0.0.1:10001"), "resources.address", "with `ray job submit`"),
        (changed(CUDA, resources__address="10.0.0.1"), "resources.address", "10.0.0.1:6379. From elsewhere"),
        (changed(CUDA, resources__address=""), "resources.address", "expected `auto` on a node"),
        (
            changed(CUDA, inference__sleep=False, inference__gpu_memory_utilization=0.9),
            "inference.sleep",
            "would keep 90% of their memory",
        ),
        (
            changed(CUDA, inference={"type": "hf", "replicas": 2}),
            "inference.replicas",
            "cannot divide a model among GPUs, and each replica would have 2; set it to 4",
        ),
        (
            changed(inference={"engine_args": {"seed": 3}}),
            "inference.engine_args",
            "'seed' is set by `seed`; remove it from engine_args",
        ),
        (
            changed(inference={"engine_args": {"load_format": "dummy"}}),
            "inference.engine_args",
            "'load_format' cannot be changed: weights are loaded from model.path; remove it from engine_args",
        ),
        # rewards
        (
            changed(rewards={"use": [{"type": "ifeval"}, {"type": "math", "sources": ["trian"]}]}),
            "rewards.use.1.sources",
            "no data source is called 'trian'; known: train",
        ),
        (
            changed(
                data={"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl"}], "max_prompt_tokens": 64},
                rewards={"use": [{"type": "ifeval", "sources": ["a"]}]},
            ),
            "rewards.use",
            "no reward scores the data source 'b'",
        ),
        (
            changed(rewards={"use": ["math", {"type": "ifeval", "domains": ["forms*"]}]}),
            "rewards.use.1.domains",
            "no data source is of the domain 'forms*'; known: train",
        ),
        (
            changed(
                data={
                    "sources": [{"path": "a.jsonl", "domain": "forms"}, {"path": "b.jsonl"}],
                    "max_prompt_tokens": 64,
                },
                rewards={"use": [{"type": "ifeval", "domains": ["form*"]}]},
            ),
            "rewards.use",
            "no reward scores the data source 'b'; add it to the `sources` of one, or leave `sources` out to score "
            "all; its domain is 'b'",
        ),
        (
            changed(
                rewards={"use": [{"type": "ifeval", "domains": ["train"]}]}, domains={"train": {"rewards": ["ifeval"]}}
            ),
            "domains.train.rewards.0",
            "the reward 'ifeval' sets itself which `domains` it scores; remove that, or leave it out here",
        ),
        (
            changed(evaluation={"sources": [{"path": "x.jsonl", "domain_field": "k", "domain_weights": {"a": 1}}]}),
            "evaluation.sources.0.domain_weights",
            "an evaluation goes through every row once, so weights have no effect; remove them",
        ),
        (
            changed(rewards={"use": ["ifeval", {"type": "ifeval", "mode": "loose"}]}),
            "rewards.use",
            "two rewards are called 'ifeval'; give each a `name` of its own",
        ),
        (changed(rewards={"use": [{"type": "ifeval", "weight": 0}]}), "rewards.use", "every reward has weight 0"),
        (
            changed(algorithm={"advantage": {"type": "pkpo", "k": 8}}),
            "rollout.samples_per_prompt",
            "algorithm.advantage 'pkpo' compares 8 samples at a time, and a group has 4",
        ),
        # data and evaluation
        (
            changed(data={"sources": [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}], "max_prompt_tokens": 64}),
            "data",
            "two sources are called 'x'",
        ),
        (
            changed(evaluation={"sources": [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}]}),
            "evaluation.sources",
            "two evaluation sources are called 'x'",
        ),
        (
            changed(evaluation={**EVALUATION, "temperature": 0}),
            "evaluation.samples_per_prompt",
            "at temperature 0 all 4 samples of a group are equal; set it to 1, or evaluation.temperature above 0",
        ),
        (
            changed(evaluation={**EVALUATION, "before": False, "after": False}),
            "evaluation",
            "it would never run",
        ),
    ],
)
def test_a_wrong_combination_says_why_and_what_to_use(values: dict[str, Any], key: str, expected: str) -> None:
    found = problems(values)
    assert key in found, found
    assert expected in found[key]
    assert list(found) == [key], "only this key is wrong"


@pytest.mark.parametrize(
    "values",
    [
        changed(algorithm={"kl": {"use": "loss"}}, reference={}),
        changed(rollout__samples_per_prompt=1, algorithm={"advantage": "reinforce_plus_plus"}),
        changed(algorithm={"updates_per_step": 8}),
        changed(training__max_tokens_per_micro_batch=96),
        changed(resources__device_mapping={"training": "0", "inference": "1"}),
        changed(inference={"sleep": True}, training={"sleep": True}),
        changed(training__workers=2, inference={"replicas": 2}),
        changed(CUDA, inference__replicas=4),
        changed(CUDA, inference__replicas=1),
        changed(CUDA, inference__sleep=False, inference__gpu_memory_utilization=0.5),
        changed(evaluation={**EVALUATION, "temperature": 0, "samples_per_prompt": 1}),
        changed(rewards={"use": [{"type": "ifeval", "sources": ["train"]}]}),
        changed(rewards={"use": [GATED_JUDGE]}, judge={"path": "org/judge"}),
    ],
)
def test_right_combinations_are_accepted(values: dict[str, Any]) -> None:
    RLVRConfig.from_values(values)


def test_all_violations_are_reported_at_once() -> None:
    found = problems(changed(rollout__temperature=0, reference={}, model__dtype="float16"))
    assert set(found) == {"rollout.temperature", "reference", "model.dtype"}


def test_one_seed_gives_one_sample_where_kernels_and_seeds_do() -> None:
    assert RLVRConfig.from_values(changed(CUDA, inference__deterministic=True)).inference.wants_seeds
    found = problems(changed(CUDA, inference__deterministic=True, rollout__seeded=False))
    assert "samples without seeds differ from run to run" in found["inference.deterministic"]
    found = problems(changed(inference={"type": "vllm", "deterministic": True}))
    assert "for GPUs only; use inference.type: hf" in found["inference.deterministic"]


def test_what_is_guessed_is_checked_exactly_or_refused() -> None:
    guessing = {"type": "vllm", "speculative": {"method": "ngram"}}
    assert RLVRConfig.from_values(changed(inference=guessing)).inference.speculates
    found = problems(changed(inference=guessing, rollout__min_p=0.1))
    assert "does not check guessed tokens by min_p" in found["rollout.min_p"]
    found = problems(changed(inference=guessing, evaluation={**EVALUATION, "min_p": 0.1}))
    assert "set it to 0, or remove inference.speculative" in found["evaluation.min_p"]
    found = problems(changed(CUDA, inference__deterministic=True, inference__speculative={"method": "ngram"}))
    assert "each guess draws random numbers" in found["inference.speculative"]
    with pytest.raises(ConfigError, match="of guessed tokens; remove inference"):
        refuse_untold_kept(RLVRConfig.from_values(changed(inference=guessing, rollout__top_p=0.9)))
    wrong = [
        ({"prompt_lookup_min": 5}, "nothing would ever be guessed"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max is not read with method: suffix"),
        ({"method": "ngram", "model": "small"}, "model is not read with method: ngram"),
        ({"method": "draft"}, "needs a model that guesses"),
        ({"method": "eagle3"}, "method: eagle3 needs a model that guesses"),
        ({"method": "mtp", "model": "small"}, "model is not read with method: mtp"),
        ({"num_speculative_tokens": 200}, "128"),
        ({"method": "eagle"}, "'ngram', 'suffix', 'draft', 'eagle3' or 'mtp'"),
    ]
    for section, message in wrong:
        found = problems(changed(inference={"type": "vllm", "speculative": section}))
        assert any(message in each for each in found.values()), found


def test_8_bits_are_those_that_the_hardware_has() -> None:
    assert RLVRConfig.from_values(changed(inference={"type": "vllm", "quantization": "int8"})).inference.quantizes
    assert RLVRConfig.from_values(changed(CUDA, inference__quantization="fp8")).inference.quantizes
    found = problems(changed(inference={"type": "vllm", "quantization": "fp8"}))
    assert "weights are quantised to int8, and found fp8" in found["inference.quantization"]
    found = problems(changed(CUDA, inference__quantization="int8"))
    assert "weights are quantised to fp8, and found int8" in found["inference.quantization"]
    engine = VLLMConfig(quantization="int8")
    assert engine.sends_adapters is False
    assert [each.path for each in engine.model_violations(experts=True)] == [("inference", "quantization")]
    found = problems(changed(inference={"type": "vllm", "quantization": "int8", "lora": True}, training__lora={}))
    assert "set inference.lora: false" in found["inference.quantization"]
    found = problems(
        changed(inference={"type": "vllm", "quantization": "int8"}, algorithm__correction={"type": "none"})
    )
    assert "set truncated (or masked)" in found["algorithm.correction.type"]
    for kind, kept, wrong in (("vllm", "fp8", True), ("sglang", "fp8_e5m2", True), ("vllm", "auto", False)):
        engine = {"type": kind, "replicas": 2, "engine_args": {"kv_cache_dtype": kept}}
        assert RLVRConfig.from_values(changed(CUDA, inference=engine)).inference.quantizes is None
        values = changed(CUDA, inference=engine, algorithm__correction={"type": "none"})
        if wrong:
            message = problems(values)["algorithm.correction.type"]
            assert f"the engine samples with keys and values in {kept}, which is another policy" in message
        else:
            RLVRConfig.from_values(values)
