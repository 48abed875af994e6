"""What every metric is called, what it means and in which unit: one table for console, plots and docs.

A part in angle brackets stands for any name: `rollout/reward/<name>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One row of the table.

    Attributes:
        name: Slash-separated name; `<part>` stands for any part.
        unit: Unit of the value; empty for a plain number.
        label: Short name for the console and for plots.
        description: What it says, in one sentence.
    """

    name: str
    unit: str
    label: str
    description: str

    @property
    def is_pattern(self) -> bool:
        """Whether the name stands for many."""
        return "<" in self.name


_ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("rollout/reward/mean", "", "reward", "Mean reward of the step's samples, before any KL penalty."),
    ("rollout/reward/std", "", "reward spread", "Standard deviation of the step's rewards."),
    ("rollout/reward/<name>", "", "<name>", "Mean of one configured reward, unweighted."),
    ("rollout/tokens", "tokens", "tokens", "Tokens that the policy sampled in the step."),
    ("rollout/samples", "samples", "samples", "Scored samples of the step."),
    ("rollout/failures", "samples", "failures", "Samples that infrastructure lost; they are never trained on."),
    ("rollout/response_length/mean", "tokens", "length", "Mean number of sampled tokens of a response."),
    ("rollout/response_length/max", "tokens", "longest", "Longest response of the step."),
    ("rollout/truncated", "share", "truncated", "Share of responses that the token limit cut."),
    ("train/loss", "", "loss", "Policy loss, penalties included."),
    ("train/kl", "nats/token", "kl", "Distance from the reference model, by the configured estimator."),
    ("train/entropy", "nats/token", "entropy", "Entropy of the policy over sampled positions."),
    ("train/clip_fraction", "share", "clipped", "Share of tokens whose probability ratio the loss clipped."),
    ("train/grad_norm", "", "grad norm", "Global gradient norm before clipping."),
    ("train/lr", "", "lr", "Learning rate of the last optimizer step."),
    ("mismatch/kl", "nats/token", "mismatch", "KL from the inference engine's to the trainer's log-probabilities."),
    ("mismatch/<name>", "", "<name>", "Further figures of the difference between inference engine and trainer."),
    ("staleness/mean", "versions", "staleness", "Mean age of the policy that sampled a token, in weight updates."),
    ("staleness/<name>", "versions", "<name>", "Further figures of the age of the samples."),
    ("eval/avg", "", "eval", "Mean reward over all samples of the evaluation tasks (avg@k)."),
    ("eval/pass", "share", "eval pass", "Share of evaluation tasks that at least one of k samples solves (pass@k)."),
    ("eval/<name>", "", "eval <name>", "Further figures of an evaluation."),
    ("time/step", "s", "step", "Wall time of the whole step."),
    ("time/generate", "s", "generate", "Time in which the inference engines generated."),
    ("time/reward", "s", "reward", "Time in which rewards were computed; may overlap with generation."),
    ("time/logprobs", "s", "log-probs", "Time of forward passes for old or reference log-probabilities."),
    ("time/train", "s", "train", "Time of forward and backward passes and optimizer steps."),
    ("time/sync", "s", "sync", "Time of sending weights to the inference engines, checks included."),
    ("time/evaluate", "s", "evaluate", "Time of an evaluation within the step."),
    ("time/checkpoint", "s", "checkpoint", "Time of writing a checkpoint within the step."),
    ("time/idle", "s", "idle", "The step's time that none of the spans covers."),
    ("time/<name>", "s", "<name>", "Time of another part of the step."),
    ("throughput/tokens_per_second", "tokens/s", "tokens/s", "Sampled tokens of the step over its wall time."),
    ("throughput/samples_per_second", "samples/s", "samples/s", "Samples of the step over its wall time."),
    ("throughput/<name>", "1/s", "<name>", "A further rate."),
    ("memory/rss_gib", "GiB", "memory", "Resident memory of all processes of the run; shared pages count in each."),
    ("memory/gpu_peak_gib", "GiB", "GPU memory", "Largest peak of allocated GPU memory among the workers."),
)

METRICS: tuple[MetricInfo, ...] = tuple(MetricInfo(*row) for row in _ROWS)
_EXACT = {info.name: info for info in METRICS if not info.is_pattern}
_PATTERNS = tuple(
    (re.compile("(.+)".join(re.escape(part) for part in re.split(r"<\w+>", info.name))), info)
    for info in METRICS
    if info.is_pattern
)


@lru_cache(maxsize=1024)
def describe(name: str) -> MetricInfo:
    """Return what is known of a metric; one that is not in the table gets its own name as label.

    >>> describe("rollout/reward/ifeval").label
    'ifeval'
    >>> describe("mine/widgets").label
    'mine/widgets'
    """
    if name in _EXACT:
        return _EXACT[name]
    for pattern, info in _PATTERNS:
        match = pattern.fullmatch(name)
        if match:
            return MetricInfo(name, info.unit, info.label.replace("<name>", match[1]), info.description)
    return MetricInfo(name, "", name, "")


def markdown_table() -> str:
    """Return the table as the metrics page of the documentation shows it."""
    rows = [f"| `{info.name}` | {info.unit or '–'} | {info.description} |" for info in METRICS]
    return "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows])
