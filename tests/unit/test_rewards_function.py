"""The reward `function`: functions of other libraries are called as those libraries call them."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from reward_support import completion, row

from roll_like import Completion, Outcome, RewardResult, StepScore
from roll_like.builtin.rewards.function import ForeignFunction, ForeignFunctionConfig
from roll_like.builtin.rewards.function_child import outcomes
from roll_like.builtin.rewards.interfaces import INTERFACES
from roll_like.errors import ConfigError, DataError, PluginError, RewardError
from roll_like.registry import REWARDS
from roll_like.types import StopReason

VERL_ROW: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 7, "split": "train"},
}


def called(
    interface: str, function: Callable[..., Any], *answers: Completion, arguments: dict[str, Any] | None = None
) -> list[Outcome]:
    """What the function says of these answers, without a process."""
    return asyncio.run(outcomes(INTERFACES[interface](function, arguments or {}), answers))


def only(found: Sequence[Outcome]) -> RewardResult:
    (outcome,) = found
    assert isinstance(outcome, RewardResult), outcome
    return outcome


@contextmanager
def reward(
    folder: Path, source: str, interface: str, function: str = "f", **settings: Any
) -> Iterator[ForeignFunction]:
    """The reward with a function that is written to a file."""
    path = folder / "theirs.py"
    path.write_text(source, encoding="utf-8")
    made = ForeignFunction(ForeignFunctionConfig(path=str(path), function=function, interface=interface, **settings))
    try:
        yield made
    finally:
        made.close()


def test_it_is_registered_by_its_entry_point() -> None:
    assert REWARDS.get("function") is ForeignFunction


def test_verl_gives_the_row_and_all_that_was_sampled() -> None:
    seen: dict[str, Any] = {}

    def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        seen.update(
            data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
        )
        return 1

    found = called("verl", compute_score, completion("<think>a</think>b", "no", **VERL_ROW))
    assert only(found).value == 1.0
    assert seen == {
        "data_source": "openai/gsm8k",
        "solution_str": "<think>a</think>b",
        "ground_truth": "42",
        "extra_info": {"index": 7, "split": "train", "num_turns": 2, "rollout_reward_scores": {}},
    }


def test_verls_ground_truth_may_be_a_mapping_and_else_is_the_reference_answer() -> None:
    def truth(ground_truth: Any, data_source: str = "none") -> dict[str, Any]:
        return {"score": 1.0, "pred": repr((ground_truth, data_source))}

    rows: list[dict[str, Any]] = [{"reward_model": {"ground_truth": {"target": ["a"]}}}, {}, {"reward_model": None}]
    found = [only(called("verl", truth, completion("x", "42", **fields))).answer for fields in rows]
    assert found == ["({'target': ['a']}, 'none')", "('42', 'none')", "('42', 'none')"]


def test_verls_mapping_is_a_score_with_figures_and_an_answer_to_vote_over() -> None:
    # verl#1044, verl-omni#297: samples of one batch may return other keys, or a number alone
    def compute_score(solution_str: str, **_: Any) -> Any:
        long = {"score": -1.0, "acc": False, "pred": "7", "why": "text", "nan": math.nan, "np": np.float32(0.5)}
        return {"long": long, "short": {"score": np.float64(1.0)}, "number": True}[solution_str]

    found = called("verl", compute_score, *(completion(text, **VERL_ROW) for text in ("long", "short", "number")))
    assert found == [RewardResult(-1.0, {"acc": 0.0, "np": 0.5}, "7"), RewardResult(1.0), RewardResult(1.0)]


def test_a_mapping_may_have_scores_of_steps() -> None:
    def compute_score(solution_str: str) -> dict[str, Any]:
        ends = [at + 1 for at, letter in enumerate(solution_str) if letter == "."]
        return {"score": 0.5, "steps": [{"score": 1 / end, "end": end} for end in ends], "used": 1}

    found = only(called("verl", compute_score, completion("A. B.")))
    assert found.steps == (StepScore(0.5, 2), StepScore(0.2, 5))
    assert found.details == {"used": 1.0}
    # how many there are is a figure
    assert only(called("verl", lambda solution_str: {"score": 1, "steps": 3}, completion("A."))).details == {"steps": 3}

    # and a list of something else is the function's own
    for own in ([0.1, 0.2], ["a", "b"]):
        found = only(called("verl", lambda solution_str, own=own: {"score": 1, "steps": own}, completion("A.")))
        assert (found.value, found.steps) == (1.0, ())

    step = {"score": 0.5, "end": 2.0}
    for wrong, message in (
        ([step, 0.5], "`steps` should be a list of mappings with `score` and `end`, found 0.5 in it"),
        ([{"score": 1}], "`steps` should be a list of mappings with `score` and `end`, found {'score': 1} in it"),
        ([step | {"end": 3.9}], "the `end` of a step should be a whole number of characters, found 3.9"),
        ([step | {"end": math.nan}], "the `end` of a step should be a whole number of characters, found nan"),
    ):
        given = {"score": 1, "steps": wrong}
        (lost,) = called("verl", lambda solution_str, given=given: given, completion("A."))
        assert isinstance(lost, RewardError)
        assert message in str(lost)


def test_a_mapping_without_the_score_names_its_keys() -> None:
    # slime#1470
    (found,) = called("verl", lambda **_: {"acc": 1.0, "reward": 1.0}, completion("x", **VERL_ROW))
    assert isinstance(found, RewardError)
    assert "a mapping with 'score', found the keys acc, reward" in str(found)


@pytest.mark.parametrize("returned", [None, "1.0", [1.0, 2.0], {"score": None}])
def test_what_is_no_number_is_a_failure_and_not_0(returned: Any) -> None:
    (found,) = called("verl", lambda **_: returned, completion("x", **VERL_ROW))
    assert isinstance(found, RewardError)


def test_arguments_are_named_arguments_and_come_before_the_rows() -> None:
    def compute_score(data_source: str, solution_str: str, method: str) -> dict[str, Any]:
        return {"score": 1.0, "pred": f"{data_source} {solution_str} {method}"}

    arguments = {"method": "strict", "data_source": "mine"}
    found = called("verl", compute_score, completion("x", **VERL_ROW), arguments=arguments)
    assert only(found).answer == "mine x strict"


def test_trl_gives_a_group_with_its_columns_as_lists() -> None:
    seen: dict[str, Any] = {}

    def f(completions: Any, solution: Any, **kwargs: Any) -> list[float]:
        seen.update(kwargs, completions=completions, solution=solution)
        return [0.5, np.float32(0.25)]  # type: ignore[list-item]

    answers = [completion(text, solution="s", level=3) for text in ("<think>a</think>b", "c")]
    assert [only([each]).value for each in called("trl", f, *answers)] == [0.5, 0.25]
    del seen["log_metric"], seen["log_extra"]
    assert seen == {
        "prompts": [[{"role": "user", "content": "Say it."}]] * 2,
        "completions": [
            [{"role": "assistant", "content": "<think>a</think>b"}],
            [{"role": "assistant", "content": "c"}],
        ],
        "solution": ["s", "s"],
        "level": [3, 3],
    }


def test_trl_text_gives_texts() -> None:
    def f(prompts: list[str], completions: list[str]) -> list[float]:
        return [float(len(prompt + text)) for prompt, text in zip(prompts, completions, strict=True)]

    assert [only([each]).value for each in called("trl_text", f, completion("ab"), completion("c"))] == [9.0, 8.0]


def test_an_answer_that_trls_function_abstains_from_adds_nothing() -> None:
    # trl#4501, trl#5775, ms-swift#4653: None is no NaN in figures
    def f(completions: Any, log_metric: Callable[[str, float], None], **_: Any) -> list[float | None]:
        log_metric("seen", len(completions))
        return [None, 1.0]

    found = called("trl", f, completion("a"), completion("b"))
    assert found == [
        RewardResult(0.0, {"seen": 2.0, "abstained": 1.0}),
        RewardResult(1.0, {"seen": 2.0, "abstained": 0.0}),
    ]


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([1.0], "a list of 2 numbers, found a list of 1"),
        (torch.ones(3), "a list of 2 numbers, found a list of 3"),
        (torch.tensor(1.0), r"a list of 2 numbers, found tensor\(1.\) \(Tensor\)"),
        (1.0, r"a list of 2 numbers, found 1.0 \(float\)"),
        (None, r"found None \(NoneType\)"),
        ("12", r"found '12' \(str\)"),
        ({"a": 1.0, "b": 2.0}, r"\(dict\)"),
        ([1.0, "x"], r"a number, found 'x' \(str\)"),
    ],
)
def test_what_is_no_list_of_a_number_for_each_answer_loses_the_group(returned: Any, problem: str) -> None:
    found = called("trl", lambda **_: returned, completion("a"), completion("b"))
    assert len(found) == 2
    for each in found:
        assert isinstance(each, RewardError)
        assert re.search(problem, str(each))


@pytest.mark.parametrize(
    "values",
    [torch.tensor([0.5, 1.0]), torch.tensor([[0.5], [1.0]]), np.array([0.5, 1.0]), (each for each in (0.5, 1.0))],
)
def test_trls_function_may_return_whatever_holds_a_number_for_each_answer(values: Any) -> None:
    found = called("trl", lambda **_: values, completion("a"), completion("b"))
    assert [only([each]).value for each in found] == [0.5, 1.0]


def test_verls_extra_info_may_be_json_text() -> None:
    def compute_score(extra_info: dict[str, Any], **_: Any) -> float:
        return float(extra_info["index"])

    found = called("verl", compute_score, completion("x", extra_info='{"index": 7}'))
    assert only(found).value == 7.0
    (lost,) = called("verl", compute_score, completion("x", extra_info="[7]"))
    assert isinstance(lost, RewardError)
    assert "'extra_info' should hold a mapping or the text of a JSON object, found '[7]'" in str(lost)


def test_openrlhf_gives_prompt_and_answer_as_one_text() -> None:
    def reward_func(queries: list[str], prompts: list[str], labels: list[str], **_: Any) -> dict[str, Any]:
        right = [query[len(prompt) :] == label for query, prompt, label in zip(queries, prompts, labels, strict=True)]
        rewards = torch.tensor(right, dtype=torch.float)
        return {"rewards": rewards, "scores": rewards / 2, "extra_logs": {"length": torch.tensor(len(queries[0]))}}

    found = called("openrlhf", reward_func, completion("42", "42"), completion("4", "42"))
    assert found == [
        RewardResult(1.0, {"scores": 0.5, "length": 9.0}),
        RewardResult(0.0, {"scores": 0.0, "length": 8.0}),
    ]
    assert only(called("openrlhf", lambda *_: torch.tensor([2.0]), completion("x"))).value == 2.0


def test_slime_gives_args_and_a_sample() -> None:
    async def custom_rm(args: Any, sample: Any, **_: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        seen = (args.reward_key, sample.prompt, sample.response, sample.label, sample.metadata["level"], sample.status)
        return {"acc": 1.0, "score": 0.0, "seen": repr(seen), "length": sample.response_length}

    answer = replace(completion("one two", "42", metadata={"level": 3}), stop_reason=StopReason.LENGTH)
    found = called("slime", custom_rm, answer, arguments={"reward_key": "acc"})
    assert found == [RewardResult(1.0, {"score": 0.0, "length": 2.0})]
    assert only(called("slime", custom_rm, answer)).value == 0.0


def test_slimes_own_sample_is_made_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sample(SimpleNamespace):
        Status = str.upper

    def rm(args: Any, sample: Any) -> float:
        return float(isinstance(sample, Sample) and sample.status == "COMPLETED")

    types = ModuleType("slime.utils.types")
    types.Sample = Sample  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slime.utils.types", types)
    assert only(called("slime", rm, completion("x", label="42"))).value == 1.0


def test_areal_gives_texts_and_columns() -> None:
    def reward_fn(
        prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **row: Any
    ) -> float:
        assert (prompt, completions, prompt_ids, completion_ids) == ("Say it.", "x", None, None)
        return float(answer == "the row's" and row == {"level": 3})

    answer = replace(completion("x", "42"), metadata={"answer": "the row's", "level": 3})
    assert only(called("areal", reward_fn, answer)).value == 1.0


def test_a_function_that_raises_loses_its_sample_alone() -> None:
    def compute_score(solution_str: str, **_: Any) -> float:
        return 1 / len(solution_str)

    lost, kept = called("verl", compute_score, completion("", **VERL_ROW), completion("ab", **VERL_ROW))
    assert isinstance(lost, RewardError)
    assert "ZeroDivisionError" in str(lost)
    assert kept == RewardResult(0.5)


def test_a_row_without_an_argument_is_refused(tmp_path: Path) -> None:
    source = "def f(data_source, solution_str, level): return 1.0"
    wanted = r"data.jsonl:7: f\(data_source, .*missing a required argument: 'level'"
    with reward(tmp_path, source, "verl") as made, pytest.raises(DataError, match=wanted):
        made.check_row(row("42", **VERL_ROW))
    with reward(tmp_path, source, "verl", arguments={"level": 1}) as made:
        made.check_row(row("42", **VERL_ROW))
        with pytest.raises(DataError, match="'data_source'; the row has the fields question"):
            made.check_row(row("42", question="6 × 7"))
        with pytest.raises(DataError, match=r"data.jsonl:7: the field 'extra_info' should hold .* found 'none'"):
            made.check_row(row("42", extra_info="none"))


@pytest.mark.parametrize(
    ("source", "function", "problem"),
    [
        ("f = 1", "g", "'g' of .*theirs.py cannot be imported: AttributeError"),
        ("f = 1", "f", "is no function: 1"),
        ("import no_such_module", "f", "ModuleNotFoundError"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, source: str, function: str, problem: str) -> None:
    with pytest.raises(PluginError, match=problem), reward(tmp_path, source, "verl", function=function):
        pass


def test_a_module_that_is_not_there_is_refused() -> None:
    with pytest.raises(PluginError, match="'f' of no_such_module cannot be imported: ModuleNotFoundError"):
        ForeignFunction(ForeignFunctionConfig(path="no_such_module", function="f", interface="verl"))


def test_it_runs_in_the_main_thread_of_a_process_which_ends(tmp_path: Path) -> None:
    source = f"""
import os, signal, threading, time

class F:
    def __call__(self, completions, **kwargs):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # math-verify does so, and cannot in a thread
        if completions[0] == "hang":
            time.sleep(600)
        if completions[0] == "exit":
            os._exit(3)
        return [float(os.getpid() != {os.getpid()}) for _ in completions]
"""
    # as in ms-swift, whose rewards are classes and whose completions are texts
    with reward(tmp_path, source, "trl_text", function="F", timeout_seconds=2) as made:
        assert [only([each]).value for each in made.score([completion("a"), completion("b")])] == [1.0, 1.0]
        (pid,) = made._pool.process_ids
        for text, problem in (("hang", "no answer within 2 s"), ("exit", "the process ended with status 3")):
            (lost,) = made.score([completion(text)])
            assert isinstance(lost, RewardError)
            assert problem in str(lost)
        assert only(made.score([completion("a")])).value == 1.0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_the_driver_finds_through_its_path_is_found_in_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "on_the_path.py").write_text("def f(solution_str): return 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    made = ForeignFunction(ForeignFunctionConfig(path="on_the_path", function="f", interface="verl"))
    try:
        made.start()
        assert only(made.score([completion("a")])).value == 1.0
    finally:
        made.close()


def test_a_process_that_cannot_load_the_function_fails_the_start(tmp_path: Path) -> None:
    source = f"import os\nif os.getpid() != {os.getpid()}: raise RuntimeError('one process only')\ndef f(): return 1"
    with reward(tmp_path, source, "verl") as made, pytest.raises(RewardError, match="RuntimeError: one process only"):
        made.start()


def test_arguments_are_on_no_command_line(tmp_path: Path) -> None:
    source = "def f(solution_str, key): return float(key == {'secret': [1, None]})"
    with reward(tmp_path, source, "verl", arguments={"key": {"secret": [1, None]}}) as made:
        assert only(made.score([completion("a")])).value == 1.0
        (pid,) = made._pool.process_ids
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"function_child.py" in line
        assert b"secret" not in line
    with (
        pytest.raises(ConfigError, match=r"arguments\.key: found .* not a valid JSON value"),
        reward(tmp_path, source, "verl", arguments={"key": {1}}),
    ):
        pass


@pytest.mark.parametrize(
    ("function", "signature"), [("f", "async def f("), ("F", "class F:\n  async def __call__(self, ")]
)
def test_answers_that_an_async_function_waits_for_are_waited_for_together(
    tmp_path: Path, function: str, signature: str
) -> None:
    source = f"""
import asyncio
waiting = 0
{signature}solution_str, **kwargs):
    global waiting
    waiting += 1
    for _ in range(200):
        if waiting == 3:
            return 1.0
        await asyncio.sleep(0.01)
    return 0.0
"""
    with reward(tmp_path, source, "verl", function=function) as made:
        found = made.score([completion(text, **VERL_ROW) for text in "abc"])
        assert [only([each]).value for each in found] == [1.0, 1.0, 1.0]


def test_its_process_ends_with_its_parent(tmp_path: Path) -> None:
    source = (
        "import time\ndef f(solution_str, **k):\n    print(__import__('os').getpid(), flush=True)\n    time.sleep(600)"
    )
    (tmp_path / "theirs.py").write_text(source)
    script = f"""
from roll_like.builtin.rewards.function import ForeignFunction, ForeignFunctionConfig
from roll_like.rewards.base import given_completion
made = ForeignFunction(ForeignFunctionConfig(path={str(tmp_path / "theirs.py")!r}, function="f", interface="verl"))
made.score([given_completion("x", messages=(), answer="1", metadata={{}})])
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.05)
