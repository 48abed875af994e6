"""Asynchronous runs are killed, stopped and broken: no task is lost or trained twice, and no run hangs."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from dying_runs import SYNCS, record_syncs, run_and_die, syncs_of
from engine_options import OPTIONS, only_changes_travel
from faults import at, kill
from hygiene import nothing_left
from run_config import asynchronous, kill_run, read_lines, run_here, write_episodes_run, write_run

from roll_like.policy_gradient.workers import Workers
from roll_like.rollout import scheduler
from roll_like.rollout.asynchronous import BUFFER, AsyncRollouts
from roll_like.rollout.replay import tokens_stem
from roll_like.rollout.source import KeptRollouts
from roll_like.rollout.storage import read_groups
from roll_like.run.state import RunState
from roll_like.training.engine import TrainingEngine
from roll_like.types import Group, Scored, Trajectory

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("warm_ray")]

#: One epoch: the data has 32 tasks, and a step trains 4 of them.
STEPS = 8
#: Sampling is what steps wait for.
TWO_GROUPS_AT_A_TIME = {"type": "hf", "max_running": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model"), dtype="float32")


def write(
    directory: Path,
    model: Path,
    *,
    tokens: int = 8,
    schedule: dict[str, Any] | None = None,
    shared: bool = False,
    **more: Any,
) -> Path:
    """Write a run of one epoch that keeps every checkpoint; the roles have a core each, or share both."""
    changes = asynchronous(tokens=tokens, schedule=schedule)
    if shared:
        del changes["resources"]
    checkpoint = {"every": 1, "keep": 20, "export": False}
    return write_run(directory, model, **{"steps": STEPS, "checkpoint": checkpoint, **changes, **more})


def schedule(staleness: int, ahead: float) -> dict[str, Any]:
    return {"type": "async", "max_staleness": staleness, "ahead": ahead}


def oldest(group: Group[Scored]) -> int:
    return min(segment.policy_version for sample in group.samples for segment in sample.trajectory.segments)


def require_one_epoch(directory: Path) -> list[list[Group[Scored]]]:
    """Every task was trained once, each step is there once, versions go on; return the groups of each step."""
    run = directory / "runs" / "tiny"
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == list(range(1, STEPS + 1))
    groups = [read_groups(tokens_stem(run, step)) for step in range(1, STEPS + 1)]
    trained = [group.task.origin for of_step in groups for group in of_step]
    lines = [f"{directory / 'train.jsonl'}:{number}" for number in range(1, 33)]
    assert sorted(trained) == sorted(lines)
    for step, of_step in enumerate(groups, start=1):
        rows = read_lines(run / "rollouts" / f"step_{step:06}.jsonl")
        assert {row["task_id"] for row in rows} == {group.task.task_id for group in of_step}
        newest = [seg.policy_version for one in of_step for each in one.samples for seg in each.trajectory.segments]
        assert max(newest) <= step
    return groups


def require_bound(groups: list[list[Group[Scored]]], staleness: int, first: int = 1, last: int = STEPS) -> None:
    for step in range(first, last + 1):
        assert max(step - oldest(group) for group in groups[step - 1]) <= staleness, f"in step {step}"


def tokens(groups: list[Group[Scored]]) -> dict[str, list[list[int]]]:
    return {one.task.task_id: [each.trajectory.token_ids.tolist() for each in one.samples] for one in groups}


def stop_after(step: int, patch: pytest.MonkeyPatch) -> None:
    """Let SIGTERM arrive while a step is logged."""
    log = RunState.log

    def log_and_stop(state: RunState, index: int, *parts: Any) -> dict[str, float]:
        values = log(state, index, *parts)
        if index + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return values

    patch.setattr(RunState, "log", log_and_stop)


def wait_for_groups(state: RunState) -> None:
    """Wait until groups are ready for a later step."""
    (kept,) = [part for part in state._parts.values() if isinstance(part, KeptRollouts)]
    rollouts = kept._source
    assert isinstance(rollouts, AsyncRollouts)
    given_up = time.monotonic() + 120
    while not rollouts._stream.ready:
        assert time.monotonic() < given_up
        time.sleep(0.01)


def interrupt_run(config: Path, patch: pytest.MonkeyPatch) -> None:
    """End a run in this process in the middle of its fourth step, as Ctrl-C does: without a checkpoint."""
    at(patch, RunState, "log", 3, wait_for_groups)
    at(patch, RunState, "log", 4, lambda _: os.kill(os.getpid(), signal.SIGINT))
    code, output = run_here(config)
    assert code == 130, output


@pytest.mark.parametrize("by", ["Ctrl-C", pytest.param("kill -9", marks=pytest.mark.slow)])
def test_an_ended_run_resumes_and_trains_every_task_once_within_the_bound(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    config = write(tmp_path, model, schedule=schedule(2, 2.0))
    with nothing_left(), monkeypatch.context() as patch:
        if by == "Ctrl-C":
            interrupt_run(config, patch)
        else:
            kill_run(config, "step 3/8")
    checkpoint = max((tmp_path / "runs" / "tiny" / "checkpoints").glob("step_*"))
    buffered = read_groups(checkpoint / BUFFER)
    assert buffered, "nothing was ready to be trained"
    code, output = run_here(config, "--resume")
    assert code == 0, output
    groups = require_one_epoch(tmp_path)
    require_bound(groups, 2)
    # what was ready is trained, not sampled again
    trained = tokens([group for of_step in groups for group in of_step])
    assert {name: trained[name] for name in tokens(buffered)} == tokens(buffered)


@pytest.mark.slow
def test_episodes_with_a_slow_reward_go_on_after_kill_9(tmp_path: Path, model: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "tiny_rewards.py", tmp_path)
    config = write_episodes_run(
        tmp_path,
        model,
        **{"import": ["tiny_envs", "tiny_rewards"]},
        environments=[{"id": "tiny/SlowLetters-v0", "name": "slow"}],
        rewards={"environment_weight": 0.5, "use": [{"type": "slow_letter_e"}]},
        rollout={
            "groups_per_step": 4,
            "episodes_per_group": 2,
            "max_turns": 4,
            "max_response_tokens": 8,
            "max_episode_tokens": 160,
            "save_tokens": True,
            "schedule": schedule(2, 2.0),
        },
        resources=asynchronous()["resources"],
        algorithm={"advantage": "grpo"},
        checkpoint={"every": 1, "keep": 20, "export": False},
        steps=6,
    )
    with nothing_left():
        kill_run(config, "step 3/6")
    code, output = run_here(config, "--resume")
    assert code == 0, output
    run = tmp_path / "runs" / "tiny"
    groups = [read_groups(tokens_stem(run, step)) for step in range(1, 7)]
    require_bound(groups, 2, last=6)
    seeds = [group.task.metadata["seed"] for of_step in groups for group in of_step]
    assert sorted(seeds) == list(range(24)), "a seed was lost, or trained twice"
    for group in (group for of_step in groups for group in of_step):
        for sample in group.samples:
            assert set(sample.rewards) == {"return", "slow_letter_e"}
            assert sample.reward == pytest.approx(0.5 * sample.rewards["return"] + sample.rewards["slow_letter_e"])


def test_sigterm_cuts_the_wait_short_and_nothing_is_lost(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # no checkpoint is due before the end: the one that SIGTERM asks for is the only one
    settings = {"checkpoint": {"every": 0, "export": False}, "inference": TWO_GROUPS_AT_A_TIME}
    config = write(tmp_path, model, tokens=32, **settings)
    show, stopped = AsyncRollouts._show, []

    def stop_while_waiting(rollouts: AsyncRollouts, done: int, total: int) -> None:
        show(rollouts, done, total)
        if rollouts._stream.waiting and rollouts._staleness.taken == 2 and not stopped:
            stopped.append(done)
            os.kill(os.getpid(), signal.SIGTERM)

    with nothing_left(), monkeypatch.context() as patch:
        patch.setattr(AsyncRollouts, "_show", stop_while_waiting)
        code, output = run_here(config)
    assert code == 0, output
    assert len(stopped) == 1, "SIGTERM came at another moment"
    run = tmp_path / "runs" / "tiny"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == ["step_000002"]
    code, output = run_here(config, "--resume")
    assert code == 0, output
    require_bound(require_one_epoch(tmp_path), 2)


@pytest.mark.slow
def test_a_run_goes_on_under_another_schedule(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far ahead; then with a lower bound, which some groups are too old for; then synchronous; then asynchronous."""
    parts = [(schedule(3, 3.0), 2), (schedule(1, 1.0), 4), ({"type": "sync"}, 6), (schedule(2, 1.0), STEPS)]
    with nothing_left():
        for number, (of_part, last) in enumerate(parts):
            config = write(tmp_path, model, schedule=of_part)
            with monkeypatch.context() as patch:
                if last < STEPS:
                    stop_after(last, patch)
                code, output = run_here(config, *(["--resume"] if number else []))
            assert code == 0, output
    groups = require_one_epoch(tmp_path)
    for bound, first, last in ((3, 1, 2), (1, 3, 4), (0, 5, 6), (2, 7, 8)):
        require_bound(groups, bound, first, last)
    steps = read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoints" / "step_000002"
    starts = [start for _, start in json.loads((checkpoint / "state.json").read_text())["rollouts"]["stream"]["ready"]]
    assert starts.count(1) > 0
    assert [step.get("schedule/discarded") for step in steps] == [0, 0, starts.count(1), 0, None, None, 0, 0]


#: Nothing is due before the end: these runs do not get there.
ENDLESS: dict[str, Any] = {"steps": 50, "checkpoint": {"every": 0, "at_end": False, "export": False}}


@pytest.mark.slow  # by day an engine dies where rollouts are synchronous
@pytest.mark.parametrize("phase", ["generating", "training"])
def test_the_only_engine_dies(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """Groups under way wait for its replacement, which serves with the version that was current."""
    config = write(tmp_path, model, tokens=32, inference=TWO_GROUPS_AT_A_TIME)
    with nothing_left(), monkeypatch.context() as patch:
        at(patch, Workers, phase, 3, lambda workers: kill(workers.inference.cluster._actors[0]))
        code, output = run_here(config)
    assert code == 0, output
    assert "engine 0 was replaced in" in output
    require_bound(require_one_epoch(tmp_path), 2)


@pytest.fixture(scope="module")
def first_samples(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, list[list[int]]]:
    """Tokens of what a run without faults samples with its first weights."""
    directory = tmp_path_factory.mktemp("undisturbed")
    code, output = run_here(write(directory, model, inference=TWO_GROUPS_AT_A_TIME))
    assert code == 0, output
    return of_first_weights(require_one_epoch(directory))


def of_first_weights(groups: list[list[Group[Scored]]]) -> dict[str, list[list[int]]]:
    """Return the tokens of groups that were sampled with version 1 alone."""
    segments = {
        group.task.task_id: {segment.policy_version for one in group.samples for segment in one.trajectory.segments}
        for of_step in groups
        for group in of_step
    }
    sampled = tokens([group for of_step in groups for group in of_step])
    return {task: ids for task, ids in sampled.items() if segments[task] == {1}}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_engine_and_driver_are_killed_whatever_is_sampled_and_trained_with(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, name: str
) -> None:
    """By SIGKILL; then the run is resumed, and what the option promises holds before and after."""
    option = OPTIONS[name]
    config = option.put_into(write(tmp_path, model, inference=TWO_GROUPS_AT_A_TIME), model)
    with nothing_left():
        run_and_die(config, engine=3, driver=7)
    record_syncs(monkeypatch, tmp_path / SYNCS)
    killed = len(syncs_of(tmp_path))
    code, output = run_here(config, "--resume")
    assert code == 0, output
    groups = require_one_epoch(tmp_path)
    require_bound(groups, 2)
    option.require(read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl"), syncs_of(tmp_path), killed)
    if name == "one seed, one sample":
        expected, found = request.getfixturevalue("first_samples"), of_first_weights(groups)
        both = expected.keys() & found.keys()
        assert len(both) >= 4, "those of the first step"
        assert {task: found[task] for task in both} == {task: expected[task] for task in both}


@pytest.mark.slow
def test_a_curriculum_goes_on_after_engine_and_driver_were_killed(tmp_path: Path, model: Path) -> None:
    """Several passes: in the first each task is attempted, in the others half of those that are not solved."""
    steps = 16
    config = write(tmp_path, model, steps=steps, inference=TWO_GROUPS_AT_A_TIME)
    values = yaml.safe_load(config.read_text())
    values["data"]["curriculum"] = {"type": "difficulty", "keep": 0.5}
    config.write_text(yaml.safe_dump(values))
    with nothing_left():
        run_and_die(config, engine=3, driver=12)
        code, output = run_here(config, "--resume")
    assert code == 0, output
    rollout = values["rollout"]
    groups, staleness = rollout["prompts_per_step"], rollout["schedule"]["max_staleness"]
    # started before and not trained yet: at most those of the versions that a group may be old, and of the step
    ahead = groups * (staleness + 1)
    run = tmp_path / "runs" / "tiny"
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    trained = [group.task.origin for step in range(1, steps + 1) for group in read_groups(tokens_stem(run, step))]
    assert len(set(trained[: 32 + ahead])) == 32, "the first pass comes first"
    attempted = sum(line["curriculum/attempted"] for line in lines)
    turns = [line["curriculum/attempted"] / (1 - line.get("curriculum/passed_by", 0)) for line in lines]
    drawn = round(sum(turns))
    assert len(trained) == groups * steps <= attempted <= groups * steps + ahead
    assert drawn > attempted
    assert max(Counter(trained).values()) <= math.ceil(drawn / 32), "none comes twice in a pass"
    measured = [line["curriculum/measured"] for line in lines]
    assert measured == sorted(measured)
    assert measured[-1] == 1


def test_an_engine_that_dies_is_sent_all_weights_and_then_changes_of_what_muon_trains(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three options in one run, whose output layer is computed in float32."""
    config = write(tmp_path, model)
    for name in ("muon", "head in float32", "changed weights alone"):
        OPTIONS[name].put_into(config, model)
    record_syncs(monkeypatch, tmp_path / SYNCS)
    with nothing_left(), monkeypatch.context() as patch:
        at(patch, Workers, "generating", 3, lambda workers: kill(workers.inference.cluster._actors[0]))
        code, output = run_here(config)
    assert code == 0, output
    assert "engine 0 was replaced in" in output
    require_bound(require_one_epoch(tmp_path), 2)
    only_changes_travel(syncs_of(tmp_path), 2)


@pytest.mark.slow
def test_one_of_two_engines_dies(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one goes on with its groups."""
    config = write(tmp_path, model, tokens=32, inference={"type": "hf", "replicas": 2}, shared=True)
    with nothing_left(), monkeypatch.context() as patch:
        at(patch, Workers, "generating", 3, lambda workers: kill(workers.inference.cluster._actors[1]))
        code, output = run_here(config)
    assert code == 0, output
    assert "engine 1 was replaced in" in output
    require_bound(require_one_epoch(tmp_path), 2)


def test_the_trainer_dies_while_engines_sample(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns again what it had learned since its checkpoint, from the same groups; engines go on with theirs."""
    config = write(tmp_path, model, checkpoint={"every": 3, "export": False})
    with nothing_left(), monkeypatch.context() as patch:
        at(patch, TrainingEngine, "train_step", 6, lambda engine: kill(engine.cluster._actors[0]))
        code, output = run_here(config)
    assert code == 0, output
    assert "steps 4 to 5 are computed again from the checkpoint of step 3" in output
    require_bound(require_one_epoch(tmp_path), 2)


def test_an_error_of_a_group_ends_the_run_in_the_next_step(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path, model, **ENDLESS)
    samples, join = itertools.count(1), scheduler._trajectory

    def breaking(*arguments: Any) -> Trajectory:
        if next(samples) == 18:  # the first two steps have 16
            raise ZeroDivisionError("a bug in the middle of a group")
        return join(*arguments)

    with nothing_left(), monkeypatch.context() as patch:
        patch.setattr(scheduler, "_trajectory", breaking)
        with pytest.raises(ZeroDivisionError, match="a bug in the middle of a group"):  # no error of the user's
            run_here(config)
    assert len(read_lines(tmp_path / "runs" / "tiny" / "metrics.jsonl")) <= 2
