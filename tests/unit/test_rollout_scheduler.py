"""The scheduler against fakes of a few lines: routing, filters, retries, aborts, urgency, lost replicas."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests_support import all_follows

from roll_like.errors import GenerationError
from roll_like.inference.interface import FailedGeneration, GenerateRequest, Generation, Sampling
from roll_like.rollout.collection import Collected, SampleCounter, collect_batch
from roll_like.rollout.router import ReplicaLost, Router
from roll_like.rollout.scheduler import GenerateScheduler, GroupPlan
from roll_like.types import THINK, Failure, Group, Scored, Segment, StopReason, Task, Trajectory

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, stop=())


def make_task(index: int) -> Task:
    return Task(
        task_id=str(index),
        source="fake",
        domain="fake",
        messages=({"role": "user", "content": f"task {index}"},),
        prompt_ids=np.array([index, index], np.int32),
        answer=None,
        metadata={},
        origin=f"fake.jsonl:{index + 1}",
    )


def tasks() -> Iterator[Task]:
    return (make_task(index) for index in itertools.count())


def generation(request: GenerateRequest, *, aborted: bool = False) -> Generation:
    token_ids = np.array([7, 8], np.int32)
    return Generation(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=np.array([-0.5, -0.25], np.float32),
        segments=(Segment(start=0, end=2, policy_version=3),),
        text="ok",
        stop_reason=StopReason.ABORTED if aborted else StopReason.STOP,
    )


class FakeReplica:
    """Answers each request, except those of the prompts or with the ids that are `slow`: these when they are aborted.

    Those that are `late` are answered when there are no others.
    """

    def __init__(
        self,
        *,
        slow: Sequence[int | str] = (),
        late: Sequence[int | str] = (),
        failing: int = 0,
        dies_after: int | None = None,
    ) -> None:
        self.slow, self.late = set(slow), set(late)
        self.failing = failing
        self.dies_after = dies_after
        self.submitted: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.most_running = 0
        self._open: dict[str, GenerateRequest] = {}
        self._new = asyncio.Event()

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        if self.dies_after is not None and len(self.submitted) >= self.dies_after:
            raise ReplicaLost("gone")
        self.submitted.extend(requests)
        self._open.update({request.request_id: request for request in requests})
        self.most_running = max(self.most_running, len(self._open))
        self._new.set()

    async def poll(self, timeout: float) -> Sequence[Generation | FailedGeneration]:
        while True:
            await asyncio.sleep(0)
            if self.dies_after is not None and len(self.submitted) >= self.dies_after:
                raise ReplicaLost("gone")
            late = {request.request_id for request in self._open.values() if self._is_in(self.late, request)}
            ready = [
                request
                for request in self._open.values()
                if not self._is_in(self.slow, request) or request.request_id in self.aborted
            ]
            soon = [request for request in ready if request.request_id not in late]
            if soon or len(late) == len(self._open) > 0:
                return [self._finish(request) for request in soon or ready]
            self._new.clear()
            await self._new.wait()

    def _is_in(self, wanted: set[int | str], request: GenerateRequest) -> bool:
        return not wanted.isdisjoint((int(request.prompt_ids[0]), request.request_id))

    def _finish(self, request: GenerateRequest) -> Generation | FailedGeneration:
        del self._open[request.request_id]
        if self.failing:
            self.failing -= 1
            return FailedGeneration(request_id=request.request_id, error="engine hiccup")
        return generation(request, aborted=request.request_id in self.aborted)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted.extend(request_ids)
        self._new.set()


class FakeScorer:
    """Rewards tasks by a function; remembers the order in which groups came."""

    def __init__(self, reward=lambda task, sample: float(sample)) -> None:  # type: ignore[no-untyped-def]
        self.reward = reward
        self.order: list[str] = []

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        self.order.append(group.task.task_id)
        samples = tuple(
            Scored(
                trajectory=trajectory,
                reward=self.reward(int(group.task.task_id), trajectory.sample_index),
                rewards={},
                details={},
                weights={},
            )
            for trajectory in group.samples
        )
        return Group(task=group.task, samples=samples, failures=group.failures)


def fill(replicas: Sequence[FakeReplica], scorer: FakeScorer | None = None, **changes: object) -> Collected:
    """Collect 4 groups of 2 samples, or what `changes` say: of the router, of the plan or of `collect_batch`."""

    def settings(**defaults: object) -> dict:
        return defaults | {key: changes.pop(key) for key in list(changes) if key in defaults}

    router = Router(replicas, **settings(max_running=100, max_in_flight=100, retries=1))
    batch = settings(groups=4, at_once=4, max_started=4, waited_for=0, accept=lambda group: True)
    plan = GroupPlan(**({"samples_per_group": 2, "sampling": SAMPLING} | changes))
    runner = GenerateScheduler(router, scorer or FakeScorer()).runner(plan, 0)
    return asyncio.run(asyncio.wait_for(collect_batch(runner, tasks(), **batch), timeout=60))


def ids(groups: Sequence[Group]) -> list[str]:
    return [group.task.task_id for group in groups]


def test_fills_groups_in_task_order_with_token_exact_samples() -> None:
    collected = fill([FakeReplica()])
    assert ids(collected.groups) == ["0", "1", "2", "3"]
    first = collected.groups[1].samples[0].trajectory
    assert first.token_ids.tolist() == [1, 1, 7, 8]
    assert first.sampled.tolist() == [False, False, True, True]
    assert first.logprobs.tolist() == [0.0, 0.0, -0.5, -0.25]
    assert first.segments == (Segment(start=2, end=4, policy_version=3),)
    assert collected.tokens == 16


def test_whole_groups_go_to_the_least_loaded_replica() -> None:
    replicas = [FakeReplica(), FakeReplica()]
    fill(replicas)
    homes = [{int(request.prompt_ids[0]) for request in replica.submitted} for replica in replicas]
    assert homes[0].isdisjoint(homes[1])
    assert [len(affinity_key) for affinity_key in homes] == [2, 2]


def test_every_sample_has_a_seed_of_its_own_that_a_second_run_repeats() -> None:
    first, second = FakeReplica(), FakeReplica()
    fill([first])
    fill([second])
    seeds = [request.seed for request in first.submitted]
    assert len(set(seeds)) == 8
    assert seeds == [request.seed for request in second.submitted]


def test_stop_strings_end_answers_alone_where_a_plan_says_so() -> None:
    anywhere, answers = FakeReplica(), FakeReplica()
    fill([anywhere])
    fill([answers], stops_answers=True)
    assert {request.reasoning for request in anywhere.submitted} == {None}
    assert {request.reasoning for request in answers.submitted} == {THINK}  # the tasks'


def test_requests_in_flight_are_bounded() -> None:
    replica = FakeReplica()
    collected = fill([replica], max_in_flight=3)
    assert replica.most_running == 3
    assert len(collected.groups) == 4


def test_groups_are_scored_while_others_still_generate() -> None:
    replica, scorer = FakeReplica(slow=[0]), FakeScorer()
    collected = fill([replica], scorer, groups=3)
    assert scorer.order == ["1", "2", "3"]
    assert ids(collected.groups) == ["1", "2", "3"]


def test_surplus_groups_are_aborted_and_their_tasks_given_back() -> None:
    replica = FakeReplica(slow=[0])
    collected = fill([replica], groups=3)
    assert ids_of(collected.unfinished) == ["0"]
    assert len(replica.aborted) == 2


def ids_of(tasks: Sequence[Task]) -> list[str]:
    return [task.task_id for task in tasks]


def test_rejected_groups_are_replaced_up_to_the_limit() -> None:
    odd = FakeScorer()
    accept = lambda group: int(group.task.task_id) % 2 == 1  # noqa: E731
    collected = fill([FakeReplica()], odd, accept=accept, max_started=8)
    assert ids(collected.groups) == ["1", "3", "5", "7"]
    assert ids(collected.rejected) == ["0", "2", "4", "6"]
    short = fill([FakeReplica()], odd, accept=accept, max_started=6)
    assert ids(short.groups) == ["1", "3", "5"]
    assert short.started == 6


def test_a_failed_sample_is_tried_again_and_then_counted() -> None:
    assert fill([FakeReplica(failing=1)]).failures == ()
    collected = fill([FakeReplica(failing=9)], retries=0)
    assert len(collected.failures) == 8
    assert collected.failures[0] == Failure(
        stage="generate", name="sample 0", error="engine hiccup", origin="fake.jsonl:1"
    )
    assert all(group.samples == () for group in collected.groups)


def test_a_lost_replicas_requests_go_to_another() -> None:
    dying, healthy = FakeReplica(dies_after=2), FakeReplica()
    collected = fill([dying, healthy], retries=0)
    assert len(collected.groups) == 4
    assert all(len(group.samples) == 2 for group in collected.groups)
    assert collected.failures == ()


def test_no_replica_left_is_an_error() -> None:
    with pytest.raises(GenerationError, match="every inference replica is gone"):
        fill([FakeReplica(dies_after=0), FakeReplica(dies_after=1)])


def test_an_error_of_the_scorer_ends_the_fill() -> None:
    def broken(task: int, sample: int) -> float:
        raise RuntimeError("scorer is broken")

    with pytest.raises(RuntimeError, match="scorer is broken"):
        fill([FakeReplica()], FakeScorer(broken))


def test_a_greedy_baseline_comes_with_each_group_and_is_no_sample() -> None:
    replica = FakeReplica()
    collected = fill([replica], baseline=replace(SAMPLING, temperature=0.0))
    for group in collected.groups:
        assert [sample.trajectory.sample_index for sample in group.samples] == [0, 1]
        assert [sample.trajectory.sample_index for sample in group.baselines] == [2]
        assert [sample.reward for sample in group.baselines] == [2.0]  # scored by the same scorer
    greedy = [request for request in replica.submitted if request.sampling.temperature == 0]
    assert len(greedy) == 4
    assert len(replica.submitted) == 12
    assert all(not group.baselines for group in fill([FakeReplica()]).groups)


def test_a_lost_baseline_leaves_the_group_without_one() -> None:
    collected = fill([FakeReplica(failing=6)], baseline=SAMPLING, groups=1, at_once=1, max_started=1, retries=1)
    (group,) = collected.groups
    assert (group.samples, group.baselines) == ((), ())
    assert len(group.failures) == 3


def test_the_first_samples_are_kept_and_scored_and_redundant_ones_aborted() -> None:
    replica, scorer, plain = FakeReplica(slow=["0-0-1", "0-3-0"]), FakeScorer(), FakeReplica()
    collected = fill([replica], scorer, redundant=1)
    fill([plain])
    assert [[one.trajectory.sample_index for one in group.samples] for group in collected.groups] == [
        [0, 2], [0, 1], [0, 1], [1, 2],
    ]  # fmt: skip
    assert {"0-0-1", "0-3-0"} <= set(replica.aborted)
    assert collected.tokens == 16
    seeds = {request.request_id: request.seed for request in replica.submitted}
    assert seeds.items() >= {request.request_id: request.seed for request in plain.submitted}.items()
    assert len(set(seeds.values())) == 12


def test_redundant_samples_make_up_for_lost_ones_and_the_baseline_is_never_redundant() -> None:
    one_group = {"groups": 1, "at_once": 1, "max_started": 1, "redundant": 1, "retries": 0}
    (group,) = fill([FakeReplica(failing=1)], **one_group).groups
    assert ([one.trajectory.sample_index for one in group.samples], len(group.failures)) == ([1, 2], 1)
    replica = FakeReplica(slow=["0-0-0"], late=["0-0-3"])
    (group,) = fill([replica], baseline=replace(SAMPLING, temperature=0.0), **one_group).groups
    assert [one.trajectory.sample_index for one in group.samples] == [1, 2]
    assert [one.trajectory.sample_index for one in group.baselines] == [3]
    assert replica.aborted == ["0-0-0"]
    assert [request.sampling.temperature for request in replica.submitted] == [1.0, 1.0, 1.0, 0.0]


def test_groups_that_were_given_back_before_are_waited_for_and_the_youngest_left_out() -> None:
    replica = FakeReplica(late=[0], slow=[3])
    collected = fill([replica], groups=2, waited_for=1)
    assert ids(collected.groups) == ["0", "1"]
    assert ids_of(collected.unfinished) == ["2", "3"]
    assert sorted(replica.aborted) == ["0-3-0", "0-3-1"]
    turned_down = fill(
        [FakeReplica(late=[0], slow=[3])], groups=2, waited_for=1, accept=lambda one: ids([one]) != ["0"]
    )
    assert (ids(turned_down.groups), ids(turned_down.rejected)) == (["1", "2"], ["0"])
    assert ids_of(turned_down.unfinished) == ["3"]


def both(replica: FakeReplica, *, urgent: bool = False, waited_for: int = 0) -> list[str]:
    """Ids in the order in which they are sent, one at a time, of two collections side by side."""

    async def work() -> None:
        scheduler = GenerateScheduler(Router([replica], max_running=1, max_in_flight=1, retries=0), FakeScorer())
        plain = GroupPlan(samples_per_group=2, sampling=SAMPLING)
        await asyncio.gather(
            collect_batch(scheduler.runner(plain, 0), tasks(), groups=2),
            collect_batch(scheduler.runner(replace(plain, urgent=urgent), 0), tasks(), groups=2, waited_for=waited_for),
        )
        assert not scheduler.engines._prioritized
        assert not scheduler.engines._affinities

    asyncio.run(asyncio.wait_for(work(), timeout=60))
    return [request.request_id for request in replica.submitted]


def test_urgent_plans_go_first_and_so_do_groups_that_are_waited_for() -> None:
    first, second = [f"0-{group}-{sample}" for group in (0, 1) for sample in (0, 1)], ["1-0-0", "1-0-1"]
    assert both(FakeReplica()) == [*first, *second, "1-1-0", "1-1-1"]
    assert both(FakeReplica(), urgent=True) == [*second, "1-1-0", "1-1-1", *first]
    assert both(FakeReplica(), waited_for=1) == [*second, *first, "1-1-0", "1-1-1"]


def test_a_counter_tells_time_by_its_clock() -> None:
    now, seen = 5.0, []
    counter = SampleCounter(2, lambda done, total: seen.append((done, total)), clock=lambda: now)
    counter.started = 3
    now = 7.0
    counter.sampled(11)
    now = 10.0
    assert (counter.seconds_since_last(), seen) == (3.0, [(1, 6)])


def test_a_runner_says_how_far_a_group_is() -> None:
    async def work() -> None:
        replica = FakeReplica(slow=["0-0-1"])
        scheduler = GenerateScheduler(Router([replica], max_running=9, max_in_flight=9, retries=0), FakeScorer())
        runner = scheduler.runner(GroupPlan(samples_per_group=2, sampling=SAMPLING), 0)
        running = asyncio.create_task(runner.run(0, make_task(0)))
        await all_follows()
        assert runner.describe(0) == "1 of 2 samples finished"
        await runner.stop([0])
        assert (await running).samples == ()

    asyncio.run(asyncio.wait_for(work(), timeout=60))
