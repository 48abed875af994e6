"""What cross-entropy on observations (ECHO) gives where they follow from actions: small policies on a frozen lake.

    python benchmarks/observations.py --figure observations.png

A policy of 16,000 parameters (a GRU over words, nothing pretrained) walks over one map of `roll_like/FrozenLake-v0`
from random starts; it reads what lies around it in words, and where the goal is. What it reads next is a function of
where it stands and where it goes. Advantages, layout and loss are the code of runs, with the `algorithm` of
`configs/recipes/echo.yaml`; optimizer and batch are the same for all coefficients. Without the term (0) the
cross-entropy is not measured.

Printed: the share of episodes that reach the goal, by seed, with mean and sample standard deviation. Episodes of an
evaluation start at random, with the policy's own sampling.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from common import CONFIGS, Options, finish, say
from seeds import overlay, spread, style
from small_policy import LocalEngine
from torch import Tensor, nn

from roll_like.algorithms.kl import KLController
from roll_like.builtin.envs.frozen_lake import MOVES, make_frozen_lake
from roll_like.config.load import load_config
from roll_like.policy_gradient.advantages import Advantages
from roll_like.policy_gradient.objective import PolicyObjective
from roll_like.registry import ADVANTAGES
from roll_like.training.rows import PADDING
from roll_like.types import Group, Part, Scored, Segment, StopReason, Task, Trajectory
from roll_like.values import reduce

#: `ACT` asks for an action; only the words of `MOVES` may follow it.
ACT = "act"
WORDS = [*MOVES, "ice", "hole", "goal", "wall", "Goal", "here", *map(str, range(1, 10)), ACT]
NUMBER = {word: number for number, word in enumerate(WORDS)}
WIDTH = 48
GROUPS, EPISODES = 8, 8
EVALUATED = 128
TASK = Task(
    task_id="0",
    source="lake",
    domain="lake",
    messages=(),
    prompt_ids=np.zeros(0, np.int32),
    answer=None,
    metadata={},
    origin="lake:1",
)


@dataclass
class Curve:
    """What one run did, by step: episodes that reach the goal, and nats per word read."""

    solved: dict[int, float] = field(default_factory=dict)
    read: dict[int, float] = field(default_factory=dict)


@dataclass
class Episode:
    """One walk: its words, which of them the policy chose, and how likely."""

    env: gymnasium.Env[Any, Any]
    words: list[int]
    prompt: int
    chosen: dict[int, float] = field(default_factory=dict)
    success: bool = False
    ended: bool = False


class Walker(nn.Module):
    """Log-probabilities of words, as `PolicyModule` gives those of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, len(WORDS))
        forbidden_VV = torch.zeros(len(WORDS), len(WORDS))
        forbidden_VV[NUMBER[ACT], len(MOVES) :] = -torch.inf
        self.forbidden_VV: Tensor
        self.register_buffer("forbidden_VV", forbidden_VV)

    def logprobs(self, words_BL: Tensor) -> Tensor:
        """Return what may follow each word, shape [B, L, V]."""
        logits_BLV: Tensor = self.out(self.memory(self.words(words_BL))[0]) + self.forbidden_VV[words_BL]
        return logits_BLV.log_softmax(-1)

    def forward(
        self,
        words_BL: Tensor,
        places_BL: Tensor,
        segments_BL: Tensor,
        sources_N: Tensor,
        targets_N: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of each target, shape [N]; a row is one episode."""
        assert temperature == 1, "that of the samples"
        assert not bool(((places_BL[:, 1:] == 0) & (segments_BL[:, 1:] != PADDING)).any()), "one episode a row"
        logprobs_NV = self.logprobs(words_BL.long()).flatten(0, 1)[sources_N]
        entropy_N = -(logprobs_NV.exp() * logprobs_NV.masked_fill(logprobs_NV == -torch.inf, 0.0)).sum(-1)
        return logprobs_NV.gather(1, targets_N[:, None].long())[:, 0], entropy_N


def read(observation: str) -> list[int]:
    """Return an observation's words, and the question for an action."""
    return [NUMBER[word] for word in re.findall(r"\w+", observation.splitlines()[-1])] + [NUMBER[ACT]]


@cache
def made_lake(rows: tuple[str, ...], _: int) -> gymnasium.Env[Any, Any]:
    """Return the lake of one of the episodes that go on at a time."""
    return make_frozen_lake(lake=rows, random_start=True, view="words", style="word", max_turns=2 * len(rows))


def walk(policy: Walker, rows: tuple[str, ...], starts: Sequence[int], draw: torch.Generator) -> list[Episode]:
    """Sample an episode on a map from each start, a seed of the environment."""
    episodes = []
    for place, seed in enumerate(starts):
        env = made_lake(rows, place)
        words = read(str(env.reset(seed=seed)[0]))
        episodes.append(Episode(env, words, len(words)))
    while walking := [episode for episode in episodes if not episode.ended]:
        words_BL = nn.utils.rnn.pad_sequence([torch.tensor(each.words) for each in walking], batch_first=True)
        last = torch.tensor([len(each.words) - 1 for each in walking])
        with torch.no_grad():
            logprobs_BV = policy.logprobs(words_BL)[torch.arange(len(walking)), last]
        actions = torch.multinomial(logprobs_BV.exp(), 1, generator=draw)[:, 0].tolist()
        for episode, action, logprobs_V in zip(walking, actions, logprobs_BV, strict=True):
            episode.chosen[len(episode.words)] = float(logprobs_V[action])
            seen, reward, terminated, truncated, _ = episode.env.step(WORDS[action])
            episode.success |= float(reward) >= 1
            episode.ended = terminated or truncated
            episode.words += [action] if episode.ended else [action, *read(str(seen))]
    return episodes


def scored(episode: Episode, place: int, version: int) -> Scored:
    """Return an episode as what is trained on; its reward is 1 where it reached the goal."""
    length = len(episode.words)
    sampled, logprobs = np.zeros(length, bool), np.zeros(length, np.float32)
    turns = np.full(length, -1, np.int32)
    for turn, (at, logprob) in enumerate(episode.chosen.items()):
        sampled[at], logprobs[at], turns[at] = True, logprob, turn
    trajectory = Trajectory(
        task=TASK,
        sample_index=place,
        token_ids=np.array(episode.words, np.int32),
        sampled=sampled,
        logprobs=logprobs,
        turns=turns,
        parts=(Part(start=0, end=length, prompt_length=episode.prompt),),
        segments=(Segment(start=episode.prompt, end=length, policy_version=version),),
        text="",
        stop_reason=StopReason.STOP,
    )
    reward = float(episode.success)
    return Scored(trajectory=trajectory, reward=reward, rewards={"return": reward}, details={}, weights={"return": 1.0})


def trained(coefficient: float, rows: tuple[str, ...], seed: int, steps: int) -> Curve:
    """Train one policy and return its curve."""
    keys = ["training.share_prompts=false", "training.max_tokens_per_micro_batch=8192"]
    keys.append(f"algorithm.observation_coefficient={coefficient}")
    config: Any = load_config(CONFIGS / "recipes" / "echo.yaml", keys)
    torch.manual_seed(seed)
    policy, draw, curve = Walker(), torch.Generator().manual_seed(seed), Curve()
    kl, most = KLController(config.algorithm.kl), 2 * len(rows)
    objective = PolicyObjective(settings=config.training, algorithm=config.algorithm, max_response_tokens=most, kl=kl)
    engine = LocalEngine(objective, policy)
    estimator = ADVANTAGES.get(config.algorithm.advantage.type)(config.algorithm.advantage)
    advantages = Advantages(estimator, config.algorithm, kl, None, max_response_tokens=most, warmup_steps=0)
    for step in range(steps + 1):
        if step % max(steps // 15, 1) == 0:
            found = walk(policy, rows, range(EVALUATED), draw)
            curve.solved[step] = statistics.fmean(each.success for each in found)
        if step == steps:
            break
        starts = [10_000 * (seed + 1) + step * GROUPS + group for group in range(GROUPS) for _ in range(EPISODES)]
        samples = [scored(each, at % EPISODES, step) for at, each in enumerate(walk(policy, rows, starts, draw))]
        groups = [
            Group(task=TASK, samples=tuple(samples[first : first + EPISODES]), failures=())
            for first in range(0, len(samples), EPISODES)
        ]
        assigned = advantages.assign(groups)
        if assigned.samples:
            metrics = reduce(engine.train_step(assigned.samples))
            if "train/observation_cross_entropy" in metrics:
                curve.read[step + 1] = metrics["train/observation_cross_entropy"]
    return curve


def draw_curves(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw episodes that reach the goal, and nats per word read, mean and range over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=110, layout="constrained")
    solved, words = figure.subplots(1, 2)
    overlay(solved, {name: [each.solved for each in found] for name, found in curves.items()})
    overlay(
        words, {name: [each.read for each in found] for name, found in curves.items() if all(c.read for c in found)}
    )
    style(solved, f"share of episodes that reach the goal: mean and range of {len(next(iter(curves.values())))} seeds")
    style(words, "cross-entropy of words read, nats")
    figure.savefig(path)


def parser() -> Options:
    """Return the command line."""
    options = Options(__doc__, coefficients=[0.1], seeds=[0], steps=2)
    options.add_argument("--coefficients", nargs="+", type=float, default=[1e-6, 0.1, 1.0])
    options.add_argument("--lake", nargs="+", default=["SFFF", "FHFH", "FFFH", "HFFG"], help="rows of the map")
    options.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options.add_argument("--steps", type=int, default=150)
    options.add_argument("--figure", type=Path, help="a PNG file to draw the curves into")
    return options


def main() -> None:
    """Train all, then print the table."""
    given = parser().parse_args()
    torch.set_num_threads(1)
    curves: dict[str, list[Curve]] = {}
    for coefficient in given.coefficients:
        started = time.perf_counter()
        curves[f"{coefficient:g}"] = [
            trained(coefficient, tuple(given.lake), seed, given.steps) for seed in given.seeds
        ]
        say(f"{coefficient:g}: {len(given.seeds)} seeds in {time.perf_counter() - started:.0f} s")
    figures: dict[str, Any] = {"benchmark": "observations"}
    print("\n| coefficient | before | halfway | after | by seed | nats per word read |\n|---|---|---|---|---|---|")
    for name, found in curves.items():
        steps = sorted(found[0].solved)
        before, middle, after = (
            [each.solved[at] for each in found] for at in (steps[0], steps[len(steps) // 2], steps[-1])
        )
        nats = [list(each.read.values())[-1] for each in found if each.read]
        by_seed = ", ".join(f"{value:.2f}" for value in after)
        shown = spread(nats) if nats else "not measured"
        print(f"| {name} | {spread(before)} | {spread(middle)} | {spread(after)} | {by_seed} | {shown} |")
        figures |= {f"{name} before": statistics.fmean(before), f"{name} after": statistics.fmean(after)}
    if given.figure is not None:
        draw_curves(curves, given.figure)
    finish(given, figures)


if __name__ == "__main__":
    main()
