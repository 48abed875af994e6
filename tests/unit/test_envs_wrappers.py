from __future__ import annotations

import pickle
from typing import Any, ClassVar

import gymnasium
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Discrete, Text
from gymnasium.utils import colorize

from roll_like.envs import (
    AnsiText,
    Commands,
    DiscreteActions,
    FreeText,
    History,
    Instructions,
    ScaledReward,
    Success,
    TokenLimit,
    TurnLimit,
    read_action,
    scripted_action,
    system_prompt_of,
    tools_of,
    write_action,
)
from roll_like.envs.actions import STYLES
from roll_like.errors import EnvError


class Corridor(gymnasium.Env[str, int]):
    """Walk right three times; the reward of the last step is 2."""

    metadata: ClassVar = {"render_modes": ["ansi"]}
    observation_space = FreeText()
    action_space = Discrete(2)
    tools: ClassVar = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.place = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        return "at 0", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.place = max(0, self.place + (1 if action else -1))
        return f"at {self.place}", 2.0 * (self.place == 3), self.place == 3, False, {}

    def render(self) -> Any:
        tiles = [colorize("x", "red", highlight=True) if tile == self.place else "o" for tile in range(4)]
        return "  (Right)\n" + "".join(tiles) + "\n"

    def best_action(self) -> int:
        return 1


def corridor(**options: Any) -> DiscreteActions:
    return DiscreteActions(Corridor(), ["left", "right"], **options)


@pytest.mark.parametrize(
    ("text", "style", "action"),
    [
        ("<action>left</action>", "tag", "left"),
        ("I go <ACTION> up </Action>!", "tag", "up"),
        ("not <action>up</action> but <action>down</action>", "tag", "down"),
        ("<action>up", "tag", None),
        ("</action>", "tag", None),
        ("</action><action>", "tag", None),
        ("", "tag", None),
        ('{"action": "left"}', "json", "left"),
        ('Thinking {of} it: {"thought": {"a": 1}, "action": " left "}.', "json", "left"),
        ('{"action": 3}', "json", None),
        ('{"action": "left"', "json", None),
        ("{" * 5000, "json", None),
        ('{"action":' * 3000, "json", None),
        (" Left.\n", "word", "Left"),
        ("go left", "word", "go left"),
        ("...", "word", None),
    ],
)
def test_actions_are_read_where_the_style_says(text: str, style: Any, action: str | None) -> None:
    assert read_action(text, style) == action


@pytest.mark.parametrize("style", STYLES)
def test_what_is_written_is_read(style: Any) -> None:
    assert read_action(write_action("go north", style), style) == "go north"


def test_free_text_takes_any_script_and_has_a_length() -> None:
    space = FreeText(40)
    space.seed(1)
    samples = [space.sample() for _ in range(50)]
    assert all(sample in space for sample in samples)
    assert len(set(samples)) > 40
    assert "Öß 🙂" in space
    assert "" in space
    assert "x" * 41 not in space
    assert 3 not in space
    assert isinstance(space, Text)


def test_commands_are_sampled_whole_and_alike_for_a_seed() -> None:
    space = Commands(["up", "down"])
    drawn = []
    for _ in range(2):
        space.seed(3)
        drawn.append([space.sample() for _ in range(20)])
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == {"up", "down"}
    assert "anything else" in space


def test_ansi_text_is_the_rendering_without_colours() -> None:
    plain = AnsiText(Corridor(render_mode="ansi"))
    assert plain.reset(seed=0)[0] == "xooo"
    marked = AnsiText(Corridor(render_mode="ansi"), highlight={41: "P"}, replace={"o": "."}, spaced=True)
    assert marked.reset(seed=0)[0] == "P . . ."
    assert marked.step(1)[0] == ". P . ."
    assert marked.observation_space.contains(". P . .")


def test_ansi_text_of_gymnasiums_own_lake() -> None:
    env = AnsiText(FrozenLakeEnv(render_mode="ansi", is_slippery=False), highlight={41: "P"})
    assert env.reset(seed=0)[0] == "PFFF\nFHFH\nFFFH\nHFFG"
    assert env.step(1)[0] == "SFFF\nPHFH\nFFFH\nHFFG"


def test_ansi_text_says_how_to_render() -> None:
    with pytest.raises(EnvError, match="render_mode='ansi'"):
        AnsiText(Corridor())
    with pytest.raises(EnvError, match="ObservationWrapper"):
        AnsiText(gymnasium.make("CartPole-v1"))


@pytest.mark.parametrize("style", STYLES)
def test_named_actions_step_the_environment(style: Any) -> None:
    env = corridor(style=style)
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(write_action("RIGHT", style))
    assert (observation, reward, terminated, truncated) == ("at 1", 0.0, False, False)
    assert info == {"state": "at 1", "invalid_action": False}


def test_an_invalid_action_costs_and_does_not_step() -> None:
    env = corridor(invalid_penalty=0.25)
    env.reset(seed=0)
    env.step("<action>right</action>")
    observation, reward, terminated, truncated, info = env.step("<action>jump</action>")
    assert (reward, terminated, truncated) == (-0.25, False, False)
    assert observation.startswith("That names no action. Answer <action>left</action> or <action>right</action>.")
    assert observation.endswith("\nat 1")
    assert info == {"invalid_action": True, "state": "at 1"}
    assert env.env.place == 1


def test_nothing_is_played_after_the_end() -> None:
    env = corridor()
    with pytest.raises(ResetNeeded):
        env.step("<action>right</action>")
    env.reset(seed=0)
    for _ in range(3):
        done = env.step("<action>right</action>")[2]
    assert done
    with pytest.raises(ResetNeeded):
        env.step("<action>right</action>")


def test_names_fit_the_actions() -> None:
    shared = DiscreteActions(Corridor(), {"left": 0, "west": 0, "right": 1})
    assert shared.names == ["left", "right"]
    assert shared.how_to_answer == "<action>left</action> or <action>right</action>"
    for names in (["left"], ["left", "Left"], ["a", "b", "c"], {"a": 0, "b": 2}):
        with pytest.raises(EnvError, match="actions 0 to 1"):
            DiscreteActions(Corridor(), names)
    with pytest.raises(EnvError, match="Discrete action space"):
        DiscreteActions(corridor(), ["a", "b"])
    with pytest.raises(EnvError, match="tag, json, word"):
        corridor(style="xml")
    with pytest.raises(EnvError, match="≥ 0"):
        corridor(invalid_penalty=-1)


def test_the_environments_own_player_answers_in_words() -> None:
    assert scripted_action(corridor(style="json")) == '{"action": "right"}'
    assert scripted_action(TurnLimit(corridor(), 3)) == "<action>right</action>"
    assert scripted_action(DiscreteActions(gymnasium.make("CartPole-v1"), ["a", "b"])) is None
    assert scripted_action(Corridor()) is None


def test_instructions_come_first_or_as_system_prompt() -> None:
    asked = Instructions(corridor(), "Walk right.")
    observation, info = asked.reset(seed=0)
    assert observation == "Walk right.\n\nat 0"
    assert info["state"] == "at 0"
    assert asked.step("<action>right</action>")[0] == "at 1"
    assert system_prompt_of(asked) is None
    told = TurnLimit(Instructions(corridor(), "Walk right.", role="system"), 2)
    assert told.reset(seed=0)[0] == "at 0"
    assert system_prompt_of(told) == "Walk right."
    assert tools_of(told) == Corridor.tools
    with pytest.raises(EnvError, match="AnsiText"):
        Instructions(gymnasium.make("CartPole-v1"), "Balance.")


def test_instructions_go_before_messages() -> None:
    class Told(Corridor):
        def reset(self, **options: Any) -> tuple[str, dict[str, Any]]:
            return "hi", {"messages": [{"role": "user", "content": "hi"}]}

    _, info = Instructions(Told(), "Walk.").reset(seed=0)
    assert [message["content"] for message in info["messages"]] == ["Walk.", "hi"]


def test_turns_are_limited_and_counted() -> None:
    env = TurnLimit(Success(corridor()), 2)
    env.reset(seed=0)
    first, last = env.step("nonsense"), env.step("<action>right</action>")
    assert (first[3], first[4]["turn"]) == (False, 1)
    assert (last[2], last[3], last[4]["turn"], last[4]["success"]) == (False, True, 2, False)
    with pytest.raises(ResetNeeded, match="2 turns"):
        env.step("<action>right</action>")
    env.reset(seed=0)
    assert not env.step("<action>right</action>")[3]
    with pytest.raises(EnvError, match="at least 1"):
        TurnLimit(corridor(), 0)


def test_an_environments_own_end_goes_before_the_limit() -> None:
    env = TurnLimit(Success(corridor(), at_least=2.0), 3)
    env.reset(seed=0)
    for _ in range(3):
        _, reward, terminated, truncated, info = env.step("<action>right</action>")
    assert (reward, terminated, truncated, info["success"]) == (2.0, True, False, True)


def test_tokens_are_limited_over_observations_and_answers() -> None:
    env = TokenLimit(corridor(), 11, lambda text: len(text.split()))
    env.reset(seed=0)  # 2 tokens
    assert not env.step("well then <action>right</action>")[3]  # 3 + 2
    _, _, _, truncated, info = env.step("so <action>right</action>")  # 2 + 2
    assert (truncated, info["tokens"], info["success"]) == (True, 11, False)
    with pytest.raises(EnvError, match="at least 1"):
        TokenLimit(corridor(), 0, len)


def test_history_shows_the_last_turns_and_starts_afresh() -> None:
    env = History(corridor(), turns=2)
    observation, info = env.reset(seed=0)
    assert (observation, info["fresh"], info["state"]) == ("at 0", True, "at 0")
    assert env.step("<action>left</action>")[0] == "Before:\nat 0\nYour answer: <action>left</action>\n\nNow:\nat 0"
    env.step("<action>right</action>")
    observation, _, _, _, info = env.step("<action>left</action>")
    assert observation == (
        "Before:\nat 0\nYour answer: <action>right</action>\nat 1\nYour answer: <action>left</action>\n\nNow:\nat 0"
    )
    assert (info["fresh"], info["state"]) == (True, "at 0")
    assert env.reset(seed=0)[0] == "at 0"
    alone = History(corridor(), turns=0)
    alone.reset(seed=0)
    assert alone.step("<action>right</action>")[0] == "at 1"
    with pytest.raises(EnvError, match="at least 0"):
        History(corridor(), turns=-1)


def test_success_is_the_end_and_enough_reward() -> None:
    for at_least, solved in ((None, True), (2.0, True), (2.5, False)):
        env = Success(corridor(), at_least=at_least)
        env.reset(seed=0)
        assert "success" not in env.step("<action>right</action>")[4]
        env.step("<action>right</action>")
        assert env.step("<action>right</action>")[4]["success"] is solved


def test_rewards_are_scaled() -> None:
    env = ScaledReward(corridor(), 0.1)
    env.reset(seed=0)
    assert [env.step("<action>right</action>")[1] for _ in range(3)] == pytest.approx([0.0, 0.0, 0.2])


def test_an_episode_goes_on_from_a_pickle() -> None:
    env = TurnLimit(History(Success(corridor()), turns=1), 5)
    env.reset(seed=0)
    env.step("<action>right</action>")
    copy = pickle.loads(pickle.dumps(env))
    assert copy.step("<action>right</action>") == env.step("<action>right</action>")
