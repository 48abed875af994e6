"""An OpenEnv environment: find a number from 1 to 9 in four guesses. `python number_server.py 8123` serves it.

Each episode that is played has a session; `--sessions` says how many there may be at a time.

A policy answers with text, so the action takes any: what OpenEnv refuses to read is an error of the environment, and
such an episode fails.
"""

import argparse
import random
import re

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

GUESSES = 4


class GuessAction(Action):
    guess: str | int | float | list | None


class GuessObservation(Observation):
    text: str


class NumberEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed=None, episode_id=None, **kwargs) -> GuessObservation:
        self._state = State(episode_id=episode_id, step_count=0)
        self._number = random.Random(seed).randint(1, 9)
        return GuessObservation(text=f"Find my number from 1 to 9. You have {GUESSES} guesses; answer with a number.")

    def step(self, action: GuessAction, timeout_s=None, **kwargs) -> GuessObservation:
        self._state.step_count += 1
        found = re.search(r"\d+", str(action.guess))
        right = found is not None and int(found[0]) == self._number
        if right or self._state.step_count == GUESSES:
            return GuessObservation(text="The game is over.", done=True, reward=float(right))
        if found is None:
            return GuessObservation(text="That is no number.", reward=0.0)
        return GuessObservation(text="higher" if int(found[0]) < self._number else "lower", reward=0.0)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--sessions", type=int, default=64)
    given = parser.parse_args()
    app = create_fastapi_app(NumberEnvironment, GuessAction, GuessObservation, max_concurrent_envs=given.sessions)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")
