import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hygiene import ended
from reward_support import row

from roll_like import Completion, RewardResult
from roll_like.builtin.rewards.child_pool import ChildPool
from roll_like.builtin.rewards.math import Math, MathConfig
from roll_like.errors import DataError, RewardError
from roll_like.registry import REWARDS
from roll_like.types import StopReason

TOWER = "the answer is $9^{9^{9^{9}}}$"


def completion(text: str, answer: str | None) -> Completion:
    return Completion(
        text=text, messages=(), answer=answer, metadata={}, stop_reason=StopReason.STOP, response_tokens=1
    )


@pytest.fixture(scope="module")
def reward() -> Iterator[Math]:
    made = Math(MathConfig())
    yield made
    made.close()


def scores(reward: Math, *asked: Completion) -> list[tuple[float, dict[str, float]]]:
    """Values and figures of results."""
    results = [outcome for outcome in reward.score(asked) if isinstance(outcome, RewardResult)]
    return [(result.value, dict(result.details)) for result in results]


@pytest.mark.parametrize(
    ("gold", "response", "value", "parsed"),
    [
        ("42", "So the answer is 42.", 1.0, 1.0),
        ("42", "So the answer is \\boxed{42}.", 1.0, 1.0),
        ("42", "So the answer is 43.", 0.0, 1.0),
        ("42", "I do not know.", 0.0, 0.0),
        ("42", "", 0.0, 0.0),
        ("42", "\\boxed{41} or \\boxed{42}", 0.0, 1.0),
        ("1/2", "It is $\\frac{1}{2}$.", 1.0, 1.0),
        ("\\frac{1}{2}", "It is 0.5", 1.0, 1.0),
        ("1\\frac{1}{2}", "$1.5$", 1.0, 1.0),
        ("1,000", "1000 apples", 1.0, 1.0),
        ("x^2+2x+1", "$(x+1)^2$", 1.0, 1.0),
        ("{1,2}", "$\\{2, 1\\}$", 1.0, 1.0),
        ("-7", "The result is $-7$", 1.0, 1.0),
        ("42", "3 × 14 = 42\n#### 42", 1.0, 1.0),
        ("42", "First 7, then 6.\n#### 42\nI hope this helps, 7 days a week!", 1.0, 1.0),
        ("42", "#### 41\nNo:\n#### 42 apples", 1.0, 1.0),
        ("42", "#### 42\nor\n#### 41", 0.0, 1.0),
        ("1/2", "#### $\\frac{1}{2}$", 1.0, 1.0),
        ("1000", "#### 1,000", 1.0, 1.0),
        ("42", "#### 41\nSo \\boxed{42}.", 1.0, 1.0),
        ("42", "#### 1. Start\n7 and 6\n#### Step 2\nThe answer is 42.", 1.0, 1.0),
        ("42", "So \\boxed{42}. I hope this helps you 24 hours a day!", 1.0, 1.0),
        ("42", "The answer is 42. Let me know if you have 3 more questions.", 1.0, 1.0),
        ("42", "6 and 7 give 42", 1.0, 1.0),
        ("42", "42 and then 7", 0.0, 1.0),
        ("42", "1 2 3 42 43 44", 0.0, 1.0),
        ("She has 6 × 7 = <<6*7=42>>42.\n#### 42", "It is 42.", 1.0, 1.0),
        ("She has 6 × 7 = <<6*7=42>>42.\n#### 42", "It is 6.", 0.0, 1.0),
    ],
)
def test_comparison(reward: Math, gold: str, response: str, value: float, parsed: float) -> None:
    assert scores(reward, completion(response, gold)) == [(value, {"parsed": parsed})]


@pytest.mark.parametrize(
    ("gold", "response", "answer"),
    [
        ("42", "The answer is 41.", "41"),
        ("42", "It is \\boxed{41.0}.", "41"),
        ("7", "\\boxed{0.5}", "1/2"),
        ("7", "\\boxed{\\frac{2}{4}}", "1/2"),
        ("7", "$1+2x$", "2*x + 1"),
        ("7", "$2x+1$", "2*x + 1"),
        ("(x+1)^2", "$x^2+2x+1$", "(x + 1)**2"),  # a right answer is written as the reference
        ("42", "I do not know.", ""),
    ],
)
def test_equal_answers_are_reported_as_equal_texts(reward: Math, gold: str, response: str, answer: str) -> None:
    (result,) = reward.score([completion(response, gold)])
    assert isinstance(result, RewardResult)
    assert result.answer == answer


def test_boxed_only() -> None:
    reward = Math(MathConfig(boxed=True))
    try:
        asked = [completion("The answer is 42.", "42"), completion("\\boxed{42}", "42")]
        assert scores(reward, *asked) == [(0.0, {"parsed": 0.0}), (1.0, {"parsed": 1.0})]
    finally:
        reward.close()


def test_is_registered_by_its_entry_point() -> None:
    assert REWARDS.get("math") is Math


def test_check_row(reward: Math) -> None:
    for answer in (
        "42",
        "-3.5",
        "\\sqrt{2}",
        "$\\pi$",
        "(1, 2)",
        "12 books",
        "1,2",
        "no solution",
        "\\text{yes}",
        "(C)",
    ):
        reward.check_row(row(answer))
    for answer in ("yes", "no idea at all", "", None):
        with pytest.raises(DataError, match=r"data\.jsonl:7: the answer .* cannot be parsed"):
            reward.check_row(row(answer))


def test_rows_of_plain_numbers_are_checked_without_a_process() -> None:
    made = Math(MathConfig())
    for answer in ("42", "-3.5", "1,234", "5e-05", "3 1/2", "$12.50", "50%", "0.(3)"):
        made.check_row(row(answer))
    assert made._pool.process_ids == []


def test_a_reference_answer_that_is_no_mathematics_is_a_failure(reward: Math) -> None:
    (outcome,) = reward.score([completion("42", "yes")])
    assert isinstance(outcome, RewardError)
    assert "'yes'" in str(outcome)


def test_an_expression_that_never_ends_is_killed_and_lost_and_the_others_are_scored() -> None:
    reward = Math(MathConfig(timeout_seconds=1.0, processes=2))
    try:
        start = time.monotonic()
        asked = [completion("42", "42"), completion(TOWER, "42"), completion("7", "42"), completion("42", "42")]
        outcomes = reward.score(asked)
        assert time.monotonic() - start < 20
        assert isinstance(outcomes[1], RewardError)
        assert [outcome.value for outcome in outcomes if isinstance(outcome, RewardResult)] == [1.0, 0.0, 1.0]
        assert scores(reward, completion("42", "42")) == [(1.0, {"parsed": 1.0})]
    finally:
        reward.close()


def test_a_busy_process_that_is_not_killed_ends_by_its_own_alarm() -> None:
    script = Path(__file__).resolve().parents[2] / "rewards" / "math_child.py"
    pool = ChildPool(script, size=1, timeout_seconds=30, arguments=("0.3", str(2048 << 20)))
    (answer,) = pool.run([("42", TOWER, False)])
    assert isinstance(answer, ChildProcessError)
    assert f"status {-signal.SIGALRM}" in str(answer)


def test_processes_start_late_and_none_stays() -> None:
    reward = Math(MathConfig(processes=2))
    assert reward._pool.process_ids == []
    reward.score([completion("42", "42"), completion("42", "42")])
    pids = reward._pool.process_ids
    assert len(pids) == 2
    assert not any(ended(pid, seconds=0.0) for pid in pids)
    reward.close()
    assert reward._pool.process_ids == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


CHILD = """
import os, sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
connection.send(None)
while True:
    try:
        request = connection.recv()
    except EOFError:
        sys.exit(0)
    if request == "hang":
        time.sleep(60)
    if request == "die":
        os._exit(7)
    connection.send((os.getpid(), request))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "child.py"
    path.write_text(CHILD)
    return path


def test_pool_keeps_order_and_replaces_what_dies_or_hangs(script: Path) -> None:
    pool = ChildPool(script, size=2, timeout_seconds=1.0)
    answers = pool.run(["a", "hang", "b", "die", "c", "d"])
    assert [answer[1] for answer in answers if isinstance(answer, tuple)] == ["a", "b", "c", "d"]
    assert isinstance(answers[1], TimeoutError)
    assert isinstance(answers[3], ChildProcessError)
    assert "status 7" in str(answers[3])
    assert len(pool.process_ids) <= 2
    pool.close()


def test_pool_reuses_its_processes(script: Path) -> None:
    pool = ChildPool(script, size=1, timeout_seconds=60)
    first, second = pool.run(["a", "b"])
    assert first[0] == second[0] == pool.run(["c"])[0][0]
    pool.close()
    assert pool.run(["d"])[0][0] != first[0]
    pool.close()


def test_a_script_that_cannot_start(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(3)")
    pool = ChildPool(script, size=1, timeout_seconds=60)
    (answer,) = pool.run(["a"])
    assert isinstance(answer, ChildProcessError)
    assert pool.process_ids == []


@pytest.mark.parametrize("end", ["sys.exit(0)", "os.kill(os.getpid(), 9)", "raise ValueError"])
def test_no_process_outlives_its_owner(script: Path, end: str) -> None:
    code = textwrap.dedent(
        f"""
        import os, sys
        from pathlib import Path
        from roll_like.builtin.rewards.child_pool import ChildPool
        pool = ChildPool(Path({str(script)!r}), size=2, timeout_seconds=60)
        pool.run(["a", "b"])
        print(*pool.process_ids, flush=True)
        {end}
        """
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) >= 1
    assert ended(*pids), f"{pids} still run"


def test_a_forgotten_pool_is_ended_by_the_garbage_collector(script: Path) -> None:
    pool = ChildPool(script, size=1, timeout_seconds=60)
    pool.run(["a"])
    (pid,) = pool.process_ids
    del pool
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
