"""`check_env` answers whether a policy can be trained in an environment.

It extends Gymnasium's checker by what training on a language model needs: text spaces, seeds that decide
the start, answers that are no action, finite rewards, an end, a state that can be saved. A random and a
scripted policy play it.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from rich.console import Console
from rich.table import Table

from roll_like.data.images import as_text
from roll_like.data.shown_images import read_content, shows_image
from roll_like.envs import probes
from roll_like.envs.probes import GARBAGE, EnvFinding, EnvFindings, Episode, Policy
from roll_like.envs.registration import make_any
from roll_like.envs.returns import observed
from roll_like.envs.scripts import scripted_action
from roll_like.envs.wrappers import AnyEnv, Info
from roll_like.errors import FOREIGN_ERRORS, shortened

_MIN_SEEDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReport:
    """What `check_env` found.

    Attributes:
        env_id: The id, or the environment in words.
        findings: What is wrong or doubtful.
        figures: Of each policy its success rate, mean return and mean turns; times in milliseconds.
        first_observation: What a policy sees first, of the first seed.
    """

    env_id: str
    findings: tuple[EnvFinding, ...]
    figures: Mapping[str, float]
    first_observation: str

    @property
    def errors(self) -> tuple[EnvFinding, ...]:
        """What keeps the environment from being trained on."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    @property
    def warnings(self) -> tuple[EnvFinding, ...]:
        """What is allowed and often not meant."""
        return tuple(finding for finding in self.findings if finding.level == "warning")

    @property
    def ok(self) -> bool:
        """True where there is no error."""
        return not self.errors

    def show(self, console: Console) -> None:
        """Print the first observation, the figures and the findings."""
        if self.first_observation:
            console.print("first observation", style="bold")
            console.print(self.first_observation, markup=False, highlight=False)
            figures = Table("figure", "value", title=self.env_id, title_justify="left")
            for name, value in self.figures.items():
                figures.add_row(name, f"{value:.4g}")
            console.print(figures)
        for finding in self.findings:
            style = "red" if finding.level == "error" else "yellow"
            text = shortened(f"{finding.level}: {finding.check}: {finding.what}")
            console.print(text, style=style, markup=False, highlight=False)
            if finding.fix is not None:
                console.print(f"  fix: {finding.fix}", markup=False, highlight=False)
        console.print(
            f"{self.env_id}: {len(self.errors)} errors, {len(self.warnings)} warnings", markup=False, highlight=False
        )


def check_env(
    env: str | AnyEnv | Callable[[], AnyEnv],
    /,
    *,
    policy: Policy | None = None,
    seeds: Sequence[int] = tuple(range(_MIN_SEEDS)),
    max_turns: int = 200,
    **kwargs: Any,
) -> EnvReport:
    """Try an environment out and report what is wrong with it.

    >>> check_env("roll_like/FrozenLake-v0", size=3).ok
    True

    Args:
        env: A registered id, an environment, or a function that makes one. With an id or a function,
            a second instance is compared with the first.
        policy: A player that should succeed: takes the observation and the info of a turn, returns the answer.
            Default: the environment's own `scripted_action()`, where it has one.
        seeds: Each policy plays one episode of each.
        max_turns: After so many turns an episode is given up.
        kwargs: Options of the environment, where `env` is an id.

    Raises:
        EnvError: The id is unknown, or the environment cannot be made.
    """
    made = functools.partial(make_any, env, **kwargs) if isinstance(env, str) else env
    maker, played = (None, made) if isinstance(made, gymnasium.Env) else (made, made())
    findings = EnvFindings()
    name = str(played) if played.spec is None else played.spec.id
    if not probes.probe_spaces(played, findings) or not probes.probe_parts(played, seeds[0], findings):
        with contextlib.suppress(*FOREIGN_ERRORS):  # what is wrong is known already
            played.close()
        return EnvReport(env_id=name, findings=tuple(findings.found), figures={}, first_observation="")
    figures: dict[str, float] = {}
    first = ""
    with findings.no_exception("episode", "the environment"):
        first, figures["ms per reset"] = _first(played, seeds[0])
        probes.probe_attributes(played, findings)
        probes.probe_gymnasium(played, findings)
        probes.probe_seeds(played, seeds, findings)
        probes.probe_garbage(played, findings)
        _play_all(played, maker, policy, seeds, max_turns, findings, figures)
        probes.probe_pickle(played, findings)
    probes.probe_close(played, findings)
    return EnvReport(env_id=name, findings=tuple(findings.found), figures=figures, first_observation=first)


def _first(env: AnyEnv, seed: int) -> tuple[str, float]:
    began = time.perf_counter()
    observation, info = env.reset(seed=seed)
    seconds = time.perf_counter() - began
    if not shows_image(observation) and "images" not in info:
        return str(observation), 1000 * seconds
    return as_text(read_content(observed(observation, info))), 1000 * seconds


def _play_all(
    env: AnyEnv,
    maker: Callable[[], AnyEnv] | None,
    policy: Policy | None,
    seeds: Sequence[int],
    max_turns: int,
    findings: EnvFindings,
    figures: dict[str, float],
) -> None:
    policies = {"random": _random_policy(env, seeds[0])}
    scripted = policy or _script(env)
    if scripted is not None:
        policies["scripted"] = scripted
    for name, player in policies.items():
        episodes = []
        for seed in seeds:
            episodes.append(probes.probe_episode(env, seed, player, max_turns, name, findings))
            if episodes[-1].ended:
                probes.probe_after_end(env, findings)
            probes.probe_replay(env, seed, episodes[-1], "the same instance", findings)
        if maker is not None:
            with contextlib.closing(maker()) as second:
                probes.probe_replay(second, seeds[0], episodes[0], "another instance", findings)
        figures.update(_figures(name, episodes))
        if name == "scripted" and not all(episode.success for episode in episodes):
            solved = sum(bool(episode.success) for episode in episodes)
            findings.warning("scripted", f"the scripted policy solved {solved} of {len(episodes)} episodes")


def _random_policy(env: AnyEnv, seed: int) -> Policy:
    """Return a player of random actions; every fourth answer is none."""
    env.action_space.seed(seed)
    rng = np.random.default_rng(seed)

    def answer(_observation: str, _info: Info) -> str:
        if rng.random() < 0.25:
            return GARBAGE[int(rng.integers(len(GARBAGE)))]
        return str(env.action_space.sample())

    return answer


def _script(env: AnyEnv) -> Policy | None:
    env.reset(seed=0)
    return (lambda _observation, _info: scripted_action(env)) if scripted_action(env) is not None else None


def _figures(name: str, episodes: Sequence[Episode]) -> dict[str, float]:
    seconds = [second for episode in episodes for second in episode.seconds]
    return {
        f"{name}: success rate": statistics.fmean(bool(episode.success) for episode in episodes),
        f"{name}: mean return": statistics.fmean(episode.total_reward for episode in episodes),
        f"{name}: mean turns": statistics.fmean(len(episode.actions) for episode in episodes),
        f"{name}: ms per step": 1000 * statistics.fmean(seconds) if seconds else 0.0,
    }
