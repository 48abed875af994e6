"""Environments of SkyRL-Gym, on rows as SkyRL reads them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded
from omegaconf import OmegaConf

from roll_like.builtin.envs.extras import need
from roll_like.envs import FreeText, TaskRows, prompt_messages, read_task_rows
from roll_like.errors import EnvError
from roll_like.registry import did_you_mean

ENV_ID = "roll_like/SkyRLGym-v0"
PACKAGE = "skyrl-gym==0.4.0"
#: SkyRL's field of a row that names its environment.
ENV_FIELD = "env_class"


class SkyRLGym(gymnasium.Env[str, str]):
    """`roll_like/SkyRLGym-v0`.

    Seed n sets row n modulo the number of rows. The environment gets the row's other fields as `extras`, and the whole
    text of each turn, reasoning included, as in SkyRL: some of its rewards look for `<think>`. A `postprocessed_action`
    does not change what is trained on, which is what was sampled.

    Args:
        path: File, directory or hub dataset with the rows, or the rows themselves.
        env: Id of the environment, such as `gsm8k`, or one that was registered with `skyrl_gym.register` in a module
            that the run imports; None: the row's `env_class`.
        config: The environment's settings, SkyRL's `environment.skyrl_gym.<env>`, such as `{"db_path": …}`.
        max_turns: SkyRL's `generator.max_turns`, at which environments end; None: the row's, or their default.
        prompt: Field of the prompt: a text, or a list of messages.
        held_out: So many rows, the last ones, are set in evaluations only, and no others are.
        split: Split of a directory or of a hub dataset.
        subset: Subset of one.

    Raises:
        EnvError: SkyRL-Gym is not installed, or knows no such environment.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium declares it so

    def __init__(
        self,
        path: str | Sequence[Mapping[str, Any]],
        *,
        env: str | None = None,
        config: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        prompt: str = "prompt",
        held_out: int = 0,
        split: str = "train",
        subset: str | None = None,
    ) -> None:
        gym = need("skyrl_gym", PACKAGE, ENV_ID)
        rows = read_task_rows(path, (prompt, ENV_FIELD) if env is None else (prompt,), split=split, subset=subset)
        for name in {str(row[ENV_FIELD]) for row in rows} if env is None else [env]:
            if name not in gym.registry:
                hint = did_you_mean(name, gym.registry)
                where = f"`{ENV_FIELD}` of the rows" if env is None else "`env` of the kwargs"
                raise EnvError(f"SkyRL-Gym has no environment {name!r}; {hint}", fix=f"correct {where}")
        self.rows = TaskRows(rows, held_out=held_out)
        self.observation_space = FreeText()
        self.action_space = FreeText()
        self._make, self._name, self._prompt = gym.make, env, prompt
        self._config = OmegaConf.create(dict(config or {}))
        self._extras = {} if max_turns is None else {"max_turns": max_turns}
        self._env: Any = None
        self._history: list[dict[str, Any]] = []
        self._open = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Make the environment of a seed's row, of any row without a seed, and show its first messages."""
        super().reset(seed=seed, options=options)
        self.close()
        row = self.rows.row(seed, self.np_random)
        self._origin = row["origin"]
        fields = {key: value for key, value in row.items() if key not in (self._prompt, ENV_FIELD, "origin")}
        extras = {**copy.deepcopy(fields), **self._extras}
        self._env = self._make(self._name or row[ENV_FIELD], env_config=self._config, extras=extras)
        # this list is the environment's too: it may change what was said
        self._history, _ = self._env.init(prompt_messages(row, self._prompt))
        self._open = True
        return self._shown(self._history, {})

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a turn.

        Raises:
            ResetNeeded: The episode is over.
        """
        if not self._open:
            raise ResetNeeded("the episode is over; call reset() first")
        said = list(self._history)
        stepped = self._env.step(str(action))
        edited = self._history != said
        self._history += [{"role": "assistant", "content": str(action)}, *stepped["observations"]]
        done, reward = bool(stepped["done"]), stepped["reward"]
        self._open = not done
        if reward is None and not done:  # SkyRL takes one reward of an episode like this
            reward = 0.0
        info = {"success": reward is not None and reward >= 1.0} if done else {"fresh": edited}
        text, info = self._shown(self._history if edited and not done else stepped["observations"], info)
        return text, reward, done, False, info

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _shown(self, messages: Sequence[Mapping[str, Any]], info: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        text = "\n".join(str(message["content"]) for message in messages)
        return text, {**info, "messages": [dict(message) for message in messages], "state": f"{self._origin}\n{text}"}
