"""Run with the interpreter that has verifiers: environment/bin/python -m unittest"""

import unittest
from types import SimpleNamespace

from json_sums import SOLVED, SumConfig, SumTask, SumTaskset, answer


def tasks(largest: int = 9) -> list[SumTask]:
    return SumTaskset(SumConfig(id="json-sums", largest=largest)).load()


async def reward(task: SumTask, reply: str) -> float:
    return await task.correct(SimpleNamespace(last_reply=reply))


class SumScores(unittest.IsolatedAsyncioTestCase):
    async def test_the_right_answer_of_every_task_scores_1(self) -> None:
        for task in tasks():
            a, b = map(int, task.data.name.split(" + "))
            self.assertEqual(await reward(task, answer(a, b)), 1.0)

    async def test_a_wrong_sum_in_the_right_form_scores_little(self) -> None:
        self.assertEqual(await reward(tasks()[0], '{"sum": 999}'), 0.2)

    async def test_other_texts_score_nothing(self) -> None:
        task = tasks()[0]
        for reply in ("", "0", "The sum is 0.", '{"sum": 0} or {"sum": 1}', '{"sum": "0"}', '{"sum": 00000}'):
            self.assertEqual(await reward(task, reply), 0.0, reply)


class SumTasks(unittest.TestCase):
    def test_each_is_there_once_and_the_examples_are_not(self) -> None:
        names = [task.data.name for task in tasks()]
        self.assertEqual(len(set(names)), 97)
        self.assertFalse({f"{a} + {b}" for a, b in SOLVED} & set(names))

    def test_options_of_the_yaml_file_are_used(self) -> None:
        self.assertEqual([task.data.name for task in tasks(largest=1)], ["0 + 0", "0 + 1", "1 + 0", "1 + 1"])
