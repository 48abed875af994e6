"""A taskset as verifiers' documentation teaches it, that can also fail in every way a taskset does."""

import asyncio
import os
import random
import sys
import time

import verifiers.v1 as vf
from verifiers.v1 import errors


class SumData(vf.TaskData):
    answer: int


class SumTaskConfig(vf.TaskConfig):
    fails: str = ""


class SumTask(vf.Task[SumData, vf.State, SumTaskConfig]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        if self.config.fails == "reward":
            raise ValueError("no such sum")
        if self.config.fails == "nan":
            return float("nan")
        if kind := getattr(errors, self.config.fails, None):
            raise kind("no room")
        if self.config.fails == "slow":
            await asyncio.sleep(60)
        if self.config.fails == "death":
            os._exit(7)
        return float(str(self.data.answer) in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    num_tasks: int = 20
    fails: str = ""
    task: SumTaskConfig = SumTaskConfig()


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        print("a taskset prints what it likes")
        if self.config.fails == "load":
            raise KeyError("the column is missing")
        if self.config.fails == "exit":
            sys.exit("leaving")
        if self.config.fails == "death":
            os._exit(9)
        if self.config.fails == "hang":
            time.sleep(600)
        numbers = list(range(self.config.num_tasks))
        if self.config.fails == "order":
            random.SystemRandom().shuffle(numbers)
        if self.config.fails == "twice":
            numbers += numbers
        for index in numbers:
            data = SumData(prompt=f"What is {index} + {index}?", answer=2 * index, name=f"sum {index}")
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
