"""The rule of admission: no group is older than the bound, none is lost or trained twice, and nothing locks up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_support import group, task

from roll_like.rollout.staleness import Admitted, StalenessManager

LIMITS = settings(deadline=None, max_examples=150)


def make_manager(
    groups: int = 2, staleness: int = 1, ahead: float = 1.0, batches: int = 100, filtered: int = 0
) -> StalenessManager:
    made = StalenessManager(groups=groups, max_staleness=staleness, ahead=ahead, batches=batches, max_filtered=filtered)
    made.version = 1
    return made


def fill(manager: StalenessManager) -> list[int]:
    serials = []
    while manager.room:
        serials.append(manager.admit(task(manager._serial)))
    return serials


def settle(manager: StalenessManager, *serials: int, accepted: bool = True) -> None:
    for serial in serials:
        manager.settle(serial, group(task(serial), [0.0, 1.0]), accepted=accepted)


def serials_of(batch: list[Admitted] | None) -> list[int]:
    assert batch is not None
    return [entry.serial for entry in batch]


def test_a_step_and_what_runs_ahead_are_admitted_at_once() -> None:
    manager = make_manager(groups=4, staleness=2, ahead=1.5)
    assert len(fill(manager)) == 4 + 6
    assert manager.open == 10
    assert manager.room == 0


def test_a_batch_is_the_groups_that_ended_and_leaves_the_others() -> None:
    manager = make_manager(groups=2, staleness=1)
    assert fill(manager) == [0, 1, 2, 3]
    settle(manager, 3)
    assert manager.take() is None
    settle(manager, 1)
    assert serials_of(manager.take()) == [1, 3]
    assert (manager.open, manager.ready, manager.taken) == (2, 0, 1)


def test_a_batch_waits_for_the_group_that_can_wait_no_longer() -> None:
    manager = make_manager(groups=2, staleness=1)
    fill(manager)
    settle(manager, 1, 3)
    manager.take()
    manager.version = 2
    assert fill(manager) == [4, 5]
    assert manager.due() == [0, 2]  # version 2 − 1 = 1 is the bound
    settle(manager, 4, 5)
    assert manager.take() is None
    settle(manager, 2)
    assert manager.take() is None
    settle(manager, 0)
    assert serials_of(manager.take()) == [0, 2]
    assert manager.ready == 2


def test_a_filtered_group_makes_room_until_the_filter_has_turned_down_too_many() -> None:
    manager = make_manager(groups=2, staleness=1, filtered=1)
    fill(manager)
    settle(manager, 0, accepted=False)
    assert fill(manager) == [4]
    settle(manager, 1, accepted=False)
    assert fill(manager) == []
    settle(manager, 2)
    assert manager.take() is None  # two more are running
    settle(manager, 3, 4, accepted=False)
    assert serials_of(manager.take()) == [2]  # short, because nothing runs any more
    assert manager.room == 2
    manager.version = 2
    assert len(fill(manager)) == 4


def test_a_run_in_which_every_group_is_lost_comes_to_an_end() -> None:
    manager = make_manager(groups=2, staleness=1)
    started = 0
    while serials := fill(manager):
        started += len(serials)
        for serial in serials:
            manager.settle(serial, group(task(serial), []), accepted=False)
    assert started <= 6
    assert manager.take() == []


def test_no_group_starts_that_no_step_is_left_for() -> None:
    manager = make_manager(groups=3, staleness=2, ahead=2.0, batches=2)
    assert len(fill(manager)) == 6
    settle(manager, 0, 1, 2)
    manager.take()
    manager.version = 2
    assert fill(manager) == []


def test_more_ahead_than_can_be_trained_in_time_is_refused() -> None:
    with pytest.raises(ValueError, match="the bound could not be kept"):
        make_manager(staleness=1, ahead=1.5)


def test_a_snapshot_has_what_runs_by_id_and_what_is_ready_whole() -> None:
    manager = make_manager(groups=2, staleness=2)
    fill(manager)
    settle(manager, 1)
    state, ready = manager.snapshot()
    assert state["open"] == [[0, "fake/0"], [2, "fake/2"], [3, "fake/3"]]
    assert state["ready"] == [[1, 1]]
    assert [one.task.task_id for one in ready] == ["fake/1"]


def test_a_lower_bound_gives_back_what_cannot_be_trained_in_time() -> None:
    manager = make_manager(groups=1, staleness=3, ahead=3.0)
    fill(manager)
    settle(manager, 0, 1, 2, 3)
    assert serials_of(manager.take()) == [0]
    manager.version = 2
    state, ready = manager.snapshot()
    lowered = make_manager(groups=1, staleness=2, ahead=1.0)
    late = lowered.restore(state, ready)
    lowered.version = 2
    assert [entry.serial for entry in late] == [3]  # versions 2 and 3 train 1 and 2; 3 would be 3 versions old
    assert serials_of(lowered.take()) == [1]


def test_what_was_filtered_before_a_restore_does_not_keep_the_batch_from_being_filled() -> None:
    manager = make_manager(groups=2, filtered=1)
    fill(manager)
    for serial in (0, 1):
        manager.settle(serial, group(task(serial), [1.0]), accepted=False)
    assert manager.room == 0  # 2 and 3 still run, and are a batch
    restored = make_manager(groups=2, filtered=1)
    restored.restore(*manager.snapshot())
    restored.version = 1
    assert restored.take() is None
    assert restored.room == 4


def one_batch(groups: int, at_once: int = 0, most: int | None = None, waited_for: int = 0) -> StalenessManager:
    made = StalenessManager(
        groups=groups, max_staleness=0, ahead=0, batches=1, at_once=at_once, max_started=most, waited_for=waited_for
    )
    made.version = 1
    return made


def test_with_staleness_0_a_batch_gives_back_what_it_does_not_need() -> None:
    manager = one_batch(2, at_once=5, waited_for=1)
    assert fill(manager) == [0, 1, 2, 3, 4]
    assert manager.due() == [0]
    settle(manager, 3)
    assert manager.give_back() == []
    settle(manager, 1)
    assert [entry.serial for entry in manager.give_back()] == [2, 4]
    assert manager.take() is None  # it waits for 0
    assert not manager.settle(2, group(task(2), [1.0]), accepted=True)
    settle(manager, 0)
    assert serials_of(manager.take()) == [0, 1]
    assert [serial for serial, _ in manager.left()] == [3]  # complete, and left out
    assert fill(manager) == []


def test_with_staleness_0_rejected_groups_are_replaced_up_to_the_limit() -> None:
    manager = one_batch(2, at_once=3, most=5)
    assert fill(manager) == [0, 1, 2]
    settle(manager, 0, accepted=False)
    assert fill(manager) == []  # two are running
    settle(manager, 1, accepted=False)
    assert fill(manager) == [3]
    settle(manager, 2, accepted=False)
    assert fill(manager) == [4]
    settle(manager, 4, accepted=False)
    assert fill(manager) == []
    settle(manager, 3)
    assert serials_of(manager.take()) == [3]


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, float, float, float, int, int]:
    """Groups a batch, staleness, ahead, share filtered, share lost, seed, filtered at most."""
    staleness = draw(st.integers(1, 4))
    ahead = draw(st.floats(0.05, staleness))
    return (
        draw(st.integers(1, 6)),
        staleness,
        ahead,
        draw(st.sampled_from([0.0, 0.2, 0.6])),
        draw(st.sampled_from([0.0, 0.1])),
        draw(st.integers(0, 2**32)),
        draw(st.integers(0, 8)),
    )


@LIMITS
@given(runs())
def test_the_bound_holds_for_every_group_in_any_order(case: tuple[int, int, float, float, float, int, int]) -> None:
    simulate(*case, restore=False)


@LIMITS
@given(runs())
def test_the_bound_holds_through_restores(case: tuple[int, int, float, float, float, int, int]) -> None:
    simulate(*case, restore=True)


def simulate(
    groups: int, staleness: int, ahead: float, filters: float, losses: float, seed: int, filtered: int, *, restore: bool
) -> None:
    """Run 40 batches with Pareto durations, and assert what the rule promises."""
    chance = random.Random(seed)
    batches = 40

    def make() -> StalenessManager:
        return StalenessManager(
            groups=groups, max_staleness=staleness, ahead=ahead, batches=batches, max_filtered=filtered
        )

    manager, now = make(), 0.0
    ends: dict[int, float] = {}
    starts: dict[int, int] = {}
    waiting: list[int] = []
    ended: dict[int, str] = {}
    ages: list[int] = []
    for batch in range(batches):
        manager.version = batch + 1
        if restore and chance.random() < 0.3:
            state, ready = manager.snapshot()
            manager = make()
            assert manager.restore(state, ready) == []
            manager.version = batch + 1
            waiting += [serial for serial, _ in state["open"]]
            ends = {}
        while True:
            while manager.room:
                serial = manager.admit(task(), waiting.pop(0) if waiting else None)
                assert serial not in ended
                starts[serial] = manager.version
                ends[serial] = now + chance.paretovariate(1.1)
            taken = manager.take()
            if taken is not None:
                break
            assert ends, "the batch is not complete, and nothing runs"
            serial = min(ends, key=lambda running: ends[running])
            now = max(now, ends.pop(serial))
            lost = chance.random() < losses
            kept = not lost and chance.random() >= filters
            ended[serial] = "ready" if kept else "dropped"
            manager.settle(serial, group(task(serial), [] if lost else [0.0]), accepted=kept)
        assert len(taken) <= groups
        for entry in taken:
            assert ended[entry.serial] == "ready", "trained twice, or while it ran"
            ended[entry.serial] = "trained"
            assert starts[entry.serial] == entry.start
            ages.append(manager.version - entry.start)
        now += chance.uniform(0.0, 2.0)  # the trainer
    assert max(ages, default=0) <= staleness
    assert manager.open == manager.ready == 0 or filters or losses
    assert sorted(starts) == list(range(len(starts)))  # every task that was drawn was started


def test_the_bound_is_reached_so_that_stragglers_are_waited_for_as_late_as_possible() -> None:
    manager = make_manager(groups=1, staleness=2, ahead=2.0)
    fill(manager)
    for version in (1, 2):
        manager.version = version
        fill(manager)
        settle(manager, version)
        assert serials_of(manager.take()) == [version]
    manager.version = 3
    fill(manager)
    settle(manager, 3)
    assert manager.take() is None
    settle(manager, 0)
    assert serials_of(manager.take()) == [0]  # three versions: 3 − 1 = 2
