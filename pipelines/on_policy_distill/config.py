"""The configuration of `pipeline: on_policy_distill`: a student samples, teachers say how likely they find it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from roll_like.algorithms.distillation.base import DistillationConfig
from roll_like.algorithms.losses.base import PolicyLoss
from roll_like.config.algorithm import AlgorithmConfig, KLConfig
from roll_like.config.base import (
    ConfigModel,
    Fraction,
    PluginConfig,
    PluginSetting,
    PositiveFloat,
    PositiveInt,
    Violation,
)
from roll_like.config.named import NAME_PATTERN
from roll_like.config.resources import RolePlan
from roll_like.config.rewards import OptionalRewardsConfig
from roll_like.config.sampling import PromptConfig
from roll_like.config.teachers import OptionalTeachers, teacher_roles, teacher_violations
from roll_like.config.training import CopySection, keeps_copies
from roll_like.registry import DISTILLATION_LOSSES, LOSSES, PIPELINES


class DemonstrationConfig(ConfigModel):
    """What teachers read beside the prompt: an example of a good answer (SDFT, arXiv:2601.19897)."""

    field: str = Field(description="Field of a row that holds its demonstration, a text.")
    template: str = Field(
        default="{prompt}\n\nThis is an example of a good answer:\n{demonstration}\n\nAnswer in your own words.",
        description="The user's last message for teachers, of the student's (`{prompt}`) and the row's "
        "`{demonstration}`.",
    )
    max_prompt_tokens: PositiveInt = Field(
        default=1024, description="Most tokens of a prompt with its demonstration; longer ones are an error."
    )

    @model_validator(mode="after")
    def _template_holds_both(self) -> Self:
        for place in ("{prompt}", "{demonstration}"):
            if place not in self.template:
                raise ValueError(f"template has no {place}, so that teachers would not read it; add {place}")
        return self


class TeacherSignalConfig(ConfigModel):
    """How the teachers' opinion of sampled tokens becomes a gradient."""

    common: ClassVar[tuple[str, ...]] = ("use",)

    use: Literal["advantage", "loss"] = Field(
        default="advantage",
        description="`advantage`: the negative reverse KL of each token is its advantage, for the policy loss of "
        "`algorithm` with its ratios and clipping. `loss`: the divergence is added to the loss.",
    )
    signal: Literal["sampled_token", "top_k"] = Field(
        default="sampled_token",
        description="What teachers tell of each token that the student sampled. `sampled_token`: its log-probability, "
        "of which the reverse KL is estimated. `top_k`: their most likely tokens in its place, whose divergence from "
        "the student's distribution is computed; needs `use: loss`.",
    )
    top_k: PositiveInt = Field(
        default=100,
        description="With `signal: top_k`: how many tokens; the size of the vocabulary compares whole distributions.",
    )
    loss: Annotated[PluginConfig, PluginSetting(DISTILLATION_LOSSES)] = Field(
        default_factory=lambda: DISTILLATION_LOSSES.get("reverse_kl").Config(),
        description="With `signal: top_k`: a distillation loss; what becomes of all other tokens is its `tail`.",
    )
    weight: PositiveFloat = Field(default=1.0, description="Weight of the teachers.")
    reward_weight: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Weight of the advantages of `rewards`; 0: rewards are measured, and train nothing."
    )
    estimator: Literal["k1", "abs", "k2", "k3"] = Field(
        default="k1", description="Of the reverse KL at a token, as in `algorithm.kl.estimator`; k1 is unbiased."
    )
    discount: Fraction = Field(
        default=0.0,
        description="How much of the later tokens' reverse KL a token answers for; 0: its own only. With "
        "`use: advantage`.",
    )
    demonstration: DemonstrationConfig | None = Field(
        default=None,
        description="What teachers read and the student does not; nothing by default. Without `teachers` the policy "
        "itself reads it, and is its own teacher.",
    )

    self_teacher: CopySection | None = Field(
        default=None,
        description="Without `teachers`: weights of the policy that is its own teacher, a copy that its ranks keep in "
        "host memory; null: the newest weights. `{}`: those that training started from.",
    )

    @property
    def top_k_settings(self) -> dict[str, Any]:
        """How many tokens teachers tell, and the temperature of their log-probabilities."""
        return {"top_k": self.top_k, "loss_temperature": cast(DistillationConfig, self.loss).temperature}


@PIPELINES.register("on_policy_distill")
class OnPolicyDistillConfig(PromptConfig):
    """One run of on-policy distillation: everything a YAML file may say."""

    common: ClassVar[tuple[str, ...]] = ("distillation", "rewards")

    implementation: ClassVar[str] = "roll_like.builtin.pipelines.on_policy_distill.pipeline:OnPolicyDistillPipeline"

    pipeline: Literal["on_policy_distill"] = Field(default="on_policy_distill", description="This pipeline.")
    name: str = Field(
        default="on_policy_distill", pattern=NAME_PATTERN, description="Name of the run and of its folder."
    )
    teachers: OptionalTeachers = Field(
        default_factory=dict,
        description="Models that the student (`model`) learns from, by names of your choice; none with "
        "`distillation.demonstration`: the policy itself.",
    )
    distillation: TeacherSignalConfig = Field(default_factory=TeacherSignalConfig)
    rewards: OptionalRewardsConfig = Field(default_factory=OptionalRewardsConfig)

    @property
    def roles(self) -> tuple[RolePlan, ...]:
        """The same, with the teachers."""
        return (*super().roles, *teacher_roles(self.resources, self.teachers))

    @property
    def compares_groups(self) -> bool:
        """Whether advantages compare the samples of a group by their rewards: where these train something."""
        return bool(self.rewards.use) and self.distillation.reward_weight > 0

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if self.benchmarks:
            yield Violation(
                ("evaluation", "benchmarks"),
                "this pipeline's evaluation has teachers score the answers, and benchmarks have graders instead; "
                "remove it, and measure the trained model by `roll-like eval --benchmark`",
            )
        yield from self._reward_violations()
        yield from self._teacher_violations()
        yield from self._signal_violations()
        yield from self._demonstration_violations()
        domains = [source.domain_label for source in self.sources]
        if self.teachers:
            yield from teacher_violations(self.teachers, domains, *self.longest_seen)

    @property
    def longest_seen(self) -> tuple[int, str]:
        """Longest sample as teachers see it, in tokens; and the keys that it follows from."""
        demonstration = self.distillation.demonstration
        if demonstration is None:
            return self.longest_sample, self.longest_sample_terms
        longest = demonstration.max_prompt_tokens + self.longest_response
        terms = "distillation.demonstration.max_prompt_tokens + rollout.max_response_tokens"
        return longest, f"{terms} = {demonstration.max_prompt_tokens} + {self.longest_response} = {longest}"

    @property
    def copies(self) -> dict[str, CopySection]:
        """The same, with the weights of a policy that is its own teacher."""
        own = self.distillation.self_teacher
        return super().copies if own is None else {**super().copies, "teacher": own}

    def _self_teacher_violations(self) -> Iterator[Violation]:
        own, section = self.distillation.self_teacher, ("distillation", "self_teacher")
        if own is None:
            return
        if self.teachers:
            yield Violation(
                section,
                f"the teachers are {', '.join(self.teachers)}, so the policy's own weights teach nothing; remove the "
                "key, or `teachers`",
            )
        yield from own.copy_violations(section, self.steps)
        yield from keeps_copies(self.training, section, "set distillation.self_teacher: null")

    def _demonstration_violations(self) -> Iterator[Violation]:
        yield from self._self_teacher_violations()
        if self.teachers:
            return
        if self.distillation.demonstration is None:
            yield Violation(
                ("teachers",),
                "there is nothing to learn from: name a teacher; or, for a policy that teaches itself, set "
                "distillation.demonstration",
            )
            return
        yield from self.training.budget_violations("training", *self.longest_seen)
        if self.evaluation is not None and not self.rewards.use:
            yield Violation(
                ("evaluation",),
                "a policy that teaches itself is no measure of itself, and there are no rewards; add `rewards.use`, or "
                "set evaluation: null",
            )

    def _reward_violations(self) -> Iterator[Violation]:
        weight, algorithm = self.distillation.reward_weight, self.algorithm
        of_rewards: dict[tuple[str, ...], bool] = {
            ("algorithm", "reward_shaping"): algorithm.reward_shaping != type(algorithm.reward_shaping)(),
            ("algorithm", "advantage_shaping"): algorithm.advantage_shaping != type(algorithm.advantage_shaping)(),
            ("algorithm", "kl", "use"): algorithm.kl.use == "reward",
            ("critic",): self.critic is not None,
        }
        for path in (path for path, is_set in of_rewards.items() if is_set and not weight):
            yield Violation(
                path,
                "it changes the advantages of rewards, and distillation.reward_weight is 0: only teachers train the "
                "policy; remove it, or set reward_weight",
            )
        if self.rewards.use:
            return
        if weight:
            yield Violation(
                ("distillation", "reward_weight"),
                f"{weight:g} of the advantages of rewards, and there are none; add `rewards.use`, or set it to 0",
            )
        filtering = [("domains", name) for name, domain in self.domains.items() if domain.drop_zero_variance_groups]
        if self.rollout.drop_zero_variance_groups:
            filtering.append(("rollout", "drop_zero_variance_groups"))
        for key in filtering:
            yield Violation(
                key, "without rewards no group has a signal of its own, so that all would be dropped; set it to false"
            )

    def _teacher_violations(self) -> Iterator[Violation]:
        signal, temperature = self.distillation, self.rollout.temperature
        for name in (name for name, teacher in self.teachers.items() if teacher.other_tokenizer):
            path = ("teachers", name, "other_tokenizer")
            if self.rollout.truncation:
                keys = " and ".join(f"rollout.{key}" for key in self.rollout.truncation)
                yield Violation(
                    path,
                    f"{keys} leaves tokens of the student's vocabulary out, and the teacher has another one, of which "
                    "none would be left out; remove these keys",
                )
            if signal.use == "loss":
                yield Violation(
                    path,
                    "it is compared over stretches of several tokens, and a loss looks at each token alone; set "
                    "distillation.use: advantage" + ", and signal: sampled_token" * (signal.signal == "top_k"),
                )
        if signal.use == "loss" and signal.signal == "sampled_token":
            if self.algorithm.kl.use != "none":
                yield Violation(
                    ("distillation", "use"),
                    "there is room for one divergence beside the advantages, and algorithm.kl has taken it; use "
                    "`advantage`, or set algorithm.kl.use: none",
                )
            if signal.discount:
                yield Violation(
                    ("distillation", "discount"),
                    "a loss looks at each token alone; remove it, or set distillation.use: advantage",
                )
            if self.rollout.schedule.type == "async":
                yield Violation(
                    ("rollout", "schedule", "type"),
                    "with distillation.use: loss the teachers' divergence is not weighted for samples of older "
                    "policies; set distillation.use: advantage, distillation.signal: top_k, or type: sync",
                )
        if temperature == 0:
            yield Violation(
                ("rollout", "temperature"),
                "0 is greedy: there is no distribution to compare with a teacher's; use 1.0",
            )
        if self.evaluation is not None and self.evaluation.temperature != temperature:
            yield Violation(
                ("evaluation", "temperature"),
                f"teachers score at the temperature that training samples at, {temperature:g}, and "
                f"{self.evaluation.temperature:g} would be another distribution; make them equal",
            )

    def _signal_violations(self) -> Iterator[Violation]:
        signal = self.distillation
        loss = LOSSES.get(self.algorithm.loss.type)
        if signal.use == "loss" and loss.selects is not PolicyLoss.selects:
            why = (
                "and the teachers' divergence (distillation.use: loss) would be lost for the others"
                if signal.reward_weight
                else "which are all 0 with distillation.use: loss and reward_weight: 0, so that none would be left"
            )
            yield Violation(
                ("algorithm", "loss", "type"),
                f"{self.algorithm.loss.type} chooses samples by their advantages, {why}; use ppo",
            )
        if signal.signal == "sampled_token":
            for name in signal.changed("top_k", "loss"):
                yield Violation(
                    ("distillation", name),
                    "teachers tell the log-probability of the sampled token alone with signal: sampled_token, so this "
                    "has no effect; set distillation.signal: top_k, or remove it",
                )
            return
        if signal.use != "loss":
            yield Violation(
                ("distillation", "use"),
                "an advantage is a number of the sampled token, and distillation.signal: top_k compares distributions; "
                "set use: loss, or signal: sampled_token",
            )
        for name in signal.changed("estimator", "discount"):
            yield Violation(
                ("distillation", name),
                "it is about sampled tokens, and distillation.signal: top_k computes the divergence of distributions; "
                "remove it, or set signal: sampled_token",
            )
        if cast(DistillationConfig, signal.loss).unmatched_weight:
            yield Violation(
                ("distillation", "loss", "unmatched_weight"),
                "it compares tokens that only one of two vocabularies has, and with distillation.signal: top_k no "
                "teacher has another tokenizer; remove it",
            )
        if cast(DistillationConfig, signal.loss).ce_weight:
            yield Violation(
                ("distillation", "loss", "ce_weight"),
                "the cross-entropy would make what the student itself sampled likelier, whatever teachers say; set "
                "it to 0",
            )

    def with_teacher_in_loss(self) -> Self:
        """Return the configuration whose loss has the divergence of sampled tokens, where that is its place.

        Its gradient at a token is (log π − log π_teacher)·∇ log π, that of the reverse KL (k2), whatever the estimator.
        """
        signal = self.distillation
        if signal.use != "loss" or signal.signal != "sampled_token":
            return self
        kl = KLConfig(
            use="loss",
            estimator=signal.estimator,
            straight_through=signal.estimator != "k2",
            coefficient=signal.weight,
        )
        changes: dict[str, Any] = {"kl": kl}
        algorithm: AlgorithmConfig = self.algorithm.model_copy(update=changes)
        return self.model_copy(update={"algorithm": algorithm})
