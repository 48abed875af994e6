"""Deadlines, and who is guilty when some workers hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_like.cluster import watchdog
from roll_like.cluster.node_watch import Sighting
from roll_like.cluster.progress import Page, Work
from roll_like.cluster.watchdog import Deadlines, Hang, Hangs
from roll_like.training.backend import COLLECTIVE_TIMEOUT


def test_a_deadline_follows_from_the_longest_gap() -> None:
    deadlines = Deadlines("cuda", 600.0)
    assert deadlines.of("training", "forward_backward") == 600  # nothing is known
    deadlines.progressed("training", "forward_backward", 20.0)
    deadlines.progressed("training", "forward_backward", 40.0)
    assert deadlines.of("training", "forward_backward") == 600  # not enough
    deadlines.progressed("training", "forward_backward", 30.0)
    assert deadlines.of("training", "forward_backward") == 200  # 5 × 40 s
    for _ in range(1000):
        deadlines.progressed("training", "forward_backward", 1.0)
    assert deadlines.of("training", "forward_backward") == 200  # a kernel may be compiled again
    assert deadlines.of("critic", "forward_backward") == deadlines.of("training", "optimizer_step") == 600


@pytest.mark.parametrize(("device", "least"), [("cuda", 60.0), ("cpu", 120.0)])
def test_deadlines_have_bounds(device: str, least: float) -> None:
    deadlines = Deadlines(device, 5.0)
    assert deadlines.of("training", "optimizer_step") == least
    for _ in range(3):
        deadlines.progressed("training", "optimizer_step", 0.1)
        deadlines.progressed("training", "forward", 1000.0)
    assert deadlines.of("training", "optimizer_step") == least
    assert deadlines.of("training", "forward") == 1800


def test_a_long_first_gap_is_allowed_again() -> None:
    deadlines = Deadlines("cuda", 100.0)
    deadlines.progressed("training", "forward", 90.0)
    assert deadlines.of("training", "forward") == 450


def test_the_first_checkpoints_may_take_as_long_as_anything_may() -> None:
    deadlines = Deadlines("cuda", 600.0)
    assert {deadlines.of("training", phase) for phase in ("start", "save", "load", "export")} == {1800}
    for _ in range(3):
        deadlines.progressed("training", "save", 30.0)
    assert deadlines.of("training", "save") == 150


def test_collectives_wait_longer_than_any_deadline() -> None:
    assert COLLECTIVE_TIMEOUT.total_seconds() >= watchdog.MOST_SECONDS + 60


TRAINING = (0, Work.SHARED, "forward_backward")


class Scene:
    """Processes as a story: each look, some of them move."""

    def __init__(self, **processes: tuple[int, Work, str]) -> None:
        self.pages = {
            name: Page(started=1, events=1, ticks=ticks, gpu_bytes=0, work=work, phase=phase)
            for name, (ticks, work, phase) in processes.items()
        }
        self.states = dict.fromkeys(processes, "S")
        self.hangs = Hangs(Deadlines("cuda", 100.0))

    def sightings(self) -> list[Sighting]:
        found = []
        for name, page in self.pages.items():
            role, rank = name.rstrip("abc").split("_")  # a letter tells several processes of a worker apart
            found.append(Sighting(name, role, int(rank), 4711, self.states[name], page))
        return found

    def change(self, name: str, ticks: int, work: Work, phase: str) -> None:
        self.pages[name] = Page(1, self.pages[name].events + 1, ticks, 0, work, phase)

    def move(self, *names: str) -> None:
        for name in names:
            self.change(name, self.pages[name].ticks + 1, self.pages[name].work, self.pages[name].phase)

    def looks(self, seconds: float, *moving: str) -> list[Hang]:
        found = []
        for _ in range(int(seconds / 2)):
            self.move(*moving)
            found += self.hangs.look(self.sightings(), 2.0)
        return found


def test_a_stopped_worker_is_found_whatever_it_does() -> None:
    scene = Scene(training_0=(0, Work.SHARED, "save"), rewards_1=(0, Work.NONE, ""), rewards_0=(0, Work.NONE, ""))
    scene.states["rewards_1"] = "T"
    (hang,) = scene.looks(60, "training_0")
    assert (hang.role, hang.ranks, hang.stopped, hang.seconds) == ("rewards", (1,), True, 16)
    assert hang.to_kill == {"rewards_1"}
    assert hang.witnesses == {"rewards_0", "rewards_1"}
    assert hang.text(Path("runs/x/stacks"), []) == "rewards 1 was stopped for 16 s; killed; stacks in runs/x/stacks"


def test_a_short_stop_is_no_hang() -> None:
    scene = Scene(rewards_0=(0, Work.NONE, ""))
    for _ in range(20):
        scene.states["rewards_0"] = "T"
        assert scene.looks(12) == []
        scene.states["rewards_0"] = "S"
        assert scene.looks(2) == []


def test_an_idle_worker_never_hangs() -> None:
    assert Scene(training_0=(0, Work.NONE, ""), inference_0=(9, Work.NONE, "")).looks(50_000) == []


def test_a_long_generation_that_ticks_never_hangs() -> None:
    assert Scene(inference_0=(0, Work.OWN, "generate")).looks(20_000, "inference_0") == []


def test_an_engine_without_tokens_hangs_and_the_others_do_not() -> None:
    scene = Scene(inference_0=(5, Work.OWN, "generate"), inference_1=(9, Work.OWN, "generate"))
    (hang,) = scene.looks(200, "inference_0")
    assert (hang.role, hang.ranks, hang.phase, hang.stopped) == ("inference", (1,), "generate", False)
    assert hang.seconds == 60  # the other one has shown how long a token takes
    assert hang.text(Path("s"), []) == "inference 1 hung in generate: no progress for 60 s; killed; stacks in s"


def test_engines_that_hang_together_are_both_guilty() -> None:
    scene = Scene(inference_0=(5, Work.OWN, "generate"), inference_1=(9, Work.OWN, "generate"))
    (hang,) = scene.looks(200)
    assert hang.ranks == (0, 1)


def test_the_rank_that_did_least_is_the_one_that_others_wait_for() -> None:
    work = (Work.SHARED, "forward_backward")
    scene = Scene(training_0=(4, *work), training_1=(3, *work), training_2=(4, *work))
    (hang,) = scene.looks(190)
    assert (hang.ranks, hang.phase) == ((1,), "forward_backward")
    assert hang.to_kill == {"training_1"}
    assert hang.witnesses == {"training_0", "training_1", "training_2"}
    (others,) = scene.looks(100)  # they did not notice that it is gone
    assert others.ranks == (0, 2)


def test_a_tie_condemns_all_ranks_that_work() -> None:
    scene = Scene(training_0=TRAINING, training_1=TRAINING, critic_0=TRAINING)
    (hang,) = scene.looks(130, "critic_0")
    assert (hang.role, hang.ranks) == ("training", (0, 1))
    assert hang.text(Path("s"), [7]) == (
        "training 0 and 1 hung in forward_backward: no progress for 100 s; killed, but still there: process 7, which "
        "waits for a disk or a device; stacks in s"
    )


def test_ranks_that_wait_for_a_slow_one_do_not_hang() -> None:
    scene = Scene(training_0=(9, Work.SHARED, "forward_backward"), training_1=TRAINING)
    assert scene.looks(2000, "training_1") == []
    (hang,) = scene.looks(100)
    assert hang.ranks == (0,)  # it has done less than the other by now


def test_a_stopped_rank_is_guilty_of_its_peers_standstill() -> None:
    scene = Scene(training_0=(1, Work.SHARED, "save"), training_1=(3, Work.SHARED, "save"))
    scene.states["training_1"] = "T"
    (hang,) = scene.looks(30)
    assert (hang.ranks, hang.phase, hang.stopped) == ((1,), "save", True)


def test_ranks_that_wait_for_engines_do_not_hang() -> None:
    scene = Scene(training_0=(1, Work.ELSEWHERE, "send_weights"), training_1=(1, Work.SHARED, "send_weights"))
    assert scene.looks(5000) == []
    scene.change("training_0", 1, Work.SHARED, "send_weights")
    (hang,) = scene.looks(5000)
    assert hang.ranks == (0, 1)


def test_all_processes_of_a_worker_go_with_it() -> None:
    scene = Scene(inference_0a=(0, Work.OWN, "generate"), inference_0b=(0, Work.NONE, ""), inference_1a=TRAINING)
    scene.states["inference_0b"] = "T"
    (hang,) = scene.looks(20, "inference_0a", "inference_1a")
    assert (hang.ranks, hang.phase, hang.stopped) == ((0,), "generate", True)
    assert hang.to_kill == {"inference_0a", "inference_0b"}


def test_what_was_seen_of_a_phase_counts() -> None:
    scene = Scene(training_0=TRAINING)
    for _ in range(3):
        assert scene.looks(8) == []
        assert scene.looks(2, "training_0") == []
    (hang,) = scene.looks(80)
    assert hang.seconds == 60  # 5 × 10 s is less than the least
    fast = Scene(training_0=TRAINING)
    for _ in range(4):
        assert fast.looks(38) == []
        assert fast.looks(2, "training_0") == []
    (hang,) = fast.looks(1000)
    assert hang.seconds == 200


def test_a_process_that_comes_back_under_a_name_is_followed_anew() -> None:
    scene = Scene(training_0=TRAINING)
    assert len(scene.looks(130)) == 1
    pages, scene.pages = scene.pages, {}
    assert scene.looks(2) == []
    scene.pages = pages
    assert len(scene.looks(130)) == 1
