"""Environments that a language model can play: any `gymnasium.Env` whose observations are texts or images, and whose
actions are texts.

    env = make_env("roll_like/FrozenLake-v0", size=4)
    observation, info = env.reset(seed=7)
    observation, reward, terminated, truncated, info = env.step("<action>down</action>")

In a run `action` is a `Turn`: all that the policy wrote. `answer_of(action)` is what follows its reasoning.

What a policy is shown, and what a run reads besides:

    env.system_prompt      str, optional: the first message of a conversation
    env.tools              list of OpenAI function schemas, optional
    info["images"]         list of images that are shown before the observation's text, optional
    info["messages"]       list of messages to show instead of one user message with the observation, optional
    info["fresh"]          True: this turn's prompt starts a new conversation, optional
    info["success"]        bool, at the end of an episode
    info["state"]          key of the state, for credit by step; default: the observation
    info["invalid_action"] True: the answer held no action, optional
    env.agents             names, in an environment of several agents
    info["agent"]          which of them takes the next turn; default: the same one, in the beginning the first
    info["rewards"]        what a turn earned the others, by name; optional
    info["tool_calls"]     what the turn called: list of mappings with name, arguments, result, error; optional
"""

from roll_like.data.reasoning import Turn, answer_of, tags_of
from roll_like.envs.actions import read_action, read_tag, write_action
from roll_like.envs.check import EnvReport, check_env
from roll_like.envs.images import ImageText
from roll_like.envs.probes import EnvFinding
from roll_like.envs.prompts import FewShot, History, Instructions
from roll_like.envs.registration import make_env, registered
from roll_like.envs.returns import agents_of
from roll_like.envs.rows import TaskRows, field_of, prompt_messages, read_task_rows
from roll_like.envs.scripts import examples, scripted_action, system_prompt_of, tools_of
from roll_like.envs.spaces import Commands, FreeText
from roll_like.envs.wrappers import AnsiText, DiscreteActions, ScaledReward, Success, TextWrapper, TokenLimit, TurnLimit

__all__ = [
    "AnsiText",
    "Commands",
    "DiscreteActions",
    "EnvFinding",
    "EnvReport",
    "FewShot",
    "FreeText",
    "History",
    "ImageText",
    "Instructions",
    "ScaledReward",
    "Success",
    "TaskRows",
    "TextWrapper",
    "TokenLimit",
    "Turn",
    "TurnLimit",
    "agents_of",
    "answer_of",
    "check_env",
    "examples",
    "field_of",
    "make_env",
    "prompt_messages",
    "read_action",
    "read_tag",
    "read_task_rows",
    "registered",
    "scripted_action",
    "system_prompt_of",
    "tags_of",
    "tools_of",
    "write_action",
]
