"""Composite rewards: sums, products and gates; what happens when a part fails."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from reward_support import completion, outcomes, row

from roll_like import Completion, Outcome, Reward, RewardConfig, RewardResult, register_reward
from roll_like.builtin.rewards.composite import Composite, CompositeConfig
from roll_like.config.rewards import RewardsConfig
from roll_like.config.schema import json_schema
from roll_like.errors import ConfigError, DataError, RewardError
from roll_like.registry import REWARDS

SEEN: dict[str, list[str]] = {}
CLOSED: list[str] = []
#: What the reward `slow` waits for.
RELEASED = threading.Event()


class PartConfig(RewardConfig):
    field: str = "a"
    fail: bool = False


class Part(Reward):
    """The number that the row holds in a field; what it was asked is written down."""

    Config: ClassVar[type[RewardConfig]] = PartConfig
    required_fields: ClassVar[tuple[str, ...]] = ("a",)
    config: PartConfig

    def start(self) -> None:
        self.started = True

    def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        assert self.started
        SEEN.setdefault(self.config.field, []).extend(item.text for item in completions)
        if self.config.fail:
            raise ConnectionError("gone")
        return [RewardResult(item.metadata[self.config.field], {"twice": 2.0}) for item in completions]

    def close(self) -> None:
        CLOSED.append(self.config.field)


class AsyncPart(Part):
    async def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().score(completions)


@pytest.fixture(autouse=True)
def parts() -> Iterator[None]:
    REWARDS.names()
    before = dict(REWARDS._plugins)
    register_reward("part")(Part)
    register_reward("async_part")(AsyncPart)
    RELEASED.clear()
    register_reward("slow")(lambda item: RELEASED.wait(60))
    SEEN.clear()
    CLOSED.clear()
    yield
    RELEASED.set()
    REWARDS._plugins.clear()
    REWARDS._plugins.update(before)


def part(field: str, *, kind: str = "part", **settings: Any) -> dict[str, Any]:
    return {"type": kind, "name": field, "field": field, **settings}


def make(*use: dict[str, Any], **settings: Any) -> Composite:
    return Composite(CompositeConfig.model_validate({"use": use, **settings}))


def test_is_registered_by_its_entry_point() -> None:
    assert REWARDS.get("composite") is Composite


def test_a_weighted_sum_reports_its_parts() -> None:
    reward = make(part("a", weight=0.5), part("b", weight=-1.0, kind="async_part"))
    (result,) = outcomes(reward, [completion("x", a=1.0, b=0.25)])
    assert result == RewardResult(0.25, {"a": 1.0, "a/twice": 2.0, "b": 0.25, "b/twice": 2.0})


def test_a_product() -> None:
    reward = make(part("a"), part("b"), part("c"), combine="product")
    group = [completion("x", a=0.5, b=0.5, c=1.0), completion("y", a=1.0, b=0.0, c=1.0)]
    assert [outcome.value for outcome in outcomes(reward, group) if isinstance(outcome, RewardResult)] == [0.25, 0.0]


def test_a_gate_asks_the_others_about_what_passes_it_alone() -> None:
    reward = make(part("a"), part("b", weight=2.0), combine="gated", threshold=0.5, closed=-1.0)
    group = [completion("in", a=0.5, b=0.25), completion("out", a=0.4, b=1.0)]
    found = outcomes(reward, group)
    assert found[0] == RewardResult(0.5, {"a": 0.5, "a/twice": 2.0, "b": 0.25, "b/twice": 2.0, "gate": 1.0})
    assert found[1] == RewardResult(-1.0, {"a": 0.4, "a/twice": 2.0, "gate": 0.0})
    assert SEEN == {"a": ["in", "out"], "b": ["in"]}


def test_rounding_closes_no_gate() -> None:
    """Weights of 0.7, 0.2 and 0.1 add up to 0.9999999999999999."""
    weighted = {"type": "composite", "use": [part("a", weight=0.7), part("b", weight=0.2), part("c", weight=0.1)]}
    group = [completion("all", a=1.0, b=1.0, c=1.0, d=0.5), completion("most", a=1.0, b=1.0, c=0.99, d=0.5)]
    found = outcomes(make(weighted, part("d"), combine="gated"), group)
    assert [outcome.value for outcome in found if isinstance(outcome, RewardResult)] == [0.5, 0.0]


def test_a_closed_gate_calls_no_part() -> None:
    reward = make(part("a"), part("b", fail=True), combine="gated")
    (result,) = outcomes(reward, [completion("x", a=0.0, b=1.0)])
    assert isinstance(result, RewardResult)
    assert result.value == 0.0
    assert "b" not in SEEN


@pytest.mark.parametrize("combine", ["weighted", "product", "gated"])
def test_a_part_that_fails_loses_the_sample(combine: str) -> None:
    reward = make(part("a"), part("b", fail=True), combine=combine)
    (outcome,) = outcomes(reward, [completion("x", a=1.0, b=1.0)])
    assert isinstance(outcome, RewardError)
    assert "the part 'b' failed" in str(outcome)
    assert "gone" in str(outcome)


def test_a_gate_that_fails_loses_the_sample_instead_of_closing() -> None:
    (outcome,) = outcomes(make(part("a", fail=True), part("b"), combine="gated"), [completion("x", a=1.0, b=1.0)])
    assert isinstance(outcome, RewardError)


def test_a_part_that_hangs_is_told_to_the_worker() -> None:
    reward = make({"type": "slow"}, part("a"), timeout_seconds=0.3)
    (outcome,) = outcomes(reward, [completion("x", a=1.0)])
    assert isinstance(outcome, RewardError)
    assert reward.hung == 1
    RELEASED.set()
    while reward.hung:
        time.sleep(0.01)


def test_rows_are_checked_by_every_part() -> None:
    reward = make(part("a"), {"type": "math"})
    reward.check_row(row("42", a=1.0))
    with pytest.raises(DataError, match=r"data\.jsonl:7: the part 'a' needs the field 'a'"):
        reward.check_row(row("42"))
    with pytest.raises(DataError, match=r"data\.jsonl:7: the part 'math' needs the field 'answer'"):
        reward.check_row(row(a=1.0))
    with pytest.raises(DataError, match="cannot be parsed as mathematics"):
        reward.check_row(row("yes", a=1.0))
    reward.close()
    assert CLOSED == ["a"]


def test_closing_closes_the_parts() -> None:
    reward = make(part("a"), part("b"))
    reward.start()
    reward.close()
    assert sorted(CLOSED) == ["a", "b"]


def test_composites_hold_composites_and_survive_the_configuration_file() -> None:
    inner = {"type": "composite", "name": "inner", "use": [part("a"), part("b")], "combine": "product"}
    section = {"use": [{"type": "composite", "use": [inner, part("c")]}]}
    config = RewardsConfig.model_validate(section)
    again = RewardsConfig.model_validate(config.model_dump(mode="json"))
    assert again == config
    reward = Composite(again.use[0])  # type: ignore[arg-type]
    (result,) = outcomes(reward, [completion("x", a=0.5, b=0.5, c=1.0)])
    assert isinstance(result, RewardResult)
    assert result.value == 1.25
    assert result.details["inner/b/twice"] == 2.0


def test_the_schema_of_the_configuration_is_finite() -> None:
    assert "threshold" in str(json_schema(RewardsConfig))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use": [part("a")]}, "expected a list of 2 or more"),
        ({"use": [part("a"), part("a")]}, "two parts are called 'a'"),
        ({"use": [part("a", sources=["s"]), part("b")]}, "`sources`, which only the composite itself"),
        ({"use": [part("a", domains=["s"]), part("b")]}, "`domains`, which only the composite itself"),
        ({"use": [part("a", weight=2.0), part("b")], "combine": "product"}, "no effect with combine: product"),
        ({"use": [part("a", weight=2.0), part("b")], "combine": "gated"}, "weight of the part 'a'"),
        ({"use": [{"type": "matth"}, part("b")]}, "'math'"),
        ({"use": [part("a", fial=True), part("b")]}, "fial"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompositeConfig.model_validate(settings)


def test_the_answer_is_that_of_the_first_part_that_compares_answers() -> None:
    register_reward("answering")(lambda item: RewardResult(1.0, answer=item.text))
    for combine in ("weighted", "product", "gated"):
        made = Composite(CompositeConfig.model_validate({"combine": combine, "use": ["part", "answering"]}))
        (result,) = outcomes(made, [completion("42", a=1.0)])
        assert isinstance(result, RewardResult)
        assert result.answer == "42"
        made.close()
