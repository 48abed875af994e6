"""Rewards of steps by hand-computed numbers: where they go, and how groups compare them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from algorithm_samples import make_scored, make_task
from chat_templates import renderer
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from roll_like.agents.episode_rewards import with_rewards
from roll_like.algorithms.advantages import AdvantageEstimator
from roll_like.algorithms.kl import KLController
from roll_like.config.algorithm import AlgorithmConfig
from roll_like.config.rollout import RolloutConfig
from roll_like.data.chat import Renderer
from roll_like.data.steps import last_tokens
from roll_like.errors import RewardError
from roll_like.inference.stops import ResponseDecoder
from roll_like.policy_gradient.advantages import Advantages
from roll_like.policy_gradient.step_rewards import with_step_rewards
from roll_like.registry import ADVANTAGES
from roll_like.rollout.collection import Collected
from roll_like.rollout.metrics import rewards_differ, rollout_metrics
from roll_like.rollout.source import GroupFilter
from roll_like.types import Group, Scored, StepScore, StopReason
from roll_like.values import reduce

R = math.sqrt(0.32 / 3)  # standard deviation of 0.9, 0.1, 0.5 and 0.5


def estimator(name: str, **settings: Any) -> AdvantageEstimator:
    plugin = ADVANTAGES.get(name)
    made: AdvantageEstimator = plugin(plugin.Config(**settings))
    return made


def answer(index: int, tokens: int, steps: Sequence[tuple[int, float]], value: float = 0.0, **others: float) -> Scored:
    """An answer whose steps end at tokens; `value` is what their reward gives as a whole, `others` further rewards."""
    sample = make_scored(make_task(), index, 0.0, [1] * tokens)
    rewards = {"steps": value, **others} if steps else others
    return replace(
        sample,
        reward=sum(rewards.values()),
        rewards=rewards,
        weights=dict.fromkeys(rewards, 1.0),
        step_scores={"steps": tuple(StepScore(score, at) for at, score in steps)} if steps else {},
        step_rewards=tuple(steps),
        step_value=value if steps else 0.0,
    )


def group_of(*samples: Scored, baselines: Sequence[Scored] = ()) -> Group[Scored]:
    return Group(task=samples[0].trajectory.task, samples=samples, failures=(), baselines=tuple(baselines))


def responses(samples: Sequence[Any]) -> list[list[float]]:
    return [sample.advantages[2:].tolist() for sample in samples]


def test_steps_are_compared_over_the_group_and_added_up_from_the_end() -> None:
    # 0.9 and 0.1 against 0.5 twice: ±0.4/R, 0, 0
    group = group_of(answer(0, 5, [(1, 0.9), (3, 0.1)]), answer(1, 3, [(0, 0.5), (2, 0.5)]))
    unit = 0.4 / (R + 1e-6)
    first, second = responses(estimator("grpo_process").assign([group]))
    # the last token, which ends the answer behind its last step, has no step to come
    assert first == pytest.approx([0, 0, -unit, -unit, 0], abs=1e-6)
    assert second == pytest.approx([0, 0, 0], abs=1e-6)
    first, _ = responses(estimator("grpo_process", divide_by_std=False).assign([group]))
    assert first == pytest.approx([0, 0, -0.4, -0.4, 0], abs=1e-6)


def test_rewards_without_steps_are_compared_as_outcomes() -> None:
    group = group_of(
        answer(0, 4, [(1, 0.9), (3, 0.1)], value=0.1, right=1.0),
        answer(1, 3, [(0, 0.5), (2, 0.5)], value=0.5, right=0.0),
    )
    unit, half = 0.4 / (R + 1e-6), math.sqrt(0.5)
    first, second = responses(estimator("grpo_process").assign([group]))
    assert first == pytest.approx([half, half, half - unit, half - unit], rel=1e-4)
    assert second == pytest.approx([-half] * 3, rel=1e-4)
    first, second = responses(estimator("grpo_process", outcome_weight=0.5).assign([group]))
    assert first == pytest.approx([half / 2, half / 2, half / 2 - unit, half / 2 - unit], rel=1e-4)
    first, second = responses(estimator("grpo_process", outcome_weight=0.0).assign([group]))
    assert second == pytest.approx([0, 0, 0], abs=1e-6)


def test_one_step_an_answer_is_grpo() -> None:
    scores = [0.9, 0.2, 0.4]
    steps = group_of(*(answer(at, 3, [(2, score)], value=score) for at, score in enumerate(scores)))
    whole = group_of(*(answer(at, 3, [], right=score) for at, score in enumerate(scores)))
    expected = responses(estimator("grpo").assign([whole]))
    assert responses(estimator("grpo_process").assign([steps])) == [pytest.approx(each) for each in expected]
    # as outcomes they are the same, by their value
    assert responses(estimator("grpo").assign([steps])) == [pytest.approx(each) for each in expected]


def test_a_group_without_steps_is_compared_by_its_outcomes_alone() -> None:
    with_steps = group_of(answer(0, 2, [(1, 0.9)]), answer(1, 2, [(1, 0.1)]))
    without = group_of(answer(0, 2, [], right=1.0), answer(1, 2, [], right=0.0))
    found = responses(estimator("grpo_process").assign([with_steps, without]))
    assert found[2] == pytest.approx([math.sqrt(0.5)] * 2, rel=1e-4)
    with pytest.raises(RewardError, match="no reward gave any for the samples of this step"):
        estimator("grpo_process").assign([without])


def test_turns_with_rewards_are_steps() -> None:
    """Two turns of an episode, with the environment's token between them, as two steps of an answer."""

    def played(index: int, rewards: tuple[float, float]) -> Scored:
        sample = make_scored(make_task(), index, sum(rewards), [1, 0, 1])
        trajectory = replace(sample.trajectory, turns=np.array([-1, -1, 0, -1, 1], np.int32))
        return replace(sample, trajectory=trajectory, turn_rewards=rewards)

    found = responses(estimator("grpo_process").assign([group_of(played(0, (0.9, 0.1)), played(1, (0.5, 0.5)))]))
    unit = 0.4 / (R + 1e-6)
    assert found == [pytest.approx([0, 0, -unit], abs=1e-6), pytest.approx([0, 0, 0], abs=1e-6)]


def test_penalties_are_of_the_step_that_their_tokens_belong_to() -> None:
    group = group_of(answer(0, 4, [(1, 0.9), (2, 0.1)]), answer(1, 2, [(0, 0.5), (1, 0.5)]))
    penalties = [np.array([0, 0, 0.1, 0.2, 0.3, 0.4], np.float32), np.zeros(4, np.float32)]
    first, second = responses(estimator("grpo_process", divide_by_std=False).assign([group], penalties))
    # 0.9 − 0.3, 0.1 − 0.7, 0.5 and 0.5: their mean is 0.25
    assert first == pytest.approx([0.35 - 0.85, 0.35 - 0.85, -0.85, 0], abs=1e-6)
    assert second == pytest.approx([0.5, 0.25], abs=1e-6)


def test_returns_have_scores_of_steps_in_the_place_of_their_reward() -> None:
    group = group_of(answer(0, 4, [(0, 0.5), (2, 0.25)], value=0.25, right=1.0))
    assert responses(estimator("reinforce").assign([group])) == [[1.75, 1.25, 1.25, 1.0]]
    # before they are placed, the reward is one number
    plain = replace(group.samples[0], step_rewards=(), step_value=0.0)
    assert responses(estimator("reinforce").assign([group_of(plain)])) == [[1.25] * 4]


def test_a_greedy_answer_is_compared_by_all_that_its_tokens_earn() -> None:
    greedy = answer(9, 2, [(0, 0.5), (1, 0.5)], value=0.5, right=1.0)
    group = group_of(answer(0, 2, [(0, 1.0), (1, 0.5)], value=0.5, right=0.0), baselines=[greedy])
    assert responses(estimator("remax").assign([group])) == [[1.5 - 2.0, 0.5 - 2.0]]


def test_of_an_episode_steps_are_of_the_last_turn_and_its_reward_is_counted_once() -> None:
    sample = make_scored(make_task(), 0, 1.0, [1, 0, 1, 1])
    trajectory = replace(sample.trajectory, turns=np.array([-1, -1, 0, -1, 1, 1], np.int32))
    played = replace(
        sample, trajectory=trajectory, rewards={"return": 1.0}, weights={"return": 1.0}, turn_rewards=(0.25, 0.75)
    )
    added = replace(
        played,
        reward=0.5 + 0.1,
        rewards={"steps": 0.5, "short": 0.1},
        weights={"steps": 1.0, "short": 1.0},
        step_scores={"steps": (StepScore(0.5, 1), StepScore(0.75, 2))},
    )
    both = with_rewards(played, added, 1.0)
    assert both.reward == pytest.approx(1.6)
    assert both.turn_rewards == pytest.approx((0.25, 0.75 + 0.1))
    unplaced = responses(estimator("reinforce").assign([group_of(both)]))[0]
    assert unplaced == pytest.approx([1.6, 0, 1.35, 1.35])
    placed = replace(both, step_rewards=((1, 0.5), (2, 0.75)), step_value=0.5)
    found = responses(estimator("reinforce").assign([group_of(placed)]))[0]
    assert found == pytest.approx([0.25 + 1.25 + 0.85, 0, 1.25 + 0.85, 0.75 + 0.85])


def advantages_of(name: str, group: Group[Scored], **shaping: Any) -> list[list[float]]:
    plugin = ADVANTAGES.get(name)
    algorithm = AlgorithmConfig(advantage=plugin.Config(), reward_shaping=shaping)
    kl = KLController(algorithm.kl)
    assigned = Advantages(plugin(plugin.Config()), algorithm, kl, None, max_response_tokens=8).assign([group])
    return responses(assigned.samples)


def cut_and_whole(**others: float) -> Group[Scored]:
    cut = answer(0, 4, [(1, 0.9), (2, 0.1)], value=0.1, **others)
    cut = replace(cut, trajectory=replace(cut.trajectory, stop_reason=StopReason.LENGTH))
    return group_of(cut, answer(1, 4, [(1, 0.5), (3, 0.5)], value=0.5, **dict.fromkeys(others, 0.0)))


@pytest.mark.parametrize("truncated", [{"reward": 0.0}, {"factor": 0.0}])
def test_an_answer_that_was_cut_has_one_step_with_the_reward_in_its_place(truncated: dict[str, float]) -> None:
    # 0 against 0.5 twice; what no step stands for is 0 for both
    unit = 1 / (3 * math.sqrt(1 / 12) + 1e-6)
    first, second = advantages_of("grpo_process", cut_and_whole(), truncated=truncated)
    assert first == pytest.approx([-unit] * 4, rel=1e-4)
    assert second == pytest.approx([unit, unit, unit / 2, unit / 2], rel=1e-4)
    assert advantages_of("reinforce", cut_and_whole(), truncated=truncated) == [[0.0] * 4, [1.0, 1.0, 0.5, 0.5]]
    assert advantages_of("reinforce", cut_and_whole(right=1.0), truncated=truncated)[0] == [0.0] * 4


def test_a_reward_in_place_and_a_penalty_beside_it_are_each_counted_once() -> None:
    group = cut_and_whole(right=1.0)
    found = advantages_of("reinforce", group, truncated={"reward": -1.0}, length_penalty={"coefficient": 0.5})
    assert found == [pytest.approx([-1.25] * 4), pytest.approx([0.75, 0.75, 0.25, 0.25])]
    # steps −1 against 0.5 twice; the penalty is the same for both
    unit = 1 / (math.sqrt(0.75) + 1e-6)
    found = advantages_of("grpo_process", group, truncated={"reward": -1.0}, length_penalty={"coefficient": 0.5})
    assert found == [pytest.approx([-unit] * 4, rel=1e-4), pytest.approx([unit, unit, unit / 2, unit / 2], rel=1e-4)]


def test_a_factor_is_of_the_steps_and_of_the_other_rewards() -> None:
    found = advantages_of("reinforce", cut_and_whole(right=1.0), truncated={"factor": 0.5})
    assert found[0] == pytest.approx([1.0, 1.0, 0.55, 0.5])
    scaled = group_of(answer(0, 4, [(1, 0.45), (2, 0.05)]), answer(1, 4, [(1, 0.5), (3, 0.5)]))
    expected = responses(estimator("grpo_process").assign([scaled]))
    found = advantages_of("grpo_process", cut_and_whole(), truncated={"factor": 0.5})
    assert found == [pytest.approx(each, rel=1e-5) for each in expected]


@pytest.mark.parametrize("shaping", [{"clip": 0.3}, {"normalise": {"mean": "group", "std": "group"}}])
@pytest.mark.parametrize("name", ["grpo_process", "reinforce"])
def test_whole_rewards_are_not_standardised_or_clipped_where_steps_are_used(name: str, shaping: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="normalise and clip change a reward as a whole, but sample 0 of task"):
        advantages_of(name, cut_and_whole(), **shaping)
    assert advantages_of("dr_grpo", cut_and_whole(), clip=0.3)[0] == pytest.approx([-0.1] * 4)
    if name == "reinforce":
        assert advantages_of(name, group_of(answer(0, 2, [], right=1.0)), clip=0.3) == [pytest.approx([0.3] * 2)]


def valued(index: int, value: float) -> Scored:
    """An answer of two tokens to which the reward of the others' steps gave a value alone."""
    sample = answer(index, 2, [], right=value)
    return replace(sample, rewards={"steps": value}, weights={"steps": 1.0})


def test_where_an_answer_of_the_group_has_steps_a_bare_value_is_one_step() -> None:
    bare = valued(0, 0.9)
    unscored = answer(2, 2, [], right=0.0)
    group = group_of(bare, answer(1, 3, [(1, 0.5), (2, 0.5)], value=0.5), unscored)
    unplaced = [replace(sample, step_rewards=(), step_value=0.0) for sample in group.samples]
    (placed,) = with_step_rewards([group_of(*unplaced, baselines=[bare])], lambda: renderer("chatml"))
    assert [sample.step_rewards for sample in (placed.samples[0], *placed.baselines)] == [((1, 0.9),)] * 2
    assert [sample.step_value for sample in placed.samples] == [0.9, 0.5, 0.0]
    assert placed.samples[2] is unplaced[2]
    # a turn's reward has it already; other agents and other groups are not compared with these
    turns, other = replace(bare, turn_rewards=(0.9,)), replace(bare, agent="other")
    assert with_step_rewards([group_of(turns, other, unplaced[1])], lambda: renderer("chatml"))[0].samples[:2] == (
        turns,
        other,
    )
    assert with_step_rewards([group, group_of(bare, bare)], lambda: renderer("chatml"))[1].samples == (bare, bare)


@pytest.mark.parametrize(("steps", "differ"), [([1.0, 0.0], True), ([0.0, 0.0], False)])
def test_a_group_is_learned_from_where_its_steps_differ(steps: list[float], differ: bool) -> None:
    group = group_of(*(answer(at, 2, list(enumerate(scores))) for at, scores in enumerate([steps, steps[::-1]])))
    config = RolloutConfig(
        prompts_per_step=1, samples_per_prompt=2, drop_zero_variance_groups=True, max_oversampling=2.0
    )
    assert GroupFilter(config, of_steps=True)(group) is differ
    assert not GroupFilter(config)(group)
    collected = Collected(groups=(group,), rejected=(), failures=(), started=1, tokens=8)
    for of_steps, share in ((True, float(not differ)), (False, 1.0)):
        assert reduce(rollout_metrics(collected, 3, of_steps=of_steps))["rollout/groups/zero_variance"] == share
    assert (advantages_of("grpo_process", group) != [[0.0, 0.0]] * 2) is differ


def test_bare_values_are_steps_and_episodes_that_were_all_won_differ_in_nothing() -> None:
    won = group_of(*(replace(answer(at, 2, [], right=1.0), turn_rewards=(0.0, 1.0)) for at in range(2)))
    assert not rewards_differ(won.samples, of_steps=True)
    bare = group_of(answer(0, 2, [(0, 0.5), (1, 0.5)], value=0.5), valued(1, 0.5))
    assert not rewards_differ(bare.samples, of_steps=True)
    bare = group_of(answer(0, 2, [(0, 0.9), (1, 0.5)], value=0.5), valued(1, 0.5))
    assert rewards_differ(bare.samples, of_steps=True)


#: Estimators that place what steps earn.
USES_STEPS = {"grpo_process", "reinforce", "reinforce_plus_plus", "remax", "optimal_token_baseline", "gae"}


def test_what_uses_steps_is_known() -> None:
    assert {name for name in ADVANTAGES.names() if ADVANTAGES.get(name).uses_steps} == USES_STEPS


def spelled(text: str, render: Renderer) -> tuple[Any, str]:
    tokens = render.encode(text)
    return tokens, ResponseDecoder(render.tokenizer, render.kept_tokens)(tokens.tolist())


def ends_of(render: Renderer, tokens: Any, text: str, ends: Sequence[int]) -> list[int]:
    return last_tokens(tokens, text, ends, spell=render.token_bytes, special=render.special_ids)


def texts(name: str) -> SearchStrategy[str]:
    # bytes that the tiny sentencepiece has no piece for leave nothing in a decoded text
    letters = "ab " if name.startswith("sentencepiece") else "ab .\n×é漢🙂"
    return st.text(st.sampled_from(letters), max_size=40).map(lambda text: f"a{text}")


@pytest.mark.parametrize("name", ["Qwen2.5", "SmolLM2", "chatml", "sentencepiece", "sentencepiece, always"])
@given(data=st.data())
def test_an_end_is_at_the_first_token_with_which_the_text_is_complete(name: str, data: st.DataObject) -> None:
    render = renderer(name)
    tokens, text = spelled(data.draw(texts(name)), render)
    end = data.draw(st.integers(0, len(text)))
    (found,) = ends_of(render, tokens, text, [end])
    if not text[end:].strip():
        assert found == len(tokens) - 1
        return
    decode = ResponseDecoder(render.tokenizer, render.kept_tokens)

    def complete(count: int) -> int:
        return len(decode(tokens[:count].tolist()).rstrip("\ufffd"))

    assert complete(found + 1) >= end
    assert not found or complete(found) < end


def placed_in(tokens: Sequence[bytes], text: str, ends: Sequence[int], special: Collection[int] = ()) -> list[int]:
    ids = np.arange(len(tokens), dtype=np.int32)
    return last_tokens(ids, text, ends, spell=lambda token: tokens[token], special=special)


def test_of_bytes_that_are_no_text_a_decoder_writes_one_character_each_or_one_for_all() -> None:
    tokens = [b" H", b"i", b"\xe2", b"\x82", b".", b"\n", b"\n", b"x", b"y", b"</s>"]
    for text in ("Hi\ufffd\ufffd.\n\nxy", "Hi\ufffd.\n\nxy"):
        assert placed_in(tokens, text, [text.index("x"), len(text)], [9]) == [6, 9]
    # a line break among bytes is none of the text
    tokens = [b" H", b"\xe2", b"\n", b".", b"\xff", b"\xff", b"x", b"y"]
    assert placed_in(tokens, "H\ufffd\ufffd.\ufffd\ufffdxy", [4, 7], []) == [3, 6]


def test_a_space_that_only_the_tokenizer_knows_of_may_follow_a_special_token() -> None:
    tokens = [b"<ctl>", b" Hi", b".", b"\n", b"\n", b"x", b"y", b"</s>"]
    assert placed_in(tokens, "Hi.\n\nxy", [5, 7], [0, 7]) == [4, 7]
    assert placed_in(tokens[1:], "Hi.\n\nxy", [5, 7], [6]) == [3, 6]


def test_what_ends_an_answer_belongs_to_its_last_step() -> None:
    render = renderer("Qwen2.5")
    tokens = render.encode("<think>Hm.</think>A b.\n\nC d.<|im_end|>")
    text = ResponseDecoder(render.tokenizer, render.kept_tokens)(tokens.tolist())
    first = text.index("C")
    found = ends_of(render, tokens, text, [first, len(text)])
    assert render.decode(tokens[: found[0] + 1]).endswith("A b.\n\n")
    assert found[1] == len(tokens) - 1
    # special tokens that the text does not have
    odd = render.encode("A<|endoftext|> b.\n\nC d.")
    assert ends_of(render, odd, "A b.\n\nC d.", [6])[0] == len(odd) - len(render.encode("C d.")) - 1


def test_steps_are_placed_at_tokens_and_weighed() -> None:
    render = renderer("chatml")
    tokens = render.encode("Rain falls.\n\nIt is wet.<|im_end|>")
    text = "Rain falls.\n\nIt is wet."
    sample = make_scored(make_task(), 0, 0.0, [1] * len(tokens))
    trajectory = replace(sample.trajectory, token_ids=np.append([1, 2], tokens).astype(np.int32), text=text)
    scores: Mapping[str, tuple[StepScore, ...]] = {
        "one": (StepScore(0.5, 13), StepScore(1.0, 23)),
        "two": (StepScore(0.25, 23),),
    }
    given_scores = replace(
        sample,
        trajectory=trajectory,
        rewards={"one": 0.5, "two": 0.25},
        weights={"one": 2.0, "two": 4.0},
        reward=2.0,
        step_scores=scores,
    )
    ((placed,),) = [group.samples for group in with_step_rewards([group_of(given_scores)], lambda: render)]
    (first, value), (last, total) = placed.step_rewards
    assert render.decode(tokens[: first + 1]) == "Rain falls.\n\n"
    assert (value, last, total) == (1.0, len(tokens) - 1, 2.0 + 1.0)
    assert placed.step_value == 2.0

    def unasked() -> Renderer:
        raise AssertionError("nothing has scores of steps")

    plain = [group_of(replace(given_scores, step_scores={}))]
    assert with_step_rewards(plain, unasked) is plain
