import asyncio
import json
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from reward_support import make_group

from roll_like import Completion, Outcome, Reward, RewardConfig, RewardResult, register_reward
from roll_like.errors import ConfigError, PluginError, RewardError
from roll_like.registry import REWARDS
from roll_like.rewards.scorer import Scorer, scores_task
from roll_like.types import Failure, Group, Scored, StopReason, Trajectory

Add = Callable[..., str]


@pytest.fixture
def add() -> Iterator[Add]:
    """Register a plugin under a name of its own, for one test."""
    REWARDS.names()  # load what is installed, so that it survives the clean-up
    before = dict(REWARDS._plugins)

    def register(plugin: Any, name: str = "custom") -> str:
        register_reward(name)(plugin)
        return name

    yield register
    REWARDS._plugins.clear()
    REWARDS._plugins.update(before)


def score(group: Group[Trajectory], *configs: RewardConfig, timeout: float = 5.0, retries: int = 0) -> Group[Scored]:
    return asyncio.run(Scorer(configs, timeout_seconds=timeout, retries=retries).score_group(group))


def test_a_function_sees_the_completion(add: Add) -> None:
    seen: list[Completion] = []

    def length(completion: Completion) -> float:
        seen.append(completion)
        return float(len(completion.text))

    scored = score(make_group("a", "bcd"), RewardConfig(type=add(length)))
    assert [sample.reward for sample in scored.samples] == [1.0, 3.0]
    assert [sample.trajectory.text for sample in scored.samples] == ["a", "bcd"]
    assert scored.failures == ()
    assert seen[0] == Completion(
        text="a",
        messages=({"role": "user", "content": "Say it."},),
        answer="42",
        metadata={"level": 3},
        stop_reason=StopReason.STOP,
        response_tokens=2,
    )


def test_an_async_function(add: Add) -> None:
    async def length(completion: Completion) -> float:
        await asyncio.sleep(0)
        return float(len(completion.text))

    assert [s.reward for s in score(make_group("a", "bc"), RewardConfig(type=add(length))).samples] == [1.0, 2.0]


def test_the_first_reward_that_compares_answers_says_which(add: Add) -> None:
    silent = add(lambda completion: 1.0, "silent")
    first = add(lambda completion: RewardResult(1.0, answer=completion.text + "."), "first")
    second = add(lambda completion: RewardResult(1.0, answer="other"), "second")
    configs = [RewardConfig(type=name) for name in (silent, first, second)]
    assert [sample.answer for sample in score(make_group("a", "b"), *configs).samples] == ["a.", "b."]
    assert [sample.answer for sample in score(make_group("a"), configs[0]).samples] == [None]
    odd = score(make_group("a"), RewardConfig(type=add(lambda completion: RewardResult(1.0, answer=7))))
    assert "answer should be a text or None, found 7" in odd.failures[0].error


def test_a_class_sees_the_group_and_has_settings(add: Add) -> None:
    class RankConfig(RewardConfig):
        best: float

    class Rank(Reward):
        Config: ClassVar[type[RewardConfig]] = RankConfig
        config: RankConfig

        async def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            longest = max(len(completion.text) for completion in completions)
            return [self.config.best * (len(completion.text) == longest) for completion in completions]

    scored = score(make_group("a", "bcd", "ef"), RankConfig(type=add(Rank), best=2.0))
    assert [sample.reward for sample in scored.samples] == [0.0, 2.0, 0.0]


def test_weights_names_and_details(add: Add) -> None:
    def constant(completion: Completion) -> RewardResult:
        return RewardResult(np.float32(0.5), {"strict": True, "n": 3})

    name = add(constant)
    scored = score(
        make_group("a"), RewardConfig(type=name, weight=2.0), RewardConfig(type=name, name="second", weight=-0.5)
    )
    (sample,) = scored.samples
    assert sample.reward == pytest.approx(2.0 * 0.5 - 0.5 * 0.5)
    assert sample.rewards == {"custom": 0.5, "second": 0.5}
    assert sample.details == {"custom/strict": 1.0, "custom/n": 3.0, "second/strict": 1.0, "second/n": 3.0}
    assert type(sample.rewards["custom"]) is float


def test_each_source_is_scored_by_its_own_rewards(add: Add) -> None:
    name = add(lambda completion: 1.0)
    configs = (
        RewardConfig(type=name, sources=("chat",)),
        RewardConfig(type=name, name="maths", sources=("gsm",)),
        RewardConfig(type=name, name="all", weight=3.0),
    )
    chat = score(make_group("a"), *configs).samples[0]
    gsm = score(make_group("a", source="gsm"), *configs).samples[0]
    assert chat.rewards == {"custom": 1.0, "all": 1.0}
    assert gsm.rewards == {"maths": 1.0, "all": 1.0}
    assert chat.reward == 4.0


def test_a_source_without_reward_is_no_reward_of_zero(add: Add) -> None:
    config = RewardConfig(type=add(lambda completion: 1.0), sources=("other",))
    with pytest.raises(ConfigError, match="'chat'"):
        score(make_group("a"), config)


def test_two_rewards_of_one_name(add: Add) -> None:
    config = RewardConfig(type=add(lambda completion: 1.0))
    with pytest.raises(ConfigError, match="two rewards are called 'custom'"):
        Scorer([config, config], timeout_seconds=1, retries=0)


def test_a_function_loses_only_the_sample_that_raises(add: Add) -> None:
    def picky(completion: Completion) -> float:
        if completion.text == "bad":
            raise ValueError("cannot read this")
        return 1.0

    scored = score(make_group("a", "bad", "c"), RewardConfig(type=add(picky)))
    assert [(s.trajectory.sample_index, s.reward) for s in scored.samples] == [(0, 1.0), (2, 1.0)]
    (failure,) = scored.failures
    assert (failure.stage, failure.name, failure.origin) == ("reward", "custom", "data.jsonl:1")
    assert failure.error.startswith(f"ValueError: cannot read this ({__file__}:")


def test_a_failure_is_shown_at_the_authors_line_not_at_a_librarys(add: Add) -> None:
    def reads_json(completion: Completion) -> float:
        return float(json.loads(completion.text))

    (failure,) = score(make_group("{"), RewardConfig(type=add(reads_json))).failures
    assert failure.error.startswith("JSONDecodeError: ")
    assert failure.error.endswith(", `return float(json.loads(completion.text))`)")


def test_a_class_that_raises_loses_the_group_and_earlier_failures_stay(add: Add) -> None:
    class Broken(Reward):
        def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            raise KeyError("nowhere")

    earlier = Failure(stage="generate", name="replica 0", error="lost", origin="data.jsonl:1")
    scored = score(make_group("a", "b", failures=(earlier,)), RewardConfig(type=add(Broken)))
    assert scored.samples == ()
    assert scored.failures[0] is earlier
    assert len(scored.failures) == 3
    assert "KeyError: 'nowhere'" in scored.failures[2].error


def test_an_error_in_a_verdicts_place_loses_one_sample(add: Add) -> None:
    class Half(Reward):
        def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            return [1.0, RewardError("judge refused"), RewardResult(0.0)]

    scored = score(make_group("a", "b", "c"), RewardConfig(type=add(Half)))
    assert [sample.trajectory.sample_index for sample in scored.samples] == [0, 2]
    assert scored.failures[0].error == "judge refused"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "1 results for 2 completions"),
        ([1.0, 1.0, 1.0], "3 results for 2 completions"),
        (None, "found NoneType"),
        ("10", "found str"),
        ({0: 1.0, 1: 1.0}, "found dict"),
        ([math.nan, math.nan], "finite number, found nan"),
        ([math.inf, -math.inf], "finite number, found"),
        (["1", "1"], "found '1' (str)"),
        ([None, None], "found None"),
        ([RewardResult(1.0, {"x": math.nan})] * 2, "detail 'x'"),
        ([RewardResult(1.0, None)] * 2, "AttributeError"),  # type: ignore[arg-type]
        (np.ones((2, 2)), "ndarray"),
    ],
)
def test_wrong_returns_are_failures(add: Add, returned: Any, message: str) -> None:
    class Wrong(Reward):
        def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            return returned

    scored = score(make_group("a", "b"), RewardConfig(type=add(Wrong)))
    assert scored.samples == ()
    assert len(scored.failures) == 2
    for failure in scored.failures:
        assert message in failure.error


def test_arrays_and_tuples_are_fine(add: Add) -> None:
    class Array(Reward):
        def score(self, completions: Sequence[Completion]) -> Any:
            return np.array([0.25, 0.5], np.float32)

    assert [s.reward for s in score(make_group("a", "b"), RewardConfig(type=add(Array))).samples] == [0.25, 0.5]


def test_only_failed_samples_of_a_function_are_tried_again(add: Add) -> None:
    calls: list[str] = []

    def flaky(completion: Completion) -> float:
        calls.append(completion.text)
        if completion.text == "b" and calls.count("b") < 3:
            raise ConnectionError("later")
        return 1.0

    config = RewardConfig(type=add(flaky))
    assert len(score(make_group("a", "b"), config, retries=2).samples) == 2
    assert calls == ["a", "b", "b", "b"]
    calls.clear()
    assert len(score(make_group("a", "b"), config, retries=1).failures) == 1


def test_a_group_reward_is_asked_again_about_the_whole_group(add: Add) -> None:
    sizes: list[int] = []

    class Flaky(Reward):
        async def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            sizes.append(len(completions))
            if len(sizes) == 1:
                return [0.25, RewardError("later")]
            return [0.75, 0.5]

    scored = score(make_group("a", "b"), RewardConfig(type=add(Flaky)), retries=3)
    assert sizes == [2, 2]
    assert [sample.reward for sample in scored.samples] == [0.25, 0.5]


def test_one_failing_reward_of_two_loses_the_sample(add: Add) -> None:
    def fails(completion: Completion) -> float:
        raise OSError("down")

    good = RewardConfig(type=add(lambda completion: 1.0, "good"))
    scored = score(make_group("a"), good, RewardConfig(type=add(fails, "bad")))
    assert scored.samples == ()
    assert [failure.name for failure in scored.failures] == ["bad"]


def test_an_async_reward_that_is_too_slow_is_tried_again_then_lost(add: Add) -> None:
    calls: list[int] = []

    class Slow(Reward):
        async def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            calls.append(1)
            await asyncio.sleep(30)
            return [1.0]

    scored = score(make_group("a"), RewardConfig(type=add(Slow)), timeout=0.05, retries=1)
    assert len(calls) == 2
    assert "no result within 0.05 s" in scored.failures[0].error


def test_an_async_reward_that_ignores_its_cancellation_does_not_hold_the_group(add: Add) -> None:
    one_done = asyncio.Event()

    class Stubborn(Reward):
        async def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                await one_done.wait()
                raise ValueError("late") from None
            return [1.0]

    async def run() -> None:
        scorer = Scorer([RewardConfig(type=add(Stubborn))], timeout_seconds=0.05, retries=0)
        scored = await asyncio.wait_for(scorer.score_group(make_group("a")), 20)
        assert len(scored.failures) == 1
        one_done.set()
        await asyncio.sleep(0.05)

    asyncio.run(run())


def test_a_hanging_thread_is_counted_until_it_ends_and_is_not_tried_again(add: Add) -> None:
    release, calls = threading.Event(), []

    class Hangs(Reward):
        def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            calls.append(1)
            if len(calls) == 1:
                release.wait(60)
            return [1.0]

    async def run() -> None:
        scorer = Scorer([RewardConfig(type=add(Hangs))], timeout_seconds=0.5, retries=5)
        lost = await scorer.score_group(make_group("a"))
        assert (len(lost.failures), len(calls), scorer.hung) == (1, 1, 1)
        assert "a thread cannot be stopped" in lost.failures[0].error
        # others are still scored
        assert (await scorer.score_group(make_group("b"))).samples[0].reward == 1.0
        release.set()
        async with asyncio.timeout(60):  # the thread ends, and is counted no longer
            while scorer.hung:
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_synchronous_reward_runs_one_group_at_a_time_off_the_loop(add: Add) -> None:
    running, most, threads = 0, 0, set()

    class Counts(Reward):
        def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            threads.add(threading.current_thread())
            time.sleep(0.01)
            running -= 1
            return [1.0]

    async def run() -> None:
        scorer = Scorer([RewardConfig(type=add(Counts))], timeout_seconds=60, retries=0)
        await asyncio.gather(*(scorer.score_group(make_group("a")) for _ in range(4)))

    asyncio.run(run())
    assert most == 1
    assert threading.main_thread() not in threads


def test_async_rewards_judge_many_groups_at_a_time(add: Add) -> None:
    running, most = 0, 0

    class Counts(Reward):
        async def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            return [1.0]

    async def run() -> None:
        scorer = Scorer([RewardConfig(type=add(Counts))], timeout_seconds=60, retries=0)
        await asyncio.gather(*(scorer.score_group(make_group("a")) for _ in range(4)))

    asyncio.run(run())
    assert most == 4


def test_a_plain_method_may_return_an_awaitable(add: Add) -> None:
    async def later() -> Sequence[Outcome]:
        return [1.0]

    class Later(Reward):
        def score(self, completions: Sequence[Completion]) -> Awaitable[Sequence[Outcome]]:
            return later()

    assert score(make_group("a"), RewardConfig(type=add(Later))).samples[0].reward == 1.0


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration("end")])
def test_even_exit_in_a_reward_is_only_a_failure(add: Add, error: BaseException) -> None:
    class Leaves(Reward):
        def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            raise error

    scored = score(make_group("a"), RewardConfig(type=add(Leaves)))
    assert type(error).__name__ in scored.failures[0].error


def test_an_empty_group_stays_empty(add: Add) -> None:
    def never(completion: Completion) -> float:
        raise AssertionError("called")

    lost = Failure(stage="generate", name="replica 0", error="lost", origin="data.jsonl:1")
    scored = score(make_group(failures=(lost,)), RewardConfig(type=add(never)))
    assert (scored.samples, scored.failures) == ((), (lost,))


def test_a_reward_that_cannot_start_says_so(add: Add) -> None:
    class NoStart(Reward):
        def __init__(self, config: RewardConfig) -> None:
            raise FileNotFoundError("weights.bin")

    with pytest.raises(RewardError, match=r"'custom' cannot start: [\s\S]*weights\.bin"):
        Scorer([RewardConfig(type=add(NoStart))], timeout_seconds=1, retries=0)


def test_close_closes_all_and_reports(add: Add) -> None:
    closed: list[str] = []

    class Closes(Reward):
        def close(self) -> None:
            closed.append(self.config.name or "")
            if self.config.name == "first":
                raise OSError("stuck")

    name = add(Closes)
    configs = [RewardConfig(type=name, name="first"), RewardConfig(type=name, name="second")]
    with pytest.raises(RewardError, match=r"'first' failed: [\s\S]*stuck"):
        Scorer(configs, timeout_seconds=1, retries=0).close()
    assert closed == ["first", "second"]


def test_only_rewards_can_be_registered(add: Add) -> None:
    class NotAReward:
        pass

    class WrongConfig(Reward):
        Config = int  # type: ignore[assignment]

    with pytest.raises(PluginError, match="NotAReward is not a Reward"):
        add(NotAReward)
    with pytest.raises(PluginError, match="int are not a RewardConfig"):
        add(WrongConfig)
    with pytest.raises(PluginError, match="found 3"):
        add(3)


def test_a_class_without_score_says_so(add: Add) -> None:
    class Empty(Reward):
        pass

    assert "defines no `score`" in score(make_group("a"), RewardConfig(type=add(Empty))).failures[0].error


def test_a_domain_names_its_rewards() -> None:
    plain, maths = RewardConfig(type="plain"), RewardConfig(type="maths")
    task = make_group("a").task
    assert scores_task(plain, task, {})
    assert [scores_task(one, task, {task.domain: ["maths"]}) for one in (plain, maths)] == [False, True]
    assert scores_task(plain, task, {"another": ["maths"]})
    assert not scores_task(RewardConfig(type="plain", sources=("gsm",)), task, {})


def test_a_reward_names_its_domains() -> None:
    task = replace(make_group("a").task, source="mix", domain="math__dapo")
    for names, scores in ((("math__dapo",), True), (("code", "math__*"), True), (("math",), False)):
        assert scores_task(RewardConfig(type="plain", domains=names), task, {}) is scores
    for source, scores in (("mix", True), ("other", False)):
        assert scores_task(RewardConfig(type="plain", sources=(source,), domains=("*dapo",)), task, {}) is scores
    assert not scores_task(RewardConfig(type="plain", domains=("math__*",)), task, {"math__dapo": ["other"]})


def test_the_time_of_a_group_begins_with_its_turn(add: Add) -> None:
    class Bounded(Reward):
        running = most = 0

        @property
        def side_by_side(self) -> int:
            return 2

        async def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            self.running += 1
            Bounded.most = max(Bounded.most, self.running)
            await asyncio.sleep(0.2)
            self.running -= 1
            return [1.0 for _ in completions]

    async def score() -> list[Group[Scored]]:
        scorer = Scorer([RewardConfig(type=add(Bounded))], timeout_seconds=1.0, retries=0)
        return await asyncio.gather(*(scorer.score_group(make_group("a")) for _ in range(12)))

    assert [len(scored.samples) for scored in asyncio.run(score())] == [1] * 12
    assert Bounded.most == 2


def test_a_reward_is_started_once_and_one_that_cannot_says_why(add: Add) -> None:
    class Starts(Reward):
        started = 0

        def start(self) -> None:
            Starts.started += 1
            if self.config.name == "broken":
                raise FileNotFoundError("no model")

        def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
            return [float(Starts.started) for _ in completions]

    name = add(Starts)
    assert score(make_group("a"), RewardConfig(type=name)).samples[0].reward == 1.0
    with pytest.raises(RewardError, match=r"'broken' cannot start.*(?s:.*)no model"):
        score(make_group("a"), RewardConfig(type=name, name="broken"))


def test_only_score_is_awaited() -> None:
    class Opens(Reward):
        async def start(self) -> None:  # type: ignore[override]
            self.session = 1

    with pytest.raises(PluginError, match="`start` is async, and only `score` is awaited") as refused:
        register_reward("opens_a_session")(Opens)
    assert "in `score`" in str(refused.value)
