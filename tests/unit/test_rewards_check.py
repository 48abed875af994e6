"""`check_reward` and `roll-like check-reward`: what is suspicious is found, and nothing else."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml
from config_files import MINIMAL, changed

import roll_like
from roll_like import Completion, Outcome, Reward, RewardCase, RewardConfig, RewardResult, check_reward, cli
from roll_like.check.reward_rows import reward_cases
from roll_like.config.load import load_config
from roll_like.errors import ConfigError, DataError, PluginError, RefusedAnswerError, RewardError
from roll_like.registry import REWARDS
from roll_like.rewards.cases import general_hostile, read_cases
from roll_like.rewards.settings import settings_of

ROOT = Path(__file__).resolve().parents[2]
CASES = [RewardCase(prompt="6 × 7?", answer="42", gold=("42",), wrong=("41",), hostile=("42 or 41",))]


class ExitsLater(Reward):
    async def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        await asyncio.sleep(0)
        sys.exit("no key")


def test_an_asynchronous_reward_that_ends_the_process_loses_its_answers() -> None:
    report = check_reward(ExitsLater, CASES)
    assert all(answer.value is None for answer in report.answers)
    assert any("SystemExit: no key" in line for line in report.suspicious)


class NeedsAnAnswer(Reward):
    def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        return [float(each.text.strip() == each.answer.strip()) for each in completions]  # type: ignore[union-attr]


def test_the_same_problem_is_told_once_and_a_missing_answer_is_named() -> None:
    report = check_reward(NeedsAnAnswer, [RewardCase(gold=(), prompt=text) for text in ("6 × 7?", "6 × 6?")])
    assert len(report.suspicious) > 10
    assert f"row 1, and {len(report.suspicious) - 1} more" in str(report)
    assert len(str(report).splitlines()) < 30
    assert "no row has a reference answer, so completion.answer is None" in report.notes[0]


@pytest.mark.parametrize("seconds", ["-3", "0", "nan", "x"])
def test_a_time_that_is_none_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["check-reward", "math", "--slow", seconds])
    expected = f"argument --slow: expected a number of 0.001 or more, found '{seconds}'"
    assert expected in capsys.readouterr().err


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    REWARDS.names()
    monkeypatch.setattr(REWARDS, "_plugins", dict(REWARDS._plugins))
    before = set(sys.modules)
    yield
    # what was imported here registered its rewards in the registry of this test
    for name in set(sys.modules) - before:
        if name.startswith(("examples", "checked_rewards")):
            del sys.modules[name]


def honest(completion: Completion) -> float:
    return float(completion.text == completion.answer)


def kinds(report: roll_like.RewardReport) -> set[str]:
    return {answer.kind for answer in report.answers if answer.problems}


def test_an_honest_reward_is_not_suspicious() -> None:
    report = check_reward(honest, CASES)
    assert report.suspicious == []
    assert report.name == "honest"
    assert [answer.value for answer in report.answers] == [1.0, *[0.0] * (len(report.answers) - 1)]
    assert [answer.kind for answer in report.answers[:5]] == ["gold", "wrong", "empty", "empty", "hostile"]
    assert "nothing is suspicious" in str(report)


def test_an_async_function_too() -> None:
    async def slowly(completion: Completion) -> float:
        await asyncio.sleep(0)
        return honest(completion)

    assert check_reward(slowly, CASES).suspicious == []


async def test_inside_of_a_running_loop_as_in_a_notebook() -> None:
    assert check_reward(honest, CASES).suspicious == []


def test_gold_below_1() -> None:
    report = check_reward(lambda completion: 0.9 * honest(completion), CASES)
    assert kinds(report) == {"gold"}
    assert report.suspicious == ["a right answer gets 0.9, below 1"]
    assert check_reward(lambda completion: 0.0, CASES).suspicious == ["a right answer gets 0, below 1"]


def test_empty_above_0() -> None:
    report = check_reward(lambda completion: max(honest(completion), 0.1 * (not completion.text.strip())), CASES)
    assert kinds(report) == {"empty"}
    assert report.suspicious == ["an empty answer gets 0.1, above 0"] * 2


def test_wrong_and_hostile_as_good_as_gold() -> None:
    report = check_reward(lambda completion: float("4" in completion.text), CASES)
    assert kinds(report) == {"wrong", "hostile"}
    assert "a wrong answer gets 1, as much as a right one" in report.suspicious
    pays_everything = check_reward(lambda completion: float(bool(completion.text.strip())), CASES)
    hostile = [answer for answer in pays_everything.answers if answer.kind == "hostile"]
    assert all(answer.problems for answer in hostile)
    assert len(hostile) == 1 + len(general_hostile("6 × 7?"))


def test_another_value_the_second_time() -> None:
    draw = random.Random(0)
    report = check_reward(
        lambda completion: honest(completion) * draw.random(), [RewardCase(answer="42", gold=("42",))]
    )
    assert any("another value the second time" in line for line in report.suspicious)


def test_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("roll_like.rewards.check.time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def slow_on_floods(completion: Completion) -> float:
        clock[0] += 0.06 if len(completion.text) > 10_000 else 0.0
        return honest(completion)

    report = check_reward(slow_on_floods, CASES, slow_seconds=0.05)
    assert kinds(report) == {"hostile"}
    assert all("more than 0.05 s" in line for line in report.suspicious)


def test_raising_hanging_and_nonsense() -> None:
    release = threading.Event()

    def fragile(completion: Completion) -> Any:
        if "(((" in completion.text:
            raise RecursionError("too deep")
        if completion.text == "41":
            release.wait(60)
        return "one" if completion.text == "" else honest(completion)

    report = check_reward(fragile, CASES, timeout_seconds=0.5)
    release.set()
    assert kinds(report) == {"wrong", "empty", "hostile"}
    text = "\n".join(report.suspicious)
    assert "RecursionError: too deep" in text
    assert "no result within 0.5 s" in text
    assert "finite number, found 'one'" in text
    assert next(answer for answer in report.answers if answer.text == "41").value is None


def test_a_failure_once_of_twice() -> None:
    calls: list[str] = []

    def flaky(completion: Completion) -> float:
        calls.append(completion.text)
        if completion.text == "42" and calls.count("42") == 1:
            raise ConnectionError("gone")
        return honest(completion)

    (found,) = check_reward(flaky, CASES).suspicious
    assert found.startswith(f"cannot be scored (once of twice): ConnectionError: gone ({__file__}:")
    assert found.endswith(', `raise ConnectionError("gone")`)')


def test_a_penalty_pays_nothing_at_best() -> None:
    def penalty(completion: Completion) -> float:
        return -float(len(completion.text) > 100)

    case = RewardCase(gold=("short",), wrong=("long" * 100,), gold_value=0.0)
    assert check_reward(penalty, [case]).suspicious == []
    assert kinds(check_reward(lambda completion: 0.0, [case])) == {"wrong"}


class Compared(Reward):
    """The longest of a group."""

    class Config(RewardConfig):
        best: float = 1.0

    config: Config
    required_fields: ClassVar[tuple[str, ...]] = ("level",)
    started = closed = 0

    def start(self) -> None:
        self.started += 1

    def score(self, completions: Sequence[Completion]) -> Sequence[Outcome]:
        assert len(completions) > 1
        assert all(completion.metadata["level"] == 3 for completion in completions)
        longest = max(len(completion.text) for completion in completions)
        return [RewardResult(self.config.best * (len(completion.text) == longest)) for completion in completions]

    def close(self) -> None:
        self.closed += 1


def test_a_reward_of_groups_sees_the_group() -> None:
    flood = "word " * 30_000
    report = check_reward(Compared, [RewardCase(gold=(flood,), wrong=("x",), metadata={"level": 3})])
    assert report.suspicious == []
    made = Compared(Compared.Config(type="compared", best=0.5))
    report = check_reward(made, [RewardCase(gold=(flood,), metadata={"level": 3})])
    assert report.suspicious == ["a right answer gets 0.5, below 1"]
    assert (made.started, made.closed) == (1, 1)


def test_a_row_that_the_reward_refuses() -> None:
    report = check_reward("math", [RewardCase(answer="yes", gold=("yes",)), RewardCase(gold=("1",))])
    assert len(report.problems) == 2
    assert "row 1 is refused" in report.problems[0]
    assert "cannot be parsed as mathematics" in report.problems[0]
    assert "needs the field 'answer'" in report.problems[1]


def test_without_answers_of_known_worth_it_says_so() -> None:
    report = check_reward(lambda completion: 0.0)
    assert report.suspicious == []
    assert len(report.notes) == 1
    assert "right answers were not tried" in str(report)
    assert "no row has a right answer" in check_reward(honest, [RewardCase(gold=(), answer="1")]).notes[0]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("exact_match", {}),
        ("exact_match", {"take": "boxed", "answers_field": "answers"}),
        ("exact_match", {"normalize": "squad"}),
        ("f1", {"take": "last_line"}),
        ("format", {"tags": ["think", "answer"]}),
        ("ifeval", {}),
        ("length", {}),
        ("length", {"min_tokens": 0, "buffer_tokens": 0}),
        ("math", {}),
        ("math", {"boxed": True}),
        ("multiple_choice", {}),
        ("multiple_choice", {"boxed": True, "options_field": "options"}),
        ("repetition", {}),
    ],
)
def test_the_built_in_rewards_are_not_suspicious(name: str, settings: dict[str, Any]) -> None:
    report = check_reward(name, settings=settings)
    assert report.notes == ()
    assert report.suspicious == [], str(report)
    assert {answer.kind for answer in report.answers} == {"gold", "wrong", "empty", "hostile"}


@pytest.mark.parametrize(
    ("reward", "settings", "error", "message"),
    [
        ("maht", {}, PluginError, "'math'"),
        ("math", {"boxd": True}, ConfigError, "boxd"),
        ("format", {}, ConfigError, "check-reward"),
        ("composite", {"use": ["math"]}, ConfigError, "use"),
        ("reward_model", {"path": "/nowhere"}, RewardError, "cannot be loaded"),
    ],
)
def test_what_cannot_be_tried(reward: str, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_reward(reward, settings=settings)


# ---- files and the command -------------------------------------------------------------------------


@pytest.fixture
def cases_file(tmp_path: Path) -> Path:
    rows = [
        {"prompt": "6 × 7?", "answer": 42, "gold": ["42", "\\boxed{42}"], "wrong": "41", "level": 3},
        {"answer": "1/2", "gold": "0.5", "hostile": ["1 or 2"], "gold_value": 1, "empty_value": 0},
    ]
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def test_cases_of_a_file(cases_file: Path) -> None:
    assert read_cases(cases_file) == [
        RewardCase(prompt="6 × 7?", answer="42", gold=("42", "\\boxed{42}"), wrong=("41",), metadata={"level": 3}),
        RewardCase(answer="1/2", gold=("0.5",), hostile=("1 or 2",)),
    ]
    assert check_reward("math", cases_file).suspicious == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ("[1]", r"cases\.jsonl:1: expected a JSON object"),
        ('{"gold": "a"}\n{', r"cases\.jsonl:2: not JSON"),
        ('{"gold": 1}', "'gold' should be a text"),
        ('{"gold": [1]}', "'gold' should be a text"),
        ('{"gold": "a", "gold_value": "high"}', "'gold_value' should be a number"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_cases(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_cases(tmp_path / "nowhere.jsonl")


@pytest.fixture
def my_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "checked_rewards.py").write_text(
        "from roll_like import register_reward\n"
        "@register_reward('pays_all')\n"
        "def pays_all(completion):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "checked_rewards"


def test_the_command(cases_file: Path, my_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-reward", "math", "--cases", str(cases_file)]) == 0
    assert "nothing is suspicious" in capsys.readouterr().out
    assert cli.main(["check-reward", "math", "boxed=true", "--cases", str(cases_file), "timeout_seconds=3"]) == 1
    assert "a right answer gets 0, below 1" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["check-reward", "pays_all", "--import", my_module, "--slow", "5"]) == 1
    assert "an empty answer gets 1" in capsys.readouterr().out
    assert cli.main(["check-reward", "matth"]) == 2
    assert "did you mean 'math'" in capsys.readouterr().err
    assert cli.main(["check-reward", "math", "boxd=true"]) == 2


def test_settings_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = ROOT / "examples" / "custom_reward" / "rlvr.yaml"
    assert settings_of("uses_word", config, [])[1]["copies"] == 0.5
    name, values = settings_of("uses_word", config, ["copies=0.25", "name=mine"])
    assert (name, values["copies"], values["weight"], values["name"]) == ("uses_word", 0.25, 0.5, "mine")
    with pytest.raises(ConfigError, match="its rewards are 'brief', 'uses_word'"):
        settings_of("math", config, [])


def test_defaults_are_no_settings_of_a_run(tmp_path: Path) -> None:
    """A rubric with explicit aggregation refuses the bounds of implicit aggregation, which have defaults."""
    judges = [{"url": "http://127.0.0.1:9/v1", "model": "j"}]
    file = tmp_path / "run.yaml"
    use = [{"type": "rubric", "judges": judges, "criteria": [{"criterion": "Is polite."}]}]
    parent = ROOT / "configs" / "rlvr_instructions.yaml"
    file.write_text(yaml.safe_dump({"extends": str(parent), "rewards": {"use": use}}))
    name, values = settings_of("rubric", file, [])
    assert (name, values["type"]) == ("rubric", "rubric")
    assert "lowest" not in values
    assert REWARDS.get(name).Config.model_validate(values).type == "rubric"


def test_overrides_nest_and_are_yaml() -> None:
    assert settings_of("format", None, ["tags=[a, b]", "json_schema.type=object", "partial=true"]) == (
        "format",
        {"tags": ["a", "b"], "json_schema": {"type": "object"}, "partial": True},
    )
    with pytest.raises(ConfigError, match="not valid YAML"):
        settings_of("format", None, ["tags=[a"])
    with pytest.raises(ConfigError, match="which is 1 and no section"):
        settings_of("format", None, ["tags=1", "tags.a=1"])


def test_floods_may_be_refused_and_come_once() -> None:
    class Bounded(Reward):
        type = "bounded"
        per_sample = True
        failure: type[RewardError] = RefusedAnswerError

        def score(self, completions: Sequence[Completion]) -> Sequence[Any]:
            return [
                self.failure("too long") if len(each.text) > 900 else RewardResult(honest(each)) for each in completions
            ]

    class Broken(Bounded):
        failure = RewardError

    twice = [*CASES, *CASES]
    report = check_reward(Bounded, twice)
    assert report.suspicious == []
    refused = [answer for answer in report.answers if answer.value is None]
    assert len(refused) == 5
    assert {answer.case for answer in refused} == {0}
    assert len(check_reward(Broken, twice).suspicious) == 5


def test_rows_of_a_runs_own_data_are_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"{n} + {n}?", "total": 2 * n, "unit": "apples"} for n in range(1, 9)]
    # of a long file the first rows suffice: what comes after them is not read
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "no JSON\n")
    source = {"path": str(tmp_path / "sums.jsonl"), "prompt_field": "question", "answer_field": "total"}
    use = [{"type": "math", "name": "sums", "timeout_seconds": 600}, "repetition"]
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(changed(MINIMAL, data={"sources": [source]}, rewards={"use": use})))
    assert cli.main(["check-reward", "sums", "--config", str(config), "--slow", "600"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"gold +│ +4 │ +1 │", shown)
    assert re.search(r"wrong +│ +12 │ +0 │", shown)  # the other rows' answers
    cases = reward_cases(load_config(config), "sums")
    assert cases[1].metadata == {"total": 4, "unit": "apples"}
    assert (cases[1].prompt, cases[1].gold, cases[1].wrong) == ("2 + 2?", ("4",), ("2", "6", "8"))
    # what another reward pays for is not known
    assert {(case.gold, case.wrong) for case in reward_cases(load_config(config), "repetition")} == {((), ())}
    assert cli.main(["check-reward", "format", "--config", str(config)]) == 2
    assert f"fix: add it to `rewards.use` of {config}, or leave --config out" in capsys.readouterr().err
    source["prompt_field"] = "text"
    config.write_text(json.dumps(changed(MINIMAL, data={"sources": [source]}, rewards={"use": use})))
    assert cli.main(["check-reward", "sums", "--config", str(config)]) == 1
    assert "sums.jsonl:1: the row has no field 'text'" in capsys.readouterr().err


def test_rows_are_read_until_a_reward_scores_some(tmp_path: Path) -> None:
    rows = [{"prompt": f"{kind} {n}", "d": kind, "answer": str(n)} for kind in "ab" for n in range(6)]
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source: dict[str, Any] = {"path": str(file), "domain_field": "d", "answer_field": "answer"}

    def found(**settings: Any) -> list[str]:
        use = [{"type": "math", "domains": ["b"]}, {"type": "exact_match", "domains": ["a"]}]
        values = changed(MINIMAL, data={"sources": [source | settings]}, rewards={"use": use})
        (tmp_path / "run.yaml").write_text(json.dumps(values))
        return [case.prompt for case in reward_cases(load_config(tmp_path / "run.yaml"), "math")]

    assert found() == found(domain_weights={"a": 1, "b": 1}) == ["b 0", "b 1", "b 2", "b 3"]
    assert found(where={"answer": ["4", "5"]}) == ["b 4", "b 5"]
    assert found(streaming=True) == ["b 0", "b 1", "b 2", "b 3"]
    with pytest.raises(DataError, match="`where` keeps none of 12 rows"):
        found(where={"answer": "7"})
    file.write_text("")
    with pytest.raises(DataError, match="holds no rows"):
        found()
