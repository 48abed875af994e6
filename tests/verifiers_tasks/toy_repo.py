"""A repository with a mistake that an agent is to mend; a test that it does not see says whether it did."""

import verifiers.v1 as vf


class RepoData(vf.TaskData):
    factor: int


class RepoTask(vf.Task[RepoData]):
    async def setup(self, trace, runtime):
        source = f"def times(x):\n    return {self.data.factor} * x + 1\n"
        await runtime.write("arithmetic.py", source.encode())
        await runtime.run(["git", "init", "--quiet"], {})

    @vf.reward
    async def mended(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        test = f"import arithmetic; assert [arithmetic.times(x) for x in (0, 5)] == [0, {5 * self.data.factor}]"
        return float((await runtime.run(["python3", "-c", test], {})).exit_code == 0)


class RepoTaskset(vf.Taskset[RepoTask, vf.TasksetConfig]):
    def load(self):
        for factor in range(2, 10):
            prompt = f"times(5) of arithmetic.py should be {5 * factor}. Mend it."
            yield RepoTask(RepoData(name=f"times {factor}", prompt=prompt, factor=factor), self.config.task)


__all__ = ["RepoTaskset"]
