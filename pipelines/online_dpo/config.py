"""The configuration of `pipeline: online_dpo`: preference training on pairs of the policy's own answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from roll_like.builtin.pipelines.dpo.config import PreferenceRunConfig
from roll_like.config.base import ConfigModel, Epochs, PositiveInt, Steps, Violation
from roll_like.config.data import PairData
from roll_like.config.evaluation import EvaluationConfig, ScheduleConfig
from roll_like.config.named import NAME_PATTERN
from roll_like.config.offline import steps_of
from roll_like.config.rollout import AnswerRolloutConfig
from roll_like.config.run import shared_prompt_violations
from roll_like.config.sampling import PromptRunConfig
from roll_like.config.training import ReferenceSection
from roll_like.errors import ConfigError
from roll_like.registry import PIPELINES, PREFERENCE_LOSSES


class OnlineRolloutConfig(AnswerRolloutConfig):
    """What one iteration samples: `prompts_per_iteration × samples_per_prompt` answers."""

    groups_key: ClassVar[str] = "prompts_per_iteration"

    prompts_per_iteration: PositiveInt = Field(description="Groups of answers that one iteration samples.")

    @property
    def groups(self) -> int:
        """Groups that one iteration samples."""
        return self.prompts_per_iteration


class PairsConfig(ConfigModel):
    """Which answers become pairs, and how long one iteration trains on them."""

    select: Literal["best_worst", "random", "all"] = Field(
        default="best_worst",
        description="Which answers of a group become pairs: the best with the worst, two at random whose rewards "
        "differ enough, or all that do.",
    )
    min_margin: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="Smallest difference of the rewards of a pair; equal ones never make a pair. Units of the reward.",
    )
    truncated: Literal["keep", "never_chosen", "drop"] = Field(
        default="keep",
        description="Answers that the token limit cut: paired by their rewards like others, never the chosen one of a "
        "pair, or in no pair.",
    )
    pairs_per_step: PositiveInt = Field(description="Pairs of one step, which is one optimizer update.")
    shuffle: bool = Field(default=True, description="Shuffle each pass over an iteration's pairs, seeded by `seed`.")
    epochs: Epochs | None = Field(
        default=None, description="Passes over the pairs of one iteration; or set `steps`. Default: one."
    )
    steps: Steps | None = Field(default=None, description="Steps of one iteration; or set `epochs`.")

    def steps_for(self, pairs: int, pairs_per_step: int) -> int:
        """Return how many steps an iteration lasts that has so many pairs."""
        return self.steps or max(1, steps_of(self.epochs or 1, pairs, pairs_per_step))


class OnlineReferenceConfig(ReferenceSection):
    """The model that the policy is compared with."""

    mode: Literal["iteration", "cluster", "adapter_off", "copy"] = Field(
        default="iteration",
        description="`iteration`: the policy at the start of each iteration; before the first step on an iteration's "
        "pairs, the trainer computes its log-probabilities of them. `cluster`: a frozen model of its own computes them "
        "in each step, by default the policy before its first step. `adapter_off`: the trainer does, with its adapters "
        "switched off (`training.lora`). `copy`: the trainer does, with a copy of what it trains, kept in host memory; "
        "the one that can move (`sync_steps`).",
    )


class PairEvaluationConfig(ScheduleConfig, PairData):
    """How progress is measured by given pairs: how often the policy prefers the chosen answer."""


@PIPELINES.register("online_dpo")
class OnlineDPOConfig(PromptRunConfig, PreferenceRunConfig):
    """One run of preference training on the policy's own answers: everything a YAML file may say."""

    implementation: ClassVar[str] = "roll_like.builtin.pipelines.online_dpo.pipeline:OnlineDPOPipeline"

    pipeline: Literal["online_dpo"] = Field(default="online_dpo", description="This pipeline.")
    name: str = Field(default="online_dpo", pattern=NAME_PATTERN, description="Name of the run and of its folder.")
    rollout: OnlineRolloutConfig
    pairs: PairsConfig
    reference: OnlineReferenceConfig | None = Field(
        default=None, description="What losses compare with that need a reference; none by default."
    )
    evaluation: EvaluationConfig | None = Field(
        default=None, description="How progress is measured by rewards, on tasks that are not trained on."
    )
    pair_evaluation: PairEvaluationConfig | None = Field(
        default=None, description="How progress is measured by given pairs; none by default."
    )

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        pairs, reference = self.pairs, self.reference
        longest, terms = self.longest_sample, self.longest_sample_terms
        yield from self.training.budget_violations("training", longest, terms, pairs=True)
        yield from self.training.ranks_have_work(pairs.pairs_per_step, "step", "pairs", "raise pairs.pairs_per_step")
        yield from shared_prompt_violations(self.pipeline, self.training)
        if pairs.epochs is not None and pairs.steps is not None:
            yield Violation(
                ("pairs", "steps"),
                "set exactly one of `steps` and `epochs`: both are set; set one of them to null",
            )
        name = self.algorithm.loss.type
        if not PREFERENCE_LOSSES.get(name).paired:
            yield Violation(
                ("algorithm", "loss", "type"),
                f"the policy's answers become pairs, and {name!r} learns from single answers; use a loss on pairs, "
                "such as dpo",
            )
        if reference is not None and reference.mode == "iteration" and reference.path is not None:
            yield Violation(
                ("reference", "path"),
                "with mode: iteration the reference is the policy at the start of each iteration, and no other model; "
                "remove the path, or set mode: cluster",
            )
        yield from self._rollout_violations()

    def _rollout_violations(self) -> Iterator[Violation]:
        """Yield answers that cannot become pairs of an iteration."""
        rollout = self.rollout
        if rollout.samples_per_prompt < 2:
            yield Violation(
                ("rollout", "samples_per_prompt"),
                "a pair takes two answers to one prompt; set it to 2 or more (8 is usual)",
            )
        if rollout.temperature == 0:
            yield Violation(
                ("rollout", "temperature"),
                "0 is greedy: all answers to a prompt are equal, so there is no pair; use 1.0",
            )
        for name, domain in self.domains.items():
            if domain.difficulty is not None:
                yield Violation(
                    ("domains", name, "difficulty"),
                    "every group whose rewards differ makes pairs, whatever its difficulty; remove the key, or use "
                    "pairs.min_margin",
                )
        if rollout.schedule.type == "async":
            yield Violation(
                ("rollout", "schedule", "type"),
                "an iteration trains many steps on pairs of one policy, so its answers are sampled at once; set type: "
                "sync",
            )
        if self.replay is not None:
            yield Violation(
                ("rollout", "schedule", "type"),
                "a step of online DPO trains on pairs of its iteration, which are not recorded; use sync",
            )
        if rollout.save_tokens:
            yield Violation(
                ("rollout", "save_tokens"),
                "rollouts with tokens are recorded to be replayed, and online DPO cannot replay them; remove it and "
                "save_logprobs",
            )

    def evaluating(self, model: str) -> Self:
        """Return the same configuration for another model, which is compared with the reference of this one.

        Raises:
            ConfigError: There is neither an `evaluation` nor a `pair_evaluation` section.
        """
        if self.evaluation is None and self.pair_evaluation is None:
            raise ConfigError(
                "this configuration has neither an `evaluation` nor a `pair_evaluation` section", fix="add one"
            )
        return self.of_model(model) if self.evaluation is None else super().evaluating(model)
