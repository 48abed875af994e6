"""Records what lm-evaluation-harness asks and how it grades, on rows written for this; run in an environment with it.

    pip install lm-eval datasets math-verify 'antlr4-python3-runtime==4.11'
    python tests/benchmark_protocols.py tests/data/benchmark_protocols.json [NAME…]

`tests/unit/test_benchmark_protocols.py` compares with what it writes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import yaml


def _subsets(name: str) -> list[str]:
    folder = Path(__file__).parents[1] / "roll_like" / "data" / "benchmarks"
    found: list[str] = yaml.safe_load((folder / f"{name}.yaml").read_text())["subsets"]
    return found


ROWS: dict[str, dict[str, list[dict[str, Any]]]] = {
    "gsm8k": {
        "test": [
            {
                "question": "Mia has 3 boxes with 12 pens each. How many pens?",
                "answer": "3*12 = <<3*12=36>>36 pens.\n#### 36",
            },
            {"question": "A bike costs $1,200 and loses half. What is it worth?", "answer": "1200/2 = 600\n#### 1,200"},
            {"question": "It was 5 degrees and fell by 9. Now?", "answer": "5-9 = -4\n#### -4"},
        ]
    },
    "minerva_math500": {
        "test": [
            {
                "problem": "Compute $\\frac{1}{2}+\\frac{1}{3}$.",
                "solution": "It is $\\boxed{\\frac{5}{6}}$.",
                "answer": "\\frac{5}{6}",
            },
            {"problem": "Solve $x^2 = 9$ for $x > 0$.", "solution": "So $x = \\boxed{3}$.", "answer": "3"},
        ]
    },
    "mmlu_pro": {
        "test": [
            {
                "question": "What is 2 + 3?",
                "options": ["4", " 5 ", "6"],
                "answer": "B",
                "category": "math",
                "cot_content": "",
            },
            {"question": "Who is liable?", "options": ["A", "B"], "answer": "A", "category": "law", "cot_content": ""},
        ],
        "validation": [
            {
                "question": f"{kind} question {number}?",
                "options": ["one", "two ", "three", "four"],
                "answer": "ABCD"[number % 4],
                "category": kind,
                "cot_content": f"A: Let's think step by step. Because. The answer is ({'ABCD'[number % 4]}).",
            }
            for kind in ("law", "math")
            for number in range(6)
        ],
    },
    "ifeval": {
        "train": [
            {
                "key": 1,
                "prompt": "Write two lines. Use no commas.",
                "instruction_id_list": ["punctuation:no_comma"],
                "kwargs": [{}],
            },
            {
                "key": 2,
                "prompt": "Name a city in lower case, and mention Paris at least twice.",
                "instruction_id_list": ["change_case:english_lowercase", "keywords:frequency"],
                "kwargs": [{}, {"keyword": "paris", "frequency": 2, "relation": "at least"}],
            },
        ]
    },
    "humaneval": {
        "test": [
            {
                "task_id": "X/0",
                "prompt": 'def double(x: int) -> int:\n    """Return twice x.\n    >>> double(2)\n    4\n    """\n',
                "canonical_solution": "    return 2 * x\n",
                "test": "def check(candidate):\n    assert candidate(3) == 6\n",
                "entry_point": "double",
            }
        ]
    },
    "mbpp": {
        "test": [
            {
                "task_id": 11,
                "text": "Write a function to add two numbers.",
                "code": "def add(a, b):\n    return a + b",
                "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"],
            }
        ]
    },
}
ROWS["humaneval_instruct"], ROWS["mbpp_instruct"] = ROWS["humaneval"], ROWS["mbpp"]
ROWS["gsm8k_platinum"] = ROWS["gsm8k"]
ROWS["arc_challenge"] = {
    "test": [
        {
            "id": "X_1",
            "question": " Which of these is a planet?",
            "choices": {"text": ["Sun", "Mars", "Moon", "Sirius"], "label": ["A", "B", "C", "D"]},
            "answerKey": "B",
        },
        {
            "id": "X_2",
            "question": "What melts?",
            "choices": {"text": ["ice", "steam", "fire"], "label": ["1", "2", "3"]},
            "answerKey": "1",
        },
    ]
}
#: How EvalPlus's tests begin.
_ASSERTION = """import numpy as np
from math import inf

def assertion(out, exp, atol):
    exact_match = out == exp
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match

"""
ROWS["humaneval_plus"] = {
    "test": [
        {
            "task_id": "X/0",
            "prompt": 'def mean(x: list) -> float:\n    """Return the mean.\n    >>> mean([1, 2])\n    1.5\n    """\n',
            "canonical_solution": "    return sum(x) / len(x)\n",
            "entry_point": "mean",
            "test": f"{_ASSERTION}def check(candidate):\n"
            "    for inp, exp in zip([[[1, 2]], [[0.1, 0.2]]], [1.5, 0.15]):\n"
            "        assertion(candidate(*inp), exp, 1e-06)\n",
        }
    ]
}
ROWS["humaneval_plus_instruct"] = ROWS["humaneval_plus"]
ROWS["mbpp_plus"] = {
    "test": [
        {
            "task_id": 2,
            "code": "def add(a, b):\n    return a + b",
            "prompt": "Write a function to add two numbers.",
            "source_file": "x.ipynb",
            "test_imports": [],
            "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"],
            "test": f"{_ASSERTION}for inp, exp in zip([[1, 2], [0.5, 0.5], [1, inf]], [3, 1.0, inf]):\n"
            "    assertion(add(*inp), exp, 0)\n",
        }
    ]
}
ROWS["mbpp_plus_instruct"] = ROWS["mbpp_plus"]
_SOLUTIONS = {"boolean_expressions": ("not ( True ) is", "False"), "word_sorting": ("Sort: List: b a", "a b")}
ROWS["bbh"] = {
    "test": [
        dict(
            zip(
                ("subset", "input", "target"),
                (subset, *_SOLUTIONS.get(subset, ("Which? (A) x (B) y", "(B)"))),
                strict=True,
            )
        )
        for subset in _subsets("bbh")
    ]
}
ROWS["mmlu_redux"] = {
    "test": [
        {"subset": subset, "question": " 2+2? ", "choices": ["3", "4", "5", "6"], "answer": 1, "error_type": "ok"}
        for subset in _subsets("mmlu_redux")
    ]
}
_NO_DATE = {"day": "", "month": "", "year": ""}
_WHEN = {"day": "9", "month": "September", "year": "1992"}
ROWS["drop"] = {
    "validation": [
        {
            "section_id": "x",
            "query_id": f"q{number}",
            "passage": "Brady threw for 300 yards.",
            "question": "How far?",
            "answer": {"hit_id": "", "worker_id": "", **answer},
            "validated_answers": {key: [one[key] for one in others] for key in ("number", "date", "spans")},
        }
        for number, (answer, others) in enumerate(
            (
                ({"number": "300", "date": _NO_DATE, "spans": []}, []),
                (
                    {"number": "", "date": _NO_DATE, "spans": ["Tom Brady", "the Moss-Jones pair"]},
                    [
                        {"number": "", "date": _NO_DATE, "spans": ["Brady"]},
                        {"number": "", "date": _NO_DATE, "spans": ["Brady"]},
                    ],
                ),
                (
                    {"number": "", "date": _WHEN, "spans": []},
                    [{"number": "", "date": _NO_DATE, "spans": ["September 1992"]}],
                ),
                (
                    {"number": "", "date": _NO_DATE, "spans": ["12.5 per cent"]},
                    [{"number": "", "date": _NO_DATE, "spans": []}],
                ),
            )
        )
    ]
}

#: Rows of a benchmark whose prompts are recorded as they are; of the others there is a digest.
FULL = 4

#: Answers to the rows above, and how the harness grades each is recorded.
ANSWERS: dict[str, list[list[str]]] = {
    "gsm8k": [
        [
            " 3 * 12 = 36. The answer is 36.",
            " 3 * 12 = 36. The answer is $36.",
            " The answer is 36",
            " The answer is 36\n\n",
            " The answer is 35. No, the answer is 36.",
            " The answer is 35. The answer is 36.",
            " it is 36 pens",
            " 36.0",
            " **36**",
            " \\boxed{36}",
            " #### 36",
            "",
            " none",
            " The answer is 36. There are 3 boxes",
            " the answer is 36.",
            " The answer is thirty-six.",
            " $36,",
            " The answer is .",
        ],
        [
            " It is $1,200.",
            " The answer is $1,200.",
            " The answer is 1,200.",
            " The answer is 1200.00.",
            " 1200 dollars",
            " 1 200",
        ],
        [" The answer is -4.", " The answer is - 4.", " −4", " It is -4 degrees.", " 9-4", " The answer is 4."],
    ],
    "minerva_math500": [
        [
            " $\\boxed{\\frac{5}{6}}$.\nFinal Answer: The final answer is $\\frac{5}{6}$. I hope it is correct.",
            " Final Answer: The final answer is $\\frac56$. I hope it is correct.",
            " \\boxed{5/6}",
            " \\boxed{0.8333}",
            " the sum is 5/6",
            " \\boxed{\\frac{6}{5}}",
            "",
            " $\\frac{5}{6}",
        ],
        [
            " $x = 3$",
            " \\boxed{x = 3}",
            " x=3 or x=-3",
            " \\boxed{-3}",
            " 3",
            " Final Answer: The final answer is $3$. I hope it is correct.",
        ],
    ],
    "mmlu_pro": [
        [
            " 2 + 3 = 5. The answer is (B).",
            " the answer is B",
            " answer is (C), no, the answer is (B).",
            " The answer is: B",
            " The answer is (b).",
            " The answer is **B**.",
            " Answer: B",
            " The answer is \\boxed{B}",
            "",
            " (B)",
            " The answer is Brussels",
        ],
        [" The answer is (A).", " The answer is A", " It is (A)"],
    ],
    "ifeval": [
        ["One line\nand another", "One, two", "", "**a, b**", "a, b\nno commas here", "1234 1234 1234"],
        ["paris is in france. i love paris.", "Paris and Paris", "paris", "paris paris", "*paris* paris\nParis", ""],
    ],
}

ANSWERS["gsm8k_platinum"] = ANSWERS["gsm8k"]
ANSWERS["arc_challenge"] = [
    [" B", "B", " b", " B ", " **B**", " (B)", " B)", " Mars", " B: Mars", " A", "", "  B", " B\n", " B, Mars", " [B]"],
    [" A", " 1", " a", " B", " A is", " $A$"],
]
ANSWERS["bbh"] = [
    [
        "So the answer is False.",
        "So the answer is False. ",
        "So the answer is False",
        "the answer is False.\n",
        "The answer is False.",
        "So the answer is  False.",
        "So the answer is True. No, so the answer is False.",
        "So the answer is false.",
        "So the answer is **False**.",
        "So the answer is\nFalse.",
        "the answer is ",
        "False",
        "",
        "So the answer is False.!",
    ]
]
ANSWERS["mmlu_redux"] = [
    ["B", "b", " B", "Answer: B", "**B**", "(B)", "B. 4", "It is B", "", "4", "\\boxed{B}", "Bob", "A or B"]
]
ANSWERS["drop"] = [
    [
        "300",
        " 300",
        "300 yards",
        "300.0",
        "three hundred",
        "3",
        "",
        "The 300",
        "300-yard",
        "$300",
        "3,00",
        "300\n",
        "300\n\nQ",
    ],
    ["Tom Brady", "brady", "Tom Brady, Moss Jones pair", "the moss jones pair", "Moss", "Tom Brady's", "a", ""],
    [
        "9 September 1992",
        "September 1992",
        "1992",
        "September",
        "9 september, 1992",
        "Sept 1992",
        "On 9 September 1992",
    ],
    ["12.5 per cent", "12.5", "12.5%", "12.5 per cent.", "12.50 per cent", "per cent", "12", "the 12.5 per cent an"],
]


def digest(text: str, messages: list[dict[str, Any]]) -> str:
    """Return what stands for a prompt in the record."""
    return hashlib.sha256(json.dumps([text, messages]).encode()).hexdigest()[:16]


def main(path: Path, names: list[str]) -> None:
    """Write the record, or what it says of some benchmarks."""
    stand_in = types.ModuleType("evaluate")  # code_eval comes from the hub; programs are not run here
    stand_in.load = lambda name: types.SimpleNamespace(compute=lambda **_: ({"pass@1": 0.0}, {}))  # type: ignore[attr-defined]
    sys.modules["evaluate"] = stand_in
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    root = Path(lm_eval.__file__).parent / "tasks"
    files = {
        "gsm8k": "gsm8k/gsm8k-cot.yaml",
        "minerva_math500": "minerva_math/minerva_math500.yaml",
        "mmlu_pro": "mmlu_pro/mmlu_pro_{category}.yaml",
        "ifeval": "ifeval/ifeval.yaml",
        "humaneval": "humaneval/humaneval.yaml",
        "humaneval_instruct": "humaneval/humaneval_instruct.yaml",
        "mbpp": "mbpp/mbpp.yaml",
        "mbpp_instruct": "mbpp/mbpp_instruct.yaml",
        "gsm8k_platinum": "gsm8k_platinum/gsm8k-platinum-cot.yaml",
        "arc_challenge": "arc/arc_challenge_chat.yaml",
        "humaneval_plus": "humaneval/humaneval_plus.yaml",
        "mbpp_plus": "mbpp/mbpp_plus.yaml",
        "bbh": "bbh/cot_fewshot/{subset}.yaml",
        "mmlu_redux": "mmlu-redux/generative/mmlu_{subset}.yaml",
        "drop": "drop/default.yaml",
    }
    record: dict[str, Any] = json.loads(path.read_text()) if names else {}
    for name, file in files.items():
        if names and name not in names:
            continue
        splits, entries = ROWS[name], list[dict[str, Any]]()
        test = next(iter(splits))
        for number, row in enumerate(splits[test]):
            config = load_yaml(root / file.format_map({"category": "", **row}), resolve_func=True)
            with tempfile.TemporaryDirectory() as folder:
                data = {}
                for split, rows in splits.items():
                    data[split] = str(Path(folder, f"{split}.jsonl"))
                    chosen = rows if split != test else [row]
                    Path(data[split]).write_text("".join(json.dumps(one) + "\n" for one in chosen))
                if name.startswith(("gsm8k", "arc", "drop")):
                    data["train"] = data["validation"] = data[test]
                config |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": data}}
                task = ConfigurableTask(config=config)
                answers = dict(enumerate(ANSWERS.get(name, []))).get(number, [])
                entries.append(_entry(task, answers))
                if number >= FULL:
                    entries[-1] = {"digest": digest(entries[-1]["text"], entries[-1]["messages"])}
        record[name] = {"rows": splits, "entries": entries}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _entry(task: Any, answers: list[str]) -> dict[str, Any]:
    """Return what is asked of a task's only row, and the grade of each answer, by filter and figure."""
    [doc] = list(task.eval_docs)
    task.set_fewshot_seed(1234)
    prefix = task.doc_to_prefix(doc) if hasattr(task, "doc_to_prefix") else None
    prefix = task.resolve_field(doc, task.config.gen_prefix)
    seen: list[Any] = []

    def keep(messages: Any, **_: Any) -> str:
        seen.append(messages)
        return ""

    shots = task.config.num_fewshot or 0
    text = task.fewshot_context(doc, shots, gen_prefix=prefix)
    task.fewshot_context(doc, shots, apply_chat_template=True, chat_template=keep, gen_prefix=prefix)
    return {"text": text, "messages": seen[0], "prefix": prefix, "grades": [_grade(task, doc, one) for one in answers]}


def _grade(task: Any, doc: Any, answer: str) -> dict[str, float]:
    from lm_eval.api.instance import Instance

    task._instances = [Instance("generate_until", doc, ("", {}), 0, resps=[answer])]
    task.apply_filters()
    found = {}
    for filtered in task._instances[0].filtered_resps:
        response = task._instances[0].filtered_resps[filtered]
        for figure, value in task.process_results(doc, response if isinstance(response, list) else [response]).items():
            found[f"{filtered}/{figure}"] = value if isinstance(value, list) else float(value)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
