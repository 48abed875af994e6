"""A task of inspect on the rows of sums.jsonl."""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate, prompt_template

ROWS = Path(__file__).with_name("sums.jsonl")


@task
def sums(rows: str = str(ROWS)) -> Task:
    """Ask for sums; the last number of an answer counts."""
    return Task(
        dataset=json_dataset(rows, FieldSpec(input="question", target="answer")),
        solver=[prompt_template("{prompt} Answer with a number."), generate()],
        scorer=pattern(r"(-?[0-9]+)[^0-9]*$"),
        config=GenerateConfig(temperature=0, max_tokens=64, stop_seqs=["\n\n"]),
    )
