"""A taskset of your own for the verifiers library: add two numbers, and answer in JSON.

A run uses it with `environments: [{verifiers: {taskset: json-sums, ...}}]` in its YAML file. It is imported where
verifiers is installed, so it cannot use roll_like.
"""

import json
import re

import verifiers.v1 as vf

#: Shown before each question, as turns of its conversation: a small model imitates examples better than a description.
SOLVED = [(2, 5), (6, 1), (3, 4)]


def question(a: int, b: int) -> vf.UserMessage:
    """Return what the policy is asked."""
    return vf.UserMessage(content=f"What is {a} + {b}?")


def answer(a: int, b: int) -> str:
    """Return what it should say."""
    return json.dumps({"sum": a + b})


class SumData(vf.TaskData):
    """One task: what `prompt` asks, and the sum that is right."""

    total: int


class SumTask(vf.Task[SumData]):
    """How an answer to one task is scored."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1 for the right sum, and 0.2 for a wrong one in the right form."""
        found = re.fullmatch(r'\{"sum": (\d{1,3})\}', trace.last_reply)
        if found is None:
            return 0.0
        return 1.0 if int(found[1]) == self.data.total else 0.2

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        """Return the length of the answer: a metric is reported, and not trained on."""
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    """What the run's YAML file may say in `taskset`."""

    largest: int = 9


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    """Every sum of two numbers, each once."""

    def load(self) -> list[SumTask]:
        """Return the tasks, always in the same order: a run that is resumed counts on from where it was."""
        shown = [turn for a, b in SOLVED for turn in (question(a, b), vf.AssistantMessage(content=answer(a, b)))]
        numbers = range(self.config.largest + 1)
        return [
            SumTask(SumData(name=f"{a} + {b}", prompt=[*shown, question(a, b)], total=a + b), self.config.task)
            for a in numbers
            for b in numbers
            if (a, b) not in SOLVED
        ]


__all__ = ["SumTaskset"]
