"""A game of two players who are both the policy: the higher number wins. A third agent watches and is not trained."""

import itertools
import re

import verifiers.v1 as vf


class DuelTask(vf.Task[vf.TaskData]):
    pass


class DuelTaskset(vf.Taskset[DuelTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for index in itertools.count():
            yield DuelTask(vf.TaskData(name=f"duel {index}", prompt=f"Duel {index}. Say a number."), self.config.task)


class DuelEnvConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    watcher: vf.AgentConfig = vf.AgentConfig()


class DuelEnv(vf.Env[DuelEnvConfig]):
    async def setup(self, agents):
        agents.watcher.trainable = False

    async def run(self, task, agents):
        for agent in (agents.first, agents.second, agents.watcher):
            await agent.run(task)

    async def finalize(self, task, episode):
        said = {trace.agent.name: _number(trace.last_reply) for trace in episode.traces}
        won = float(said["first"] > said["second"]) - float(said["first"] < said["second"])
        for trace in episode.traces:
            if trace.agent.name != "watcher":
                trace.record_reward("won", won if trace.agent.name == "first" else -won)


def _number(text: str) -> int:
    found = re.search(r"\d", text)
    return int(found.group()) if found else 0


__all__ = ["DuelEnv", "DuelTaskset"]
