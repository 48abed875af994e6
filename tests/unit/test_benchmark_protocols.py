"""Benchmarks ask what their published protocols ask, and read answers as these do.

What lm-evaluation-harness 0.4.13 asks and how it grades was recorded by `tests/benchmark_protocols.py`; other protocols
are written out here.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from benchmark_protocols import ANSWERS

from roll_like.config.benchmarks import BenchmarkUse, template_of
from roll_like.data.benchmark_tasks import BenchmarkPrompt, benchmark_prompts, written_prompts
from roll_like.registry import REWARDS
from roll_like.rewards.base import Reward, RewardResult, given_completion

RECORD = json.loads((Path(__file__).parents[1] / "data" / "benchmark_protocols.json").read_text())


def use_of(name: str, folder: Path, splits: dict[str, list[dict[str, Any]]]) -> BenchmarkUse:
    """Return a benchmark on rows in files of a folder, one a split."""
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return BenchmarkUse(name=name, path=str(folder))


def turns(prompt: BenchmarkPrompt) -> list[dict[str, Any]]:
    return [{"role": message["role"], "content": message["content"]} for message in prompt.messages]


@pytest.mark.parametrize("name", sorted(RECORD))
def test_prompts_are_the_harness_s(name: str, tmp_path: Path) -> None:
    prompts = benchmark_prompts(use_of(name, tmp_path, RECORD[name]["rows"]))
    assert len(prompts) == len(RECORD[name]["entries"])
    for prompt, entry in zip(prompts, RECORD[name]["entries"], strict=True):
        if (
            name != "humaneval_instruct"
        ):  # which is for chats; the harness puts a blank before the prefix of a plain text
            assert prompt.text == entry["text"]
        asked = [message for message in entry["messages"] if message["role"] != "assistant" or not entry["prefix"]]
        assert turns(prompt) == asked
        assert prompt.prefix == (entry["prefix"] or "")


def graders(use: BenchmarkUse) -> dict[str, Reward]:
    return {
        str(config.name).removeprefix(f"{use.domain}/"): REWARDS.get(config.type)(config)  # type: ignore[attr-defined]
        for config in use.rewards()
    }


#: Our graders, and what the harness calls the same figure.
FIGURES = {
    "gsm8k": {"strict_match": "strict-match/exact_match", "flexible_extract": "flexible-extract/exact_match"},
    "minerva_math500": {"math_verify": "none/math_verify"},
    "mmlu_pro": {"custom_extract": "custom-extract/exact_match"},
    "ifeval": {"prompt_strict": "none/prompt_level_strict_acc", "prompt_loose": "none/prompt_level_loose_acc"},
}


#: Answers in lower case that langdetect takes for another language than English: the page of benchmarks names this.
OTHERWISE = {"paris paris": 1.0, "*paris* paris\nParis": 1.0}


@pytest.mark.parametrize(("name", "grader"), [(name, grader) for name in FIGURES for grader in FIGURES[name]])
def test_grades_are_the_harness_s(name: str, grader: str, tmp_path: Path) -> None:
    use = use_of(name, tmp_path, RECORD[name]["rows"])
    reward = graders(use)[grader]
    split = next(iter(RECORD[name]["rows"]))
    wrong = []
    for row, entry, answers in zip(RECORD[name]["rows"][split], RECORD[name]["entries"], ANSWERS[name], strict=True):
        reference = None if use.benchmark.answer is None else template_of(use.benchmark.answer).render(**row)
        for answer, grades in zip(answers, entry["grades"], strict=True):
            completion = given_completion(answer, messages=[], answer=reference, metadata=row)
            [outcome] = reward.score([completion])  # type: ignore[misc]
            assert isinstance(outcome, RewardResult), outcome
            theirs = grades[FIGURES[name][grader]]
            if outcome.value != theirs:
                wrong.append((answer, outcome.value, theirs))
    reward.close()
    assert [one for one in wrong if OTHERWISE.get(one[0]) != one[1]] == []


#: What ends an answer (`until`) in the harness's tasks. In a chat its filters take what stands before the next fence.
UNTIL = {
    "gsm8k": ("Q:", "</s>", "<|im_end|>"),
    "minerva_math500": ("Problem:",),
    "mmlu_pro": ("Question:",),
    "ifeval": (),
    "humaneval": ("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    "humaneval_instruct": ("```", "\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    "mbpp": ("[DONE]",),
    "mbpp_instruct": ("```",),
}


@pytest.mark.parametrize("name", sorted(RECORD))
def test_answers_are_sampled_as_the_harness_samples_them(name: str) -> None:
    sampling = BenchmarkUse(name=name).sampling
    assert sampling.stop == UNTIL[name]
    assert (sampling.temperature, sampling.samples_per_prompt) == (0, 1)


GPQA = {
    "Question": "Which gas is lightest?",
    "Correct Answer": "Hydrogen",
    "Incorrect Answer 1": "Helium",
    "Incorrect Answer 2": "Neon",
    "Incorrect Answer 3": "Argon",
}


def test_gpqa_is_asked_as_by_simple_evals(tmp_path: Path) -> None:
    use = use_of("gpqa", tmp_path, {"train": [GPQA] * 5})
    tasks = list(written_prompts(use, "key"))
    draws, fields = random.Random(0), list(GPQA)[1:]
    for row, prompt in tasks:
        options = [GPQA[fields[place]] for place in draws.sample(range(4), 4)]
        lines = [f"{letter}) {option}" for letter, option in zip("ABCD", options, strict=True)]
        assert prompt.question.split("\n\n", 1)[1] == "Which gas is lightest?\n\n" + "\n".join(lines)
        assert row.fields["letter"] == "ABCD"[options.index("Hydrogen")]
    assert tasks[0][1].question.startswith(
        "Answer the following multiple choice question. The last line of your response should be of the following "
        "format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before "
        "answering.\n\n"
    )
    assert len({row.fields["letter"] for row, _ in tasks}) > 1


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("So.\nAnswer: C", 1.0),
        ("answer : $C$", 1.0),
        ("Answer: B\nAnswer: C", 0.0),  # simple-evals takes the first
        ("**Answer:** C", 0.0),
        ("Answer: Cobalt", 1.0),
        ("The answer is (C).", 0.0),
        ("", 0.0),
    ],
)
def test_gpqa_is_read_as_by_simple_evals(answer: str, value: float, tmp_path: Path) -> None:
    reward = graders(use_of("gpqa", tmp_path, {"train": [GPQA]}))["answer"]
    [outcome] = reward.score([given_completion(answer, messages=[], answer="C", metadata={})])  # type: ignore[misc]
    assert isinstance(outcome, RewardResult)
    assert outcome.value == value


@pytest.mark.parametrize(
    ("name", "split", "fields"),
    [("math500", "test", ("problem", "answer")), ("aime24", "train", ("Problem", "Answer")), ("aime25", "test", ())],
)
def test_mathematics_is_asked_in_deepseek_s_words(
    name: str, split: str, fields: tuple[str, ...], tmp_path: Path
) -> None:
    problem, answer = fields or ("problem", "answer")
    use = use_of(name, tmp_path, {split: [{problem: "1+1?", answer: "2"}]})
    [prompt] = benchmark_prompts(use)
    asked = "1+1?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert turns(prompt) == [{"role": "user", "content": asked}]


@pytest.mark.parametrize("starter", ["", "class Solution:\n    def f(self, a):"])
def test_livecodebench_is_asked_in_its_own_words(starter: str, tmp_path: Path) -> None:
    row = {
        "question_content": "Print a.",
        "starter_code": starter,
        "public_test_cases": "[]",
        "private_test_cases": "[]",
        "metadata": "{}",
    }
    [prompt] = benchmark_prompts(use_of("livecodebench", tmp_path, {"test": [row]}))
    told = (
        "You will use the following starter code to write the solution to the problem and enclose your code within "
        "delimiters.\n"
        if starter
        else "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the "
        "sample inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it "
        "reads the inputs, runs the algorithm and writes output to STDOUT.\n"
    )
    system = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests."
    )
    asked = (
        f"### Question:\nPrint a.\n\n### Format: {told}```python\n{starter or '# YOUR CODE HERE'}\n```\n\n"
        "### Answer: (use the provided format with backticks)\n\n"
    )
    assert turns(prompt) == [{"role": "system", "content": system}, {"role": "user", "content": asked}]


@pytest.mark.parametrize(
    ("name", "answer", "reference", "values"),
    [
        # what a model thinks before it answers is not read
        ("gsm8k", "<think>The answer is 5. The answer is 7.</think>The answer is 36.", "36", (1.0, 1.0)),
        ("gpqa", "<think>Answer: A maybe. Answer: B</think>\nAnswer: C", "C", (1.0, 1.0)),
        # other forms than the one that is asked for
        ("gsm8k", "**Answer: \\$18 per day.**", "18", (0.0, 1.0)),
        ("gsm8k", " So the profit is $70,000.", "70000", (0.0, 1.0)),
        ("gpqa", "Antwort:\n\nAnswer: C", "C", (1.0, 1.0)),
        ("mmlu_pro", "answer is: **A**", "A", (0.0, 1.0)),
        ("math500", "Thus the answer is \\[ \\boxed{42} \\]", "42", (1.0, 1.0)),
        ("math500", "So \\boxed{\\text{Evelyn}}.", "\\text{Evelyn}", (1.0, 1.0)),
        ("math500", "So \\boxed{\\text{(B)}}.", "\\text{(C)}", (0.0, 0.0)),
        ("math500", "So \\boxed{18.90}.", "\\$18.90", (1.0, 1.0)),
        ("aime24", "\\boxed{033}", "33", (1.0, 1.0)),
        ("aime25", "the answer is \\(\\boxed{70}\\).</answer>", "70", (1.0, 1.0)),
    ],
)
def test_answers_that_other_evaluations_have_misread(
    name: str, answer: str, reference: str, values: tuple[float, ...]
) -> None:
    found = []
    for reward in graders(BenchmarkUse(name=name)).values():
        [outcome] = reward.score([given_completion(answer, messages=[], answer=reference, metadata={})])  # type: ignore[misc]
        assert isinstance(outcome, RewardResult)
        found.append(outcome.value)
        reward.close()
    assert tuple(found) == values
