"""Benchmarks ask what their published protocols ask, and read answers as these do.

What lm-evaluation-harness 0.4.13 asks and how it grades was recorded by `tests/benchmark_protocols.py`; other protocols
are written out here.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from benchmark_protocols import ANSWERS, ROWS, digest

from roll_like.config.benchmarks import BenchmarkUse, template_of
from roll_like.data.benchmark_tasks import BenchmarkPrompt, written_prompts
from roll_like.registry import REWARDS
from roll_like.rewards.base import Reward, RewardResult, given_completion

RECORD = json.loads((Path(__file__).parents[1] / "data" / "benchmark_protocols.json").read_text())


def use_of(name: str, folder: Path, splits: dict[str, list[dict[str, Any]]]) -> BenchmarkUse:
    """Return a benchmark on rows in files of a folder, one a split; of several subsets in one file."""
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    place = folder / "test.jsonl" if BenchmarkUse(name=name).benchmark.subsets else folder
    return BenchmarkUse(name=name, path=str(place))


def prompts_of(use: BenchmarkUse) -> list[BenchmarkPrompt]:
    return [prompt for _, prompt in written_prompts(use, "evaluation.benchmarks.0")]


def turns(prompt: BenchmarkPrompt) -> list[dict[str, Any]]:
    return [{"role": message["role"], "content": message["content"]} for message in prompt.messages]


@pytest.mark.parametrize("name", sorted(RECORD))
def test_prompts_are_the_harness_s(name: str, tmp_path: Path) -> None:
    prompts = prompts_of(use_of(name, tmp_path, RECORD[name]["rows"]))
    assert len(prompts) == len(RECORD[name]["entries"])
    for prompt, entry in zip(prompts, RECORD[name]["entries"], strict=True):
        if "digest" in entry:
            assert digest(prompt.text, turns(prompt)) == entry["digest"]
            continue
        if name not in (
            "humaneval_instruct",
            "arc_challenge",
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
    "gsm8k_platinum": {"strict_match": "strict-match/exact_match", "flexible_extract": "flexible-extract/exact_match"},
    "arc_challenge": {"exact_match": "remove_whitespace/exact_match"},
    "minerva_math500": {"math_verify": "none/math_verify"},
    "mmlu_pro": {"custom_extract": "custom-extract/exact_match"},
    "bbh": {"get_answer": "get-answer/exact_match"},
    "mmlu_redux": {"exact_match": "default/exact_match"},
    "drop": {"f1": "none/f1", "em": "none/em"},
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
    # of several subsets, only the first was answered
    graded = zip(RECORD[name]["rows"][split], RECORD[name]["entries"], ANSWERS[name], strict=not use.benchmark.subsets)
    for row, entry, answers in graded:
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
    "gsm8k_platinum": ("Q:", "</s>", "<|im_end|>"),
    "arc_challenge": ("\n\n", "."),
    "minerva_math500": ("Problem:",),
    "mmlu_pro": ("Question:",),
    "ifeval": (),
    "humaneval": ("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    "humaneval_instruct": ("```", "\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    "mbpp": ("[DONE]",),
    "mbpp_instruct": ("```",),
    "humaneval_plus": ("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    "mbpp_plus": ("[DONE]",),
    "bbh": ("</s>", "Q", "\n\n"),
    "mmlu_redux": ("</s>",),
    "drop": (".",),
}


@pytest.mark.parametrize("name", sorted(RECORD))
def test_answers_are_sampled_as_the_harness_samples_them(name: str) -> None:
    sampling = BenchmarkUse(name=name).sampling
    assert sampling.stop == UNTIL[name]
    assert (sampling.temperature, sampling.samples_per_prompt) == (0, 1)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("humaneval_plus_instruct", ROWS["humaneval_plus"]["test"][0]["prompt"].strip()),
        ("mbpp_plus_instruct", '"""\nWrite a function to add two numbers.\nassert add(1, 2) == 3\n"""'),
    ],
)
def test_evalplus_is_asked_in_its_own_words(name: str, asked: str, tmp_path: Path) -> None:
    [prompt] = prompts_of(use_of(name, tmp_path, ROWS[name]))
    told = "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
    assert turns(prompt) == [{"role": "user", "content": f"{told}\n```python\n{asked}\n```"}]
    assert (prompt.prefix, BenchmarkUse(name=name).sampling.temperature) == ("", 0)


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
    ("name", "split", "row"),
    [
        ("math500", "test", {"problem": "1+1?", "answer": "2"}),
        ("aime24", "train", {"Problem": "1+1?", "Answer": "2"}),
        ("aime25", "test", {"problem": "1+1?", "answer": "2"}),
        ("amc23", "test", {"id": 0, "question": "1+1?", "answer": "2", "url": ""}),
        ("minervamath", "test", {"question": "1+1?", "answer": "2"}),
    ],
)
def test_mathematics_is_asked_in_deepseek_s_words(name: str, split: str, row: dict[str, Any], tmp_path: Path) -> None:
    [(found, prompt)] = written_prompts(use_of(name, tmp_path, {split: [row]}), "key")
    asked = "1+1?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert turns(prompt) == [{"role": "user", "content": asked}]
    answer = BenchmarkUse(name=name).benchmark.answer
    assert answer is not None
    assert template_of(answer).render(**found.fields) == "2"


@pytest.mark.parametrize("name", ["aime26", "hmmt_feb25", "hmmt_nov25", "hmmt_feb26", "brumo25"])
def test_contests_are_asked_in_matharena_s_words(name: str, tmp_path: Path) -> None:
    row = {"problem_idx": 1, "answer": "\\frac{1}{2}", "problem": "Half of 1?", "problem_type": ["Algebra"]}
    [prompt] = prompts_of(use_of(name, tmp_path, {"train": [row]}))
    whole = "The answer is an integer between 0 and 999 inclusive.\n" if name == "aime26" else ""
    asked = f"Put your final answer within \\boxed{{}}.\n{whole}\nHalf of 1?"
    assert turns(prompt) == [{"role": "user", "content": asked}]


@pytest.mark.parametrize("unit", [None, "m"])
@pytest.mark.parametrize(
    ("answer_type", "several", "told"),
    [
        ("Numerical", False, "The answer of The problem should be a numerical value. "),
        ("Expression", False, "The answer of The problem should be an expression. "),
        ("Equation-x", False, "The answer of The problem should be an equation. "),
        ("Tuple", False, ""),
        ("Tuple", True, ""),
        ("Need_human_evaluate", False, ""),
        ("Interval", True, "The problem has multiple answers, each of them should be an interval. "),
        ("Numerical,Numerical", True, "The problem has multiple answers, each of them should be a numerical value. "),
        (
            "Numerical,Expression",
            True,
            "The problem has multiple answers, with the answers in order being a numerical value, an expression. ",
        ),
    ],
)
def test_olympiadbench_is_asked_in_its_own_words(
    answer_type: str, several: bool, told: str, unit: str | None, tmp_path: Path
) -> None:
    row = {
        "id": 1,
        "question": "What is $x$?",
        "final_answer": ["$1$", "$\\frac{1}{2}$"] if several else ["$1$"],
        "answer_type": answer_type,
        "is_multiple_answer": several,
        "unit": unit,
        "subject": "Math",
        "language": "English",
    }
    use = use_of("olympiadbench", tmp_path, {"train": [row]})
    [prompt] = prompts_of(use)
    box = "\\boxed{multiple answers connected with commas}" if several else "\\boxed{answer}"
    of_units = ", note that the unit of the answer should not be included in \\boxed{}" if unit else ""
    asked = (
        f"The following is an open-ended problem from an International Math competition. {told}Please calculate the "
        "answer according to the given requirements and the information provided. Please use LaTeX format to represent "
        'the variables and formulas used in the solution process and results. Please end your solution with "So the '
        f'final answer is {box}{"(unit)" if unit else ""}." and give the result explicitly{of_units}.\nWhat is $x$?'
    )
    assert turns(prompt) == [{"role": "user", "content": asked}]
    assert use.benchmark.answer is not None
    reference = template_of(use.benchmark.answer).render(**row)
    found = "So the final answer is \\boxed{1" + (", \\frac{1}{2}}." if several else "}.")
    for reward in graders(use).values():
        outcomes = reward.score(
            [
                given_completion(text, messages=[], answer=reference, metadata=row)
                for text in (found, "So the final answer is \\boxed{7}.")
            ]
        )
        assert [one.value for one in outcomes if isinstance(one, RewardResult)] == [1.0, 0.0]  # type: ignore[union-attr]
        reward.close()


#: What simple-evals removes from an answer before it looks for the letter.
REMOVED = (
    "**",
    "$\\boxed{",
    "}$",
    "\\$",
    "$\\text{",
    "$",
    "\\mathrm{",
    "\\{",
    "\\text",
    "\\(",
    "\\mathbf{",
    "{",
    "\\boxed",
)


@pytest.mark.parametrize(
    "answer",
    [
        "Answer: B",
        "So.\n**Answer:** B",
        "**Answer: B**",
        "Answer: $B$",
        "Answer: $\\boxed{B}$",
        "Answer: \\boxed{B}",
        "Answer: \\(\\text{B}\\)",
        "Answer: \\(B\\)",
        "Answer: $\\mathrm{B}$",
        "**Answer**: $\\text{B}$",
        "answer : b",
        "Answer:\nB",
        "Answer\n: B",
        "Answer: C\nAnswer: B",
        "Answer: (B)",
        "Answer: Brussels",
        "The answer is B",
        "",
    ],
)
def test_mmlu_is_read_as_by_simple_evals(answer: str, tmp_path: Path) -> None:
    row = {"question": "2+2?", "subject": "algebra", "choices": ["3", "4", "5", "6"], "answer": 1}
    use = use_of("mmlu", tmp_path, {"test": [row]})
    [prompt] = prompts_of(use)
    asked = (
        "Answer the following multiple choice question. The last line of your response should be of the following "
        "format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering."
        "\n\n2+2?\n\nA) 3\nB) 4\nC) 5\nD) 6"
    )
    assert turns(prompt) == [{"role": "user", "content": asked}]
    left = answer
    for text in REMOVED:
        left = left.replace(text, "")
    letter = re.search(r"(?i)Answer\s*:[ \t]*([A-D])", left)
    [outcome] = graders(use)["answer"].score([given_completion(answer, messages=[], answer="B", metadata=row)])  # type: ignore[misc]
    assert isinstance(outcome, RewardResult)
    assert outcome.value == float(letter is not None and letter[1] == "B")


def test_supergpqa_is_asked_in_its_own_words(tmp_path: Path) -> None:
    row = {"uuid": "x", "question": "Which?", "options": ["red", "blue"], "answer": "blue", "answer_letter": "B"}
    use = use_of("supergpqa", tmp_path, {"train": [row]})
    [prompt] = prompts_of(use)
    asked = (
        "Answer the following multiple choice question. There is only one correct answer. The last line of your "
        "response should be in the format 'Answer: $LETTER' (without quotes), where LETTER is one of A, B, C, D, E, F, "
        "G, H, I, or J.\n\nWhich?\nA) red\nB) blue"
    )
    assert turns(prompt) == [{"role": "user", "content": asked}]
    [reward] = graders(use).values()
    for answer, value in (
        ("So.\nAnswer: B", 1.0),
        ("Answer: A", 0.0),
        ("The answer is (B).", 1.0),
        ("$\\boxed{B}$", 1.0),
    ):
        [outcome] = reward.score([given_completion(answer, messages=[], answer="B", metadata=row)])  # type: ignore[misc]
        assert isinstance(outcome, RewardResult)
        assert outcome.value == value


@pytest.mark.parametrize("starter", ["", "class Solution:\n    def f(self, a):"])
def test_livecodebench_is_asked_in_its_own_words(starter: str, tmp_path: Path) -> None:
    row = {
        "question_content": "Print a.",
        "starter_code": starter,
        "public_test_cases": "[]",
        "private_test_cases": "[]",
        "metadata": "{}",
    }
    [prompt] = prompts_of(use_of("livecodebench", tmp_path, {"test": [row]}))
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
        ("bbh", "So the answer is (B). ", "(B)", (0.0, 1.0)),
        ("bbh", "<think>the answer is (C).</think>So the answer is (B).", "(B)", (1.0, 1.0)),
        ("bbh", "Therefore, the answer is **(B)**.", "(B)", (0.0, 1.0)),
        ("mmlu_redux", "Answer: B", "B", (0.0, 1.0)),
        ("mmlu_redux", "The correct letter is B", "B", (1.0, 1.0)),
        ("mmlu_redux", "<think>A or B?</think>B", "B", (1.0, 1.0)),
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
