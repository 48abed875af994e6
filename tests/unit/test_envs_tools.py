"""`roll_like/Tools-v0`: calls, results, final answers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_templates import renderer
from gymnasium.error import ResetNeeded

from roll_like.agents.conversation import Conversation
from roll_like.builtin.envs import tools as tools_env
from roll_like.envs import Turn, check_env, make_env, scripted_action, system_prompt_of, tools_of
from roll_like.errors import ConfigError, DataError, EnvError
from roll_like.types import ReasoningTags

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 3"}}</tool_call>'
ROWS = [
    {"prompt": "What is 12 · 3?", "answer": "36", "script": [CALL]},
    {"prompt": "What is 1 + 1?", "answer": ["2", "two"]},
    {"prompt": "What is 2 · 2?", "answer": 4, "script": [CALL.replace("12 * 3", "2 * 2"), "<answer>4</answer>"]},
]


@pytest.fixture(autouse=True)
def own_tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shared = tools_env.SharedTools()
    monkeypatch.setattr(tools_env, "SHARED", shared)
    yield
    shared.close()


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return str(file)


def broken() -> str:
    """Fail."""
    raise KeyError("database")


def test_it_is_an_environment_that_can_be_trained_in(rows: str) -> None:
    report = check_env("roll_like/Tools-v0", path=rows, invalid_penalty=0.1)
    assert report.findings == ()
    assert report.figures["scripted: success rate"] == 1.0
    assert report.figures["random: success rate"] < 1.0


def test_a_task_is_solved_with_a_tool(rows: str) -> None:
    env = make_env("roll_like/Tools-v0", path=rows)
    task, info = env.reset(seed=3)
    assert task == "What is 12 · 3?"
    assert info["messages"] == [{"role": "user", "content": task}]
    assert [tool["function"]["name"] for tool in tools_of(env)] == ["calculator"]
    assert system_prompt_of(env) == "When you know the answer, write it as <answer>…</answer>."

    observation, reward, terminated, truncated, info = env.step(f"I multiply. {CALL}")
    assert (observation, reward, terminated, truncated) == ("36", 0.0, False, False)
    assert info["messages"] == [{"role": "tool", "name": "calculator", "tool_call_id": "call_0", "content": "36"}]
    assert not info["invalid_action"]

    _, reward, terminated, truncated, info = env.step(
        "<think>So <answer>35</answer>?</think>It is <answer>36.0</answer>"
    )
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    with pytest.raises(ResetNeeded):
        env.step("more")


MISTRAL = ReasoningTags(open="[THINK]", close="[/THINK]")


def test_a_closing_tag_in_an_argument_is_part_of_the_argument(rows: str) -> None:
    env = make_env("roll_like/Tools-v0", path=rows)
    env.reset(seed=0)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "a</think>b"}}</tool_call>'
    _, _, terminated, _, info = env.step(f"<think>Let me see.</think>{call}")
    assert not terminated
    assert info["tool_calls"][0]["arguments"] == {"expression": "a</think>b"}


@pytest.mark.parametrize(
    ("said", "reward", "invalid"),
    [
        ("<answer>35</answer>", 0.0, False),
        ("It is 36.", -0.25, True),
        ("<think>perhaps <answer>36</answer>", -0.25, True),
        (Turn("perhaps <answer>36</answer>", ReasoningTags(opened=True)), -0.25, True),
        (Turn(f"perhaps {CALL}", ReasoningTags(opened=True)), -0.25, True),
        (Turn(f"[THINK]perhaps {CALL}[/THINK]<answer>36</answer>", MISTRAL), 1.0, False),
        ("<answer>36</answer>", 1.0, False),
    ],
)
def test_the_final_answer_is_judged(rows: str, said: str, reward: float, invalid: bool) -> None:
    env = make_env("roll_like/Tools-v0", path=rows, invalid_penalty=0.25)
    env.reset(seed=0)
    _, found, terminated, _, info = env.step(said)
    assert (found, terminated) == (reward, True)
    assert (info["success"], info["invalid_action"]) == (reward == 1.0, invalid)


@pytest.mark.parametrize(
    ("call", "told", "penalty"),
    [
        ('{"name": "calculater", "arguments": {}}', "did you mean 'calculator'?", 0.5),
        ('{"name": "calculator", "arguments": {}}', "'expression' is a required property", 0.5),
        ('{"name": "calculator"', "cannot be read: no valid JSON", 0.5),
        ('{"name": "calculator", "arguments": {"expression": "1/0"}}', "division by zero", 0.0),
    ],
)
def test_calls_that_go_wrong_are_told_and_cost_if_they_reach_no_tool(
    rows: str, call: str, told: str, penalty: float
) -> None:
    env = make_env("roll_like/Tools-v0", path=rows, invalid_penalty=0.5)
    env.reset(seed=0)
    observation, reward, terminated, _, info = env.step(f"<tool_call>{call}</tool_call>")
    assert told in observation
    assert (reward, terminated, info["invalid_action"]) == (-penalty, False, penalty > 0)
    assert env.step("<answer>36</answer>")[1] == 1.0


def test_turns_and_calls_are_limited(rows: str) -> None:
    env = make_env("roll_like/Tools-v0", path=rows, max_turns=2, max_calls=1)
    env.reset(seed=0)
    observation, _, _, truncated, info = env.step(CALL + CALL)
    assert observation == "36\nError: at most 1 calls in one turn"
    assert info["invalid_action"]
    assert not truncated
    _, _, terminated, truncated, info = env.step(CALL)
    assert (terminated, truncated, info["success"]) == (False, True, False)
    with pytest.raises(ResetNeeded):
        env.step(CALL)


def test_states_are_those_of_the_same_results(rows: str) -> None:
    env = make_env("roll_like/Tools-v0", path=rows)

    def states(seed: int, *turns: str) -> list[str]:
        found = [env.reset(seed=seed)[1]["state"]]
        return found + [env.step(turn)[4]["state"] for turn in turns]

    other = CALL.replace("12 * 3", "6 * 6")
    assert states(0, CALL, CALL) == states(0, f"So: {other}", CALL)
    assert len(set(states(0, CALL, CALL))) == 3
    assert states(0, CALL)[1] != states(1, CALL)[1]


def test_templates_that_know_no_tools_are_given_words(rows: str) -> None:
    env = make_env("roll_like/Tools-v0", path=rows, describe_tools=True, result_role="user", style="text")
    assert tools_of(env) == []
    prompt = system_prompt_of(env) or ""
    assert "- calculator(expression: string): Compute an arithmetic expression." in prompt
    assert prompt.endswith("When you know the answer, write it and nothing else.")
    env.reset(seed=0)
    info = env.step(CALL)[4]
    assert info["messages"] == [{"role": "user", "content": "<tool_response>\n36\n</tool_response>"}]
    assert env.step("36")[1] == 1.0


def test_examples_are_solved_by_the_real_tools_and_never_set(rows: str) -> None:
    env = make_env("roll_like/Tools-v0", path=rows, examples=2)
    for seed in range(3):
        task, info = env.reset(seed=seed)
        assert task == "What is 1 + 1?"
    roles = [message["role"] for message in info["messages"]]
    assert roles == [*["user", "assistant", "tool", "assistant"] * 2, "user"]
    assert [message["content"] for message in info["messages"][:4]] == [
        "What is 12 · 3?",
        CALL,
        "36",
        "<answer>36</answer>",
    ]
    with pytest.raises(DataError, match="3 examples are asked for; 2 of its 3 tasks have a `script`"):
        make_env("roll_like/Tools-v0", path=rows, examples=3)


@pytest.mark.parametrize("name", ["SmolLM2", "Qwen2.5", "Qwen3"])
def test_episodes_are_one_token_exact_segment(rows: str, name: str) -> None:
    env = make_env("roll_like/Tools-v0", path=rows, examples=1)
    render = renderer(name)
    _, info = env.reset(seed=0)
    conversation = Conversation(render)
    system: list[Any] = [{"role": "system", "content": system_prompt_of(env)}]
    conversation.start([*system, *info["messages"]], tools_of(env))
    sampled = []
    while True:
        answer = scripted_action(env)
        assert answer is not None
        ids = [*render.encode(answer).tolist(), render.end_of_turn]
        conversation.sampled(ids, [0.0] * len(ids))
        sampled += ids
        _, _, terminated, _, info = env.step(answer)
        if terminated:
            break
        conversation.observe(info["messages"])
    (only,) = conversation.segments()
    assert only.token_ids[only.sampled].tolist() == sampled
    assert info["success"]


def test_a_failing_tool_is_no_fault_of_the_policy(rows: str) -> None:
    env = make_env("roll_like/Tools-v0", path=rows, tools=[{"type": "function", "target": "test_envs_tools:broken"}])
    env.reset(seed=0)
    with pytest.raises(EnvError, match="tool 'broken' failed: KeyError: 'database'"):
        env.step('<tool_call>{"name": "broken", "arguments": {}}</tool_call>')
    env.reset(seed=0)
    assert env.step("<answer>36</answer>")[1] == 1.0


def test_an_episode_goes_on_after_pickling(rows: str) -> None:
    env = make_env("roll_like/Tools-v0", path=rows)
    env.reset(seed=0)
    env.step(CALL)
    copy = pickle.loads(pickle.dumps(env))
    assert copy.step(CALL)[0] == "36"
    assert copy.step("<answer>36</answer>")[4]["success"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tools": ["calculater"]}, ConfigError, r"the environment's tools\[0\]: unknown tool type"),
        ({"match": "near"}, EnvError, "match is one of exact, number, contains"),
        ({"style": "xml"}, EnvError, "style is one of tag, boxed, text"),
        ({"max_turns": 0}, EnvError, "max_turns and max_calls should be at least 1"),
        ({"tool": ["calculator"]}, EnvError, "tools"),
    ],
)
def test_wrong_options_are_named(rows: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_env("roll_like/Tools-v0", path=rows, **options)


def test_a_script_is_a_list(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"prompt": "a", "answer": "b", "script": "c"}))
    with pytest.raises(DataError, match=r"tasks.jsonl:1: the script should be a list of texts, found 'c'"):
        make_env("roll_like/Tools-v0", path=str(file))
