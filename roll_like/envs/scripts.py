"""What environments say about themselves: their prompt, their tools, and how they are played well."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from roll_like.envs.spaces import Commands
from roll_like.envs.wrappers import AnyEnv

#: Seeds of episodes that examples are taken from; far from the seeds that runs count up from 0.
_FIRST_SEED = 1_000_000_007
_MAX_EPISODES = 24
_MAX_TURNS = 100


def system_prompt_of(env: AnyEnv) -> str | None:
    """Return the environment's system prompt, from whichever wrapper holds it."""
    prompt: str | None = _optional(env, "system_prompt")
    return prompt


def tools_of(env: AnyEnv) -> list[dict[str, Any]]:
    """Return the environment's tools as OpenAI function schemas; empty where it has none."""
    return list(_optional(env, "tools") or [])


def scripted_action(env: AnyEnv) -> str | None:
    """Return what the environment's own player answers next; None where it has none, or knows no way on.

    The player is a method `scripted_action() -> str | None`. `check_env` plays it, and few-shot examples
    come from it.
    """
    player = _optional(env, "scripted_action")
    answer: str | None = None if player is None else player()
    return answer


def examples(env: AnyEnv, count: int) -> list[tuple[str, str]]:
    """Return `count` observations with the right answer to each, for few-shot prompts.

    Episodes of fixed seeds are played by the script. No state comes twice, and the answers are as
    different as these episodes allow: of each answer one, then of each a second.

    Fewer are returned where the script knows fewer.
    """
    by_answer: dict[str, list[str]] = {}
    seen: set[str] = set()
    for episode in range(_MAX_EPISODES if count else 0):
        observation, _ = env.reset(seed=_FIRST_SEED + episode)
        for _ in range(_MAX_TURNS):
            answer = scripted_action(env)
            if answer is None:
                break
            if observation not in seen:
                by_answer.setdefault(answer, []).append(observation)
                seen.add(observation)
            observation, _, terminated, truncated, _ = env.step(answer)
            if terminated or truncated:
                break
        every_answer = not isinstance(env.action_space, Commands) or len(by_answer) == len(env.action_space.commands)
        if not seen or (len(seen) >= count and every_answer):
            break
    return _in_turns(by_answer, count)


def _in_turns(by_answer: dict[str, list[str]], count: int) -> list[tuple[str, str]]:
    """Take one observation of each answer, then the next of each."""
    turns = zip_longest(*([(text, answer) for text in observations] for answer, observations in by_answer.items()))
    return [pair for turn in turns for pair in turn if pair is not None][:count]


def _optional(env: AnyEnv, name: str) -> Any:
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None
