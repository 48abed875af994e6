"""The sections `demonstrations` and `experience_replay`: answers that the policy did not sample in the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll_like.config.base import ConfigModel, PositiveFloat, PositiveInt, Violation
from roll_like.registry import ADVANTAGES, LOSSES

if TYPE_CHECKING:
    from roll_like.config.algorithm import AlgorithmConfig


class OffPolicyConfig(ConfigModel):
    """Demonstrations as samples of their groups: rewards score them, and advantages weigh them (LUFFY)."""

    common: ClassVar[tuple[str, ...]] = ("samples_per_prompt", "only_unsolved")

    samples_per_prompt: PositiveInt = Field(
        default=1,
        description="Demonstrations that join each group, beside the `rollout.samples_per_prompt` that the policy "
        "samples. Rows with fewer give what they have.",
    )
    only_unsolved: bool = Field(
        default=False, description="Only where none of the policy's samples has `solved_reward`."
    )
    solved_reward: float = Field(
        default=1.0, allow_inf_nan=False, description="Reward from which a sample solves its task."
    )
    gamma: PositiveFloat | None = Field(
        default=0.1,
        description="Policy shaping: a token's loss is −A·π/(π + gamma), so that unlikely tokens learn faster. null: "
        "−A·π, the ratio to a behaviour probability of 1.",
    )


class SFTTermConfig(ConfigModel):
    """A supervised loss on the demonstrations of the step's prompts, in the same optimizer steps (CHORD)."""

    common: ClassVar[tuple[str, ...]] = ("coefficient", "combine", "token_weight")

    coefficient: PositiveFloat = Field(
        default=0.1, description="Weight of the supervised loss: μ with `combine: interpolate`, else λ."
    )
    combine: Literal["interpolate", "add"] = Field(
        default="interpolate",
        description="interpolate: (1 − μ)·policy + μ·supervised (CHORD). add: policy + λ·supervised.",
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Steps over which the coefficient grows from 0."
    )
    final_coefficient: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="What the coefficient decays to, along a cosine; default: it stays."
    )
    decay_steps: PositiveInt | None = Field(default=None, description="Steps of the decay, after those of the warm-up.")
    token_weight: Literal["none", "phi"] = Field(
        default="none",
        description="phi: weigh each token by π·(1 − π), without gradient: least where the policy is certain, of the "
        "token or against it (CHORD-φ).",
    )

    @model_validator(mode="after")
    def _schedule_is_whole(self) -> Self:
        if (self.final_coefficient is None) != (self.decay_steps is None):
            missing = "decay_steps" if self.decay_steps is None else "final_coefficient"
            raise ValueError(f"a decay has a final_coefficient and decay_steps, and {missing} is not set")
        if self.final_coefficient == self.coefficient:
            raise ValueError(
                f"a decay from {self.coefficient:g} to {self.coefficient:g} is none; remove final_coefficient and "
                "decay_steps"
            )
        largest = max(self.coefficient, self.final_coefficient or 0.0)
        if self.combine == "interpolate" and largest > 1:
            raise ValueError(
                f"found {largest:g}: with combine: interpolate the policy's loss has the weight 1 − coefficient, which "
                "is at least 0; set it to 1 or less, or combine: add"
            )
        return self


class DemonstrationsConfig(ConfigModel):
    """Answers that rows give, such as a stronger model's; at least one of `off_policy` and `sft` uses them."""

    common: ClassVar[tuple[str, ...]] = ("field", "off_policy", "sft")

    field: str = Field(
        default="demonstration",
        description="Field of a row with its demonstration, an answer as the assistant gives it: a text, or a list of "
        "texts.",
    )
    unusable: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="What to do with rows whose demonstration is missing, empty or longer than "
        "`rollout.max_response_tokens`: refuse them, or train on these prompts without one.",
    )
    off_policy: OffPolicyConfig | None = Field(
        default=None, description="Demonstrations are samples of their groups; not by default."
    )
    sft: SFTTermConfig | None = Field(default=None, description="A supervised loss on them; none by default.")

    @model_validator(mode="after")
    def _has_a_use(self) -> Self:
        if self.off_policy is None and self.sft is None:
            raise ValueError(
                "nothing uses the demonstrations; set off_policy: {} (they join the groups), sft: {} (a supervised "
                "loss), or both"
            )
        return self

    @property
    def wanted(self) -> int:
        """Demonstrations of a row that are used."""
        return 1 if self.off_policy is None else self.off_policy.samples_per_prompt

    def violations(self, algorithm: AlgorithmConfig, steps: int) -> Iterator[Violation]:
        """Yield what demonstrations make no sense with."""
        if self.sft is not None and self.sft.warmup_steps >= steps:
            yield Violation(
                ("demonstrations", "sft", "warmup_steps"),
                f"the coefficient would still grow when the run ends after {steps} steps; set it below steps",
            )
        if self.off_policy is not None:
            yield from off_policy_violations("demonstrations.off_policy", algorithm)
            if LOSSES.get(algorithm.loss.type).ignores_advantages:
                yield Violation(
                    ("algorithm", "loss", "type"),
                    f"{algorithm.loss.type} chooses samples and gives them equal weights, and "
                    "demonstrations.off_policy weighs demonstrations by their advantages; use demonstrations.sft, or "
                    "loss: ppo",
                )
        if algorithm.router_replay:
            yield Violation(
                ("algorithm", "router_replay"),
                "the engine did not compute the demonstrations, so there are no experts to replay for them; set it to "
                "false, or remove the section demonstrations",
            )


class ExperienceReplayConfig(ConfigModel):
    """Right answers of earlier steps join groups again, with the log-probabilities that they had then (RLEP)."""

    common: ClassVar[tuple[str, ...]] = ("samples_per_prompt", "only_unsolved", "max_age")

    samples_per_prompt: PositiveInt = Field(default=1, description="Answers that join a group at most.")
    only_unsolved: bool = Field(
        default=True, description="Only where none of the policy's samples has `solved_reward`."
    )
    solved_reward: float = Field(default=1.0, allow_inf_nan=False, description="Reward from which an answer is kept.")
    max_age: PositiveInt = Field(
        default=100, description="Largest number of steps since an answer was sampled; older ones are forgotten."
    )
    kept_per_prompt: PositiveInt = Field(default=8, description="Answers that are kept of each prompt: the newest.")
    initial: str | None = Field(
        default=None,
        description="Folder of a run with `rollout.save_tokens: true` whose right answers are there from the start, "
        "such as `runs/EARLIER`; none by default.",
    )

    @model_validator(mode="after")
    def _keeps_enough(self) -> Self:
        if self.kept_per_prompt < self.samples_per_prompt:
            raise ValueError(
                f"{self.kept_per_prompt} answers are kept of a prompt, fewer than the {self.samples_per_prompt} that "
                "join a group; raise kept_per_prompt, or lower samples_per_prompt"
            )
        return self

    def violations(self, algorithm: AlgorithmConfig) -> Iterator[Violation]:
        """Yield what replayed answers make no sense with."""
        yield from off_policy_violations("experience_replay", algorithm)
        old = f"with experience_replay answers are up to {self.max_age} steps old, and"
        if algorithm.old_logprobs == "behaviour":
            if not LOSSES.get(algorithm.loss.type).uses_old_policy(algorithm.loss):
                yield Violation(
                    ("algorithm", "old_logprobs"),
                    f"{old} `behaviour` leaves their correction to the loss's ratio, which {algorithm.loss.type} does "
                    "not use; set auto with algorithm.correction.type: truncated (or masked)",
                )
        elif algorithm.correction.type == "none":
            yield Violation(
                ("algorithm", "correction", "type"),
                f"{old} `none` treats them as the current policy's own, which is biased; set truncated (or masked), or "
                "algorithm.old_logprobs: behaviour",
            )


def off_policy_violations(section: str, algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """Yield what no group with off-policy answers makes sense with."""
    name = algorithm.advantage.type
    if not ADVANTAGES.get(name).takes_off_policy:
        able = [each for each in ADVANTAGES.names() if ADVANTAGES.get(each).takes_off_policy]
        yield Violation(
            ("algorithm", "advantage", "type"),
            f"{name!r} takes all samples of a group for the policy's own, and {section} adds others; use one of "
            f"{', '.join(able)}, or remove {section}",
        )
    if algorithm.kl.use == "reward":
        yield Violation(
            ("algorithm", "kl", "use"),
            f"a KL penalty in the reward is computed from what the policy's engine reported, and {section} adds "
            "answers that it did not sample in the step; set use: loss",
        )
