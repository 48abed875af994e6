"""Seconds of a step's algorithm work: shaping, advantages, masks, weights and layout on the driver, losses in a rank.

    python benchmarks/algorithms.py            # 1,024 samples × 1,024 tokens, groups of 8

Every estimator and every loss is timed on the same random batch. The driver's part is everything that is
neither generation nor a model: from scored groups to the micro-batches that ranks get. A loss's part is
its forward and backward pass over all trained tokens with correction, KL term and metrics, without the
model, on `--threads` cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from common import Options, finish, repetition_count, say

from roll_like.algorithms.advantages import AdvantageEstimator
from roll_like.algorithms.aggregation import token_weights
from roll_like.algorithms.kl import KLController
from roll_like.algorithms.losses import BatchTokens, LossInputs, PolicyLoss, policy_objective
from roll_like.config.algorithm import AlgorithmConfig, CorrectionConfig, KLConfig
from roll_like.policy_gradient.advantages import Advantages
from roll_like.policy_gradient.objective import policy_batches
from roll_like.registry import ADVANTAGES, LOSSES
from roll_like.types import FloatArray, Group, Part, PolicySample, Scored, Segment, StopReason, Task, Trajectory
from roll_like.values import Metrics

PROMPT = 64
SHAPING = {"overlong": {"buffer_tokens": 128}, "normalise": {"mean": "group", "std": "batch"}, "clip": 5.0}


class InstantPolicy:
    """Energies at once."""

    def score_energies(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        """Return half of the largest for every token."""
        return [np.full(len(sample.token_ids), 0.5, np.float32) for sample in samples]


class InstantCritic:
    """Values at once: the estimator's own work is timed, not the model's."""

    def values(self, samples: Sequence[PolicySample]) -> list[FloatArray]:
        """Return half of nothing for every token."""
        return [np.full(len(sample.token_ids), 0.5, np.float32) for sample in samples]

    def learn(
        self, samples: Sequence[PolicySample], values: Sequence[FloatArray], returns: Sequence[FloatArray]
    ) -> Metrics:
        """Learn nothing."""
        del samples, values, returns
        return {}


def make_groups(samples: int, tokens: int, per_group: int) -> list[Group[Scored]]:
    """Return a step's scored groups with random rewards; every response is `tokens` long."""
    draw = np.random.default_rng(0)
    groups = []
    for index in range(samples // per_group):
        prompt = draw.integers(0, 1000, PROMPT).astype(np.int32)
        task = Task(
            task_id=str(index),
            source="random",
            domain="random",
            messages=(),
            prompt_ids=prompt,
            answer=None,
            metadata={},
            origin="-",
        )
        members = [_member(task, place, tokens, draw) for place in range(per_group + 1)]
        groups.append(Group(task=task, samples=tuple(members[:-1]), failures=(), baselines=(members[-1],)))
    return groups


def _member(task: Task, place: int, tokens: int, draw: np.random.Generator) -> Scored:
    total = PROMPT + tokens
    sampled = np.arange(total) >= PROMPT
    trajectory = Trajectory(
        task=task,
        sample_index=place,
        token_ids=np.concatenate([task.prompt_ids, draw.integers(0, 1000, tokens).astype(np.int32)]),
        sampled=sampled,
        logprobs=np.where(sampled, draw.uniform(-3, 0, total), 0).astype(np.float32),
        turns=np.where(sampled, 0, -1).astype(np.int32),
        parts=(Part(start=0, end=total, prompt_length=PROMPT),),
        segments=(Segment(start=PROMPT, end=total, policy_version=0),),
        text="",
        stop_reason=StopReason.STOP,
    )
    reward = float(draw.uniform())
    return Scored(
        trajectory=trajectory,
        reward=reward,
        rewards={"one": reward},
        details={},
        weights={"one": 1.0},
        turn_rewards=(reward,),  # `grpo_process` has none without steps or turns
    )


def median_seconds(work: Callable[[], object], repetitions: int) -> float:
    """Return the median of a few runs, after one that does not count."""
    work()
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def estimator_named(name: str, algorithm: AlgorithmConfig) -> AdvantageEstimator:
    """Return a built-in estimator, with a critic or a policy if it needs one."""
    plugin = ADVANTAGES.get(name)
    estimator: AdvantageEstimator = plugin(algorithm.advantage)
    if plugin.needs_critic:
        estimator.use(InstantCritic())
    if plugin.needs_policy:
        estimator.observe(InstantPolicy())
    return estimator


def driver_seconds(groups: list[Group[Scored]], tokens: int, repetitions: int) -> dict[str, float]:
    """Return seconds of shaping, advantages, masks and weights for each estimator; and of the layout."""
    seconds: dict[str, float] = {}
    samples: list[PolicySample] = []
    weights: list[FloatArray] = []
    for name in ADVANTAGES.names():
        shaping = {} if name in ("gdpo", "grpo_process") or ADVANTAGES.get(name).nonnegative_rewards else SHAPING
        algorithm = AlgorithmConfig.model_validate(
            {
                "advantage": name,
                "reward_shaping": shaping,
                "advantage_shaping": {"whiten": True, "clip": 5.0},
                "mask": {"truncated": True, "difficulty": {"of": "mean", "low": 0.0, "high": 1.0}},
            }
        )
        advantages = Advantages(
            estimator_named(name, algorithm), algorithm, KLController(algorithm.kl), None, max_response_tokens=tokens
        )

        def work(advantages: Advantages = advantages, algorithm: AlgorithmConfig = algorithm) -> None:
            nonlocal samples, weights
            samples = advantages.assign(groups).samples
            weights = token_weights(samples, algorithm.aggregation, max_response_tokens=tokens)

        seconds[name] = median_seconds(work, repetitions)
        say(f"advantages {name:30} {seconds[name]:.3f} s")
    seconds["layout"] = median_seconds(
        lambda: policy_batches(samples, weights, ranks=2, max_tokens=16384, share_prompts=True), repetitions
    )
    say(f"layout for two ranks {'':20} {seconds['layout']:.3f} s")
    return seconds


def loss_seconds(count: int, tokens: int, repetitions: int) -> dict[str, float]:
    """Return seconds of the objective's forward and backward pass over all tokens, for each loss."""
    draw = torch.Generator().manual_seed(0)
    number = count * tokens
    old_N = -torch.rand(number, generator=draw) * 3
    logprobs_N = (old_N + 0.1 * torch.randn(number, generator=draw)).clamp(max=-1e-4)
    advantages_N = torch.randn(count, generator=draw).repeat_interleave(tokens)
    seconds = {}
    for name in LOSSES.names():
        loss: PolicyLoss = LOSSES.get(name)(LOSSES.get(name).Config())

        def work(loss: PolicyLoss = loss) -> None:
            inputs = LossInputs(
                logprobs_N=logprobs_N.clone().requires_grad_(),
                old_logprobs_N=old_N,
                behaviour_logprobs_N=old_N + 0.01,
                reference_logprobs_N=old_N - 0.01,
                advantages_N=advantages_N,
                weights_N=torch.full((number,), 1 / number),
                sequence_N=torch.arange(count).repeat_interleave(tokens),
                sequences=count,
                turn_N=torch.arange(count).repeat_interleave(tokens),
                turns=count,
                entropy_N=-old_N,
                draws_N=torch.rand(number, generator=draw),
            )
            bound = loss
            if loss.needs_batch:
                current_N = inputs.logprobs_N.detach()
                bound = loss.of_batch(
                    BatchTokens(
                        logprobs_N=current_N, old_logprobs_N=old_N, advantages_N=advantages_N, draws_N=inputs.draws_N
                    )
                )
            objective, _ = policy_objective(
                inputs, bound, KLConfig(use="loss", coefficient=0.01), 0.0, CorrectionConfig()
            )
            objective.backward()

        seconds[name] = median_seconds(work, repetitions)
        say(f"loss       {name:30} {seconds[name]:.3f} s")
    return seconds


def parser() -> Options:
    """Return the options."""
    parser = Options(__doc__, samples=16, tokens=32, repetitions=1)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024, help="sampled tokens of each")
    parser.add_argument("--group", type=int, default=8, help="samples of a group")
    parser.add_argument("--repetitions", type=repetition_count, default=5)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def main() -> None:
    """Time everything and print one line of JSON."""
    arguments = parser().parse_args()
    torch.set_num_threads(arguments.threads)
    groups = make_groups(arguments.samples, arguments.tokens, arguments.group)
    driver = driver_seconds(groups, arguments.tokens, arguments.repetitions)
    losses = loss_seconds(arguments.samples, arguments.tokens, arguments.repetitions)
    layout = driver.pop("layout")
    slowest = max(driver, key=lambda name: driver[name])
    slowest_loss = max(losses, key=lambda name: losses[name])
    finish(
        arguments,
        {
            "benchmark": "algorithms",
            "samples": arguments.samples,
            "tokens": arguments.tokens,
            "advantages_median_seconds": statistics.median(driver.values()),
            "slowest_estimator": slowest,
            "slowest_estimator_seconds": driver[slowest],
            "layout_seconds": layout,
            "driver_seconds": driver[slowest] + layout,
            "loss_median_seconds": statistics.median(losses.values()),
            "slowest_loss": slowest_loss,
            "slowest_loss_seconds": losses[slowest_loss],
        },
    )


if __name__ == "__main__":
    main()
