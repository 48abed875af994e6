"""Every environment that comes with roll_like, by its id."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import json
import pickle
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from gymnasium.error import ResetNeeded

from roll_like.builtin.envs import planning, qa, randomness, single_turn
from roll_like.builtin.envs.extras import need
from roll_like.builtin.envs.frozen_lake import MOVES as LAKE_MOVES
from roll_like.builtin.envs.sokoban import MOVES, Level, Position, make_level, moved
from roll_like.envs import (
    History,
    actions,
    check_env,
    examples,
    make_env,
    registered,
    scripted_action,
    system_prompt_of,
)
from roll_like.errors import DataError, EnvError

ROWS = [
    {"prompt": f"What is {n} + {n}?", "answer": str(2 * n), "reward_spec": {"ground_truth": str(2 * n)}}
    for n in range(10)
]
#: Ids that need a package which is not part of the lock, with that package's module.
OPTIONAL = {
    "roll_like/GEM-v0": "gem",
    "roll_like/ReasoningGym-v0": "reasoning_gym",
    "roll_like/SkyRLGym-v0": "skyrl_gym",
    "roll_like/TextArena-v0": "textarena",
    "roll_like/TextWorld-v0": "textworld",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "roll_like/GEM-v0": {"env": "game:GuessTheNumber-v0-easy"},
    "roll_like/QA-v0": {"path": "ROWS"},
    "roll_like/SkyRLGym-v0": {"path": "ROWS", "env": "gsm8k"},
    "roll_like/Tools-v0": {"path": "ROWS"},
    "roll_like/TextWorld-v0": {"games": 3, "folder": "FOLDER"},
}
#: Ids whose episodes a server plays: `integration/test_shared_environments.py`.
SERVED = {"roll_like/OpenEnv-v0"}
#: Environments of which every episode starts from the same state, as it is meant.
ONE_START = {"roll_like/CliffWalking-v0"}


def missing(env_id: str) -> bool:
    return env_id in OPTIONAL and importlib.util.find_spec(OPTIONAL[env_id]) is None


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.fixture(scope="session")
def games_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("games")


@pytest.fixture
def options(request: pytest.FixtureRequest, rows: Path, games_folder: Path) -> dict[str, Any]:
    places = {"ROWS": str(rows), "FOLDER": str(games_folder)}
    return {name: places.get(str(value), value) for name, value in OPTIONS.get(request.param, {}).items()}


each = pytest.mark.parametrize(
    ("env_id", "options"),
    [(name, name) for name in registered("roll_like") if name not in SERVED],
    indirect=["options"],
)


@each
def test_every_environment_passes_its_check(env_id: str, options: dict[str, Any]) -> None:
    if missing(env_id):
        with pytest.raises(EnvError, match="needs the package") as caught:
            make_env(env_id, **options)
        assert "pip install" in str(caught.value.fix)
        return
    report = check_env(env_id, **options)
    doubts = [
        finding for finding in report.findings if not (env_id in ONE_START and "start from the same" in finding.what)
    ]
    assert doubts == []
    if "scripted: success rate" in report.figures:
        assert report.figures["scripted: success rate"] == 1.0
        assert report.figures["random: success rate"] < 1.0
    else:
        assert env_id in {"roll_like/GEM-v0", "roll_like/SkyRLGym-v0", "roll_like/TextArena-v0"}


@each
def test_members_of_a_group_start_alike(env_id: str, options: dict[str, Any]) -> None:
    if missing(env_id):
        pytest.skip(f"needs {OPTIONAL[env_id]}")
    members = [make_env(env_id, **options) for _ in range(3)]
    for seed in (0, 17):
        starts = [member.reset(seed=seed) for member in members]
        members[1].step("whatever one member does")  # is nothing to the others
        assert {json.dumps([observation, info.get("state")]) for observation, info in starts} == {
            json.dumps([starts[0][0], starts[0][1].get("state")])
        }
    for member in members:
        member.close()


@each
def test_prompts_are_short(env_id: str, options: dict[str, Any]) -> None:
    if missing(env_id):
        pytest.skip(f"needs {OPTIONAL[env_id]}")
    env = make_env(env_id, **options)
    assert len(system_prompt_of(env) or "") < 500
    env.close()


def solve(env_id: str, seed: int, **options: Any) -> tuple[float, bool]:
    env = make_env(env_id, **options)
    env.reset(seed=seed)
    total, done = 0.0, False
    while not done:
        answer = scripted_action(env)
        assert answer is not None
        _, reward, terminated, truncated, info = env.step(answer)
        total += float(reward)
        done = terminated or truncated
    return total, info["success"]


@pytest.mark.parametrize("style", actions.STYLES)
@pytest.mark.parametrize("name", ["FrozenLake", "Sokoban"])
def test_scripts_solve_every_seed(name: str, style: str) -> None:
    for seed in range(10):
        total, success = solve(f"roll_like/{name}-v0", seed, style=style)
        assert success
        assert total >= 1.0


def test_frozen_lake_maps_differ_by_seed_and_can_be_given() -> None:
    env = make_env("roll_like/FrozenLake-v0", view="grid")
    assert len({env.reset(seed=seed)[0] for seed in range(20)}) > 10
    fixed = make_env("roll_like/FrozenLake-v0", view="grid", lake=["SFF", "HHF", "FFG"])
    assert {fixed.reset(seed=seed)[0] for seed in range(3)} == {"P F F\nH H F\nF F G"}
    fixed.step("<action>right</action>")
    assert fixed.step("<action>right</action>")[0] == "F F P\nH H F\nF F G"


def test_frozen_lake_in_words() -> None:
    env = make_env(
        "roll_like/FrozenLake-v0", view="words", lake=["SFF", "HHF", "FFG"], hole_reward=-0.5, step_reward=-0.1
    )
    observation, info = env.reset(seed=0)
    assert observation == "left: wall, down: hole, right: ice, up: wall. Goal: 2 down, 2 right."
    assert info["state"] == "P F F\nH H F\nF F G"
    assert env.step("<action>right</action>")[1] == -0.1
    for move in ("right", "down"):
        observation = env.step(f"<action>{move}</action>")[0]
    assert observation == "left: hole, down: goal, right: wall, up: ice. Goal: 1 down."
    _, reward, terminated, _, info = env.step("<action>left</action>")
    assert (reward, terminated, info["success"]) == (-0.5, True, False)


def test_frozen_lake_starts_anywhere_from_where_the_goal_is_reached() -> None:
    lake = ["SFFF", "FHHH", "FHFF", "FFHG"]  # from the four tiles beside the goal the start is cut off
    env = make_env("roll_like/FrozenLake-v0", view="grid", lake=lake, random_start=True)
    tiles = {env.reset(seed=seed)[0].replace("\n", " ").split().index("P") for seed in range(60)}
    assert tiles == {10, 11}
    plain = make_env("roll_like/FrozenLake-v0", random_start=True)
    assert len({plain.reset(seed=seed)[0].replace("\n", " ").split().index("P") for seed in range(60)}) > 8


def test_a_slippery_lake_is_the_same_for_the_same_seed_and_answers() -> None:
    courses = []
    for _ in range(2):
        env = make_env("roll_like/FrozenLake-v0", slippery=True, size=6)
        seen = []
        for seed in range(10):
            env.reset(seed=seed)
            seen.append(env.step("<action>right</action>")[0])
        courses.append(seen)
    assert courses[0] == courses[1]


def test_few_shot_examples_are_right_and_come_before_the_first_observation() -> None:
    env = make_env("roll_like/FrozenLake-v0", random_start=True, view="words", examples=4)
    observation, info = env.reset(seed=0)
    *shown, last = info["messages"]
    assert last == {"role": "user", "content": observation}
    assert [message["role"] for message in shown] == ["user", "assistant"] * 4
    pairs = [(shown[at]["content"], shown[at + 1]["content"]) for at in range(0, 8, 2)]
    assert len({answer for _, answer in pairs}) >= 3
    assert len(set(pairs)) == 4
    for position, answer in pairs:
        around = dict(part.split(": ") for part in position.partition(".")[0].split(", "))
        assert around[answer.removeprefix("<action>").removesuffix("</action>")] in {"ice", "goal"}
    assert "messages" not in env.step("<action>down</action>")[4]
    info["messages"].clear()  # an episode's messages are its own
    assert len(env.reset(seed=0)[1]["messages"]) == 9
    assert "messages" not in make_env("roll_like/FrozenLake-v0").reset(seed=0)[1]


def test_examples_come_before_each_turn_that_starts_afresh() -> None:
    env = History(make_env("roll_like/FrozenLake-v0", view="words", examples=1), turns=1)
    _, first = env.reset(seed=0)
    observation, _, _, _, info = env.step("<action>down</action>")
    assert info["messages"] == [*first["messages"][:2], {"role": "user", "content": observation}]
    assert observation.startswith("Before:\n")


def test_making_examples_leaves_the_environments_own_generator_alone() -> None:
    two = [make_env("roll_like/FrozenLake-v0", random_start=True, view="grid", examples=4) for _ in range(2)]
    first, second = ([env.reset()[0] for _ in range(8)] for env in two)
    assert first != second


def test_examples_end_where_the_script_does() -> None:
    assert examples(make_env("roll_like/FrozenLake-v0", lake=["SG", "FF"]), 9) == [
        ("P G\nF F\nleft: wall, down: ice, right: goal, up: wall. Goal: 1 right.", "<action>right</action>")
    ]
    assert examples(make_env("roll_like/Taxi-v0"), 0) == []


def test_planning_against_a_chain_solved_by_hand() -> None:
    # 0 → 1 → 2 (end, reward 1); going back costs 1
    chain = {
        0: {0: [(1.0, 0, -1.0, False)], 1: [(1.0, 1, 0.0, False)]},
        1: {0: [(1.0, 0, -1.0, False)], 1: [(0.5, 2, 1.0, True), (0.5, 1, 0.0, False)]},
        2: {0: [(1.0, 2, 0.0, True)], 1: [(1.0, 2, 0.0, True)]},
    }
    values = planning.state_values(chain)
    at_one = 0.5 / (1 - 0.5 * 0.99)
    assert values == pytest.approx({0: 0.99 * at_one, 1: at_one, 2: 0.0}, abs=1e-5)
    assert [planning.best_action(chain, values, state) for state in (0, 1, 2)] == [1, 1, 0]


def shortest(level: Level) -> int | None:
    """Fewest moves that solve a level: breadth first, forwards."""
    seen: dict[Position, int] = {level.start: 0}
    queue = deque(seen)
    while queue:
        position = queue.popleft()
        if position[1] == level.targets:
            return seen[position]
        for move in range(len(MOVES)):
            after = moved(position, move, level.floor)
            if after not in seen:
                seen[after] = seen[position] + 1
                queue.append(after)
    return None


@pytest.mark.parametrize(
    ("size", "boxes", "fewest", "most"), [(5, 1, 2, 8), (6, 1, 4, 12), (6, 2, 4, 12), (5, 3, 3, 10)]
)
def test_sokoban_levels_can_be_solved_in_as_many_moves_as_the_generator_says(
    size: int, boxes: int, fewest: int, most: int
) -> None:
    for seed in range(12):
        level = make_level(size, boxes, 0.15, fewest, most, seed)
        assert fewest <= len(level.solution) <= most
        assert shortest(level) == len(level.solution)
        assert not level.start[1] & level.targets
        assert level.start[1] | level.targets | {level.start[0]} <= level.floor
        assert len(level.start[1]) == boxes


def test_sokobans_solver_finds_what_cannot_be_solved() -> None:
    corner = Level(
        4, 4, frozenset({(1, 1), (1, 2), (2, 1), (2, 2)}), frozenset({(2, 2)}), ((2, 1), frozenset({(1, 1)})), ()
    )
    assert shortest(corner) is None


def test_sokoban_pushes_one_box_and_nothing_through_walls() -> None:
    floor = frozenset((1, column) for column in range(1, 6))
    right = list(MOVES).index("right")
    assert moved(((1, 1), frozenset({(1, 2)})), right, floor) == ((1, 2), frozenset({(1, 3)}))
    blocked = ((1, 1), frozenset({(1, 2), (1, 3)}))
    assert moved(blocked, right, floor) == blocked
    at_wall = ((1, 4), frozenset({(1, 5)}))
    assert moved(at_wall, right, floor) == at_wall
    assert moved(((1, 5), frozenset()), right, floor) == ((1, 5), frozenset())


def test_sokoban_shows_its_level_and_pays_for_boxes_on_targets() -> None:
    env = make_env(
        "roll_like/Sokoban-v0", size=5, walls=0.0, min_moves=1, max_moves=1, box_reward=0.25, step_reward=-0.5
    )
    observation, _ = env.reset(seed=3)
    tiles = observation.replace("\n", " ").split()
    assert len(tiles) == 25
    assert [tiles.count(tile) for tile in "#PXO_"] == [16, 1, 1, 1, 6]
    observation, reward, terminated, _, info = env.step(str(scripted_action(env)))
    assert (reward, terminated, info["success"]) == (-0.5 + 0.25 + 1.0, True, True)
    assert observation.replace("\n", " ").split().count("*") == 1


def test_sokobans_script_ends_off_its_way() -> None:
    env = make_env("roll_like/Sokoban-v0", min_moves=5)
    env.reset(seed=0)
    planned = scripted_action(env)
    env.step(next(f"<action>{name}</action>" for name in MOVES if f"<action>{name}</action>" != planned))
    assert scripted_action(env) is None


def test_sokoban_says_what_it_cannot_make() -> None:
    with pytest.raises(EnvError, match="1 ≤ min_moves ≤ max_moves"):
        make_env("roll_like/Sokoban-v0", min_moves=9, max_moves=3)
    env = make_env("roll_like/Sokoban-v0", size=4, boxes=1, min_moves=50, max_moves=60)
    with pytest.raises(EnvError, match=r"size 4 with 1 boxes .* 50 to 60 moves"):
        env.reset(seed=0)


def test_taxi_says_in_words_what_the_picture_hides() -> None:
    env = make_env("roll_like/Taxi-v0")
    observation, _ = env.reset(seed=1)
    for _ in range(20):
        passenger = "in the taxi" if "Passenger: in the taxi" in observation else "at "
        assert f"Passenger: {passenger}" in observation
        assert sum(line.count("T") for line in observation.splitlines()[:7]) == 1
        observation, _, terminated, _, info = env.step(str(scripted_action(env)))
        if terminated:
            break
    assert info["success"]


def test_rewards_of_cliff_and_taxi_are_scaled() -> None:
    total, success = solve("roll_like/CliffWalking-v0", 0, reward_scale=0.5)
    assert success
    assert total == pytest.approx(-13 * 0.5)
    env = make_env("roll_like/CliffWalking-v0")
    env.reset(seed=0)
    assert env.step("<action>right</action>")[1] == pytest.approx(-1.0)  # down the cliff: −100


@pytest.mark.parametrize(
    ("answer", "reference", "match", "right"),
    [
        (" The  Cat. ", "the cat", "exact", True),
        ("a cat", "the cat", "exact", False),
        ("it is 1,000", "1000.0", "number", True),
        ("-3", "3", "number", False),
        ("2 or 3", "2", "number", False),  # the last number counts
        ("none", "3", "number", False),
        ("the big cat sat", "Big cat", "contains", True),
        ("concatenate", "cat", "contains", False),
    ],
)
def test_answers_are_compared(answer: str, reference: str, match: Any, right: bool) -> None:
    assert qa.same(answer, reference, match) is right


@pytest.mark.parametrize(
    ("text", "style", "answer"),
    [
        ("<answer>4</answer>", "tag", "4"),
        ("<answer>3</answer> no: <answer> 4 </answer>", "tag", "4"),
        ("<answer></answer>", "tag", None),
        ("4", "tag", None),
        (r"\boxed{3} or \boxed{\frac{1}{2}}.", "boxed", r"\frac{1}{2}"),
        (r"\boxed {3}", "boxed", "3"),
        (r"\boxed{3", "boxed", None),
        (r"\boxed{}", "boxed", None),
        ("3", "boxed", None),
        (" 4\n", "text", "4"),
        ("  ", "text", None),
    ],
)
def test_answers_are_read_where_the_style_says(text: str, style: Any, answer: str | None) -> None:
    assert single_turn.read_answer(text, style) == answer


def test_questions_are_asked_once_and_in_the_order_of_seeds(rows: Path) -> None:
    env = make_env("roll_like/QA-v0", path=str(rows), match="number", invalid_penalty=0.5)
    asked = [env.reset(seed=seed)[0] for seed in range(12)]
    assert asked == [f"What is {n % 10} + {n % 10}?" for n in range(12)]
    assert {env.reset()[0] for _ in range(100)} == set(asked)
    assert system_prompt_of(env) == "Give the final answer as <answer>…</answer>."
    _, info = env.reset(seed=3)
    assert info["state"] == f"{rows}:4"
    assert env.step("<answer>6</answer>")[1:4] == (1.0, True, False)
    with pytest.raises(ResetNeeded):
        env.step("<answer>6</answer>")
    env.reset(seed=3)
    assert env.step("<answer>7</answer>")[1:4] == (0.0, True, False)
    env.reset(seed=3)
    _, reward, _, _, info = env.step("6")
    assert (reward, info) == (-0.5, {"success": False, "invalid_action": True})


def test_one_of_several_answers_is_enough(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "Colour?", "key": ["red", "crimson"]}\n\n')
    options = {"prompt": "question", "answer": "key", "style": "text", "system_prompt": "Be brief."}
    env = make_env("roll_like/QA-v0", path=str(tmp_path / "rows.jsonl"), **options)
    assert system_prompt_of(env) == "Be brief."
    env.reset(seed=0)
    assert env.step("Crimson!")[1] == 1.0


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, {}, "there is no file or directory"),
        ("\n", {}, "has no rows"),
        ('{"prompt": "a", "answer": 1}\n{"prompt": "b"}', {}, ":2: the field 'answer' is missing; found prompt"),
        ("{", {}, ":1: not JSON"),
        ("[1]", {}, ":1: expected a JSON object, found int"),
        ('{"prompt": "a", "answer": " "}', {}, "reference answer is empty"),
        ('{"prompt": "a", "answer": []}', {}, "reference answer is empty"),
        ('{"prompt": "a", "answer": "x"}', {"match": "number"}, "match is 'number'"),
    ],
)
def test_rows_that_are_wrong_are_named(text: str | None, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=message):
        make_env("roll_like/QA-v0", path=str(file), **options)


def test_settings_of_questions_are_checked(rows: Path) -> None:
    for options, message in (
        ({"style": "xml"}, "tag, boxed, text"),
        ({"match": "regex"}, "exact, number, contains"),
        ({"invalid_penalty": -1}, "≥ 0"),
    ):
        with pytest.raises(EnvError, match=message):
            make_env("roll_like/QA-v0", path=str(rows), **options)
    with pytest.raises(EnvError, match="missing 1 required positional argument: 'path'"):
        make_env("roll_like/QA-v0")


def test_a_package_that_is_missing_is_named_with_its_pip_command() -> None:
    with pytest.raises(EnvError, match=r"roll_like/Maze-v0 needs the package mazes==1\.0") as caught:
        need("no_such_mazes", "mazes==1.0", "roll_like/Maze-v0")
    assert str(caught.value.fix).startswith("pip install 'mazes==1.0'")


@pytest.mark.parametrize("module", [actions, single_turn, qa, randomness])
def test_examples_in_docstrings_are_so(module: Any) -> None:
    tested = doctest.testmod(module)
    assert tested.attempted
    assert not tested.failed


def test_moves_are_named_in_gymnasiums_order() -> None:
    env = make_env("roll_like/FrozenLake-v0", lake=["FFF", "FSF", "FFG"], view="grid")
    for name, (down, right) in LAKE_MOVES.items():
        env.reset(seed=0)
        observation = env.step(f"<action>{name}</action>")[0]
        assert divmod(observation.replace("\n", " ").split().index("P"), 3) == (1 + down, 1 + right)


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("reasoning_gym")

    def test_settings_make_the_questions(self) -> None:
        config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        env = make_env("roll_like/ReasoningGym-v0", task="chain_sum", config=config)
        questions = {env.reset(seed=seed)[0] for seed in range(20)}
        assert len(questions) > 10
        env.reset(seed=1)
        answer = str(scripted_action(env))
        assert env.step(answer)[1] == 1.0
        env.reset(seed=1)
        assert env.step("<answer>1000</answer>")[1] < 1.0

    def test_what_is_wrong_is_named(self) -> None:
        with pytest.raises(EnvError, match="did you mean 'chain_sum'"):
            make_env("roll_like/ReasoningGym-v0", task="chainsum")
        with pytest.raises(EnvError, match="refuses the settings"):
            make_env("roll_like/ReasoningGym-v0", config={"min_terms": 9, "max_terms": 2})


class TestTextArena:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("textarena")

    def test_a_game_is_won(self) -> None:
        env = make_env("roll_like/TextArena-v0", config={"max_number": 8})
        env.reset(seed=0)
        low, high, done = 1, 8, False
        while not done:
            guess = (low + high) // 2
            observation, reward, done, _, info = env.step(f"[{guess}]")
            low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
        assert (reward, info["success"]) == (1.0, True)
        with pytest.raises(ResetNeeded):
            env.step("[1]")

    def test_turns_say_which_moves_were_none(self) -> None:
        env = make_env("roll_like/TextArena-v0", config={"max_number": 8})
        env.reset(seed=0)
        moves = ["What?", "[1]", "What?", "What?"]
        assert [env.step(move)[4]["invalid_action"] for move in moves] == [True, False, True, True]

    def test_episodes_do_not_disturb_each_other_or_the_process(self) -> None:
        import random

        def play(turns: int, beside: Any = None) -> list[str]:
            env = make_env("roll_like/TextArena-v0", game="Blackjack-v0")
            seen = [env.reset(seed=5)[0]]
            for _ in range(turns):
                if beside is not None:
                    beside.reset(seed=9)
                    random.random()
                seen.append(env.step("[Hit]")[0])
            return seen

        random.seed(1)
        expected = random.random()
        random.seed(1)
        alone = play(4)
        assert random.random() == expected
        assert alone == play(4, make_env("roll_like/TextArena-v0", game="Blackjack-v0"))

    def test_what_is_wrong_is_named(self) -> None:
        with pytest.raises(EnvError, match="did you mean 'Mastermind-v0'"):
            make_env("roll_like/TextArena-v0", game="Mastermid-v0")
        env = make_env("roll_like/TextArena-v0", game="TicTacToe-v0")
        with pytest.raises(EnvError, match="could not start for one player"):
            env.reset(seed=0)


class TestTextWorld:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("textworld")

    def test_an_episode_goes_on_from_a_pickle(self, games_folder: Path) -> None:
        env = make_env("roll_like/TextWorld-v0", games=3, folder=str(games_folder), quest_length=2)
        env.reset(seed=1)
        env.step(str(scripted_action(env)))
        copy = pickle.loads(pickle.dumps(env))
        for player in (env, copy):
            _, reward, terminated, _, info = player.step(str(scripted_action(player)))
            assert (reward, terminated, info["success"]) == (1.0, True, True)
            player.close()

    def test_games_are_made_once_and_found(self, games_folder: Path) -> None:
        env = make_env("roll_like/TextWorld-v0", games=1, folder=str(games_folder))
        env.reset(seed=0)
        env.close()
        (game,) = games_folder.glob("*-0.z8")
        made = game.stat().st_mtime_ns
        again = make_env("roll_like/TextWorld-v0", path=str(game), show_commands=False, style="word", max_turns=1)
        observation, _ = again.reset(seed=5)
        assert "Commands:" not in observation
        _, _, terminated, truncated, info = again.step("dance wildly")
        assert (terminated, truncated, info["success"]) == (False, True, False)
        assert game.stat().st_mtime_ns == made
        again.close()

    def test_what_is_wrong_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(EnvError, match="no TextWorld game at"):
            make_env("roll_like/TextWorld-v0", path=str(tmp_path))
        with pytest.raises(EnvError, match="at least 1"):
            make_env("roll_like/TextWorld-v0", rooms=0)
