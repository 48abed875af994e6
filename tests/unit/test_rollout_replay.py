"""Recorded rollouts come back step by step; what does not fit is said before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from config_files import MINIMAL, changed
from test_rollout_source import collected
from test_rollout_storage import assert_same
from test_run_state import FakeMetrics
from tests_support import group, task

from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.online_dpo.config import OnlineDPOConfig
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.check.machine import check_replay
from roll_like.check.plan import plan
from roll_like.config.rollout import ReplaySchedule
from roll_like.config.run import GuardsConfig, ProfileConfig
from roll_like.errors import CheckpointError, ConfigError
from roll_like.inference.weight_transfer.sync import VersionCounter
from roll_like.rollout import storage
from roll_like.rollout.replay import ReplayedRollouts, require_recorded, tokens_stem
from roll_like.rollout.storage import has_groups, write_groups
from roll_like.run.checkpoint import CheckpointStore
from roll_like.run.signals import StopSignal
from roll_like.run.snapshots import Snapshots
from roll_like.run.state import RunState
from roll_like.types import Origin


def recorded(run: Path, steps: int = 2, groups: int = 2) -> list[Any]:
    (run / "rollouts").mkdir(parents=True)
    written = [[group(task(10 * step + index), [0.0, 1.0]) for index in range(groups)] for step in range(steps)]
    for step, members in enumerate(written):
        write_groups(tokens_stem(run, step + 1), members)
    return written


def replaying(path: Path, *, steps: int = 2, groups: int = 2, **changes: Any) -> RLVRConfig:
    schedule = {"type": "replay", "path": str(path)}
    return RLVRConfig.model_validate(
        changed(steps=steps, rollout__schedule=schedule, rollout__prompts_per_step=groups, **changes)
    )


def source(config: RLVRConfig, vocabulary: int = 100) -> tuple[ReplayedRollouts, list[str]]:
    notes: list[str] = []
    assert config.replay is not None
    return ReplayedRollouts(config, config.replay, vocabulary=vocabulary, note=notes.append), notes


def test_each_step_has_the_groups_that_were_recorded(tmp_path: Path) -> None:
    written = recorded(tmp_path)
    rollouts, notes = source(replaying(tmp_path))
    for step in (1, 0):  # a resumed run begins anywhere
        found = rollouts.collect(step)
        assert_same(list(found.groups), written[step])
        assert (found.tokens, found.started, found.rejected, found.unfinished) == (12, 2, (), ())
    assert not notes
    assert rollouts.state() == {}


def test_another_number_of_groups_is_noted_once(tmp_path: Path) -> None:
    recorded(tmp_path, groups=3)
    rollouts, notes = source(replaying(tmp_path))
    assert [len(rollouts.collect(step).groups) for step in (0, 1)] == [3, 3]
    assert len(notes) == 1
    assert "has 3 groups, and rollout.prompts_per_step is 2" in notes[0]


def test_a_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path)
    rollouts, _ = source(replaying(tmp_path), vocabulary=5)
    rollouts.collect(0)  # its highest token is 4
    rollouts, _ = source(replaying(tmp_path), vocabulary=4)
    with pytest.raises(ConfigError, match=r"token 4 in task 'fake/0', and the model's vocabulary ends at 3"):
        rollouts.collect(0)


def test_steps_that_were_not_recorded_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*absent"):
        require_recorded(tmp_path / "absent", 1)
    with pytest.raises(ConfigError, match=r"no rollouts with tokens\n.*save_tokens: true"):
        require_recorded(tmp_path, 1)
    recorded(tmp_path, steps=3)
    require_recorded(tmp_path, 3)
    config = replaying(tmp_path, steps=4)
    assert config.replay is not None
    (finding,) = check_replay(config, config.replay)
    assert (finding.level, finding.key) == ("error", "rollout.schedule.path")
    assert "of 3 steps, and steps: 4 asks for more; set steps: 3" in finding.message


def test_a_replay_has_a_trainer_and_nothing_else(tmp_path: Path) -> None:
    config = replaying(tmp_path, resources__device_mapping={"training": "0", "inference": "1"})
    assert [role.name for role in config.roles] == ["training"]
    assert config.processes == {}
    assert plan(config).placement == "trainer only"
    sampled = RLVRConfig.model_validate(MINIMAL)
    assert sampled.replay is None
    assert [role.name for role in sampled.roles] == ["training", "inference"]
    counter = VersionCounter(4)
    assert [(report.version, report.metrics) for report in (counter.push(), counter.push())] == [(5, {}), (6, {})]


def problems(config: type[Any], values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        config.model_validate(values)
    return str(caught.value)


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    schedule = {"type": "replay", "path": str(tmp_path)}
    evaluated = changed(rollout__schedule=schedule, evaluation={"sources": [{"path": "eval.jsonl"}]})
    assert "a replay starts none; set evaluation: null" in problems(RLVRConfig, evaluated)
    assert "a mapping with a type: sync, async or replay" in problems(
        RLVRConfig, changed(rollout__schedule={"type": "other"})
    )
    sampled = {"prompts_per_iteration": 8, "samples_per_prompt": 4, "max_response_tokens": 32}
    pairs = {"pairs_per_step": 2}
    online = {**MINIMAL, "pipeline": "online_dpo", "pairs": pairs, "reference": {}, "rollout": sampled}
    OnlineDPOConfig.model_validate(online)
    rollout = {**sampled, "schedule": schedule, "save_tokens": True}
    refused = problems(OnlineDPOConfig, {**online, "rollout": rollout})
    assert "pairs of its iteration, which are not recorded; use sync" in refused
    assert "online DPO cannot replay them; remove it" in refused
    taught = {**MINIMAL, "pipeline": "on_policy_distill", "teachers": {"big": {"path": "org/big"}}}
    distilled = OnPolicyDistillConfig.model_validate(
        {**taught, "rollout": {**MINIMAL["rollout"], "schedule": schedule}}
    )
    assert distilled.replay == ReplaySchedule(path=tmp_path)
    assert [role.name for role in distilled.roles] == ["training", "teacher big"]


def state_of(directory: Path, config: Any) -> RunState:
    metrics: Any = FakeMetrics()
    store = CheckpointStore(directory / "checkpoints", keep=1, keep_best=False, warn=print)
    return RunState(
        directory=directory,
        config=config,
        metrics=metrics,
        signal=StopSignal(),
        store=store,
        snapshots=Snapshots(None, store, durable=True, warn=print),
        resumed=None,
    )


def test_a_step_is_recorded_where_that_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rollouts").mkdir()
    state = state_of(tmp_path, RLVRConfig.model_validate(MINIMAL))
    state.log(0, {})
    state.keep_rollouts(collected([group(task(0), [1.0])]))
    assert not list((tmp_path / "rollouts").iterdir())
    state = state_of(tmp_path, RLVRConfig.model_validate(changed(rollout__save_tokens=True)))
    for number in (0, 1):  # the second time as a resumed run does that repeats the step
        state.log(0, {})
        state.keep_rollouts(collected([group(task(number), [1.0])]))
        assert has_groups(tokens_stem(tmp_path, 1))
        rollouts, _ = source(replaying(tmp_path, steps=1, groups=1))
        assert rollouts.collect(0).groups[0].task.task_id == f"fake/{number}"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "replace", full)
    with pytest.raises(
        CheckpointError, match=r"rollouts of step 1 cannot be written .*No space left on device\n.*save"
    ):
        state.keep_rollouts(collected([group(task(2), [1.0])]))


def test_a_run_without_groups_has_none_to_record(tmp_path: Path) -> None:
    state = state_of(
        tmp_path,
        SimpleNamespace(
            total_steps=1,
            checkpoint=SimpleNamespace(every_minutes=0),
            guards=GuardsConfig(),
            profile=ProfileConfig(),
            callbacks=(),
        ),
    )
    state.log(0, {})
    state.keep_rollouts(collected([group(task(0), [1.0])]))
    assert not (tmp_path / "rollouts").exists()


@pytest.mark.parametrize("origin", [Origin.DEMONSTRATION, Origin.REPLAYED])
def test_recorded_off_policy_answers_need_a_run_that_takes_them(tmp_path: Path, origin: Origin) -> None:
    stem = tokens_stem(tmp_path, 1)
    (group,) = recorded(tmp_path, 1, 1)[0]
    joined = replace(group.samples[0], trajectory=replace(group.samples[0].trajectory, origin=origin))
    write_groups(stem, [replace(group, off_policy=(joined,))])
    given = {"demonstrations": {"off_policy": {}}} if origin is Origin.DEMONSTRATION else {}
    assert source(replaying(tmp_path, steps=1, groups=1, **given))[0].collect(0).groups[0].off_policy
    bad: dict[str, Any] = {} if given else {"algorithm": {"advantage": "opo"}}
    with pytest.raises(ConfigError, match="no section demonstrations" if given else "takes all samples of a group"):
        source(replaying(tmp_path, steps=1, groups=1, **bad))[0].collect(0)
