"""The page of a worker process: what it shows, who may do without one, and what a tick costs."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll_like.cluster.progress import _LAYOUT, VARIABLE, Page, ProgressPage, Work, shared_phase


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgressPage]:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "0.training"))
    monkeypatch.setattr("faulthandler.register", lambda number, file: None)  # it would stay in this process
    page = ProgressPage()
    page.open()
    yield page
    assert page._stacks is not None
    page._stacks.close()


def shown(tmp_path: Path) -> Page:
    found = Page.read((tmp_path / f"0.training.{os.getpid()}").read_bytes())
    assert found is not None
    return found


def test_a_page_is_64_bytes_and_new_ones_say_nothing(tmp_path: Path, page: ProgressPage) -> None:
    assert _LAYOUT.size == 64
    assert shown(tmp_path).work is Work.NONE
    assert Page.read(b"") is None
    assert Page.read(bytes(64)) is None


def test_phases_nest_and_end_by_an_error_too(tmp_path: Path, page: ProgressPage) -> None:
    with page.phase("send_weights", Work.SHARED):
        page.tick()
        page.tick()
        with page.phase("send_weights", Work.ELSEWHERE):
            assert (shown(tmp_path).work, shown(tmp_path).ticks) == (Work.ELSEWHERE, 2)
        assert (shown(tmp_path).work, shown(tmp_path).phase) == (Work.SHARED, "send_weights")
        assert shown(tmp_path).ticks == 2  # as many as ranks that waited for nobody
    assert (shown(tmp_path).work, shown(tmp_path).phase) == (Work.NONE, "")
    with pytest.raises(ZeroDivisionError), page.phase("save"):
        raise ZeroDivisionError
    assert shown(tmp_path).work is Work.NONE
    with page.phase("load"):
        assert (shown(tmp_path).phase, shown(tmp_path).ticks) == ("load", 0)


def test_the_most_that_was_allocated_of_a_gpu_is_kept(
    tmp_path: Path, page: ProgressPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with page.phase("load"):
        pass
    assert shown(tmp_path).gpu_bytes == 0
    peaks = iter([5 << 30, 2 << 30])
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: next(peaks))
    for phase in ("forward_backward", "optimizer_step"):  # a library may reset the peak between them
        with page.phase(phase):
            pass
        assert shown(tmp_path).gpu_bytes == 5 << 30
    assert (shown(tmp_path).work, shown(tmp_path).phase) == (Work.NONE, "")


def test_everything_that_happens_moves_the_page(tmp_path: Path, page: ProgressPage) -> None:
    seen = [shown(tmp_path).events]
    with page.phase("forward"):
        seen.append(shown(tmp_path).events)
        page.tick()
        seen.append(shown(tmp_path).events)
    seen.append(shown(tmp_path).events)
    assert seen == sorted(set(seen))


def test_what_is_held_is_shown_until_it_ends(tmp_path: Path, page: ProgressPage) -> None:
    page.hold("generate", True)
    page.hold("generate", True)
    with page.phase("weight_update"):
        assert shown(tmp_path).phase == "weight_update"
    assert (shown(tmp_path).phase, shown(tmp_path).work) == ("generate", Work.OWN)
    before = shown(tmp_path).events
    page.hold("generate", True)
    assert shown(tmp_path).events == before  # nothing has happened
    page.hold("generate", False)
    page.hold("generate", False)
    assert shown(tmp_path).work is Work.NONE


def test_a_verb_of_ranks_is_a_phase(tmp_path: Path, page: ProgressPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_like.cluster.progress.PROGRESS", page)

    @shared_phase
    def forward_backward(number: int) -> tuple[int, Page]:
        """Add up."""
        return number + 1, shown(tmp_path)

    result, during = forward_backward(2)
    assert (result, during.phase, during.work) == (3, "forward_backward", Work.SHARED)
    assert (forward_backward.__name__, forward_backward.__doc__) == ("forward_backward", "Add up.")
    assert shown(tmp_path).work is Work.NONE


def test_a_process_that_nobody_watches_works_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    page = ProgressPage()
    page.open()
    with page.phase("forward"):
        page.tick()
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_made_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone" / "0.training"))
    page = ProgressPage()
    page.open()
    page.tick()
    assert "this process is not watched: " in capsys.readouterr().err


def test_a_tick_costs_microseconds_at_most(page: ProgressPage) -> None:
    assert min(timeit.repeat(page.tick, number=10_000, repeat=5)) < 10_000 * 5e-6


FORKS = """
import os
from roll_like.cluster.progress import PROGRESS
PROGRESS.open()
with PROGRESS.phase("start"):
    child = os.fork()
    if child == 0:
        PROGRESS.open()
        os._exit(0)
    os.waitpid(child, 0)
    print(os.getpid(), child)
"""


def test_a_child_has_a_page_of_its_own_and_its_parents_work_is_not_its(tmp_path: Path) -> None:
    environment = {**os.environ, VARIABLE: str(tmp_path / "0.inference")}
    done = subprocess.run([sys.executable, "-c", FORKS], env=environment, capture_output=True, text=True, check=True)
    parent, child = (Page.read((tmp_path / f"0.inference.{pid}").read_bytes()) for pid in done.stdout.split())
    assert parent is not None
    assert child is not None
    assert child.work is Work.NONE
    assert child.started >= parent.started > 0
