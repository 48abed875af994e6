"""What an asynchronous schedule cannot be combined with, and what a check says of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from config_files import MINIMAL, MINIMAL_AGENTIC, changed, refused
from test_config_distill import ON_POLICY
from test_config_online_dpo import MINIMAL as ONLINE_DPO

from roll_like import AgenticConfig, RLVRConfig
from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.online_dpo.config import OnlineDPOConfig
from roll_like.check.machine import doubtful_staleness
from roll_like.config.inference import EngineCapabilities
from roll_like.inference.hf.config import HFConfig

DISJOINT = {"device": "cpu", "devices_per_node": 2, "device_mapping": {"training": "0", "inference": "1"}}


def asynchronous(
    base: dict[str, Any] = MINIMAL, schedule: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    settings = {"type": "async", "max_staleness": 2, **(schedule or {})}
    return changed(base, **{"resources": DISJOINT, "rollout__schedule": settings, **more})


BEHAVIOUR = {"old_logprobs": "behaviour", "correction": {"type": "none"}}
SHARED_GPU = {"device": "cuda", "devices_per_node": 1, "device_mapping": {"training": "0", "inference": "0"}}


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (RLVRConfig, asynchronous()),
        (RLVRConfig, asynchronous(resources=MINIMAL["resources"])),
        (RLVRConfig, asynchronous(schedule={"ahead": 2.0})),
        (RLVRConfig, asynchronous(algorithm=BEHAVIOUR)),
        (RLVRConfig, asynchronous(algorithm={**BEHAVIOUR, "loss": {"type": "reinforce", "importance_weight": True}})),
        (RLVRConfig, asynchronous(inference={"type": "vllm"}, resources=SHARED_GPU)),
        (AgenticConfig, asynchronous(MINIMAL_AGENTIC, rollout__redundant_episodes=2)),
        (OnPolicyDistillConfig, asynchronous(ON_POLICY, distillation={"use": "advantage"})),
    ],
)
def test_what_can_be_asynchronous(config: type, values: dict[str, Any]) -> None:
    assert config.from_values(values).rollout.schedule.type == "async"


@pytest.mark.parametrize(
    ("config", "values", "key", "reason", "way_out"),
    [
        (
            RLVRConfig,
            asynchronous(algorithm={"correction": {"type": "none"}}),
            "algorithm.correction.type",
            "samples are up to 2 versions old, and `none` treats them as the current policy's own",
            "set truncated (or masked), or algorithm.old_logprobs: behaviour",
        ),
        *(
            (
                RLVRConfig,
                asynchronous(algorithm={**BEHAVIOUR, "loss": loss}),
                "algorithm.old_logprobs",
                f"the loss's ratio, which {loss['type']} does not use",
                "set auto with algorithm.correction.type: truncated",
            )
            for loss in ({"type": "reinforce"}, {"type": "gpg"}, {"type": "raft"})
        ),
        *(
            (
                RLVRConfig,
                asynchronous(inference=inference, resources=SHARED_GPU),
                "rollout.schedule.type",
                f"engines share the GPUs 0 with models, and keep their memory and requests there while these compute "
                f"({why})",
                "give resources.device_mapping.inference GPUs of its own",
            )
            for inference, why in (
                ({"type": "vllm", "sleep": False, "gpu_memory_utilization": 0.3}, "inference.sleep: false"),
                ({"type": "hf"}, "the engine 'hf' cannot free it"),
            )
        ),
        (
            RLVRConfig,
            asynchronous(rollout__redundant_samples=1),
            "rollout.redundant_samples",
            "no step waits for the slow ones",
            "set it to 0",
        ),
        (
            RLVRConfig,
            asynchronous(schedule={"ahead": 2.5}),
            "rollout.schedule.async",
            "ahead: 2.5 keeps more groups waiting than can be trained while they are at most max_staleness: 2",
            "lower ahead to 2, or raise max_staleness",
        ),
        (
            RLVRConfig,
            asynchronous(schedule={"max_staleness": 0}),
            "rollout.schedule.async.max_staleness",
            "no group may be older than the weights that it trains",
            "set type: sync",
        ),
        (
            RLVRConfig,
            changed(rollout__schedule="async"),
            "rollout.schedule",
            "a schedule is a mapping with a type",
            "{type: async, max_staleness: 2}",
        ),
        (
            OnPolicyDistillConfig,
            asynchronous(ON_POLICY, distillation={"use": "loss"}),
            "rollout.schedule.type",
            "the teachers' divergence is not weighted for samples of older policies",
            "set distillation.use: advantage, distillation.signal: top_k, or type: sync",
        ),
        (
            OnlineDPOConfig,
            asynchronous(ONLINE_DPO),
            "rollout.schedule.type",
            "an iteration trains many steps on pairs of one policy",
            "set type: sync",
        ),
        (
            AgenticConfig,
            asynchronous(MINIMAL_AGENTIC, algorithm={"correction": {"type": "none"}}),
            "algorithm.correction.type",
            "which is biased",
            "algorithm.old_logprobs: behaviour",
        ),
    ],
)
def test_what_cannot_says_why_and_what_to_do(
    config: type, values: dict[str, Any], key: str, reason: str, way_out: str
) -> None:
    found = refused(config.from_values, values)
    assert set(found) == {key}
    assert reason in found[key]
    assert way_out in found[key]


def test_an_engine_that_cannot_pause_needs_devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    can = HFConfig.capabilities
    monkeypatch.setattr(
        HFConfig, "capabilities", EngineCapabilities(weight_transports=can.weight_transports, pause=False)
    )
    message = refused(RLVRConfig.from_values, asynchronous(inference={"type": "hf"}, resources=MINIMAL["resources"]))
    assert set(message) == {"rollout.schedule.type"}
    assert "trainer and engines share the devices 0-1" in message["rollout.schedule.type"]
    assert "the engine 'hf' cannot" in message["rollout.schedule.type"]
    assert "give resources.device_mapping.inference devices of its own, or set type: sync" in str(message)
    RLVRConfig.from_values(asynchronous(inference={"type": "hf"}))
    RLVRConfig.from_values(changed(inference={"type": "hf"}))


def found(**changes: Any) -> list[tuple[str, str, str]]:
    config = RLVRConfig.from_values(asynchronous(**changes))
    return [(finding.level, finding.key, finding.message) for finding in doubtful_staleness(config)]


def test_a_check_says_how_many_updates_samples_lag_behind() -> None:
    ((level, key, message),) = found()
    assert (level, key) == ("note", "rollout.schedule.max_staleness")
    assert "lag 2 optimizer updates behind: 2 versions of 1 each" in message
    ((_, _, message),) = found(algorithm={"updates_per_step": 4})
    assert "lag 11 optimizer updates behind: 2 versions of 4 each, and the 3 before the last of the step" in message
    assert list(doubtful_staleness(RLVRConfig.from_values(MINIMAL))) == []


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"schedule": {"max_staleness": 5}, "algorithm": {"correction": {"reject": {"high": 2}}}}, ["max_staleness"]),
        ({"schedule": {"max_staleness": 4}, "algorithm": {"correction": {"reject": {"high": 2}}}}, []),
        ({"schedule": {"max_staleness": 3}}, ["correction.reject"]),
        ({"schedule": {"max_staleness": 3}, "algorithm": {"old_logprobs": "behaviour"}}, []),
        ({"algorithm": {"advantage": "gae"}, "critic": {}}, ["max_staleness"]),
        ({"schedule": {"max_staleness": 1}, "algorithm": {"advantage": "gae"}, "critic": {}}, []),
    ],
)
def test_a_check_warns_of_staleness_that_may_not_learn(changes: dict[str, Any], warned: list[str]) -> None:
    keys = [key for level, key, _ in found(**changes) if level == "warning"]
    assert len(keys) == len(warned)
    assert all(key.endswith(end) for key, end in zip(keys, warned, strict=True))
