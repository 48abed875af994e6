"""Environments of GEM and SkyRL-Gym: with stand-ins of their modules, and with the packages where installed."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
import random
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from roll_like.agents.env_worker import HostedEnvironment
from roll_like.agents.episode import EnvironmentSpec
from roll_like.data.reasoning import Turn
from roll_like.envs import check_env, make_env
from roll_like.errors import EnvError
from roll_like.types import EVALUATION_SEED, THINK

WITH_GEM = importlib.util.find_spec("gem") is not None
WITH_SKYRL = importlib.util.find_spec("skyrl_gym") is not None
needs_gem = pytest.mark.skipif(not WITH_GEM, reason="gem-llm is not installed: docs/environments.md")
needs_skyrl = pytest.mark.skipif(not WITH_SKYRL, reason="skyrl-gym is not installed: pip install 'roll-like[envs]'")

END = "<｜TERMINAL_STATE｜>"  # GEM's observation after an answer that ends an episode of one turn


class Dice:
    """A game of GEM: rolls a die at every turn with the generators of the process, and shows the sum in the suffix."""

    def __init__(self, turns: int = 3, ends: tuple[bool, bool] = (True, True)) -> None:
        self.turns, self.ends = turns, ends

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        np.random.seed(seed)
        self.rolled: list[int] = []
        self.heard: list[str] = []
        return "Roll.\n", {"prefix": "A game.", "suffix": "Sum: 0"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "crash":
            raise RuntimeError("the table broke")
        self.heard.append(action)
        self.rolled.append(random.randint(1, 6) + int(np.random.randint(1, 7)))
        over = len(self.rolled) == self.turns
        text = f"You rolled {self.rolled[-1]}."
        ends = self.ends if over else (False, False)
        return text, 1 / self.turns if action == "win" else 0.0, *ends, {"suffix": f"Sum: {sum(self.rolled)}"}

    def sample_random_action(self) -> str:
        return random.choice(["win", "lose"])


class Question:
    """A question of GEM: over after one answer, which it calls terminated and truncated."""

    dataset = ("2 + 2",)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "2 + 2?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return END, 0.9, True, True, {"correct": action == "4"}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(params=["stand-in", pytest.param("gem-llm", marks=needs_gem)])
def gem(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """GEM with the environments of this page registered."""
    own = {"test:Dice": Dice, "test:Question": Question}
    if request.param == "gem-llm":
        registration = importlib.import_module("gem.envs.registration")
        known = {name: registration.EnvSpec(name, made) for name, made in own.items()}
        monkeypatch.setattr(registration, "ENV_REGISTRY", {**registration.ENV_REGISTRY, **known})
        return
    registration, constants = ModuleType("gem.envs.registration"), ModuleType("gem.utils.constants")
    vars(registration).update(ENV_REGISTRY=own, make=lambda name, **options: own[name](**options))
    vars(constants).update(TERMINAL_STATE=END)
    for name in ("gem", "gem.envs", "gem.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "gem.envs.registration", registration)
    monkeypatch.setitem(sys.modules, "gem.utils.constants", constants)


@pytest.mark.usefixtures("gem")
class TestGEM:
    def test_parts_of_an_observation_are_shown_together(self) -> None:
        env = make_env("roll_like/GEM-v0", env="test:Dice")
        text, info = env.reset(seed=4)
        assert text == "A game.\nRoll.\nSum: 0"
        assert info["state"] == f"4\n{text}"
        rolled = env.step("win")[0]
        number = rolled.split()[2].rstrip(".")
        assert rolled == f"You rolled {number}.\nSum: {number}"

    def test_what_was_scored_has_ended(self) -> None:
        env = make_env("roll_like/GEM-v0", env="test:Question")
        env.reset(seed=0)
        assert env.step("4") == ("", 0.9, True, False, {"success": True, "state": "0\n"})
        with pytest.raises(ResetNeeded):
            env.step("4")
        env.reset(seed=0)
        assert env.step("5")[4]["success"] is False  # GEM's word counts before the reward
        env.close()
        assert env.unwrapped._game.env.closed  # type: ignore[attr-defined]

    @pytest.mark.parametrize(("ends", "flags"), [((True, True), (True, False)), ((False, True), (False, True))])
    @pytest.mark.parametrize("last", ["win", "lose"])
    def test_a_game_is_solved_by_shares_of_one(
        self, ends: tuple[bool, bool], flags: tuple[bool, bool], last: str
    ) -> None:
        env = make_env("roll_like/GEM-v0", env="test:Dice", config={"ends": ends})
        for _ in range(2):  # what was earned before a reset does not count
            env.reset(seed=0)
            turns = [env.step(action) for action in ("win", "win", last)]
            assert [turn[1] for turn in turns] == [1 / 3, 1 / 3, 1 / 3 if last == "win" else 0.0]
            assert [turn[2:4] for turn in turns] == [(False, False), (False, False), flags]
            assert ["success" in turn[4] for turn in turns] == [False, False, True]
            assert turns[-1][4]["success"] is (last == "win")

    def test_reasoning_is_no_action(self) -> None:
        env = make_env("roll_like/GEM-v0", env="test:Dice")
        env.reset(seed=0)
        env.step(Turn("<think>lose?</think>win", THINK))
        assert env.unwrapped._game.env.heard == ["win"]  # type: ignore[attr-defined]

    def test_episodes_do_not_disturb_each_other_or_the_process(self) -> None:
        def play(beside: Any = None) -> list[str]:
            env = make_env("roll_like/GEM-v0", env="test:Dice")
            seen = [env.reset(seed=5)[0]]
            for _ in range(3):
                if beside is not None:
                    beside.reset(seed=9)
                    random.random(), np.random.rand()
                seen.append(env.step("win")[0])
            return seen

        random.seed(1)
        np.random.seed(1)
        expected = random.random(), np.random.rand()
        random.seed(1)
        np.random.seed(1)
        alone = play()
        assert (random.random(), np.random.rand()) == expected
        assert alone == play(make_env("roll_like/GEM-v0", env="test:Dice"))
        game = Dice()
        game.reset(seed=5)
        assert alone[1:] == [f"{text}\n{told['suffix']}" for text, _, _, _, told in map(game.step, ["win"] * 3)]

    def test_it_passes_its_check_with_moves_of_its_own(self) -> None:
        report = check_env("roll_like/GEM-v0", env="test:Dice", config={"turns": 1})
        assert report.findings == ()
        assert 0 < report.figures["random: mean return"] < 1

    def test_what_is_wrong_is_named(self) -> None:
        with pytest.raises(EnvError, match="GEM has no environment 'test:Dise'; did you mean 'test:Dice'"):
            make_env("roll_like/GEM-v0", env="test:Dise")
        with pytest.raises(EnvError, match=r"cannot be made .* unexpected keyword argument 'tuns'"):
            make_env("roll_like/GEM-v0", env="test:Dice", config={"tuns": 3})
        env = make_env("roll_like/GEM-v0", env="test:Dice")
        env.reset(seed=0)
        with pytest.raises(RuntimeError, match="the table broke"):  # the episode fails; it has no reward
            env.step("crash")


@needs_gem
class TestGEMsOwn:
    @pytest.mark.parametrize("seed", [0, 5])
    @pytest.mark.parametrize(
        "name",
        [
            *(
                f"game:{game}-v0-easy"
                for game in ("GuessTheNumber", "Mastermind", "Minesweeper", "Game2048", "Sokoban")
            ),
            "rg:chain_sum",
        ],
    )
    def test_an_episode_is_the_packages_own(self, name: str, seed: int) -> None:
        package = importlib.import_module("gem")
        own = package.make(name)
        random.seed(seed)
        moves = ["\\boxed{4}"] * 30 if name.startswith("rg") else [own.sample_random_action() for _ in range(30)]
        expected = [own.reset(seed=seed)]
        for move in moves:
            expected.append(own.step(move))
            if expected[-1][2] or expected[-1][3]:
                break
        env = make_env("roll_like/GEM-v0", env=name)
        text, _ = env.reset(seed=seed)
        for part in (expected[0][0], expected[0][1].get("suffix", "")):
            assert part.strip("\n") in text
        for move, (said, reward, terminated, truncated, told) in zip(moves, expected[1:], strict=False):
            text, earned, ended, cut, _ = env.step(move)
            assert (earned, ended or cut) == (reward, terminated or truncated)
            for part in (said, told.get("suffix", "")):
                assert part.strip("\n") in text or part == END

    def test_tools_answer_and_do_not_solve(self) -> None:
        env = make_env("roll_like/GEM-v0", env="rg:chain_sum", tools="python_tool")
        text, _ = env.reset(seed=0)
        assert "<python>" in text
        for _ in range(4):
            text, reward, ended, cut, _ = env.step("<python>print(6 * 7)</python>")
            assert "Code execution result: 42" in text
            assert (reward, ended, cut) == (0.05 + 0.25, False, False)
        _, reward, ended, cut, info = env.step("\\boxed{no number}")
        assert (ended, cut, info["success"]) == (True, False, False)
        assert float(reward) < 1
        with pytest.raises(EnvError, match="did you mean 'python_tool'"):
            make_env("roll_like/GEM-v0", env="rg:chain_sum", tools="python")


class Turns:
    """What a SkyRL environment does here: counts turns, and forgets the last message if asked to."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.config, self.extras, self.turns, self.heard = env_config, extras or {}, 0, list[str]()
        self.extras["reward_spec"]["seen"] = True  # nobody else's row

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        self.history = [*prompt, {"role": "user", "content": "Only now."}] if self.extras.get("edits") else prompt
        return self.history, {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        self.heard.append(action)
        if self.extras.get("edits"):
            self.history.pop()
        done = self.turns == self.extras.get("max_turns", 2)
        told = {"role": "tool" if self.extras.get("tool") else "user", "content": f"Turn {self.turns}."}
        right = self.extras["reward_spec"]["ground_truth"] in action
        reward = float(right) if done else self.extras.get("between", 0.25)
        observations = [] if done else [told] * self.extras.get("told", 1)
        last = self.extras.get("last", reward) if done else reward
        return {"observations": observations, "reward": last, "done": done, "metadata": {}}

    def close(self) -> None:
        self.closed = True


def rows(**fields: Any) -> list[dict[str, Any]]:
    """Rows as SkyRL reads them."""
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    return [{"prompt": prompt, "env_class": "turns", "reward_spec": {"ground_truth": "4"}, **fields}]


@pytest.fixture(params=["stand-in", pytest.param("skyrl-gym", marks=needs_skyrl)])
def skyrl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """SkyRL-Gym with the environment of this page registered; returns the one that was made last."""
    made: list[Any] = []

    def make(base: type, **arguments: Any) -> Any:
        made.append(type("Turns", (Turns, base), {})(**arguments))
        return made[-1]

    if request.param == "skyrl-gym":
        gym = importlib.import_module("skyrl_gym")
        base = importlib.import_module("skyrl_gym.envs.base_text_env").BaseTextEnv
        spec = importlib.import_module("skyrl_gym.envs.registration").EnvSpec(
            "turns", lambda **arguments: make(base, **arguments)
        )
        monkeypatch.setitem(gym.registry, "turns", spec)
    else:
        gym = ModuleType("skyrl_gym")
        vars(gym).update(registry={"turns": None}, make=lambda _, **arguments: make(object, **arguments))
        monkeypatch.setitem(sys.modules, "skyrl_gym", gym)
    return lambda: made[-1]


class TestSkyRLGym:
    def test_turns_are_the_environments(self, skyrl: Callable[[], Any]) -> None:
        given = rows(data="a", max_turns=9, tool=True)
        env = make_env("roll_like/SkyRLGym-v0", path=given, config={"db": {"path": "here"}}, max_turns=3)
        text, info = env.reset(seed=0)
        assert text == "Be brief.\n2 + 2?"
        assert info["messages"] == given[0]["prompt"]
        answers = ["<think>4</think>I do not know", "5", "4"]
        turns = [env.step(Turn(answer, THINK)) for answer in answers]
        assert [turn[1:4] for turn in turns] == [(0.25, False, False), (0.25, False, False), (1.0, True, False)]
        assert [turn[4]["messages"] for turn in turns] == [
            [{"role": "tool", "content": "Turn 1."}],
            [{"role": "tool", "content": "Turn 2."}],
            [],
        ]
        assert [turn[4].get("success") for turn in turns] == [None, None, True]
        own = skyrl()
        assert own.heard == answers  # with the reasoning, as SkyRL gives it
        assert own.config.db.path == "here"
        truth = {"ground_truth": "4", "seen": True}
        assert own.extras == {"data": "a", "tool": True, "max_turns": 3, "reward_spec": truth}
        assert given[0]["reward_spec"] == {"ground_truth": "4"}
        with pytest.raises(ResetNeeded):
            env.step("4")
        env.reset(seed=0)
        assert own.closed

    def test_rows_by_seed(self, skyrl: Callable[[], Any]) -> None:
        given = [rows(data=number)[0] for number in range(4)]
        env = make_env("roll_like/SkyRLGym-v0", path=given, held_out=1)
        seen = []
        for seed in (0, 2, 3, EVALUATION_SEED):
            env.reset(seed=seed)
            seen.append(skyrl().extras["data"])
        assert seen == [0, 2, 0, 3]

    @pytest.mark.usefixtures("skyrl")
    def test_a_conversation_that_the_environment_edits_begins_anew(self) -> None:
        env = HostedEnvironment(
            EnvironmentSpec(
                name="turns", env_id="roll_like/SkyRLGym-v0", kwargs={"path": rows(edits=True, max_turns=3)}
            )
        )
        prompt = rows()[0]["prompt"]
        assert env.reset(0).messages == [*prompt, {"role": "user", "content": "Only now."}]
        said = list(prompt)
        for turn, answer in enumerate(["5", "6"], 1):
            said = [*said, {"role": "assistant", "content": answer}]
            stepped = env.step(answer)
            assert (stepped.fresh, stepped.messages) == (True, [*said, {"role": "user", "content": f"Turn {turn}."}])
        assert not env.step("4").fresh  # it is over

    @pytest.mark.usefixtures("skyrl")
    def test_rewards_that_are_missing(self) -> None:
        between = make_env("roll_like/SkyRLGym-v0", path=rows(between=None, told=0))
        between.reset(seed=0)
        assert between.step("5")[:4] == ("", 0.0, False, False)  # SkyRL's reward of an episode
        assert between.step("4")[1] == 1.0
        hosted = HostedEnvironment(
            EnvironmentSpec(name="turns", env_id="roll_like/SkyRLGym-v0", kwargs={"path": rows(max_turns=1, last=None)})
        )
        hosted.reset(0)
        with pytest.raises(EnvError, match="the reward is None"):
            hosted.step("4")

    @pytest.mark.usefixtures("skyrl")
    def test_it_passes_its_check(self) -> None:
        report = check_env("roll_like/SkyRLGym-v0", path=[*rows(), *rows(tool=True)])
        assert [finding for finding in report.findings if finding.check != "pickle"] == []

    @pytest.mark.usefixtures("skyrl")
    def test_what_is_wrong_is_named(self) -> None:
        with pytest.raises(EnvError, match="SkyRL-Gym has no environment 'turn'; did you mean 'turns'") as caught:
            make_env("roll_like/SkyRLGym-v0", path=rows(), env="turn")
        assert caught.value.fix == "correct `env` of the kwargs"
        with pytest.raises(EnvError, match="did you mean 'turns'") as caught:
            make_env("roll_like/SkyRLGym-v0", path=rows(env_class="tuns"))
        assert caught.value.fix == "correct `env_class` of the rows"
        nameless = [{key: value for key, value in rows()[0].items() if key != "env_class"}]
        with pytest.raises(Exception, match="the field 'env_class' is missing"):
            make_env("roll_like/SkyRLGym-v0", path=nameless)
        assert make_env("roll_like/SkyRLGym-v0", path=nameless, env="turns").reset(seed=0)[0]


@needs_skyrl
class TestSkyRLGymsOwn:
    @pytest.mark.parametrize(
        ("name", "extras", "answers"),
        [
            ("gsm8k", {}, ["so #### 4"]),
            ("gsm8k", {}, ["it is 4"]),
            ("gsm8k_multi_turn", {"max_turns": 3}, ["I think", "#### 5", "#### 4"]),
            ("gsm8k_multi_turn", {"max_turns": 3}, ["#### 5", "#### 6", "none"]),
            ("aime", {"reward_model": {"ground_truth": "4"}}, ["Answer: 4"]),
            ("aime", {"reward_model": {"ground_truth": "4"}}, ["Answer: 5"]),
        ],
    )
    def test_an_episode_is_the_packages_own(self, name: str, extras: dict[str, Any], answers: list[str]) -> None:
        gym = importlib.import_module("skyrl_gym")
        row = {**rows()[0], **extras}
        prompt = row["prompt"]
        fields = copy.deepcopy({key: row[key] for key in row if key not in ("prompt", "env_class")})
        own = gym.make(name, env_config={}, extras=fields)
        expected, _ = own.init(copy.deepcopy(prompt))
        env = make_env("roll_like/SkyRLGym-v0", path=[row], env=name)
        assert env.reset(seed=0)[1]["messages"] == expected
        for answer in answers:
            said = own.step(answer)
            _, reward, ended, cut, info = env.step(answer)
            assert (info["messages"], reward, ended, cut) == (said["observations"], said["reward"], said["done"], False)
        assert said["done"]

    def test_sql_looks_at_the_reasoning(self, tmp_path: Path) -> None:
        folder = tmp_path / "spider" / "database" / "shop"
        folder.mkdir(parents=True)
        with sqlite3.connect(folder / "shop.sqlite") as base:
            base.execute("CREATE TABLE sold (price INTEGER)")
            base.execute("INSERT INTO sold VALUES (3), (4)")
        truth = {"ground_truth": "SELECT SUM(price) FROM sold"}
        (row,) = rows(env_class="text2sql", db_id="shop", data="spider", reward_spec=truth)
        env = make_env("roll_like/SkyRLGym-v0", path=[row], config={"db_path": str(tmp_path)}, max_turns=3)
        for thought, reward in (("<think>All of them.</think>", 1.0), ("", -1.0)):
            env.reset(seed=0)
            text, earned, ended, _, _ = env.step(Turn(f"{thought}<sql>SELECT price FROM sold</sql>", THINK))
            assert (earned, ended) == (0.0, False)
            assert "You have 2 turns left" in text
            answer = f"{thought}<solution>SELECT SUM(price) FROM sold</solution>"
            _, earned, ended, _, info = env.step(Turn(answer, THINK))
            assert (earned, ended, info["success"]) == (reward, True, reward == 1.0)

    def test_an_episode_goes_on_from_a_pickle(self) -> None:
        env = make_env("roll_like/SkyRLGym-v0", path=rows(max_turns=2), env="gsm8k_multi_turn")
        env.reset(seed=0)
        env.step("#### 5")
        for player in (pickle.loads(pickle.dumps(env)), env):
            assert player.step("#### 4")[1:3] == (1.0, True)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gem.envs.registration", "skyrl_gym"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it could not be found
    with pytest.raises(EnvError, match=r"needs the package gem-llm==0\.1\.0") as caught:
        make_env("roll_like/GEM-v0", env="game:Sokoban-v0-easy")
    assert "pip install --no-deps 'gem-llm==0.1.0'" in str(caught.value.fix)
    with pytest.raises(EnvError, match=r"needs the package skyrl-gym==0\.4\.0") as caught:
        make_env("roll_like/SkyRLGym-v0", path=rows())
    assert "roll-like[envs]" in str(caught.value.fix)
